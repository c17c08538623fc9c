"""Kernels are computed by Triton's interpreter here, on CPU; tests/conftest.py asks for it. With a GPU it does not, and
these tests are left out unless TRITON_INTERPRET=1 is set."""

import os
from collections.abc import Iterator

import pytest

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def interpreter() -> Iterator[None]:
    """Fixes the interpreter, and limits splits and programs: each idle one takes it milliseconds."""
    from tests.worker.gpu_kernels.interpreter_fixes import fix_interpreter
    from tgi.worker.gpu_kernels import lora, paged_attention

    fix_interpreter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged_attention, "MAX_SPLITS", 2)
        patch.setattr(lora, "PROGRAMS", 2)
        yield


@pytest.fixture
def one_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of whole engines, whose contexts have a page or two: half of the programs. Their first test, and those
    of the kernels, have two splits."""
    from tgi.worker.gpu_kernels import paged_attention

    monkeypatch.setattr(paged_attention, "MAX_SPLITS", 1)
