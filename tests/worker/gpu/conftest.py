"""Kernels are computed by Triton's interpreter here, on CPU. It must be chosen before anything imports them."""

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("TRITON_INTERPRET", "1")

from tests.worker.gpu.interpreted import put_right
from tgi.worker.gpu import attend

put_right()


@pytest.fixture(scope="session", autouse=True)
def few_stretches() -> Iterator[None]:
    """The interpreter takes a millisecond for each stretch of a row that has nothing to do: few are as good."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attend, "MOST_STRETCHES", 2)
        yield
