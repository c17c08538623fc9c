"""What a GGUF file's metadata and tensor names mean in Hugging Face's terms."""

import math
from dataclasses import dataclass
from typing import Any

from tgi.hub.gguf.families import FAMILIES, MIXTRAL, Family
from tgi.hub.gguf.metadata import Metadata
from tgi.hub.gguf.reader import GGUF
from tgi.kernel.errors import UserError

MAX_LAYERS = 1024
MAX_EXPERTS = 1024

# Keys that change what is computed start so; one that is not known is refused rather than passed over.
HEEDED = (
    *("attention.", "rope.", "expert_", "embedding_scale", "residual_scale", "logit_scale"),
    *("attn_logit_softcapping", "final_logit_softcapping"),
)
KNOWN = {
    *(f"attention.{key}" for key in ("head_count", "head_count_kv", "key_length", "value_length")),
    "attention.layer_norm_rms_epsilon",
    "attention.layer_norm_epsilon",
    *(f"rope.{key}" for key in ("dimension_count", "freq_base", "scaling.type", "scaling.factor")),
    *(f"rope.scaling.{key}" for key in ("original_context_length", "finetuned")),
}

# Llama 3.1's rope scaling is stored as one divisor for each frequency. All published models of that family have these
# bounds; the factor differs. (https://github.com/meta-llama/llama-models, models/llama3/model.py, apply_scaling)
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True, slots=True)
class Wanted:
    """A tensor that the model needs: its name in the file, its name and shape in the result.

    weights.py undoes what llama.cpp's converter has done: where `heads` is set, it has reordered the rows of each head;
    where `shift` is set, it has added that to all numbers; where `part` is set, (n, count), it has put `count` of these
    into one tensor, of which this is the nth.
    """

    source: str
    name: str
    shape: tuple[int, ...]
    heads: int = 0
    shift: float = 0.0
    part: tuple[int, int] | None = None

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape in the file."""
        return self.shape if self.part is None else (self.part[1], *self.shape)

    @property
    def matrix(self) -> bool:
        """Whether this is the weight of a linear layer, the embedding or the head; routers of experts stay plain."""
        return len(self.shape) == 2 and not self.source.endswith(("norm.weight", "ffn_gate_inp.weight"))


@dataclass(frozen=True, slots=True)
class Plan:
    """The model directory that a GGUF file becomes."""

    config: dict[str, Any]
    tensors: list[Wanted]


def plan(file: GGUF) -> Plan:
    """Checks that the file holds a whole model of a known architecture. Raises UserError otherwise."""
    metadata = Metadata(file)
    architecture = metadata.string("general.architecture")
    family = FAMILIES.get(architecture)
    if family is None:
        known = ", ".join(FAMILIES)
        raise UserError(
            f"{file.path} holds a model of architecture {architecture!r}; import knows {known}. "
            "Use the model's safetensors version instead."
        )
    if metadata.integer("split.count", 1) > 1:
        raise UserError(
            f"{file.path} is one part of several. Join them with llama-gguf-split --merge, then import that."
        )
    if metadata.integer(f"{architecture}.expert_count", 0) and architecture == "llama":
        family = MIXTRAL
    known_keys = KNOWN | set(family.numbers)
    for key in file.metadata:
        name = key.removeprefix(f"{architecture}.")
        if name != key and name.startswith(HEEDED) and name not in known_keys:
            raise UserError(
                f"{file.path} has {key!r} set, which import does not know. Use the model's safetensors version instead."
            )
    config = _config(metadata, architecture, family)
    wanted = _tensors(config, family)
    for tensor in wanted:
        found = file.tensors.get(tensor.source)
        if found is None:
            raise UserError(f"{file.path} lacks the tensor {tensor.source!r}. Fetch or convert it again.")
        if found.shape != tensor.stored:
            raise UserError(
                f"{file.path}: the tensor {tensor.source!r} has shape {list(found.shape)}, "
                f"expected {list(tensor.stored)}. Fetch or convert it again."
            )
    unknown = set(file.tensors) - {tensor.source for tensor in wanted} - {"rope_freqs.weight"}
    if unknown:
        raise UserError(
            f"{file.path} has tensors that a {architecture} model does not use, such as {min(unknown)!r}. "
            "Use the model's safetensors version instead."
        )
    return Plan(config, wanted)


def _config(metadata: Metadata, architecture: str, family: Family) -> dict[str, Any]:
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
    turned = metadata.positive(f"{architecture}.rope.dimension_count", head_dim)
    if head_dim % 2 or metadata.integer(f"{architecture}.attention.value_length", head_dim) != head_dim:
        raise metadata.wrong(f"{architecture}.attention.value_length", head_dim, f"the head size {head_dim}, even,")
    if turned % 2 or turned > head_dim or (turned != head_dim and family.model_type != "phi3"):
        raise metadata.wrong(f"{architecture}.rope.dimension_count", turned, f"the head size {head_dim}")
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
    if turned != head_dim:
        rope["partial_rotary_factor"] = turned / head_dim
    stored_epsilon, epsilon = family.epsilon
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": metadata.positive(f"{architecture}.feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": context,
        epsilon: metadata.number(f"{architecture}.{stored_epsilon}"),
        "rope_parameters": rope,
        "tie_word_embeddings": "output.weight" not in tensors,
        "dtype": "bfloat16",
        "use_cache": True,
    }
    config |= family.fixed
    for stored, name in family.numbers.items():
        key = f"{architecture}.{stored}"
        if key in metadata.file.metadata:
            whole = isinstance(metadata.file.metadata[key], int)
            config[name] = metadata.integer(key) if whole else metadata.number(key)
    for name, sources in family.biases.items():
        config[name] = f"blk.0.{sources[0]}.bias" in tensors
    _settle(metadata, architecture, config)
    for name in ("bos", "eos"):
        if f"tokenizer.ggml.{name}_token_id" in metadata.file.metadata:
            config[f"{name}_token_id"] = metadata.integer(f"tokenizer.ggml.{name}_token_id")
    return config


def _rope(metadata: Metadata, architecture: str, theta: float, head_dim: int, context: int) -> dict[str, Any]:
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


def _llama3(metadata: Metadata, theta: float, head_dim: int) -> dict[str, Any]:
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


def _settle(metadata: Metadata, architecture: str, config: dict[str, Any]) -> None:
    """What llama.cpp's model code knows of some architectures, and the file does not say."""
    kind, layers = config["model_type"], config["num_hidden_layers"]
    if kind in ("mixtral", "qwen3_moe"):
        count = metadata.positive(f"{architecture}.expert_count")
        used = metadata.positive(f"{architecture}.expert_used_count")
        if count > MAX_EXPERTS or used > count:
            raise metadata.wrong(f"{architecture}.expert_count", count, f"{used} to {MAX_EXPERTS}")
    if kind in ("gemma2", "gemma3_text"):
        largest = layers == {"gemma2": 46, "gemma3_text": 62}[kind]  # 27B
        scale = config["hidden_size"] // config["num_attention_heads"] if largest else config["head_dim"]
        config["query_pre_attn_scalar"] = scale
    if kind == "gemma3_text":
        local = {"rope_type": "default", "rope_theta": 10000.0}
        config["rope_parameters"] = {"full_attention": config["rope_parameters"], "sliding_attention": local}
    if kind == "cohere":
        config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in metadata.file.tensors


def _tensors(config: dict[str, Any], family: Family) -> list[Wanted]:
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    query, key = heads * head_dim, kv_heads * head_dim
    experts = config.get("num_local_experts") or config.get("num_experts") or 0
    sizes = {"Q": query, "K": key, "S": query + 2 * key, "D": head_dim, "H": hidden, "I": inner, "2I": 2 * inner}
    sizes |= {"E": experts, "M": config.get("moe_intermediate_size", 0)}
    biased = {name for flag, names in family.biases.items() if config[flag] for name in names}
    biased |= set(family.always_biased)
    blocks = list(family.blocks)
    if config.get("use_qk_norm"):
        for at, count in (("q", heads), ("k", kv_heads)):
            sizes[at] = count
            blocks.append((f"attn_{at}_norm", f"self_attn.{at}_norm", (at, "D")))
    wanted = [Wanted("token_embd.weight", "model.embed_tokens.weight", (config["vocab_size"], hidden))]

    def add(source: str, name: str, shape: tuple[int, ...]) -> None:
        short = source.rpartition(".")[2]
        permuted = {"attn_q": heads, "attn_k": kv_heads}.get(short, 0) if family.permuted else 0
        shift = family.norm_shift if short.endswith("norm") else 0.0
        if "{}" in name:
            for expert in range(experts):
                full = f"{name.format(expert)}.weight"
                wanted.append(Wanted(f"{source}.weight", full, shape[1:], part=(expert, experts)))
            return
        wanted.append(Wanted(f"{source}.weight", f"{name}.weight", shape, permuted, shift))
        if short in biased:
            wanted.append(Wanted(f"{source}.bias", f"{name}.bias", shape[:1], permuted))

    for layer in range(config["num_hidden_layers"]):
        for source, name, shape in blocks:
            add(f"blk.{layer}.{source}", f"model.layers.{layer}.{name}", tuple(sizes[size] for size in shape))
    add("output_norm", "model.norm", (hidden,))
    if not config["tie_word_embeddings"]:
        wanted.append(Wanted("output.weight", "lm_head.weight", (config["vocab_size"], hidden)))
    return wanted
