"""The draft model: accepted where it thinks like the served one, and never of any effect on what is drawn."""

import random
from collections.abc import Callable

import pytest

from tests.worker.driving import drive, make_engine
from tests.worker.test_scripted import slot, step
from tests.worker.test_speculation import COUNT, VOCAB, engine_of, load, requests
from tgi.kernel.pack import ints
from tgi.worker.drafting import LAG


def asking(count: int, among: float = 1.0) -> tuple[list[int], Callable[[int, int], int]]:
    """Lets the draft model find so many drafts, for this share of the rows; and whose turn it was."""
    rng, asked = random.Random(count), []

    def guess(row: int, drawn: int) -> int:
        if rng.random() >= among:
            return 0
        asked.append(row)
        return count

    return asked, guess


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_thinks_the_same_is_always_right(dtype: str) -> None:
    """Also at random, and with all that changes a distribution, but grammars."""
    model = load("llama", dtype)
    engine = engine_of(model, draft=model)
    prompts, samplings = requests(7)
    samplings = [sampling._replace(grammar="") for sampling in samplings]
    truth = drive(engine_of(model), prompts, COUNT, samplings)
    for count, chunk, stagger in ((4, 4096, 0), (3, 7, 2)):
        asked, guess = asking(count)
        assert drive(engine, prompts, COUNT, samplings, chunk, stagger, guess) == truth
        assert sorted(asked) == sorted([*range(len(prompts))] * (COUNT // (count + 1)))


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_another_model_changes_nothing(kind: str) -> None:
    """One that is sometimes right and one that never is, for rows with and without grammars, in slots that others had."""
    model = load()
    prompts, samplings = requests(8)
    truth = drive(engine_of(model), prompts, COUNT, samplings)
    engine = engine_of(model, draft=load(kind, "bfloat16" if kind == "llama" else "float32"))
    wasted = []
    for among, chunk, stagger in ((1.0, 4096, 0), (0.5, 7, 3)):
        asked, guess = asking(3, among)
        assert drive(engine, prompts, COUNT, samplings, chunk, stagger, guess) == truth
        wasted.append(len(asked) / (among * COUNT * len(prompts)))
    assert (wasted[0] < 0.6) == (kind == "llama")


def test_one_with_fewer_or_more_tokens() -> None:
    """Models of one tokenizer may be padded to different sizes."""
    narrow, wide = load(), load(vocab=VOCAB + 70)
    prompts, samplings = requests(9, 3)
    for model, draft in ((narrow, wide), (wide, narrow)):
        truth = drive(make_engine(model), prompts, 12, samplings[:3])
        assert model is narrow or any(token >= VOCAB for one in truth for token in one.ids)
        assert drive(make_engine(model, draft=draft), prompts, 12, samplings[:3], guess=asking(3)[1]) == truth


def test_it_comes_along_where_nothing_is_drafted() -> None:
    """Through prompts, and through tokens that are decoded without drafts, which it computes some at a time; then it is
    as right as ever. So it is behind a cached prefix, and in a slot that another request had."""
    model = load()
    engine = make_engine(model, draft=model)
    prompt = list(range(20, 52))
    (truth,) = drive(engine, [prompt], 2 * LAG + 6)
    after = 2 * LAG + 1
    asked: list[int] = []

    def guess(row: int, drawn: int) -> int:
        asked.append(drawn)
        return 4 if drawn >= after else 0

    assert drive(engine, [prompt], 2 * LAG + 6, guess=guess) == [truth]
    assert asked[-1] == after  # all 4 drafts were accepted, and one more token came
    # Another request finds the prompt's two pages and more in the cache, and takes the slot.
    known = prompt + truth.ids[: LAG - 1]
    size = engine.limits.page_size
    cached = len(known) // size * size - size
    pages = [(0, engine._slots.page_table[0, at]) for at in range(cached // size)] + [(0, 200 + at) for at in range(4)]
    new = [slot(0, known)]
    result = engine.collect(engine.launch(step(99, [(0, cached, len(known) - cached, 1)], new, pages, 1, [4])))
    assert result.counts == b"\x05"
    assert ints(result.ids) == truth.ids[LAG - 1 : LAG + 4]


def test_a_step_that_fails_leaves_it_where_it_can_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model, draft = load(), load()
    engine = make_engine(model, draft=draft)
    prompt = list(range(20, 52))
    (truth,) = drive(engine, [prompt], 10)
    engine.reset()
    pages = [(0, page) for page in range(3)]
    engine.collect(engine.launch(step(1, [(0, 0, 32, 1)], [slot(0, prompt)], pages)))

    def fail(*_: object) -> None:
        raise RuntimeError("it fails")

    for failing in (model, draft, model):
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="it fails"):
            patch.setattr(failing, "forward", fail)
            engine.launch(step(2, [(0, 32, 1, 1)], drafts=[3]))
    result = engine.collect(engine.launch(step(5, [(0, 32, 1, 1)], drafts=[3])))
    assert result.counts == b"\x04"
    assert ints(result.ids) == truth.ids[1:5]
