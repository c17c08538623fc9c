"""Linear layers on torch's CPU kernels: results, batch invariance, the choice of row counts, quantized weights."""

import torch
import torch.nn.functional as F

from tests.cases import each_case
from tgi.worker.layers.linear import (
    ANY_ROWS,
    LARGE_ROW_COUNTS,
    ONE_TILE,
    ROW_TILE,
    SMALL_ROW_COUNTS,
    Linear,
    RowCounts,
    choose_row_counts,
)
from tgi.worker.quantization.quantize import quantize_weight

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((192, 64), (64, 96), (576, 1536), (40, 24))
REFERENCE = {
    "none": lambda y, _: y,
    "silu": lambda y, _: F.silu(y),
    "add": lambda y, other: y + other,
    "mul": lambda y, other: y * other,
}


def make_layer(outputs: int, inputs: int, dtype: torch.dtype, epilogue: str = "none", bias: bool = False) -> Linear:
    generator = torch.Generator().manual_seed(outputs)
    weight = torch.randn(outputs, inputs, generator=generator).div(inputs**0.5).to(dtype)
    return Linear(weight, torch.randn(outputs, generator=generator).to(dtype) if bias else None, epilogue)


@each_case("dtype", DTYPES)
@each_case("epilogue", sorted(REFERENCE))
def test_batch_invariance(dtype: torch.dtype, epilogue: str) -> None:
    layers = [make_layer(*shape, dtype, epilogue, bias=True) for shape in SHAPES]
    choose_row_counts(layers)
    for linear in layers:
        x, other = torch.randn(300, linear.inputs).to(dtype), torch.randn(300, linear.outputs).to(dtype)
        whole = linear(x, other)
        assert whole.shape == (300, linear.outputs)
        for start, count in (
            (0, 1),
            (299, 1),
            (5, 2),
            (7, 3),
            (1, 17),
            (100, 31),
            (3, 33),
            (11, 64),
            (20, 130),
            (1, 299),
        ):
            part = slice(start, start + count)
            assert torch.equal(linear(x[part], other[part]), whole[part]), (linear.inputs, start, count)


@each_case("dtype", DTYPES)
@each_case("epilogue", sorted(REFERENCE))
@each_case("bias", [False, True])
def test_results_against_float64(dtype: torch.dtype, epilogue: str, bias: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(48, 32, generator=generator).to(dtype)
    offset = torch.randn(48, generator=generator).to(dtype)
    x, other = (torch.randn(5, n, generator=generator).to(dtype) for n in (32, 48))
    linear = Linear(weight.clone(), offset if bias else None, epilogue)
    wide = F.linear(x.double(), weight.double(), offset.double() if bias else None)
    expected = REFERENCE[epilogue](wide, other.double())
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(linear(x, other).double(), expected, rtol=tolerance, atol=tolerance)


@each_case("dtype", DTYPES)
def test_results_do_not_depend_on_the_thread_count(dtype: torch.dtype) -> None:
    linear = make_layer(576, 1536, dtype)
    choose_row_counts([linear])
    x = torch.randn(150, 1536).to(dtype)
    one = linear(x)
    torch.set_num_threads(2)
    assert torch.equal(linear(x), one)


def test_the_choice_of_row_counts_is_reproducible() -> None:
    layers = [make_layer(64, 96, torch.bfloat16), make_layer(192, 64, torch.bfloat16, "silu")]
    assert choose_row_counts(layers) == choose_row_counts(layers)


def test_row_counts_that_disagree_are_not_used() -> None:
    linear = make_layer(64, 96, torch.float32)
    exact = linear._call
    linear._call = lambda x, other: exact(x, other) + (1e-6 if x.shape[0] in (2, 128) else 0)
    counts = choose_row_counts([linear])
    assert 2 not in counts.sizes
    assert 128 not in counts.sizes
    assert ROW_TILE in counts.sizes
    assert linear(torch.randn(1, 96)).shape == (1, 64)


def test_only_the_tile_is_used_when_no_other_row_count_agrees() -> None:
    linear = make_layer(64, 96, torch.float32)
    exact = linear._call
    linear._call = lambda x, other: exact(x, other) + 1e-6 * (x.shape[0] - ROW_TILE)
    assert choose_row_counts([linear]) == ONE_TILE
    x = torch.randn(70, 96)
    assert torch.equal(linear(x)[40:41], linear(x[40:41]))


@each_case(
    "sizes",
    [
        (ROW_TILE,),
        (2, ROW_TILE),
        (4, 8, ROW_TILE),
        (*SMALL_ROW_COUNTS, ROW_TILE),
        (*SMALL_ROW_COUNTS, ROW_TILE, *LARGE_ROW_COUNTS),
    ],
)
def test_calls_cover_the_padded_rows_with_the_chosen_counts(sizes: tuple[int, ...]) -> None:
    counts = RowCounts(sizes)
    for rows in range(1, 400):
        padded = counts.padded(rows)
        calls = counts.split(padded)
        assert rows <= padded < rows + ROW_TILE
        assert [start for start, _ in calls] == [0, *(stop for _, stop in calls[:-1])]
        assert calls[-1][1] == padded
        assert all(stop - start in sizes for start, stop in calls)


def test_on_cpu_a_quantized_weight_is_dequantized_at_load() -> None:
    weight = quantize_weight(torch.randn(96, 64, generator=torch.Generator().manual_seed(4)), "int4")
    x = torch.randn(5, 64).bfloat16()
    found = Linear(weight, None, "silu", dtype=torch.bfloat16)(x)
    assert torch.equal(found, Linear(weight.dequantized(torch.bfloat16), None, "silu")(x))


def test_on_other_devices_a_quantized_weight_stays_quantized() -> None:
    """On torch's "meta" device, which has shapes but no data, so that the test needs no GPU."""
    weight = quantize_weight(torch.randn(96, 64), "int4").to(torch.device("meta"))
    linear = Linear(weight, None, "add", dtype=torch.bfloat16)
    x, other = (torch.empty(5, size, dtype=torch.bfloat16, device="meta") for size in (64, 96))
    assert linear(x, other).shape == (5, 96)
    assert linear.logits(x).dtype is torch.float32
    assert linear.without_epilogue()(x).shape == (5, 96)
    assert linear._weight is weight
    assert choose_row_counts([linear]) is ANY_ROWS
