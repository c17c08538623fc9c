"""Measures the cost of LoRA adapters: a decode step of 16 rows that share them, relative to one without.

    OMP_NUM_THREADS=1 scripts/bench lora [--adapters 1,2,4,12+4] [--ranks 8,16,64] [--rounds 40]

The model has the shape of SmolLM2-135M (bfloat16, random weights); every adapter changes all seven projections of every
layer. Rows use the adapters in turn; "12+4" means that 12 rows have four adapters and four rows none. All kinds of
steps run in turn, so that other load affects them alike. Prints medians of the thread's CPU time (so run it with one
thread), and of the ratios to the plain step of the same round.
"""

import argparse
import statistics
import time
from typing import Any

import torch

from scripts.benchmarks.engine_driver import Requests, collected, flow
from scripts.benchmarks.shapes import CONFIG
from tgi.microkernel.messages.protocol import DeploymentLimits, LoadedAdapter
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.microkernel.settings.options import count, counts
from tgi.worker.attention import build_attention, page_size
from tgi.worker.checkpoint import RandomCheckpoint
from tgi.worker.cpu_kernels.selection import select_cpu_kernels
from tgi.worker.decoder_config import DecoderConfig
from tgi.worker.distributed.sharding import whole_model
from tgi.worker.engine.engine import TorchEngine
from tgi.worker.engine.torch_threads import choose_threads
from tgi.worker.lora.projections import PROJECTIONS, projection_shapes
from tgi.worker.lora.registry import FetchedAdapter
from tgi.worker.lora.weights import LoraPair, LoraWeights
from tgi.worker.models.config_reader import read_decoder_config
from tgi.worker.models.decoder import DecoderModel
from tgi.worker.models.loader import ModelSpec
from tgi.worker.models.weight_loader import DecoderWeightLoader
from tgi.worker.quantization.weight_sources import QuantizingWeightSource, WeightSource

ROWS = 16
ADAPTERS = 4  # of each rank
CPU = torch.device("cpu")


def make_adapter(
    config: DecoderConfig, rank: int, device: torch.device = CPU, dtype: torch.dtype = torch.float32
) -> LoraWeights:
    """An adapter of every projection that is not an expert's."""
    shapes = projection_shapes(config)

    def pair(name: str, routed: bool) -> LoraPair | None:
        if name not in shapes or (routed and name in ("gate", "up", "down")):
            return None
        sizes = (shapes[name].inputs, rank), (rank, shapes[name].outputs)
        return LoraPair(*(torch.randn(size, device=device, dtype=dtype) / 100 for size in sizes))

    return LoraWeights([[pair(name, layer.routed) for name in PROJECTIONS] for layer in config.layers])


def add_adapters(engine: TorchEngine, rank: int, count: int) -> list[SamplingParams]:
    """Registers adapters of this rank for the engine's model. Returns the parameters of a greedy request with each."""
    model = engine._model
    assert isinstance(model, DecoderModel)
    for number in range(count):
        name = f"{rank}-{number}"
        made = make_adapter(model._config, rank, model.device, model._adapter_dtype)
        engine.adapters.add_adapter(FetchedAdapter(LoadedAdapter(name, "", name.encode()), model.prepare_adapter(made)))
    names = [f"{rank}-{number}" for number in range(count)]
    return [SamplingParams(0, adapter=name, adapter_digest=name.encode()) for name in names]


class Bench:
    """An engine with 16 slots for each kind of step."""

    def __init__(
        self,
        kinds: list[tuple[str, int]],
        prompt: int,
        rounds: int,
        plain: bool,
        quantize: str | None = None,
        shape: dict[str, Any] = CONFIG,
        rows: int = ROWS,
        dtype: torch.dtype = torch.bfloat16,
        source: WeightSource | None = None,  # in place of random weights
    ) -> None:
        config = read_decoder_config(shape)
        kernels = None if plain else select_cpu_kernels([ModelSpec(config, dtype)], "cpu")[0]
        if kernels is None:
            choose_threads()
        source = source or RandomCheckpoint(torch.device("cpu"))
        if quantize:
            source = QuantizingWeightSource(source, quantize)
        reader = DecoderWeightLoader(source, config, whole_model(config), dtype, CPU, kernels)
        with torch.inference_mode():
            model = DecoderModel(config, reader.load(lambda percent: None), dtype, CPU, kernels)
        size = page_size(model.kv, CPU)
        each = -(-(prompt + rounds + 2) // size)
        slots = rows * (len(kinds) + 1)
        pages, total = slots * each, size * each
        limits = DeploymentLimits(
            total,
            total - 1,
            size * pages,
            4096,
            slots,
            pages,
            size,
            config.vocab_size,
            str(dtype).removeprefix("torch."),
            "cpu",
        )
        self.engine = TorchEngine(model, build_attention(model.kv, pages, CPU), limits)
        for rank in sorted({rank for _, rank in kinds}):
            add_adapters(self.engine, rank, ADAPTERS)
        samplings = [[SamplingParams(0)] * rows]
        for spread, rank in kinds:
            adapted, _, _ = spread.partition("+")
            adapters, having = (ADAPTERS, int(adapted)) if "+" in spread else (int(adapted), rows)
            names = [f"{rank}-{row % adapters}" if row < having else "" for row in range(rows)]
            samplings.append([SamplingParams(0, adapter=name, adapter_digest=name.encode()) for name in names])
        self.kinds = []
        for at, of_rows in enumerate(samplings):
            own = range(at * rows, (at + 1) * rows)
            self.kinds.append(Requests(self.engine, own, prompt, rounds + 2, of_rows))
            flow(self.engine, self.kinds[-1].prompts())

    def decode(self, kind: int) -> float:
        """CPU seconds for one token in each row of a kind of step; 0 is without adapters."""
        step = self.kinds[kind].next()
        began = time.thread_time()
        pending = self.engine.launch(step)
        collected(self.engine, pending)
        return time.thread_time() - began


def spreads(text: str) -> list[str]:
    """How adapters are spread over the rows, comma separated. Raises ArgumentTypeError in words."""
    known = [*map(str, range(1, ADAPTERS + 1)), *(f"{adapted}+{ROWS - adapted}" for adapted in range(1, ROWS))]
    found = text.split(",")
    for item in found:
        if item not in known:
            some = f"a number of adapters from 1 to {ADAPTERS}, or a division of the {ROWS} rows such as 12+4"
            raise argparse.ArgumentTypeError(f"{item!r} is not {some}")
    return found


def main() -> None:
    """Parses the command line, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapters", type=spreads, default="1,2,4,12+4")
    parser.add_argument("--ranks", type=counts, default="8,16,64")
    parser.add_argument("--rounds", type=count, default=40)
    parser.add_argument("--prompt", type=count, default=64)
    parser.add_argument("--plain", action="store_true", help="torch's kernels alone")
    options = parser.parse_args()
    kinds = [(spread, rank) for rank in options.ranks for spread in options.adapters]
    bench = Bench(kinds, options.prompt, options.rounds + 1, options.plain)
    measured = [[bench.decode(kind) for kind in range(len(kinds) + 1)] for _ in range(options.rounds + 1)]
    del measured[0]  # the first use of every path
    plain = 1000 * statistics.median(row[0] for row in measured)
    print(f"{ROWS} rows; without adapters {plain:.1f} ms")
    print("| rank | adapters | ms | ratio |\n|---|---|---|---|")
    for at, (spread, rank) in enumerate(kinds, 1):
        needed = 1000 * statistics.median(row[at] for row in measured)
        ratio = statistics.median(row[at] / row[0] for row in measured)
        print(f"| {rank} | {spread} | {needed:.1f} | {ratio:.2f} |")
