"""What a device does at most, measured with torch's own operations: how fast it reads, and how fast it multiplies."""

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

CALLS = 4  # that are measured together: what there is between two does not count
READ = {"cuda": 2 << 30, "cpu": 64 << 20}  # bytes, far more than caches hold
EDGE = {"cuda": 8192, "cpu": 512}  # rows and columns of matrices


class Peaks(NamedTuple):
    """Of one device."""

    read: float  # bytes/s
    how: str  # these were read
    product: float  # FLOP/s in bfloat16
    edge: int  # of the matrices; 0: somebody said so


def find_peaks(device: torch.device, rounds: int) -> Peaks:
    """Medians over the rounds. Takes 4 GiB of a GPU's memory for as long as it measures."""
    edge = EDGE[device.type]
    one, other = (torch.randn(edge, edge, device=device).to(torch.bfloat16) for _ in range(2))
    product = 2 * edge**3 / _seconds(lambda: torch.mm(one, other), device, rounds)
    return Peaks(*max(_reads(device, rounds)), product, edge)


def _reads(device: torch.device, rounds: int) -> list[tuple[float, str]]:
    """Bytes/s of what reads fast."""
    size = READ[device.type]
    memory = torch.ones(size // 4, device=device)
    copy = torch.empty_like(memory)
    summed = size / _seconds(memory.sum, device, rounds)
    copied = 2 * size / _seconds(lambda: copy.copy_(memory), device, rounds)
    return [(summed, f"a sum over {size >> 20} MiB"), (copied, f"a copy of {size >> 20} MiB, read and written")]


def _seconds(work: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Of one call, on the device: the median."""
    measure = _on_gpu if device.type == "cuda" else _on_cpu
    measure(work)  # for the first time
    return statistics.median(measure(work) for _ in range(rounds)) / CALLS


def _on_gpu(work: Callable[[], object]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(CALLS):
        work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _on_cpu(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    for _ in range(CALLS):
        work()
    return time.perf_counter() - began
