"""Drafts change nothing but the number of steps: every token, logprob and list of likeliest has the same bits."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLMatcher

from tests.models import model as make
from tests.parameters import accepted
from tests.worker.cpu_kernels.available import our_kernels
from tests.worker.driving import Drawn, Guess, drive, make_engine
from tests.worker.test_fake_worker import slot, step
from tests.worker.test_sampling import bad_words, bias
from tgi.hub.llguidance_tables import piece_table, token_table
from tgi.hub.model_config import read_model_config
from tgi.hub.tokenizer_files import read_tokenizer
from tgi.microkernel.messages.codec import unpack_float32, unpack_int32
from tgi.microkernel.messages.protocol import MAX_DRAFT_TOKENS, encode
from tgi.microkernel.messages.sampling_params import NEUTRAL, PARAMETERS, SamplingParams
from tgi.worker.engine.engine import TorchEngine
from tgi.worker.engine.interface import BadStep
from tgi.worker.models.draft_head import DraftHead
from tgi.worker.models.interface import Model
from tgi.worker.models.loader import build_model, read_model_spec
from tgi.worker.sampling.grammar import GrammarManager
from tgi.worker.sampling.sampler import SampledTokens as Draws
from tgi.worker.sampling.token_bitmask import allows_token
from tgi.worker.sampling.top_logprobs import TopLogprobs
from tgi.worker.sampling.verification import DraftBatch, count_accepted, keep_accepted

pytestmark = pytest.mark.slow

COUNT = 20
VOCAB = 512


def load(kind: str = "llama", dtype: str = "float32", native: bool = False, **options: Any) -> Model:
    directory = make(kind, **options)
    kernels = our_kernels(read_model_spec(directory, dtype)) if native else None
    return build_model(directory, dtype, "cpu", lambda stage, percent: None, kernels=kernels)


def engine_of(model: Model, draft: Model | DraftHead | None = None, **how: int) -> TorchEngine:
    """An engine with a token table for grammars."""
    engine = make_engine(model, draft=draft, **how)
    card = read_model_config(make("llama"))
    engine._grammars = engine._slots._grammars = GrammarManager(
        lambda: token_table(read_tokenizer(card), card.eos_token_ids, VOCAB)
    )
    return engine


def requests(seed: int, count: int = 9) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts, and parameters of all kinds."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(6, VOCAB) for _ in range(rng.choice([1, 5, 15, 16, 30]))] for _ in range(count)]
    samplings = [
        SamplingParams(
            rng.randrange(1 << 60),
            choice=rng.choice([0, 2]),
            **{name: rng.choice([NEUTRAL[name], NEUTRAL[name], *accepted(name)]) for name in PARAMETERS},
            **(bias({7: 3.0, 300: -100.0}) if rng.random() < 0.3 else {}),  # type: ignore[arg-type]
            **(bad_words([9], *([a, b] for a in range(20) for b in range(20))) if rng.random() < 0.3 else {}),
            grammar=str(LLMatcher.grammar_from_regex(rng.choice(["[a-z ]{3,30}", "(ab|cd){9,20}", ".*"])))
            if rng.random() < 0.3
            else "",
        )
        for _ in range(count)
    ]
    samplings[:3] = [SamplingParams(1), SamplingParams(2, top_n=2), SamplingParams(3, do_sample=True)]
    return prompts, samplings


def guesses(kind: str, truth: list[Drawn], most: int = 7) -> Guess:
    """Drafts that are right, wrong, or right at first; or that only some rows have."""
    rng = random.Random(kind)

    def guess(row: int, drawn: int) -> list[int]:
        ids = list(truth[row].ids[drawn : drawn + rng.randint(1, most)])
        if kind == "some" and rng.random() < 0.5:
            return []
        if kind == "wrong" or (kind != "right" and rng.random() < 0.6):
            at = 0 if kind == "wrong" else rng.randrange(len(ids))
            ids[at] = (ids[at] + rng.randrange(1, VOCAB)) % VOCAB
        return ids

    return guess


@pytest.mark.parametrize(
    ("kind", "dtype", "native"),
    [
        ("llama", "float32", False),
        ("qwen3", "bfloat16", False),
        ("lfm2", "bfloat16", True),  # the rest have recurrent layers, whose state is taken back
        ("mamba2", "float32", True),
        ("falcon_h1", "float32", False),
        ("qwen3_next", "float32", False),
        ("qwen3_5_text", "float32", True),
    ],
)
def test_drafts_change_no_token(kind: str, dtype: str, native: bool) -> None:
    engine = engine_of(load(kind, dtype, native))
    prompts, samplings = requests(5)
    truth = drive(engine, prompts, COUNT, samplings)
    hows = (("partly", 9, 3), ("some", 4096, 2), ("right", 4096, 0), ("wrong", 7, 1))
    for how, chunk, stagger in hows if kind == "llama" else hows[:2]:
        assert drive(engine, prompts, COUNT, samplings, chunk, stagger, guesses(how, truth)) == truth, how


def test_accepted_drafts_save_steps() -> None:
    engine = engine_of(load())
    prompts, samplings = requests(6, 4)
    truth = drive(engine, prompts, COUNT, samplings)
    asked = []

    def guess(row: int, drawn: int) -> list[int]:
        asked.append(row)
        return truth[row].ids[drawn : drawn + 4]

    assert drive(engine, prompts, COUNT, samplings, guess=guess) == truth
    assert sorted(asked) == sorted([0, 1, 2, 3] * (COUNT // 5))


def test_a_request_may_fill_its_slot_with_drafts() -> None:
    engine = make_engine(load(), pages=4)  # 64 tokens
    prompt = list(range(10, 50))
    (truth,) = drive(engine, [prompt], 24)
    assert drive(engine, [prompt], 24, guess=lambda row, drawn: truth.ids[drawn : drawn + 9]) == [truth]
    engine.reset()
    new, pages = [slot(0, prompt + truth.ids[:20])], [(0, page) for page in range(4)]
    first = engine.launch(step(1, [(0, 0, 60, 1)], new, pages, 1, [4], truth.ids[20:]))
    result = engine.collect(first)
    assert result.counts == b"\x05"
    assert unpack_int32(result.token_ids)[:4] == truth.ids[20:]


def test_drafts_in_a_step_with_prompt_logprobs() -> None:
    engine = make_engine(load())
    ids, other = list(range(30, 70)), list(range(100, 110))
    (truth,) = drive(engine, [ids], 6)
    asking = slot(1, other, encode(SamplingParams(0, top_n=2)))._replace(prompt_logprobs_from=1, prompt_top_n=2)
    engine.reset()
    alone = engine.collect(engine.launch(step(1, [(1, 0, 10, 1)], [asking], [(1, 9)])))
    engine.reset()
    pages = [(0, page) for page in range(3)]
    first = unpack_int32(engine.collect(engine.launch(step(1, [(0, 0, 40, 1)], [slot(0, ids)], pages))).token_ids)
    rows = [(0, 40, 1, 1), (1, 0, 10, 1)]
    result = engine.collect(engine.launch(step(2, rows, [asking], [(1, 9)], 1, [3, 0], [*truth.ids[1:3], 0])))
    assert result.counts == b"\x03\x01"
    assert first + unpack_int32(result.token_ids)[:3] == truth.ids[:4]
    assert unpack_int32(result.token_ids)[3:] == unpack_int32(alone.token_ids)
    assert unpack_float32(result.logprobs)[3:] == unpack_float32(alone.logprobs)
    assert (result.prompt_logprobs, result.prompt_top_ids) == (alone.prompt_logprobs, alone.prompt_top_ids)
    assert (result.top_counts[12:], result.top_ids) == (alone.top_counts, alone.top_ids)


def test_bitmasks_end_at_the_first_draft_that_the_grammar_forbids() -> None:
    """Rows without a grammar, with one that forbids the second draft, and with one that the tokens 1 and 2 (a and b)
    cannot complete: the tokens sampled before count, and the fault is reported in the next step."""
    grammars = GrammarManager(lambda: piece_table([b"a", b"b"]))
    for number, pattern in ((3, "a[ab]*"), (5, "[ab]{2}(c|d)x")):
        grammars.assign_slot(number, SamplingParams(0, grammar=str(LLMatcher.grammar_from_regex(pattern))), [])
    slots = np.array([0, 3, 5])
    drafted = DraftBatch(slots, np.array([2, 3, 5]), torch.tensor([1, 2, 2, 2, 1, 2, 2]))
    grammars.compute_draft_bitmasks(drafted, None)
    masks = grammars.wait_for_bitmask(slots, drafted)
    assert masks is not None
    assert masks.faults == [""] * 3
    assert masks.reach is not None
    assert masks.reach.tolist() == [2, 1, 2]
    assert masks.rows.tolist() == [2, 5, 6]
    assert [[token for token in range(3) if allows_token(words, token)] for words in masks.words] == [
        [1],
        [1, 2],
        [1, 2],
    ]
    ids = torch.tensor([0, 0, 1, 0, 0, 2, 1, 2, 2, 0])
    assert count_accepted(drafted, ids, masks.reach).tolist() == [1, 1, 2]
    grammars.accept_sampled(slots, masks, ids, None, drafted)
    after = grammars.wait_for_bitmask(slots)
    assert after is not None
    assert [bool(fault) for fault in after.faults] == [False, False, True]
    assert allows_token(after.words[0], 2)


def test_a_failed_step_does_not_advance_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load()
    engine = engine_of(model)
    asked = SamplingParams(3, do_sample=True, grammar=str(LLMatcher.grammar_from_regex("[a-z ]{30}")))
    (truth,) = drive(engine, [[9, 8, 7]], 8, [asked])
    engine.reset()
    pages = [(0, 0)]
    engine.collect(engine.launch(step(1, [(0, 0, 3, 1)], [slot(0, [9, 8, 7], encode(asked))], pages)))
    with monkeypatch.context() as patch:
        patch.setattr(model, "forward_head", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.launch(step(2, [(0, 3, 1, 1)], drafts=[4], draft_ids=truth.ids[1:5]))
    result = engine.collect(engine.launch(step(3, [(0, 3, 1, 1)], drafts=[2], draft_ids=truth.ids[1:3])))
    assert (result.counts, unpack_int32(result.token_ids)) == (b"\x03", truth.ids[1:4])


def test_which_sampled_tokens_are_kept() -> None:
    """Rows of 1, 3, 2 and 4 positions; the second accepts one draft, the third all, the last reaches two positions."""
    drafted = DraftBatch(np.arange(4), np.array([1, 3, 2, 4]), torch.tensor([5, 6, 7, 1, 2, 3]))
    ids = torch.tensor([9, 5, 8, 8, 7, 4, 1, 2, 3, 0])
    assert count_accepted(drafted, ids, None).tolist() == [1, 2, 2, 4]
    kept = count_accepted(drafted, ids, np.array([1, 3, 2, 2]))
    assert kept.tolist() == [1, 2, 2, 2]
    tops = TopLogprobs(np.array([1, 2, 3, 7, 8]), torch.arange(5), torch.arange(5)[:, None], torch.zeros(5, 1))
    found = keep_accepted(drafted, Draws(ids, ids.float(), tops), kept)
    assert found.ids.tolist() == [9, 5, 8, 7, 4, 1, 2]
    assert found.top_logprobs is not None
    assert found.top_logprobs.rows.tolist() == [1, 2, 6]
    assert found.top_logprobs.counts.tolist() == [0, 1, 3]


@pytest.mark.parametrize(
    ("how", "fault"),
    [
        ({"drafts": [1, 1], "draft_ids": [5, 6]}, "rows and drafts differ in length"),
        ({"drafts": [-1]}, "a number of drafts -1"),
        ({"drafts": [MAX_DRAFT_TOKENS + 1]}, "is not within 0 to 254"),
        ({"drafts": [2], "draft_ids": [5]}, "1 draft_ids for 2 drafts"),
        ({"drafts": [1], "draft_ids": [VOCAB]}, "draft id 512"),
        ({"drafts": [14], "draft_ids": [5] * 14}, "beyond its pages: positions 3 to 17"),
        ({"drafts": [1]}, "no draft model"),
    ],
)
def test_bad_drafts_are_rejected_and_other_steps_continue(how: dict[str, Any], fault: str) -> None:
    engine = make_engine(load())
    (truth,) = drive(engine, [[7, 8, 9]], 2)
    engine.reset()
    engine.collect(engine.launch(step(1, [(0, 0, 3, 1)], [slot(0, [7, 8, 9])], [(0, 0)])))
    with pytest.raises(BadStep, match=fault):
        engine.launch(step(2, [(0, 3, 1, 1)], **how))
    assert unpack_int32(engine.collect(engine.launch(step(3, [(0, 3, 1, 1)]))).token_ids) == truth.ids[1:]


def test_drafts_are_no_more_than_states_are_kept_before() -> None:
    engine = make_engine(load("lfm2"), slots=1)
    most = engine.limits.groups[-1].drafts
    engine.collect(engine.launch(step(1, [(0, 0, 3, 1)], [slot(0, [7, 8, 9])], [(0, 0)])))
    with pytest.raises(BadStep, match=f"{most + 1} drafts; states are kept for {most}"):
        engine.launch(step(2, [(0, 3, 1, 1)], drafts=[most + 1], draft_ids=[5] * (most + 1)))


def test_drafts_need_a_sampling_row() -> None:
    engine = make_engine(load())
    with pytest.raises(BadStep, match="does not sample"):
        engine.launch(step(1, [(0, 0, 1, 0)], [slot(0, [7, 8])], [(0, 0)], drafts=[1], draft_ids=[5]))
