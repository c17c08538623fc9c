"""Adapters that cannot be served are rejected with a message that names file, key or tensor."""

import json
import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.models import model as make
from tests.worker.batches import prefill
from tests.worker.loras import CONFIG, WEIGHTS, make_adapter
from tgi.hub.resolver import adapter_directory
from tgi.hub.weight_files import TEXT_PREFIXES
from tgi.microkernel.errors import UserError
from tgi.microkernel.settings.lora_adapters import NamedAdapter
from tgi.worker.attention import build_attention
from tgi.worker.lora.registry import adapter_digest
from tgi.worker.lora.weights import LoraWeights, read_adapter
from tgi.worker.models.config_reader import read_config, read_decoder_config
from tgi.worker.models.loader import build_model

CPU = torch.device("cpu")
QUERY = "base_model.model.model.layers.0.self_attn.q_proj"


def read(directory: Path, kind: str = "llama") -> LoraWeights:
    return read_adapter(directory, read_decoder_config(read_config(make(kind))), torch.float32, CPU)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return make_adapter(tmp_path / "adapter", make("llama"))


UNSLOTH = (  # as its patterns for models with a vision tower
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|mlp).*?(?:q_proj|k_proj|v_proj).*?)|"
    r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|mlp)\.(?:(?:q_proj|k_proj|v_proj)))"
)


def as_mlx(directory: Path) -> None:
    """Rewrites an adapter as mlx-lm saves it, with only the last layer adapted."""
    values = json.loads((directory / CONFIG).read_text())
    parameters = {"rank": values["r"], "scale": values["lora_alpha"] / values["r"], "dropout": 0.0}
    values = {"fine_tune_type": "lora", "num_layers": 1, "lora_parameters": parameters, "model": "x", "seed": 0}
    tensors = {}
    for key, tensor in load_file(directory / WEIGHTS).items():
        module, side, _ = key.removeprefix("base_model.model.").rsplit(".", 2)
        tensors[f"{module}.{side.lower()}"] = tensor.t().contiguous()
    save_file(tensors, directory / "adapters.safetensors", {"format": "mlx"})
    (directory / WEIGHTS).unlink()
    (directory / CONFIG).write_text(json.dumps(values))


def as_compiled(directory: Path) -> None:
    """Rewrites an adapter as trainers with torch.compile and FSDP leave it."""
    tensors = load_file(directory / WEIGHTS).items()
    renamed = {
        key.replace("model.layers.", "_orig_mod.model.layers.").replace(
            ".self_attn.", "._checkpoint_wrapped_module.self_attn."
        ): tensor
        for key, tensor in tensors
    }
    assert any("_orig_mod" in key for key in renamed)
    save_file(renamed, directory / WEIGHTS)


def with_pattern(directory: Path) -> None:
    """Rewrites an adapter as unsloth saves one for a model with a vision tower."""
    values = json.loads((directory / CONFIG).read_text())
    (directory / CONFIG).write_text(json.dumps(values | {"target_modules": UNSLOTH, "auto_mapping": {"x": "y"}}))


def as_torchtune(directory: Path) -> None:
    """Rewrites an adapter as torchtune saves it: a short config."""
    values = json.loads((directory / CONFIG).read_text())
    kept = {key: values[key] for key in ("r", "lora_alpha", "target_modules", "peft_type")}
    (directory / CONFIG).write_text(json.dumps(kept))


@pytest.mark.parametrize("rewrite", [as_mlx, as_compiled, with_pattern, as_torchtune])
def test_adapters_of_other_trainers(rewrite: Callable[[Path], None], tmp_path: Path) -> None:
    targets = ("q_proj", "k_proj", "v_proj")
    layers = [2] if rewrite is as_mlx else None
    directory = make_adapter(tmp_path / "adapter", make("llama"), targets=targets, layers=layers, lora_alpha=12)
    expected = read(directory)
    rewrite(directory)
    assert adapter_directory(NamedAdapter("mine", str(directory), None)) == directory
    found = read(directory)
    assert adapter_digest(directory)
    for own, other in zip(found.layers, expected.layers, strict=True):
        for pair, like in zip(own, other, strict=True):
            assert (pair is None) == (like is None)
            if pair is not None and like is not None:
                torch.testing.assert_close(pair.a, like.a)
                torch.testing.assert_close(pair.b, like.b)


def test_a_shared_embedding_that_stands_under_the_name_of_the_head(tmp_path: Path) -> None:
    original = make("qwen2", tie=True)
    copy = Path(shutil.copytree(original, tmp_path / "model"))
    tensors = load_file(copy / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    batch = [3, 50, 7, 9]
    found, expected = (logits(directory, batch) for directory in (copy, original))
    assert torch.equal(found, expected)


def logits(directory: Path, ids: list[int]) -> torch.Tensor:
    loaded = build_model(directory, "float32", "cpu", lambda stage, percent: None)
    return prefill(loaded, build_attention(loaded.kv, 2, CPU), ids, range(2))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"peft_type": "IA3"}, "IA3"),
        ({"use_dora": True}, "DoRA"),
        ({"bias": "all"}, "bias 'all'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "target_parameters"),
        ({"r": 0}, "r 0"),
        ({"r": "many"}, "r 'many'"),
        ({"r": 513}, "512 is the most"),
        ({"r": 5}, "has shape .4, 64., but the model and rank 5"),
        ({"lora_alpha": None}, "lora_alpha None"),
        ({"rank_pattern": [1]}, "rank_pattern"),
        ({"layers_to_transform": [[1]]}, "layers_to_transform"),
        ({"rank_pattern": {"(a+)+": 1}}, "for ever"),
        ({"rank_pattern": {".*a.*b.*c.*d.*e": 1}}, "for ever"),
        ({"target_modules": "("}, "is not a regular expression"),
        ({"target_modules": 7}, "target_modules 7"),
    ],
)
def test_an_unsupported_config_is_rejected_by_its_key(adapter: Path, changes: dict[str, Any], named: str) -> None:
    path = adapter / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(UserError, match=named) as caught:
        read(adapter)
    assert CONFIG in str(caught.value)


def rename(tensors: dict[str, torch.Tensor], key: str) -> None:
    tensors[key] = tensors.pop(f"{QUERY}.lora_A.weight")


CHANGES: list[tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = [
    (lambda found: rename(found, "base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight"), "layers.9"),
    (lambda found: rename(found, "base_model.model.lm_head.lora_A.weight"), "the output layer"),
    (lambda found: rename(found, "base_model.model.model.embed_tokens.lora_embedding_A"), "the embedding"),
    (lambda found: rename(found, f"{QUERY}.lora_magnitude_vector"), "DoRA"),
    (lambda found: rename(found, f"{QUERY}.lora_B.bias"), "biases"),
    (lambda found: rename(found, "whatever"), "'whatever'.* no such projection"),
    (lambda found: found.pop(f"{QUERY}.lora_B.weight"), "no lora_B for model.layers.0.self_attn.q_proj"),
    (lambda found: [found.pop(f"{QUERY}.lora_{side}.weight") for side in "AB"], "no tensors for model.layers.0"),
    (lambda found: found.clear(), "no tensors"),
    (lambda found: found.update({f"{QUERY}.lora_A.weight": torch.zeros(4, 63)}), r"shape \[4, 63\]"),
    (lambda found: found.update({f"{QUERY}.lora_A.weight": torch.zeros(4)}), r"shape \[4\]"),
    (lambda found: found.update({f"{QUERY}.lora_A.weight": torch.zeros(4, 64, dtype=torch.int8)}), "int8"),
    (lambda found: found.update({f"{QUERY}.lora_A.weight": torch.full((4, 64), torch.nan)}), "no finite numbers"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "named"), CHANGES, ids=[named for _, named in CHANGES])
def test_unsupported_tensors_are_rejected_by_name(adapter: Path, change: Callable[[Any], Any], named: str) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(adapter / WEIGHTS).items()}
    change(tensors)
    save_file(tensors, adapter / WEIGHTS)
    with pytest.raises(UserError, match=named) as caught:
        read(adapter)
    assert WEIGHTS in str(caught.value)


def test_missing_files(adapter: Path) -> None:
    (adapter / WEIGHTS).rename(adapter / "adapter_model.bin")
    with pytest.raises(UserError, match="pickled"):
        read(adapter)
    (adapter / "adapter_model.bin").unlink()
    with pytest.raises(UserError, match="nothing to load"):
        read(adapter)
    (adapter / CONFIG).write_text("[1]")
    with pytest.raises(UserError, match="not what peft writes"):
        read(adapter)
    (adapter / CONFIG).unlink()
    with pytest.raises(UserError, match="no LoRA adapter"):
        read(adapter)


@pytest.mark.parametrize(
    ("name", "size", "first", "said"),
    [
        (CONFIG, 1 << 33, b"", "8589934592 bytes"),
        (WEIGHTS, 1 << 35, b"", "does not begin"),  # such a one would take a minute to read
        (WEIGHTS, 1 << 35, (5 << 20).to_bytes(8, "little"), "header of 5242880 bytes"),
        (WEIGHTS, 8, (2).to_bytes(8, "little"), "does not begin"),
    ],
)
def test_oversized_files_are_not_read(adapter: Path, name: str, size: int, first: bytes, said: str) -> None:
    (adapter / name).write_bytes(first)
    os.truncate(adapter / name, size)
    with pytest.raises(UserError, match=said):
        adapter_digest(adapter)


def test_an_invalid_path(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        adapter_digest(tmp_path / ("x" * 5000))


def test_an_adapter_of_another_model_and_experts(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="made for this model"):
        read(make_adapter(tmp_path / "wide", make("llama", hidden=96)))
    names = {"base_model.model.model.layers.0.block_sparse_moe.experts.0.w1.lora_A.weight": torch.zeros(4, 64)}
    experts = make_adapter(tmp_path / "experts", make("llama"), targets=("q_proj",))
    save_file(load_file(experts / WEIGHTS) | names, experts / WEIGHTS)
    with pytest.raises(UserError, match="experts are not served"):
        read(experts, "mixtral")


@pytest.mark.parametrize("prefix", [*TEXT_PREFIXES, ("", "")])
def test_names_of_a_whole_multimodal_model(prefix: tuple[str, str], tmp_path: Path) -> None:
    """Those of a text part, in the tensors and where the configuration names modules; a rank of one layer is its
    own."""
    whole, text = prefix
    model = make("llama")
    rank = {whole + "model.layers.1.self_attn.o_proj".removeprefix(text): 2}
    plain = make_adapter(tmp_path / "plain", model, ranks={"layers.1.self_attn.o_proj": 2})
    own = make_adapter(tmp_path / "own", model, ranks={"layers.1.self_attn.o_proj": 2}, rank_pattern=rank)
    weights = {
        f"base_model.model.{whole}{key.removeprefix('base_model.model.').removeprefix(text)}": tensor
        for key, tensor in load_file(own / WEIGHTS).items()
    }
    save_file(weights, own / WEIGHTS)
    expected, found = map(read, (plain, own))
    for mine, theirs in zip(found.layers, expected.layers, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert (a is None) == (b is None)
            assert a is None or all(torch.equal(one, other) for one, other in zip(a, b, strict=True))
    tower = f"base_model.model.{whole and 'model.'}vision_tower.encoder.layers.0.self_attn.q_proj.lora_A.weight"
    save_file(weights | {tower: torch.ones(4, 8)}, own / WEIGHTS)
    with pytest.raises(UserError) as refused:
        read(own)
    assert tower in str(refused.value)
    assert "the part of a model that sees images" in str(refused.value)


def test_a_model_of_transformers_takes_none(tmp_path: Path) -> None:
    fallback = build_model(make("persimmon"), "float32", "cpu", lambda stage, percent: None)
    with pytest.raises(UserError, match="runs through transformers"):
        fallback.load_adapter(tmp_path)


@cache
def whole() -> bytes:
    return (make_adapter(make("llama").parent / "adapter-of-llama", make("llama"), 2) / WEIGHTS).read_bytes()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_are_refused_or_read(adapter: Path, data: st.DataObject) -> None:
    raw = bytearray(whole())
    if data.draw(st.booleans()):
        del raw[data.draw(st.integers(0, len(raw) - 1)) :]
    else:
        for _ in range(data.draw(st.integers(1, 4))):
            raw[data.draw(st.integers(0, 4000))] = data.draw(st.integers(0, 255))
    (adapter / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 2, "target_modules": "all-linear"}))
    (adapter / WEIGHTS).write_bytes(raw)
    refused = WEIGHTS
    try:
        read(adapter)
    except UserError as rejection:
        refused = str(rejection)
    assert WEIGHTS in refused
