"""Measures the scheduler's pass for one step: handle the result, plan the next step, encode it for the worker.

    scripts/bench scheduler [--rows 64,256,1024] [--changing 0.1] [--prompt 128]
    scripts/bench scheduler --prefix 200000

Every step computes about `--rows` rows. In each pass a share of them, `--changing`, ends, and as many new requests
with new prompts are admitted: with 10 % of 256 rows, 26 requests end and 26 start. A pass is what the worker waits
for: handling the result and the new requests, planning, and encoding the step. Messages are decoded before the clock
starts. The work after the step is sent (the tick, messages to two tokenizers, bookkeeping) is measured separately.

Prints median and 99th percentile of wall-clock time, and of the thread's CPU time, which depends less on other load.
With `--repetitions` the same passes run several times, each in its own process, and "best" takes the shortest time of
each pass.

With `--prefix` the prefix cache is measured for a prompt of that many tokens in pages of 16 and 32: the time to find it
completely, to publish it and to release it, and the share of cutting and hashing the keys.
"""

import argparse
import gc
import os
import platform
import random
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from tgi.microkernel.links.link import PeerId
from tgi.microkernel.messages.codec import FLOAT32, INT32, pack_column
from tgi.microkernel.messages.protocol import PROTOCOL, Add, DeploymentLimits, Hello, Status, Step, StepResult, encode
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.scheduler.main import GC_THRESHOLD
from tgi.scheduler.page_pool import ROOT_HASH, PagePool
from tgi.scheduler.scheduler import Scheduler, SchedulerConfig

WORKER = PeerId("worker", 0, b"worker")
TOKENIZERS = [PeerId("tokenizer", place, b"tokenizer") for place in range(2)]


class Bench:
    """A scheduler with a steady number of rows, two steps deep."""

    def __init__(self, rows: int, changing: float, prompt: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.prompt = prompt
        self.arrivals = rows * changing  # new requests per pass
        self.life = max(2, round(1 / changing))  # tokens per request, so that as many end as start
        self.core = Scheduler(SchedulerConfig())
        self.now = 0.0
        self.rid = 0
        self.steps: deque[Step] = deque()
        pages = 64 * rows  # 1024 tokens per row
        slots = 2 * rows  # a request keeps its slot until its last token returns, two steps later
        limits = DeploymentLimits(8192, 8191, 16 * pages, 65536, slots, pages, 16, 49152, "bfloat16", "cpu")
        for peer in TOKENIZERS:
            self.core.handle(Hello(PROTOCOL, *peer), peer, 0.0)
        self.core.handle(Hello(PROTOCOL, *WORKER), WORKER, 0.0)
        self.core.handle(Status(True, True, "ready", 100, limits), WORKER, 0.0)
        # Ends are spread evenly over the steps from the start.
        for row in range(rows):
            self.take([self.add(1 + row % self.life)])

    def add(self, new: int) -> Add:
        """A request with a new prompt."""
        self.rid += 1
        ids = pack_column(INT32, [self.random.randrange(40000) for _ in range(self.prompt)])
        return Add(self.rid, ids, new, encode(SamplingParams(self.rid)), pack_column(INT32, [49000]))

    def take(self, adds: list[Add]) -> None:
        """Delivers Add messages, half from each tokenizer."""
        for k, add in enumerate(adds):
            self.core.handle(add, TOKENIZERS[k % 2], self.now)

    def result(self) -> StepResult:
        """The worker's result for the oldest step."""
        step = self.steps.popleft()
        rows = sum(step.samples)
        ids = pack_column(INT32, [self.random.randrange(40000) for _ in range(rows)])
        return StepResult(step.number, step.epoch, b"\1" * rows, ids, pack_column(FLOAT32, [-0.5] * rows), 1000)

    def one_pass(self, result: StepResult | None, adds: list[Add]) -> tuple[float, float, float]:
        """Wall-clock and CPU seconds of one pass, and wall-clock seconds of the work after it."""
        begin, begin_cpu = time.perf_counter(), time.thread_time()
        self.now += 0.001
        if result is not None:
            self.core.handle(result, WORKER, self.now)
        self.take(adds)
        while (step := self.core.plan(self.now)) is not None:
            encode(step)
            self.steps.append(step)
        end, end_cpu = time.perf_counter(), time.thread_time()
        self.core.report_status(self.now)
        for _, message in self.core.outgoing():
            encode(message)
        self.core.commit()
        return end - begin, end_cpu - begin_cpu, time.perf_counter() - end

    def run(self, passes: int) -> list[tuple[float, float, float]]:
        """Times each pass at a steady number of requests."""
        if not self.steps:
            self.one_pass(None, [])
        times = []
        for number in range(passes):
            result = self.result()
            new = int((number + 1) * self.arrivals) - int(number * self.arrivals)
            times.append(self.one_pass(result, [self.add(self.life) for _ in range(new)]))
        return times


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="64,256,1024", help="rows that run at once, comma separated")
    parser.add_argument("--changing", type=float, default=0.1, help="share of the rows that end and begin in each step")
    parser.add_argument("--prompt", type=int, default=128, help="prompt tokens of each request")
    parser.add_argument("--prefix", type=int, default=0, help="measure the prefix cache with this many tokens")
    parser.add_argument("--passes", type=int, default=1500)
    parser.add_argument("--repetitions", type=int, default=1, help="how often the same passes are run")
    arguments = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    if arguments.prefix:
        print(f"{'':>9} {'find, µs':>9} {'of that keys':>12} {'publish, µs':>12} {'release, µs':>12}")
        for page_size in (16, 32):
            prefix(arguments.prefix, page_size)
        return
    print(f"{arguments.changing:.0%} of the rows change in each step, prompts of {arguments.prompt} tokens\n")
    print(f"{'':>6} {'pass, wall µs':>18} {'pass, cpu µs':>18} {'behind it, wall µs':>18} {'pass, best µs':>18}")
    print(f"{'rows':>6}" + f" {'median':>10} {'p99':>7}" * 4)
    for rows in map(int, arguments.rows.split(",")):
        with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as fresh:  # a new process, as at start
            runs = [fresh.submit(measured, rows, arguments).result() for _ in range(arguments.repetitions)]
        wall, cpu, behind = zip(*(times for run in runs for times in run), strict=True)
        best = tuple(min(wall for wall, _, _ in same) for same in zip(*runs, strict=True))
        columns = wall, cpu, behind, best
        print(
            f"{rows:>6} " + " ".join(f"{_percentile(of, 0.5):>10.0f} {_percentile(of, 0.99):>7.0f}" for of in columns)
        )


def measured(rows: int, arguments: argparse.Namespace) -> list[tuple[float, float, float]]:
    """The times of `passes` passes, identical in every call."""
    gc.set_threshold(GC_THRESHOLD)
    bench = Bench(rows, arguments.changing, arguments.prompt, rows)
    bench.run(200)
    gc.collect()
    gc.freeze()
    return bench.run(arguments.passes)


def prefix(tokens: int, page_size: int) -> None:
    """Prints a line of the table of `--prefix`."""
    gc.set_threshold(GC_THRESHOLD)
    pages = tokens // page_size
    pool = PagePool(pages, page_size)
    column = pack_column(INT32, [random.randrange(40000) for _ in range(tokens)])
    held = pool.allocate(pages)
    published = _seconds(lambda: pool.publish(ROOT_HASH, held, column))
    released = _seconds(lambda: pool.release(held))
    times = []
    for _ in range(50):
        keys = _seconds(lambda: _keys(column, 4 * page_size))
        times.append((_seconds(lambda: pool.find_prefix(ROOT_HASH, column, pages)), keys))
        pool.release(held)
    found, hashed = (1e6 * min(column) for column in zip(*times, strict=True))
    print(f"{page_size:>9} {found:>9.0f} {hashed:>12.0f} {1e6 * published:>12.0f} {1e6 * released:>12.0f}")


def _keys(column: bytes, size: int) -> None:
    name = bytes(8)
    for at in range(0, len(column), size):
        hash(name + column[at : at + size])


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _percentile(seconds: tuple[float, ...], share: float) -> float:
    """In microseconds."""
    return 1e6 * sorted(seconds)[int(len(seconds) * share)]
