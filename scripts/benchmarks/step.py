"""Shows the parts of a decode step and of a prompt on our CPU kernels, next to the floors of memory and arithmetic.

    scripts/bench step [--shape 135m | --model-id FILE.gguf] [--rows 1,8,32] [--context 200] [--prefill 512]
        [--rounds 60] [--quantize int8] [--dtype float32] [--cpu avx2]

The model has the layers of SmolLM2-135M, Qwen2.5-0.5B or Llama-3.2-1B, or two of width 64, a vocabulary of 32,000
and random weights in bfloat16; or it is a given one in its own bits. Prints medians over the rounds. Floors are
measured by the same threads at the same moments, so that other load affects them too: the time in which they read
as many bytes as the step must read, all weights once, and the keys and values of the contexts; and the time in
which they compute as many multiply-adds as the step must compute, with the instruction of the kernels' products
and no memory, at the best rate of all rounds.
"""

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

from scripts.benchmarks import lora
from scripts.benchmarks.engine_driver import collected
from scripts.benchmarks.shapes import CONFIG, SHAPES, matrices, stored
from tgi.hub.resolver import model_directory
from tgi.microkernel.settings.options import count, counts
from tgi.microkernel.settings.table import QUANTIZED_AT_LOAD
from tgi.worker.attention import page_bytes, page_size
from tgi.worker.checkpoint import Checkpoint, RandomCheckpoint
from tgi.worker.cpu_kernels.arena import Arena
from tgi.worker.host_cpu import kernel_set, limit_instruction_set
from tgi.worker.instruction_sets import BY_NAME, ELEMENTS
from tgi.worker.models.config_reader import read_config
from tgi.worker.models.decoder import DecoderModel
from tgi.worker.models.loader import read_model_spec
from tgi.worker.quantization.weight_sources import WeightSource

MATRICES = ("qkv", "output", "gate and up", "down")
READ = 256 << 20  # bytes read for the floor of memory
CHUNKS = 1000  # of multiply-adds for the floor of arithmetic, some ten milliseconds


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


class Column(NamedTuple):
    """One column of the table, in milliseconds."""

    title: str
    parts: dict[str, float]
    memory: float  # the floor
    operations: float
    peak: float  # the best rate of multiply-adds that any round saw, operations per millisecond


class Measurement:
    """The parts and floors of one kind of step of a model."""

    def __init__(self, bench: lora.Bench) -> None:
        model = bench.engine._model
        assert isinstance(model, DecoderModel)
        program, kernels = model._program, model.kv.cpu_kernels
        if program is None or kernels is None:
            sys.exit("There is nothing to measure: our own kernels cannot be had here.")
        self.model, self._kernels, self._program = model, kernels, program
        self._names = operations(model)
        self._watch = Watch()
        program.run = self._watch.around("program", program.run)  # type: ignore[method-assign]
        program.clock = torch.zeros(len(self._names), dtype=torch.float64)
        self._memory = Arena().allocate(READ).fill_(1)  # in large pages, as the weights are
        self._measured: list[dict[str, float]] = []
        self._peak = 0.0

    def step(self, work: Callable[[], object], read: float, operations: float, counted: bool) -> None:
        """Runs a step that must read so many bytes and compute so many operations, then measures its floors."""
        assert self._program.clock is not None
        self._program.clock.zero_()
        self._watch.spent.clear()
        with self._watch.part("step"):
            work()
        spent = defaultdict(float, self._watch.spent)
        for name, seconds in zip(self._names, self._program.clock.tolist(), strict=True):
            spent[name] += 1e3 * seconds
        spent["rest"] = spent["step"] - spent["program"]
        with self._watch.part("memory"):
            self._kernels.read_memory(self._memory)
        with self._watch.part("arithmetic"):
            computed = self._kernels.fma_peak(CHUNKS)
        self._peak = max(self._peak, computed / self._watch.spent["arithmetic"])
        spent["memory"] = self._watch.spent["memory"] * read / self._memory.nbytes
        self._operations = operations
        if counted:
            self._measured.append(spent)

    def column(self, title: str) -> Column:
        """The medians."""
        found = {name: statistics.median(one[name] for one in self._measured) for name in self._measured[0]}
        return Column(title, found, found.pop("memory"), self._operations, self._peak)


def decode(config: dict[str, Any], source: WeightSource, rows: int, options: argparse.Namespace) -> Column:
    """Decode steps of these rows."""
    context, rounds = options.context, options.rounds
    bench = lora.Bench([], context, rounds + 8, False, options.quantize, config, rows, options.dtype, source)
    found = Measurement(bench)
    model, position = found.model, context + rounds / 2
    weights = stored((model._weights.layers, model._weights.head), rows)
    cached = rows * position * page_bytes(model.kv, model.device) / page_size(model.kv, model.device)
    operations = rows * (2 * matmul_weights(config) + 2 * head_weights(config) + attention_operations(config, position))
    for number in range(rounds + 5):
        found.step(lambda: bench.decode(0), weights + cached, operations, number >= 5)
    return found.column(f"{rows} rows")


def prefill(config: dict[str, Any], source: WeightSource, tokens: int, options: argparse.Namespace) -> Column:
    """A prompt of that many tokens, computed in one step without its past."""
    bench = lora.Bench([], tokens, 2, False, options.quantize, config, 1, options.dtype, source)
    found, requests = Measurement(bench), bench.kinds[0]
    weights = stored((found.model._weights.layers, found.model._weights.head), tokens)
    attended = tokens * attention_operations(config, (tokens + 1) / 2)
    operations = 2 * tokens * matmul_weights(config) + 2 * head_weights(config) + attended

    def work() -> None:
        for step in requests.prompts():
            collected(bench.engine, bench.engine.launch(step))

    for number in range(max(3, options.rounds // 6) + 1):
        found.step(work, weights, operations, number >= 1)
    return found.column(f"prompt of {tokens}")


def matmul_weights(config: dict[str, Any]) -> int:
    """Numbers of the matrices of all layers."""
    each = sum(outputs * inputs for outputs, inputs in matrices(config).values())
    return int(config["num_hidden_layers"] * each)


def head_weights(config: dict[str, Any]) -> int:
    """Numbers of the output head."""
    return int(config["vocab_size"] * config["hidden_size"])


def attention_operations(config: dict[str, Any], positions: float) -> float:
    """Operations of all layers for a token that attends to so many positions: scores and their sum of values."""
    return 4 * float(config["num_hidden_layers"] * config["hidden_size"]) * positions


def main() -> None:
    """Parses the command line, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="135m")
    parser.add_argument("--model-id", help="a model in place of a shape")
    parser.add_argument("--rows", type=counts, default="1,8,32")
    parser.add_argument("--context", type=count, default=200)
    parser.add_argument(
        "--prefill", type=counts, default="512", help="tokens of prompts, comma separated; at most 4096"
    )
    parser.add_argument("--rounds", type=count, default=60)
    parser.add_argument("--quantize", choices=list(QUANTIZED_AT_LOAD))
    parser.add_argument("--dtype", type=data_type, default="bfloat16", help="of activations and KV cache")
    parser.add_argument("--cpu", choices=BY_NAME, help="the instruction set")
    options = parser.parse_args()
    limit_instruction_set(options.cpu)
    longest = max(options.context + 2 * options.rounds, *options.prefill) + 64
    with ExitStack() as opened:
        source: WeightSource = RandomCheckpoint(torch.device("cpu"))
        config = CONFIG | SHAPES[options.shape] | {"vocab_size": 32000}
        if options.model_id:
            directory = model_directory(options.model_id)
            config = read_config(directory)
            source = read_model_spec(directory, "auto").scheme.stored_source(
                opened.enter_context(Checkpoint(directory))
            )
        config |= {"max_position_embeddings": longest}
        columns = [decode(config, source, rows, options) for rows in options.rows]
        columns += [prefill(config, source, tokens, options) for tokens in options.prefill]
    chosen = kernel_set()
    title = options.model_id or options.shape
    print(f"{title}, context {options.context}, {options.dtype}, {chosen.name if chosen else ''}\n")
    print("\n".join(table(columns)))


def table(columns: list[Column]) -> list[str]:
    """The lines of a table in Markdown."""
    first = columns[0].parts
    parts = [name for name in first if ":" in name or name in ("norm", "rope", "attention", "add", "lora", "head")]
    lines = ["| ms |" + "".join(f" {one.title} |" for one in columns), "|---|" + "---|" * len(columns)]
    rows = {name: [one.parts[name] for one in columns] for name in [*parts, "rest", "step"]}
    lines += [f"| {name} |" + "".join(f" {value:.2f} |" for value in values) for name, values in rows.items()]
    peak = max(one.peak for one in columns)  # other load only lowers a rate
    arithmetic = [one.operations / peak for one in columns]
    for name, floors in (("memory", [one.memory for one in columns]), ("arithmetic", arithmetic)):
        lines.append(f"| floor of {name} |" + "".join(f" {floor:.2f} |" for floor in floors))
        shares = [floor / one.parts["step"] for floor, one in zip(floors, columns, strict=True)]
        lines.append(f"| {name} / step |" + "".join(f" {share:.0%} |" for share in shares))
    return lines


def data_type(name: str) -> torch.dtype:
    """A type by its name. Raises ArgumentTypeError."""
    if name not in ELEMENTS:
        raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(ELEMENTS)}")
    return getattr(torch, name)
