"""Overrides of a model directory: rotary scaling, tokenizer config, generation config, and weights."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tgi.hub.model_config import read_model_config, read_sampling_defaults
from tgi.hub.overrides import ModelOverrides, overridden_directory
from tgi.microkernel.errors import UserError
from tgi.microkernel.messages.sampling_params import SamplingDefaults

pytestmark = pytest.mark.slow

INDEX = "model.safetensors.index.json"


def copy(model: Path, directory: Path, **config: Any) -> Path:
    """The model with other values in its config.json; None removes one."""
    shutil.copytree(model, directory)
    values = json.loads((model / "config.json").read_text()) | config
    (directory / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    return directory


def config(directory: Path) -> Any:
    return json.loads((directory / "config.json").read_text())


def test_without_overrides_the_directory_is_unchanged(tiny_llama: Path, tmp_path: Path) -> None:
    assert overridden_directory(tiny_llama, ModelOverrides(), tmp_path) == tiny_llama
    assert not list(tmp_path.iterdir())


def test_rotary_scaling_extends_the_context(tiny_llama: Path, tmp_path: Path) -> None:
    directory = overridden_directory(tiny_llama, ModelOverrides(rope_factor=2.0), tmp_path)
    before, after = read_model_config(tiny_llama), read_model_config(directory)
    assert after.max_position_embeddings == 2 * before.max_position_embeddings
    rope = {"rope_type": "linear", "factor": 2.0, "original_max_position_embeddings": 2048, "rope_theta": 10000.0}
    assert config(directory)["rope_parameters"] == rope
    assert after.content_hash != before.content_hash
    assert (directory / "model.safetensors").resolve() == (tiny_llama / "model.safetensors").resolve()


def test_rotary_scaling_replaces_that_of_the_model(tiny_llama: Path, tmp_path: Path) -> None:
    own = {"type": "llama3", "factor": 8.0, "original_max_position_embeddings": 256}
    model = copy(tiny_llama, tmp_path / "model", rope_parameters=None, rope_scaling=own, rope_theta=5e5)
    after = config(overridden_directory(model, ModelOverrides(rope_factor=4.0), tmp_path))
    assert after["rope_scaling"] == {"rope_type": "linear", "factor": 4.0, "original_max_position_embeddings": 256}
    assert (after["rope_theta"], after["max_position_embeddings"]) == (5e5, 1024)


def test_rotary_scaling_is_rejected_for_unsupported_models(tiny_llama: Path, tmp_path: Path) -> None:
    layers = {"full_attention": {"rope_theta": 1.0}, "sliding_attention": {"rope_theta": 2.0}}
    for number, values in enumerate(({"rope_parameters": layers}, {"max_position_embeddings": None})):
        model = copy(tiny_llama, tmp_path / str(number), **values)
        with pytest.raises(UserError, match="--rope-scaling and --rope-factor do not apply"):
            overridden_directory(model, ModelOverrides(rope_factor=2.0), tmp_path)


def test_a_tokenizer_config_replaces_only_its_entries(tiny_llama: Path, tmp_path: Path) -> None:
    model = copy(tiny_llama, tmp_path / "model")
    (model / "chat_template.jinja").write_text("the model's")
    given = tmp_path / "given.json"
    given.write_text('{"chat_template": "mine"}')
    card = read_model_config(overridden_directory(model, ModelOverrides(tokenizer_config=given), tmp_path))
    assert dict(card.chat_templates) == {"default": "mine"}
    assert card.eos_token == read_model_config(model).eos_token
    given.write_text('{"eos_token": "<end>"}')
    card = read_model_config(overridden_directory(model, ModelOverrides(tokenizer_config=given), tmp_path))
    assert dict(card.chat_templates) == {"default": "the model's"}
    assert card.eos_token == "<end>"


def test_a_template_file_is_accepted(tiny_llama: Path, tmp_path: Path) -> None:
    (template := tmp_path / "mine.jinja").write_text("mine")
    card = read_model_config(overridden_directory(tiny_llama, ModelOverrides(tokenizer_config=template), tmp_path))
    assert dict(card.chat_templates) == {"default": "mine"}
    with pytest.raises(UserError, match="is no file"):
        overridden_directory(tiny_llama, ModelOverrides(tokenizer_config=tmp_path / "other.jinja"), tmp_path)


@pytest.mark.parametrize(("content", "said"), [("{", "cannot be read as JSON"), ("[]", "does not hold a JSON object")])
def test_an_invalid_tokenizer_config_is_rejected(tiny_llama: Path, tmp_path: Path, content: str, said: str) -> None:
    (given := tmp_path / "given.json").write_text(content)
    with pytest.raises(UserError, match=said):
        overridden_directory(tiny_llama, ModelOverrides(tokenizer_config=given), tmp_path)


def test_a_generation_config_replaces_only_its_entries(tiny_llama: Path, tmp_path: Path) -> None:
    model = copy(tiny_llama, tmp_path / "model")
    (model / "generation_config.json").write_text('{"eos_token_id": [7, 3], "temperature": 0.6, "top_k": 20}')
    (given := tmp_path / "given").mkdir()
    (given / "generation_config.json").write_text('{"temperature": 0.8, "top_k": null}')
    directory = overridden_directory(model, ModelOverrides(generation_config=given), tmp_path / "place")
    assert read_sampling_defaults(directory) == SamplingDefaults(temperature=0.8)
    assert read_model_config(directory).eos_token_ids == (7, 3, 2)
    (model / "generation_config.json").unlink()
    directory = overridden_directory(model, ModelOverrides(generation_config=given), tmp_path / "place")
    assert read_sampling_defaults(directory) == SamplingDefaults(temperature=0.8)
    with pytest.raises(UserError, match=r"vllm has no generation_config\.json.*`auto` .* or `tgi`"):
        overridden_directory(model, ModelOverrides(generation_config=Path("vllm")), tmp_path / "place")


def test_weights_come_from_another_directory(tiny_llama: Path, tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    shutil.copy(tiny_llama / "model.safetensors", weights)
    model = copy(tiny_llama, tmp_path / "model")
    (model / "model.safetensors").unlink()
    (model / INDEX).write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    card = read_model_config(overridden_directory(model, ModelOverrides(weights=weights), tmp_path / "place"))
    assert [path.resolve() for path in card.weights] == [weights / "model.safetensors"]
    (weights / "model.safetensors").rename(weights / "model-1.safetensors")
    card = read_model_config(overridden_directory(model, ModelOverrides(weights=weights), tmp_path / "place"))
    assert [path.resolve() for path in card.weights] == [weights / "model-1.safetensors"]


def test_a_directory_without_weights_is_rejected(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match="Convert them on a machine where you trust the file"):
        overridden_directory(tiny_llama, ModelOverrides(weights=tmp_path), tmp_path / "place")
    with pytest.raises(UserError, match="is not a directory"):
        overridden_directory(tiny_llama, ModelOverrides(weights=tmp_path / "none"), tmp_path / "place")


def test_equal_overrides_share_a_directory(tiny_llama: Path, tmp_path: Path) -> None:
    first = overridden_directory(tiny_llama, ModelOverrides(rope_factor=2.0), tmp_path)
    assert overridden_directory(tiny_llama, ModelOverrides(rope_factor=2.0), tmp_path) == first
    assert overridden_directory(tiny_llama, ModelOverrides(rope_factor=3.0), tmp_path) != first
