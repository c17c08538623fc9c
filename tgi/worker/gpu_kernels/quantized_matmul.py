"""Rows times a quantized weight: y = x @ weight.T + bias from the columns of QuantizedWeight, in one launch.

A product of few rows takes as long as the weight takes to be read, and the kernel reads only its quantized form. Tiles
are decoded in registers, so the dequantized weight is never in memory, whatever the number of rows. With one scale for
each output, the codes, which 16 bits represent exactly, are multiplied, and the sum is multiplied by the scale. In
groups, the dequantized weight is computed in float32 and rounded to the type of x. Sums are float32. One program sums
all inputs of its outputs. The number of rows chooses the tile, and with it the bits of a row's result, unless one tile
is given for all.
"""

import math
from functools import cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from tgi.worker.gpu_kernels.matmul import BAND, Tile, place_in_band
from tgi.worker.gpu_kernels.self_test import check_close, random_tensor
from tgi.worker.quantization import float8
from tgi.worker.quantization.quantize import quantize_weight
from tgi.worker.quantization.weight import CODEBOOK, QuantizedWeight, codebook_on

MANY_OUTPUTS = 4096  # fill a GPU also with wide tiles
# The tiles up to a number of rows, by bits of a code (32: of the inputs), for fewer outputs than MANY_OUTPUTS and for
# others. Few rows take as long as the weight takes to be read; the inputs of their tiles are wide enough that most
# columns of scales are prefetched too, and few registers hold them. Those up to 16 rows have run on an H100, the others
# are those of grouped_matmul.py that have.
TILES: dict[int, tuple[tuple[float, Tile, Tile], ...]] = {
    4: (
        (16, Tile(16, 16, 256, 2, 4), Tile(16, 32, 256, 4, 4)),
        (64, Tile(64, 32, 128, 4, 3), Tile(64, 64, 128, 4, 3)),
        (math.inf, Tile(128, 64, 64, 8, 3), Tile(128, 128, 64, 8, 3)),
    ),
    8: (
        (16, Tile(16, 16, 256, 2, 6), Tile(16, 32, 256, 4, 6)),
        (64, Tile(64, 32, 128, 4, 3), Tile(64, 64, 128, 4, 3)),
        (math.inf, Tile(128, 64, 64, 8, 3), Tile(128, 128, 64, 8, 3)),
    ),
    32: ((math.inf, Tile(16, 32, 32, 4, 2), Tile(16, 32, 32, 4, 2)),),
}
INVARIANT_ROWS = 64  # whose tile serves any number of rows where results must not depend on it


# Eight codes of four bits select numbers of 16 bits by four byte permutations for each four bytes: the low bytes of 16
# numbers are in $4 to $8, the high bytes in $9 to $12.
_FOUR_CODES = """
    prmt.b32 a, $5, $6, s; prmt.b32 b, $7, $8, s; prmt.b32 c, a, b, t;
    prmt.b32 a, $9, $10, s; prmt.b32 b, $11, $12, s; prmt.b32 d, a, b, t;
    prmt.b32 ${first}, c, d, 0x5140; prmt.b32 ${second}, c, d, 0x7362;
"""
LOOK_UP = tl.constexpr(
    "{ .reg .b32 s, t, a, b, c, d; and.b32 s, $4, 0x77777777; shr.u32 t, $4, 1; and.b32 t, t, 0x44444444;"
    "or.b32 t, t, 0x32103210;"
    + _FOUR_CODES.format(first=0, second=1).replace("\n", " ")
    + "shr.u32 s, s, 16; shr.u32 t, t, 16;"
    + _FOUR_CODES.format(first=2, second=3).replace("\n", " ")
    + "}"
)


@triton.jit
def _halves(pair, DTYPE: tl.constexpr):
    """The two numbers of 16 bits in each integer."""
    return (pair & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True), (pair >> 16).to(tl.int16).to(DTYPE, bitcast=True)


@triton.jit
def _interleaved(code0, code1, code2, code3, code4, code5, code6, code7, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr):
    """[OUTPUTS, INPUTS] of the codes 0 to 7 of each integer."""
    even = tl.interleave(tl.interleave(code0, code4), tl.interleave(code2, code6))
    odd = tl.interleave(tl.interleave(code1, code5), tl.interleave(code3, code7))
    return tl.reshape(tl.interleave(even, odd), (OUTPUTS, INPUTS))


@triton.jit
def _words(
    codes, places, there, start, width, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, SHARED: tl.constexpr
):  # fmt: skip
    """Codes of four bits as int32 [OUTPUTS, INPUTS // SHARED, SHARED // 8]."""
    at = start // 8 + tl.arange(0, INPUTS // 8)
    mask = there[:, None] & (at < width // 4)[None, :]
    at = places[:, None] * (width // 4) + at[None, :]
    word = tl.load(codes.to(tl.pointer_type(tl.int32)) + at, mask=mask, other=0)
    return tl.reshape(word, (OUTPUTS, INPUTS // SHARED, SHARED // 8))


@triton.jit
def _scaled_code(word, LEFT: tl.constexpr, scale, shift, DTYPE: tl.constexpr):
    """scale * (16 + code) + shift, of the code that is shifted to the highest four bits of a float's fraction: integers
    are not converted, which would take longer than the codes take to be read."""
    bits = word << LEFT if LEFT >= 0 else word >> -LEFT
    code = (bits & 0x780000 | 0x41800000).to(tl.float32, bitcast=True)
    return (code * scale + shift).to(DTYPE)


@triton.jit
def _four_bit_tile(
    codes, scales, shifts, places, there, start, width, groups,
    GROUP: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """`decoded_tile` of integers of four bits."""
    SHARED: tl.constexpr = GROUP if GROUP > 0 and GROUP < INPUTS else INPUTS
    word = _words(codes, places, there, start, width, OUTPUTS, INPUTS, SHARED)
    if GROUP > 0:
        at = start // GROUP + tl.arange(0, INPUTS // SHARED)
        mask = there[:, None] & (at < groups)[None, :]
        at = places[:, None] * groups + at[None, :]
        scale = tl.load(scales + at, mask=mask, other=0.0).to(tl.float32)
    else:
        scale = tl.full((OUTPUTS, 1), 1.0, tl.float32)
    if shifts is None:
        shift = -24.0 * scale
    else:
        shift = tl.load(shifts + at, mask=mask, other=0.0).to(tl.float32) - 16.0 * scale
    scale, shift = scale[:, :, None], shift[:, :, None]
    return _interleaved(
        _scaled_code(word, 19, scale, shift, DTYPE),
        _scaled_code(word, 15, scale, shift, DTYPE),
        _scaled_code(word, 11, scale, shift, DTYPE),
        _scaled_code(word, 7, scale, shift, DTYPE),
        _scaled_code(word, 3, scale, shift, DTYPE),
        _scaled_code(word, -1, scale, shift, DTYPE),
        _scaled_code(word, -5, scale, shift, DTYPE),
        _scaled_code(word, -9, scale, shift, DTYPE),
        OUTPUTS,
        INPUTS,
    )


@triton.jit
def _codebook_tile(
    codes, factors, table, places, there, start, width, groups,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """`decoded_tile` of a codebook's weight, with the table of `_byte_planes`. Bytes are selected in registers, which
    takes a few instructions for eight codes; loads or shuffles would take longer than the codes take to be read."""
    GROUPS: tl.constexpr = INPUTS // 32
    word = _words(codes, places, there, start, width, OUTPUTS, INPUTS, 32)
    at = start // 32 + tl.arange(0, GROUPS)
    mask = there[:, None] & (at < groups)[None, :]
    factor = tl.load(factors + places[:, None] * groups + at[None, :], mask=mask, other=0).to(tl.int32)
    planes = tl.load(table + factor[:, :, None] * 8 + tl.arange(0, 8)[None, None, :])
    even, odd = tl.split(tl.reshape(planes, (OUTPUTS, GROUPS, 2, 2, 2)))
    zero, two = tl.split(even)
    one, three = tl.split(odd)
    low0, high0 = tl.split(zero)
    low1, high1 = tl.split(one)
    low2, high2 = tl.split(two)
    low3, high3 = tl.split(three)
    pair0, pair1, pair2, pair3 = tl.inline_asm_elementwise(
        LOOK_UP,
        "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r",
        [
            word, low0[:, :, None], low1[:, :, None], low2[:, :, None], low3[:, :, None],
            high0[:, :, None], high1[:, :, None], high2[:, :, None], high3[:, :, None],
        ],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )  # fmt: skip
    code0, code1 = _halves(pair0, DTYPE)
    code2, code3 = _halves(pair1, DTYPE)
    code4, code5 = _halves(pair2, DTYPE)
    code6, code7 = _halves(pair3, DTYPE)
    return _interleaved(code0, code1, code2, code3, code4, code5, code6, code7, OUTPUTS, INPUTS)


@triton.jit
def _float4(word, LEFT: tl.constexpr):
    """2**-126 times the number of the 4-bit float that is shifted to the highest four bits of an integer: sign, two
    exponent bits and one of the fraction become those of a float, which may be subnormal."""
    return (((word << LEFT) >> 6) & -0x7E400000).to(tl.float32, bitcast=True)  # the bits 31 and 22 to 24


@triton.jit
def _float4_number(word, LEFT: tl.constexpr, scale, DTYPE: tl.constexpr):
    return (_float4(word, LEFT) * 8.507059173023462e37 * scale).to(DTYPE)  # 2**126


@triton.jit
def _float4_tile(
    codes, factors, places, there, start, width, groups,
    GROUP: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """`decoded_tile` of 4-bit floats: their numbers times the factors, exponents of 8 bits in groups of 32, floats of
    8 bits in groups of 16. bfloat16 has all these products."""
    word = _words(codes, places, there, start, width, OUTPUTS, INPUTS, GROUP)
    at = start // GROUP + tl.arange(0, INPUTS // GROUP)
    mask = there[:, None] & (at < groups)[None, :]
    byte = tl.load(factors + places[:, None] * groups + at[None, :], mask=mask, other=0).to(tl.int32)
    if GROUP == 32:
        bits = (byte & 0xFF) << 23
        scale = tl.where(bits == 0, 1 << 22, bits).to(tl.float32, bitcast=True)  # 2**-127 is subnormal
    else:
        bits = (byte << 20) & -0x78100000  # the bits 31 and 20 to 26
        scale = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120
    scale = scale[:, :, None]
    return _interleaved(
        _float4_number(word, 28, scale, DTYPE),
        _float4_number(word, 24, scale, DTYPE),
        _float4_number(word, 20, scale, DTYPE),
        _float4_number(word, 16, scale, DTYPE),
        _float4_number(word, 12, scale, DTYPE),
        _float4_number(word, 8, scale, DTYPE),
        _float4_number(word, 4, scale, DTYPE),
        _float4_number(word, 0, scale, DTYPE),
        OUTPUTS,
        INPUTS,
    )


@triton.jit
def decoded_tile(
    codes,  # [outputs, width], two in a byte where these are uint8
    scales,  # [outputs, groups], or [outputs, 1] where there are factors or no groups
    shifts,  # [outputs, groups], or None
    factors,  # [outputs, groups], or None
    table,  # of `codebook_table`, or None: factors are those of 4-bit floats
    places,  # int64 [OUTPUTS], of outputs
    there,  # [OUTPUTS]: whether there is such an output
    start,  # the first input
    width,
    groups,
    GROUP: tl.constexpr,  # inputs that share a scale or a factor; 0: all
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,  # of the tile; a multiple of GROUP, or a divisor
    DTYPE: tl.constexpr,  # of the result
):
    """A tile [OUTPUTS, INPUTS] of a weight, without `scales` where there are factors or no groups. Plain weights are
    codes without groups."""
    PACKED: tl.constexpr = 2 if codes.dtype.element_ty == tl.uint8 else 1
    if PACKED == 2 and factors is None:
        return _four_bit_tile(codes, scales, shifts, places, there, start, width, groups, GROUP, OUTPUTS, INPUTS, DTYPE)
    elif factors is not None and table is None:
        return _float4_tile(codes, factors, places, there, start, width, groups, GROUP, OUTPUTS, INPUTS, DTYPE)
    elif factors is not None and table.dtype.element_ty == tl.int32:
        return _codebook_tile(codes, factors, table, places, there, start, width, groups, OUTPUTS, INPUTS, DTYPE)
    else:
        at = start // PACKED + tl.arange(0, INPUTS // PACKED)
        mask = there[:, None] & (at < width)[None, :]
        code = tl.load(codes + places[:, None] * width + at[None, :], mask=mask, other=0.0)
        if GROUP > 0:
            SHARED: tl.constexpr = GROUP if GROUP < INPUTS else INPUTS
            at = start // GROUP + tl.arange(0, INPUTS // SHARED)
            mask = there[:, None] & (at < groups)[None, :]
            at = places[:, None] * groups + at[None, :]
            if factors is not None:
                code = tl.reshape(tl.interleave(code & 15, code >> 4), (OUTPUTS, INPUTS // SHARED, SHARED))
                factor = tl.load(factors + at, mask=mask, other=0).to(tl.int32)
                entries = tl.load(table + factor[:, :, None] * 16 + tl.arange(0, 16)[None, None, :])
                code = tl.gather(entries, code.to(tl.int32), 2)
            else:
                code = tl.reshape(code, (OUTPUTS, INPUTS // SHARED, SHARED))
                code = code.to(tl.float32) * tl.load(scales + at, mask=mask, other=0.0).to(tl.float32)[:, :, None]
                if shifts is not None:
                    code += tl.load(shifts + at, mask=mask, other=0.0).to(tl.float32)[:, :, None]
            code = tl.reshape(code, (OUTPUTS, INPUTS))
        if code.dtype == tl.float8e4nv and code.dtype != DTYPE:  # directly to bfloat16 takes slower instructions
            code = code.to(tl.float16).to(tl.float32)
        return code.to(DTYPE)


@triton.jit(do_not_specialize=["rows"])
def _quantized_matmul(
    x,  # [rows, inputs]
    codes, scales, shifts, factors, table,  # of `decoded_tile`
    bias,  # [outputs], or None
    y,  # [rows, outputs]
    rows,
    outputs,
    inputs,
    width,
    groups,
    GROUP: tl.constexpr,  # of `decoded_tile`
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    BAND: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    block, across = place_in_band(rows, outputs, ROWS, OUTPUTS, BAND)
    row, output = block * ROWS + tl.arange(0, ROWS), across * OUTPUTS + tl.arange(0, OUTPUTS)
    there, given = output < outputs, row < rows
    places = output.to(tl.int64)  # a large head has more than 2**31 codes
    left_places = x + row.to(tl.int64)[:, None] * inputs
    sums = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(0, inputs, INPUTS):
        at = start + tl.arange(0, INPUTS)
        left = tl.load(left_places + at[None, :], mask=given[:, None] & (at < inputs)[None, :], other=0.0)
        right = decoded_tile(
            codes, scales, shifts, factors, table, places, there, start, width, groups, GROUP, OUTPUTS, INPUTS,
            left.dtype,
        )  # fmt: skip
        sums = tl.dot(left, tl.trans(right), sums, input_precision=PRECISION)
    if GROUP == 0 or factors is not None:
        sums *= tl.load(scales + output, mask=there, other=0.0).to(tl.float32)[None, :]
    if bias is not None:
        sums += tl.load(bias + output, mask=there, other=0.0).to(tl.float32)[None, :]
    where = row.to(tl.int64)[:, None] * outputs + output[None, :]
    tl.store(y + where, sums.to(y.dtype.element_ty), mask=given[:, None] & there[None, :])


@cache
def _byte_planes(device: torch.device, dtype: torch.dtype) -> Tensor:
    """int32 [factors, 8]: of each row of CODEBOOK in a type of 16 bits, the low bytes, then the high bytes."""
    return CODEBOOK.to(dtype).view(torch.uint8).view(-1, 16, 2).mT.contiguous().view(torch.int32).view(-1, 8).to(device)


def codebook_table(weight: QuantizedWeight, x: Tensor) -> Tensor | None:
    """The codebook for `decoded_tile`, if the weight has codes of it: byte planes where assembly is available, else
    int8 [factors, 16]."""
    if weight.factors is None or weight.is_float4:
        return None
    if torch.version.hip is not None or x.dtype.itemsize != 2:
        return codebook_on(x.device)
    return _byte_planes(x.device, x.dtype)


def group_of(weight: QuantizedWeight) -> int:
    """GROUP of `decoded_tile`."""
    grouped = weight.scales if weight.factors is None else weight.factors
    alone = grouped.shape[1] == 1 and weight.shifts is None and weight.factors is None
    return 0 if alone else weight.shape[1] // grouped.shape[1]


def choose_tile(weight: QuantizedWeight, dtype: torch.dtype, rows: int) -> Tile:
    """The tile for this number of rows in `dtype`."""
    wide = weight.shape[0] >= MANY_OUTPUTS
    fit = (tiles for most, *tiles in TILES[32 if dtype is torch.float32 else weight.bits] if rows <= most)
    return next(fit)[wide]


def quantized_matmul(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None, tile: Tile | None = None, batch_invariant: bool = False
) -> Tensor:
    """x @ weight.T + bias [rows, outputs] for x [rows, inputs], with any number of rows. `batch_invariant`: by one tile
    for any number."""
    rows, (outputs, inputs) = x.shape[0], weight.shape
    tile = tile or choose_tile(weight, x.dtype, INVARIANT_ROWS if batch_invariant else rows)
    y = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    codes, scales, shifts, factors = weight
    groups = (scales if factors is None else factors).shape[1]
    if rows:
        _quantized_matmul[triton.cdiv(rows, tile.rows) * triton.cdiv(outputs, tile.outputs),](
            *(x.contiguous(), codes, scales, shifts, factors, codebook_table(weight, x), bias, y),
            *(rows, outputs, inputs, codes.shape[1], groups),
            GROUP=group_of(weight),
            ROWS=tile.rows,
            OUTPUTS=tile.outputs,
            INPUTS=tile.inputs,
            BAND=BAND,
            PRECISION="ieee" if x.dtype is torch.float32 else "tf32",
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return y


def self_test(device: torch.device) -> None:
    """All kinds of weights, with tiles of all sizes. Raises SelfTestFailed if the results differ from torch's."""
    interpreted = device.type == "cpu"  # which does not multiply bfloat16
    outputs, dtype = (40, torch.float16) if interpreted else (MANY_OUTPUTS + 8, torch.bfloat16)
    bias = random_tensor(device, outputs, dtype=dtype)
    plain, groups = random_tensor(torch.device("cpu"), outputs, 416), random_tensor(device, outputs, 13).half()
    forms = {form: quantize_weight(plain, form).to(device) for form in ("int8", "int4")}
    forms["int8 in groups"] = forms["int8"]._replace(scales=groups, shifts=groups)
    forms["int4 in groups"] = QuantizedWeight(forms["int4"].codes, groups, None)
    forms |= float4_weights(forms["int4"].codes)
    if interpreted or torch.cuda.get_device_capability(device) >= float8.MIN_CAPABILITY:
        forms["fp8"] = quantize_weight(plain, "fp8").to(device)
        forms["fp8 in groups"] = forms["fp8"]._replace(scales=groups.float())
    for form, weight in forms.items():
        for rows in (5,) if interpreted else (5, 40, 150):
            x = random_tensor(device, rows, 416, dtype=dtype)
            expected = F.linear(x, weight.dequantized(dtype), bias)
            check_close(f"a product of {rows} rows with {form}", quantized_matmul(x, weight, bias), expected, 2**-7)
    x, small = random_tensor(device, 5, 416, dtype=dtype), forms["int4"].split([24, outputs - 24])[0]
    expected = F.linear(x, small.dequantized(dtype))
    check_close("a small product with int4", quantized_matmul(x, small, None), expected, 2**-7)


def float4_weights(codes: Tensor) -> dict[str, QuantizedWeight]:
    """Weights of 4-bit floats with these codes, uint8 [outputs, inputs / 2], and factors of many sizes."""
    (outputs, width), scales = codes.shape, torch.full((len(codes), 1), 0.75, dtype=torch.float64, device=codes.device)
    numbers = torch.arange(outputs * width // 8, device=codes.device).view(outputs, -1)  # as many as groups of 16
    exponents, floats = 120 + numbers[:, : width // 16] % 8, 33 + numbers % 29
    forms = {"MXFP4": exponents, "NVFP4": floats}
    return {name: QuantizedWeight(codes, scales, None, one.to(torch.int8)) for name, one in forms.items()}
