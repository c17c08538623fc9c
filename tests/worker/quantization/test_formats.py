"""Quantized checkpoints of other tools are read as their formats define, and served."""

import json
import logging
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.worker.cpu_kernels.available import our_kernels
from tests.worker.driving import Drawn, drive, make_engine
from tests.worker.quantization.checkpoints import (
    Awq,
    Compressed,
    Float4,
    Form,
    Fp8,
    Gptq,
    change_config,
    change_tensors,
    changed,
    rounded,
    write,
    write_layer,
)
from tests.worker.quantization.reading import INPUTS, OUTPUTS, read, some_weight
from tgi.microkernel.errors import UserError
from tgi.worker.checkpoint import Checkpoint
from tgi.worker.models.loader import build_model, read_model_spec
from tgi.worker.quantization.scheme import resolve_scheme
from tgi.worker.quantization.weight import QuantizedWeight, as_plain

pytestmark = pytest.mark.slow

INTEGERS: list[tuple[Form, int, int, bool]] = [  # format, bits, group and shifts of the QuantizedWeight
    (Gptq(), 4, 32, False),
    (Gptq(symmetric=False), 4, 32, True),
    (Gptq(symmetric=False, version="gptq_v2", size=64), 4, 64, True),
    (Gptq(bits=8, size=16), 8, 16, False),
    (Gptq(bits=8, size=-1, symmetric=False), 8, 128, True),
    (Gptq(scattered=True, size=-1), 4, 128, False),
    (Awq(), 4, 32, True),
    (Awq(size=128), 4, 128, True),
    (Compressed(), 4, 32, False),
    (Compressed(symmetric=False, size=128), 4, 128, True),
    (Compressed(bits=8, size=-1), 8, 128, False),
    (Compressed(bits=8, symmetric=False), 8, 32, True),
    (Compressed("int-quantized", 8, -1), 8, 128, False),
    (Compressed("naive-quantized", 8, -1, symmetric=False), 8, 128, True),
]


@pytest.mark.parametrize(("form", "bits", "group", "shifted"), INTEGERS)
def test_integers_are_kept_exactly(form: Form, bits: int, group: int, shifted: bool, tmp_path: Path) -> None:
    meant = write_layer(form, some_weight(), tmp_path)
    found = read(tmp_path)
    assert isinstance(found, QuantizedWeight)
    assert (found.bits, found.group, found.shifts is not None) == (bits, group, shifted)
    assert torch.equal(found.dequantized(torch.float32), meant)


@pytest.mark.parametrize("kind", ["NVFP4", "MXFP4"])
@pytest.mark.parametrize("tool", ["compressed-tensors", "modelopt"])
def test_4_bit_floats_are_kept_exactly(tool: str, kind: str, tmp_path: Path) -> None:
    form = Float4(tool, kind)
    meant = write_layer(form, some_weight(), tmp_path)
    found = read(tmp_path)
    assert isinstance(found, QuantizedWeight)
    assert (found.bits, found.is_float4, found.factor_group) == (4, True, form.size)
    assert found.nbytes == OUTPUTS * (INPUTS // 2 + INPUTS // form.size + 8)
    grouped, integers = found.with_group_scales(), found.as_integers()
    assert (grouped.bits, grouped.group, integers.bits, integers.group) == (4, form.size, 8, form.size)
    assert grouped.scales.dtype is integers.scales.dtype is (torch.float16 if kind == "MXFP4" else torch.float32)
    for weight in (found, grouped, integers):
        assert torch.equal(weight.dequantized(torch.float32), meant)


@pytest.mark.parametrize(("bits", "error"), [(4, 15 / 2048), (8, 128 / 2048)])
def test_a_zero_point_as_a_shift_has_a_small_error(bits: int, error: float, tmp_path: Path) -> None:
    weight = some_weight()
    write_layer(Gptq(bits=bits, symmetric=False), weight, tmp_path)
    exact = rounded(weight, bits, 32, False)
    levels = torch.from_numpy(exact.scales).double().repeat_interleave(32, 1)
    off = (as_plain(read(tmp_path), torch.float32) - exact.exactly()).abs() / levels
    assert 0 < off.max() <= error
    unrounded = read(tmp_path, exact=True)
    assert isinstance(unrounded, QuantizedWeight)
    assert unrounded.bits == bits
    off = (unrounded.dequantized(torch.float32) - exact.exactly()).abs() / levels
    assert off.max() <= 2.0**-15


@pytest.mark.parametrize(
    "form",
    [
        Gptq(scattered=True),
        Gptq(size=8),
        Fp8(),
        Fp8("fbgemm_fp8", 1),
        Fp8("fp8", 32, 96, "weight_scale_inv"),
        Fp8("compressed-tensors", 32, 96),
        Fp8("compressed-tensors"),
    ],
)
def test_unsupported_weights_are_dequantized(form: Form, tmp_path: Path) -> None:
    meant = write_layer(form, some_weight(), tmp_path)
    found = read(tmp_path)
    assert isinstance(found, Tensor)
    assert torch.equal(found, meant)


@pytest.mark.parametrize(
    "form",
    [
        *(Fp8(), Fp8("fbgemm_fp8", 1), Fp8("compressed-tensors"), Fp8("compressed-tensors", 1)),
        *(Fp8("fp8", 32, 64, "weight_scale_inv"), Fp8("compressed-tensors", 32, INPUTS), Fp8("fp8", 128, 32)),
    ],
)
def test_8_bit_floats_are_kept_on_a_device_that_multiplies_them(form: Form, tmp_path: Path) -> None:
    meant = write_layer(form, some_weight(), tmp_path)
    found = read(tmp_path, float8=True)
    assert isinstance(found, QuantizedWeight)
    assert found.floating
    assert torch.equal(found.dequantized(torch.float32), meant)


@pytest.mark.parametrize(
    ("form", "outputs", "dtype", "reason"),
    [
        (Fp8("fp8", 32, 96, "weight_scale_inv"), OUTPUTS, torch.float8_e4m3fn, "its blocks of 96 inputs"),
        (Fp8(), OUTPUTS, torch.float8_e5m2, "nothing is computed with e5m2"),
        (Fp8(), OUTPUTS - 8, torch.float8_e4m3fn, "no multiples of 16"),
    ],
)
def test_8_bit_floats_are_dequantized_on_other_devices(
    form: Form, outputs: int, dtype: torch.dtype, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    meant = write_layer(form, some_weight()[:outputs], tmp_path)
    weight = "some.layer.weight"
    change_tensors(tmp_path, lambda tensors: tensors.update({weight: tensors[weight].to(dtype)}))
    found = read(tmp_path, outputs, float8=True)
    assert isinstance(found, Tensor)
    assert torch.allclose(found, meant, rtol=0.2, atol=1e-4)
    assert reason in caplog.text


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_8_bit_float_is_converted_exactly(dtype: torch.dtype, tmp_path: Path) -> None:
    write_layer(Fp8(), some_weight(), tmp_path)
    every = torch.arange(OUTPUTS * INPUTS).to(torch.uint8).view(dtype).view(OUTPUTS, INPUTS)
    every = torch.where(every.float().isfinite(), every.float(), 1.0)
    change_tensors(
        tmp_path,
        lambda tensors: tensors.update(
            {"some.layer.weight": every.to(dtype), "some.layer.weight_scale": torch.ones(1)}
        ),
    )
    assert torch.equal(as_plain(read(tmp_path), torch.float32), every)


def test_scales_beyond_float16_are_dequantized(tmp_path: Path) -> None:
    write_layer(Compressed(bits=8), some_weight(), tmp_path)
    scale = "some.layer.weight_scale"
    change_tensors(tmp_path, lambda tensors: tensors.update({scale: tensors[scale].bfloat16()}))
    assert isinstance(read(tmp_path), QuantizedWeight)
    change_tensors(tmp_path, lambda tensors: tensors.update({scale: tensors[scale] * 1e-6}))
    found, exact = read(tmp_path), read(tmp_path, exact=True)
    assert isinstance(found, Tensor)
    assert isinstance(exact, QuantizedWeight)
    assert exact.scales.dtype is torch.float32
    assert torch.equal(exact.dequantized(torch.float32), found)


def test_one_scale_for_the_whole_weight(tmp_path: Path) -> None:
    write_layer(Compressed("int-quantized", 8, -1), some_weight(), tmp_path)
    change_tensors(tmp_path, lambda tensors: tensors.update({"some.layer.weight_scale": torch.full((1,), 0.25)}))
    found = read(tmp_path)
    assert isinstance(found, QuantizedWeight)
    assert torch.equal(found.scales, torch.full((OUTPUTS, 2), 0.25, dtype=torch.float16))


@pytest.mark.parametrize(
    ("file", "form"),
    [
        ("quantize_config.json", Gptq()),
        ("quant_config.json", Awq()),
        ("hf_quant_config.json", Float4("modelopt")),
        ("hf_quant_config.json", Fp8("modelopt")),
    ],
)
def test_the_config_may_be_a_separate_file(file: str, form: Form, tmp_path: Path) -> None:
    meant = write_layer(form, some_weight(), tmp_path)
    config = form.config()
    del config["quant_method"]
    if file == "quant_config.json":  # with the entry names of its tool
        config = {"zero_point": True, "q_group_size": config["group_size"], "w_bit": 4, "version": "GEMM"}
    if file == "hf_quant_config.json":
        algorithm = config.get("quant_algo", "FP8")
        config = {
            "quantization": {"quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
        }
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / file).write_text(json.dumps(config))
    assert torch.equal(as_plain(read(tmp_path), torch.float32), meant)


def test_layers_may_have_different_schemes(tmp_path: Path) -> None:
    meant = write_layer(Gptq(bits=8, size=64), some_weight(), tmp_path)
    special = {"-:lm_head": {}, "+:other.*": {"bits": 4}, r".*\.layer": {"bits": 8, "group_size": 64}}
    config = {"quantization_config": Gptq(dynamic=special).config()}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert torch.equal(as_plain(read(tmp_path), torch.float32), meant)

    meant = write_layer(Compressed(bits=8), some_weight(), tmp_path)
    groups = [
        {"targets": [target], "weights": {"num_bits": bits, "group_size": 32}}
        for target, bits in (("Linear", 4), ("re:other.*", 4), (r"re:.*\.layer$", 8))
    ]
    declared = Compressed().config() | {"config_groups": {str(at): group for at, group in enumerate(groups)}}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": declared}))
    assert torch.equal(as_plain(read(tmp_path), torch.float32), meant)


def served(directory: Path, native: bool) -> list[Drawn]:
    """Generated tokens, with the CPU kernels or torch's."""
    kernels = our_kernels(read_model_spec(directory, "bfloat16")) if native else None
    engine = make_engine(build_model(directory, "bfloat16", "cpu", lambda stage, percent: None, kernels=kernels))
    return drive(engine, [[1, 17, 300, 45, 8], [1, 99]], 12)


@pytest.mark.parametrize("native", [True, False], ids=["ours", "torch"])
@pytest.mark.parametrize(
    ("kind", "form", "left"),
    [
        ("llama", Gptq(), ()),  # including the output layer
        ("qwen2", Awq(), ("lm_head",)),
        ("phi3", Gptq(scattered=True), ("lm_head",)),
        ("phi3", Compressed(bits=8, size=-1, symmetric=False), ("lm_head",)),
        ("mixtral", Gptq(bits=8, symmetric=False), ("lm_head", "block_sparse_moe.gate.")),
        ("llama", Compressed("int-quantized", 8, -1), ("lm_head", "v_proj", "layers.1.mlp")),
        ("phi3", Fp8("fp8", 32, 32, "weight_scale_inv"), ("lm_head",)),
        ("deepseek_v3", Fp8("fp8", 32, 32, "weight_scale_inv"), ("lm_head", "mlp.gate.")),
        ("qwen3", Float4(), ("lm_head", "o_proj")),
        ("mixtral", Float4("modelopt"), ("lm_head", "block_sparse_moe.gate.")),
        ("llama", Float4("modelopt", "MXFP4"), ()),
    ],
)
def test_a_checkpoint_is_served_like_its_dequantized_twin(
    kind: str, form: Form, left: tuple[str, ...], native: bool, tmp_path: Path
) -> None:
    """To the bit where weights are rounded to bfloat16 before the product. Our FMA engine does not round them, and our
    products with MXFP4 round activations less (dot_mxfp4.h; its bits: test_mxfp4_linear.py)."""
    written = write(kind, form, tmp_path, left, hidden=128, intermediate=192)
    found, expected = served(written.directory, native), served(written.twin, native)
    rounded = our_kernels(read_model_spec(written.directory, "bfloat16")).dot_engine and "MXFP4" not in form
    if native and not rounded:
        for one, other in zip(found, expected, strict=True):
            assert one.logprobs[0] == pytest.approx(other.logprobs[0], abs=0.1)
        return
    assert found == expected


def first_alone(shape: tuple[int, ...], numbers: Tensor) -> Tensor:
    return numbers.flatten()[:1].clone().reshape(shape)


@pytest.mark.parametrize("column", ["weight_scale", "weight_zero_point"])
def test_a_single_scale_may_have_any_shape(column: str, tmp_path: Path) -> None:
    form = Compressed("int-quantized", 8, -1, symmetric=False)
    write_layer(form, some_weight(), tmp_path)
    for shape in ((), (1,), (1, 1, 1)):
        change_tensors(tmp_path, changed(column, partial(first_alone, shape)))
        assert read(tmp_path).shape == (OUTPUTS, INPUTS)


def test_a_block_may_be_larger_than_the_weight(tmp_path: Path) -> None:
    write_layer(Fp8("fp8", OUTPUTS, 64), some_weight(), tmp_path)
    expected = as_plain(read(tmp_path), torch.float32)
    change_config(tmp_path, lambda config: config["quantization_config"].update(weight_block_size=[10**18, 64]))
    assert torch.equal(as_plain(read(tmp_path), torch.float32), expected)


@pytest.mark.parametrize(
    ("form", "quantize"),
    [(Gptq(), "gptq"), (Gptq(), "marlin"), (Awq(), "awq"), (Fp8("fbgemm_fp8"), "fp8"), (Fp8(), None)],
)
def test_quantize_may_name_the_format(form: Form, quantize: str | None, tmp_path: Path) -> None:
    assert resolve_scheme(tmp_path, {"quantization_config": form.config()}, quantize).stored is not None


def test_fp8_is_made_at_load_on_a_device_that_multiplies_it(tmp_path: Path) -> None:
    write_layer(Gptq(), some_weight(), tmp_path)
    gptq = {"quantization_config": Gptq().config()}
    with Checkpoint(tmp_path) as checkpoint:
        for config, stored in (({}, False), (gptq, True)):
            scheme = resolve_scheme(tmp_path, config, "fp8")
            assert ((scheme.stored is not None), scheme.made) == (stored, "fp8")
            scheme.source(checkpoint, float8=True)
            with pytest.raises(UserError, match=r"which this device does not multiply.* Choose int8 or int4"):
                scheme.source(checkpoint)
    assert resolve_scheme(tmp_path, {"quantization_config": Fp8().config()}, "fp8").made is None


def test_the_log_names_the_format_and_dequantized_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for form in (Gptq(scattered=True), Compressed("int-quantized"), Fp8(), Float4(), Float4("modelopt")):
        write_layer(form, some_weight(), tmp_path)
        scheme = resolve_scheme(tmp_path, {"quantization_config": form.config()}, None)
        with Checkpoint(tmp_path) as checkpoint:
            source = scheme.source(checkpoint)
            if isinstance(form, Gptq):
                source.weight("some.layer", OUTPUTS, INPUTS)
    for words in (
        "GPTQ's, of 4 bits in groups of 32 inputs",
        "the weight of some.layer, and others like it, is dequantized at load: its groups are scattered",
        "int-quantized of compressed-tensors",
        "activations are not quantized, though",
        "modelopt's NVFP4",
        "activations are not quantized to 4 bits, though the checkpoint may provide for it",
        "kv_cache_scheme is not used",
        "8-bit floats, which a GPU from compute capability 8.9 on multiplies",
    ):
        assert words in caplog.text


def test_plain_layers_of_a_quantized_checkpoint_may_be_quantized_at_load(tmp_path: Path) -> None:
    write_layer(Fp8(), some_weight(), tmp_path)
    scheme = resolve_scheme(tmp_path, json.loads((tmp_path / "config.json").read_text()), "int8")
    with Checkpoint(tmp_path) as checkpoint:
        assert isinstance(scheme.source(checkpoint).weight("some.layer", OUTPUTS, INPUTS), QuantizedWeight)
