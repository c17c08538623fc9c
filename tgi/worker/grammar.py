"""The grammars of the rows: compiled, moved on by what was drawn, and turned into masks, in threads of their own.

A mask is known only when the row's last token has reached the host. So the engine starts the next forward pass, asks
for the masks behind it, and draws when they are there. Rows without a grammar in the same step wait with them.

The masks behind drafts come from a copy of the row's matcher that goes ahead; the row's own follows what was drawn.
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

from tgi.hub.grammar import matcher
from tgi.worker.masks import BITS, Masks, allows
from tgi.worker.verify import Drafted, begins, count_kept

log = logging.getLogger(__name__)

# So many compiled grammars are kept for the next request that has one of them.
KEPT = 32


@dataclass(slots=True)
class _Row:
    """Where the text of one row is in its grammar. `words` is the mask of its next token."""

    matcher: LLMatcher | None  # None: it could not be made
    words: NDArray[np.int32]  # [W]
    fault: str = ""
    ahead: list[NDArray[np.int32]] = field(default_factory=list)  # behind each draft, as far as they are allowed


class Grammars:
    """The rows of an engine that have a grammar, by slot. `load` makes the token table, which the first one needs."""

    def __init__(self, load: Callable[[], LLTokenizer]) -> None:
        self._load = load
        self._table: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()  # touched by the compiling thread alone
        self._rows: dict[int, Future[_Row]] = {}
        self._moved: Future[None] | None = None
        # Two threads, so that rows under way need not wait for the grammar of a new one.
        self._compiling = ThreadPoolExecutor(1, "compile")
        self._moving = ThreadPoolExecutor(1, "masks")
        self._executor: LLExecutor | None = None

    def reset(self) -> None:
        """Forgets all rows."""
        self._rows.clear()

    def occupy(self, slot: int, grammar: str, generated: list[int]) -> None:
        """A request comes to this slot, with what it has generated so far. Its grammar, if any, is compiled from now
        on, while its prompt is computed."""
        if grammar:
            self._rows[slot] = self._compiling.submit(self._begin, grammar, generated)
        else:
            self._rows.pop(slot, None)

    def look_ahead(self, drafted: Drafted, there: torch.cuda.Event | None) -> None:
        """These slots have drafts, on the host once `there` has happened: from then on the masks behind them are
        computed."""
        futures = [self._rows.get(slot) for slot in drafted.slots.tolist()]
        if any(futures):
            self._moved = self._moving.submit(self._look_ahead, futures, drafted, there, self._moved)

    def masks(self, slots: NDArray[np.int64], drafted: Drafted | None = None) -> Masks | None:
        """The masks for the next tokens of these slots, as soon as they are there; None if none has a grammar. With
        drafts, also those for the tokens behind these."""
        if not self._rows:
            return None
        chosen = [at for at, slot in enumerate(slots.tolist()) if slot in self._rows]
        if not chosen:
            return None
        if self._moved is not None:
            self._moved.result()
        rows = [self._rows[int(slots[at])].result() for at in chosen]
        faults = [""] * len(slots)
        for at, row in zip(chosen, rows, strict=True):
            faults[at] = row.fault
        if drafted is None:
            return Masks(np.array(chosen), np.stack([row.words for row in rows]), faults)
        reach, firsts = drafted.lengths.copy(), begins(drafted.lengths)
        reach[chosen] = [1 + len(row.ahead) for row in rows]
        places = np.concatenate([firsts[at] + np.arange(reach[at]) for at in chosen])
        return Masks(places, np.stack([words for row in rows for words in (row.words, *row.ahead)]), faults, reach)

    def drawn(
        self,
        slots: NDArray[np.int64],
        masks: Masks,
        ids: Tensor,
        there: torch.cuda.Event | None,
        drafted: Drafted | None = None,
    ) -> None:
        """These slots [D] were given masks and have drawn `ids` [E], on the host once `there` has happened: from then
        on the masks of the tokens behind them are computed."""
        rows = [(at, self._rows[slot].result()) for at, slot in enumerate(slots.tolist()) if slot in self._rows]
        self._moved = self._moving.submit(self._move, rows, ids, there, drafted, masks.reach)

    # In the compiling thread

    def _begin(self, grammar: str, generated: list[int]) -> _Row:
        try:
            if self._table is None:
                self._table = self._load()
                self._executor = LLExecutor()
            row = _Row(self._compile(self._table, grammar), np.zeros(-(-self._table.vocab_size // BITS), np.int32))
            row.matcher.consume_tokens(generated)  # type: ignore[union-attr]
            self._fill([row])
        except Exception as error:
            log.exception("a grammar could not be made ready")
            row = _Row(None, np.full(1, -1, np.int32), f"its grammar could not be made ready: {error}")
        return row

    def _compile(self, table: LLTokenizer, grammar: str) -> LLMatcher:
        known = self._compiled.pop(grammar, None)
        if known is None:
            known = matcher(table, grammar)
            while len(self._compiled) >= KEPT:
                self._compiled.popitem(last=False)
        self._compiled[grammar] = known
        return known.deep_copy()

    # In the moving thread

    def _look_ahead(
        self,
        futures: list[Future[_Row] | None],
        drafted: Drafted,
        there: torch.cuda.Event | None,
        moved: Future[None] | None,
    ) -> None:
        if moved is not None:
            moved.result()  # it is done, and must not have failed
        if there is not None:
            there.synchronize()
        scouts = []
        for future, tokens in zip(futures, drafted.of_rows(), strict=True):
            if future is None:
                continue
            row = future.result()
            row.ahead = []  # a step that failed may have left some
            if row.matcher is not None and not row.fault:
                scouts.append((row, _Row(row.matcher.deep_copy(), row.words), tokens))
        for at in range(max((len(tokens) for _, _, tokens in scouts), default=0)):
            scouts = [one for one in scouts if at < len(one[2]) and allows(one[1].words, one[2][at])]
            for _, scout, tokens in scouts:
                scout.matcher.consume_token(tokens[at])  # type: ignore[union-attr]
            self._fill([scout for _, scout, _ in scouts])
            scouts = [one for one in scouts if not one[1].fault]
            for row, scout, _ in scouts:
                row.ahead.append(scout.words)

    def _move(
        self,
        rows: list[tuple[int, _Row]],
        ids: Tensor,
        there: torch.cuda.Event | None,
        drafted: Drafted | None,
        reach: NDArray[np.int64] | None,
    ) -> None:
        if there is not None:
            there.synchronize()
        drawn, firsts, counts = ids.tolist(), np.arange(len(ids)), np.ones(len(ids), np.int64)
        if drafted is not None:
            firsts, counts = begins(drafted.lengths), count_kept(drafted, ids, reach)
        for at, row in rows:
            row.ahead = []
            if row.matcher is not None and not row.fault:
                for token in drawn[firsts[at] : firsts[at] + counts[at]]:
                    row.matcher.consume_token(token)
        self._fill([row for _, row in rows if not row.fault])

    # In either

    def _fill(self, rows: list[_Row]) -> None:
        """Computes the masks of these rows, on all cores if there are several."""
        if not rows:
            return
        assert self._executor is not None
        words = np.zeros((len(rows), len(rows[0].words)), np.int32)
        pairs = [(row.matcher, at) for at, row in enumerate(rows) if row.matcher is not None]
        self._executor.unsafe_compute_mask_ptr(pairs, words.ctypes.data, words.shape[1] * 4, len(rows))
        for row, mask in zip(rows, words, strict=True):
            row.words = mask
            if row.matcher is not None and row.matcher.is_error():
                row.fault = f"its grammar cannot go on: {row.matcher.get_error().splitlines()[0]}"
            elif not mask.any():
                row.fault = "its grammar cannot go on: it asks for text that this model's tokens cannot write"
