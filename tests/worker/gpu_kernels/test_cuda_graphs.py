"""CUDA graphs, tested on CPU with a capturer that records torch's operations and the launches of our kernels, which
Triton's interpreter computes, and replays them on the same memory."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

from tests.models import model as make
from tests.worker import test_draft_heads
from tests.worker.driving import Drawn, drive, make_engine
from tests.worker.test_fake_worker import slot, step
from tests.worker.test_prompt_logprobs import asking, tell
from tgi.microkernel.errors import UserError
from tgi.microkernel.messages.codec import unpack_float32, unpack_int32
from tgi.microkernel.messages.protocol import DeploymentLimits, encode
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.worker.attention import cuda_attention
from tgi.worker.attention.cuda import CudaAttention
from tgi.worker.engine import cuda_graphs
from tgi.worker.engine.cuda_graphs import (
    CapturedModel,
    DecodeGraphs,
    GraphKey,
    Replay,
    chunk_sizes,
    chunk_tokens,
    graph_batch_sizes,
    lead_sizes,
)
from tgi.worker.engine.draft_head_runner import DraftHeadRunner
from tgi.worker.engine.draft_runner import DraftModel, DraftRunner
from tgi.worker.engine.engine import GraphCaptureConfig, TorchEngine
from tgi.worker.engine.input_batch import StepRows
from tgi.worker.engine.startup import WARMUP_SAMPLING_PARAMS
from tgi.worker.gpu_kernels.kernels import GpuKernels
from tgi.worker.layers import rotary
from tgi.worker.models.decoder import DecoderModel
from tgi.worker.models.interface import Model
from tgi.worker.models.loader import build_model
from tgi.worker.sampling.watermark import Watermark

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_split")]

CPU, PAGES = torch.device("cpu"), 64
GPU = GpuKernels((9, 0))
# Each launch takes the interpreter up to a second: few rows, few layers and few tokens. Pages have 16 tokens.
PROMPTS = [[5, 9, 3], [7] * 14, list(range(17))]
COUNT = 4


class Tape(TorchDispatchMode):
    """Records operations with their arguments and results, whose memory stays in place."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], object]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append(partial(_repeat, func, args, kwargs or {}, result))
        return result


def _repeat(func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Repeats an operation. Tensors that it created get the new content in the same memory."""
    again = func(*args, **kwargs)
    for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
        if isinstance(old, Tensor) and not old.is_mkldnn and old.data_ptr() != new.data_ptr():
            old.copy_(new)


class Tapes:
    """A GraphCapturer that records tapes and counts the replays."""

    def __init__(self) -> None:
        self.recorded = self.played = 0

    def capture(self, run: Replay) -> Replay:
        tape, launch = Tape(), InterpretedFunction.run

        def record(kernel: Any, *args: Any, **options: Any) -> None:
            before = len(tape.calls)
            launch(kernel, *args, **options)
            tape.calls[before:] = [partial(launch, kernel, *args, **options)]  # not the interpreter's own operations

        with pytest.MonkeyPatch.context() as patch, tape:
            patch.setattr(InterpretedFunction, "run", record)
            run()
        self.recorded += 1

        def play() -> None:
            self.played += 1
            for call in tape.calls:
                call()

        return play


class Again:
    """A GraphCapturer that calls the function again, for steps that a tape cannot record."""

    def capture(self, run: Replay) -> Replay:
        return run


def build(kind: str, layers: int = 2, **options: Any) -> Model:
    return build_model(make(kind, layers=layers, **options), "float32", "cpu", lambda stage, percent: None)


@pytest.fixture(scope="module")
def llama() -> Model:
    return build("llama", layers=1)


def engines(
    model: Model,
    recorder: Any,
    rows: Sequence[int],
    limit: int | None = None,
    chunk_tokens: int = 0,
) -> tuple[TorchEngine, TorchEngine]:
    """Two engines with the CUDA attention backend: one with torch's attention and without graphs, which takes no
    interpreter, and one with our kernels and graphs, each of which its capture compares with the launches alone."""
    plain, attention = (cuda_attention(model.kv._replace(gpu_kernels=gpu), PAGES, CPU) for gpu in (None, GPU))
    recording = GraphCaptureConfig(recorder, attention, list(rows), chunk_tokens)
    recorded = make_engine(model, slots=8, pages=PAGES, attention=attention, recording=recording)
    recorded.capture_decode_graphs(limit)
    return make_engine(model, slots=8, pages=PAGES, attention=plain), recorded


def compare(one: Sequence[Drawn], other: Sequence[Drawn]) -> None:
    """Compares with a tolerance: torch's matrix products round differently for other numbers of rows."""
    for a, b in zip(one, other, strict=True):
        assert a.ids == b.ids
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
        for listed, others in zip(a.tops, b.tops, strict=True):
            assert [token for token, _ in listed] == [token for token, _ in others]


@pytest.mark.parametrize(
    ("kind", "more"), [("gemma2", ()), ("gemma4_text", (("enable_moe_block", False), ("num_kv_shared_layers", 0)))]
)
def test_replayed_steps_sample_the_same_tokens(kind: str, more: tuple[tuple[str, Any], ...]) -> None:
    """Rows arrive one by one, cross pages, end, and are padded to the next size. gemma2 has sliding windows and a
    softcap, gemma4 heads of two sizes; llama, which the next test replays, none of this."""
    model, tapes = build(kind, more=more), Tapes()
    plain, recorded = engines(model, tapes, [1, 4])
    samplings = [SamplingParams(0), WARMUP_SAMPLING_PARAMS, SamplingParams(2, do_sample=True, top_n=3)]
    expected, found = (drive(one, PROMPTS, COUNT, samplings, stagger=2) for one in (plain, recorded))
    compare(expected, found)
    assert tapes.recorded == 2
    assert tapes.played == tapes.recorded + 5  # each once to be checked; the other 3 steps have prompts


def test_graphs_are_captured_when_a_step_needs_them(llama: Model, caplog: pytest.LogCaptureFixture) -> None:
    """At the start only the largest. One that cannot be captured later is replaced by the next larger one."""

    class Late(Tapes):
        def capture(self, run: Replay) -> Replay:
            if self.recorded == 1:  # the second
                self.recorded += 1
                raise RuntimeError("out of memory")
            return super().capture(run)

    tapes = Late()
    plain, recorded = engines(llama, tapes, [1, 2, 4], limit=1)
    assert tapes.recorded == 1
    assert recorded._decode_graphs is not None
    first = dict(recorded._decode_graphs._graphs)
    recorded._decode_graphs._graphs.clear()
    drive(recorded, PROMPTS[:1], 2)
    assert tapes.recorded == 1  # none before the first, as in a warm-up
    recorded.reset()
    recorded._decode_graphs._graphs.update(first)
    expected, found = (drive(one, PROMPTS, COUNT, stagger=2) for one in (plain, recorded))
    compare(expected, found)
    assert tapes.recorded > 2
    assert [record.levelname for record in caplog.records if "use a larger CUDA graph" in record.message] == ["WARNING"]


def test_steps_without_a_fitting_graph_are_computed(llama: Model) -> None:
    """A prompt, a row that does not sample, drafts, and more rows or tokens than any graph has."""
    tapes = Tapes()
    _, engine = engines(llama, tapes, [2])
    tapes.played = 0

    def run(rows: list[tuple[int, int, int, int]], *more: Any) -> list[int]:
        result = engine.collect(engine.launch(step(1, rows, *more)))
        assert result.error == ""
        return unpack_int32(result.token_ids)

    new = [slot(at, [4, 5, 6], encode(SamplingParams(0))) for at in range(3)]
    run([(0, 0, 3, 1), (1, 0, 3, 1), (2, 0, 2, 0)], new, [(at, at) for at in range(3)])
    run([(0, 3, 1, 1), (2, 2, 1, 1)])
    assert tapes.played == 1
    run([(0, 4, 1, 1), (1, 3, 1, 1), (2, 3, 1, 1)])
    run([(0, 5, 1, 1), (1, 4, 1, 1)], [], [], 1, [1, 0], [9])
    run([(2, 4, 1, 1)])
    assert tapes.played == 2


@pytest.fixture
def small_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layouts that are captured at once, of few tokens."""
    monkeypatch.setattr(cuda_graphs, "USES_BEFORE_CAPTURE", 1)
    monkeypatch.setattr(cuda_graphs, "chunk_sizes", lambda most: [20, most])
    monkeypatch.setattr(cuda_graphs, "lead_sizes", lambda most: [0, 1, most])


@pytest.mark.usefixtures("small_layouts")
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_steps_with_chunks_and_drafts_are_replayed(kind: str) -> None:
    """Chunks of several prompts next to decode rows before and after them, drafts that are wrong and right, and both in
    a step. Only a step with more tokens than any graph, or with more samples than rows, is computed."""
    model, tapes = build(kind, layers=1), Tapes()
    plain, recorded = engines(model, tapes, [2, 4, 8], 1, chunk_tokens=30)
    samplings = [SamplingParams(0), SamplingParams(1, do_sample=True), SamplingParams(0, top_n=2)]
    expected = drive(plain, PROMPTS, COUNT, samplings, chunk=20, stagger=1)
    assert recorded._decode_graphs is not None
    seen: list[tuple[bool, bool]] = []
    replay = recorded._decode_graphs.try_replay

    def replayed(rows: StepRows, *more: Any, **named: Any) -> Any:
        found = replay(rows, *more, **named)
        seen.append((rows.drafts is not None, found is not None))
        return found

    recorded._decode_graphs.try_replay = replayed  # type: ignore[method-assign]
    compare(expected, drive(recorded, PROMPTS, COUNT, samplings, chunk=20, stagger=1))
    assert set(seen) == {(False, True)}

    def guess(at: int, drawn: int) -> list[int]:
        return [expected[at].ids[drawn], 3, 3][: 2 + at % 2] if at < 2 else []

    seen.clear()
    compare(expected, drive(recorded, PROMPTS, COUNT, samplings, chunk=20, stagger=2, guess=guess))
    assert (True, True) in seen
    assert (False, False) not in seen


@pytest.mark.usefixtures("small_layouts")
def test_a_draft_model_replays_graphs_of_its_own(llama: Model) -> None:
    """Also one whose vocabulary is smaller than that of the served model: both read the same ids."""
    tapes = Tapes()
    plain, recorded = engines(llama, tapes, [1, 4], 1, chunk_tokens=30)
    second, drafting = build("llama", layers=1), CudaAttention(llama.kv._replace(gpu_kernels=GPU), PAGES, CPU)
    second.vocab_size -= 1
    runner = DraftRunner(DraftModel(second, drafting), recorded._slots, recorded._batch_builder, recorded._noise)
    captured = CapturedModel(second, drafting, adapters=False)
    runner.graphs = recorded._make_graphs(captured, GraphCaptureConfig(tapes, drafting, [1, 4], 30))
    runner.graphs.capture(1)
    recorded._draft_runner = runner
    played = tapes.played
    compare(
        drive(plain, PROMPTS[:2], COUNT, stagger=1),
        drive(recorded, PROMPTS[:2], COUNT, stagger=1, guess=lambda at, drawn: 2),
    )
    assert tapes.played - played > COUNT
    recorded._slots.adapters[0] = None  # of the served model: nothing may ask it anything here
    one = StepRows(*(np.array([number]) for number in (0, 3, 4, 0, 4)))
    with torch.inference_mode():
        assert runner.graphs.try_replay(one) is not None


@pytest.mark.usefixtures("small_layouts")
@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
def test_a_head_that_drafts_replays_graphs_of_its_own(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads the hidden states that the graphs of its model leave, those of EAGLE-3 of several layers: the drafts are
    those of steps without graphs, on torch's attention."""
    monkeypatch.setattr(test_draft_heads, "LAYERS", 1)
    directory, eagle3, found = test_draft_heads.with_mtp("llama", tmp_path / "model"), None, []
    if kind == "eagle3":
        eagle3 = test_draft_heads.small_head(tmp_path / "head", directory, taps=(0, 1), scored=400)
    for recorded in (False, True):
        served, head = test_draft_heads.build(directory, native=False, eagle3=eagle3)
        head.cuda_graph_obstacle = None
        gpu = GPU if recorded else None
        attention, drafting = (CudaAttention(one.kv._replace(gpu_kernels=gpu), PAGES, CPU) for one in (served, head))
        recording = GraphCaptureConfig(Tapes(), attention, [2, 8], 30) if recorded else None
        sizes = {"slots": 8, "pages": PAGES}
        engine = make_engine(served, draft=head, attention=attention, drafting=drafting, recording=recording, **sizes)
        engine.capture_decode_graphs(1)
        drafts: list[list[int]] = []
        launch = engine.launch

        def launched(one: Any, launch: Any = launch, drafts: Any = drafts) -> Any:
            pending = launch(one)
            drafts.append([] if pending.drafts is None else pending.drafts.ids.tolist())
            return pending

        engine.launch = launched  # type: ignore[method-assign]
        assert isinstance(engine._draft_runner, DraftHeadRunner)
        both = engine._decode_graphs, engine._draft_runner.graphs
        replays = [counted(graphs) for graphs in both if graphs is not None]
        drawn = drive(engine, PROMPTS[:2], COUNT, chunk=5, stagger=1, guess=lambda at, drawn: 2 * (at ^ drawn % 2))
        found.append((drawn, drafts))
        assert [set(one) for one in replays] == [{True}] * 2 * recorded
    compare(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    assert any(found[0][1])


def counted(graphs: DecodeGraphs) -> list[bool]:
    """Records for each step from now on whether it is replayed."""
    seen: list[bool] = []
    replay = graphs.try_replay

    def call(*arguments: Any, **named: Any) -> Any:
        found = replay(*arguments, **named)
        seen.append(found is not None)
        return found

    graphs.try_replay = call  # type: ignore[method-assign]
    return seen


@pytest.mark.usefixtures("small_layouts")
def test_prompt_logprobs_are_read_behind_a_graph(llama: Model) -> None:
    """Of chunks next to decode rows of another request, which come before and after them."""
    asked = [asking(at, prompt, top_n=at) for at, prompt in enumerate(([5] * 14, list(range(30)), [9, 8, 7]))]
    plain, recorded = engines(llama, Tapes(), [2, 4, 8], 1, chunk_tokens=30)
    assert recorded._decode_graphs is not None
    seen = counted(recorded._decode_graphs)
    one, other = (tell(engine, asked, 9, [1, 0, 2]) for engine in (plain, recorded))
    for (logprobs, tops), (others, others_tops) in zip(one, other, strict=True):
        assert logprobs == pytest.approx(others, abs=1e-4)
        assert [token for token, _ in tops] == [token for token, _ in others_tops]
    assert all(seen)


def test_the_layouts_of_a_large_gpu() -> None:
    """Chunks whose products take longer than the host's launches are not captured; no layout has more rows of logits
    than a step may have rows."""
    assert [chunk_tokens(numbers) for numbers in (125_000_000, 1_240_000_000, 8_000_000_000, 70_000_000_000)] == [
        2048, 2048, 500, 256,
    ]  # fmt: skip
    assert chunk_tokens(1, (8,)) == 0
    assert chunk_sizes(500) == [64, 128, 256, 384]
    assert lead_sizes(100) == [0, 8, 32, 64, 100]
    assert lead_sizes(1024)[-3:] == [512, 768, 1024]
    for size in chunk_sizes(2048):
        key = GraphKey(8, tokens=size, longest=size)
        assert key.others * 16 >= size  # a trial has at most a page of tokens in a row
        assert sum(key.query_lens) == 8 + size
    for tokens, longest in ((2, 2), (8, 8), (96, 4), (100, 16)):
        key = GraphKey(0, tokens=tokens, longest=longest)
        assert (sum(key.query_lens), max(key.query_lens), len(key.query_lens)) == (tokens, longest, key.others)


def test_padding_rows_write_to_no_page_of_a_request(llama: Model) -> None:
    """The request of the first slot has ended and its page was given to another, but the page table still has it."""
    found = []
    for engine in engines(llama, Tapes(), [4]):
        old, new = slot(0, [4, 5, 6], encode(SamplingParams(0))), slot(1, [9, 8, 7, 6], encode(SamplingParams(0)))
        engine.collect(engine.launch(step(1, [(0, 0, 3, 1)], [old], [(0, 5)])))
        ids = unpack_int32(engine.collect(engine.launch(step(2, [(1, 0, 4, 1)], [new], [(1, 5)]))).token_ids)
        results = [engine.collect(engine.launch(step(3 + at, [(1, 4 + at, 1, 1)]))) for at in range(4)]
        found.append(
            Drawn(
                ids + [unpack_int32(one.token_ids)[0] for one in results],
                [unpack_float32(one.logprobs)[0] for one in results],
                [],
            )
        )
    compare(found[:1], found[1:])


def test_memory_read_by_a_graph_stays_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of rotary angles, when a context is longer than any before."""
    monkeypatch.setattr(rotary, "TABLE_BLOCK", 16)
    model = build("llama", layers=1)
    assert isinstance(model, DecoderModel)
    _, engine = engines(model, Tapes(), [1])
    table = model._rotaries[0]._table
    assert len(table) > 32
    drive(engine, [[3] * 40], 2)
    assert model._rotaries[0]._table is table


def test_rows_without_adapters_replay_the_graph_of_steps_without_any(llama: Model) -> None:
    """While other requests have some; test_decoding.py has steps with adapters."""
    tapes = Tapes()
    _, engine = engines(llama, tapes, [2])
    tapes.played = 0
    new = [slot(at, [4, 5, 6], encode(SamplingParams(0))) for at in range(2)]
    engine.collect(engine.launch(step(1, [(0, 0, 3, 1), (1, 0, 3, 1)], new, [(0, 0), (1, 1)])))
    engine._slots.adapters[1] = None  # whatever it is: nothing may ask it anything here
    engine.collect(engine.launch(step(2, [(0, 3, 1, 1)])))
    assert (tapes.played, tapes.recorded) == (1, 1)


class Wrong:
    """A capturer whose replays do nothing."""

    def capture(self, run: Replay) -> Replay:
        return lambda: None


class Broken:
    """A capturer that raises the device's error."""

    def capture(self, run: Replay) -> Replay:
        raise RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.parametrize(("recorder", "words"), [(Wrong(), "differs by"), (Broken(), "not permitted")])
def test_a_graph_that_fails_or_differs_is_an_error(llama: Model, recorder: Any, words: str) -> None:
    with pytest.raises(UserError, match=f"{words}.* --cuda-graphs 0"):
        engines(llama, recorder, [2])


@pytest.mark.parametrize(
    ("asked", "most", "expected"),
    [
        ((), 8, [1, 2, 4, 8]),
        ((), 20, [1, 2, 4, 8, 16, 20]),
        ((), 100, [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 100]),
        ((), 1, [1]),
        ((0,), 8, []),
        ((4, 1, 4, 64), 8, [1, 4]),
    ],
)
def test_graph_batch_sizes(asked: tuple[int, ...], most: int, expected: list[int]) -> None:
    assert graph_batch_sizes(asked, most) == expected


def test_torchs_kernels_are_not_captured(llama: Model) -> None:
    assert llama.cuda_graph_obstacle == "torch's kernels need the contexts on the host"
    captured = build_model(make("mixtral"), "float32", "cpu", lambda stage, percent: None, gpu=GPU)
    assert captured.cuda_graph_obstacle is None


class RaiseOnWait(TorchDispatchMode):
    """Fails on blocking copies between devices. Reading values of a tensor on torch's "meta" device raises anyway."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs, result))
        devices = {leaf.device.type for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()}
        asynchronous = (
            args[2:] == (True,) if func is torch.ops.aten.copy_.default else (kwargs or {}).get("non_blocking")
        )
        assert len(devices) < 2 or asynchronous, f"{func} waits"
        return result


@pytest.mark.parametrize("rows", [[], [4]], ids=["computed", "recorded"])
def test_launching_a_step_does_not_wait_for_the_device(rows: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole engine on torch's "meta" device: steps with all logits processors but watermarks, new pages and top-n
    logprobs, then a prompt with logprobs and drafts. Each is launched before the previous one is collected."""
    device = torch.device("meta")
    model = build_model(make("llama"), "float32", "meta", lambda stage, percent: None, gpu=GPU)
    monkeypatch.setattr(InterpretedFunction, "run", lambda kernel, *args, **options: None)
    attention = CudaAttention(model.kv, PAGES, device)
    limits = DeploymentLimits(200, 199, PAGES * 16, 256, 8, PAGES, 16, model.vocab_size, "float32", "cuda")
    recording = GraphCaptureConfig(Again(), attention, rows) if rows else None
    mark = Watermark(model.vocab_size, CPU)
    engine = TorchEngine(model, attention, limits, watermark=mark, graph_capture=recording)
    monkeypatch.setattr(DecodeGraphs, "_check", lambda self, rows, found, expected: None)  # there is nothing to compare
    assert engine.capture_decode_graphs() == len(rows)
    samplings = [
        SamplingParams(0),
        WARMUP_SAMPLING_PARAMS._replace(watermark=False),
        SamplingParams(3, do_sample=True, top_n=4),
    ]
    new = [slot(at, [1] * 16, encode(sampling)) for at, sampling in enumerate(samplings)]
    engine.launch(step(1, [(at, 0, 16, 1) for at in range(3)], new, [(0, 0), (1, 1), (2, 2)]))
    with RaiseOnWait():
        decoded = engine.launch(step(2, [(at, 16, 1, 1) for at in range(3)], [], [(0, 3), (1, 4), (2, 5)]))
        told = slot(3, [2] * 20, encode(SamplingParams(0)))._replace(prompt_logprobs_from=1, prompt_top_n=2)
        rows = [(0, 17, 1, 1), (1, 17, 1, 1), (3, 0, 20, 1)]
        mixed = engine.launch(step(3, rows, [told], [(3, 6), (3, 7)], 1, [2, 0, 0], [5, 6]))
    assert decoded.sampled.ids.shape == (3,)
    assert mixed.sampled.ids.shape == (5,)
    assert mixed.prompt_logprobs is not None
