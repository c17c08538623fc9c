"""Reasoning budgets: the marker that is forced after the budget, in any batch, with drafts and after a resumption."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from tests.worker.driving import drive
from tests.worker.test_speculation import VOCAB, engine_of, load
from tgi.hub.llguidance_tables import piece_table
from tgi.microkernel.messages.codec import INT32, pack_column
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.worker.sampling.grammar import GrammarManager
from tgi.worker.sampling.reasoning_budget import ReasoningBudget
from tgi.worker.sampling.token_bitmask import allows_token
from tgi.worker.sampling.verification import DraftBatch

PIECES = [b"a", b"\n", b"<", b">", b"<o", b"o>", b"/", b"c", b"</", b"c>", b">\n", b"a<", b"</c>", b"<o>"]
CLOSE, OPEN = [PIECES.index(part) for part in (b"</", b"c", b">")], [PIECES.index(part) for part in (b"<", b"o>")]


def budgeted(budget: int, close: list[int] = CLOSE, special: tuple[int, ...] = (), **fields: object) -> SamplingParams:
    opening = fields.pop("opening", [])
    return SamplingParams(
        fields.pop("seed", 0),  # type: ignore[arg-type]
        reasoning_budget=budget,
        reasoning_open_ids=pack_column(INT32, opening),  # type: ignore[arg-type]
        reasoning_close_ids=pack_column(INT32, close),
        reasoning_special_ids=pack_column(INT32, special),
        **fields,  # type: ignore[arg-type]
    )


def decode(ids: list[int]) -> bytes:
    return b"".join(PIECES[one] for one in ids)


@given(
    tokens=st.lists(st.integers(0, len(PIECES) - 1), max_size=40),
    budget=st.integers(0, 8),
    opened=st.booleans(),
)
@settings(max_examples=400, deadline=None)
def test_what_is_forced_follows_from_the_text(tokens: list[int], budget: int, opened: bool) -> None:
    """Whatever tokens write the markers: at most `budget` tokens of reasoning and the marker, then all is free."""
    params = budgeted(budget, opening=[] if opened else OPEN)
    state = ReasoningBudget.from_params(params, decode)
    assert state is not None
    ids: list[int] = []
    forced_from = None
    for token in tokens:
        if (forced := state.forced) is not None and forced_from is None:
            forced_from = len(ids)
        copy = state.copy()
        ids.append(token if forced is None else forced)
        state.consume(ids[-1])
        assert copy.forced == forced
    text = decode(ids)
    began = 0 if opened else next((n for n in range(1, len(ids) + 1) if b"<o>" in decode(ids[:n])), len(ids) + 1)
    if not opened and not text.lstrip(b"\n").startswith(b"<o>"):
        assert forced_from is None
        return
    closed = next((n for n in range(began, len(ids) + 1) if b"</c>" in decode(ids[began:n])), None)
    if forced_from is not None:
        assert forced_from == began + budget
        assert closed is None or closed <= forced_from + len(CLOSE)
    elif closed is None:
        assert len(ids) <= began + budget
    if closed is not None and closed < len(ids):
        assert state.forced is None


def test_a_special_marker_is_not_equalled_by_text_and_reasoning_may_repeat() -> None:
    special, opening = PIECES.index(b"</c>"), PIECES.index(b"<o>")
    params = budgeted(4, [special], (special, opening), opening=[opening], reasoning_repeats=True)
    state = ReasoningBudget.from_params(params, decode)
    assert state is not None
    found: list[int | None] = []
    for token in (0, opening, *CLOSE, special, 0, *OPEN, opening, 0, special, opening):
        found.append(state.forced)
        state.consume(token)
    assert [*found, state.forced] == [*[None] * 10, special, special, None, special]


def test_masks_with_a_grammar_and_drafts() -> None:
    grammars = GrammarManager(lambda: piece_table(PIECES))
    close = [one + 1 for one in CLOSE]  # the table's first token is EOS
    grammar = str(LLMatcher.grammar_from_regex("(?s:.)*"))
    grammars.assign_slot(0, budgeted(2, close), [])
    grammars.assign_slot(1, budgeted(3, close, grammar=grammar), [])
    slots, ids = np.array([0, 1]), torch.tensor([1, 1, *close[:2], 1, 1, 1, close[1]])
    drafts = DraftBatch(slots, np.array([5, 5]), ids)
    grammars.compute_draft_bitmasks(drafts, None)
    masks = grammars.wait_for_bitmask(slots, drafts)
    assert masks is not None
    assert masks.reach is not None
    allowed = [[token for token in range(1, 15) if allows_token(words, token)] for words in masks.words]
    assert masks.reach.tolist() == [5, 4]  # the last draft of the second row is forbidden
    forced = [one[0] if len(one) == 1 else None for one in allowed]
    assert forced == [None, None, *close, None, None, None, close[0]]
    prefixes: list[tuple[list[int], int | None]] = [
        ([1], None), ([1, 1], close[0]), ([1, 1, *close[:2]], close[2]), ([1, 1, *close], None)
    ]  # fmt: skip
    for generated, expected in prefixes:
        grammars.assign_slot(0, budgeted(2, close), generated)  # a request that is resumed
        resumed = grammars.wait_for_bitmask(slots[:1])
        assert resumed is not None
        left = [token for token in range(1, 15) if allows_token(resumed.words[0], token)]
        assert left == ([expected] if expected is not None else [*range(1, 15)])


@pytest.mark.parametrize("seed", range(2))
def test_answers_in_any_batch_with_drafts_and_after_a_resumption(seed: int) -> None:
    rng = random.Random(seed)
    engine = engine_of(load())
    close, count = [300, 301, 302], 16
    samplings = [
        budgeted(rng.randrange(12), close, (300, 301, 302), seed=rng.randrange(1 << 40), do_sample=rng.random() < 0.7)
        for _ in range(5)
    ] + [SamplingParams(7, do_sample=True)]
    prompts = [[rng.randrange(6, VOCAB) for _ in range(rng.choice([1, 15, 30]))] for _ in samplings]
    together = drive(engine, prompts, count, samplings, chunk=4, stagger=1)
    for prompt, sampling, drawn in zip(prompts, samplings, together, strict=True):
        if sampling.reasoning_close_ids:
            at = sampling.reasoning_budget
            assert drawn.ids[at : at + 3] == close
            assert drawn.logprobs[at : at + 3] == [0.0] * 3
        assert drive(engine, [prompt], count, [sampling])[0] == drawn

    def guess(request: int, done: int) -> list[int]:
        """Drafts that are right up to some point."""
        right = together[request].ids[done : done + rng.randrange(5)]
        return [*right[:-1], rng.randrange(VOCAB)] if right else []

    assert drive(engine, prompts, count, samplings, guess=guess) == together
