"""Measures the throughput that each further front end adds, on a machine with few cores.

    scripts/bench front-ends [--share 0.1] [--front-ends 1,2,3] [--streams 96]

A control group limits each front end to a share of one core (`--share`), so front ends saturate long before the
machine does, as on a machine with many cores, and any shared bottleneck shows: the port, the tokenizers, the
scheduler. The fake worker makes one token per row and step; the load generator runs on the same machine: each of
`--streams` clients sends the next request when its response is complete. Prints medians over the repetitions, in
which the numbers of front ends alternate, and the cores that the front ends used together: their shares, unless
something else limits them.

Needs Linux and the right to make control groups (usually root).
"""

import argparse
import asyncio
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from scripts.benchmarks.servers import Failed, cpu_seconds
from scripts.benchmarks.serving import ROUTE, bodies, start
from scripts.benchmarks.streams import BadStream, Stream, median, stream
from tgi.microkernel.settings.options import count, counts

PERIOD = 10_000  # microseconds; the share applies to each period
LEAST = 0.1  # the kernel's minimum is a millisecond
GROUPS = Path("/sys/fs/cgroup")
WARM_SECONDS = 1.0
PROCESS = "tgi api"  # process title of front ends


class Cage:
    """A control group (version 1 or 2) that limits its processes together to a share of one core; a context manager
    that removes it when they have ended."""

    def __init__(self, share: float) -> None:
        first = GROUPS / "cpu"
        self._path = (first if first.is_dir() else GROUPS) / f"tgi-{uuid4().hex[:8]}"
        quota = str(int(share * PERIOD))
        try:
            self._path.mkdir()
            if first.is_dir():
                (self._path / "cpu.cfs_period_us").write_text(str(PERIOD))
                (self._path / "cpu.cfs_quota_us").write_text(quota)
            else:
                (self._path / "cpu.max").write_text(f"{quota} {PERIOD}")
        except OSError as error:
            with suppress(OSError):
                self._path.rmdir()
            raise Failed(f"no control group can be made that limits CPU time: {error}") from error

    def take(self, pid: int) -> None:
        """Moves the process and all its threads into the group."""
        (self._path / "cgroup.procs").write_text(str(pid))

    def __enter__(self) -> "Cage":
        return self

    def __exit__(self, *_: object) -> None:
        self._path.rmdir()


def share(text: str) -> float:
    """A share of a core, for argparse."""
    try:
        if LEAST <= (found := float(text)) <= 1:
            return found
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a share from {LEAST} to 1")


def measure(front_ends: int, arguments: argparse.Namespace) -> tuple[float, float]:
    """Tokens/s, and the number of cores used by the front ends."""
    server_options = argparse.Namespace(model_id=None, scripted=True, server=["--api-workers", str(front_ends)])
    with ExitStack() as cages, start(server_options) as server:
        server.wait(ROUTE, bodies(1, 0, 16, 1)[0])
        found = [one for title, each in server.processes().items() if title.startswith(PROCESS) for one in each]
        if len(found) != front_ends:
            raise Failed(f"it has {len(found)} front ends, not {front_ends}")
        for process in found:
            cages.enter_context(Cage(arguments.share)).take(process.pid)
        asked = bodies(arguments.streams, 1, 16, arguments.output_tokens)
        return asyncio.run(load(server.port, asked, arguments.seconds, lambda: sum(map(cpu_seconds, found))))


async def load(
    port: int, asked: list[dict[str, Any]], seconds: float, spent: Callable[[], float]
) -> tuple[float, float]:
    """Tokens/s of clients that repeat their request, and the rate of `spent`. The first second is not counted, because
    front ends have not all connected by then."""
    answers: list[Stream] = []

    async def ask(body: dict[str, Any]) -> None:
        while True:
            answers.append(await stream(port, ROUTE, body))

    async with asyncio.TaskGroup() as group:
        clients = [group.create_task(ask(body)) for body in asked]
        await asyncio.sleep(WARM_SECONDS)
        begin, before = time.perf_counter(), spent()
        await asyncio.sleep(seconds)
        end, after = time.perf_counter(), spent()
        for client in clients:
            client.cancel()
    counted = [answer for answer in answers if answer.ended >= begin]
    tokens = sum(begin <= event.time < end for answer in counted for event in answer.events())
    return tokens / (end - begin), (after - before) / (end - begin)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=share, default=0.1, help="of one core, for each front end")
    parser.add_argument("--front-ends", type=counts, default=(1, 2, 3), help="how many, comma separated")
    parser.add_argument("--streams", type=count, default=96)
    parser.add_argument("--output-tokens", type=count, default=64)
    parser.add_argument("--seconds", type=count, default=5, help="how long each is measured")
    parser.add_argument("--repetitions", type=count, default=3)
    arguments = parser.parse_args()
    found = defaultdict(list)
    try:
        for _ in range(arguments.repetitions):
            for front_ends in arguments.front_ends:
                found[front_ends].append(measure(front_ends, arguments))
    except (Failed, BadStream) as error:
        sys.exit(f"The server failed: {error}")
    rows = {
        front_ends: [median(list(column)) for column in zip(*each, strict=True)] for front_ends, each in found.items()
    }
    first = rows[arguments.front_ends[0]][0]
    print(f"{arguments.streams} streams, {arguments.share:.0%} of a core for each front end\n")
    print(f"| front ends | tokens/s | of {arguments.front_ends[0]} | cores that they used |\n|---|---|---|---|")
    for number, (pace, cores) in rows.items():
        print(f"| {number} | {pace:,.0f} | {pace / first:.2f} | {cores:.2f} |")
