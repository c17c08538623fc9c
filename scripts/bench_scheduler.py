"""Measures the scheduler's pass for one step: handle the result, plan the next step, encode it for the worker.

    .venv/bin/python scripts/bench_scheduler.py [--rows 64,256,1024] [--changing 0.1] [--prompt 128]
    .venv/bin/python scripts/bench_scheduler.py --prefix 200000

Every step computes about `--rows` rows. In each pass a share of them, `--changing`, draws its last token and ends, and
as many new requests arrive, each with a prompt of its own, and are admitted: 10 % of 256 rows are 26 requests that end
and 26 that begin. A pass is what a worker waits for: `handle` of the result and of the new requests, `plan`, and the
encoding of the step. Messages come in decoded, as a link hands them over, and are made before the clock starts:
nothing but the scheduler is measured. What the loop does when the worker is busy again is measured on its own: `tick`,
making and encoding the messages to two tokenizers, and `settle`.

Printed are median and 99th percentile of the wall clock, and of the CPU time of the thread, which other work on the
machine disturbs less. With `--repetitions` the same passes are run so many times, each in a process of its own, and
"best" is of each pass the shortest wall clock: what is left then is the work, without what else the machine did
meanwhile.

With `--prefix` the prefix cache is measured instead, for a prompt of so many tokens in pages of 16 and 32: the time to
find it when all of it is known, to make it known and to give it back; and of the first of these what only the keys
take, that is to cut and hash them.
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

from tgi.kernel.link import Peer
from tgi.kernel.messages import Add, Result, Sampling, Step, encode
from tgi.kernel.pack import FLOAT32, INT32, pack
from tgi.kernel.presence import PROTOCOL, Hello, Limits, Status
from tgi.scheduler.core import Config, Core
from tgi.scheduler.main import GARBAGE
from tgi.scheduler.pages import PagePool

WORKER = Peer("worker", 0, b"worker")
TOKENIZERS = [Peer("tokenizer", place, b"tokenizer") for place in range(2)]


class Bench:
    """A core at a steady number of rows, two steps deep."""

    def __init__(self, rows: int, changing: float, prompt: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.prompt = prompt
        self.arrivals = rows * changing  # requests that begin in each pass
        self.life = max(2, round(1 / changing))  # tokens per request, so that as many end
        self.core = Core(Config())
        self.now = 0.0
        self.rid = 0
        self.steps: deque[Step] = deque()
        pages = 64 * rows  # 1024 tokens for each row
        slots = 2 * rows  # a request keeps its slot until its last token is back, two steps later
        limits = Limits(8192, 8191, 16 * pages, 65536, slots, pages, 16, 49152, "bfloat16", "cpu")
        for peer in TOKENIZERS:
            self.core.handle(Hello(PROTOCOL, *peer), peer, 0.0)
        self.core.handle(Hello(PROTOCOL, *WORKER), WORKER, 0.0)
        self.core.handle(Status(True, True, "ready", 100, limits), WORKER, 0.0)
        # Ends spread evenly over the steps from the beginning.
        for row in range(rows):
            self.take([self.add(1 + row % self.life)])

    def add(self, new: int) -> Add:
        """A request with a prompt of its own."""
        self.rid += 1
        ids = pack(INT32, [self.random.randrange(40000) for _ in range(self.prompt)])
        return Add(self.rid, ids, new, encode(Sampling(self.rid)), pack(INT32, [49000]))

    def take(self, adds: list[Add]) -> None:
        """Adds reach the core, half of them from each tokenizer."""
        for k, add in enumerate(adds):
            self.core.handle(add, TOKENIZERS[k % 2], self.now)

    def result(self) -> Result:
        """What a worker answers to the oldest step."""
        step = self.steps.popleft()
        rows = sum(step.draws)
        ids = pack(INT32, [self.random.randrange(40000) for _ in range(rows)])
        return Result(step.number, step.epoch, b"\1" * rows, ids, pack(FLOAT32, [-0.5] * rows), 1000)

    def one_pass(self, result: Result | None, adds: list[Add]) -> tuple[float, float, float]:
        """Seconds for one pass, on the wall and of CPU time; and on the wall for what comes behind it."""
        begin, begin_cpu = time.perf_counter(), time.thread_time()
        self.now += 0.001
        if result is not None:
            self.core.handle(result, WORKER, self.now)
        self.take(adds)
        while (step := self.core.plan(self.now)) is not None:
            encode(step)
            self.steps.append(step)
        end, end_cpu = time.perf_counter(), time.thread_time()
        self.core.tick(self.now)
        for _, message in self.core.outgoing():
            encode(message)
        self.core.settle()
        return end - begin, end_cpu - begin_cpu, time.perf_counter() - end

    def run(self, passes: int) -> list[tuple[float, float, float]]:
        """Times each pass, while the number of requests stays steady."""
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
        with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as fresh:  # as a scheduler is at start
            runs = [fresh.submit(measured, rows, arguments).result() for _ in range(arguments.repetitions)]
        wall, cpu, behind = zip(*(times for run in runs for times in run), strict=True)
        best = tuple(min(wall for wall, _, _ in same) for same in zip(*runs, strict=True))
        columns = wall, cpu, behind, best
        print(
            f"{rows:>6} " + " ".join(f"{_percentile(of, 0.5):>10.0f} {_percentile(of, 0.99):>7.0f}" for of in columns)
        )


def measured(rows: int, arguments: argparse.Namespace) -> list[tuple[float, float, float]]:
    """The times of so many passes: the same ones each time that this is called."""
    gc.set_threshold(GARBAGE)
    bench = Bench(rows, arguments.changing, arguments.prompt, rows)
    bench.run(200)
    gc.collect()
    gc.freeze()
    return bench.run(arguments.passes)


def prefix(tokens: int, page_size: int) -> None:
    """Prints a line of the table of `--prefix`."""
    gc.set_threshold(GARBAGE)
    pages = tokens // page_size
    pool = PagePool(pages, page_size)
    column = pack(INT32, [random.randrange(40000) for _ in range(tokens)])
    name = pool.find(b"", b"", 0)[1]
    held = pool.take(pages)
    published = _seconds(lambda: pool.publish(name, held, column))
    released = _seconds(lambda: pool.release(held))
    times = []
    for _ in range(50):
        keys = _seconds(lambda: _keys(column, 4 * page_size))
        times.append((_seconds(lambda: pool.find(b"", column, pages)), keys))
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


if __name__ == "__main__":
    main()
