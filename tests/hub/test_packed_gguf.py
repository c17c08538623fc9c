"""Packed GGUF imports: the stored codes, scales and shifts equal the values of the file's blocks."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize
from safetensors.torch import load_file, save_file

from scripts.make_gguf import write_gguf
from tests.dequantized import plain_weights
from tests.models import model
from tests.worker.batches import prefill
from tests.worker.test_families import load, memory, pages
from tgi.hub.gguf import reader, weights
from tgi.hub.gguf.block_types import FORMS
from tgi.hub.gguf.conversion_plan import UNQUANTIZED, TargetTensor
from tgi.hub.gguf.convert import convert
from tgi.hub.model_config import read_model_config
from tgi.hub.resolver import model_directory
from tgi.microkernel.errors import UserError
from tgi.worker.checkpoint import Checkpoint
from tgi.worker.quantization.weight import QuantizedWeight, as_plain
from tgi.worker.quantization.weight_sources import PackedWeightSource

pytestmark = pytest.mark.slow

ROWS, COLUMNS = 24, 512
NEVER_INFINITE = {GGMLQuantizationType.MXFP4, GGMLQuantizationType.NVFP4}  # their scales have 8 bits


def quiet(stage: str, percent: float, size: int = 0) -> None:
    pass


def imported(source: Path, directory: Path, packed: bool) -> dict[str, torch.Tensor]:
    directory.mkdir()
    convert(source, directory, quiet, packed=packed)
    return load_file(directory / "model.safetensors")


def one_tensor(path: Path, raw: np.ndarray, block: GGMLQuantizationType) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("x", raw, raw_dtype=block)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random_rows(block: GGMLQuantizationType, largest: float = 1000.0) -> np.ndarray:
    """Blocks of random bytes whose values are at most `largest`."""
    size, stored = GGML_QUANT_SIZES[block]
    count = ROWS * COLUMNS // size
    blocks = np.random.default_rng(0).integers(0, 256, (8 * count, stored), dtype=np.uint8)
    with np.errstate(all="ignore"):
        sound = np.abs(dequantize(blocks, block)).max(axis=1) <= largest
    assert sound.sum() >= count
    return blocks[sound][:count].reshape(ROWS, -1)


def written(raw: np.ndarray, block: GGMLQuantizationType, place: Path) -> dict[str, torch.Tensor]:
    source = reader.read_gguf(one_tensor(place / "m.gguf", raw, block))
    weights.write_weights(
        source, [TargetTensor("x", "y", (ROWS, COLUMNS))], place / "y.safetensors", lambda done, size: None, packed=True
    )
    return load_file(place / "y.safetensors")


@pytest.mark.parametrize("block", FORMS, ids=lambda block: block.name)
def test_every_block_type_has_the_same_values(block: GGMLQuantizationType, tmp_path: Path) -> None:
    raw, form = random_rows(block), FORMS[block]
    columns = written(raw, block, tmp_path)
    assert columns["y.codes"].dtype is (torch.int8 if form.bits == 8 else torch.uint8)
    assert columns["y.factors" if form.float4 else "y.scales"].shape == (ROWS, COLUMNS // form.group)
    assert ("y.shifts" in columns) is form.shifted
    assert ("y.super_scales" in columns) is (form.super_group > 0)
    expected = torch.from_numpy(dequantize(raw, block).reshape(ROWS, COLUMNS))
    assert torch.equal(plain_weights(columns, torch.float32)["y"], expected)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("block", FORMS, ids=lambda block: block.name)
def test_the_worker_rounds_scales_once_or_not_at_all(block: GGMLQuantizationType, exact: bool, tmp_path: Path) -> None:
    """An error of at most 2^-11 of a scale times a code, and of a shift; subnormal scales 2^-25."""
    raw = random_rows(block)
    columns = written(raw, block, tmp_path)
    save_file({f"y.weight{name[1:]}": tensor for name, tensor in columns.items()}, tmp_path / "model.safetensors")
    expected = torch.from_numpy(dequantize(raw, block).reshape(ROWS, COLUMNS))
    with Checkpoint(tmp_path) as checkpoint:
        weight = PackedWeightSource(checkpoint, exact).weight("y", ROWS, COLUMNS)
    if exact:
        assert torch.equal(as_plain(weight, torch.float32), expected)
    assert isinstance(weight, QuantizedWeight)
    if weight.is_float4:  # their scales have 8 bits
        assert torch.equal(weight.dequantized(torch.float32), expected)
        return
    allowed = (torch.float16, torch.float32) if exact else (torch.float16,)
    assert weight.scales.dtype in allowed
    assert weight.shifts is None or weight.shifts.dtype is weight.scales.dtype
    codes = weight.decoded().float().abs().view(ROWS, -1, weight.group).amax(-1)
    bound = codes * (2**-11 * weight.scales.float().abs() + 2**-25)
    if weight.shifts is not None:
        bound += 2**-11 * weight.shifts.float().abs() + 2**-25
    off = (weight.dequantized(torch.float32) - expected).abs().view(ROWS, -1, weight.group).amax(-1)
    assert (off <= 1.001 * bound).all()


def test_plain_tensors_are_kept_without_rounding(tmp_path: Path) -> None:
    """In the smallest type that holds them: float32 that is bfloat16 takes 16 bits."""
    numbers = torch.randn(ROWS, COLUMNS)
    kinds = {
        "F16": (numbers.half(), torch.float16),
        "F32": (numbers, torch.float32),
        "BF16": (numbers.bfloat16(), torch.bfloat16),
    }
    for name, (tensor, dtype) in kinds.items():
        raw = tensor.view(torch.int16).numpy().view(np.uint8) if name == "BF16" else tensor.numpy()
        found = written(raw, GGMLQuantizationType[name], tmp_path)
        assert found["y"].dtype is dtype
        assert torch.equal(found["y"], tensor)
    found = written(numbers.bfloat16().float().numpy(), GGMLQuantizationType.F32, tmp_path)
    assert found["y"].dtype is torch.bfloat16
    assert torch.equal(found["y"], numbers.bfloat16())


@pytest.mark.parametrize("block", sorted(FORMS.keys() - NEVER_INFINITE), ids=lambda block: block.name)
def test_infinite_scales_are_detected_without_numpy_warnings(block: GGMLQuantizationType) -> None:
    infinite = np.tile(np.array([np.inf], np.float16).view(np.uint8), GGML_QUANT_SIZES[block][1] // 2)
    if block is GGMLQuantizationType.IQ1_M:  # a float16 in four parts
        infinite[-8:] = np.array([0, 0, 0xC000, 0x7000], np.uint16).view(np.uint8)
    with np.errstate(all="raise"):
        _, *factors = FORMS[block].stored(infinite[None])
    assert not all(np.isfinite(column).all() for column in factors)


def test_a_scale_that_is_no_number_is_refused(tmp_path: Path) -> None:
    raw = random_rows(GGMLQuantizationType.MXFP4)
    raw[0, 0] = 255
    with pytest.raises(UserError, match="stands for no number; it is damaged"):
        written(raw, GGMLQuantizationType.MXFP4, tmp_path)


def test_q4_1_is_kept_bit_for_bit(tmp_path: Path) -> None:
    """Two blocks with bytes that are easy to verify by hand."""
    codes = bytes(range(16))
    raw = np.frombuffer(b"\x00\x3c\x00\xc0" + codes + b"\x01\x00\x02\x00" + codes[::-1], np.uint8)
    columns = written(np.tile(raw, (ROWS, COLUMNS // 64)), GGMLQuantizationType.Q4_1, tmp_path)
    assert columns["y.scales"][0, :2].view(torch.int16).tolist() == [0x3C00, 0x0001]
    assert columns["y.shifts"][0, :2].view(torch.uint16).tolist() == [0xC000, 0x0002]
    assert columns["y.codes"][0, :16].tolist() == [16 * (i + 1) + i for i in range(0, 16, 2)] + [0] * 8


TIED: dict[str, dict[str, Any]] = {
    "gemma2": {"tie": True, "more": (("query_pre_attn_scalar", 16),)},
    "cohere": {"tie": True},
    "lfm2_moe": {"tie": True, "more": (("routed_scaling_factor", 1.0),)},
    "qwen3_5_text": {"hidden": 256, "heads": 8, "intermediate": 256, "more": (("linear_value_head_dim", 128),)},
}


DELTA = ("conv1d.weight", "in_proj_a.weight", "in_proj_b.weight")


@pytest.mark.parametrize(
    ("kind", "block"),
    [
        ("llama", "Q4_0"),
        ("mixtral", "Q8_0"),
        ("phi3", "Q4_1"),
        ("gemma2", "Q8_0"),
        ("cohere", "Q5_1"),
        ("lfm2_moe", "Q8_0"),
        ("qwen3_5_text", "Q4_K"),
        ("qwen3_5_text", "Q4_1"),
    ],
)
def test_a_packed_import_equals_a_dequantized_one(kind: str, block: str, tmp_path: Path) -> None:
    """Rows in the order of transformers, experts separated, norms not quantized; as many bytes as in the file."""
    source = write_gguf(model(kind, dtype="bfloat16", **TIED.get(kind, {})), tmp_path / "m.gguf", block)
    packed, expected = (imported(source, tmp_path / name, name == "packed") for name in ("packed", "plain"))
    found = plain_weights(packed, torch.bfloat16)
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
        plain = ("norm.weight", "moe.gate.weight", "feed_forward.gate.weight", "conv.conv.weight", *DELTA)
        assert (name in packed) is (tensor.ndim == 1 or name.endswith(plain)), name
    if block in ("Q8_0", "Q4_0", "Q4_1"):
        stored = sum(
            len(tensor.data)
            for name, tensor in reader.read_gguf(source).tensors.items()
            if tensor.type.name == block and not name.endswith(UNQUANTIZED)
        )
        assert sum(tensor.nbytes for name, tensor in packed.items() if name not in expected) == stored


def test_the_result_does_not_depend_on_the_piece_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_gguf(model("llama"), tmp_path / "m.gguf", "Q4_1")
    imported(source, tmp_path / "whole", packed=True)
    monkeypatch.setattr(weights, "PIECE", 192)  # three rows, so that pieces are not aligned with heads
    imported(source, tmp_path / "pieces", packed=True)
    assert (tmp_path / "pieces/model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()


def test_block_types_are_recorded_in_the_config_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    original = model("llama", layers=1)
    directory = model_directory(str(write_gguf(original, tmp_path / "m.gguf", "Q4_0")), cache=tmp_path / "cache")
    said = json.loads((directory / "config.json").read_text())["quantization_config"]
    assert said == {"quant_method": "gguf", "kept": {"Q4_0": 9}, "plain": {"F32": 3}}
    assert [line for line in caplog.messages if "bits of" in line] == [
        "weights keep the bits of the GGUF file where its tensors are Q4_0 (9); plain are F32 (3)"
    ]
    assert read_model_config(directory).dtype == "bfloat16"
    imported(write_gguf(original, tmp_path / "plain.gguf", "F16"), tmp_path / "plain", packed=True)
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())


def test_a_weight_whose_scales_are_beyond_float16_is_dequantized(tmp_path: Path) -> None:
    block = GGMLQuantizationType.Q6_K
    raw = random_rows(block).reshape(-1, GGML_QUANT_SIZES[block][1])
    raw[0, -18:] = np.frombuffer(bytes([100] * 16) + b"\x00\x70", np.uint8)  # 100 times 8192
    columns = written(raw.reshape(ROWS, -1), block, tmp_path)
    save_file({f"x.weight{name[1:]}": tensor for name, tensor in columns.items()}, tmp_path / "model.safetensors")
    expected = torch.from_numpy(dequantize(raw, block).reshape(ROWS, COLUMNS))
    with Checkpoint(tmp_path) as checkpoint:
        for exact, kind in ((False, torch.Tensor), (True, QuantizedWeight)):
            found = PackedWeightSource(checkpoint, exact).weight("x", ROWS, COLUMNS)
            assert isinstance(found, kind)
            assert torch.equal(as_plain(found, torch.float32), expected)


def logits(directory: Path) -> torch.Tensor:
    loaded = load(directory)
    return prefill(loaded, memory(loaded), list(range(5, 80)), pages(0))


def test_gpt_oss_with_experts_in_mxfp4(tmp_path: Path) -> None:
    """Import names the experts one by one. MXFP4 is bfloat16 exactly, so that both imports of it have the same
    weights."""
    original = model("gpt_oss", dtype="bfloat16", intermediate=96)
    source = write_gguf(original, tmp_path / "plain.gguf")
    imported(source, tmp_path / "plain", packed=False)
    assert torch.equal(logits(tmp_path / "plain"), logits(original))
    source = write_gguf(original, tmp_path / "m.gguf", lambda name: "MXFP4" if "_exps" in name else "BF16")
    for name in ("packed", "rounded"):
        imported(source, tmp_path / name, packed=name == "packed")
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    assert config["quantization_config"]["kept"] == {"MXFP4": 9}
    torch.testing.assert_close(logits(tmp_path / "packed"), logits(tmp_path / "rounded"), rtol=0, atol=1e-4)


@pytest.mark.parametrize("experts", [6, 0])
def test_granite_hybrid_has_the_joint_matrices_of_its_checkpoint(experts: int, tmp_path: Path) -> None:
    more = (("num_local_experts", experts), ("time_step_limit", (0.0, float("inf"))), ("shared_intermediate_size", 64))
    original = model("granitemoehybrid", dtype="bfloat16", more=more)
    source = write_gguf(original, tmp_path / "plain.gguf")
    imported(source, tmp_path / "plain", packed=False)
    assert torch.equal(logits(tmp_path / "plain"), logits(original))
    source = write_gguf(original, tmp_path / "m.gguf", "Q8_0")
    found = imported(source, tmp_path / "packed", packed=True)
    assert any(name.endswith("shared_mlp.input_linear.weight.codes") for name in found)
    wanted, expected = logits(tmp_path / "packed"), logits(original)
    assert float((wanted - expected).norm() / expected.norm()) < 0.3
