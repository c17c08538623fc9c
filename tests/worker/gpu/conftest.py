"""Kernels are computed by Triton's interpreter here, on CPU; tests/conftest.py asks for it. With a GPU it does not, and
these tests are left out unless TRITON_INTERPRET=1 is set."""

import os
from collections.abc import Iterator

import pytest

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def interpreter() -> Iterator[None]:
    """Put right. It takes a millisecond for each stretch of a row that has nothing to do: few are as good."""
    from tests.worker.gpu.interpreted import put_right
    from tgi.worker.gpu import attend

    put_right()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attend, "MOST_STRETCHES", 2)
        yield
