"""Steps that go on where the one before has ended draw what they would draw if they were laid out."""

from typing import Any

import pytest

from tests.worker.driving import drive, make_engine
from tests.worker.test_native_models import load, prompts
from tests.worker.test_scripted import slot, step
from tgi.kernel.messages import Result, Sampling, Step, encode
from tgi.kernel.pack import ints
from tgi.worker.batch import Model
from tgi.worker.engine import TorchEngine
from tgi.worker.repeated import FURTHER_PAGES
from tgi.worker.slots import BadStep

COUNT = 80  # tokens, over several pages
SAMPLED = Sampling(7, temperature=0.8)


class Watched:
    """Stands before an engine's own, and counts the steps that went on; or lets none."""

    def __init__(self, engine: TorchEngine, never: bool = False) -> None:
        self.went_on = 0
        self._inner, self._never = engine._repeated, never
        engine._repeated = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def result(self, step: Step) -> Result | None:
        if self._never:
            self._inner.forget()
        result = self._inner.result(step)
        self.went_on += result is not None
        return result


# An embedding of its own, one that is scaled, windows and caps, and what is usual.
@pytest.mark.parametrize("kind", ["llama", "phi3", "gemma2"])
def test_the_same_is_drawn(kind: str) -> None:
    model = load(kind, native=True)
    laid_out, engine = make_engine(model, pages=64), make_engine(model, pages=64)
    never, watched = Watched(laid_out, never=True), Watched(engine)
    # Rows come and go; and steps with a row that samples are others.
    for samplings in ([Sampling(0)] * 4, [Sampling(0), Sampling(0), Sampling(0), SAMPLED]):
        arguments = prompts(), COUNT, samplings, 23, 12
        assert drive(engine, *arguments) == drive(laid_out, *arguments)
    assert never.went_on == 0
    assert watched.went_on > COUNT // 2


@pytest.fixture(scope="module")
def model() -> Model:
    return load("llama", native=True)


def begun(model: Model, prompt: int = 9) -> tuple[TorchEngine, Watched, list[Any]]:
    """An engine with two requests behind four steps, and what it has launched."""
    engine = make_engine(model, pages=64)
    watched = Watched(engine)
    new = [slot(at, list(range(3 + at, 3 + at + prompt)), encode(Sampling(0))) for at in range(2)]
    pending = [engine.launch(step(1, [(0, 0, prompt, 1), (1, 0, prompt, 1)], new, [(0, 5), (1, 8)]))]
    pending += [engine.launch(step(2 + at, [(0, prompt + at, 1, 1), (1, prompt + at, 1, 1)])) for at in range(3)]
    assert watched.went_on == 2
    return engine, watched, pending


def test_pages_may_come_on_the_way(model: Model) -> None:
    engine, never = make_engine(model, pages=64), make_engine(model, pages=64)
    watched, _ = Watched(engine), Watched(never, never=True)
    size, starts = engine.limits.page_size, [9, 25]
    new = [slot(at, list(range(3, 3 + start)), encode(Sampling(0))) for at, start in enumerate(starts)]
    both = [(0, 0, starts[0], 1), (1, 0, starts[1], 1)]
    count = (FURTHER_PAGES + 2) * size
    for number in range(count):
        pages = [(at, number + at) for at, (_, start, _, _) in enumerate(both) if start % size == 0]
        asked = step(number + 1, both, new, [(at, page % 64) for at, page in pages])
        results = [one.collect(one.launch(asked)) for one in (engine, never)]
        assert results[0][:5] == results[1][:5]
        new, both = [], [(at, starts[at] + number, 1, 1) for at in range(2)]
    assert count - watched.went_on < 6


def test_results_may_be_collected_later(model: Model) -> None:
    engine, _, pending = begun(model)
    together = [ints(engine.collect(one).ids) for one in pending]
    alone = drive(make_engine(model, pages=64), [list(range(3, 12)), list(range(4, 13))], 4)
    assert [list(ids) for ids in zip(*together, strict=True)] == [one.ids for one in alone]


def test_a_step_that_does_not_fit_is_refused_and_the_others_go_on(model: Model) -> None:
    engine, watched, _ = begun(model)
    other, _, _ = begun(model)
    for wrong in ([(0, 11, 1, 1), (1, 12, 1, 1)], [(0, 13, 1, 1), (1, 13, 1, 1)], [(0, 12, 2, 1), (1, 12, 1, 1)]):
        with pytest.raises(BadStep):
            engine.launch(step(5, wrong))
    for at in range(12, 20):
        both = step(at, [(0, at, 1, 1), (1, at, 1, 1)])
        assert engine.collect(engine.launch(both))[2:5] == other.collect(other.launch(both))[2:5]
    assert watched.went_on > 4


def test_a_row_that_goes_on_alone_finds_what_was_drawn(model: Model) -> None:
    engine, *_ = begun(model)
    alone = engine.collect(engine.launch(step(5, [(1, 12, 1, 1)])))
    again = engine.collect(engine.launch(step(6, [(0, 12, 1, 1)])))
    other, _, _ = begun(model)
    both = other.collect(other.launch(step(5, [(0, 12, 1, 1), (1, 12, 1, 1)])))
    assert ints(again.ids) + ints(alone.ids) == ints(both.ids)


def test_beyond_its_pages_no_row_goes_on(model: Model) -> None:
    engine, watched, _ = begun(model)
    for at in range(12, 32):
        assert not engine.collect(engine.launch(step(at, [(0, at, 1, 1), (1, at, 1, 1)]))).error
    assert watched.went_on == 22
    with pytest.raises(BadStep, match="goes beyond its pages"):
        engine.launch(step(40, [(0, 32, 1, 1), (1, 32, 1, 1)]))
    engine.reset()
    with pytest.raises(BadStep, match="is empty"):
        engine.launch(step(41, [(0, 32, 1, 1), (1, 32, 1, 1)]))


def test_a_row_that_lost_its_adapter_is_laid_out_and_those_after_it_go_on(model: Model) -> None:
    engine = make_engine(model, pages=64)
    watched = Watched(engine)
    lost = encode(Sampling(0, adapter="lost", adapter_digest=b"1"))
    for at, sampling in ((1, lost), (0, encode(Sampling(0)))):
        assert watched.went_on == 0
        new = [slot(at, [5, 6, 7], sampling)]
        results = [engine.collect(engine.launch(step(1, [(at, 0, 3, 1)], new, [(at, at)])))]
        results += [engine.collect(engine.launch(step(2 + n, [(at, 3 + n, 1, 1)]))) for n in range(4)]
        assert all(bool(result.faults) == (at == 1) for result in results)
    assert watched.went_on == 3
