"""The GPU benchmark: its tables on a CPU, and its step times with a simulated GPU clock."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scripts.benchmarks import engine_driver, gpu
from scripts.benchmarks.engine_driver import Alone, flow
from scripts.benchmarks.gpu import decodes, longest, prefill_flop
from scripts.benchmarks.shapes import CONFIG, SHAPES
from tests.worker.gpu_kernels.interpreter_fixes import fix_interpreter
from tests.worker.gpu_kernels.test_cuda_graphs import Tapes, build, engines
from tgi.microkernel.messages.protocol import StepResult
from tgi.worker.engine.engine import PendingStep
from tgi.worker.gpu_kernels import paged_attention
from tgi.worker.vision.prompt_images import TowerWork

pytestmark = pytest.mark.slow

TWO_LAYER = CONFIG | SHAPES["two-layer"]
# Weights of two layers of width 64, and of the output head.
LAYERS = 2 * (4 * 64 * 64 + 3 * 64 * 256)
HEAD = 64 * TWO_LAYER["vocab_size"]


def test_tables_contain_the_measurements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trace.json"
    arguments = "--device cpu --shape two-layer --rows 1,3 --context 40 --prefill 300 --rounds 3 --peak-tflops 2"
    more = "--dtype bfloat16 --max-batch-prefill-tokens 128 --trace"
    monkeypatch.setattr(sys, "argv", ["bench_gpu", *arguments.split(), *more.split(), str(file)])
    gpu.main()
    printed = capsys.readouterr().out
    decode, sampled, prefill, mixed, adapted, kernels = tables(printed)
    assert [row["step"] for row in mixed] == [
        "2 rows", "a chunk of 64", "2 rows, a chunk of 64", "3 rows with 3 drafts",
    ]  # fmt: skip
    assert all(float(row["without ms"]) > 0 and row["with CUDA graphs ms"] == "–" for row in mixed)
    sizes = [tuple(row[title] for title in ("rows", "tokens", "adapters", "rank")) for row in adapted]
    assert sizes == [("1", "128", "1", "16"), ("1", "1", "1", "16"), ("1", "1", "1", "64")]
    assert all(float(row["step ms"]) > 0 and float(row["without ms"]) > 0 for row in adapted)
    read_rate = float(printed.partition("It reads ")[2].partition(" GB/s")[0].replace(",", ""))
    assert [row["rows"] for row in decode] == ["1", "3"]
    for row in decode:
        # Keys and values of 2 layers with 2 heads of size 32, for 40 tokens of context and the generated ones.
        cached = int(row["rows"]) * (40 + 4 + 3) * 2 * 2 * 2 * 32
        assert float(row["GB to read"]) == pytest.approx(2 * (LAYERS + HEAD + cached) / 1e9, abs=0.0006)
        assert float(row["floor ms"]) == pytest.approx(1e3 * float(row["GB to read"]) / read_rate, rel=0.2)
        share = float(row["floor ms"]) / float(row["device ms"])
        assert percent(row["floor / device"]) == pytest.approx(share, rel=0.05)
        assert (row["CUDA graph"], row["between"], row["idle"]) == ("no", "–", "–")
    assert [(row["rows"], row["parameters"]) for row in sampled] == [(n, name) for n in "13" for name in gpu.SAMPLINGS]
    (row,) = prefill
    assert row["steps"] == "3"
    seconds = float(row["ms"]) / 1e3
    assert float(row["tokens/s"].replace(",", "")) == pytest.approx(300 / seconds, rel=0.05)
    flop = 2 * (LAYERS * 300 + HEAD) + 4 * 2 * 64 * sum(range(1, 301))
    assert prefill_flop(TWO_LAYER, 300) == flop
    assert percent(row["of the peak"]) == pytest.approx(flop / seconds / 2e12, abs=0.001)
    assert any("aten::" in row["kernel"] for row in kernels)
    assert json.loads(file.read_text())["traceEvents"]


def tables(text: str) -> list[list[dict[str, str]]]:
    """The rows of each table, by column title."""
    found: list[list[list[str]]] = [[]]
    for line in text.splitlines():
        if line.startswith("|"):
            found[-1].append([cell.strip() for cell in line.strip("|").split("|")])
        elif found[-1]:
            found.append([])
    return [[dict(zip(titles, row, strict=True)) for row in rows] for titles, _, *rows in filter(None, found)]


def percent(text: str) -> float:
    return float(text.removesuffix("%")) / 100


def test_an_unsupported_quantization_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_gpu", "--shape", "two-layer", "--quantize", "exl2"])
    with pytest.raises(SystemExit, match="`quantize` is exl2"):
        gpu.main()


def test_decode_is_measured_with_and_without_cuda_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph exists for one row."""
    fix_interpreter()
    monkeypatch.setattr(paged_attention, "MAX_SPLITS", 1)
    monkeypatch.setattr(gpu, "WARM", 1)  # kernels are interpreted
    tapes = Tapes()
    _, engine = engines(build("llama", layers=1), tapes, [1])
    engine.limits = engine.limits._replace(max_batch_prefill_tokens=2)  # prefills are chunked
    before = tapes.played
    found = decodes(engine, [1, 2], 4, 1)
    assert [(one.rows, one.recorded) for one in found] == [(1, True), (1, False), (2, False)]
    assert tapes.played - before == 1 + 1 + 2  # only of the first: warm-up, pipelined, and alone
    assert longest(4, 1) < engine.limits.max_total_tokens


class Clock:
    """Simulates an engine on a GPU that computes for 4 ms in each step. The first half may begin when the host
    begins the launch, the second half when the launch has ended after `launch` ms. Collecting a result takes
    `collect` ms."""

    def __init__(self, launch: float, collect: float) -> None:
        self.limits = SimpleNamespace(device="cuda")
        self.host = self.free = 0.0
        self.naps: list[float] = []
        self._launch, self._collect = launch, collect

    def sleep(self, cycles: float) -> None:
        self.naps.append(cycles)
        self.free = max(self.host, self.free) + cycles

    def launch(self, step: Any) -> PendingStep:
        begin = Mark(self, max(self.host, self.free))
        self.host += self._launch
        self.free = max(begin.at + 2, self.host) + 2
        drawn: Any = None
        return PendingStep(
            number=1, epoch=1, sampled=drawn, prompt_logprobs=None, grammar_bitmask=None, faults=[], drafts=None,
            bad_word_rows=None, images=TowerWork(), forward_us=0, begin_event=begin, end_event=Mark(self, self.free),
        )  # fmt: skip

    def collect(self, pending: PendingStep) -> StepResult:
        assert pending.begin_event is not None
        assert pending.end_event is not None
        self.host = max(self.host, pending.end_event.at) + self._collect
        return StepResult(1, 1, b"", b"", b"", round(1000 * (pending.end_event.at - pending.begin_event.at)))


class Mark:
    """A CUDA event of the simulated clock."""

    def __init__(self, clock: Clock, at: float) -> None:
        self._clock, self.at = clock, at

    def query(self) -> bool:
        return self.at <= self._clock.host

    def elapsed_time(self, other: "Mark") -> float:
        return other.at - self.at


@pytest.mark.parametrize(
    ("launch", "collect", "step", "between"),
    [
        (1.0, 1.0, 4.0, 0.0),  # the next step is always queued
        (5.0, 0.0, 5.0, 0.0),  # the GPU waits within steps
        (11.0, 3.0, 14.0, 4 / (4 * 14 + 11)),  # and 1 ms before each, except the second, which is launched at once
    ],
)
def test_pipelined_steps_include_gpu_waits_and_single_steps_do_not(
    launch: float, collect: float, step: float, between: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock: Any = Clock(launch, collect)
    monkeypatch.setattr(torch.cuda, "_sleep", clock.sleep)
    monkeypatch.setattr(engine_driver, "cycles_per_ms", lambda: 1.0)
    requests: Any = SimpleNamespace(next=lambda: None)
    alone = Alone(clock)
    assert alone.measure(requests, 4) == [4.0] * 4
    assert alone.works
    assert clock.naps[-4:] == [min(nap for nap in (1, 2, 4, 8, 16) if nap > launch)] * 4
    found = flow(clock, [requests.next()] * 6)
    assert found.step == step
    assert found.between == pytest.approx(between)


def test_measuring_alone_fails_if_the_gpu_sleeps_too_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU wakes up before the launch has ended, for each length of sleep."""
    clock: Any = Clock(600, 0)
    monkeypatch.setattr(torch.cuda, "_sleep", clock.sleep)
    monkeypatch.setattr(engine_driver, "cycles_per_ms", lambda: 1.0)
    requests: Any = SimpleNamespace(next=lambda: None)
    alone = Alone(clock)
    assert len(alone.measure(requests, 4)) == 4
    assert not alone.works
    assert len(clock.naps) <= 10


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.json"
    arguments = f"--device cuda --shape two-layer --rows 1,3 --context 40 --prefill 300 --rounds 5 --trace {file}"
    monkeypatch.setattr(sys, "argv", ["bench_gpu", *arguments.split()])
    gpu.main()
    decode, _, prefill, kernels = tables(capsys.readouterr().out)
    assert [(row["rows"], row["CUDA graph"]) for row in decode] == [
        ("1", "yes"),
        ("1", "no"),
        ("3", "yes"),
        ("3", "no"),
    ]
    for row in decode:
        assert 0 <= percent(row["between"]) < 1
        assert not row["device ms"].endswith("*")
        assert 0 < float(row["device ms"]) <= 1.1 * float(row["step ms"])
    assert 0 < percent(prefill[0]["of the peak"]) < 1
    assert not any("aten::" in row["kernel"] for row in kernels)  # these run on the host
    assert kernels
