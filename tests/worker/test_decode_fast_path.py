"""The decode fast path: the same tokens as steps that build a batch, and when it is not taken."""

from typing import Any

import pytest

from tests.worker.cpu_kernels.test_models import load, prompts
from tests.worker.driving import drive, make_engine
from tests.worker.test_fake_worker import slot, step
from tgi.microkernel.messages.codec import unpack_int32
from tgi.microkernel.messages.protocol import Step, StepResult, encode
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.worker.engine.decode_fast_path import SPARE_PAGES
from tgi.worker.engine.engine import TorchEngine
from tgi.worker.engine.interface import BadStep
from tgi.worker.models.interface import Model

COUNT = 80  # tokens, over several pages
SAMPLED = SamplingParams(7, temperature=0.8)


class CountingFastPath:
    """Replaces an engine's DecodeFastPath: counts the steps that take it, or prevents all of them."""

    def __init__(self, engine: TorchEngine, never: bool = False) -> None:
        self.fast_steps = 0
        self._inner, self._never = engine._decode_fast_path, never
        engine._decode_fast_path = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def try_step(self, step: Step) -> StepResult | None:
        if self._never:
            self._inner.reset()
        result = self._inner.try_step(step)
        self.fast_steps += result is not None
        return result


# An embedding of its own, one that is scaled, windows and caps, and what is usual.
@pytest.mark.parametrize("kind", ["llama", "phi3", "gemma2"])
def test_tokens_equal_those_of_built_batches(kind: str) -> None:
    model = load(kind, native=True)
    batched, engine = make_engine(model, pages=64), make_engine(model, pages=64)
    never, watched = CountingFastPath(batched, never=True), CountingFastPath(engine)
    # Rows come and go; and steps with a row that samples are others.
    for samplings in ([SamplingParams(0)] * 4, [SamplingParams(0), SamplingParams(0), SamplingParams(0), SAMPLED]):
        arguments = prompts(), COUNT, samplings, 23, 12
        assert drive(engine, *arguments) == drive(batched, *arguments)
    assert never.fast_steps == 0
    assert watched.fast_steps > COUNT // 2


@pytest.fixture(scope="module")
def model() -> Model:
    return load("llama", native=True)


def begun(model: Model, prompt: int = 9) -> tuple[TorchEngine, CountingFastPath, list[Any]]:
    """An engine with two requests after four steps, and the pending steps."""
    engine = make_engine(model, pages=64)
    watched = CountingFastPath(engine)
    new = [slot(at, list(range(3 + at, 3 + at + prompt)), encode(SamplingParams(0))) for at in range(2)]
    pending = [engine.launch(step(1, [(0, 0, prompt, 1), (1, 0, prompt, 1)], new, [(0, 5), (1, 8)]))]
    pending += [engine.launch(step(2 + at, [(0, prompt + at, 1, 1), (1, prompt + at, 1, 1)])) for at in range(3)]
    assert watched.fast_steps == 2
    return engine, watched, pending


def test_pages_may_be_added_in_a_streak(model: Model) -> None:
    engine, never = make_engine(model, pages=64), make_engine(model, pages=64)
    watched, _ = CountingFastPath(engine), CountingFastPath(never, never=True)
    size, starts = engine.limits.page_size, [9, 25]
    new = [slot(at, list(range(3, 3 + start)), encode(SamplingParams(0))) for at, start in enumerate(starts)]
    both = [(0, 0, starts[0], 1), (1, 0, starts[1], 1)]
    count = (SPARE_PAGES + 2) * size
    for number in range(count):
        pages = [(at, number + at) for at, (_, start, _, _) in enumerate(both) if start % size == 0]
        asked = step(number + 1, both, new, [(at, page % 64) for at, page in pages])
        results = [one.collect(one.launch(asked)) for one in (engine, never)]
        assert results[0][:5] == results[1][:5]
        new, both = [], [(at, starts[at] + number, 1, 1) for at in range(2)]
    assert count - watched.fast_steps < 6


def test_results_may_be_collected_later(model: Model) -> None:
    engine, _, pending = begun(model)
    together = [unpack_int32(engine.collect(one).token_ids) for one in pending]
    alone = drive(make_engine(model, pages=64), [list(range(3, 12)), list(range(4, 13))], 4)
    assert [list(ids) for ids in zip(*together, strict=True)] == [one.ids for one in alone]


def test_a_bad_step_is_rejected_and_the_next_one_continues(model: Model) -> None:
    engine, watched, _ = begun(model)
    other, _, _ = begun(model)
    for wrong in ([(0, 11, 1, 1), (1, 12, 1, 1)], [(0, 13, 1, 1), (1, 13, 1, 1)], [(0, 12, 2, 1), (1, 12, 1, 1)]):
        with pytest.raises(BadStep):
            engine.launch(step(5, wrong))
    for at in range(12, 20):
        both = step(at, [(0, at, 1, 1), (1, at, 1, 1)])
        assert engine.collect(engine.launch(both))[2:5] == other.collect(other.launch(both))[2:5]
    assert watched.fast_steps > 4


def test_a_row_that_continues_alone_finds_the_committed_ids(model: Model) -> None:
    engine, *_ = begun(model)
    alone = engine.collect(engine.launch(step(5, [(1, 12, 1, 1)])))
    again = engine.collect(engine.launch(step(6, [(0, 12, 1, 1)])))
    other, _, _ = begun(model)
    both = other.collect(other.launch(step(5, [(0, 12, 1, 1), (1, 12, 1, 1)])))
    assert unpack_int32(again.token_ids) + unpack_int32(alone.token_ids) == unpack_int32(both.token_ids)


def test_a_row_without_a_page_is_rejected(model: Model) -> None:
    engine, watched, _ = begun(model)
    for at in range(12, 32):
        assert not engine.collect(engine.launch(step(at, [(0, at, 1, 1), (1, at, 1, 1)]))).error
    assert watched.fast_steps == 22
    with pytest.raises(BadStep, match="goes beyond its pages"):
        engine.launch(step(40, [(0, 32, 1, 1), (1, 32, 1, 1)]))
    engine.reset()
    with pytest.raises(BadStep, match="is empty"):
        engine.launch(step(41, [(0, 32, 1, 1), (1, 32, 1, 1)]))


def test_a_row_without_its_adapter_is_not_on_the_fast_path_and_later_rows_are(model: Model) -> None:
    engine = make_engine(model, pages=64)
    watched = CountingFastPath(engine)
    lost = encode(SamplingParams(0, adapter="lost", adapter_digest=b"1"))
    for at, sampling in ((1, lost), (0, encode(SamplingParams(0)))):
        assert watched.fast_steps == 0
        new = [slot(at, [5, 6, 7], sampling)]
        results = [engine.collect(engine.launch(step(1, [(at, 0, 3, 1)], new, [(at, at)])))]
        results += [engine.collect(engine.launch(step(2 + n, [(at, 3 + n, 1, 1)]))) for n in range(4)]
        assert all(bool(result.row_errors) == (at == 1) for result in results)
    assert watched.fast_steps == 3
