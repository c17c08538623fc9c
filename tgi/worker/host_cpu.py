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

import ctypes
import logging
import os
import platform
import subprocess
from functools import cache
from pathlib import Path

from tgi.microkernel.errors import UserError
from tgi.microkernel.host.control_groups import usable_cpus
from tgi.worker.instruction_sets import BY_NAME, InstructionSet, best_set, limited_features

log = logging.getLogger(__name__)

CPU_VARIABLE = "TGI_CPU"
CPUINFO = Path("/proc/cpuinfo")
CPUINFO_LINE = {"x86_64": "flags", "aarch64": "Features"}  # the line that lists the features, by architecture
ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18  # the system call of x86-64 that permits AMX, its arguments
SYSCTL = "/usr/sbin/sysctl"
# macOS on Apple silicon: Linux's name of each feature, by the last part of the name in sysctl's hw.optional.arm.
SYSCTL_FEATURES = {"FEAT_BF16": "bf16", "FEAT_I8MM": "i8mm", "FEAT_DotProd": "asimddp", "FEAT_FP16": "asimdhp"}
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
NUMA_NODES = Path("/sys/devices/system/node")


def limit_instruction_set(name: str | None) -> None:
    """Limits this process and its children to one of INSTRUCTION_SETS; None: no limit. Call before torch is imported.

    Raises UserError for an unknown name, and where the processor lacks a feature of the set or the system does not
    permit it.
    """
    if name is None:
        return
    if name not in BY_NAME:
        raise UserError(f"{CPU_VARIABLE} is {name!r}, which is not one of {', '.join(BY_NAME)}.", code=2)
    if missing := BY_NAME[name].features - _processor_features():
        reason = "the system does not permit" if missing <= _listed_features() else "this processor has no"
        raise UserError(
            f"{CPU_VARIABLE} is {name}, but {reason} {', '.join(sorted(missing))}: unset it, or leave out --cpu."
        )
    os.environ[CPU_VARIABLE] = name
    os.environ.update(BY_NAME[name].environment)


def kernel_set() -> InstructionSet | None:
    """The best instruction set for the CPU kernels that the processor has and TGI_CPU allows."""
    return best_set(cpu_features())


def request_reproducible_mkl() -> None:
    """Asks MKL for one order of summation, unless MKL_CBWR is set already. Call before torch is imported."""
    os.environ.setdefault(MKL_MODE, MKL_STRICT)


def cpu_features() -> frozenset[str]:
    """The features in use of the processor, by Linux's names; empty where the system does not list them."""
    limit = BY_NAME.get(os.environ.get(CPU_VARIABLE, ""))
    return _processor_features() if limit is None else limited_features(_processor_features(), limit)


def has_arithmetic(dtype: str) -> bool:
    """Whether the features in use compute in this type ("bfloat16"). Without them torch emulates the type, and
    prefill takes several times as long as in float32."""
    return dtype not in ARITHMETIC or not ARITHMETIC[dtype].isdisjoint(cpu_features())


def configure_thread_waiting() -> None:
    """Makes waiting OpenMP threads spin briefly, then sleep, unless OMP_WAIT_POLICY is set already. Call before torch
    is imported."""
    if WAIT_POLICY not in os.environ:
        os.environ[WAIT_POLICY] = "passive"
        os.environ.setdefault(SPIN_COUNT, SPIN_COUNT_VALUE)


def usable_cores() -> int:
    """The number of cores that this process may use: its affinity mask, limited by the quotas of its control groups."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return int(max(1, min(cores, usable_cpus())))


def take_cores(rank: int, ranks: int) -> None:
    """Divides the cores among the ranks of all workers on this host: this one computes with as many threads as its
    share has cores, unless OMP_NUM_THREADS is set. On a host with several NUMA nodes it stays on the cores of its
    share, which are neighbours, and so in the memory next to them. Call before torch is imported."""
    os.environ.setdefault(THREADS_VARIABLE, str(max(1, usable_cores() // ranks)))
    nodes = numa_nodes()
    if len(nodes) > 1:
        cores = [core for node in nodes for core in node]
        if len(cores) >= ranks:
            os.sched_setaffinity(0, cores[len(cores) * rank // ranks : len(cores) * (rank + 1) // ranks])


def numa_nodes(root: Path = NUMA_NODES) -> list[list[int]]:
    """The cores of each NUMA node that this process may use. Empty where the system does not tell."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    allowed = os.sched_getaffinity(0)
    nodes = []
    for path in sorted(root.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name.removeprefix("node"))):
        ranges = [part.partition("-") for part in path.read_text().strip().split(",") if part]
        cores = [core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)]
        if mine := [core for core in cores if core in allowed]:
            nodes.append(mine)
    return nodes


def threads_from_environment() -> int | None:
    """The value of OMP_NUM_THREADS if it is an integer above 0, else None. Any other value is logged and ignored."""
    named = os.environ.get(THREADS_VARIABLE, "").strip()
    if named.isdecimal() and int(named) > 0:
        return int(named)
    if named:
        log.warning("%s is %r, which is no number above 0: it is ignored", THREADS_VARIABLE, named)
    return None


def _processor_features() -> frozenset[str]:
    """The features that the processor has and the system permits, limited or not."""
    listed = _listed_features()
    amx = frozenset(name for name in listed if name.startswith("amx_"))
    return listed if not amx or _system_permits_amx() else listed - amx


@cache
def _system_permits_amx() -> bool:
    """Whether Linux lets this process use AMX, which it has to be asked for. The permission is that of the process and
    of its later children. Linux before 5.16 and some sandboxes refuse."""
    return ctypes.CDLL(None).syscall(*map(ctypes.c_long, (ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA))) == 0


def _listed_features() -> frozenset[str]:
    """The features that the system lists."""
    if platform.system() == "Darwin" and platform.machine() == "arm64":
        return _apple_features(SYSCTL)
    wanted = CPUINFO_LINE.get(platform.machine())
    if wanted is None or not CPUINFO.exists():
        return frozenset()
    for line in CPUINFO.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == wanted:
            return frozenset(value.split())
    return frozenset()


@cache
def _apple_features(program: str) -> frozenset[str]:
    """The features of Apple silicon, by Linux's names. All have NEON; names that the system does not know are
    absent."""
    command = [program, *(f"hw.optional.arm.{name}" for name in SYSCTL_FEATURES)]
    try:
        listed = subprocess.run(command, capture_output=True, text=True).stdout
    except OSError:
        listed = ""
    values = {
        name.rpartition(".")[2]: value for name, _, value in (line.partition(": ") for line in listed.splitlines())
    }
    return frozenset(("asimd", *(linux for name, linux in SYSCTL_FEATURES.items() if values.get(name) == "1")))
