"""Unfit quantized checkpoints, and flags that do not fit them, are rejected with a UserError."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

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
    write,
    write_layer,
)
from tests.worker.quantization.reading import INPUTS, read, some_weight
from tgi.microkernel.errors import UserError
from tgi.worker.models.loader import build_model
from tgi.worker.quantization.scheme import find_format, resolve_scheme


def dropped(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(f"some.layer.{name}")


def cut(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({f"some.layer.{name}": tensors[f"some.layer.{name}"][:-1].contiguous()})


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
        (Float4(), dropped("weight_global_scale"), "no tensor 'some.layer.weight_global_scale'"),
        (
            Float4(),
            changed("weight_global_scale", torch.zeros_like),
            "weight_scale' .* with weight_global_scale, numbers",
        ),
        (Float4("modelopt"), dropped("weight_scale_2"), "no tensor 'some.layer.weight_scale_2'"),
        (Float4("modelopt"), changed("weight_scale", Tensor.float), "has dtype float32; float8_e4m3fn is expected"),
        (Float4("modelopt", "MXFP4"), cut("weight_scale"), "'some.layer.weight_scale' in .*safetensors has shape"),
        (
            Float4("modelopt"),
            lambda tensors: tensors.update({"some.layer.pre_quant_scale": torch.ones(INPUTS)}),
            "pre_quant_scale' in .* changes the layer's activations",
        ),
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
def test_sizes_that_do_not_fill_words_are_rejected(form: Form, outputs: int, inputs: int, tmp_path: Path) -> None:
    write_layer(form, torch.randn(outputs, inputs), tmp_path)
    with pytest.raises(UserError, match=f"{outputs} outputs and {inputs} inputs, which do not fill words of 8"):
        read(tmp_path, outputs, inputs)


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
        (
            Compressed(),
            {"config_groups": {"group_0": {"targets": "Linear"}}},
            "targets is 'Linear', but a list",
        ),
        (Compressed(), {"config_groups": {"group_0": {"targets": ["re:("]}}}, "no regular expression"),
        (Compressed(), {"config_groups": {"a": {"targets": ["re:" + 3000 * "("]}}}, "no regular expression"),
        (Compressed(), scheme(num_bits=3), "integers of 3 bits"),
        (Compressed(), scheme(num_bits=4, type="float"), "floats of 4 bits"),
        (Compressed(), scheme(num_bits=4, group_size=20), "groups of 20"),
        (Fp8(), {"weight_block_size": [128]}, "blocks are \\[128\\], but two sizes"),
        (
            Compressed(),
            scheme(num_bits=4, type="float", group_size=64),
            "floats of 4 bits, but .* 16 \\(NVFP4\\) and 32",
        ),
        (Float4("modelopt"), {"quant_algo": "W4A16_AWQ"}, "quant_algo is W4A16_AWQ, but NVFP4"),
        (Float4("modelopt"), {"quant_algo": None}, "quant_algo is NONE, but NVFP4"),
    ],
)
def test_bad_configs_are_rejected(form: Form, entries: dict[str, Any], words: str, tmp_path: Path) -> None:
    write_layer(form, some_weight(), tmp_path)
    change_config(tmp_path, lambda config: config["quantization_config"].update(entries))
    with pytest.raises(UserError, match=words):
        read(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", '{"bits": []}', 100_000 * "["])
def test_bad_separate_config_files_are_rejected(content: str, tmp_path: Path) -> None:
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
def test_quantize_with_another_format_is_rejected(form: Form, quantize: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        resolve_scheme(tmp_path, {"quantization_config": form.config()}, quantize)


@pytest.mark.parametrize("form", [Gptq(), Awq()])
def test_plain_weights_with_a_quantization_config_are_rejected(form: Form, tmp_path: Path) -> None:
    written = write("llama", form, tmp_path, ("",), layers=1)  # the empty name matches all layers: they stay plain
    with pytest.raises(UserError, match="says that its weights are quantized, but none of its tensors is a qweight"):
        build_model(written.directory, "float32", "cpu", lambda stage, percent: None)
