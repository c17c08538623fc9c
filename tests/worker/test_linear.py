import pytest
import torch
import torch.nn.functional as F

from tgi.worker.linear import ANY_ROWS, LARGER, ONE_TILE, SMALLER, TILE, Linear, Rows, choose_rows
from tgi.worker.quantization.quantize import quantized

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((192, 64), (64, 96), (576, 1536), (40, 24))
REFERENCE = {
    "none": lambda y, _: y,
    "silu": lambda y, _: F.silu(y),
    "add": lambda y, other: y + other,
    "mul": lambda y, other: y * other,
}


def layer(outputs: int, inputs: int, dtype: torch.dtype, then: str = "none", bias: bool = False) -> Linear:
    generator = torch.Generator().manual_seed(outputs)
    weight = torch.randn(outputs, inputs, generator=generator).div(inputs**0.5).to(dtype)
    return Linear(weight, torch.randn(outputs, generator=generator).to(dtype) if bias else None, then)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("then", sorted(REFERENCE))
def test_a_row_is_the_same_in_any_call(dtype: torch.dtype, then: str) -> None:
    layers = [layer(*shape, dtype, then, bias=True) for shape in SHAPES]
    choose_rows(layers)
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("then", sorted(REFERENCE))
@pytest.mark.parametrize("bias", [False, True])
def test_what_is_computed(dtype: torch.dtype, then: str, bias: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(48, 32, generator=generator).to(dtype)
    offset = torch.randn(48, generator=generator).to(dtype)
    x, other = (torch.randn(5, n, generator=generator).to(dtype) for n in (32, 48))
    linear = Linear(weight.clone(), offset if bias else None, then)
    wide = F.linear(x.double(), weight.double(), offset.double() if bias else None)
    expected = REFERENCE[then](wide, other.double())
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(linear(x, other).double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_change_nothing(dtype: torch.dtype) -> None:
    linear = layer(576, 1536, dtype)
    choose_rows([linear])
    x = torch.randn(150, 1536).to(dtype)
    one = linear(x)
    torch.set_num_threads(2)
    assert torch.equal(linear(x), one)


def test_the_choice_is_the_same_each_time() -> None:
    layers = [layer(64, 96, torch.bfloat16), layer(192, 64, torch.bfloat16, "silu")]
    assert choose_rows(layers) == choose_rows(layers)


def test_sizes_that_disagree_are_not_used() -> None:
    linear = layer(64, 96, torch.float32)
    honest = linear._call
    linear._call = lambda x, other: honest(x, other) + (1e-6 if x.shape[0] in (2, 128) else 0)
    rows = choose_rows([linear])
    assert 2 not in rows.sizes
    assert 128 not in rows.sizes
    assert TILE in rows.sizes
    assert linear(torch.randn(1, 96)).shape == (1, 64)


def test_one_tile_serves_when_nothing_agrees() -> None:
    linear = layer(64, 96, torch.float32)
    honest = linear._call
    linear._call = lambda x, other: honest(x, other) + 1e-6 * (x.shape[0] - TILE)
    assert choose_rows([linear]) == ONE_TILE
    x = torch.randn(70, 96)
    assert torch.equal(linear(x)[40:41], linear(x[40:41]))


@pytest.mark.parametrize("sizes", [(TILE,), (2, TILE), (4, 8, TILE), (*SMALLER, TILE), (*SMALLER, TILE, *LARGER)])
def test_tiles_cover_the_padded_rows_with_sizes_that_agree(sizes: tuple[int, ...]) -> None:
    rows = Rows(sizes)
    for count in range(1, 400):
        padded = rows.padded(count)
        tiles = rows.tiles(padded)
        assert count <= padded < count + TILE
        assert [start for start, _ in tiles] == [0, *(stop for _, stop in tiles[:-1])]
        assert tiles[-1][1] == padded
        assert all(stop - start in sizes for start, stop in tiles)


def test_a_quantized_weight_is_computed_as_what_it_stands_for() -> None:
    weight = quantized(torch.randn(96, 64, generator=torch.Generator().manual_seed(4)), "int4")
    x = torch.randn(5, 64).bfloat16()
    found = Linear(weight, None, "silu", dtype=torch.bfloat16)(x)
    assert torch.equal(found, Linear(weight.dequantized(torch.bfloat16), None, "silu")(x))


def test_elsewhere_than_on_cpu_a_quantized_weight_stays_in_its_bits() -> None:
    """On torch's "meta" device, which has shapes and no numbers, since CUDA is not everywhere."""
    weight = quantized(torch.randn(96, 64), "int4").to(torch.device("meta"))
    linear = Linear(weight, None, "add", dtype=torch.bfloat16)
    x, other = (torch.empty(5, size, dtype=torch.bfloat16, device="meta") for size in (64, 96))
    assert linear(x, other).shape == (5, 96)
    assert linear.scores(x).dtype is torch.float32
    assert linear.bare()(x).shape == (5, 96)
    assert linear._weight is weight
    assert choose_rows([linear]) is ANY_ROWS
