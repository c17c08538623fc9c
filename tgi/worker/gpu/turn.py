"""Rotary position embedding in one launch, in place: a program for some heads of one token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgi.worker.gpu.trial import agree, numbers

PAIRS = 1024  # that a program turns


# Positions lie wherever a step's columns put them. One kernel serves any place, so none is compiled in a later step.
@triton.jit(do_not_specialize_on_alignment=["positions"])
def _turn(
    x, angles, positions, heads, pairs, x_token, x_head,
    NEIGHBOURS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, BLOCK)[None, :]
    first = 2 * pair if NEIGHBOURS else pair
    second = first + (1 if NEIGHBOURS else pairs)
    # A position's cos stand before its sin, each of them once for either number of a pair.
    waves = angles + tl.load(positions + token) * (4 * pairs) + first
    cos = tl.load(waves, mask=pair < pairs, other=0.0)
    sin = tl.load(waves + 2 * pairs, mask=pair < pairs, other=0.0)
    inside = (head < heads) & (pair < pairs)
    here = x + token * x_token + head * x_head
    a = tl.load(here + first, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(here + second, mask=inside, other=0.0).to(tl.float32)
    tl.store(here + first, (a * cos - b * sin).to(x.dtype.element_ty), mask=inside)
    tl.store(here + second, (b * cos + a * sin).to(x.dtype.element_ty), mask=inside)


def turn(x: Tensor, heads: int, angles: Tensor, positions: Tensor, neighbours: bool) -> None:
    """Turns the first `heads` heads of x [T, H, head_dim] in place. `angles` is a table of each position's cos and
    sin, float32 [.., 2, turned], positions int64 [T]; both are dense. Computed in float32 and rounded once."""
    tokens, turned = len(x), angles.shape[2]
    if not tokens:
        return
    assert x.stride(2) == 1
    pairs = turned // 2
    block = triton.next_power_of_2(pairs)
    together = min(triton.next_power_of_2(heads), max(1, PAIRS // block))
    _turn[(tokens, triton.cdiv(heads, together))](
        x, angles, positions, heads, pairs, x.stride(0), x.stride(1), neighbours, together, block
    )


def trial(device: torch.device) -> None:
    """See choose.py."""
    positions = torch.tensor([3, 0, 8], device=device)
    waves = numbers(device, 9, 2, 10, seed=1)
    for neighbours in (False, True):
        for dtype, tolerance in ((torch.bfloat16, 0.01), (torch.float32, 1e-5)):
            table = waves.repeat_interleave(2, dim=2) if neighbours else waves.repeat(1, 1, 2)
            x = numbers(device, 3, 6, 24, dtype=dtype)
            cos, sin = table[positions][:, :, None].unbind(1)
            flat = x[:, :5, :20].float()
            if neighbours:
                across = torch.stack((-flat[..., 1::2], flat[..., ::2]), -1).flatten(-2)
            else:
                across = torch.cat((-flat[..., 10:], flat[..., :10]), -1)
            expected = x.clone()
            expected[:, :5, :20] = (flat * cos + across * sin).to(dtype)
            turn(x, 5, table, positions, neighbours)
            agree("what is turned", x, expected, tolerance)
