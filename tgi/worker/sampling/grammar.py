"""Grammars: compiles the grammars of rows, advances them over sampled tokens, and computes token bitmasks.

Compilation and bitmasks run in threads of their own. The bitmask of a row is known only after its last token has
reached the host. So the engine launches the next forward pass, the bitmasks are computed meanwhile, and the engine
waits for them before it samples; rows without a grammar in the same step wait too.

For drafts, a copy of the row's matcher advances over them and gives the bitmask after each; the row's own matcher
advances over accepted tokens only. A reasoning budget (reasoning_budget.py) is a bitmask, too.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from numpy.typing import NDArray
from torch import Tensor

from tgi.hub.llguidance_tables import new_matcher
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.worker.sampling.reasoning_budget import ReasoningBudget
from tgi.worker.sampling.token_bitmask import BITS_PER_WORD, GrammarBitmask, allows_token
from tgi.worker.sampling.verification import DraftBatch, count_accepted, row_offsets

log = logging.getLogger(__name__)

MAX_COMPILED_GRAMMARS = 32  # kept for later requests with the same grammar; the least recently used ones go first


@dataclass(slots=True)
class _GrammarRow:
    """The state of one row's grammar and budget. `words` is the bitmask of its next token."""

    matcher: LLMatcher | None  # None: there is no grammar, or it could not be compiled
    words: NDArray[np.int32]  # [W]
    fault: str = ""
    budget: ReasoningBudget | None = None
    draft_words: list[NDArray[np.int32]] = field(default_factory=list)  # the bitmask after each draft that is allowed

    def consume(self, tokens: list[int]) -> None:
        """Advances over tokens. The matcher takes them one by one: then those after its grammar's end, of a row that
        ignores EOS, are no error."""
        for token in tokens:
            if self.matcher is not None:
                self.matcher.consume_token(token)
            if self.budget is not None:
                self.budget.consume(token)

    def scout(self) -> "_GrammarRow":
        """A copy that advances over drafts."""
        matcher, budget = self.matcher, self.budget
        return _GrammarRow(matcher and matcher.deep_copy(), self.words, "", budget and budget.copy())


class GrammarManager:
    """The grammars of an engine's slots. `load_token_table` makes the token table when the first grammar arrives."""

    def __init__(self, load_token_table: Callable[[], LLTokenizer]) -> None:
        self._load_token_table = load_token_table
        self._token_table: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()  # used by the compile thread only
        self._rows: dict[int, Future[_GrammarRow]] = {}  # by slot
        self._advanced: Future[None] | None = None
        # Two threads, so that running rows do not wait for the compilation of a new grammar.
        self._compile_thread = ThreadPoolExecutor(1, "compile")
        self._bitmask_thread = ThreadPoolExecutor(1, "masks")
        self._executor: LLExecutor | None = None

    def reset(self) -> None:
        self._rows.clear()

    def assign_slot(self, slot: int, params: SamplingParams, generated: list[int]) -> None:
        """Assigns a request and the ids that it has generated so far to the slot. Starts to compile its grammar, if it
        has one, while its prompt is computed."""
        if params.grammar or params.reasoning_close_ids:
            self._rows[slot] = self._compile_thread.submit(self._new_row, params, generated)
        else:
            self._rows.pop(slot, None)

    def compute_draft_bitmasks(self, drafts: DraftBatch, copied: torch.cuda.Event | None) -> None:
        """Starts to compute the bitmasks after drafts, whose ids are on the host once `copied` has happened."""
        futures = [self._rows.get(slot) for slot in drafts.slots.tolist()]
        if any(futures):
            self._advanced = self._bitmask_thread.submit(
                self._advance_over_drafts, futures, drafts, copied, self._advanced
            )

    def wait_for_bitmask(self, slots: NDArray[np.int64], drafts: DraftBatch | None = None) -> GrammarBitmask | None:
        """Waits for the bitmasks of the next tokens of these slots; None if none of them has a grammar. With drafts,
        includes the bitmasks after each draft."""
        if not self._rows:
            return None
        chosen = [row for row, slot in enumerate(slots.tolist()) if slot in self._rows]
        if not chosen:
            return None
        if self._advanced is not None:
            self._advanced.result()
        states = [self._rows[int(slots[row])].result() for row in chosen]
        faults = [""] * len(slots)
        for row, state in zip(chosen, states, strict=True):
            faults[row] = state.fault
        if drafts is None:
            return GrammarBitmask(np.array(chosen), np.stack([state.words for state in states]), faults)
        reach, offsets = drafts.lengths.copy(), row_offsets(drafts.lengths)
        reach[chosen] = [1 + len(state.draft_words) for state in states]
        positions = np.concatenate([offsets[row] + np.arange(reach[row]) for row in chosen])
        words = np.stack([words for state in states for words in (state.words, *state.draft_words)])
        return GrammarBitmask(positions, words, faults, reach)

    def accept_sampled(
        self,
        slots: NDArray[np.int64],
        bitmask: GrammarBitmask,
        ids: Tensor,
        copied: torch.cuda.Event | None,
        drafts: DraftBatch | None = None,
    ) -> None:
        """Advances the grammars of slots [D] over the sampled `ids` [E], which are on the host once `copied` has
        happened, and starts to compute the bitmasks of the next tokens."""
        states = [(row, self._rows[slot].result()) for row, slot in enumerate(slots.tolist()) if slot in self._rows]
        self._advanced = self._bitmask_thread.submit(
            self._advance_over_sampled, states, ids, copied, drafts, bitmask.reach
        )

    # In the compile thread

    def _new_row(self, params: SamplingParams, generated: list[int]) -> _GrammarRow:
        try:
            if self._token_table is None:
                self._token_table = self._load_token_table()
                self._executor = LLExecutor()
            table = self._token_table
            words = np.full(-(-table.vocab_size // BITS_PER_WORD), -1, np.int32)
            matcher = self._compile(table, params.grammar) if params.grammar else None
            state = _GrammarRow(matcher, words, budget=ReasoningBudget.from_params(params, table.decode_bytes))
            state.consume(generated)
            self._compute_bitmasks([state])
        except Exception as error:
            log.exception("a grammar could not be compiled")
            size = 1 if self._token_table is None else -(-self._token_table.vocab_size // BITS_PER_WORD)
            state = _GrammarRow(None, np.full(size, -1, np.int32), f"its grammar could not be compiled: {error}")
        return state

    def _compile(self, table: LLTokenizer, grammar: str) -> LLMatcher:
        compiled = self._compiled.pop(grammar, None)
        if compiled is None:
            compiled = new_matcher(table, grammar)
            while len(self._compiled) >= MAX_COMPILED_GRAMMARS:
                self._compiled.popitem(last=False)
        self._compiled[grammar] = compiled
        return compiled.deep_copy()

    # In the bitmask thread

    def _advance_over_drafts(
        self,
        futures: list[Future[_GrammarRow] | None],
        drafts: DraftBatch,
        copied: torch.cuda.Event | None,
        previous: Future[None] | None,
    ) -> None:
        if previous is not None:
            previous.result()  # done, because there is one thread; raises if it has failed
        if copied is not None:
            copied.synchronize()
        scouts = []
        for future, tokens in zip(futures, drafts.ids_by_row(), strict=True):
            if future is None:
                continue
            state = future.result()
            state.draft_words = []  # a failed step may have left some
            if not state.fault:
                scouts.append((state, state.scout(), tokens))
        for at in range(max((len(tokens) for _, _, tokens in scouts), default=0)):
            scouts = [one for one in scouts if at < len(one[2]) and allows_token(one[1].words, one[2][at])]
            for _, scout, tokens in scouts:
                scout.consume([tokens[at]])
            self._compute_bitmasks([scout for _, scout, _ in scouts])
            scouts = [one for one in scouts if not one[1].fault]
            for state, scout, _ in scouts:
                state.draft_words.append(scout.words)

    def _advance_over_sampled(
        self,
        states: list[tuple[int, _GrammarRow]],
        ids: Tensor,
        copied: torch.cuda.Event | None,
        drafts: DraftBatch | None,
        reach: NDArray[np.int64] | None,
    ) -> None:
        if copied is not None:
            copied.synchronize()
        tokens, offsets, counts = ids.tolist(), np.arange(len(ids)), np.ones(len(ids), np.int64)
        if drafts is not None:
            offsets, counts = row_offsets(drafts.lengths), count_accepted(drafts, ids, reach)
        for row, state in states:
            state.draft_words = []
            if not state.fault:
                state.consume(tokens[offsets[row] : offsets[row] + counts[row]])
        self._compute_bitmasks([state for _, state in states if not state.fault])

    # In either thread

    def _compute_bitmasks(self, states: list[_GrammarRow]) -> None:
        """Computes the bitmasks of these rows, on all cores if there are several rows."""
        if not states:
            return
        assert self._executor is not None
        words = np.full((len(states), len(states[0].words)), -1, np.int32)
        pairs = [(state.matcher, row) for row, state in enumerate(states) if state.matcher is not None]
        if pairs:
            self._executor.unsafe_compute_mask_ptr(pairs, words.ctypes.data, words.shape[1] * 4, len(states))
        for state, row_words in zip(states, words, strict=True):
            if state.budget is not None and (forced := state.budget.forced) is not None and row_words.any():
                row_words[:] = 0
                row_words.view(np.uint32)[forced // BITS_PER_WORD] = 1 << forced % BITS_PER_WORD
            state.words = row_words
            if state.matcher is not None and state.matcher.is_error():
                state.fault = f"its grammar cannot continue: {state.matcher.get_error().splitlines()[0]}"
            elif not row_words.any():
                state.fault = "its grammar cannot continue: it asks for text that this model's tokens cannot write"
