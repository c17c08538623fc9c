"""Rotary position embedding in one launch, in place: one program for some heads of one token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgi.worker.gpu_kernels.self_test import check_close, random_tensor

PAIRS = 1024  # of a program


# One kernel serves positions of any alignment, so no later step compiles another.
@triton.jit(do_not_specialize_on_alignment=["positions"])
def _rope(
    x, angles, positions, heads, pairs, x_token, x_head,
    NEIGHBOURS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, BLOCK)[None, :]
    first = 2 * pair if NEIGHBOURS else pair
    second = first + (1 if NEIGHBOURS else pairs)
    # The cos of a position come before its sin; each is stored twice, for both elements of a pair.
    waves = angles + tl.load(positions + token) * (4 * pairs) + first
    cos = tl.load(waves, mask=pair < pairs, other=0.0)
    sin = tl.load(waves + 2 * pairs, mask=pair < pairs, other=0.0)
    inside = (head < heads) & (pair < pairs)
    here = x + token * x_token + head * x_head
    a = tl.load(here + first, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(here + second, mask=inside, other=0.0).to(tl.float32)
    tl.store(here + first, (a * cos - b * sin).to(x.dtype.element_ty), mask=inside)
    tl.store(here + second, (b * cos + a * sin).to(x.dtype.element_ty), mask=inside)


def apply_rope(x: Tensor, heads: int, angles: Tensor, positions: Tensor, neighbours: bool) -> None:
    """Rotates the first `heads` heads of x [T, H, head_dim] in place. `angles` is a table of the cos and the sin of
    each position, float32 [.., 2, rotary_dim], positions int64 [T]; both are contiguous. `neighbours`: pairs are
    elements 2 i and 2 i + 1, else i and i + rotary_dim / 2. Computed in float32 and rounded once."""
    tokens, rotary_dim = len(x), angles.shape[2]
    if not tokens:
        return
    assert x.stride(2) == 1
    pairs = rotary_dim // 2
    block = triton.next_power_of_2(pairs)
    together = min(triton.next_power_of_2(heads), max(1, PAIRS // block))
    _rope[(tokens, triton.cdiv(heads, together))](
        x, angles, positions, heads, pairs, x.stride(0), x.stride(1), neighbours, together, block
    )


def self_test(device: torch.device) -> None:
    """Raises SelfTestFailed if the results differ from torch's."""
    positions = torch.tensor([3, 0, 8], device=device)
    waves = random_tensor(device, 9, 2, 10, seed=1)
    for neighbours in (False, True):
        for dtype, tolerance in ((torch.bfloat16, 0.01), (torch.float32, 1e-5)):
            table = waves.repeat_interleave(2, dim=2) if neighbours else waves.repeat(1, 1, 2)
            x = random_tensor(device, 3, 6, 24, dtype=dtype)
            cos, sin = table[positions][:, :, None].unbind(1)
            flat = x[:, :5, :20].float()
            if neighbours:
                across = torch.stack((-flat[..., 1::2], flat[..., ::2]), -1).flatten(-2)
            else:
                across = torch.cat((-flat[..., 10:], flat[..., :10]), -1)
            expected = x.clone()
            expected[:, :5, :20] = (flat * cos + across * sin).to(dtype)
            apply_rope(x, 5, table, positions, neighbours)
            check_close("rotary position embedding", x, expected, tolerance)
