"""Quantized checkpoints of others stand for what their formats define, are served so, and are refused in words."""

import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.worker.driving import Drawn, drive, make_engine
from tests.worker.ours import our_kernels
from tests.worker.quantization.checkpoints import (
    Awq,
    Compressed,
    Form,
    Fp8,
    Gptq,
    change_config,
    change_tensors,
    rounded,
    write,
    write_layer,
)
from tgi.kernel.errors import UserError
from tgi.worker.checkpoint import Checkpoint
from tgi.worker.load import build_model, read_recipe
from tgi.worker.quantization.formats import FormatSource, find_format
from tgi.worker.quantization.scheme import read_scheme
from tgi.worker.quantization.weight import QuantizedWeight, Weight, plain

OUTPUTS, INPUTS = 48, 256


def some_weight() -> Tensor:
    """Some rows are of one sign, so that zero points are at both ends of their range."""
    weight = torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(1)) * 0.05
    weight[:4] = weight[:4].abs()
    weight[4:8] = -weight[4:8].abs()
    return weight


def read(directory: Path, outputs: int = OUTPUTS, inputs: int = INPUTS, float8: bool = False) -> Weight:
    """For a device that multiplies 8-bit floats, or not."""
    format = find_format(directory, json.loads((directory / "config.json").read_text()))
    assert format is not None
    with Checkpoint(directory) as checkpoint:
        return FormatSource(checkpoint, format, float8).weight("some.layer", outputs, inputs)


INTEGERS: list[tuple[Form, int, int, bool]] = [  # with the bits and the group that we hold it in, and if it has shifts
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
def test_integers_are_held_as_they_are(form: Form, bits: int, group: int, shifted: bool, tmp_path: Path) -> None:
    meant = write_layer(form, some_weight(), tmp_path)
    found = read(tmp_path)
    assert isinstance(found, QuantizedWeight)
    assert (found.bits, found.group, found.shifts is not None) == (bits, group, shifted)
    assert torch.equal(found.dequantized(torch.float32), meant)


@pytest.mark.parametrize(("bits", "error"), [(4, 15 / 2048), (8, 128 / 2048)])
def test_a_zero_point_as_a_shift_is_off_by_a_small_part_of_a_level(bits: int, error: float, tmp_path: Path) -> None:
    weight = some_weight()
    write_layer(Gptq(bits=bits, symmetric=False), weight, tmp_path)
    exact = rounded(weight, bits, 32, False)
    levels = torch.from_numpy(exact.scales).double().repeat_interleave(32, 1)
    off = (plain(read(tmp_path), torch.float32) - exact.exactly()).abs() / levels
    assert 0 < off.max() <= error


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
def test_what_does_not_fit_is_dequantized(form: Form, tmp_path: Path) -> None:
    meant = write_layer(form, some_weight(), tmp_path)
    found = read(tmp_path)
    assert isinstance(found, Tensor)
    assert torch.equal(found, meant)


@pytest.mark.parametrize("form", [Fp8(), Fp8("fbgemm_fp8", 1), Fp8("compressed-tensors"), Fp8("compressed-tensors", 1)])
def test_8_bit_floats_are_held_as_they_are_where_they_are_multiplied(form: Form, tmp_path: Path) -> None:
    meant = write_layer(form, some_weight(), tmp_path)
    found = read(tmp_path, float8=True)
    assert isinstance(found, QuantizedWeight)
    assert found.floating
    assert torch.equal(found.dequantized(torch.float32), meant)


@pytest.mark.parametrize(
    ("form", "outputs", "dtype", "reason"),
    [
        (Fp8("fp8", 32, 96, "weight_scale_inv"), OUTPUTS, torch.float8_e4m3fn, "its scales are for blocks"),
        (Fp8("compressed-tensors", 32, INPUTS), OUTPUTS, torch.float8_e4m3fn, "its scales are for blocks"),
        (Fp8(), OUTPUTS, torch.float8_e5m2, "nothing is computed with e5m2"),
        (Fp8(), OUTPUTS - 8, torch.float8_e4m3fn, "no multiples of 16"),
    ],
)
def test_8_bit_floats_that_are_not_multiplied_become_plain(
    form: Form, outputs: int, dtype: torch.dtype, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    meant = write_layer(form, some_weight()[:outputs], tmp_path)
    weight = "some.layer.weight"
    change_tensors(tmp_path, lambda tensors: tensors.update({weight: tensors[weight].to(dtype)}))
    found = read(tmp_path, outputs, float8=True)
    assert isinstance(found, Tensor)
    assert torch.allclose(found, meant, rtol=0.2, atol=1e-4)
    assert reason in caplog.text


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_8_bit_float(dtype: torch.dtype, tmp_path: Path) -> None:
    write_layer(Fp8(), some_weight(), tmp_path)
    every = torch.arange(OUTPUTS * INPUTS).to(torch.uint8).view(dtype).view(OUTPUTS, INPUTS)
    every = torch.where(every.float().isfinite(), every.float(), 1.0)
    change_tensors(
        tmp_path,
        lambda tensors: tensors.update(
            {"some.layer.weight": every.to(dtype), "some.layer.weight_scale": torch.ones(1)}
        ),
    )
    assert torch.equal(plain(read(tmp_path), torch.float32), every)


def test_scales_that_float16_does_not_have(tmp_path: Path) -> None:
    write_layer(Compressed(bits=8), some_weight(), tmp_path)
    scale = "some.layer.weight_scale"
    change_tensors(tmp_path, lambda tensors: tensors.update({scale: tensors[scale].bfloat16()}))
    assert isinstance(read(tmp_path), QuantizedWeight)
    change_tensors(tmp_path, lambda tensors: tensors.update({scale: tensors[scale] * 1e-6}))
    assert isinstance(read(tmp_path), Tensor)


def test_one_scale_for_all(tmp_path: Path) -> None:
    write_layer(Compressed("int-quantized", 8, -1), some_weight(), tmp_path)
    change_tensors(tmp_path, lambda tensors: tensors.update({"some.layer.weight_scale": torch.full((1,), 0.25)}))
    found = read(tmp_path)
    assert isinstance(found, QuantizedWeight)
    assert torch.equal(found.scales, torch.full((OUTPUTS, 2), 0.25, dtype=torch.float16))


@pytest.mark.parametrize(("file", "form"), [("quantize_config.json", Gptq()), ("quant_config.json", Awq())])
def test_the_config_may_lie_beside(file: str, form: Gptq | Awq, tmp_path: Path) -> None:
    meant = write_layer(form, some_weight(), tmp_path)
    config = form.config()
    del config["quant_method"]
    if file == "quant_config.json":  # as its tool names them there
        config = {"zero_point": True, "q_group_size": config["group_size"], "w_bit": 4, "version": "GEMM"}
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / file).write_text(json.dumps(config))
    assert torch.equal(plain(read(tmp_path), torch.float32), meant)


def test_layers_may_differ(tmp_path: Path) -> None:
    meant = write_layer(Gptq(bits=8, size=64), some_weight(), tmp_path)
    special = {"-:lm_head": {}, "+:other.*": {"bits": 4}, r".*\.layer": {"bits": 8, "group_size": 64}}
    config = {"quantization_config": Gptq(dynamic=special).config()}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert torch.equal(plain(read(tmp_path), torch.float32), meant)

    meant = write_layer(Compressed(bits=8), some_weight(), tmp_path)
    groups = [
        {"targets": [target], "weights": {"num_bits": bits, "group_size": 32}}
        for target, bits in (("Linear", 4), ("re:other.*", 4), (r"re:.*\.layer$", 8))
    ]
    declared = Compressed().config() | {"config_groups": {str(at): group for at, group in enumerate(groups)}}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": declared}))
    assert torch.equal(plain(read(tmp_path), torch.float32), meant)


def served(directory: Path, native: bool) -> list[Drawn]:
    """What is drawn from the model, on our own kernels or torch's."""
    dtype = "bfloat16" if native else "float32"
    kernels = our_kernels(read_recipe(directory, dtype)) if native else None
    engine = make_engine(build_model(directory, dtype, "cpu", lambda stage, percent: None, kernels=kernels))
    return drive(engine, [[1, 17, 300, 45, 8], [1, 99]], 12)


@pytest.mark.parametrize("native", [True, False], ids=["ours", "torch"])
@pytest.mark.parametrize(
    ("kind", "form", "left"),
    [
        ("llama", Gptq(), ()),  # the output layer too
        ("qwen2", Awq(), ("lm_head",)),
        ("phi3", Gptq(scattered=True), ("lm_head",)),
        ("phi3", Compressed(bits=8, size=-1, symmetric=False), ("lm_head",)),
        ("mixtral", Gptq(bits=8, symmetric=False), ("lm_head", "block_sparse_moe.gate.")),
        ("llama", Compressed("int-quantized", 8, -1), ("lm_head", "v_proj", "layers.1.mlp")),
        ("phi3", Fp8("fp8", 32, 32, "weight_scale_inv"), ("lm_head",)),
    ],
)
def test_it_is_served_as_what_it_stands_for(
    kind: str, form: Form, left: tuple[str, ...], native: bool, tmp_path: Path
) -> None:
    written = write(kind, form, tmp_path, left, hidden=128, intermediate=192)
    assert served(written.directory, native) == served(written.twin, native)


def dropped(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(f"some.layer.{name}")


def cut(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({f"some.layer.{name}": tensors[f"some.layer.{name}"][:-1].contiguous()})


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({f"some.layer.{name}": change(tensors[f"some.layer.{name}"])})


def beyond(order: Tensor) -> Tensor:
    order[3] = 8
    return order


@pytest.mark.parametrize(
    ("form", "change", "words"),
    [
        (Gptq(), dropped("scales"), "no tensor 'some.layer.scales'"),
        (Gptq(), dropped("qweight"), "none of its tensors is a qweight"),
        (Gptq(), cut("qzeros"), "'some.layer.qzeros' in .*safetensors has shape"),
        (Gptq(), changed("qweight", Tensor.long), "'some.layer.qweight' in .*safetensors has dtype int64; int32"),
        (Gptq(), changed("g_idx", beyond), "'some.layer.g_idx' in .*safetensors names group 8"),
        (Gptq(), changed("g_idx", torch.neg), "'some.layer.g_idx' in .*safetensors names group"),
        (Gptq(bits=8), cut("qweight"), "'some.layer.qweight' in .*safetensors has shape"),
        (
            Gptq(),
            changed("scales", lambda scales: scales / 0),
            "'some.layer.scales' in .* has numbers that are not finite",
        ),
        (Awq(), dropped("qzeros"), "no tensor 'some.layer.qzeros'"),
        (Awq(), cut("qweight"), "'some.layer.qweight' in .*safetensors has shape"),
        (Compressed(), dropped("weight_scale"), "no tensor 'some.layer.weight_scale'"),
        (Compressed(symmetric=False), dropped("weight_zero_point"), "no tensor 'some.layer.weight_zero_point'"),
        (Compressed(), cut("weight_packed"), "'some.layer.weight_packed' in .*safetensors has shape"),
        (Compressed("int-quantized", 8, -1), dropped("weight_scale"), "no tensor 'some.layer.weight_scale'"),
        (Compressed("int-quantized", 8, -1), cut("weight_scale"), "'some.layer.weight_scale' in .*safetensors has sha"),
        (Fp8(), dropped("weight_scale"), "no tensor 'some.layer.weight_scale'"),
        (Fp8("fp8", 32, 32), cut("weight_scale"), "'some.layer.weight_scale' in .*safetensors has shape"),
        (Fp8("fbgemm_fp8", 1), changed("weight_scale", Tensor.int), "has dtype int32; float16 or"),
    ],
)
def test_bad_tensors_are_named(
    form: Form, change: Callable[[dict[str, Tensor]], object], words: str, tmp_path: Path
) -> None:
    write_layer(form, some_weight(), tmp_path)
    change_tensors(tmp_path, change)
    with pytest.raises(UserError, match=words):
        read(tmp_path)


@pytest.mark.parametrize(
    ("form", "outputs", "inputs"),
    [(Gptq(size=-1), 36, 64), (Gptq(size=-1), 64, 36), (Awq(size=-1), 36, 64), (Awq(size=-1), 64, 1)],
)
def test_sizes_that_do_not_fill_words_are_refused(form: Form, outputs: int, inputs: int, tmp_path: Path) -> None:
    write_layer(form, torch.randn(outputs, inputs), tmp_path)
    with pytest.raises(UserError, match=f"{outputs} outputs and {inputs} inputs, which do not fill words of 8"):
        read(tmp_path, outputs, inputs)


def first_alone(shape: tuple[int, ...], numbers: Tensor) -> Tensor:
    return numbers.flatten()[:1].clone().reshape(shape)


@pytest.mark.parametrize("column", ["weight_scale", "weight_zero_point"])
def test_the_only_number_may_have_any_shape(column: str, tmp_path: Path) -> None:
    form = Compressed("int-quantized", 8, -1, symmetric=False)
    write_layer(form, some_weight(), tmp_path)
    for shape in ((), (1,), (1, 1, 1)):
        change_tensors(tmp_path, changed(column, partial(first_alone, shape)))
        assert read(tmp_path).shape == (OUTPUTS, INPUTS)


def test_a_block_may_be_larger_than_the_weight(tmp_path: Path) -> None:
    write_layer(Fp8("fp8", OUTPUTS, 64), some_weight(), tmp_path)
    expected = plain(read(tmp_path), torch.float32)
    change_config(tmp_path, lambda config: config["quantization_config"].update(weight_block_size=[10**18, 64]))
    assert torch.equal(plain(read(tmp_path), torch.float32), expected)


def scheme(**weights: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


@pytest.mark.parametrize(
    ("form", "entries", "words"),
    [
        (Gptq(), {"bits": 3}, "bits is 3, but GPTQ with 4 and 8 bits is read"),
        (Gptq(), {"bits": "4"}, "bits is '4', but a whole number"),
        (Gptq(), {"group_size": 20}, "'some.layer' in .* has 256 inputs, which do not divide into groups of 20"),
        (Gptq(), {"group_size": 0}, "groups of 0"),
        (Gptq(), {"checkpoint_format": "marlin"}, "checkpoint_format is marlin, but gptq and gptq_v2"),
        (Gptq(), {"dynamic": {"+:(": {"bits": 8}}}, "no regular expression"),
        (Gptq(), {"dynamic": {"+:a{99999999999999}": {"bits": 8}}}, "no regular expression"),
        (Gptq(), {"dynamic": {"+:x": {"bits": 3}}}, "bits is 3"),
        (Gptq(), {"dynamic": {"+:x": 3}}, "x is 3, but an object"),
        (Gptq(), {"quant_method": "hqq"}, "quant_method is 'hqq', but gptq, awq, compressed-tensors, fp8"),
        (Gptq(), {"quant_method": None}, "quant_method is None"),
        (Awq(), {"bits": 3}, "bits is 3, but AWQ with 4 bits"),
        (Awq(), {"version": "gemv"}, "version is gemv, but AWQ in the gemm layout"),
        (Compressed(), {"format": "marlin-24"}, "format is marlin-24, but pack-quantized"),
        (Compressed(), {"format": 4}, "format is 4, but a word"),
        (Compressed(), {"sparsity_config": {"format": "sparse-24-bitmask"}}, "format sparse-24-bitmask"),
        (Compressed(), {"transform_config": {"config_groups": {"R1": {}}}}, "transforms of activations"),
        (Compressed(), {"config_groups": {}}, "'some.layer.weight_packed' in .* nothing under config_groups"),
        (Compressed(), {"config_groups": [4]}, "config_groups is \\[4\\], but an object"),
        (Compressed(), {"config_groups": {"W4A16": ["Linear"]}}, "W4A16 is .* but an object"),
        (Compressed(), {"config_groups": {"group_0": {"targets": "Linear"}}}, "targets of a scheme are 'Linear'"),
        (Compressed(), {"config_groups": {"group_0": {"targets": ["re:("]}}}, "no regular expression"),
        (Compressed(), {"config_groups": {"a": {"targets": ["re:" + 3000 * "("]}}}, "no regular expression"),
        (Compressed(), scheme(num_bits=3), "integers of 3 bits"),
        (Compressed(), scheme(num_bits=4, type="float"), "floats of 4 bits"),
        (Compressed(), scheme(num_bits=4, group_size=20), "groups of 20"),
        (Fp8(), {"weight_block_size": [128]}, "blocks are \\[128\\], but two sizes"),
    ],
)
def test_bad_configs_are_refused(form: Form, entries: dict[str, Any], words: str, tmp_path: Path) -> None:
    write_layer(form, some_weight(), tmp_path)
    change_config(tmp_path, lambda config: config["quantization_config"].update(entries))
    with pytest.raises(UserError, match=words):
        read(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", '{"bits": []}', 100_000 * "["])
def test_bad_configs_beside_are_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "quantize_config.json").write_text(content)
    with pytest.raises(UserError, match=r"quantize_config\.json"):
        find_format(tmp_path, {})


@pytest.mark.parametrize(
    ("form", "quantize", "words"),
    [
        (Gptq(), "awq", "another: the weights are GPTQ's, of 4 bits in groups of 32 inputs"),
        (Fp8(), "marlin", "another: the weights are 8-bit floats"),
        (Compressed(), "exl2", "exl2 are not read"),
    ],
)
def test_a_flag_that_names_another_kind(form: Form, quantize: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        read_scheme(tmp_path, {"quantization_config": form.config()}, quantize)


@pytest.mark.parametrize(
    ("form", "quantize"),
    [(Gptq(), "gptq"), (Gptq(), "marlin"), (Awq(), "awq"), (Fp8("fbgemm_fp8"), "fp8"), (Fp8(), None)],
)
def test_a_flag_that_names_the_kind(form: Form, quantize: str | None, tmp_path: Path) -> None:
    assert read_scheme(tmp_path, {"quantization_config": form.config()}, quantize).stored is not None


def test_8_bit_floats_are_made_at_load_where_they_are_multiplied(tmp_path: Path) -> None:
    write_layer(Gptq(), some_weight(), tmp_path)
    gptq = {"quantization_config": Gptq().config()}
    with Checkpoint(tmp_path) as checkpoint:
        for config, stored in (({}, False), (gptq, True)):
            scheme = read_scheme(tmp_path, config, "fp8")
            assert ((scheme.stored is not None), scheme.made) == (stored, "fp8")
            scheme.source(checkpoint, float8=True)
            with pytest.raises(UserError, match=r"which this device does not multiply.* Choose int8 or int4"):
                scheme.source(checkpoint)
    assert read_scheme(tmp_path, {"quantization_config": Fp8().config()}, "fp8").made is None


def test_the_log_says_what_is_done(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for form in (Gptq(scattered=True), Compressed("int-quantized"), Fp8()):
        write_layer(form, some_weight(), tmp_path)
        scheme = read_scheme(tmp_path, {"quantization_config": form.config()}, None)
        with Checkpoint(tmp_path) as checkpoint:
            source = scheme.source(checkpoint)
            if isinstance(form, Gptq):
                source.weight("some.layer", OUTPUTS, INPUTS)
    for words in (
        "GPTQ's, of 4 bits in groups of 32 inputs",
        "the weight of some.layer, and others like it, becomes a plain one: its groups are scattered",
        "int-quantized of compressed-tensors",
        "activations are not quantized",
        "kv_cache_scheme is not used",
        "8-bit floats, which a GPU from compute capability 8.9 on multiplies",
    ):
        assert words in caplog.text


@pytest.mark.parametrize("form", [Gptq(), Awq()])
def test_plain_weights_that_are_said_to_be_quantized_are_refused(form: Form, tmp_path: Path) -> None:
    written = write("llama", form, tmp_path, ("",), layers=1)  # which leaves all of them plain
    with pytest.raises(UserError, match="says that its weights are quantized, but none of its tensors is a qweight"):
        build_model(written.directory, "float32", "cpu", lambda stage, percent: None)


def test_what_is_left_plain_may_be_quantized_at_load(tmp_path: Path) -> None:
    write_layer(Fp8(), some_weight(), tmp_path)
    scheme = read_scheme(tmp_path, json.loads((tmp_path / "config.json").read_text()), "int8")
    with Checkpoint(tmp_path) as checkpoint:
        assert isinstance(scheme.source(checkpoint).weight("some.layer", OUTPUTS, INPUTS), QuantizedWeight)
