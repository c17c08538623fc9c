"""A model directory with some files replaced is an ordinary model directory."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tgi.hub.card import read_card, sampling_defaults
from tgi.hub.overlay import Changes, changed
from tgi.kernel.errors import UserError
from tgi.kernel.sampling import SamplingDefaults

INDEX = "model.safetensors.index.json"


def copy(model: Path, directory: Path, **config: Any) -> Path:
    """The model with other values in its config.json; None removes one."""
    shutil.copytree(model, directory)
    values = json.loads((model / "config.json").read_text()) | config
    (directory / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    return directory


def config(directory: Path) -> Any:
    return json.loads((directory / "config.json").read_text())


def test_nothing_changes_nothing(tiny_llama: Path, tmp_path: Path) -> None:
    assert changed(tiny_llama, Changes(), tmp_path) == tiny_llama
    assert not list(tmp_path.iterdir())


def test_rotary_scaling_stretches_the_context(tiny_llama: Path, tmp_path: Path) -> None:
    directory = changed(tiny_llama, Changes(rope_factor=2.0), tmp_path)
    before, after = read_card(tiny_llama), read_card(directory)
    assert after.max_position_embeddings == 2 * before.max_position_embeddings
    rope = {"rope_type": "linear", "factor": 2.0, "original_max_position_embeddings": 2048, "rope_theta": 10000.0}
    assert config(directory)["rope_parameters"] == rope
    assert after.fingerprint != before.fingerprint
    assert (directory / "model.safetensors").resolve() == (tiny_llama / "model.safetensors").resolve()


def test_rotary_scaling_takes_the_place_of_the_model_s_own(tiny_llama: Path, tmp_path: Path) -> None:
    own = {"type": "llama3", "factor": 8.0, "original_max_position_embeddings": 256}
    model = copy(tiny_llama, tmp_path / "model", rope_parameters=None, rope_scaling=own, rope_theta=5e5)
    after = config(changed(model, Changes(rope_factor=4.0), tmp_path))
    assert after["rope_scaling"] == {"rope_type": "linear", "factor": 4.0, "original_max_position_embeddings": 256}
    assert (after["rope_theta"], after["max_position_embeddings"]) == (5e5, 1024)


def test_rotary_scaling_where_it_does_not_apply_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    layers = {"full_attention": {"rope_theta": 1.0}, "sliding_attention": {"rope_theta": 2.0}}
    for number, values in enumerate(({"rope_parameters": layers}, {"max_position_embeddings": None})):
        model = copy(tiny_llama, tmp_path / str(number), **values)
        with pytest.raises(UserError, match="--rope-scaling and --rope-factor do not apply"):
            changed(model, Changes(rope_factor=2.0), tmp_path)


def test_the_given_tokenizer_config_brings_its_template_and_leaves_the_rest(tiny_llama: Path, tmp_path: Path) -> None:
    model = copy(tiny_llama, tmp_path / "model")
    (model / "chat_template.jinja").write_text("the model's")
    given = tmp_path / "given.json"
    given.write_text('{"chat_template": "mine"}')
    card = read_card(changed(model, Changes(tokenizer_config=given), tmp_path))
    assert dict(card.chat_templates) == {"default": "mine"}
    assert card.eos_token == read_card(model).eos_token
    given.write_text('{"eos_token": "<end>"}')
    card = read_card(changed(model, Changes(tokenizer_config=given), tmp_path))
    assert dict(card.chat_templates) == {"default": "the model's"}
    assert card.eos_token == "<end>"


def test_a_template_may_be_a_file_of_its_own(tiny_llama: Path, tmp_path: Path) -> None:
    (template := tmp_path / "mine.jinja").write_text("mine")
    card = read_card(changed(tiny_llama, Changes(tokenizer_config=template), tmp_path))
    assert dict(card.chat_templates) == {"default": "mine"}
    with pytest.raises(UserError, match="is no file"):
        changed(tiny_llama, Changes(tokenizer_config=tmp_path / "other.jinja"), tmp_path)


@pytest.mark.parametrize(("content", "said"), [("{", "cannot be read as JSON"), ("[]", "does not hold a JSON object")])
def test_a_tokenizer_config_that_is_none_is_refused(tiny_llama: Path, tmp_path: Path, content: str, said: str) -> None:
    (given := tmp_path / "given.json").write_text(content)
    with pytest.raises(UserError, match=said):
        changed(tiny_llama, Changes(tokenizer_config=given), tmp_path)


def test_a_generation_config_replaces_entries_and_leaves_the_rest(tiny_llama: Path, tmp_path: Path) -> None:
    model = copy(tiny_llama, tmp_path / "model")
    (model / "generation_config.json").write_text('{"eos_token_id": [7, 3], "temperature": 0.6, "top_k": 20}')
    (given := tmp_path / "given").mkdir()
    (given / "generation_config.json").write_text('{"temperature": 0.8, "top_k": null}')
    directory = changed(model, Changes(generation_config=given), tmp_path / "place")
    assert sampling_defaults(directory) == SamplingDefaults(temperature=0.8)
    assert read_card(directory).eos_token_ids == (7, 3)
    (model / "generation_config.json").unlink()
    directory = changed(model, Changes(generation_config=given), tmp_path / "place")
    assert sampling_defaults(directory) == SamplingDefaults(temperature=0.8)
    with pytest.raises(UserError, match=r"vllm has no generation_config\.json.*`auto` .* or `tgi`"):
        changed(model, Changes(generation_config=Path("vllm")), tmp_path / "place")


def test_weights_come_from_another_directory(tiny_llama: Path, tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    shutil.copy(tiny_llama / "model.safetensors", weights)
    model = copy(tiny_llama, tmp_path / "model")
    (model / "model.safetensors").unlink()
    (model / INDEX).write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    card = read_card(changed(model, Changes(weights=weights), tmp_path / "place"))
    assert [path.resolve() for path in card.weights] == [weights / "model.safetensors"]
    (weights / "model.safetensors").rename(weights / "model-1.safetensors")
    card = read_card(changed(model, Changes(weights=weights), tmp_path / "place"))
    assert [path.resolve() for path in card.weights] == [weights / "model-1.safetensors"]


def test_a_directory_without_weights_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match="Convert them on a machine where you trust the file"):
        changed(tiny_llama, Changes(weights=tmp_path), tmp_path / "place")
    with pytest.raises(UserError, match="is not a directory"):
        changed(tiny_llama, Changes(weights=tmp_path / "none"), tmp_path / "place")


def test_the_same_changes_are_the_same_directory(tiny_llama: Path, tmp_path: Path) -> None:
    first = changed(tiny_llama, Changes(rope_factor=2.0), tmp_path)
    assert changed(tiny_llama, Changes(rope_factor=2.0), tmp_path) == first
    assert changed(tiny_llama, Changes(rope_factor=3.0), tmp_path) != first
