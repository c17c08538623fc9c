"""What a GGUF file's metadata and tensor names mean in Hugging Face's terms, for the llama family."""

import math
from dataclasses import dataclass
from typing import Any

from tgi.hub.gguf.reader import GGUF
from tgi.kernel.errors import UserError

# general.architecture -> (model_type, class). Mistral models carry "llama" in GGUF and compute the same.
ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
}

MAX_LAYERS = 1024

# Keys that change what is computed start so; one that is not known is refused rather than passed over.
HEEDED = ("attention.", "rope.", "embedding_scale", "residual_scale", "logit_scale", "final_logit_softcapping")
KNOWN = {
    *(f"attention.{key}" for key in ("head_count", "head_count_kv", "key_length", "value_length")),
    "attention.layer_norm_rms_epsilon",
    *(f"rope.{key}" for key in ("dimension_count", "freq_base", "scaling.type", "scaling.factor")),
    *(f"rope.scaling.{key}" for key in ("original_context_length", "finetuned")),
}

# Llama 3.1's rope scaling is stored as one divisor for each frequency. All published models of that family have these
# bounds; the factor differs. (https://github.com/meta-llama/llama-models, models/llama3/model.py, apply_scaling)
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True, slots=True)
class Wanted:
    """A tensor that the model needs: its name in the file, its name and shape in the result.

    `heads` is set where llama.cpp's converter has reordered the rows of each head (weights.py undoes it).
    """

    source: str
    name: str
    shape: tuple[int, ...]
    heads: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """The model directory that a GGUF file becomes."""

    config: dict[str, Any]
    tensors: list[Wanted]


def plan(file: GGUF) -> Plan:
    """Checks that the file holds a whole model of a known architecture. Raises UserError otherwise."""
    metadata = _Metadata(file)
    architecture = metadata.string("general.architecture")
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UserError(
            f"{file.path} holds a model of architecture {architecture!r}; import knows {known}. "
            "Use the model's safetensors version instead."
        )
    if metadata.integer("split.count", 1) > 1:
        raise UserError(
            f"{file.path} is one part of several. Join them with llama-gguf-split --merge, then import that."
        )
    if metadata.integer(f"{architecture}.expert_count", 0):
        raise UserError(f"{file.path} is a mixture of experts. Use the model's safetensors version instead.")
    for key in file.metadata:
        name = key.removeprefix(f"{architecture}.")
        if name != key and name.startswith(HEEDED) and name not in KNOWN:
            raise UserError(
                f"{file.path} has {key!r} set, which import does not know. Use the model's safetensors version instead."
            )
    config = _config(metadata, architecture)
    wanted = _tensors(config)
    for tensor in wanted:
        found = file.tensors.get(tensor.source)
        if found is None:
            raise UserError(f"{file.path} lacks the tensor {tensor.source!r}. Fetch or convert it again.")
        if found.shape != tensor.shape:
            raise UserError(
                f"{file.path}: the tensor {tensor.source!r} has shape {list(found.shape)}, "
                f"expected {list(tensor.shape)}. Fetch or convert it again."
            )
    unknown = set(file.tensors) - {tensor.source for tensor in wanted} - {"rope_freqs.weight"}
    if unknown:
        raise UserError(
            f"{file.path} has tensors that a {architecture} model does not use, such as {min(unknown)!r}. "
            "Use the model's safetensors version instead."
        )
    return Plan(config, wanted)


class _Metadata:
    """Typed look-ups that end in a sentence."""

    def __init__(self, file: GGUF) -> None:
        self.file = file

    def string(self, key: str) -> str:
        value = self.file.metadata.get(key)
        if not isinstance(value, str):
            raise self.wrong(key, value, "a string")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.file.metadata.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.wrong(key, value, "a whole number")
        return value

    def positive(self, key: str, default: int | None = None) -> int:
        value = self.integer(key, default)
        if value == 0:
            raise self.wrong(key, value, "a positive number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.file.metadata.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.wrong(key, value, "a positive number")
        return float(f"{value:.7g}")  # 1e-5 stored as float32 reads 9.999999747378752e-06

    def wrong(self, key: str, value: Any, expected: str) -> UserError:
        found = "is missing" if value is None else f"is {str(value)[:80]!r}"
        return UserError(f"{self.file.path}: the metadata key {key!r} {found}; {expected} was expected.")


def _config(metadata: _Metadata, architecture: str) -> dict[str, Any]:
    tensors = metadata.file.tensors
    hidden = metadata.positive(f"{architecture}.embedding_length")
    layers = metadata.positive(f"{architecture}.block_count")
    heads = metadata.positive(f"{architecture}.attention.head_count")
    kv_heads = metadata.positive(f"{architecture}.attention.head_count_kv", heads)
    head_dim = metadata.positive(f"{architecture}.attention.key_length", max(1, hidden // heads))
    context = metadata.positive(f"{architecture}.context_length")
    if layers > MAX_LAYERS:
        raise metadata.wrong(f"{architecture}.block_count", layers, f"at most {MAX_LAYERS}")
    if heads % kv_heads:
        raise metadata.wrong(f"{architecture}.attention.head_count_kv", kv_heads, f"a divisor of {heads}")
    for key in ("attention.value_length", "rope.dimension_count"):
        if metadata.integer(f"{architecture}.{key}", head_dim) != head_dim or head_dim % 2:
            raise metadata.wrong(f"{architecture}.{key}", head_dim, f"the head size {head_dim}, an even number,")
    if "token_embd.weight" not in tensors:
        raise UserError(f"{metadata.file.path} lacks the tensor 'token_embd.weight'. Fetch or convert it again.")
    tokens = metadata.file.metadata.get("tokenizer.ggml.tokens")
    vocab_size = tensors["token_embd.weight"].shape[0]
    if not isinstance(tokens, list) or not 0 < len(tokens) <= vocab_size:
        raise UserError(
            f"{metadata.file.path}: the vocabulary does not fit an embedding of {vocab_size} rows. "
            "Fetch or convert it again."
        )
    theta = metadata.number(f"{architecture}.rope.freq_base", 10000.0)
    rope = _rope(metadata, architecture, theta, head_dim, context)
    model_type, name = ARCHITECTURES[architecture]
    config: dict[str, Any] = {
        "architectures": [name],
        "model_type": model_type,
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": metadata.positive(f"{architecture}.feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": context,
        "rms_norm_eps": metadata.number(f"{architecture}.attention.layer_norm_rms_epsilon"),
        "rope_parameters": rope,
        "tie_word_embeddings": "output.weight" not in tensors,
        "dtype": "bfloat16",
        "use_cache": True,
    }
    if model_type in ("llama", "qwen3"):
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    if model_type == "llama":
        config["mlp_bias"] = "blk.0.ffn_down.bias" in tensors
    for name in ("bos", "eos"):
        if f"tokenizer.ggml.{name}_token_id" in metadata.file.metadata:
            config[f"{name}_token_id"] = metadata.integer(f"tokenizer.ggml.{name}_token_id")
    return config


def _rope(metadata: _Metadata, architecture: str, theta: float, head_dim: int, context: int) -> dict[str, Any]:
    kind = metadata.file.metadata.get(f"{architecture}.rope.scaling.type", "none")
    if "rope_freqs.weight" in metadata.file.tensors:
        return {"rope_type": "llama3", "rope_theta": theta} | _llama3(metadata, theta, head_dim)
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    scaled = {"rope_type": kind, "rope_theta": theta, "factor": metadata.number(f"{architecture}.rope.scaling.factor")}
    if kind == "linear":
        return scaled
    if kind == "yarn":
        original = metadata.positive(f"{architecture}.rope.scaling.original_context_length", context)
        return scaled | {"original_max_position_embeddings": original}
    raise metadata.wrong(f"{architecture}.rope.scaling.type", kind, "none, linear or yarn")


def _llama3(metadata: _Metadata, theta: float, head_dim: int) -> dict[str, Any]:
    """Finds the factor behind the stored divisors and checks that the known formula gives all of them."""
    tensor = metadata.file.tensors["rope_freqs.weight"]
    if tensor.shape != (head_dim // 2,) or tensor.type.name != "F32":
        raise UserError(f"{metadata.file.path}: 'rope_freqs.weight' is not {head_dim // 2} float32 numbers.")
    found = tensor.data.cast("f").tolist()
    factor = max(found)
    if not 0 < factor < math.inf:
        raise UserError(f"{metadata.file.path} is damaged: 'rope_freqs.weight' holds {factor}.")
    low, high = LLAMA3_ROPE["low_freq_factor"], LLAMA3_ROPE["high_freq_factor"]
    original = LLAMA3_ROPE["original_max_position_embeddings"]
    for index, divisor in enumerate(found):
        turns = original / (2 * math.pi * theta ** (2 * index / head_dim))
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        expected = 1 / ((1 - smooth) / factor + smooth)
        if not math.isclose(divisor, expected, rel_tol=1e-3):
            raise UserError(
                f"{metadata.file.path} scales its rotary frequencies in an unknown way ('rope_freqs.weight'). "
                "Use the model's safetensors version instead."
            )
    return {"factor": float(f"{factor:.6g}"), **LLAMA3_ROPE}


def _tensors(config: dict[str, Any]) -> list[Wanted]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads, head_dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    kind = config["model_type"]
    permuted, permuted_kv = (heads, kv_heads) if kind == "llama" else (0, 0)
    wanted = [Wanted("token_embd.weight", "model.embed_tokens.weight", (config["vocab_size"], hidden))]
    for layer in range(config["num_hidden_layers"]):
        here, there = f"blk.{layer}", f"model.layers.{layer}"
        projections = [
            ("attn_q", "self_attn.q_proj", heads * head_dim, hidden, permuted),
            ("attn_k", "self_attn.k_proj", kv_heads * head_dim, hidden, permuted_kv),
            ("attn_v", "self_attn.v_proj", kv_heads * head_dim, hidden, 0),
            ("attn_output", "self_attn.o_proj", hidden, heads * head_dim, 0),
            ("ffn_gate", "mlp.gate_proj", inner, hidden, 0),
            ("ffn_up", "mlp.up_proj", inner, hidden, 0),
            ("ffn_down", "mlp.down_proj", hidden, inner, 0),
        ]
        for source, name, rows, columns, permuted_heads in projections:
            wanted.append(Wanted(f"{here}.{source}.weight", f"{there}.{name}.weight", (rows, columns), permuted_heads))
            if _has_bias(config, source):
                wanted.append(Wanted(f"{here}.{source}.bias", f"{there}.{name}.bias", (rows,), permuted_heads))
        wanted.append(Wanted(f"{here}.attn_norm.weight", f"{there}.input_layernorm.weight", (hidden,)))
        wanted.append(Wanted(f"{here}.ffn_norm.weight", f"{there}.post_attention_layernorm.weight", (hidden,)))
        if kind == "qwen3":
            wanted.append(Wanted(f"{here}.attn_q_norm.weight", f"{there}.self_attn.q_norm.weight", (head_dim,)))
            wanted.append(Wanted(f"{here}.attn_k_norm.weight", f"{there}.self_attn.k_norm.weight", (head_dim,)))
    wanted.append(Wanted("output_norm.weight", "model.norm.weight", (hidden,)))
    if not config["tie_word_embeddings"]:
        wanted.append(Wanted("output.weight", "lm_head.weight", (config["vocab_size"], hidden)))
    return wanted


def _has_bias(config: dict[str, Any], source: str) -> bool:
    if config["model_type"] == "qwen2":
        return source in ("attn_q", "attn_k", "attn_v")
    if source.startswith("attn"):
        return bool(config["attention_bias"])
    return bool(config.get("mlp_bias"))
