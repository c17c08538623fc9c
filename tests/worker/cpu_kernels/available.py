"""The CPU kernels for tests. On a machine that cannot run them, such a test is skipped with the reason."""

import tempfile
from functools import cache
from pathlib import Path

import pytest

from tgi.worker.cpu_kernels import build
from tgi.worker.cpu_kernels.build import FLAGS, KernelsUnavailable
from tgi.worker.cpu_kernels.kernels import CpuKernels
from tgi.worker.cpu_kernels.selection import select_cpu_kernels
from tgi.worker.host_cpu import kernel_set
from tgi.worker.instruction_sets import InstructionSet
from tgi.worker.models.loader import ModelSpec

SMALL_SOURCE = "int some(int x) { return x; }"  # any C++ compiler that knows the flags compiles this


def library(*further: str, element: str = "bfloat16") -> Path:
    """As build.build_library; skips the test if this machine cannot run the kernels."""
    if (reason := _unavailable_reason(element)) is not None:
        pytest.skip(f"needs our own kernels: {reason}")
    return build.build_library(element, *further)


def our_kernels(recipe: ModelSpec) -> CpuKernels:
    """The CPU kernels for a model that they can compute."""
    library()
    found, reason = select_cpu_kernels([recipe], "cpu")
    assert found is not None, f"torch's kernels would compute what is tested here: {reason}"
    return found


@cache
def _unavailable_reason(element: str) -> str | None:
    """Why this machine cannot run the kernels; None: it can. A machine that compiles other code for its instruction set
    counts as capable: the test then fails instead of being skipped."""
    try:
        build.build_library(element)
    except KernelsUnavailable as reason:
        chosen = kernel_set()
        if chosen is not None and element in chosen.elements and _compiles_small_source(chosen):
            return None
        return str(reason)
    return None


def _compiles_small_source(chosen: InstructionSet) -> bool:
    try:
        with tempfile.TemporaryDirectory(dir=build._cache_directory()) as directory:
            source = Path(directory) / "little.cpp"
            source.write_text(SMALL_SOURCE)
            build._run([*build.compiler_command(), *FLAGS, *chosen.flags, "-c", str(source), "-o", f"{source}.o"])
    except (KernelsUnavailable, OSError):
        return False
    return True
