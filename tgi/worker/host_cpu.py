"""The host's CPU: the instruction sets, cores and threads that the worker's libraries may use. Imports no torch.

`limit_instruction_set`, `request_reproducible_mkl` and `configure_thread_waiting` set environment variables that
torch's libraries read when they are loaded, so all three are called before the first import of torch. The process
environment is the only place that records the instruction set in use.

Waiting threads. By default a thread of torch's OpenMP (libgomp) spins for a while where it waits for others. Where
another process has taken the core of one thread, all others spin until that thread is scheduled again, at each of the
about 200 parallel regions of a step: a step then takes 10 to 40 times as long. Threads that sleep at once bound that
loss, but wake up so slowly that two are no faster than one. `configure_thread_waiting` makes them spin for a few
microseconds, about the gap between two parallel regions, and then sleep: most of the gain on an idle machine, and less
than twice the time where every core but one is taken.
"""

import logging
import os
import platform
from pathlib import Path
from typing import NamedTuple

from tgi.microkernel.errors import UserError

log = logging.getLogger(__name__)

CPU_VARIABLE = "TGI_CPU"
CPUINFO = Path("/proc/cpuinfo")
CPUINFO_LINE = {"x86_64": "flags", "aarch64": "Features"}  # the line that lists instruction sets, by architecture
# Instruction sets that multiply numbers of a type without converting them first, by the name of the type. Others
# (AVX-NE-CONVERT) only convert. float32 is computed everywhere.
ARITHMETIC = {
    "bfloat16": frozenset(("avx512_bf16", "amx_bf16", "bf16")),
    "float16": frozenset(("avx512_fp16", "asimdhp")),
}
# Intel's MKL computes the matrix products of torch's attention. Its AVX2 kernels, which it also selects on processors
# of other makers with AVX-512, sum in an order that depends on the alignment of the operands in memory, and so on the
# thread and on the rest of the batch. Its strict reproducibility mode fixes the order and costs attention up to 10 %.
MKL_MODE, MKL_STRICT = "MKL_CBWR", "AUTO,STRICT"

WAIT_POLICY, SPIN_COUNT, SPIN_COUNT_VALUE = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "5000"
THREADS_VARIABLE = "OMP_NUM_THREADS"
CGROUP_CPU = Path("/sys/fs/cgroup/cpu.max")


class CpuLevel(NamedTuple):
    """An instruction set that a more capable processor can be limited to."""

    environment: dict[str, str]  # variables of torch, oneDNN and MKL that select it
    above: tuple[str, ...]  # name prefixes of the extensions beyond it


CPU_LEVELS = {
    "avx2": CpuLevel(
        {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
        ("avx512", "avx10", "amx_", "avx_"),
    )
}


def limit_instruction_set(level: str | None) -> None:
    """Limits this process and its children to one of CPU_LEVELS; None: no limit. Call before torch is imported.

    Raises UserError for an unknown level, and on a processor that lacks it.
    """
    if level is None:
        return
    if level not in CPU_LEVELS:
        raise UserError(f"{CPU_VARIABLE} is {level!r}, which is not one of {', '.join(CPU_LEVELS)}.", code=2)
    if level not in _processor_features():
        raise UserError(f"{CPU_VARIABLE} is {level}, but this processor has no {level}: unset it, or leave out --cpu.")
    os.environ[CPU_VARIABLE] = level
    os.environ.update(CPU_LEVELS[level].environment)


def request_reproducible_mkl() -> None:
    """Asks MKL for one order of summation, unless MKL_CBWR is set already. Call before torch is imported."""
    os.environ.setdefault(MKL_MODE, MKL_STRICT)


def instruction_sets() -> frozenset[str]:
    """The instruction sets in use, by Linux's names; empty where the system does not list them."""
    level = os.environ.get(CPU_VARIABLE)
    if level not in CPU_LEVELS:
        return _processor_features()
    return frozenset(name for name in _processor_features() if not name.startswith(CPU_LEVELS[level].above))


def has_arithmetic(dtype: str) -> bool:
    """Whether the instruction sets in use compute in this type ("bfloat16"). Without them torch emulates the type, and
    prefill takes several times as long as in float32."""
    return dtype not in ARITHMETIC or not ARITHMETIC[dtype].isdisjoint(instruction_sets())


def configure_thread_waiting() -> None:
    """Makes waiting OpenMP threads spin briefly, then sleep, unless OMP_WAIT_POLICY is set already. Call before torch
    is imported."""
    if WAIT_POLICY not in os.environ:
        os.environ[WAIT_POLICY] = "passive"
        os.environ.setdefault(SPIN_COUNT, SPIN_COUNT_VALUE)


def usable_cores() -> int:
    """The number of cores that this process may use: its affinity mask, limited by the quota of its cgroup (v2)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = CGROUP_CPU.read_text().split()
    except (OSError, ValueError):
        return cores  # no cgroup v2 here
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def threads_from_environment() -> int | None:
    """The value of OMP_NUM_THREADS if it is an integer above 0, else None. Any other value is logged and ignored."""
    named = os.environ.get(THREADS_VARIABLE, "").strip()
    if named.isdecimal() and int(named) > 0:
        return int(named)
    if named:
        log.warning("%s is %r, which is no number above 0: it is ignored", THREADS_VARIABLE, named)
    return None


def _processor_features() -> frozenset[str]:
    """The instruction sets that the processor has, limited or not."""
    wanted = CPUINFO_LINE.get(platform.machine())
    if wanted is None or not CPUINFO.exists():
        return frozenset()
    for line in CPUINFO.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == wanted:
            return frozenset(value.split())
    return frozenset()
