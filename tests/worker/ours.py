"""Our own kernels, for the tests of them: where a machine cannot have them, such a test says why and is left out."""

import tempfile
from functools import cache
from pathlib import Path

import pytest

from tgi.worker.load import Recipe
from tgi.worker.native import build
from tgi.worker.native.build import FLAGS, NEEDED, Unavailable
from tgi.worker.native.choose import find_kernels
from tgi.worker.native.kernels import Kernels
from tgi.worker.processor import processor

# What any compiler takes that can make code for such a processor.
LITTLE = """#include <immintrin.h>
__m512 some(__m512 sums, __m512bh x) { return _mm512_dpbf16_ps(sums, x, x); }
"""


def library(*further: str) -> Path:
    """As build.library; the test that asks is skipped where the machine cannot have them."""
    if (reason := _lacking()) is not None:
        pytest.skip(f"needs our own kernels: {reason}")
    return build.library(*further)


def our_kernels(recipe: Recipe) -> Kernels:
    """Those that compute a model which fits them."""
    library()
    found, reason = find_kernels([recipe], "cpu")
    assert found is not None, f"torch's kernels would compute what is tested here: {reason}"
    return found


@cache
def _lacking() -> str | None:
    """Why this machine cannot have them. That they are not compiled where other code is, is their mistake: None."""
    try:
        build.library()
    except Unavailable as reason:
        if processor() >= NEEDED and _compiles():
            return None
        return str(reason)
    return None


def _compiles() -> bool:
    try:
        with tempfile.TemporaryDirectory(dir=build._cache()) as directory:
            source = Path(directory) / "little.cpp"
            source.write_text(LITTLE)
            build._compile([*build._compiler(), *FLAGS, str(source)], source.with_suffix(".so"))
    except (Unavailable, OSError):
        return False
    return True
