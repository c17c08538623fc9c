"""Reading a model directory: configuration, defaults, chat templates, and the directories that are rejected."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.models import model
from tgi.hub.model_config import CONTEXT_DEFAULTS, read_model_config, read_sampling_defaults
from tgi.hub.resolver import model_directory
from tgi.microkernel.errors import UserError
from tgi.microkernel.messages.sampling_params import PARAMETERS, SamplingDefaults
from tgi.worker.decoder_config import UnsupportedConfig
from tgi.worker.models.config_reader import read_decoder_config
from tgi.worker.models.families import COMMON_KEYS, FAMILIES

pytestmark = pytest.mark.slow


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of a model that the test may change."""
    return Path(shutil.copytree(model("llama"), tmp_path / "model"))


def change(path: Path, **values: Any) -> None:
    """Sets keys of a JSON file; None removes one."""
    content = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "gpt2"])
def test_model_config_of_each_kind(kind: str) -> None:
    card = read_model_config(model(kind, dtype="bfloat16"))
    assert card.model_type == kind
    assert card.architecture.endswith(("ForCausalLM", "LMHeadModel"))
    assert (card.vocab_size, card.max_position_embeddings) == (512, 2048)
    assert (card.hidden_size, card.num_layers, card.num_heads) == (64, 3, 4)
    assert card.num_kv_heads == (4 if kind == "gpt2" else 2)
    assert card.head_dim == (32 if kind in ("mistral", "qwen3") else 16)
    assert card.dtype == "bfloat16"
    assert card.eos_token_ids == (2,)
    assert (card.bos_token, card.eos_token) == ("<|bos|>", "<|eos|>")
    assert card.tokenizer_json == card.directory / "tokenizer.json"
    assert "add_generation_prompt" in card.chat_templates["default"]
    assert [path.name for path in card.weights] == ["model.safetensors"]


def test_the_content_hash_depends_on_configuration_and_tokenizer(copy: Path) -> None:
    original = read_model_config(model("llama"))
    assert read_model_config(copy).content_hash == original.content_hash
    (copy / "README.md").write_text("words")
    assert read_model_config(copy).content_hash == original.content_hash
    change(copy / "tokenizer_config.json", eos_token="<|pad|>")
    assert read_model_config(copy).content_hash != original.content_hash


def add_token(directory: Path, number: int, text: str) -> None:
    """Makes a token of tokenizer.json a special token with another text."""
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    (entry,) = [entry for entry in tokenizer["added_tokens"] if entry["id"] == number]
    tokenizer["model"]["vocab"][text] = tokenizer["model"]["vocab"].pop(entry["content"])
    entry["content"] = text
    path.write_text(json.dumps(tokenizer))


def test_every_file_may_name_eos_tokens(copy: Path) -> None:
    change(copy / "config.json", eos_token_id=None)
    change(copy / "tokenizer_config.json", eos_token=None)
    change(copy / "generation_config.json", eos_token_id=None)
    assert read_model_config(copy).eos_token_ids == ()
    change(copy / "generation_config.json", eos_token_id=[7, 1, 7])
    change(copy / "tokenizer_config.json", eos_token={"content": "<|user|>"})
    assert read_model_config(copy).eos_token_ids == (7, 1, 3)
    change(copy / "config.json", eos_token_id=[4, 2, 300])  # 300 is an ordinary token: a default of the class
    assert read_model_config(copy).eos_token_ids == (7, 1, 3, 4, 2)
    for path in ("generation_config.json", "tokenizer_config.json"):
        change(copy / path, eos_token_id=None, eos_token=None)
    assert read_model_config(copy).eos_token_ids == (4, 2, 300)
    (copy / "special_tokens_map.json").write_text('{"eos_token": "<|user|>"}')
    assert read_model_config(copy).eos_token_ids == (3, 4, 2)
    add_token(copy, 5, "<|im_end|>")
    assert read_model_config(copy).eos_token_ids == (3, 4, 2, 5)


def test_the_end_of_a_message_is_not_the_end_of_an_answer_where_both_exist(copy: Path) -> None:
    for number, text in ((3, "<|end|>"), (4, "<|return|>"), (5, "<|call|>")):
        add_token(copy, number, text)
    assert read_model_config(copy).eos_token_ids == (2, 4, 5)


def test_sampling_defaults_come_from_the_generation_config(copy: Path) -> None:
    assert read_sampling_defaults(copy) == SamplingDefaults()
    qwen3 = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "transformers_version": "4.51.0"}
    change(copy / "generation_config.json", **qwen3)
    assert read_sampling_defaults(copy) == SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95)
    (copy / "generation_config.json").write_text('{"temperature": null, "top_k": -1, "repetition_penalty": 1}')
    assert read_sampling_defaults(copy) == SamplingDefaults(top_k=-1, repetition_penalty=1)
    (copy / "generation_config.json").write_text('{"do_sample": false, "temperature": 0, "max_new_tokens": 5}')
    assert read_sampling_defaults(copy) == SamplingDefaults(temperature=0)
    (copy / "generation_config.json").unlink()
    assert read_sampling_defaults(copy) == SamplingDefaults()


def test_every_sampling_default_is_a_field_of_requests_with_a_range() -> None:
    for name in set(SamplingDefaults._fields) - {"max_tokens"}:
        assert PARAMETERS[name].openai_range is not None
        assert PARAMETERS[name].openai is not None
        assert not PARAMETERS[name].openai.name


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("temperature", "-1", "a number >= 0"),
        ("temperature", '"0.6"', "a number >= 0"),
        ("temperature", "true", "a number >= 0"),
        ("temperature", "NaN", "a number >= 0"),
        ("temperature", "1e39", "a number >= 0"),
        ("temperature", "1" + "0" * 400, "a number >= 0"),
        ("top_k", "-2", "a whole number >= -1"),
        ("top_k", "20.5", "a whole number >= -1"),
        ("top_k", "4294967296", "a whole number >= -1"),
        ("top_p", "-0.1", "a number >= 0 and <= 1"),
        ("top_p", "[0.9]", "a number >= 0 and <= 1"),
        ("min_p", "1.5", "a number >= 0 and <= 1"),
        ("repetition_penalty", "0", "a number > 0"),
        ("max_tokens", "0", "a whole number >= 1"),
        ("max_tokens", "2.5", "a whole number >= 1"),
    ],
)
def test_an_invalid_sampling_default_is_rejected(copy: Path, name: str, value: str, expected: str) -> None:
    (copy / "generation_config.json").write_text(f'{{"{name}": {value}}}')
    with pytest.raises(UserError, match=rf"generation_config\.json: {name} is .*; {expected} was expected"):
        read_sampling_defaults(copy)


def test_chat_templates_are_found_in_every_location(copy: Path) -> None:
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    change(copy / "tokenizer_config.json", chat_template=named)
    assert dict(read_model_config(copy).chat_templates) == {"default": "a", "tool_use": "b"}
    (copy / "chat_template.json").write_text(json.dumps({"chat_template": "c"}))
    assert read_model_config(copy).chat_templates["default"] == "c"
    (copy / "chat_template.jinja").write_text("d")
    (copy / "additional_chat_templates").mkdir()
    (copy / "additional_chat_templates" / "rag.jinja").write_text("e")
    assert dict(read_model_config(copy).chat_templates) == {"default": "d", "tool_use": "b", "rag": "e"}


# Published shapes: model_type, max_position_embeddings, scaling, and the length that vLLM derives.
YARN = {"type": "yarn", "factor": 4.0}
SCALINGS: list[tuple[str, int, dict[str, Any] | None, int]] = [
    ("llama", 4096, None, 4096),
    ("llama", 2048, {"rope_type": "default", "rope_theta": 1e4}, 2048),
    ("llama", 131072, {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}, 131072),
    ("llama", 4096, {"type": "linear", "factor": 4.0}, 16384),  # Vicuna 16k
    ("llama", 16384, {"type": "linear", "factor": 4.0}, 65536),  # DeepSeek Coder
    ("llama", 8192, {"rope_type": "linear", "factor": 2.0, "original_max_position_embeddings": 4096}, 8192),
    ("llama", 4096, {"type": "dynamic", "factor": 2.0}, 8192),
    ("llama", 32768, {"rope_type": "dynamic", "factor": 3.0, "original_max_position_embeddings": 4096}, 32768),
    ("qwen2", 32768, YARN | {"original_max_position_embeddings": 32768}, 131072),  # Qwen2.5's recipe
    ("qwen2", 131072, YARN | {"original_max_position_embeddings": 32768}, 131072),
    ("qwen3", 40960, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
    ("qwen3", 32768, {"rope_type": "yarn", "factor": 4.0}, 131072),
    ("llama", 131072, {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}, 131072),
    ("mistral", 32768, {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8192}, 32768),
    ("mistral", 2048, {"type": "yarn", "factor": 4}, 8192),
    ("gemma3_text", 131072, {"rope_type": "linear", "factor": 8.0}, 131072),
    ("gemma3_text", 131072, {"full_attention": {"rope_type": "linear", "factor": 8.0}}, 131072),
    ("qwen2", 32768, {"type": "mrope", "mrope_section": [16, 24, 24]}, 32768),
    ("qwen2", 32768, {"type": "yarn", "factor": None}, 32768),
    ("qwen2", 32768, {"type": "yarn", "factor": -1}, 32768),
    ("llama", 4096, {"type": "linear", "factor": 1e300}, 4096),
    ("granite", 4096, {"type": "linear", "factor": True}, 4096),
]


@pytest.mark.parametrize(("kind", "trained", "scaling", "limit"), SCALINGS)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_hub_and_worker_derive_the_same_context_length_from_rope_scaling(
    copy: Path, kind: str, trained: int, scaling: dict[str, Any] | None, limit: int, key: str
) -> None:
    sizes = {"rope_parameters": None, "max_position_embeddings": trained}
    change(copy / "config.json", model_type=kind, **{**sizes, key: scaling})
    assert read_model_config(copy).max_position_embeddings == limit
    with contextlib.suppress(UnsupportedConfig):  # mrope
        assert read_decoder_config(json.loads((copy / "config.json").read_text())).context_length == limit


@pytest.mark.parametrize("kind", CONTEXT_DEFAULTS)
def test_hub_and_worker_have_the_same_context_length_where_config_json_names_none(copy: Path, kind: str) -> None:
    assert CONTEXT_DEFAULTS[kind] == (COMMON_KEYS | FAMILIES[kind].keys)["max_position_embeddings"]
    change(copy / "config.json", model_type=kind, max_position_embeddings=None)
    assert read_model_config(copy).max_position_embeddings == CONTEXT_DEFAULTS[kind]


@pytest.mark.parametrize("kind", ["umt5", "bart", "whisper"])
def test_encoder_decoders_are_rejected_by_name(copy: Path, kind: str) -> None:
    change(copy / "config.json", model_type=kind)
    with pytest.raises(UserError, match=f"{kind} is an encoder-decoder"):
        read_model_config(copy)


@pytest.mark.parametrize("source", ["config.json", "generation_config.json"])
def test_t5_has_a_decoder_start_and_a_context_of_its_own(copy: Path, source: str) -> None:
    """`n_positions` limits nothing: positions are relative."""
    change(
        copy / "config.json", model_type="t5", is_encoder_decoder=True, n_positions=512, max_position_embeddings=None
    )
    with pytest.raises(UserError, match="does not say decoder_start_token_id"):
        read_model_config(copy)
    change(copy / source, decoder_start_token_id=3)
    config = read_model_config(copy)
    assert (config.decoder_start, config.max_position_embeddings) == (3, 4096)
    change(copy / source, decoder_start_token_id=2**31)
    with pytest.raises(UserError, match=r"2147483648 .* is not one of the"):
        read_model_config(copy)


def test_an_unknown_encoder_decoder_is_rejected(copy: Path) -> None:
    change(copy / "config.json", model_type="novel", is_encoder_decoder=True)
    with pytest.raises(UserError, match="novel is an encoder-decoder"):
        read_model_config(copy)


@pytest.mark.parametrize(
    "values", [{"model_type": "mamba"}, {"model_type": "rwkv"}, {"model_type": None, "ssm_cfg": {}}]
)
def test_state_space_models_are_rejected_by_name(copy: Path, values: dict[str, Any]) -> None:
    change(copy / "config.json", **values)
    with pytest.raises(UserError, match=f"{values['model_type'] or 'ssm'} is a state-space"):
        read_model_config(copy)


def test_models_with_other_layers_than_attention_are_rejected(copy: Path) -> None:
    change(copy / "config.json", model_type="zaya", layer_types=["linear_attention", "full_attention"])
    with pytest.raises(UserError, match="zaya has layers of kind linear_attention"):
        read_model_config(copy)
    for kind, layer in (("qwen2", "sliding_attention"), ("lfm2", "conv"), ("qwen3_next", "linear_attention")):
        change(copy / "config.json", model_type=kind, layer_types=[layer, "full_attention"])
        assert read_model_config(copy).model_type == kind


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "damaged"),
        ("[1]", "JSON object"),
        ("{", "damaged"),
        ("[" * 100_000, "damaged"),
        ("{}", "model_type"),
        ('{"model_type": "llama"}', "does not say num_attention_heads"),
        ('{"model_type": "llama", "num_attention_heads": "four"}', "positive whole number"),
    ],
)
def test_a_broken_configuration_is_rejected(copy: Path, content: str, words: str) -> None:
    (copy / "config.json").write_text(content)
    with pytest.raises(UserError, match=words):
        read_model_config(copy)


def test_what_is_not_a_model_directory_is_rejected(copy: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a directory"):
        read_model_config(tmp_path / "none")
    (copy / "config.json").unlink()
    with pytest.raises(UserError, match=r"has no config\.json"):
        read_model_config(copy)


@pytest.fixture
def anywhere() -> Iterator[Path]:
    """A copy of a model in a directory that every user may enter, while the test runs without the rights of root."""
    place = Path(tempfile.mkdtemp())
    place.chmod(0o755)
    directory = Path(shutil.copytree(model("llama"), place / "model"))
    root = os.geteuid() == 0
    if root:
        for path in (directory, *directory.iterdir()):
            os.chown(path, 65534, 65534)
        os.seteuid(65534)
    try:
        yield directory
    finally:
        directory.chmod(0o755)
        if root:
            os.seteuid(0)
        shutil.rmtree(place)


@pytest.mark.parametrize("locked", [".", "config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"])
def test_what_may_not_be_read_is_named(anywhere: Path, locked: str) -> None:
    """Without a traceback."""
    read_model_config(anywhere)
    (anywhere / locked).chmod(0)
    with pytest.raises(UserError, match=r"cannot be read: .*Permission denied"):
        read_model_config(anywhere)
    if locked == ".":
        with pytest.raises(UserError, match=r"cannot be read: .*Permission denied"):
            model_directory(str(anywhere / "inside"))


def test_missing_weights_are_rejected(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    with pytest.raises(UserError, match="no weights"):
        read_model_config(copy)
    (copy / "training_args.safetensors").touch()
    with pytest.raises(UserError, match="no weights"):
        read_model_config(copy)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickled_weights_are_rejected_with_a_conversion_command(copy: Path, name: str) -> None:
    (copy / "model.safetensors").rename(copy / name)
    with pytest.raises(UserError, match=f"only as {name}.*save_pretrained"):
        read_model_config(copy)


def test_damaged_weights_are_rejected(copy: Path) -> None:
    path = copy / "model.safetensors"
    whole = path.read_bytes()
    for content in (b"", whole[:5], whole[:100], whole[:-1], whole + b"x", b"\xff" * 200):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"model\.safetensors is damaged"):
            read_model_config(copy)


def test_an_index_names_the_weight_files(copy: Path) -> None:
    index = copy / "model.safetensors.index.json"
    (copy / "model.safetensors").rename(copy / "model-1.safetensors")
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    with pytest.raises(UserError, match=r"lacks 1 of the 2 .*model-2\.safetensors"):
        read_model_config(copy)
    shutil.copy(copy / "model-1.safetensors", copy / "model-2.safetensors")
    (copy / "consolidated.safetensors").write_bytes(b"of another program")
    assert [path.name for path in read_model_config(copy).weights] == ["model-1.safetensors", "model-2.safetensors"]
    index.write_text(json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}}))
    with pytest.raises(UserError, match="damaged"):
        read_model_config(copy)
