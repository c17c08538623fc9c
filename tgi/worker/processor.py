"""What the CPU's instruction set means for the kernels of torch and for our own. Imports no torch.

`hold` and `keep_order` set what torch's libraries read from the environment when they are loaded, so both come before
the first import of torch. The environment of the process is the one place that says which set is in use.
"""

import os
import platform
from pathlib import Path
from typing import NamedTuple

from tgi.kernel.errors import UserError

CPU = "TGI_CPU"
CPUINFO = Path("/proc/cpuinfo")
# The line of it that lists instruction sets, by architecture.
FEATURES = {"x86_64": "flags", "aarch64": "Features"}
# Instruction sets that multiply numbers of a type without converting them first, by the name of the type. Others
# (AVX-NE-CONVERT) convert only. float32 can be computed everywhere.
ARITHMETIC = {
    "bfloat16": frozenset(("avx512_bf16", "amx_bf16", "bf16")),
    "float16": frozenset(("avx512_fp16", "asimdhp")),
}
# Intel's MKL, with which torch's attention multiplies. Its kernels for AVX2, which processors of other makers get even
# where they have AVX-512, sum in an order that depends on where in memory the numbers lie, so on the thread and on the
# rest of the batch. Its mode of strict reproducibility has one order, and costs attention up to a tenth of its time.
REPRODUCIBLE, STRICTLY = "MKL_CBWR", "AUTO,STRICT"


class Level(NamedTuple):
    """An instruction set that a more capable processor can be held to."""

    environment: dict[str, str]  # for torch, oneDNN and MKL
    above: tuple[str, ...]  # how the names of extensions begin that are beyond it


LEVELS = {
    "avx2": Level(
        {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
        ("avx512", "avx10", "amx_", "avx_"),
    )
}


def hold(level: str | None) -> None:
    """Holds this process and its children to one of LEVELS; None: to what the processor has. Before torch is imported.

    Raises UserError for an unknown level, and on a processor that is below it.
    """
    if level is None:
        return
    if level not in LEVELS:
        raise UserError(f"{CPU} is {level!r}, which is not one of {', '.join(LEVELS)}.", code=2)
    if level not in _features():
        raise UserError(f"{CPU} is {level}, but this processor has no {level}: unset it, or leave out --cpu.")
    os.environ[CPU] = level
    os.environ.update(LEVELS[level].environment)


def keep_order() -> None:
    """Asks MKL for sums in one order. MKL_CBWR in the environment takes precedence. Before torch is imported."""
    os.environ.setdefault(REPRODUCIBLE, STRICTLY)


def processor() -> frozenset[str]:
    """The instruction sets in use, as Linux names them; empty where it does not tell."""
    level = os.environ.get(CPU)
    if level not in LEVELS:
        return _features()
    return frozenset(name for name in _features() if not name.startswith(LEVELS[level].above))


def multiplies(dtype: str) -> bool:
    """Whether the processor has arithmetic for this type ("bfloat16"). Without it torch emulates the type, and
    computes prompts several times as slowly as in float32."""
    return dtype not in ARITHMETIC or not ARITHMETIC[dtype].isdisjoint(processor())


def _features() -> frozenset[str]:
    """What the processor has."""
    wanted = FEATURES.get(platform.machine())
    if wanted is None or not CPUINFO.exists():
        return frozenset()
    for line in CPUINFO.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == wanted:
            return frozenset(value.split())
    return frozenset()
