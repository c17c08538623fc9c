"""Shows the parts of a decode step on our CPU kernels, next to the memory floor.

    scripts/bench step [--shape 135m] [--rows 1,8,32] [--context 200] [--rounds 60]
        [--quantize int8]

The model has the layers of SmolLM2-135M, Qwen2.5-0.5B or Llama-3.2-1B, or two of width 64, a vocabulary of 32,000 and
random weights. Prints medians over the rounds. The floor is the time in which the same threads, at the same moments,
read as many bytes as the step must read: all weights once, and the keys and values of the contexts. Other load
affects both.
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from scripts.benchmarks import lora
from scripts.benchmarks.shapes import CONFIG, SHAPES, stored
from tgi.microkernel.options import count, counts
from tgi.microkernel.settings import QUANTIZED_AT_LOAD
from tgi.worker.attention import page_bytes, page_size
from tgi.worker.cpu_kernels.arena import Arena
from tgi.worker.models.decoder import DecoderModel

MATRICES = ("qkv", "output", "gate and up", "down")
READ = 256 << 20  # bytes read for the floor


class Watch:
    """Milliseconds of the parts of one step."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a call and measures it."""

        def measured(*arguments: Any, **named: Any) -> Any:
            with self.part(name):
                return call(*arguments, **named)

        return measured

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Adds the time of the block."""
        began = time.perf_counter()
        yield
        self.spent[name] += 1e3 * (time.perf_counter() - began)


def operations(model: DecoderModel) -> list[str]:
    """The table's names of the operations of the model's program."""
    program = model._program
    assert program is not None
    matrices = iter(MATRICES * len(model._config.layers))
    return [f"linear: {next(matrices)}" if name == "linear" else name for name in program.operations]


def measure(shape: str, rows: int, context: int, rounds: int, quantize: str | None) -> tuple[dict[str, float], float]:
    """Milliseconds of each part, the whole step, and the floor."""
    config = CONFIG | SHAPES[shape] | {"vocab_size": 32000, "max_position_embeddings": context + 2 * rounds + 64}
    bench = lora.Bench([], context, rounds + 8, False, quantize, config, rows)
    model = bench.engine._model
    assert isinstance(model, DecoderModel)
    program, kernels = model._program, model.kv.cpu_kernels
    assert program is not None
    assert kernels is not None
    names = operations(model)
    watch = Watch()
    program.run = watch.around("program", program.run)  # type: ignore[method-assign]
    program.clock = torch.zeros(len(names), dtype=torch.float64)
    weights = stored((model._weights.layers, model._weights.head))
    cached = rows * (context + rounds / 2) * page_bytes(model.kv, model.device) / page_size(model.kv, model.device)
    memory = Arena().allocate(READ).fill_(1)  # in large pages, as the weights are
    measured = []
    for number in range(rounds + 5):
        program.clock.zero_()
        watch.spent.clear()
        with watch.part("step"):
            bench.decode(0)
        spent = defaultdict(float, watch.spent)
        for name, seconds in zip(names, program.clock.tolist(), strict=True):
            spent[name] += 1e3 * seconds
        spent["rest"] = spent["step"] - spent["program"]
        with watch.part("floor"):
            kernels.read_memory(memory)
        spent["floor"] = watch.spent["floor"] * (weights + cached) / memory.nbytes
        if number >= 5:
            measured.append(spent)
    found = {name: statistics.median(one[name] for one in measured) for name in measured[0]}
    floor = found.pop("floor")
    return found, floor


def main() -> None:
    """Parses the command line, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="135m")
    parser.add_argument("--rows", type=counts, default="1,8,32")
    parser.add_argument("--context", type=count, default=200)
    parser.add_argument("--rounds", type=count, default=60)
    parser.add_argument("--quantize", choices=list(QUANTIZED_AT_LOAD))
    options = parser.parse_args()
    columns = {}
    for rows in options.rows:
        columns[rows] = measure(options.shape, rows, options.context, options.rounds, options.quantize)
    first = next(iter(columns.values()))[0]
    parts = [name for name in first if ":" in name or name in ("norm", "rope", "attention", "add", "lora", "head")]
    print(f"| ms, {options.shape}, context {options.context} |" + "".join(f" {rows} rows |" for rows in columns))
    print("|---|" + "---|" * len(columns))
    for name in [*parts, "rest", "step"]:
        print(f"| {name} |" + "".join(f" {found[name]:.2f} |" for found, _ in columns.values()))
    print("| floor of memory |" + "".join(f" {floor:.2f} |" for _, floor in columns.values()))
    print("| floor / step |" + "".join(f" {floor / found['step']:.0%} |" for found, floor in columns.values()))
