"""Routing of tokens to the experts of a mixture, on the GPU: the choice of each token's experts, the order of the
tokens by expert, and the weighted sum of what the experts return.

All shapes follow from the numbers of tokens and experts, so a CUDA graph can keep the launches, whatever the tokens
choose. Tokens are counted and sorted by expert in tiles: each tile counts its tokens of each expert (`_choose`), then
adds the counts of all tiles to find the places of its own (`_sort`). Up to FEW_TOKENS there is one tile, and one launch
does both. The products over the sorted tokens are in grouped_matmul.py.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgi.worker.decoder_config import RouterConfig
from tgi.worker.gpu_kernels.self_test import SelfTestFailed, check_close, random_tensor

FEW_TOKENS, MANY_TOKENS = 16, 64  # of a tile
MANY_TILES = 64  # tiles of FEW_TOKENS; beyond, tiles have MANY_TOKENS
COUNTED = 32  # tiles whose counts are added at once
BLOCKS = 128  # empty ones, described at once
SUMMED = 512  # columns of a program of `combine`
LARGEST = 3e38  # in place of larger logits


class Routing(NamedTuple):
    """Which rows each expert computes. The T tokens with `top_k` experts each are n = T * top_k sorted rows: by expert,
    and the rows of an expert by token. Rows of the same expert are computed in blocks of equal size; the last block of
    an expert may have fewer."""

    weights: Tensor  # float32 [T, top_k]: of the experts of a token, in the order of the choice
    positions: Tensor  # int32 [T, top_k]: the sorted row of each of them
    tokens: Tensor  # int32 [n]: the token of a sorted row
    ends: Tensor  # int32 [experts]: the row after the last one of an expert
    block_experts: Tensor  # int32 [blocks]: the expert of a block; -1: an empty block
    block_rows: Tensor  # int32 [blocks]: its first row


def most_blocks(rows: int, experts: int, block: int) -> int:
    """The largest number of blocks that `rows` sorted rows can need."""
    return rows if rows <= experts else experts + (rows - experts) // block


@triton.jit
def _place(
    number, token, before, total, positions, sorted_tokens, ends, block_experts, block_rows, experts, blocks, tiles,
    BLOCK: tl.constexpr, TOP_K: tl.constexpr, EXPERTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Writes the Routing of a tile. number [tokens, EXPERTS]: 1 for a token's most probable expert, 2 for the next; 0:
    not chosen. `before` and `total` [EXPERTS] count the tokens of each expert in earlier tiles and in all."""
    expert = tl.arange(0, EXPERTS)
    chosen = (number > 0).to(tl.int32)
    last = tl.cumsum(total, 0)
    first = last - total
    position = (first + before)[None, :] + tl.cumsum(chosen, 0) - chosen
    tl.store(positions + token[:, None] * TOP_K + number - 1, position, mask=number > 0)
    tl.store(sorted_tokens + position, tl.broadcast_to(token[:, None], position.shape), mask=number > 0)
    tile = tl.program_id(0)
    if tile == 0:
        tl.store(ends + expert, last, mask=expert < experts)
    held = (total + BLOCK - 1) // BLOCK
    block = tl.cumsum(held, 0) - held
    for turn in range(tile, tl.max(held, 0), tiles):
        tl.store(block_experts + block + turn, expert, mask=turn < held)
        tl.store(block_rows + block + turn, first + turn * BLOCK, mask=turn < held)
    for start in range(tl.sum(held, 0) + tile * CHUNK, blocks, tiles * CHUNK):
        rest = start + tl.arange(0, CHUNK)
        tl.store(block_experts + rest, -1, mask=rest < blocks)


@triton.jit
def _keep_groups(x, expert, size, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BEST: tl.constexpr):
    """x [tokens, experts] with -inf outside of the TOP_GROUPS groups of `size` experts whose BEST (1 or 2) largest
    numbers have the largest sums; of equal groups the first."""
    group = expert // size
    number = tl.arange(0, GROUPS)[None, :]
    sums = tl.full((x.shape[0], GROUPS), float("-inf"), tl.float32)
    for one in tl.static_range(GROUPS):
        own = tl.where((group == one)[None, :], x, float("-inf"))
        first = tl.max(own, 1)
        at = tl.argmax(own, 1)
        second = tl.max(tl.where(expert[None, :] == at[:, None], float("-inf"), own), 1)
        sums = tl.where(number == one, (first + second if BEST > 1 else first)[:, None], sums)
    kept = tl.zeros(x.shape, tl.int1)
    for _ in tl.static_range(TOP_GROUPS):
        best = tl.argmax(sums, 1)
        kept = kept | (group[None, :] == best[:, None])
        sums = tl.where(number == best[:, None], float("-inf"), sums)
    return tl.where(kept, x, float("-inf"))


@triton.jit(do_not_specialize=["tokens", "blocks"])
def _choose(
    logits,  # [tokens, experts]
    bias,  # float32 [experts], or None
    weights, positions, sorted_tokens, ends, block_experts, block_rows,  # Routing
    numbers,  # uint8 [tokens, experts], see `_place`
    counts,  # int32 [tiles, experts]
    tokens, experts, blocks, scale,
    BLOCK: tl.constexpr, TOP_K: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZED: tl.constexpr, GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr, CHUNK: tl.constexpr, ALONE: tl.constexpr,
    LARGEST: tl.constexpr, GROUP_BEST: tl.constexpr,
):  # fmt: skip
    token, expert = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, EXPERTS)
    there = (token < tokens)[:, None] & (expert < experts)[None, :]
    at = token[:, None] * experts + expert[None, :]
    x = tl.load(logits + at, mask=there, other=0.0).to(tl.float32)
    # A token has TOP_K different experts also where its logits are not numbers.
    x = tl.where(x == x, tl.minimum(tl.maximum(x, -LARGEST), LARGEST), -LARGEST)
    x = tl.where((expert < experts)[None, :], x, float("-inf"))
    share = tl.sigmoid(x) if SIGMOID else tl.exp(x - tl.max(x, 1)[:, None])
    if not SIGMOID and (bias is not None or GROUPS > 1 or not NORMALIZED):
        share = share / tl.sum(share, 1)[:, None]
    # Larger scores are those of larger logits, unless there is more to it.
    BY_LOGIT: tl.constexpr = bias is None and GROUPS == 1
    if not BY_LOGIT:
        x = share if bias is None else share + tl.load(bias + expert, mask=expert < experts, other=0.0)[None, :]
        x = tl.where((expert < experts)[None, :], x, float("-inf"))
    if GROUPS > 1:
        x = _keep_groups(x, expert, experts // GROUPS, GROUPS, TOP_GROUPS, GROUP_BEST)
    # Integers in the order of the numbers, and among equal ones the first expert's is the largest. Numbers of 16 bits
    # leave enough lower bits for that.
    bits = x.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    later = EXPERTS - 1 - expert[None, :]
    WIDE: tl.constexpr = logits.dtype.element_ty == tl.float32 or not BY_LOGIT
    LEAST: tl.constexpr = -(1 << 63) if WIDE else -(1 << 31)
    left = (bits.to(tl.int64) << 32) | later if WIDE else (bits & -EXPERTS) | later
    number = tl.zeros((TOKENS, EXPERTS), tl.int32)
    for turn in range(1, TOP_K + 1):
        best = left == tl.max(left, 1)[:, None]
        number = tl.where(best, turn, number)
        left = tl.where(best, LEAST, left)
    if NORMALIZED:
        share = share / (tl.sum(tl.where(number > 0, share, 0.0), 1) + 1e-20)[:, None]
    share *= scale
    number = tl.where(there, number, 0)
    tl.store(weights + token[:, None] * TOP_K + number - 1, share, mask=number > 0)
    count = tl.sum((number > 0).to(tl.int32), 0)
    if ALONE:
        _place(
            number, token, tl.zeros_like(count), count, positions, sorted_tokens, ends, block_experts, block_rows,
            experts, blocks, 1, BLOCK, TOP_K, EXPERTS, CHUNK,
        )  # fmt: skip
    else:
        tl.store(numbers + at, number.to(tl.uint8), mask=there)
        tl.store(counts + tl.program_id(0) * experts + expert, count, mask=expert < experts)


@triton.jit(do_not_specialize=["tokens", "blocks", "tiles"])
def _sort(
    positions, sorted_tokens, ends, block_experts, block_rows,  # Routing
    numbers, counts,  # of `_choose`
    tokens, experts, blocks, tiles,
    BLOCK: tl.constexpr, TOP_K: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr, CHUNK: tl.constexpr,
    COUNTED: tl.constexpr,
):  # fmt: skip
    token, expert = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, EXPERTS)
    before, total = tl.zeros((EXPERTS,), tl.int32), tl.zeros((EXPERTS,), tl.int32)
    for start in range(0, tiles, COUNTED):
        tile = start + tl.arange(0, COUNTED)
        mask = (tile < tiles)[:, None] & (expert < experts)[None, :]
        count = tl.load(counts + tile[:, None] * experts + expert[None, :], mask=mask, other=0)
        total += tl.sum(count, 0)
        before += tl.sum(tl.where((tile < tl.program_id(0))[:, None], count, 0), 0)
    mask = (token < tokens)[:, None] & (expert < experts)[None, :]
    number = tl.load(numbers + token[:, None] * experts + expert[None, :], mask=mask, other=0).to(tl.int32)
    _place(
        number, token, before, total, positions, sorted_tokens, ends, block_experts, block_rows, experts, blocks, tiles,
        BLOCK, TOP_K, EXPERTS, CHUNK,
    )  # fmt: skip


def route(
    logits: Tensor,
    bias: Tensor | None,
    router: RouterConfig,
    top_k: int,
    block: int,
    batch_invariant: bool = False,
) -> Routing:
    """The `top_k` experts of each token that the router chooses by logits [tokens, experts] (of equal ones the first),
    and their weights. `bias` float32 [experts]: see RouterConfig. Products compute blocks of `block` rows.
    `batch_invariant`: one tile for any number of tokens, since a tile adds up the experts in its own order."""
    tokens, experts = logits.shape
    rows = tokens * top_k
    blocks = most_blocks(rows, experts, block)

    def integers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=logits.device)

    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    rest = integers(tokens, top_k), integers(rows), integers(experts), integers(blocks), integers(blocks)
    few = tokens <= FEW_TOKENS * MANY_TILES and not batch_invariant
    size = FEW_TOKENS if few else MANY_TOKENS
    tiles = triton.cdiv(tokens, size)
    numbers = counts = None
    if tiles > 1:
        numbers = torch.empty(tokens, experts, dtype=torch.uint8, device=logits.device)
        counts = integers(tiles, experts)
    sizes = {
        "BLOCK": block,
        "TOP_K": top_k,
        "TOKENS": size,
        "EXPERTS": triton.next_power_of_2(experts),
        "CHUNK": BLOCKS,
        "num_warps": 4 if size == FEW_TOKENS else 8,
    }
    _choose[(tiles,)](
        *(logits.contiguous(), bias, weights, *rest, numbers, counts, tokens, experts, blocks, router.scale),
        SIGMOID=router.score == "sigmoid",
        NORMALIZED=router.normalized,
        GROUPS=router.groups,
        TOP_GROUPS=router.top_groups,
        GROUP_BEST=router.group_best,
        ALONE=tiles == 1,
        LARGEST=LARGEST,
        **sizes,
    )
    if tiles > 1:
        _sort[(tiles,)](*rest, numbers, counts, tokens, experts, blocks, tiles, COUNTED=COUNTED, **sizes)
    return Routing(weights, *rest)


@triton.jit
def _combine(parts, positions, weights, y, size, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(TOP_K):
        position = tl.load(positions + token * TOP_K + choice).to(tl.int64)
        part = tl.load(parts + position * size + at, mask=inside, other=0.0).to(tl.float32)
        total += part * tl.load(weights + token * TOP_K + choice)
    tl.store(y + token * size + at, total.to(y.dtype.element_ty), mask=inside)


def combine(parts: Tensor, routing: Routing) -> Tensor:
    """[tokens, size]: the sum of a token's rows of `parts` [rows, size], in sorted order, times their weights. In
    float32, the most probable expert first."""
    (tokens, top_k), size = routing.positions.shape, parts.shape[1]
    y = torch.empty(tokens, size, dtype=parts.dtype, device=parts.device)
    grid = tokens, triton.cdiv(size, SUMMED)
    _combine[grid](parts, routing.positions, routing.weights, y, size, top_k, SUMMED)
    return y


def self_test(device: torch.device) -> None:
    """One tile and several. Raises SelfTestFailed if the choice or the order differs from torch's."""
    block = 4
    for tokens, config in (
        (5, RouterConfig(normalized=True)),
        (40, RouterConfig()),
        (40, RouterConfig("sigmoid", True, True, 4, 2, 1.8)),
        (40, RouterConfig(groups=4, top_groups=2, group_best=1)),
    ):
        logits, bias = random_tensor(device, tokens, 12), random_tensor(device, 12, seed=3) if config.biased else None
        found = route(logits, bias, config, 3, block)
        scores = logits.softmax(-1) if config.score == "softmax" else logits.sigmoid()
        choice = scores if bias is None else scores + bias
        sums = choice.view(tokens, config.groups, -1).topk(config.group_best).values.sum(-1)
        left_out = sums < sums.topk(config.top_groups).values[:, -1:]
        choice = choice.masked_fill(left_out.repeat_interleave(12 // config.groups, 1), -torch.inf)
        chosen = choice.topk(3).indices
        weights = scores.gather(1, chosen)
        weights = config.scale * (weights / weights.sum(-1, keepdim=True) if config.normalized else weights)
        check_close("the weights of experts", found.weights, weights, 1e-5)
        order = chosen.view(-1).argsort(stable=True)
        loads = torch.bincount(chosen.view(-1), minlength=12)
        held = (loads + block - 1) // block
        experts = torch.repeat_interleave(held)
        number = torch.arange(len(experts), device=device) - (held.cumsum(0) - held)[experts]
        begins = (loads.cumsum(0) - loads)[experts] + number * block
        parts = random_tensor(device, 3 * tokens, 20)
        expected = (parts[order.argsort()].view(tokens, 3, 20) * weights[:, :, None]).sum(1)
        for what, one, other in (
            ("the tokens of experts", found.tokens, order // 3),
            ("the ends of experts", found.ends, loads.cumsum(0)),
            ("the experts of blocks", found.block_experts[: len(experts)], experts),
            ("the rows of blocks", found.block_rows[: len(experts)], begins),
        ):
            if not torch.equal(one.long(), other):
                raise SelfTestFailed(f"{what} are {one.tolist()}, where {other.tolist()} is expected")
        if not bool((found.block_experts[len(experts) :] == -1).all()):
            raise SelfTestFailed("blocks without rows have an expert")
        check_close("the sum of experts", combine(parts, found), expected, 1e-5)
