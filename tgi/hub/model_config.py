"""Model configuration: what every role needs to know about a model directory, read without torch."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from tgi.hub import adapter_files
from tgi.hub.pooling import POOLING_FILES
from tgi.hub.weight_files import weight_files
from tgi.microkernel.errors import UserError, reading
from tgi.microkernel.messages.sampling_params import PARAMETERS, Range, SamplingDefaults

# fmt: off
ENCODER_DECODERS = {
    "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "encoder-decoder", "fsmt", "led", "longt5", "m2m_100",
    "marian", "mbart", "mvp", "nllb-moe", "pegasus", "pegasus_x", "plbart", "prophetnet", "switch_transformers",
    "t5gemma", "udop", "umt5", "whisper",
}
T5_FAMILY = {"mt5", "t5"}  # the encoder-decoder models that are served
STATE_SPACE = {
    "falcon_mamba", "jamba", "mamba", "minimax", "recurrent_gemma", "rwkv", "rwkv5", "rwkv6", "ssm", "xlstm", "zamba",
    "zamba2",
}
# fmt: on
ATTENTION = {"attention", "chunked_attention", "full_attention", "sliding_attention"}
# Kinds of layers without attention that the built-in decoder computes, by model_type.
RECURRENT_LAYERS: dict[str, set[str]] = {
    "lfm2": {"conv"},
    "lfm2_moe": {"conv"},
    "qwen3_next": {"linear_attention"},
    "qwen3_5_text": {"linear_attention"},
    "qwen3_5_moe_text": {"linear_attention"},
    "olmo_hybrid": {"linear_attention"},
    "granitemoehybrid": {"linear_attention", "mamba"},
    "nemotron_h": {"linear_attention", "mamba", "mlp", "moe"},
    **{kind: {"linear_attention"} for kind in ("bamba", "falcon_h1", "mamba2")},
}
# The longest sequence of a model without positions whose config.json names none.
UNLIMITED_CONTEXT = 131072
# Of T5, whose positions are relative: `n_positions` of its config.json, the length of training, limits nothing.
T5_CONTEXT = 4096
# The longest sequence, by model_type, where config.json names none: for bloom as in the built-in decoder.
CONTEXT_DEFAULTS = {"bloom": 2048, "mamba2": UNLIMITED_CONTEXT}


HASHED_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "chat_template.jinja",
    *POOLING_FILES,
)

# Control tokens that end a turn of a chat, in whatever vocabulary they are.
END_OF_TURN = {
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>", "<|end_of_turn|>", "<end_of_turn>", "<turn|>"),
    *("<|END_OF_TURN_TOKEN|>", "<|end|>", "<|endofturn|>", "[|endofturn|]", "<|return|>", "<|call|>", "<EOT>"),
    *("_<EOT>", "<end_of_utterance>", "<|message_end|>"),
}

# Names of the same number in different model families, the usual one first.
CONTEXT = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length", "max_sequence_length")
HIDDEN = ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")

# Nonzero magnitudes that a float32 request field can carry.
_TINY, _HUGE = 1e-30, 1e30
_MAX_TOKENS = Range("", minimum=1)


class _TokenizerFile(msgspec.Struct):
    """The part of tokenizer.json that is read here. Vocabulary and merges, megabytes, are skipped."""

    added_tokens: list[dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model directory that can be served. Paths are absolute; None if the model lacks the file or token."""

    directory: Path
    model_type: str
    architecture: str  # the class in config.json, "" if absent
    vocab_size: int
    max_position_embeddings: int  # longest sequence, rope scaling included
    eos_token_ids: tuple[int, ...]  # all that end a text; see _eos
    dtype: str  # "float32", "bfloat16", "float16": the type of the saved weights
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tokenizer_json: Path | None
    chat_templates: Mapping[str, str]  # by name; the main one is "default"
    bos_token: str | None
    eos_token: str | None
    weights: tuple[Path, ...]  # empty if they were not asked for
    decoder_start: int | None  # the id that the decoder of an encoder-decoder model starts with; None: any other model
    content_hash: str  # of configuration and tokenizer files: equal on hosts that serve the same model


def read_model_config(directory: Path, *, weights: bool = True) -> ModelConfig:
    """Reads a model directory. Raises UserError if it is not one, cannot be read, is damaged, or cannot be served.

    Without `weights` it need not have any: hosts without a worker do not download them.
    """
    with reading(directory):
        return _read_model_config(Path(directory).absolute(), weights)


def require_directory(directory: Path) -> None:
    """Raises UserError if it is none."""
    if not directory.is_dir():
        raise UserError(f"{directory} is not a directory. Name a model directory, a .gguf file or a Hub id.")


def _read_model_config(directory: Path, weights: bool) -> ModelConfig:
    require_directory(directory)
    if not (directory / "config.json").is_file() and (directory / adapter_files.CONFIG).is_file():
        raise adapter_files.not_a_model_error(str(directory), directory)
    config = _json(directory / "config.json", required=True)
    text = config.get("text_config")
    text = config | text if isinstance(text, dict) else config
    _refuse_other_kinds(directory, config, text)
    tokenizer_config = read_tokenizer_config(directory)
    tokenizer = directory / "tokenizer.json"
    numbers = _Numbers(directory / "config.json", text)
    heads = numbers.first(HEADS)
    kv_heads = 1 if text.get("multi_query") else numbers.first(KV_HEADS, heads)
    hidden = numbers.first(HIDDEN)
    return ModelConfig(
        directory=directory,
        model_type=str(config.get("model_type", "")),
        architecture=str((config.get("architectures") or [""])[0]),
        vocab_size=numbers.first(("vocab_size",)),
        max_position_embeddings=T5_CONTEXT
        if config["model_type"] in T5_FAMILY
        else scaled_context(numbers.first(CONTEXT, CONTEXT_DEFAULTS.get(str(config["model_type"]))), text),
        eos_token_ids=_eos(directory, text, tokenizer_config),
        dtype=_dtype(config, text),
        hidden_size=hidden,
        num_layers=numbers.first(LAYERS, _named_layers(text)),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=numbers.first(("head_dim", "d_kv"), hidden // heads),
        tokenizer_json=tokenizer if tokenizer.is_file() else None,
        chat_templates=MappingProxyType(_chat_templates(directory, tokenizer_config)),
        bos_token=_token_text(tokenizer_config.get("bos_token")),
        eos_token=_token_text(tokenizer_config.get("eos_token")),
        weights=weight_files(directory) if weights else (),
        decoder_start=_decoder_start(directory, config) if config["model_type"] in T5_FAMILY else None,
        content_hash=content_hash(directory),
    )


def is_eagle3(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of an EAGLE-3 head, which drafts for a model, as the paper's authors and the
    speculators library publish them."""
    kind = config.get("speculators_model_type")
    if kind is not None:
        return bool(kind == "eagle3")
    return "draft_vocab_size" in config or "Eagle3" in str(config.get("architectures"))


def is_draft_head(directory: Path) -> bool:
    """Whether the directory has an EAGLE-3 head in the place of a model. Raises UserError if its config.json cannot be
    read."""
    with reading(directory):
        return is_eagle3(_json(directory / "config.json"))


def read_sampling_defaults(directory: Path) -> SamplingDefaults:
    """The values of the model's generation_config.json. `do_sample` is not read: as in vLLM, requests sample, and a
    temperature of 0 means greedy. Raises UserError for an invalid value."""
    path = directory / "generation_config.json"
    config = _json(path)
    found = {name: config[name] for name in SamplingDefaults._fields if config.get(name) is not None}
    for name, value in found.items():
        parameter = PARAMETERS.get(name)
        allowed = _MAX_TOKENS if parameter is None else parameter.openai_range
        whole = parameter is None or parameter.json_type == "i32"
        assert allowed is not None
        if not _is_number(value, whole) or not allowed.contains(value):
            raise UserError(
                f"{path}: {name} is {value!r}; a {'whole ' if whole else ''}number {allowed.bounds} was expected. "
                "Correct it, or start with --generation-config tgi, which does not read it."
            )
    return SamplingDefaults(**found)


def _is_number(value: Any, whole: bool) -> bool:
    """Whether a request can carry this number, as int32 if `whole`, otherwise as float32."""
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        return False
    return -(2**31) <= value < 2**31 if whole else value == 0 or _TINY <= abs(value) <= _HUGE


class _Numbers:
    """Reads positive integers of a configuration that may have one of several names."""

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        self.path = path
        self.config = config

    def first(self, names: tuple[str, ...], default: int | None = None) -> int:
        for name in names:
            value = self.config.get(name)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
                raise UserError(f"{self.path}: {name} is {value!r}; a positive whole number was expected.")
            return value
        if default is None:
            raise UserError(f"{self.path} does not say {names[0]}, which serving a language model needs.")
        return default


def _named_layers(config: dict[str, Any]) -> int | None:
    """The number of layers of a configuration that names the kind of each (Nemotron-H)."""
    kinds = config.get("layers_block_type") or config.get("hybrid_override_pattern")
    return len(kinds) if isinstance(kinds, list | str) else None


def _refuse_other_kinds(directory: Path, config: dict[str, Any], text: dict[str, Any]) -> None:
    if is_eagle3(config):
        raise UserError(
            f"{directory} has an EAGLE-3 head, which drafts for another model. Name that model with --model-id, and "
            "the head with --draft-model-id."
        )
    if "Eagle" in str(config.get("architectures")) or config.get("model_type") == "eagle":
        raise UserError(
            f"{directory} has an EAGLE head of the first kinds, which drafts from the last hidden states alone. Of "
            "EAGLE heads, those of EAGLE-3 are computed."
        )
    if drafter := config.get("speculators_model_type"):
        raise UserError(f"{directory} has a head that drafts, of the kind {drafter}. Of these, eagle3 is computed.")
    kind = config.get("model_type")
    if not isinstance(kind, str) or not kind:
        kind = "ssm" if "ssm_cfg" in config else None
    if kind is None:
        raise UserError(f"{directory / 'config.json'} does not say its model_type. Is it a model's configuration?")
    if kind in ENCODER_DECODERS or (config.get("is_encoder_decoder") and kind not in T5_FAMILY):
        served = ", ".join(sorted(T5_FAMILY))
        raise UserError(f"{kind} is an encoder-decoder model. Of these, the types {served} are served.")
    layers = text.get("layer_types")
    others = {str(layer) for layer in layers} - ATTENTION if isinstance(layers, list) else set()
    others -= RECURRENT_LAYERS.get(str(text.get("model_type", kind)), set())
    if others:
        raise UserError(f"{kind} has layers of kind {min(others)}, which are not served.")
    if kind in STATE_SPACE or "ssm_cfg" in config:
        raise UserError(f"{kind} is a state-space or recurrent model. Only models with attention are served.")


def _decoder_start(directory: Path, config: dict[str, Any]) -> int:
    """The id that the decoder of an encoder-decoder model starts with."""
    for source in (_json(directory / "generation_config.json"), config):
        if ids := _ids(source.get("decoder_start_token_id")):
            if not 0 <= ids[0] < config["vocab_size"]:
                raise UserError(
                    f"{directory} has the decoder start with the id {ids[0]} (decoder_start_token_id), which is not "
                    f"one of the {config['vocab_size']} of its vocabulary."
                )
            return ids[0]
    raise UserError(
        f"{directory / 'config.json'} does not say decoder_start_token_id, which an encoder-decoder model needs."
    )


def scaled_context(trained: int, config: Mapping[str, Any]) -> int:
    """The longest sequence of a model whose configuration says `trained` (max_position_embeddings), as vLLM derives it.

    Linear, dynamic and yarn scaling multiply the original length, which is the trained one unless the scaling names it.
    Others, and gemma3, count scaling in `trained`.
    """
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(scaling, Mapping) or str(config.get("model_type", "")).startswith("gemma3"):
        return trained
    kind, factor = scaling.get("rope_type", scaling.get("type")), scaling.get("factor")
    if kind not in ("linear", "dynamic", "yarn") or not isinstance(factor, int | float) or not 0 < factor <= 4096:
        return trained
    original = scaling.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    return max(trained, int((original if isinstance(original, int) else trained) * factor))


def _dtype(config: dict[str, Any], text: dict[str, Any]) -> str:
    for source in (config, text):
        name = source.get("dtype") or source.get("torch_dtype")
        if isinstance(name, str):
            return name.removeprefix("torch.")
    return "float32"


def read_tokenizer_config(directory: Path) -> dict[str, Any]:
    """tokenizer_config.json with the special tokens that stand only in special_tokens_map.json."""
    own = {key: value for key, value in _json(directory / "tokenizer_config.json").items() if value is not None}
    return _json(directory / "special_tokens_map.json") | own


def read_added_tokens(directory: Path) -> dict[str, tuple[int, bool]]:
    """The tokens added to the vocabulary, from all files that may list them: text → (id, whether it is special)."""
    listed: list[tuple[Any, Any, bool]]
    listed = [(content, number, False) for content, number in _json(directory / "added_tokens.json").items()]
    entries = read_tokenizer_config(directory).get("added_tokens_decoder")
    for number, entry in entries.items() if isinstance(entries, dict) else ():
        if isinstance(entry, dict) and number.isdecimal():
            listed.append((entry.get("content"), int(number), bool(entry.get("special"))))
    own = _tokenizer_file(directory / "tokenizer.json").added_tokens or ()
    listed += [(entry.get("content"), entry.get("id"), bool(entry.get("special"))) for entry in own]
    found: dict[str, tuple[int, bool]] = {}
    for content, number, special in listed:
        if isinstance(content, str) and isinstance(number, int):
            found[content] = number, special or (content in found and found[content][1])
    return found


def _eos(directory: Path, config: dict[str, Any], tokenizer_config: dict[str, Any]) -> tuple[int, ...]:
    """The ids that end a text: of generation_config.json, of the tokenizer's EOS, of config.json, and of control tokens
    with well-known texts. Fine-tunes change one of these and leave the others as in the base model."""
    added = read_added_tokens(directory)
    special = {number for number, is_special in added.values() if is_special}
    ids = [*_ids(_json(directory / "generation_config.json").get("eos_token_id"))]
    token = _token_text(tokenizer_config.get("eos_token"))
    if token is not None and token in added:
        ids.append(added[token][0])
    elif token is not None:
        vocabulary = _json(directory / "tokenizer.json").get("model", {}).get("vocab", {})
        if isinstance(vocabulary, dict) and token in vocabulary:
            ids.append(vocabulary[token])
    # config.json may have the default of its class, which is an ordinary token in another vocabulary.
    ids += [number for number in _ids(config.get("eos_token_id")) if number in special or not ids]
    known = [number for text, (number, is_special) in added.items() if is_special and text in END_OF_TURN]
    if {"<|return|>", "<|call|>"} <= added.keys():  # gpt-oss: an answer has several messages, each with <|end|>
        known = [number for number in known if number != added.get("<|end|>", (None,))[0]]
    return tuple(dict.fromkeys([*ids, *known]))


def _ids(value: Any) -> tuple[int, ...]:
    listed = value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(item for item in listed if isinstance(item, int) and not isinstance(item, bool)))


def _token_text(entry: Any) -> str | None:
    """The text of a special token, which is stored as text or as an object with `content`."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


def _chat_templates(directory: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """Chat templates by name. Later sources override: tokenizer_config.json, chat_template.json, .jinja files."""
    found: dict[str, str] = {}
    for source in (tokenizer_config, _json(directory / "chat_template.json")):
        template = source.get("chat_template")
        if isinstance(template, str):
            found["default"] = template
        elif isinstance(template, list):
            for entry in template:
                if isinstance(entry, dict) and isinstance(entry.get("template"), str):
                    found[str(entry.get("name", "default"))] = entry["template"]
    main = directory / "chat_template.jinja"
    named = sorted((directory / "additional_chat_templates").glob("*.jinja"))
    for name, path in [("default", main), *((path.stem, path) for path in named)]:
        if path.is_file():
            found[name] = _text(path)
    return found


def content_hash(directory: Path) -> str:
    """`ModelConfig.content_hash` of a model directory, without the rest of it."""
    digest = hashlib.sha256()
    for name in HASHED_FILES:
        path = directory / name
        if path.is_file():
            content = path.read_bytes()
            digest.update(f"{name} {len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()[:32]


def _tokenizer_file(path: Path) -> _TokenizerFile:
    if not path.is_file():
        return _TokenizerFile()
    try:
        return msgspec.json.decode(_text(path), type=_TokenizerFile)
    except msgspec.DecodeError as error:
        raise UserError(f"{path} is damaged: {error}. Download the model again.") from error


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}.") from error


def _json(path: Path, required: bool = False) -> dict[str, Any]:
    """The JSON object in a file; {} if the file is optional and missing."""
    if not required and not path.is_file():
        return {}
    if not path.is_file():
        raise UserError(f"{path.parent} has no {path.name}, so it is not a model directory. Name another, or a Hub id.")
    try:
        value = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged: {error}. Download the model again.") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} is damaged: it does not hold a JSON object. Download the model again.")
    return value


# --- the source of a snapshot ---

_TAG = re.compile(r"^pipeline_tag:\s*[\"']?([\w-]+)", re.MULTILINE)


def snapshot_commit(directory: Path) -> str | None:
    """The commit of a directory in the Hub's cache; None for other directories."""
    return directory.name if directory.parent.name == "snapshots" else None


def pipeline_tag(directory: Path) -> str | None:
    """The `pipeline_tag` in the front matter of a snapshot's README.md ("text-generation"); None if absent."""
    if snapshot_commit(directory) is None:
        return None
    try:
        card = (directory / "README.md").read_text(errors="replace")
    except OSError:
        return None
    head = card.split("---", 2)[1] if card.startswith("---") else ""
    found = _TAG.search(head)
    return found[1] if found else None
