"""Copies of weights through buffers, with the host in place of the device."""

import torch

from tests.cases import each_case
from tgi.worker.device_copies import StagedCopies


@each_case("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.uint8])
@each_case("shape", [(3,), (0, 4), (1000, 37), (2, 5, 512)])
def test_staged_copies_are_equal(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Also of a part of a matrix, which is not contiguous, and of sizes that no buffer divides."""
    copies = StagedCopies(torch.device("cpu"), pinned=False, size=4096)
    for _ in range(2):
        values = torch.randn(shape).to(dtype)
        for one in (values, values[..., 1:]):
            found = copies.copy(one)
            assert found.dtype == dtype
            assert torch.equal(found.view(torch.uint8), one.contiguous().view(torch.uint8))
