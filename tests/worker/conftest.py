"""Limits torch to one thread unless a test sets more: threads that wait for each other are slow on a busy machine. With
TGI_EMULATE the CPU kernels are computed by an emulator (cpu_kernels/emulation)."""

import os
from collections.abc import Iterator

import pytest
import torch

from tests.worker.cpu_kernels.emulation.library import emulate

if os.environ.get("TGI_EMULATE"):
    emulate(os.environ["TGI_EMULATE"])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sets one torch thread, and restores the previous number after the test."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
