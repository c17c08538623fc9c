"""From the absorbed queries and the key of latent attention to attention in one launch: rotary embedding of the last
elements of queries and key, and the write of the key to the KV cache.

Queries are rotated in place, since only few of their elements change; the key is converted to the type of the cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgi.worker.gpu_kernels.attention_arguments import Rotation, Rows
from tgi.worker.gpu_kernels.kv_write import FRACTION_AND_BIAS, _convert
from tgi.worker.gpu_kernels.paged_attention import COUNTERS, paged_attention, reference_attention
from tgi.worker.gpu_kernels.self_test import check_close, random_tensor

ELEMENTS = 1024  # of a program


def rotate_and_write_latent(
    qkv: Tensor, keys: Tensor, slots: Tensor, divisor: float = 1.0, rotation: Rotation | None = None
) -> Tensor:
    """Writes the key of `qkv` [T, heads + 1, head_dim], its last head, to `keys` [pages, page_size, 1, head_dim], and
    returns the queries [T, heads, head_dim], a view of it. The elements of `rotation` are rotated in both, in float32.

    `slots` int64 [T] is the slot mapping. All are contiguous. Keys are converted as by rotate_and_write_kv; `divisor`
    is that of 8-bit floats.
    """
    tokens, both, dim = qkv.shape
    fraction, bias = FRACTION_AND_BIAS.get(keys.dtype, (0, 0))
    most = torch.finfo(keys.dtype).max if fraction or keys.dtype is torch.float16 else 0.0
    cache = keys.view(torch.uint8) if fraction else keys
    angles, positions, neighbours, start = rotation or (None, None, False, 0)
    rotary = 0 if angles is None else angles.shape[2]
    pairs = max(1, triton.next_power_of_2(rotary // 2))
    together = min(triton.next_power_of_2(both), max(1, ELEMENTS // pairs))
    _rotate_and_write_latent[tokens, triton.cdiv(both, together)](
        *(qkv, cache, slots, angles, positions, 1 / divisor),
        HEADS=both - 1,
        DIM=dim,
        WIDTH=triton.next_power_of_2(dim),
        START=start,
        ROTARY=rotary,
        PAIRS=pairs,
        NEIGHBOURS=neighbours,
        TOGETHER=together,
        MOST=most,
        FRACTION=fraction,
        BIAS=bias,
    )
    return qkv[:, : both - 1]


# The alignment of a step's slots and positions does not compile another kernel.
@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def _rotate_and_write_latent(
    qkv,
    keys,
    slots,
    angles,
    positions,
    factor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    START: tl.constexpr,
    ROTARY: tl.constexpr,
    PAIRS: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    TOGETHER: tl.constexpr,
    MOST: tl.constexpr,
    FRACTION: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Some heads of one token; the first program also writes what is not rotated of the key."""
    token = tl.program_id(0).to(tl.int64)
    here = qkv + token * (HEADS + 1) * DIM
    slot = keys + tl.load(slots + token) * DIM
    if tl.program_id(1) == 0:
        number = tl.arange(0, WIDTH)
        kept = (number < DIM) & ((number < START) | (number >= START + ROTARY))
        x = tl.load(here + HEADS * DIM + number, mask=kept, other=0.0)
        tl.store(slot + number, _convert(x, factor, MOST, FRACTION, BIAS).to(keys.dtype.element_ty), mask=kept)
    if ROTARY > 0:
        head = tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER)[:, None]
        pair = tl.arange(0, PAIRS)[None, :]
        there = (head <= HEADS) & (pair < ROTARY // 2)
        # Each thread has both elements of its pairs, so none reads what another one has overwritten.
        one = 2 * pair if NEIGHBOURS else pair
        other = one + 1 if NEIGHBOURS else one + ROTARY // 2
        place = here + head * DIM + START
        stored = tl.load(place + one, mask=there, other=0.0)
        left, right = stored.to(tl.float32), tl.load(place + other, mask=there, other=0.0).to(tl.float32)
        waves = angles + tl.load(positions + token) * (2 * ROTARY) + one
        cos = tl.load(waves, mask=pair < ROTARY // 2, other=1.0)
        sin = tl.load(waves + ROTARY, mask=pair < ROTARY // 2, other=0.0)
        first = (left * cos - right * sin).to(stored.dtype)
        second = (right * cos + left * sin).to(stored.dtype)
        tl.store(place + one, first, mask=there & (head < HEADS))
        tl.store(place + other, second, mask=there & (head < HEADS))
        last = there & (head == HEADS)
        first = _convert(first, factor, MOST, FRACTION, BIAS).to(keys.dtype.element_ty)
        second = _convert(second, factor, MOST, FRACTION, BIAS).to(keys.dtype.element_ty)
        at = slot + START + 0 * head
        tl.store(at + one, first, mask=last)
        tl.store(at + other, second, mask=last)


def self_test(device: torch.device) -> None:
    """What is rotated and written, and attention with values that are parts of their keys: decode rows with splits, and
    prompts. Raises SelfTestFailed if the results differ from torch's."""
    slots, positions = torch.tensor([37, 5, 16], device=device), torch.tensor([3, 0, 8], device=device)
    waves = random_tensor(device, 9, 2, 4, seed=1)
    for neighbours, dtype, kept in (
        (True, torch.bfloat16, torch.bfloat16),
        (False, torch.float32, torch.float32),
        (True, torch.bfloat16, torch.float8_e4m3fn),
    ):
        table = waves.repeat_interleave(2, dim=2) if neighbours else waves.repeat(1, 1, 2)
        qkv = random_tensor(device, 3, 5, 56, dtype=dtype)
        cos, sin = table[positions][:, :, None].unbind(1)
        flat = qkv[..., 48:].float()
        across = (
            torch.stack((-flat[..., 1::2], flat[..., ::2]), -1).flatten(-2)
            if neighbours
            else torch.cat((-flat[..., 4:], flat[..., :4]), -1)
        )
        expected = torch.cat((qkv[..., :48], (flat * cos + across * sin).to(dtype)), -1)
        keys = torch.zeros(3, 16, 1, 56, dtype=kept, device=device)
        query = rotate_and_write_latent(qkv, keys, slots, 1.0, Rotation(table, positions, neighbours, 48))
        tolerance = 0.01 if dtype is torch.bfloat16 else 1e-5
        check_close("rotated latent queries", query, expected[:, :4], tolerance)
        written = keys.flatten(0, 1)[slots].float()
        check_close("latent keys", written, expected[:, 4:].to(kept).float(), 0.1 if kept.itemsize == 1 else tolerance)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    counters = torch.zeros(COUNTERS, dtype=torch.int32, device=device)
    contexts, pages = [1, 17, 150], [[11], [4, 9], [7, 2, 0, 10, 5, 3, 6, 1, 12, 8]]
    own_pages = torch.tensor([one + [0] * (10 - len(one)) for one in pages], dtype=torch.int32, device=device)
    keys = random_tensor(device, 13, 16, 1, 576, seed=2).bfloat16()
    for counts, splits in (([1, 1, 1], 4), ([1, 5, 40], 1)):
        query = random_tensor(device, sum(counts), 20, 576, dtype=torch.bfloat16)
        starts = torch.tensor([0, *counts], device=device).cumsum(0).int() if max(counts) > 1 else None
        context = torch.tensor(contexts, dtype=torch.int32, device=device)
        rows = Rows(0, sum(counts), max(counts), starts, own_pages, context)
        out = torch.full((sum(counts), 20, 512), float("nan"), dtype=torch.bfloat16, device=device)
        values, options = keys[..., :512], (0.04, None, None)
        paged_attention(
            query, keys, values, rows, out, *options, capability=capability, counters=counters, splits=splits
        )
        expected = reference_attention(query, keys, values, own_pages.tolist(), counts, contexts, *options)
        check_close("latent attention", out.cpu(), expected, 0.02)
