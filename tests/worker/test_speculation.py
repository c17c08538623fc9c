"""Drafts change nothing but the number of steps: every token, logprob and list of likeliest has the same bits."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLMatcher

from tests.models import model as make
from tests.worker.driving import Drawn, Guess, drive, make_engine
from tests.worker.test_sampling import bad_words, bias
from tests.worker.test_scripted import slot, step
from tgi.hub.card import read_card
from tgi.hub.grammar import piece_table, token_table
from tgi.hub.tokens import read_tokenizer
from tgi.kernel.messages import MOST_DRAFTS, Sampling, encode
from tgi.kernel.pack import floats, ints
from tgi.worker.batch import Model
from tgi.worker.engine import TorchEngine
from tgi.worker.grammar import Grammars
from tgi.worker.load import build_model
from tgi.worker.masks import allows
from tgi.worker.sampling import Drawn as Draws
from tgi.worker.slots import BadStep
from tgi.worker.tops import Tops
from tgi.worker.verify import Drafted, count_kept, keep

COUNT = 40
VOCAB = 512


def load(kind: str = "llama", dtype: str = "float32", **options: Any) -> Model:
    return build_model(make(kind, **options), dtype, "cpu", lambda stage, percent: None)


def engine_of(model: Model, draft: Model | None = None, **how: int) -> TorchEngine:
    """An engine that knows grammars."""
    engine = make_engine(model, draft=draft, **how)
    card = read_card(make("llama"))
    engine._grammars = engine._slots._grammars = Grammars(
        lambda: token_table(read_tokenizer(card), card.eos_token_ids, VOCAB)
    )
    return engine


def requests(seed: int, count: int = 9) -> tuple[list[list[int]], list[Sampling]]:
    """Prompts, and parameters of all kinds."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(6, VOCAB) for _ in range(rng.choice([1, 5, 15, 16, 30]))] for _ in range(count)]
    samplings = [
        Sampling(
            rng.randrange(1 << 60),
            do_sample=rng.random() < 0.5,
            temperature=rng.choice([1.0, 0.5, 1.5]),
            top_k=rng.choice([0, 0, 20]),
            top_p=rng.choice([1.0, 1.0, 0.9]),
            typical_p=rng.choice([1.0, 1.0, 0.8]),
            repetition_penalty=rng.choice([1.0, 1.2]),
            frequency_penalty=rng.choice([0.0, 0.5]),
            count_penalty=rng.choice([0.0, 0.7]),
            presence_penalty=rng.choice([0.0, -0.7]),
            top_n=rng.choice([0, 0, 3]),
            choice=rng.choice([0, 2]),
            min_p=rng.choice([0.0, 0.0, 0.1]),
            **(bias({7: 3.0, 300: -100.0}) if rng.random() < 0.3 else {}),  # type: ignore[arg-type]
            **(bad_words([9], *([a, b] for a in range(20) for b in range(20))) if rng.random() < 0.3 else {}),
            grammar=str(LLMatcher.grammar_from_regex(rng.choice(["[a-z ]{3,30}", "(ab|cd){9,20}", ".*"])))
            if rng.random() < 0.3
            else "",
        )
        for _ in range(count)
    ]
    samplings[:3] = [Sampling(1), Sampling(2, top_n=2), Sampling(3, do_sample=True)]
    return prompts, samplings


def guesses(kind: str, truth: list[Drawn], most: int = 7) -> Guess:
    """Drafts that are right, wrong, or right for a while; or that are there for some rows alone."""
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


@pytest.mark.parametrize(("kind", "dtype"), [("llama", "float32"), ("qwen3", "bfloat16")])
def test_drafts_change_nothing(kind: str, dtype: str) -> None:
    engine = engine_of(load(kind, dtype))
    prompts, samplings = requests(5)
    truth = drive(engine, prompts, COUNT, samplings)
    for how, chunk, stagger in (("right", 4096, 0), ("wrong", 7, 1), ("partly", 9, 3), ("some", 4096, 2)):
        assert drive(engine, prompts, COUNT, samplings, chunk, stagger, guesses(how, truth)) == truth, how


def test_right_drafts_save_steps() -> None:
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
    assert ints(result.ids)[:4] == truth.ids[20:]


def test_beside_a_prompt_that_tells_its_logprobs() -> None:
    engine = make_engine(load())
    ids, other = list(range(30, 70)), list(range(100, 110))
    (truth,) = drive(engine, [ids], 6)
    asking = slot(1, other, encode(Sampling(0, top_n=2)))._replace(prompt_from=1, prompt_top_n=2)
    engine.reset()
    alone = engine.collect(engine.launch(step(1, [(1, 0, 10, 1)], [asking], [(1, 9)])))
    engine.reset()
    pages = [(0, page) for page in range(3)]
    first = ints(engine.collect(engine.launch(step(1, [(0, 0, 40, 1)], [slot(0, ids)], pages))).ids)
    rows = [(0, 40, 1, 1), (1, 0, 10, 1)]
    result = engine.collect(engine.launch(step(2, rows, [asking], [(1, 9)], 1, [3, 0], [*truth.ids[1:3], 0])))
    assert result.counts == b"\x03\x01"
    assert first + ints(result.ids)[:3] == truth.ids[:4]
    assert ints(result.ids)[3:] == ints(alone.ids)
    assert floats(result.logprobs)[3:] == floats(alone.logprobs)
    assert (result.prompt_logprobs, result.prompt_top_ids) == (alone.prompt_logprobs, alone.prompt_top_ids)
    assert (result.top_counts[12:], result.top_ids) == (alone.top_counts, alone.top_ids)


def test_masks_behind_drafts_reach_as_far_as_the_grammar_goes() -> None:
    """Rows without a grammar, with one that the second draft breaks, and with one that the tokens 1 and 2 (a and b)
    cannot go on to write: what was drawn before counts all the same, and the fault comes in the step behind."""
    grammars = Grammars(lambda: piece_table([b"a", b"b"]))
    for number, pattern in ((3, "a[ab]*"), (5, "[ab]{2}(c|d)x")):
        grammars.occupy(number, str(LLMatcher.grammar_from_regex(pattern)), [])
    slots = np.array([0, 3, 5])
    drafted = Drafted(slots, np.array([2, 3, 5]), torch.tensor([1, 2, 2, 2, 1, 2, 2]))
    grammars.look_ahead(drafted, None)
    masks = grammars.masks(slots, drafted)
    assert masks is not None
    assert masks.faults == [""] * 3
    assert masks.reach is not None
    assert masks.reach.tolist() == [2, 1, 2]
    assert masks.rows.tolist() == [2, 5, 6]
    assert [[token for token in range(3) if allows(words, token)] for words in masks.words] == [[1], [1, 2], [1, 2]]
    ids = torch.tensor([0, 0, 1, 0, 0, 2, 1, 2, 2, 0])
    assert count_kept(drafted, ids, masks.reach).tolist() == [1, 1, 2]
    grammars.drawn(slots, masks, ids, None, drafted)
    after = grammars.masks(slots)
    assert after is not None
    assert [bool(fault) for fault in after.faults] == [False, False, True]
    assert allows(after.words[0], 2)


def test_a_failed_step_leaves_grammars_where_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load()
    engine = engine_of(model)
    asked = Sampling(3, do_sample=True, grammar=str(LLMatcher.grammar_from_regex("[a-z ]{30}")))
    (truth,) = drive(engine, [[9, 8, 7]], 8, [asked])
    engine.reset()
    pages = [(0, 0)]
    engine.collect(engine.launch(step(1, [(0, 0, 3, 1)], [slot(0, [9, 8, 7], encode(asked))], pages)))
    with monkeypatch.context() as patch:
        patch.setattr(model, "forward", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.launch(step(2, [(0, 3, 1, 1)], drafts=[4], draft_ids=truth.ids[1:5]))
    result = engine.collect(engine.launch(step(3, [(0, 3, 1, 1)], drafts=[2], draft_ids=truth.ids[1:3])))
    assert (result.counts, ints(result.ids)) == (b"\x03", truth.ids[1:4])


def test_what_is_kept() -> None:
    """Rows of 1, 3, 2 and 4 places; the second accepts one draft, the third all, the last cannot draw behind two."""
    drafted = Drafted(np.arange(4), np.array([1, 3, 2, 4]), torch.tensor([5, 6, 7, 1, 2, 3]))
    ids = torch.tensor([9, 5, 8, 8, 7, 4, 1, 2, 3, 0])
    assert count_kept(drafted, ids, None).tolist() == [1, 2, 2, 4]
    kept = count_kept(drafted, ids, np.array([1, 3, 2, 2]))
    assert kept.tolist() == [1, 2, 2, 2]
    tops = Tops(np.array([1, 2, 3, 7, 8]), torch.arange(5), torch.arange(5)[:, None], torch.zeros(5, 1))
    found = keep(drafted, Draws(ids, ids.float(), tops), kept)
    assert found.ids.tolist() == [9, 5, 8, 7, 4, 1, 2]
    assert found.tops is not None
    assert found.tops.rows.tolist() == [1, 2, 6]
    assert found.tops.counts.tolist() == [0, 1, 3]


@pytest.mark.parametrize(
    ("how", "fault"),
    [
        ({"drafts": [1, 1], "draft_ids": [5, 6]}, "rows and drafts differ in length"),
        ({"drafts": [-1]}, "a number of drafts -1"),
        ({"drafts": [MOST_DRAFTS + 1]}, "is not within 0 to 254"),
        ({"drafts": [2], "draft_ids": [5]}, "1 draft_ids for 2 drafts"),
        ({"drafts": [1], "draft_ids": [VOCAB]}, "draft id 512"),
        ({"drafts": [14], "draft_ids": [5] * 14}, "beyond its pages: positions 3 to 17"),
        ({"drafts": [1]}, "no draft model"),
    ],
)
def test_bad_drafts_are_refused_and_nothing_else_suffers(how: dict[str, Any], fault: str) -> None:
    engine = make_engine(load())
    (truth,) = drive(engine, [[7, 8, 9]], 2)
    engine.reset()
    engine.collect(engine.launch(step(1, [(0, 0, 3, 1)], [slot(0, [7, 8, 9])], [(0, 0)])))
    with pytest.raises(BadStep, match=fault):
        engine.launch(step(2, [(0, 3, 1, 1)], **how))
    assert ints(engine.collect(engine.launch(step(3, [(0, 3, 1, 1)]))).ids) == truth.ids[1:]


def test_drafts_need_a_draw() -> None:
    engine = make_engine(load())
    with pytest.raises(BadStep, match="does not draw"):
        engine.launch(step(1, [(0, 0, 1, 0)], [slot(0, [7, 8])], [(0, 0)], drafts=[1], draft_ids=[5]))
