"""Measures products with quantized weights on a GPU, next to torch's with bfloat16 and to the device's own rates.

    scripts/bench quantized [--kinds awq,mxfp4] [--rows 1,16,64,256,2048] [--tune] [--json FILE] [--device cpu]

Weights have the shape of gate and up of an 8B model; each result is compared with torch's product of the dequantized
weight first. Times are of replayed CUDA graphs, over as many weights as the second-level cache cannot hold. A product's
share is that of the larger floor: the weight in its own format at the rate of a copy, or the operations at the rate of
a bfloat16 product of 8192 x 8192 matrices; `times` is torch's product in bfloat16 divided by it. With --tune, all
candidates of tiles are measured for each kind and number of rows, the quickest first. --device cpu: small shapes in
Triton's interpreter, which tests the script and measures nothing.
"""

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tgi.microkernel.settings.options import counts
from tgi.worker.quantization.weight import QuantizedWeight

SHAPE, SMALL = (28672, 4096), (48, 256)  # outputs and inputs
CACHE = 128 << 20  # bytes that no second-level cache holds
MAX_ERROR = 0.006  # of a product, relative to its norm; rounded activations: MAX_ROUNDED
MAX_ROUNDED = 0.05
KINDS = ("int8", "int4", "awq", "mxfp4", "nvfp4", "fp8", "fp8 blocks")
# Candidates of --tune by the rows that they are for: rows, outputs, inputs, warps, stages.
CANDIDATES = {
    16: [(16, 32, 256, 4, 4), (16, 32, 128, 4, 5), (16, 64, 256, 4, 3), (16, 64, 128, 4, 4), (16, 32, 512, 4, 3)],
    64: [(64, 64, 128, 4, 3), (64, 64, 64, 4, 4), (64, 32, 128, 4, 4), (32, 64, 128, 4, 3), (64, 128, 64, 8, 3)],
    2048: [(128, 128, 64, 8, 3), (128, 128, 64, 8, 4), (128, 256, 64, 8, 3), (256, 128, 64, 8, 3)],
}  # fmt: skip


def weight_of(kind: str, outputs: int, inputs: int, device: torch.device, seed: int = 0) -> QuantizedWeight:
    """A random weight of a kind, made on the device."""
    generator = torch.Generator(device).manual_seed(seed)

    def random(columns: int, low: int, high: int, dtype: torch.dtype) -> Tensor:
        return torch.randint(low, high, (outputs, columns), generator=generator, device=device).to(dtype)

    def scales(columns: int, dtype: torch.dtype = torch.float16) -> Tensor:
        return (0.01 * torch.rand(outputs, columns, generator=generator, device=device)).to(dtype)

    packed = random(inputs // 2, 0, 256, torch.uint8)
    if kind == "int8":
        return QuantizedWeight(random(inputs, -127, 128, torch.int8), scales(1), None)
    if kind == "int4":
        return QuantizedWeight(packed, scales(1), None, random(inputs // 32, 0, 8, torch.uint8))
    if kind == "awq":
        return QuantizedWeight(packed, scales(inputs // 128), -8 * scales(inputs // 128))
    if kind in ("mxfp4", "nvfp4"):
        group, low, high = (32, 110, 126) if kind == "mxfp4" else (16, 32, 96)
        return QuantizedWeight(packed, scales(1, torch.float64), None, random(inputs // group, low, high, torch.int8))
    codes = random(inputs, -127, 128, torch.float32).to(torch.float8_e4m3fn)
    return QuantizedWeight(codes, scales(1 if kind == "fp8" else inputs // 128, torch.float32), None)


def seconds(calls: Sequence[Callable[[], object]], device: torch.device) -> float:
    """Seconds of one of these calls, the median of five replays of all."""
    if device.type == "cpu":
        began = time.perf_counter()
        calls[0]()
        return time.perf_counter() - began
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    found: list[float] = []
    for _ in range(6):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1e3 / len(calls))
    return float(statistics.median(found[1:]))


def check(found: Tensor, x: Tensor, weight: QuantizedWeight, rounded: bool) -> float:
    """The error of a product. Raises SystemExit if it is too large."""
    expected = F.linear(x.float(), weight.dequantized(torch.float32))
    error = float((found.float() - expected).norm() / expected.norm())
    if not error <= (MAX_ROUNDED if rounded else MAX_ERROR):
        raise SystemExit(f"a product of {len(x)} rows is off by {error:.3g} of its norm")
    return error


def compile_tile(kind: str, tile: tuple[int, ...]) -> None:
    """Compiles the kernel of a candidate, in a process of its own: the cache on disk has it then."""
    from tgi.worker.gpu_kernels.matmul import Tile
    from tgi.worker.gpu_kernels.quantized_matmul import quantized_matmul

    device = torch.device("cuda")
    weight = weight_of(kind, SHAPE[0], SHAPE[1], device)
    quantized_matmul(torch.randn(1, SHAPE[1], device=device, dtype=torch.bfloat16), weight, None, Tile(*tile))


def main() -> None:
    """Parses the command line, measures, prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--rows", type=counts, default="1,16,64,256,2048")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    device = torch.device(options.device)
    kinds = [kind.strip() for kind in options.kinds.split(",")]
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        parser.error(f"no kind {', '.join(unknown)}; there are {', '.join(KINDS)}")
    if options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
        found = measure(kinds, options.rows, SMALL, device, torch.float32, options.tune)
    else:
        if options.tune:
            with ProcessPoolExecutor(8, mp_context=get_context("spawn")) as pool:
                tiles = [(kind, tile) for kind in kinds for rows in candidates(options.rows) for tile in rows]
                for job in [pool.submit(compile_tile, *one) for one in tiles]:
                    if (error := job.exception()) is not None:
                        print(f"a candidate does not compile: {str(error)[:100]}")
        found = measure(kinds, options.rows, SHAPE, device, torch.bfloat16, options.tune)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))


def candidates(rows: Sequence[int]) -> list[list[tuple[int, int, int, int, int]]]:
    """Those for these numbers of rows, each list once."""
    return [tiles for most, tiles in CANDIDATES.items() if any(range_of(count) == most for count in rows)]


def range_of(rows: int) -> int:
    """The key of CANDIDATES for this number of rows."""
    return next((most for most in CANDIDATES if rows <= most), max(CANDIDATES))


def measure(
    kinds: Sequence[str],
    numbers: Sequence[int],
    shape: tuple[int, int],
    device: torch.device,
    dtype: torch.dtype,
    tune: bool,
) -> list[dict[str, Any]]:
    """The figures of each kind and number of rows, printed as they are found."""
    # Imported only now: with --device cpu, Triton must find TRITON_INTERPRET set.
    from triton import OutOfResources

    from tgi.worker.gpu_kernels.kernels import GpuKernels
    from tgi.worker.gpu_kernels.matmul import Tile
    from tgi.worker.gpu_kernels.quantized_matmul import choose_tile, quantized_matmul
    from tgi.worker.layers.linear import KERNEL_MAX_ROWS_FP8, find_product

    outputs, inputs = shape
    cuda = device.type == "cuda"
    gpu = GpuKernels(torch.cuda.get_device_capability() if cuda else (9, 0))
    copy, product = rates(device, dtype)
    print(f"copy {copy / 1e12:.2f} TB/s, product {product / 1e12:.0f} TFLOP/s; weights [{outputs}, {inputs}]")
    plain = [torch.randn(outputs, inputs, device=device, dtype=dtype) for _ in range(2 if cuda else 1)]
    count = max(1, CACHE // (outputs * inputs // 2)) if cuda else 1
    found: list[dict[str, Any]] = []
    for kind, rows in itertools.product(kinds, numbers):
        x = torch.randn(rows, inputs, device=device, dtype=dtype)
        whole = seconds([partial(F.linear, x, weight) for weight in plain], device)
        weights = [weight_of(kind, outputs, inputs, device, seed) for seed in range(count)]
        ways = {"as served": [partial(find_product(weight, None, dtype, gpu), x) for weight in weights]}
        if tune:
            for tile in (choose_tile(weights[0], dtype, rows), *(Tile(*one) for one in CANDIDATES[range_of(rows)])):
                calls = [partial(quantized_matmul, x, weight, None, tile) for weight in weights]
                ways[" ".join(map(str, tile))] = calls
        results = []
        for name, calls in ways.items():
            try:
                error = check(calls[0](), x, weights[0], kind == "fp8" and rows > KERNEL_MAX_ROWS_FP8)
                results.append((seconds(calls, device), name, error))
            except OutOfResources as lacking:
                print(f"{kind:<11}{rows:>5} rows {name:<22}{lacking}")
        for spent, name, error in sorted(results):
            floor = max(weights[0].nbytes / copy, 2 * rows * outputs * inputs / product)
            one = {"kind": kind, "rows": rows, "way": name, "us": 1e6 * spent, "share": floor / spent}
            found.append(one | {"times": whole / spent, "error": error})
            print(
                f"{kind:<11}{rows:>5} rows {name:<22}{1e6 * spent:>9.1f} us, {floor / spent:>4.0%} of the floor, "
                f"{whole / spent:.2f} times, off by {error:.1e}",
                flush=True,
            )
    return found


def rates(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Bytes per second of a copy, read and written, and operations per second of a product."""
    cuda = device.type == "cuda"
    large = torch.ones(CACHE if cuda else 1 << 10, dtype=torch.int8, device=device)
    other, side = torch.empty_like(large), 8192 if cuda else 64
    square = torch.randn(side, side, device=device, dtype=dtype)
    copying = seconds([partial(other.copy_, large)] * 4, device)
    return 2 * large.nbytes / copying, 2 * side**3 / seconds([partial(torch.matmul, square, square)], device)


if __name__ == "__main__":
    main()
