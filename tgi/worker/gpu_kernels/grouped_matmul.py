"""Products of sorted rows with the weights of their experts, in one launch: y = then(x @ w.T + bias), with w and bias
those of a row's expert, or a gated product of x @ gate.T + bias and x @ up.T + bias (activations.gated).

Each program computes some outputs of a block of rows of one expert (see routing.Routing), over all inputs. Plain
weights are read as they are, quantized ones are decoded in registers as in quantized_matmul.py, also for many rows.
With many rows, 8-bit floats are multiplied as such. Tiles are chosen by the numbers of rows and experts alone, so a
row's result does not depend on the experts that other tokens choose, nor on its place in a block.
"""

import math
from itertools import pairwise
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgi.worker.activations import gated as gated_product
from tgi.worker.decoder_config import RouterConfig
from tgi.worker.gpu_kernels.float8 import quantize_rows
from tgi.worker.gpu_kernels.gated_activation import _activation, _multiply
from tgi.worker.gpu_kernels.quantized_matmul import codebook_table, decoded_tile, float4_weights, group_of
from tgi.worker.gpu_kernels.routing import Routing, route
from tgi.worker.gpu_kernels.self_test import check_close, random_tensor
from tgi.worker.quantization import float8
from tgi.worker.quantization.quantize import quantize_weight
from tgi.worker.quantization.weight import QuantizedWeight, Weight


class Tile(NamedTuple):
    """What a program computes, and how."""

    rows: int
    outputs: int  # of a gated product, and as many of its other weight; twice as many of another product
    inputs: int  # summed at once
    warps: int
    stages: int  # tiles in flight from memory
    floats: bool = False  # rows are quantized to 8-bit floats, as the weight is: see quantization/float8.py


# By bits of a number of the weight (32: of the inputs; "fp8": 8-bit floats), the tiles up to a mean number of rows of
# an expert. Few rows take as long as the weights take to be read. Measured on an H100 (docs/performance-methods.md).
TILES: dict[int | str, tuple[tuple[float, Tile], ...]] = {
    4: ((4.0, Tile(16, 32, 256, 4, 4)), (32.0, Tile(64, 32, 128, 4, 3)), (math.inf, Tile(128, 64, 64, 8, 3))),
    8: ((4.0, Tile(16, 32, 256, 4, 4)), (64.0, Tile(64, 64, 64, 4, 3)), (math.inf, Tile(128, 64, 64, 8, 3))),
    "fp8": (
        (4.0, Tile(16, 32, 128, 4, 5)),
        (64.0, Tile(64, 64, 64, 4, 3)),
        (math.inf, Tile(128, 128, 128, 8, 3, floats=True)),
    ),
    16: ((4.0, Tile(16, 32, 256, 4, 3)), (32.0, Tile(64, 32, 128, 4, 3)), (math.inf, Tile(128, 128, 64, 8, 4))),
    32: ((math.inf, Tile(16, 16, 32, 4, 2)),),
}


def choose_tile(weight: Weight, dtype: torch.dtype, rows: int, experts: int) -> Tile:
    """The tile for `rows` sorted rows."""
    kind: int | str = 16
    if dtype is torch.float32:
        kind = 32
    elif isinstance(weight, QuantizedWeight):
        kind = "fp8" if weight.floating and weight.scales.shape[1] == 1 else weight.bits
    return next(tile for mean, tile in TILES[kind] if rows <= mean * experts)


def invariant_tile(weight: Weight, dtype: torch.dtype, rows: int, experts: int) -> Tile:
    """The same tile for any number of rows."""
    return choose_tile(weight, dtype, 8 * experts, experts)


@triton.jit
def _grouped_matmul(
    x,  # [tokens, inputs], or in sorted order [rows, inputs]
    row_scales,  # [tokens, 1] or [rows, 1] if x has 8-bit floats; else None
    sorted_tokens, ends, block_experts, block_rows,  # Routing; the first is None if x is in sorted order
    codes, scales, shifts, factors, table,  # of decoded_tile
    bias,  # of all outputs of all experts, or None
    y,  # [rows, outputs], in sorted order
    outputs,
    inputs,
    width,
    groups,
    GROUP: tl.constexpr,
    GATED: tl.constexpr,
    THEN: tl.constexpr,  # an activation; "": none
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    expert = tl.load(block_experts + tl.program_id(1))
    if expert < 0:
        return
    row = tl.load(block_rows + tl.program_id(1)) + tl.arange(0, ROWS)
    given = row < tl.load(ends + expert)
    source = row if sorted_tokens is None else tl.load(sorted_tokens + row, mask=given, other=0)
    places = x + source.to(tl.int64)[:, None] * inputs
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    there = output < outputs
    first = expert.to(tl.int64) * (outputs + outputs if GATED else outputs) + output
    sums, factor = tl.zeros((ROWS, OUTPUTS), tl.float32), tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(0, inputs, INPUTS):
        at = start + tl.arange(0, INPUTS)
        left = tl.load(places + at[None, :], mask=given[:, None] & (at < inputs)[None, :], other=0.0)
        right = decoded_tile(
            codes, scales, shifts, factors, table, first, there, start, width, groups, GROUP, OUTPUTS, INPUTS,
            left.dtype,
        )  # fmt: skip
        sums = tl.dot(left, tl.trans(right), sums, input_precision=PRECISION)
        if GATED:
            right = decoded_tile(
                codes, scales, shifts, factors, table, first + outputs, there, start, width, groups, GROUP, OUTPUTS,
                INPUTS, left.dtype,
            )  # fmt: skip
            factor = tl.dot(left, tl.trans(right), factor, input_precision=PRECISION)
    if scales is not None and (GROUP == 0 or factors is not None):
        sums *= tl.load(scales + first, mask=there, other=0.0).to(tl.float32)[None, :]
        if GATED:
            factor *= tl.load(scales + first + outputs, mask=there, other=0.0).to(tl.float32)[None, :]
    if row_scales is not None:
        unit = tl.load(row_scales + source, mask=given, other=0.0)[:, None]
        sums *= unit
        if GATED:
            factor *= unit
    if bias is not None:
        sums += tl.load(bias + first, mask=there, other=0.0).to(tl.float32)[None, :]
        if GATED:
            factor += tl.load(bias + first + outputs, mask=there, other=0.0).to(tl.float32)[None, :]
    if THEN != "":
        sums = _activation(sums, THEN)
    if GATED:
        sums = _multiply(sums, factor, THEN)
    where = row.to(tl.int64)[:, None] * outputs + output[None, :]
    tl.store(y + where, sums.to(y.dtype.element_ty), mask=given[:, None] & there[None, :])


def grouped_matmul(
    x: Tensor,
    weight: Weight,
    routing: Routing,
    tile: Tile,
    then: str = "",
    gated: bool = False,
    by_token: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """then(x @ w.T + bias) [rows, outputs] in sorted order, for x [rows, inputs] in sorted order or, `by_token`,
    [tokens, inputs]. `weight` [experts * outputs, inputs] has the experts one after the other, as `bias`, if given; a
    plain one has the type of x. With `gated`, each expert has the outputs of the gate, then as many others, and the
    result is activations.gated of both. `then` is an activation, or "" for none. `routing` has blocks of
    `tile.rows`."""
    experts, rows = len(routing.ends), len(routing.tokens)
    all_outputs, inputs = weight.shape
    outputs = all_outputs // experts // (2 if gated else 1)
    if isinstance(weight, Tensor):
        assert weight.dtype is x.dtype
        columns, groups, group = (weight, None, None, None, None), 1, 0
    else:
        grouped = weight.scales if weight.factors is None else weight.factors
        columns = (*weight, codebook_table(weight, x))
        groups, group = grouped.shape[1], group_of(weight)
    y = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    left, row_scales = quantize_rows(x) if tile.floats else (x.contiguous(), None)
    size = tile.outputs if gated else 2 * tile.outputs
    _grouped_matmul[triton.cdiv(outputs, size), len(routing.block_experts)](
        *(left, row_scales, routing.tokens if by_token else None, routing.ends),
        *(routing.block_experts, routing.block_rows, *columns, bias, y),
        *(outputs, inputs, columns[0].shape[1], groups),
        GROUP=group,
        GATED=gated,
        THEN=then,
        ROWS=tile.rows,
        OUTPUTS=size,
        INPUTS=tile.inputs,
        PRECISION="ieee" if x.dtype is torch.float32 else "tf32",
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return y


def self_test(device: torch.device) -> None:
    """All kinds of weights, for few rows and many. Raises SelfTestFailed if the results differ from torch's."""
    interpreted = device.type == "cpu"
    experts, inner, hidden, dtype = 3, 24, 416, torch.float16 if interpreted else torch.bfloat16
    plain = [
        random_tensor(torch.device("cpu"), experts * outputs, hidden, seed=seed) / hidden**0.5
        for seed, outputs in enumerate((2 * inner, inner))
    ]
    kinds = ["int8", "int4"]
    if interpreted or torch.cuda.get_device_capability(device) >= float8.MIN_CAPABILITY:
        kinds.append("fp8")
    forms: dict[str, list[Weight]] = {"16 bits": [one.to(device, dtype) for one in plain]}
    quantized = {kind: [quantize_weight(one, kind).to(device) for one in plain] for kind in kinds}
    floats = [float4_weights(one.codes) for one in quantized["int4"]]
    forms |= quantized | {kind: [one[kind] for one in floats] for kind in floats[0]}
    for tokens in (2,) if interpreted else (2, 20, 200):
        x = random_tensor(device, tokens, hidden, dtype=dtype)
        for kind, (both, single) in forms.items():
            tile = choose_tile(both, dtype, 2 * tokens, experts)
            logits = random_tensor(device, tokens, experts)
            routing = route(logits, None, RouterConfig(normalized=True), 2, tile.rows)
            ends = [0, *routing.ends.tolist()]
            rows = [x[routing.tokens[a:b].long()].float() for a, b in pairwise(ends)]
            for weight, then, biased in ((both, "silu", False), (both, "clamped_silu", True), (single, "", True)):
                dense = weight.float() if isinstance(weight, Tensor) else weight.dequantized(torch.float32)
                bias = random_tensor(device, len(dense), dtype=dtype) * biased
                each = zip(rows, dense.chunk(experts), bias.float().chunk(experts), strict=True)
                sums = torch.cat([a @ b.t() + c for a, b, c in each])
                left, *right = sums.chunk(2, 1) if then else (sums,)
                expected = gated_product(then, left, *right) if then else left
                gives = bias if biased else None
                found = grouped_matmul(x, weight, routing, tile, then, bool(then), by_token=True, bias=gives)
                check_close(
                    f"a product of experts with {kind}", found, expected.to(dtype), 0.1 if tile.floats else 2**-6
                )
