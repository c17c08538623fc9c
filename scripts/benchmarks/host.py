"""Measures the host's time of the worker's loop per decode step, with the device stubbed.

    scripts/bench host [--rows 1,256] [--sampling greedy,temperature] [--profile]

The loop gets encoded steps and sends encoded results; a CUDA graph is replayed by a function that does nothing, and so
is our sampler for GPUs, which makes the tensors of its result alone. What is left is what a GPU waits for between steps
if it is quicker: decoding a step, checking its rows, the inputs of graph and sampler, packing and encoding the result.
Not included: ZeroMQ, launches and copies on a device. Times are medians of the CPU time of the thread, which other load
changes least.
"""

import argparse
import cProfile
import gc
import pstats
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scripts.benchmarks.engine_driver import Requests
from scripts.benchmarks.gpu import SAMPLINGS
from scripts.benchmarks.shapes import CONFIG, SHAPES, write_config
from tgi.microkernel.links.link import PeerId
from tgi.microkernel.messages.protocol import PROTOCOL, DeploymentLimits, Hello, Step, StepResult, decode, encode
from tgi.microkernel.settings.options import counts
from tgi.microkernel.settings.table import Settings
from tgi.worker.attention.cuda import CudaAttention
from tgi.worker.engine.engine import GraphCaptureConfig, TorchEngine
from tgi.worker.engine.loop import WorkerLoop
from tgi.worker.lora.registry import AdapterUpdates
from tgi.worker.models.loader import build_model

SCHEDULER = PeerId("scheduler", 0, b"scheduler")
CONTEXT, WARM, STEPS = 100, 50, 400
VOCABULARY = 64
CPU = torch.device("cpu")


class NoDevice:
    """A GraphCapturer whose graphs compute once, to be checked, and then do nothing."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        left = [run]
        return lambda: left.pop()() if left else None


class NoSampler:
    """In place of GpuKernels behind a captured step: samples id 0."""

    def sample(self, logits: Tensor, columns: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        """See gpu_kernels.sampling.sample."""
        return torch.zeros(len(logits), dtype=torch.int64), torch.zeros(len(logits))


class Frames:
    """The worker's link: encoded steps come in, results are encoded and dropped."""

    def __init__(self) -> None:
        self.incoming: deque[bytes] = deque()
        self.results = 0

    def receive(self) -> Iterator[tuple[PeerId, Any]]:
        """One message, if there is one."""
        if self.incoming:
            yield SCHEDULER, decode(self.incoming.popleft())

    def send(self, peer: PeerId, message: Any) -> None:
        """Encodes a message."""
        encode(message)
        if isinstance(message, StepResult):
            assert not message.error, message.error
            self.results += 1

    broadcast = flush = exchange = lambda *_: None


class Alone:
    """The parts of Process that the loop uses."""

    settings = Settings()
    stopping = beat_due = False
    begin_work = end_work = extend_deadline = publish_state = watch_link = wake_loop = lambda *_: None


class Measured(NamedTuple):
    """Microseconds per step."""

    rows: int
    sampling: str
    loop: float
    launch: float
    collect: float


def make_engine(rows: int, directory: Path) -> TorchEngine:
    """An engine of a tiny model with a captured decode step."""
    longest = CONTEXT + 2 * (WARM + STEPS)
    write_config(CONFIG | SHAPES["two-layer"] | {"vocab_size": VOCABULARY, "max_position_embeddings": 2048}, directory)
    model = build_model(directory, "float32", "cpu", lambda stage, percent: None, dummy=True)
    pages = rows * -(-longest // CudaAttention.page_size)
    attention = CudaAttention(model.kv, pages, CPU)
    limits = DeploymentLimits(
        longest, longest - 1, pages * attention.page_size, 4096, rows, pages, attention.page_size, VOCABULARY, "", "cpu"
    )
    engine = TorchEngine(model, attention, limits, graph_capture=GraphCaptureConfig(NoDevice(), attention, [rows]))
    engine.capture_decode_graphs()
    sampler: Any = NoSampler()
    model.kv = model.kv._replace(gpu_kernels=sampler)
    return engine


def timed(engine: TorchEngine, name: str) -> list[float]:
    """Records the microseconds of each call of a method."""
    spent: list[float] = []
    method = getattr(engine, name)

    def call(argument: Any) -> Any:
        began = time.thread_time()
        result = method(argument)
        spent.append(1e6 * (time.thread_time() - began))
        return result

    setattr(engine, name, call)
    return spent


def measure(rows: int, sampling: str, profiler: cProfile.Profile | None) -> Measured:
    """Steady decode steps, with the next one always in the queue."""
    with tempfile.TemporaryDirectory(prefix="tgi-") as directory:
        engine = make_engine(rows, Path(directory))
    params = [SAMPLINGS[sampling]._replace(seed=row) for row in range(rows)]
    requests = Requests(engine, range(rows), CONTEXT, 2 * (WARM + STEPS) - 1, params)
    process: Any = Alone()
    link: Any = Frames()
    loop = WorkerLoop(process, link)
    updates: AdapterUpdates = loop.begin_serving(engine)
    link.incoming.append(encode(Hello(PROTOCOL, *SCHEDULER)))
    link.incoming.extend(map(encode, requests.prompts()))
    while link.incoming or loop._in_flight or loop._queued:
        loop.run_once(engine, updates)
    launches, collects = timed(engine, "launch"), timed(engine, "collect")
    gc.collect()
    gc.freeze()
    steps: list[Step] = list(requests.steps(WARM + STEPS))
    link.incoming.extend(map(encode, steps))
    times = []
    for _ in repeat(None, WARM):
        loop.run_once(engine, updates)
    if profiler is not None:
        profiler.enable()
    while link.incoming:
        began = time.thread_time()
        loop.run_once(engine, updates)
        times.append(1e6 * (time.thread_time() - began))
    if profiler is not None:
        profiler.disable()
    gc.unfreeze()
    return Measured(
        rows, sampling, statistics.median(times), statistics.median(launches[WARM:]), statistics.median(collects[WARM:])
    )


def main() -> None:
    """Parses the command line, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=counts, default="1,256")
    parser.add_argument("--sampling", default="greedy,temperature 0.8", help=f"of {', '.join(SAMPLINGS)}")
    parser.add_argument("--profile", action="store_true", help="show the functions that take the time")
    options = parser.parse_args()
    torch.set_num_threads(1)  # threads of a loaded machine wait for each other
    print("| rows | parameters | loop per step µs | launch µs | collect µs |\n|---|---|---|---|---|")
    for rows in options.rows:
        for sampling in options.sampling.split(","):
            profiler = cProfile.Profile() if options.profile else None
            one = measure(rows, sampling, profiler)
            print(f"| {rows} | {sampling} | {one.loop:.0f} | {one.launch:.0f} | {one.collect:.0f} |", flush=True)
            if profiler is not None:
                pstats.Stats(profiler).strip_dirs().sort_stats("tottime").print_stats(30)


if __name__ == "__main__":
    main()
