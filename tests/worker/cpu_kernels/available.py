"""The CPU kernels for tests. On a machine that cannot run them, such a test is skipped with the reason."""

import os
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tgi.worker.cpu_kernels import build
from tgi.worker.cpu_kernels.build import FLAGS, KernelsUnavailable
from tgi.worker.cpu_kernels.kernels import CpuKernels
from tgi.worker.cpu_kernels.selection import select_cpu_kernels
from tgi.worker.host_cpu import cpu_features
from tgi.worker.instruction_sets import BY_NAME, ELEMENTS, InstructionSet
from tgi.worker.models.loader import ModelSpec

# Whether an emulator computes the kernels (emulation/). It is slow, so tests then have fewer and smaller products.
EMULATED = bool(os.environ.get("TGI_EMULATE"))
SMALL_SOURCE = "int some(int x) { return x; }"  # any C++ compiler that knows the flags compiles this


class Variant(NamedTuple):
    """A library of kernels."""

    instruction_set: str
    element: str


def _variants() -> dict[str, Variant]:
    """The libraries that tests run, by name: all types with the best instruction set in use, bfloat16 without AMX, and
    two types with AVX2. Few, since each is compiled."""
    best = build.kernel_set()
    if best is None:
        return {"none": Variant("none", "bfloat16")}
    found = [Variant(best.name, element) for element in ELEMENTS]
    if best.name == "amx":
        found.append(Variant("avx512_bf16", "bfloat16"))
    if best.machine == "x86_64":
        found += [Variant("avx2", "bfloat16"), Variant("avx2", "float32")]
    return {" ".join(one): one for one in found}


VARIANTS = _variants()
# By element type: the largest relative error of rounding to it; for float32 what sums of a few hundred numbers lose.
EPSILON = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-18}


def load_variant(name: str, threads: int = 2) -> CpuKernels:
    """The kernels of one of VARIANTS."""
    chosen = VARIANTS[name]
    path = library(chosen.element, chosen.instruction_set)
    return CpuKernels(path, threads, getattr(torch, chosen.element))


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normally distributed numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@cache
def library(element: str = "bfloat16", instruction_set: str | None = None) -> Path:
    """As build.build_library; skips the test if this machine cannot run the kernels."""
    if (reason := _unavailable_reason(element, instruction_set)) is not None:
        pytest.skip(f"needs our own kernels: {reason}")
    return build.build_library(element, instruction_set=instruction_set and BY_NAME[instruction_set])


def our_kernels(recipe: ModelSpec) -> CpuKernels:
    """The CPU kernels for a model that they can compute."""
    library(str(recipe.dtype).removeprefix("torch."))
    found, reason = select_cpu_kernels([recipe], "cpu")
    assert found is not None, f"torch's kernels would compute what is tested here: {reason}"
    return found


@cache
def _unavailable_reason(element: str, instruction_set: str | None) -> str | None:
    """Why this machine cannot run the kernels; None: it can. A machine that compiles other code for the instruction set
    counts as capable: the test then fails instead of being skipped."""
    if instruction_set not in (None, *BY_NAME):
        return "this processor has no instruction set that they are for"
    in_use = build.kernel_set()
    chosen = in_use if instruction_set is None else BY_NAME[instruction_set]
    if chosen is not None and chosen is not in_use and (missing := chosen.features - cpu_features()):
        return f"this processor has no {', '.join(sorted(missing))}"
    try:
        build.build_library(element, instruction_set=chosen)
    except KernelsUnavailable as reason:
        if chosen is not None and _compiles_small_source(chosen):
            return None
        return str(reason)
    return None


def _compiles_small_source(chosen: InstructionSet) -> bool:
    try:
        with tempfile.TemporaryDirectory(dir=build.cache_directory()) as directory:
            source = Path(directory) / "little.cpp"
            source.write_text(SMALL_SOURCE)
            build._run([*build.compiler_command(), *FLAGS, *chosen.flags, "-c", str(source), "-o", f"{source}.o"])
    except (KernelsUnavailable, OSError):
        return False
    return True
