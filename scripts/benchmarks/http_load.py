"""The load of `scripts/bench stack`: requests of lengths as in ShareGPT, sent by several processes, and their rates.

Imports no torch, since each of the processes imports this module.
"""

import random
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from typing import Any, NamedTuple

from scripts.benchmarks.streams import Event, burst

ROUTE = "/generate_stream"
MEAN_INPUT, MEAN_OUTPUT = 224, 194  # tokens, of ShareGPT


class Load(NamedTuple):
    """One request, in tokens."""

    seed: int
    inputs: int
    outputs: int


def loads(requests: int, scale: float = 1.0, seed: int = 0) -> list[Load]:
    """Requests with exponentially distributed lengths, from an eighth to three times the mean."""
    rng = random.Random(seed)

    def length(mean: float) -> int:
        return max(1, round(scale * min(max(rng.expovariate(1 / mean), mean / 8), 3 * mean)))

    return [Load(seed * 100_000 + number, length(MEAN_INPUT), length(MEAN_OUTPUT)) for number in range(requests)]


def prompt(load: Load) -> str:
    """Text of that many tokens of shapes.write_tokenizer: a letter for each, each a token of its own behind a dot."""
    rng = random.Random(load.seed)
    return "".join(rng.choice(LETTERS) + "." for _ in range(load.inputs // 2)) + "x" * (load.inputs % 2)


LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"  # no merges begin with them


def body(load: Load) -> dict[str, Any]:
    """The request."""
    return {"inputs": prompt(load), "parameters": {"max_new_tokens": load.outputs}}


class Generated(NamedTuple):
    """What a stream has brought."""

    sent: float
    events: list[Event]

    @property
    def ids(self) -> list[int]:
        """Its tokens."""
        return [event.data["token"]["id"] for event in self.events]

    @property
    def logprobs(self) -> list[float]:
        """Of its tokens."""
        return [event.data["token"]["logprob"] for event in self.events]


def _burst(port: int, load: list[Load]) -> list[Generated]:
    """Runs in a process of its own. Times are of time.perf_counter, the same clock in all of them on Linux."""
    return [Generated(one.sent, one.events()) for one in burst(port, ROUTE, [body(each) for each in load])]


def run_load(pool: ProcessPoolExecutor, clients: int, port: int, load: list[Load]) -> list[Generated]:
    """All requests at once, from all clients, in the order of `load`."""
    parts = pool.map(_burst, [port] * clients, [load[first::clients] for first in range(clients)])
    found: dict[int, Generated] = {}
    for first, part in enumerate(parts):
        found |= dict(zip(range(first, len(load), clients), part, strict=True))
    return [found[number] for number in range(len(load))]


class Rate(NamedTuple):
    """Throughput and latencies of a load."""

    seconds: float
    tokens_per_s: float
    first_ms: float  # median
    between_ms: float  # median of the time between two tokens of a stream
    p99_ms: float


def rate(streams: Sequence[Generated]) -> Rate:
    """Of streams that were sent at once."""
    begin, end = min(one.sent for one in streams), max(one.events[-1].time for one in streams)
    tokens = sum(len(one.events) for one in streams)
    gaps = sorted(later.time - event.time for one in streams for event, later in pairwise(one.events)) or [0.0]
    first = statistics.median(one.events[0].time - one.sent for one in streams)
    return Rate(
        end - begin,
        tokens / (end - begin),
        1e3 * first,
        1e3 * statistics.median(gaps),
        1e3 * gaps[int(0.99 * (len(gaps) - 1))],
    )
