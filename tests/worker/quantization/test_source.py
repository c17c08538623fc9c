"""Weight sources read quantized columns from files, and quantize plain weights when they are asked for."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.worker.quantization.weights import random_weight
from tgi.microkernel.errors import UserError
from tgi.worker.checkpoint import Checkpoint
from tgi.worker.quantization.weight import QuantizedWeight
from tgi.worker.quantization.weight_forms import EMBEDDING, HEAD
from tgi.worker.quantization.weight_sources import PackedWeightSource, QuantizingWeightSource


def source(directory: Path, tensors: dict[str, Tensor], exact: bool = False) -> PackedWeightSource:
    save_file(tensors, directory / "model.safetensors")
    return PackedWeightSource(Checkpoint(directory), exact)


def columns(name: str, weight: QuantizedWeight) -> dict[str, Tensor]:
    named = weight._asdict().items()
    return {f"{name}.weight.{kind}": column for kind, column in named if column is not None}


@pytest.mark.parametrize("shifted", [False, True])
def test_columns_are_read_as_they_were_written(shifted: bool, tmp_path: Path) -> None:
    written = random_weight(4, 64, 4, 32, shifted)
    read = source(tmp_path, columns("lm_head", written) | {"other.weight": torch.ones(2, 3)})
    assert "lm_head.weight" in read
    assert "else.weight" not in read
    found = read.weight("lm_head", 4, 64)
    assert isinstance(found, QuantizedWeight)
    assert torch.equal(found.dequantized(torch.float32), written.dequantized(torch.float32))
    assert torch.equal(read.tensor("lm_head.weight", 4, 64), written.dequantized(torch.float32))
    assert torch.equal(read.weight("other", 2, 3), read.tensor("other.weight", 2, 3))
    with pytest.raises(UserError, match=r"has shape \[4, 64\], but the model's config.json asks for \[4, 32\]"):
        read.weight("lm_head", 4, 32)


@pytest.mark.parametrize(
    "change",
    [
        {"codes": torch.zeros(4, 32, dtype=torch.int32)},
        {"codes": torch.zeros(3, 32, dtype=torch.uint8)},
        {"codes": torch.zeros(0, dtype=torch.uint8)},
        {"scales": torch.zeros(4, 2, dtype=torch.int8)},
        {"scales": torch.zeros(4, 2, dtype=torch.bfloat16)},
        {"scales": torch.zeros(4, 3, dtype=torch.float16)},
        {"scales": torch.zeros(4, 0, dtype=torch.float16)},
        {"scales": torch.zeros(4, 64, dtype=torch.float16)},
        {"shifts": torch.zeros(4, 1, dtype=torch.float16)},
    ],
)
def test_invalid_columns_are_rejected(change: dict[str, Tensor], tmp_path: Path) -> None:
    broken = random_weight(4, 64, 4, 32, True)._replace(**change)
    with pytest.raises(UserError, match=r"'x\.weight' has columns that do not fit"):
        source(tmp_path, columns("x", broken)).weight("x", 4, 64)


@pytest.mark.parametrize("exact", [False, True])
def test_scales_are_products_where_they_are_stored_so(exact: bool, tmp_path: Path) -> None:
    written = random_weight(4, 256, 4, 32, True)
    generator = torch.Generator().manual_seed(5)
    numbers = [torch.randint(-128, 128, (4, 8), generator=generator, dtype=torch.int8) for _ in range(2)]
    units = [torch.randn(4, 2, generator=generator) / 1000 for _ in range(2)]
    stored = columns("x", written._replace(scales=numbers[0], shifts=numbers[1]))
    stored |= {f"x.weight.super_{kind}": unit for kind, unit in zip(("scales", "shifts"), units, strict=True)}
    scales, shifts = (number * unit.repeat_interleave(4, 1) for number, unit in zip(numbers, units, strict=True))
    expected = written._replace(scales=scales, shifts=shifts)
    (tmp_path / "whole").mkdir()
    found = source(tmp_path / "whole", stored, exact).weight("x", 4, 256)
    assert isinstance(found, QuantizedWeight)
    for column, product in ((found.scales, scales), (found.shifts, shifts)):
        assert column is not None
        assert column.dtype is (torch.float32 if exact else torch.float16)
        assert torch.equal(column, product.to(column.dtype))
    if exact:
        assert torch.equal(found.dequantized(torch.float32), expected.dequantized(torch.float32))
    for odd in (units[0].half(), torch.zeros(4, 3), torch.zeros(4, 0), torch.zeros(3, 2), torch.zeros(8)):
        (tmp_path / "broken").mkdir(exist_ok=True)
        with pytest.raises(UserError, match=r"'x\.weight' has columns that do not fit"):
            source(tmp_path / "broken", stored | {"x.weight.super_scales": odd}).weight("x", 4, 256)


def test_only_plain_weights_of_suitable_size_are_quantized(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    already = random_weight(4, 64, 8, 64, False)
    names = ["a", EMBEDDING, HEAD]
    plain = {f"{name}.weight": torch.randn(4, 64) for name in names} | {"short.weight": torch.randn(4, 24)}
    read = QuantizingWeightSource(source(tmp_path, plain | columns("b", already)), "int4")
    found = [read.weight(name, 4, 64) for name in (*names, "b")]
    assert [weight.bits for weight in found if isinstance(weight, QuantizedWeight)] == [4, 8, 8, 8]
    assert isinstance(found[3], QuantizedWeight)
    assert found[3].group == 64
    assert torch.equal(read.weight("short", 4, 24), plain["short.weight"])
    read.weight("b", 4, 64)
    assert [message.rpartition(": ")[2] for message in caplog.messages] == [
        "it is quantized already",
        "it is of inputs that are no multiple of 32",
    ]


def test_fp8_leaves_embedding_and_head_plain(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = ["a", EMBEDDING, HEAD]
    plain = {f"{name}.weight": torch.randn(32, 64) for name in names} | {"odd.weight": torch.randn(24, 64)}
    read = QuantizingWeightSource(source(tmp_path, plain), "fp8")
    found = read.weight("a", 32, 64)
    assert isinstance(found, QuantizedWeight)
    assert found.floating
    for name, outputs in ((EMBEDDING, 32), (HEAD, 32), ("odd", 24)):
        assert torch.equal(read.weight(name, outputs, 64), plain[f"{name}.weight"])
    assert [message.rpartition(": ")[2] for message in caplog.messages] == [
        "it is of outputs that are no multiple of 16",
    ]


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_an_output_of_zeros_is_quantized_with_the_others(form: str, tmp_path: Path) -> None:
    weight = torch.randn(4, 64)
    weight[2] = 0
    found = QuantizingWeightSource(source(tmp_path, {"x.weight": weight}), form).weight("x", 4, 64)
    assert isinstance(found, QuantizedWeight)
    assert not found.dequantized(torch.float32)[2].any()


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_weights_beyond_the_range_of_scales_stay_plain(
    form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weight = random_weight(4, 64, 8, 32, False).dequantized(torch.float32)
    each = {"large": 1e8 * weight / weight.abs().max(), "small": 1e-7 * weight / weight.abs().max()}
    each["infinite"] = torch.full_like(weight, torch.inf)
    read = QuantizingWeightSource(source(tmp_path, {f"{name}.weight": value for name, value in each.items()}), form)
    for name, value in each.items():
        found = read.weight(name, 4, 64)
        assert isinstance(found, Tensor)
        assert torch.equal(found, value)
    assert "large as it is, and others like it: it is of numbers too large or too small" in caplog.text
