"""The CPU kernels for tests. On a machine that cannot run them, such a test is skipped with the reason."""

import tempfile
from functools import cache
from pathlib import Path

import pytest

from tgi.worker.cpu_kernels import build
from tgi.worker.cpu_kernels.build import FLAGS, REQUIRED_INSTRUCTION_SETS, KernelsUnavailable
from tgi.worker.cpu_kernels.kernels import CpuKernels
from tgi.worker.cpu_kernels.selection import select_cpu_kernels
from tgi.worker.host_cpu import instruction_sets
from tgi.worker.models.loader import ModelSpec

# Any compiler for such a processor compiles this.
SMALL_SOURCE = """#include <immintrin.h>
__m512 some(__m512 sums, __m512bh x) { return _mm512_dpbf16_ps(sums, x, x); }
"""


def library(*further: str) -> Path:
    """As build.build_library; skips the test if this machine cannot run the kernels."""
    if (reason := _unavailable_reason()) is not None:
        pytest.skip(f"needs our own kernels: {reason}")
    return build.build_library(*further)


def our_kernels(recipe: ModelSpec) -> CpuKernels:
    """The CPU kernels for a model that they can compute."""
    library()
    found, reason = select_cpu_kernels([recipe], "cpu")
    assert found is not None, f"torch's kernels would compute what is tested here: {reason}"
    return found


@cache
def _unavailable_reason() -> str | None:
    """Why this machine cannot run the kernels; None: it can. A machine that compiles other code for the required
    instruction sets counts as capable: the test then fails instead of being skipped."""
    try:
        build.build_library()
    except KernelsUnavailable as reason:
        if instruction_sets() >= REQUIRED_INSTRUCTION_SETS and _compiles_small_source():
            return None
        return str(reason)
    return None


def _compiles_small_source() -> bool:
    try:
        with tempfile.TemporaryDirectory(dir=build._cache_directory()) as directory:
            source = Path(directory) / "little.cpp"
            source.write_text(SMALL_SOURCE)
            build._compile([*build._compiler_command(), *FLAGS, str(source)], source.with_suffix(".so"))
    except (KernelsUnavailable, OSError):
        return False
    return True
