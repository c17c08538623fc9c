"""Causal convolutions of recurrent layers, in one launch: each channel over the last tokens of its row.

A program computes some channels of one row from its first token to its last, so that it alone reads and overwrites the
row's state. The grid follows from the number of rows and channels; rows and state slots are read on the device.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from tgi.worker.gpu_kernels.self_test import check_close, random_tensor
from tgi.worker.state_cache import StateCache, StateRows, StateSpec, StateTensor

CHANNELS = 128  # of a program
TOKENS = 32  # of a tile, where a row has several


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool, rows: StateRows, window: Tensor) -> Tensor:
    """silu(conv(u)) [T, channels] of the first columns u of x [T, columns] or, `gated`, c * conv(b * u) of x = [b, c,
    u], in the type of x. `weight` is float32 [kernel, channels], for the oldest input first, `bias` float32 [channels].

    Reads and overwrites `window` [slots, kernel - 1, channels], the last inputs of each slot. Of a step with drafts it
    writes those after the tokens of `rows.kept`, too.
    """
    size, channels = weight.shape
    y = x.new_empty(len(x), channels)
    _causal_conv[len(rows.slots), triton.cdiv(channels, CHANNELS)](
        *(x, y, window, weight, bias, rows.slots, rows.cu_query_lens, rows.context_lens, rows.kept),
        *(x.stride(0), window.stride(0), channels),
        KERNEL=size,
        KEPT=triton.next_power_of_2(max(1, size - 1)),
        GATED=gated,
        TOKENS=1 if max(rows.query_lens_host) == 1 else TOKENS,
        CHANNELS=CHANNELS,
    )
    return y


@triton.jit
def _inputs(x, x_row, window, first, count, started, at, channel, channels, KERNEL: tl.constexpr, GATED: tl.constexpr):
    """The inputs at the tokens `at` [n, 1] of a row, of which negative ones are in the window: [n, CHANNELS]."""
    there = channel < channels
    place = x + (first + at).to(tl.int64) * x_row + channel
    given = there & (at >= 0) & (at < count)
    found = tl.load(place, mask=given, other=0.0)
    if GATED:
        factor = tl.load(place + 2 * channels, mask=given, other=0.0)
        found = (found.to(tl.float32) * factor.to(tl.float32)).to(found.dtype)
    kept = there & (at < 0) & started
    before = tl.load(window + (KERNEL - 1 + at) * channels + channel, mask=kept, other=0.0)
    return tl.where(at < 0, before, found)


# The alignment of a step's columns does not compile another kernel.
@triton.jit(do_not_specialize_on_alignment=["slots", "bounds", "contexts", "kept"])
def _causal_conv(
    x,
    y,
    window,
    weight,
    bias,
    slots,
    bounds,
    contexts,
    kept,
    x_row,
    window_row,
    channels,
    KERNEL: tl.constexpr,
    KEPT: tl.constexpr,
    GATED: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Some channels of one row."""
    row = tl.program_id(0)
    first = tl.load(bounds + row)
    count = tl.load(bounds + row + 1) - first
    started = tl.load(contexts + row) > count
    own = window + tl.load(slots + row).to(tl.int64) * window_row
    channel = (tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS))[None, :]
    there = channel < channels
    for start in range(0, count, TOKENS):
        token = start + tl.arange(0, TOKENS)[:, None]
        sums = tl.zeros((TOKENS, CHANNELS), tl.float32)
        for tap in tl.static_range(KERNEL):
            at = token + (tap - KERNEL + 1)
            found = _inputs(x, x_row, own, first, count, started, at, channel, channels, KERNEL, GATED)
            sums += found.to(tl.float32) * tl.load(weight + tap * channels + channel, mask=there, other=0.0)
        if bias is not None:
            sums += tl.load(bias + channel, mask=there, other=0.0)
        computed = there & (token < count)
        where = (first + token).to(tl.int64)
        if GATED:
            sums *= tl.load(x + where * x_row + channels + channel, mask=computed, other=0.0).to(tl.float32)
        else:
            sums *= tl.sigmoid(sums)
        tl.store(y + where * channels + channel, sums.to(y.dtype.element_ty), mask=computed)
    number = tl.arange(0, KEPT)[:, None]
    if kept is not None:
        for last in range(0, count):
            slot = tl.load(kept + first + last).to(tl.int64)
            if slot > 0:
                at = last - KERNEL + 2 + number
                before = _inputs(x, x_row, own, first, count, started, at, channel, channels, KERNEL, GATED)
                place = window + slot * window_row + number * channels + channel
                tl.store(place, before, mask=there & (number < KERNEL - 1))
    at = count - KERNEL + 1 + number
    inputs = _inputs(x, x_row, own, first, count, started, at, channel, channels, KERNEL, GATED)
    tl.debug_barrier()  # all threads have read the window before one of them overwrites it
    tl.store(own + number * channels + channel, inputs, mask=there & (number < KERNEL - 1))


def random_rows(device: torch.device, counts: list[int], contexts: list[int], **tensors: StateTensor) -> StateRows:
    """Rows of a self-test, of one layer with these tensors, which are random."""
    cache = StateCache(StateSpec((tensors,)), len(counts) + 2, device)
    for seed, state in enumerate(cache.tensors):
        state.copy_(random_tensor(device, *state.shape, seed=seed + 7) / 4)
    slots = torch.arange(len(counts), 0, -1, dtype=torch.int32, device=device)
    bounds = torch.tensor([0, *counts], device=device).cumsum(0).int()
    return StateRows(cache, slots, bounds, torch.tensor(contexts, dtype=torch.int32, device=device), counts)


def self_test(device: torch.device) -> None:
    """Both forms, for decode rows and prompts, at the start of a sequence and behind other tokens. Raises
    SelfTestFailed if the results differ from torch's."""
    channels, size = 140, 4
    weight, bias = random_tensor(device, size, channels, seed=1), random_tensor(device, channels, seed=2)
    for gated, dtype, counts in (
        (True, torch.bfloat16, [1, 1, 1]),
        (False, torch.bfloat16, [1, 40, 2]),
        (True, torch.float32, [1, 2, 70]),
    ):
        contexts = [1, counts[1] + 3, counts[2] + 9]
        rows = random_rows(device, counts, contexts, window=StateTensor((size - 1, channels), dtype))
        (window,) = rows.cache.tensors
        if counts[1] == 2:  # a draft
            kept = torch.zeros(sum(counts), dtype=torch.int32, device=device)
            kept[1] = 4
            rows = rows._replace(kept=kept)
        x, before = random_tensor(device, sum(counts), 3 * channels + 4, dtype=dtype), window.clone()
        found = causal_conv(x, weight, bias, gated, rows, window)
        b, c, u, _ = x.split([channels, channels, channels, 4], 1)
        inputs = b * u if gated else b
        expected = []
        for own, slot, started in zip(inputs.split(counts), rows.slots.tolist(), (False, True, True), strict=True):
            whole = torch.cat((before[slot] * started, own))
            if len(own) == 2 and rows.kept is not None:
                check_close("the window before a draft", window[4], whole[-size:-1], 2**-7)
            sums = F.conv1d(whole.t()[None].float(), weight.t()[:, None], bias, groups=channels)[0].t()
            expected.append(sums)
            check_close("the window of a convolution", window[slot], whole[-size + 1 :], 2**-7)
        sums = torch.cat(expected)
        y = sums * c.float() if gated else F.silu(sums)
        check_close("a convolution", found, y.to(dtype), 0.01 if dtype is torch.bfloat16 else 1e-5)
