"""One thread unless a test asks for more: two that wait for each other are slow beside anything else that runs."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sets torch's threads, and sets them back after whatever the test has set."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
