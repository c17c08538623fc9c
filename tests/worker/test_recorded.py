"""Recorded decode steps: what a GPU does with CUDA graphs, by a recorder of torch's operations on CPU. It plays them
again on the same tensors and with the same numbers, whatever the host may have made of these since."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.models import model as make
from tests.worker.driving import Drawn, drive, make_engine
from tests.worker.test_attention import reference
from tests.worker.test_scripted import slot, step
from tgi.kernel.errors import UserError
from tgi.kernel.messages import Sampling, encode
from tgi.kernel.pack import floats, ints
from tgi.kernel.presence import Limits
from tgi.worker.attention import cuda, gathered
from tgi.worker.attention.cuda import CudaAttention
from tgi.worker.batch import KVShape, Model, Recordable
from tgi.worker.engine import Recording, TorchEngine
from tgi.worker.layers import rotary
from tgi.worker.load import build_model
from tgi.worker.models.decoder import Decoder
from tgi.worker.recorded import Play, Recorded, sizes
from tgi.worker.warm import WARM_SAMPLING
from tgi.worker.watermark import Watermark

CPU, PAGES = torch.device("cpu"), 64
PROMPTS = [[5, 9, 3], [7] * 20, list(range(40)), [1], [8, 8, 30, 2]]


class Tape(TorchDispatchMode):
    """Keeps operations with their arguments and results, all of which stay where they are."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def play(self) -> None:
        """Every operation again. What was new then gets its new content in its old place."""
        for func, args, kwargs, result in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and not old.is_mkldnn and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class Tapes:
    """Records tapes, and counts how often they are played."""

    def __init__(self) -> None:
        self.recorded = self.played = 0

    def record(self, run: Play) -> Play:
        tape = Tape()
        with tape:
            run()
        self.recorded += 1

        def play() -> None:
            self.played += 1
            tape.play()

        return play


class Again:
    """Does the same by calling it: for what no tape can hold."""

    def record(self, run: Play) -> Play:
        return run


def build(kind: str, **options: Any) -> Model:
    return build_model(make(kind, **options), "float32", "cpu", lambda stage, percent: None)


@pytest.fixture(scope="module")
def llama() -> Model:
    return build("llama")


def engines(model: Model, way: str, recorder: Any, rows: Sequence[int]) -> tuple[TorchEngine, TorchEngine]:
    """With the code for CUDA: one that computes every step, and one that has recorded some."""
    plain, attention = (CudaAttention(model.kv, PAGES, CPU, way) for _ in range(2))
    recording = Recording(recorder, attention, list(rows))
    recorded = make_engine(model, slots=8, pages=PAGES, attention=attention, recording=recording)
    recorded.record()
    return make_engine(model, slots=8, pages=PAGES, attention=plain), recorded


def compare(one: Sequence[Drawn], other: Sequence[Drawn]) -> None:
    """torch's products of matrices round otherwise with the number of rows."""
    for a, b in zip(one, other, strict=True):
        assert a.ids == b.ids
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
        for listed, others in zip(a.tops, b.tops, strict=True):
            assert [token for token, _ in listed] == [token for token, _ in others]


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_played_steps_draw_what_computed_ones_do(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows come one by one, cross pages and bounds, end, and are filled up to the next size. gemma2 has windows and
    capped scores, llama neither."""
    monkeypatch.setattr(gathered, "SHORTEST", 32)
    model, tapes = build(kind), Tapes()
    plain, recorded = engines(model, "plain", tapes, [1, 4, 8])
    samplings = [Sampling(0), Sampling(1, do_sample=True), WARM_SAMPLING, Sampling(2, top_n=3), Sampling(0)]
    expected, found = (drive(one, PROMPTS, 12, samplings, stagger=2) for one in (plain, recorded))
    compare(expected, found)
    assert tapes.recorded == 3 * len(gathered.bounds(model.kv, 1, recorded.limits.max_total_tokens, 16))
    assert tapes.played > tapes.recorded + 8  # each once to be checked; steps with a prompt are computed


@pytest.mark.parametrize("way", ["paged", "packed"])
def test_beside_the_kernels(way: str, llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flash Attention 3's way and 2's, with a reference in place of the kernels."""
    monkeypatch.setattr(cuda, "varlen_attn", reference([], None))
    plain, recorded = engines(llama, way, Again(), [2, 8])
    compare(drive(plain, PROMPTS, 6), drive(recorded, PROMPTS, 6))


def test_what_is_not_recorded_is_computed(llama: Model) -> None:
    """A prompt, a row that does not draw, drafts, and more rows or tokens than there are recordings for."""
    tapes = Tapes()
    _, engine = engines(llama, "plain", tapes, [2])
    tapes.played = 0

    def run(rows: list[tuple[int, int, int, int]], *more: Any) -> list[int]:
        result = engine.collect(engine.launch(step(1, rows, *more)))
        assert result.error == ""
        return ints(result.ids)

    new = [slot(at, [4, 5, 6], encode(Sampling(0))) for at in range(3)]
    run([(0, 0, 3, 1), (1, 0, 3, 1), (2, 0, 2, 0)], new, [(at, at) for at in range(3)])
    run([(0, 3, 1, 1), (2, 2, 1, 1)])
    assert tapes.played == 1
    run([(0, 4, 1, 1), (1, 3, 1, 1), (2, 3, 1, 1)])
    run([(0, 5, 1, 1), (1, 4, 1, 1)], [], [], 1, [1, 0], [9])
    run([(2, 4, 1, 1)])
    assert tapes.played == 2


def test_what_fills_a_step_up_touches_no_page_of_a_request(llama: Model) -> None:
    """The first slot's occupant is gone and its page is another's, though the slot's table still names it."""
    found = []
    for engine in engines(llama, "plain", Tapes(), [4]):
        old, new = slot(0, [4, 5, 6], encode(Sampling(0))), slot(1, [9, 8, 7, 6], encode(Sampling(0)))
        engine.collect(engine.launch(step(1, [(0, 0, 3, 1)], [old], [(0, 5)])))
        ids = ints(engine.collect(engine.launch(step(2, [(1, 0, 4, 1)], [new], [(1, 5)]))).ids)
        results = [engine.collect(engine.launch(step(3 + at, [(1, 4 + at, 1, 1)]))) for at in range(4)]
        found.append(
            Drawn(ids + [ints(one.ids)[0] for one in results], [floats(one.logprobs)[0] for one in results], [])
        )
    compare(found[:1], found[1:])


def test_what_a_recording_reads_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A context longer than all that are recorded comes, within what requests may have."""
    monkeypatch.setattr(rotary, "BLOCK", 16)
    monkeypatch.setattr(gathered, "SHORTEST", 16)
    monkeypatch.setattr(gathered, "MOST_BYTES", 1 << 14)
    model = build("llama")
    assert isinstance(model, Decoder)
    _, engine = engines(model, "plain", Tapes(), [1])
    table = model._rotaries[0]._table
    drive(engine, [[3] * 500], 2)
    assert model._rotaries[0]._table is table


def test_adapters_are_computed(llama: Model) -> None:
    tapes = Tapes()
    _, engine = engines(llama, "plain", tapes, [2])
    tapes.played = 0
    new = [slot(at, [4, 5, 6], encode(Sampling(0))) for at in range(2)]
    engine.collect(engine.launch(step(1, [(0, 0, 3, 1), (1, 0, 3, 1)], new, [(0, 0), (1, 1)])))
    engine._slots.adapters[1] = None  # whatever it is: nobody is to ask it anything here
    engine.collect(engine.launch(step(2, [(0, 3, 1, 1)])))
    assert tapes.played == 1
    assert engine._recorded is not None
    rows = engine._slots.rows(step(3, [(0, 4, 1, 1), (1, 3, 1, 1)]))
    assert engine._recorded.logits(rows) is None


class Wrong:
    """A recorder whose recordings do nothing."""

    def record(self, run: Play) -> Play:
        return lambda: None


class Broken:
    """A recorder that the device refuses."""

    def record(self, run: Play) -> Play:
        raise RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.parametrize(("recorder", "words"), [(Wrong(), "differs from a plain one by"), (Broken(), "not permitted")])
def test_a_recording_that_does_not_work_is_refused(llama: Model, recorder: Any, words: str) -> None:
    with pytest.raises(UserError, match=f"{words}.* --cuda-graphs 0"):
        engines(llama, "plain", recorder, [2])


def test_mixtures_and_transformers_say_why_not() -> None:
    moe = build("mixtral")
    assert moe.unrecordable is not None
    assert "experts" in moe.unrecordable


@pytest.mark.parametrize(
    ("asked", "most", "expected"),
    [
        ((), 8, [1, 2, 4, 8]),
        ((), 20, [1, 2, 4, 8, 16, 20]),
        ((), 1, [1]),
        ((0,), 8, []),
        ((4, 1, 4, 64), 8, [1, 4]),
    ],
)
def test_sizes(asked: tuple[int, ...], most: int, expected: list[int]) -> None:
    assert sizes(asked, most) == expected


def test_bounds_of_contexts() -> None:
    """Twice as long each, up to the longest in whole pages, as far as the copies of the keys fit."""
    kv = KVShape(2, 32, 8, 128, torch.bfloat16)
    assert gathered.bounds(kv, 1, 4000, 16) == [512, 1024, 2048, 4000]
    assert gathered.bounds(kv, 1, 100, 16) == [112]
    assert gathered.bounds(kv, 32, 131072, 16) == [512, 1024, 2048]
    assert gathered.bounds(kv, 256, 131072, 16) == []
    paged = CudaAttention(KVShape(1, 2, 1, 8, torch.bfloat16), 2, CPU, "paged")
    assert isinstance(paged, Recordable)
    assert paged.bounds(64, 131072) == [131072]


class Elsewhere(TorchDispatchMode):
    """Refuses what a GPU's host waits for: copies between devices that are waited for. Values of a tensor on torch's
    "meta" device cannot be read at all, so whoever tries to says so."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs, result))
        places = {leaf.device.type for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()}
        goes_on = args[2:] == (True,) if func is torch.ops.aten.copy_.default else (kwargs or {}).get("non_blocking")
        assert len(places) < 2 or goes_on, f"{func} waits"
        return result


@pytest.mark.parametrize("way", ["paged", "packed"])
@pytest.mark.parametrize("rows", [[], [4]], ids=["computed", "recorded"])
def test_a_step_waits_for_nothing(way: str, rows: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole engine on a device that has shapes and no numbers: steps with all that shapes a draw but watermarks, new
    pages and tops, then a prompt with logprobs and drafts, each launched ahead of the one before it."""
    device = torch.device("meta")
    model = build_model(make("llama"), "float32", "meta", lambda stage, percent: None)
    attention = CudaAttention(model.kv, PAGES, device, way)
    limits = Limits(200, 199, PAGES * 16, 256, 8, PAGES, 16, model.vocab_size, "float32", "cuda")
    recording = Recording(Again(), attention, rows) if rows else None
    mark = Watermark(model.vocab_size, CPU)
    engine = TorchEngine(model, attention, limits, mark=mark, recording=recording)
    monkeypatch.setattr(Recorded, "_check", lambda self, rows, expected: None)  # there is nothing to compare
    assert engine.record() == len(rows)
    samplings = [Sampling(0), WARM_SAMPLING._replace(watermark=False), Sampling(3, do_sample=True, top_n=4)]
    new = [slot(at, [1] * 16, encode(sampling)) for at, sampling in enumerate(samplings)]
    engine.launch(step(1, [(at, 0, 16, 1) for at in range(3)], new, [(0, 0), (1, 1), (2, 2)]))
    with Elsewhere():
        decoded = engine.launch(step(2, [(at, 16, 1, 1) for at in range(3)], [], [(0, 3), (1, 4), (2, 5)]))
        told = slot(3, [2] * 20, encode(Sampling(0)))._replace(prompt_from=1, prompt_top_n=2)
        rows = [(0, 17, 1, 1), (1, 17, 1, 1), (3, 0, 20, 1)]
        mixed = engine.launch(step(3, rows, [told], [(3, 6), (3, 7)], 1, [2, 0, 0], [5, 6]))
    assert decoded.drawn.ids.shape == (3,)
    assert mixed.drawn.ids.shape == (5,)
    assert mixed.told is not None
