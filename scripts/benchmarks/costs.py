"""CPU time of the work per step and message, next to recorded figures: fails beyond twice a figure.

    scripts/bench costs [--slack 2]

Times are medians of the thread's CPU time, divided by that of a loop of additions, so that the machine matters less:
a figure of 100 µs is what takes as long as 10,000 additions of that loop on the machine of the figures. What is
measured: the scheduler's pass and the work after it, encoding and decoding a message of 256 rows, and sending and
receiving one of one row over a link. `scripts/bench --scripted` has the CPU time of each process per token.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from scripts.benchmarks.scheduler import Bench
from tgi.microkernel.links.link import Link
from tgi.microkernel.messages.codec import FLOAT32, INT32, UINT32, pack_column
from tgi.microkernel.messages.protocol import PROTOCOL, Hello, Tokens, decode, encode

ADDITIONS = 10_000  # of the loop that 100 µs stand for
ROUNDS = 60

# Microseconds, measured with Python 3.11 on an EPYC (Zen 5).
FIGURES = {
    "scheduler: pass of 64 rows": 88.0,
    "scheduler: after it": 66.0,
    "scheduler: pass of 256 rows": 245.0,
    "scheduler: after it, 256 rows": 205.0,
    "message of 256 rows: encode and decode": 2.0,
    "message of one row: send and receive": 11.0,
}


def addition_loop() -> None:
    """What times are compared with."""
    total = 0
    for number in range(ADDITIONS):
        total += number


def cpu_seconds(work: Callable[[], object]) -> float:
    """The thread's CPU time of one call."""
    begin = time.thread_time()
    work()
    return time.thread_time() - begin


def in_turn(work: Callable[[], object]) -> float:
    """The median CPU time of `work` in units of the loop of additions, in turn with it."""
    work()
    pairs = [(cpu_seconds(work), cpu_seconds(addition_loop)) for _ in range(ROUNDS)]
    return statistics.median(one for one, _ in pairs) / statistics.median(other for _, other in pairs)


def scheduler(rows: int) -> tuple[float, float]:
    """A pass and the work after it, in the same units; 10 % of the rows end and begin in each step."""
    bench = Bench(rows, 0.1, 128, rows)
    bench.run(100)
    loop = statistics.median(cpu_seconds(addition_loop) for _ in range(ROUNDS))
    times = bench.run(5 * ROUNDS)
    return statistics.median(cpu for _, cpu, _ in times) / loop, statistics.median(after for *_, after in times) / loop


def tokens(rows: int) -> Tokens:
    """A message of this many rows."""
    return Tokens(
        pack_column(UINT32, range(rows)),
        pack_column(UINT32, [1] * rows),
        pack_column(INT32, [5] * rows),
        pack_column(FLOAT32, [-1.5] * rows),
    )


def link(folder: Path) -> float:
    """A message from a scheduler to a tokenizer, both in this thread."""
    down = Link.connect(f"ipc://{folder}/link", Hello(PROTOCOL, "tokenizer", 0, os.urandom(8)))
    up = Link.bind(f"ipc://{folder}/link", Hello(PROTOCOL, "scheduler", 0, os.urandom(8)))
    while not (down.peers and up.peers):
        for one in (down, up):
            one.socket.poll(10)
            list(one.receive())
    message, (peer,) = tokens(1), up.peers

    def pass_one() -> None:
        up.send(peer, message)
        up.flush()
        down.socket.poll(10_000)
        list(down.receive())

    try:
        return in_turn(pass_one)
    finally:
        down.close()
        up.close()


def measure() -> dict[str, float]:
    """Microseconds, by the names of FIGURES."""
    with tempfile.TemporaryDirectory(prefix="tgi") as folder:
        message = tokens(256)
        measured = [
            *scheduler(64),
            *scheduler(256),
            in_turn(lambda: decode(encode(message))),
            link(Path(folder)),
        ]
    return {name: 100 * one for name, one in zip(FIGURES, measured, strict=True)}


def main() -> None:
    """Prints the table; exits with 1 if something takes longer than its figure times the slack."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slack", type=float, default=2.0, help="times a figure that is accepted")
    slack = parser.parse_args().slack
    slow = []
    for name, found in measure().items():
        print(f"{name:<45} {found:>7.1f} µs, figure {FIGURES[name]:>6.1f}")
        if found > slack * FIGURES[name]:
            slow.append(name)
    if slow:
        sys.exit(
            f"More than {slack:g} times the figure: {'; '.join(slow)}. Record the new ones if the change is worth it."
        )


if __name__ == "__main__":
    main()
