"""Decode steps of a model on one rank, and divided among several ranks on CPU.

    scripts/bench ranks [--ranks 2] [--model-id DIR] [--rows 1,8,32] [--rounds 5] [--quantize int8] [--clock cpu]
                        [--gloo]

Prints medians in milliseconds, in turn over the rounds: one rank with all cores; one rank with the cores that one of
several ranks has; several ranks; the rank that takes longest for its part of the model, if it computes alone and waits
for no other; and the collective operations of such a step alone, while all ranks are ready for them. The floor of
several ranks is the time of one with as many cores, divided by their number. With `--clock cpu` the times are the
processor time of the first rank (but for the longest part), of all its threads and with the polling for other ranks:
less precise on an idle machine, but comparable on a busy one. With `--gloo` the ranks combine their results as on
several hosts, by default in shared memory.
"""

import argparse
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from scripts.benchmarks.engine_driver import Requests, collected
from scripts.benchmarks.rank_processes import RankCall, Ranks, rank_group
from tgi.hub.resolver import model_directory
from tgi.microkernel.messages.protocol import DeploymentLimits
from tgi.microkernel.settings.options import count, counts
from tgi.worker.attention import build_attention
from tgi.worker.cpu_kernels.build import build_library
from tgi.worker.cpu_kernels.kernels import CpuKernels
from tgi.worker.distributed.communicator import Communicator
from tgi.worker.distributed.group_memory import create_memory
from tgi.worker.distributed.shared_memory import SharedMemoryCommunicator
from tgi.worker.engine.engine import TorchEngine
from tgi.worker.host_cpu import usable_cores
from tgi.worker.models.loader import build_model, read_model_spec

PROMPT = 64  # tokens
PAGES = 512
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


class Load(NamedTuple):
    """A model to measure, on this process, whole or as one rank."""

    engine: TorchEngine
    communicator: Communicator | None
    hidden: int
    layers: int


_loads: dict[str, Load] = {}  # of this process


class LoneRank(SharedMemoryCommunicator):
    """Lets a rank compute its part of the model without the others: its results are not added up, and meaningless."""

    def __init__(self, kernels: CpuKernels, rank: int, ranks: int) -> None:
        only: Any = SimpleNamespace(rank=0, ranks=1)
        super().__init__(kernels, create_memory(), only)
        self.rank, self.ranks = rank, ranks


def load(call: RankCall, name: str, directory: Path, quantize: str | None, threads: int, gloo: bool = False) -> None:
    """Loads the whole model, or for "divided" and "alone" the part of this rank."""
    spec = read_model_spec(directory, "auto", quantize)
    assert spec.decoder is not None
    kernels = CpuKernels(build_library(str(spec.dtype).removeprefix("torch.")), threads, spec.dtype)
    communicator: Communicator | None = None
    if name == "divided":
        own_core = usable_cores() >= call.gloo.ranks
        communicator = call.gloo if gloo else call.communicator(kernels, own_core)
    elif name == "alone":
        communicator = LoneRank(kernels, call.gloo.rank, call.gloo.ranks)
    model = build_model(
        directory, "auto", "cpu", lambda *_: None, kernels=kernels, quantize=quantize, communicator=communicator
    )
    attention = build_attention(model.kv, PAGES, torch.device("cpu"))
    size = attention.page_size
    limits = DeploymentLimits(
        model.context_length, model.context_length - 1, PAGES * size, 2048, 64, PAGES, size, model.vocab_size, "", "cpu"
    )
    engine = TorchEngine(model, attention, limits)
    _loads[name] = Load(engine, communicator, spec.decoder.hidden, len(spec.decoder.layers))


def steps(call: RankCall, key: str, rows: int, number: int, clock: str) -> list[float]:
    """Milliseconds of some decode steps of that many rows."""
    engine = _loads[key].engine
    engine.reset()
    requests = Requests(engine, range(rows), PROMPT, number)
    for step in requests.prompts():
        collected(engine, engine.launch(step))
    now, times = CLOCKS[clock], []
    for step in requests.steps(number):
        began = now()
        collected(engine, engine.launch(step))
        times.append(1e3 * (now() - began))
    return times


def collectives(call: RankCall, key: str, rows: int, number: int, clock: str) -> list[float]:
    """Milliseconds of the collective operations of some greedy steps."""
    engine, communicator, hidden, layers = _loads[key]
    assert communicator is not None
    x = torch.zeros(rows, hidden, dtype=engine._model.kv.dtype)
    # Of each block of 32 logits three numbers.
    width = 3 * -(-engine.limits.vocab_size // communicator.ranks // 32) * rows
    blocks = torch.zeros(1, width)

    now, times = CLOCKS[clock], []
    for _ in range(number):
        began = now()
        for _ in range(2 * layers + 1):
            communicator.all_reduce(x)
        communicator.all_gather(blocks, [width] * communicator.ranks)
        times.append(1e3 * (now() - began))
    return times


def measure(ranks: Ranks, function: str, key: str, rows: int, options: argparse.Namespace) -> list[float]:
    """The times of the first of these ranks."""
    arguments = key, rows, options.steps, options.clock
    found: list[float] = ranks.call(f"scripts.benchmarks.ranks.{function}", *arguments)[0]
    return found


def longest(ranks: Ranks, rows: int, options: argparse.Namespace) -> list[float]:
    """The times of the rank that takes longest for its part, one rank after the other."""
    return max((measure(rank, "steps", "alone", rows, options) for rank in ranks.single()), key=statistics.median)


def main() -> None:
    """Parses the command line, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=count, default=2)
    parser.add_argument("--model-id", help="by default the demo model")
    parser.add_argument("--rows", type=counts, default="1,8,32")
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--steps", type=count, default=40, help="of a round")
    parser.add_argument("--quantize")
    parser.add_argument("--gloo", action="store_true")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    options = parser.parse_args()
    directory, cores = model_directory(options.model_id), usable_cores()
    each = max(1, cores // options.ranks)
    with rank_group(options.ranks) as ranks:
        for name, threads in (("all", cores), ("one", each), ("divided", each), ("alone", each)):
            ranks.call("scripts.benchmarks.ranks.load", name, directory, options.quantize, threads, options.gloo)
        print(
            f"| rows | 1 rank, {cores} threads | 1 rank, {each} threads | {options.ranks} ranks | longest part | "
            "collectives | floor |"
        )
        print("|---|---|---|---|---|---|---|")
        for rows in options.rows:
            found: dict[str, list[float]] = {name: [] for name in ("all", "one", "divided", "alone", "collectives")}
            for _ in range(options.rounds):
                found["all"] += measure(ranks.first, "steps", "all", rows, options)
                found["one"] += measure(ranks.first, "steps", "one", rows, options)
                found["divided"] += measure(ranks, "steps", "divided", rows, options)
                found["alone"] += longest(ranks, rows, options)
                found["collectives"] += measure(ranks, "collectives", "divided", rows, options)
            medians = {name: statistics.median(times) for name, times in found.items()}
            figures = (*medians.values(), medians["one"] / options.ranks)
            print(f"| {rows} | " + " | ".join(f"{figure:.2f}" for figure in figures) + " |")


if __name__ == "__main__":
    main()
