"""Measures matrix products: bfloat16 and quantized weights in our CPU kernels, and oneDNN's bfloat16 in torch.

    scripts/bench kernels [--shape 4864x896] [--rows 1,8,32,512] [--threads 1,2] [--seconds 0.2]

Each call multiplies rows with a different weight; there are enough weights to leave the second-level caches between
two uses. Kinds run in turn, so that other load affects them alike. Prints medians over the rounds: microseconds per
call, GB/s of the weight in its own format, GFLOP/s, and the speed relative to our bfloat16 in the same round. Calls
with one thread are measured in CPU time, others in wall-clock time.
"""

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tgi.microkernel.settings.options import count, counts, seconds
from tgi.worker.cpu_kernels.build import KernelsUnavailable, build_library
from tgi.worker.cpu_kernels.kernels import CpuKernels
from tgi.worker.layers.linear import reorders
from tgi.worker.quantization.weight import QuantizedWeight

MEMORY = 64 << 20  # bytes of the weights of a kind in bfloat16
FORMS = {  # bits, group, shifts
    "8 bits, groups of 32": (8, 32, False),
    "8 bits, groups of 128": (8, 128, False),
    "4 bits, groups of 32": (4, 32, False),
    "4 bits, groups of 32, shifts": (4, 32, True),
    "4 bits, groups of 128": (4, 128, False),
}
OURS = "bfloat16"


class Kind(NamedTuple):
    """One implementation."""

    call: Callable[[Tensor, int], object]  # (rows, index of the weight)
    bytes: int  # of a weight


def shape(text: str) -> tuple[int, int]:
    """Outputs and inputs of a layer, from 4864x896."""
    outputs, _, inputs = text.partition("x")
    return count(outputs), count(inputs)


def main() -> None:
    """Measures all kinds and prints a table for each number of threads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=shape, default="4864x896", help="outputs x inputs")
    parser.add_argument("--rows", type=counts, default="1,8,32,128,512")
    parser.add_argument("--threads", type=counts, default=",".join(map(str, sorted({1, os.cpu_count() or 1}))))
    parser.add_argument("--seconds", type=seconds, default=0.1, help="that each kind is measured in a round, about")
    parser.add_argument("--rounds", type=count, default=9)
    options = parser.parse_args()
    try:
        build_library(OURS)
    except KernelsUnavailable as reason:
        sys.exit(f"There is nothing to measure: our own kernels cannot be had here ({reason}).")
    outputs, inputs = options.shape
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores; weights [{outputs}, {inputs}]")
    for threads in options.threads:
        kinds = kinds_of(outputs, inputs, threads)
        for rows in options.rows:
            show(kinds, outputs * inputs, rows, threads, measure(kinds, inputs, rows, threads, options))


def kinds_of(outputs: int, inputs: int, threads: int) -> dict[str, Kind]:
    """The kinds by name, ours first."""
    kernels, count = CpuKernels(build_library(OURS), threads), max(1, MEMORY // (2 * outputs * inputs))
    plain = torch.randn(outputs, inputs).to(torch.bfloat16)
    packed = [kernels.pack_weight(plain) for _ in range(count)]
    kinds = {OURS: Kind(lambda x, n: kernels.linear(x, packed[n % count]), plain.nbytes)}
    for name, form in FORMS.items():
        if inputs % form[1]:
            continue
        weight = quantized(outputs, inputs, *form)
        few = [kernels.pack_weight(weight) for _ in range(count)]
        kinds[name] = Kind(lambda x, n, few=few: kernels.linear(x, few[n % count]), weight.nbytes)  # type: ignore[misc]
    if reorders(torch.bfloat16):
        reordered = [torch.ops.mkldnn._reorder_linear_weight(plain.clone()) for _ in range(count)]
        product = torch.ops.mkldnn._linear_pointwise.default
        kinds["bfloat16, oneDNN"] = Kind(
            lambda x, n: product(x, reordered[n % count], None, "none", [], ""), plain.nbytes
        )
    return kinds


def quantized(outputs: int, inputs: int, bits: int, group: int, shifts: bool) -> QuantizedWeight:
    """A weight of random codes."""
    codes = torch.randint(256, (outputs, inputs * bits // 8)).to(torch.uint8)
    scales = torch.rand(outputs, inputs // group).to(torch.float16)
    return QuantizedWeight(codes.view(torch.int8) if bits == 8 else codes, scales, scales if shifts else None)


def measure(
    kinds: dict[str, Kind], inputs: int, rows: int, threads: int, options: argparse.Namespace
) -> dict[str, list[float]]:
    """Seconds of a call in each round."""
    x = torch.randn(rows, inputs).to(torch.bfloat16)
    clock = time.thread_time if threads == 1 else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    calls = dict.fromkeys(kinds, 1)
    for number in range(options.rounds + 1):
        for name, kind in kinds.items():
            torch.set_num_threads(threads if "oneDNN" in name else 1)
            kind.call(x, 0)
            start = clock()
            for n in range(calls[name]):
                kind.call(x, n)
            each = (clock() - start) / calls[name]
            if number:
                seconds[name].append(each)
            else:
                calls[name] = max(1, int(options.seconds / each))
    return seconds


def show(kinds: dict[str, Kind], elements: int, rows: int, threads: int, seconds: dict[str, list[float]]) -> None:
    """Prints a table."""
    print(f"\n{rows} rows, {threads} threads{'us':>26}{'GB/s':>8}{'GFLOP/s':>9}{'times':>7}")
    for name, kind in kinds.items():
        each = statistics.median(seconds[name])
        times = statistics.median(ours / own for ours, own in zip(seconds[OURS], seconds[name], strict=True))
        rate = 2 * elements * rows / each
        print(f"{name:<34}{each * 1e6:>10.0f}{kind.bytes / each / 1e9:>8.1f}{rate / 1e9:>9.0f}{times:>7.2f}")
