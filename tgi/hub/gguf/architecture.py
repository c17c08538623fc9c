"""Maps a GGUF file's metadata and tensor names to those of Hugging Face models."""

import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

from tgi.hub.gguf.conversion_plan import (
    KNOWN,
    MAX_LAYERS,
    ConversionPlan,
    Metadata,
    TargetTensor,
    TiledHeads,
    refuse_unknown_keys,
    require_tensors,
)
from tgi.hub.gguf.encoders import ENCODERS, plan_encoder
from tgi.hub.gguf.families import FAMILIES, REFUSED, REFUSED_ENCODERS, GGUFArchitecture
from tgi.hub.gguf.pooling import NONE, decoder_vectors, pooling_type
from tgi.hub.gguf.reader import GGUFFile
from tgi.hub.gguf.t5 import T5, plan_t5
from tgi.microkernel.errors import UserError

MAX_EXPERTS = 1024
MAX_STREAMS = 64

# Llama 3.1's rope scaling is stored as one divisor per frequency. All published models of the family have these
# bounds and differ in the factor. (https://github.com/meta-llama/llama-models, models/llama3/model.py, apply_scaling)
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LONGROPE = ("rope_factors_short.weight", "rope_factors_long.weight")
LLAMA4_ROPE = LLAMA3_ROPE | {"high_freq_factor": 1.0}
# Files of phimoe lack what scales cos and sin. Of the published models only Phi-3.5-MoE has longrope, with this value
# at all lengths. (https://huggingface.co/microsoft/Phi-3.5-MoE-instruct, config.json, short_mscale and long_mscale)
PHIMOE_MSCALE = 1.243163121016122

ATTENDING = "attn_layer_indices"  # a layer_types_key that has the numbers of layers with attention
NO_ROWS: dict[str, tuple[int, int]] = {}
QKV, JOINT = ("attn_q", "attn_k", "attn_v"), "attn_qkv"
KEYS_AND_VALUES = ("attn_k", "attn_v", "attn_k_norm")  # which layers that share those of others may have for nothing


def plan_conversion(file: GGUFFile) -> ConversionPlan:
    """Checks that the file has a complete model of a supported architecture. Raises UserError otherwise."""
    metadata = Metadata(file)
    architecture = metadata.string("general.architecture")
    if architecture == T5:
        return plan_t5(file)
    if architecture in ENCODERS:
        return plan_encoder(file, architecture)
    if architecture in REFUSED_ENCODERS:
        raise UserError(
            f"{file.path} holds an encoder of architecture {architecture!r}, {REFUSED_ENCODERS[architecture]}. Of "
            f"encoders, {', '.join(ENCODERS)} and gemma-embedding are served."
        )
    family = FAMILIES.get(architecture)
    if family is None:
        known = f"import knows {', '.join((*FAMILIES, *ENCODERS, T5))}"
        raise UserError(
            f"{file.path} holds a model of architecture {architecture!r}; {REFUSED.get(architecture, known)}. "
            "Use the model's safetensors version instead."
        )
    if family.instead is not None:
        marker, other = family.instead
        family = other if marker in file.tensors or file.metadata.get(f"{architecture}.{marker}") else family
    for name, value in family.required.items():
        if file.metadata.get(key := f"{architecture}.{name}", value) != value:
            raise metadata.wrong(key, file.metadata[key], str(value))
    own = {*family.numbers, *family.required, *family.further}
    if pooling_type(metadata, architecture) != NONE:
        own.add("attention.causal")
    refuse_unknown_keys(file, architecture, KNOWN | own)
    config = _config(metadata, architecture, family)
    wanted = _tensors(config, family, file)
    files: dict[str, Any] = {}
    parts: dict[str, list[TargetTensor]] = {}
    if (vectors := decoder_vectors(metadata, architecture, config)) is not None:
        config |= vectors.config
        wanted += vectors.tensors
        files, parts = vectors.files, vectors.parts
    shared = range(config["num_hidden_layers"] - config.get("num_kv_shared_layers", 0), config["num_hidden_layers"])
    unused = {f"blk.{layer}.{name}.weight" for layer in shared for name in KEYS_AND_VALUES}
    further = tuple(
        f"blk.{layer}." for layer in range(config["num_hidden_layers"], metadata.integer(f"{architecture}.block_count"))
    )  # of multi-token prediction, which are not read
    unused |= {name for name in file.tensors if name.startswith(further)}
    unused |= set(LONGROPE) if config["rope_parameters"].get("rope_type") == "longrope" else set()
    every = [*wanted, *(tensor for part in parts.values() for tensor in part)]
    require_tensors(file, architecture, every, unused | {"rope_freqs.weight"})
    notes: tuple[str, ...] = ()
    if "short_mscale" in config["rope_parameters"]:
        lacking = "the file lacks the factor of the rotary embedding (short_mscale and long_mscale)"
        notes = (f"{lacking}; {PHIMOE_MSCALE} is assumed, that of Phi-3.5-MoE.",)
    return ConversionPlan(config, wanted, files=files, parts=parts, notes=notes)


def _config(metadata: Metadata, architecture: str, family: GGUFArchitecture) -> dict[str, Any]:
    tensors = metadata.file.tensors
    hidden = metadata.positive(f"{architecture}.embedding_length")
    blocks = metadata.positive(f"{architecture}.block_count")
    layers = blocks - metadata.integer(key := f"{architecture}.nextn_predict_layers", 0)
    if layers < 1:
        raise metadata.wrong(key, blocks - layers, f"less than {blocks} layers")
    heads = metadata.positive(
        f"{architecture}.attention.head_count" if family.attention else f"{architecture}.ssm.time_step_rank"
    )
    if blocks > MAX_LAYERS:
        raise metadata.wrong(f"{architecture}.block_count", blocks, f"at most {MAX_LAYERS}")
    own_kv_heads, inners = [0] * layers, [0] * layers
    if not family.layer_types or family.delta_rule:
        kv_heads = metadata.largest(f"{architecture}.attention.head_count_kv", layers, heads)
    else:
        kv_heads, own_kv_heads = metadata.of_some_layers(f"{architecture}.attention.head_count_kv", layers)
    if "mlp" in family.kinds:
        inner, inners = metadata.of_some_layers(f"{architecture}.feed_forward_length", layers)
    else:
        inner = metadata.largest(
            f"{architecture}.{'feed_forward_length' if family.attention else 'ssm.inner_size'}", layers
        )
    head_dim = metadata.positive(f"{architecture}.attention.key_length", max(1, hidden // heads))
    context = metadata.positive(f"{architecture}.context_length")
    if heads % kv_heads:
        raise metadata.wrong(f"{architecture}.attention.head_count_kv", kv_heads, f"a divisor of {heads}")
    turned = head_dim
    if family.rotary and not family.latent:
        turned = metadata.positive(f"{architecture}.rope.dimension_count", head_dim)
    of_values = metadata.integer(f"{architecture}.attention.value_length", head_dim)
    if family.attention and not family.latent and (head_dim % 2 or of_values != head_dim):
        raise metadata.wrong(f"{architecture}.attention.value_length", head_dim, f"the head size {head_dim}, even,")
    if (family.attention and turned % 2) or turned > head_dim or (turned != head_dim and not family.rotates_part):
        raise metadata.wrong(f"{architecture}.rope.dimension_count", turned, f"the head size {head_dim}")
    vocab_size = metadata.vocabulary_size()
    theta = metadata.number(f"{architecture}.rope.freq_base", 10000.0)
    rope = _rope(metadata, architecture, theta, head_dim, turned, context)
    if family.rotates_part:
        rope["partial_rotary_factor"] = turned / head_dim
    stored_epsilon, epsilon = family.epsilon
    # Some files of Nemotron-H have only that of layer norms.
    other_epsilon = metadata.file.metadata.get(f"{architecture}.attention.layer_norm_epsilon")
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": context,
        epsilon: metadata.number(f"{architecture}.{stored_epsilon}", other_epsilon),
        "rope_parameters": rope,
        "tie_word_embeddings": "output.weight" not in tensors,
        "dtype": "bfloat16",
        "use_cache": True,
    }
    config |= family.fixed
    for stored, name in family.numbers.items():
        key = f"{architecture}.{stored}"
        if key in metadata.file.metadata:
            value = metadata.file.metadata[key]
            read = metadata.integer if isinstance(value, int) else metadata.number
            config[name] = value if isinstance(value, bool) else read(key)
    if config.get("sliding_window") == 0:  # of Phi-4
        config["sliding_window"] = None
    if family.delta_rule:
        _add_delta_rule(metadata, architecture, config)
    elif family.layer_types:
        names = {kind: name for name, kind in family.layer_types.items()}
        kinds = zip(own_kv_heads, inners, strict=True)
        config[family.layer_types_key] = [
            names["attention" if heads else "mlp" if inner else "recurrent"] for heads, inner in kinds
        ]
        if family.layer_types_key == ATTENDING:
            config[ATTENDING] = [number for number, heads in enumerate(own_kv_heads) if heads]
    for key, _, _ in family.metadata_blocks:
        value = metadata.file.metadata.get(key)
        if not isinstance(value, list) or len(value) != layers or not all(isinstance(one, float) for one in value):
            raise metadata.wrong(key, value, f"a list of {layers} numbers")
        if key == "xielu.beta" and set(value) != {0.5}:
            raise metadata.wrong(key, value, "0.5 for each layer, as of the published models,")
    for name, sources in family.biases.items():
        stored_biases = {f"blk.0.{one}.bias" for one in (sources[0], JOINT if sources[0] in QKV else sources[0])}
        config[name] = not stored_biases.isdisjoint(tensors)
    for name, sources in family.optional.items():
        config[name] = f"blk.0.{sources[0]}.weight" in tensors
    _add_unstated_values(metadata, architecture, family, config)
    for name in ("bos", "eos"):
        if f"tokenizer.ggml.{name}_token_id" in metadata.file.metadata:
            config[f"{name}_token_id"] = metadata.integer(f"tokenizer.ggml.{name}_token_id")
    return config


def _rope(
    metadata: Metadata, architecture: str, theta: float, head_dim: int, turned: int, context: int
) -> dict[str, Any]:
    kind = metadata.file.metadata.get(f"{architecture}.rope.scaling.type", "none")
    if "rope_freqs.weight" in metadata.file.tensors and architecture != "gemma4":  # see _add_gemma4
        return {"rope_type": "llama3", "rope_theta": theta} | _llama3(metadata, theta, head_dim)
    if LONGROPE[0] in metadata.file.tensors:
        original = metadata.positive(f"{architecture}.rope.scaling.original_context_length")
        short, long = (_divisors(metadata, name, turned // 2) for name in LONGROPE)
        factors = {"short_factor": short, "long_factor": long, "factor": max(1.0, context / original)}
        if architecture == "phimoe":
            scale = dict.fromkeys(("short_mscale", "long_mscale"), PHIMOE_MSCALE)
        else:
            scale = {"attention_factor": metadata.number(f"{architecture}.rope.scaling.attn_factor")}
        return {"rope_type": "longrope", "rope_theta": theta, "original_max_position_embeddings": original} | (
            factors | scale
        )
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    scaled = {"rope_type": kind, "rope_theta": theta, "factor": metadata.number(f"{architecture}.rope.scaling.factor")}
    if kind == "linear":
        return scaled
    if kind == "yarn":
        original = metadata.positive(f"{architecture}.rope.scaling.original_context_length", context)
        bounds = {"beta_fast": 32.0, "beta_slow": 1.0}
        for name, default in bounds.items():
            bounds[name] = metadata.number(f"{architecture}.rope.scaling.yarn_{name}", default)
        return scaled | {"original_max_position_embeddings": original} | bounds
    raise metadata.wrong(f"{architecture}.rope.scaling.type", kind, "none, linear or yarn")


def _divisors(metadata: Metadata, name: str, count: int) -> list[float]:
    """Those of the rotary frequencies."""
    found = metadata.file.tensors.get(name)
    if found is None or found.shape != (count,) or found.type.name != "F32":
        raise UserError(f"{metadata.file.path}: {name!r} is not {count} float32 numbers.")
    numbers = [float(one) for one in found.data.cast("f").tolist()]
    if not all(0 < one < math.inf for one in numbers):
        raise UserError(f"{metadata.file.path} is damaged: {name!r} holds numbers that are not positive.")
    return numbers


def _llama3(metadata: Metadata, theta: float, head_dim: int) -> dict[str, Any]:
    """Derives the factor from the stored divisors and checks that the formula reproduces all of them."""
    tensor = metadata.file.tensors["rope_freqs.weight"]
    if tensor.shape != (head_dim // 2,) or tensor.type.name != "F32":
        raise UserError(f"{metadata.file.path}: 'rope_freqs.weight' is not {head_dim // 2} float32 numbers.")
    found = tensor.data.cast("f").tolist()
    factor = max(found)
    if not 0 < factor < math.inf:
        raise UserError(f"{metadata.file.path} is damaged: 'rope_freqs.weight' holds {factor}.")
    for bounds in (LLAMA3_ROPE, LLAMA4_ROPE):
        if all(
            math.isclose(divisor, _llama3_divisor(bounds, factor, theta ** (2 * index / head_dim)), rel_tol=1e-3)
            for index, divisor in enumerate(found)
        ):
            return {"factor": float(f"{factor:.6g}"), **bounds}
    raise UserError(
        f"{metadata.file.path} scales its rotary frequencies in an unknown way ('rope_freqs.weight'). "
        "Use the model's safetensors version instead."
    )


def _llama3_divisor(bounds: dict[str, float], factor: float, wavelength: float) -> float:
    """The divisor of a frequency, for its wavelength / 2 pi."""
    low, high = bounds["low_freq_factor"], bounds["high_freq_factor"]
    turns = bounds["original_max_position_embeddings"] / (2 * math.pi * wavelength)
    if turns < low or turns > high:
        return factor if turns < low else 1.0
    smooth = (turns - low) / (high - low)
    return 1 / ((1 - smooth) / factor + smooth)


def _add_unstated_values(
    metadata: Metadata, architecture: str, family: GGUFArchitecture, config: dict[str, Any]
) -> None:
    """Adds values that llama.cpp's model code hard-codes for some architectures and the file omits."""
    kind, layers = config["model_type"], config["num_hidden_layers"]
    if kind == "gpt_oss":
        config["rope_parameters"]["truncate"] = False
    some = config.get("num_local_experts", config.get("num_experts", 1))
    if "expert_count" in family.numbers and (some or "dense" not in family.kinds):
        count = metadata.positive(f"{architecture}.expert_count")
        used = metadata.positive(f"{architecture}.expert_used_count")
        if count > MAX_EXPERTS or used > count:
            raise metadata.wrong(f"{architecture}.expert_count", count, f"{used} to {MAX_EXPERTS}")
    if (names := family.mamba2) is not None:
        for name, stored in zip(names, ("conv_kernel", "state_size", "time_step_rank", "group_count"), strict=False):
            config[name] = metadata.positive(f"{architecture}.ssm.{stored}")
        inner = metadata.positive(key := f"{architecture}.ssm.inner_size")
        groups, parts = config[names.groups], config[names.heads]
        if inner % groups or inner % parts:
            raise metadata.wrong(key, inner, f"a multiple of {groups} and {parts}")
        config[names.head_dim] = inner // parts
    if kind in ("gemma2", "gemma3_text"):
        largest = layers == {"gemma2": 46, "gemma3_text": 62}[kind]  # 27B
        scale = config["hidden_size"] // config["num_attention_heads"] if largest else config["head_dim"]
        config["query_pre_attn_scalar"] = scale
    if kind == "llama4_text":
        config["use_qk_norm"] = config["num_local_experts"] != 128  # Maverick
        metadata.positive(f"{architecture}.interleave_moe_layer_step")
        config["intermediate_size"] = metadata.positive(f"{architecture}.expert_feed_forward_length")
    if kind == "gemma4_text":
        _add_gemma4(metadata, architecture, config)
    if kind == "gemma3n_text":
        _add_gemma3n(metadata, architecture, config)
    if kind in ("gemma3_text", "gemma3n_text", "gemma4_text", "olmo3"):
        base = config["rope_parameters"]["rope_theta"] if kind == "olmo3" else 10000.0
        local = {"rope_type": "default", "rope_theta": metadata.number(f"{architecture}.rope.freq_base_swa", base)}
        config["rope_parameters"] = {"full_attention": config["rope_parameters"], "sliding_attention": local}
    if kind == "granitemoehybrid" and metadata.file.metadata.get(f"{architecture}.rope.scaling.finetuned"):
        config["position_embedding_type"] = "rope"
    if kind == "ernie4_5_moe":
        metadata.positive(f"{architecture}.interleave_moe_layer_step", 1)
    if kind in ("exaone4", "exaone_moe", "olmo3"):
        _add_windows(metadata, architecture, config, 4)
    if kind == "ministral3" and (key := f"{architecture}.attention.temperature_scale") in metadata.file.metadata:
        scale = metadata.number(f"{architecture}.rope.scaling.yarn_log_multiplier", 1.0)
        scaled = {"llama_4_scaling_beta": metadata.number(key), "mscale": 1.0, "mscale_all_dim": scale}
        config["rope_parameters"] |= scaled
    if kind == "mpt":
        config["attn_config"] = {"alibi_bias_max": int(metadata.number(f"{architecture}.attention.max_alibi_bias"))}
        if (key := f"{architecture}.attention.clamp_kqv") in metadata.file.metadata:
            config["attn_config"]["clip_qkv"] = metadata.number(key)
    if family.latent:
        _add_latent(metadata, architecture, config)
    if kind == "stablelm":  # files of models without it may say otherwise
        config["use_parallel_residual"] = "blk.0.ffn_norm.weight" not in metadata.file.tensors
    if kind == "cohere":
        config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in metadata.file.tensors


def _add_gemma4(metadata: Metadata, architecture: str, config: dict[str, Any]) -> None:
    """What layers with a window and layers without one have of their own."""
    tensors, layers, heads = metadata.file.tensors, config["num_hidden_layers"], config["num_attention_heads"]
    _add_windows(metadata, architecture, config, 6)
    for key in ("attention.key_length", "attention.key_length_swa", "attention.sliding_window"):
        metadata.positive(f"{architecture}.{key}")
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    if all(slides) or not any(slides) or config["num_kv_shared_layers"] >= layers:
        raise metadata.wrong(f"{architecture}.attention.sliding_window_pattern", slides, "layers of both kinds")
    found = metadata.file.metadata.get(key := f"{architecture}.attention.head_count_kv", heads)
    each = list(zip(found if isinstance(found, list) else [found] * layers, slides, strict=True))
    local, full_ones = ({one for one, own in each if own == kind} for kind in (True, False))
    if any(len(one) != 1 or heads % max(one) for one in (local, full_ones)):
        raise metadata.wrong(key, found, f"one divisor of {heads} for the layers of each kind")
    config["num_key_value_heads"], config["num_global_key_value_heads"] = local.pop(), full_ones.pop()
    own = range(layers - config["num_kv_shared_layers"])  # with keys of their own
    config["attention_k_eq_v"] = any(
        f"blk.{number}.attn_v.weight" not in tensors for number in own if not slides[number]
    )
    if not config["attention_k_eq_v"] and config["num_global_key_value_heads"] != config["num_key_value_heads"]:
        raise metadata.wrong(key, found, "one number, where values are not keys,")
    lengths = metadata.file.metadata[f"{architecture}.feed_forward_length"]
    config["intermediate_size"] = min(lengths) if isinstance(lengths, list) else lengths
    config["use_double_wide_mlp"] = isinstance(lengths, list) and max(lengths) == 2 * min(lengths)
    config["enable_moe_block"] = bool(config["num_experts"])
    if (table := tensors.get("per_layer_token_embd.weight")) is not None:
        config["vocab_size_per_layer_input"] = table.shape[0]
    full, size = tensors.get("rope_freqs.weight"), config["global_head_dim"]
    if full is None or full.shape != (size // 2,) or full.type.name != "F32":
        raise UserError(f"{metadata.file.path}: 'rope_freqs.weight' is not {size // 2} float32 numbers.")
    turned = [one == 1 for one in full.data.cast("f").tolist()]
    if turned != sorted(turned, reverse=True):
        raise UserError(
            f"{metadata.file.path} scales its rotary frequencies in an unknown way ('rope_freqs.weight'). "
            "Use the model's safetensors version instead."
        )
    config["rope_parameters"] |= {"rope_type": "proportional", "partial_rotary_factor": 2 * sum(turned) / size}


def _add_gemma3n(metadata: Metadata, architecture: str, config: dict[str, Any]) -> None:
    """Sizes that follow from tensors, and the share of a layer's gates that are 0."""
    _add_windows(metadata, architecture, config, 5)
    for name, (source, size) in {
        "laurel_rank": ("blk.0.laurel_l.weight", 0),
        "vocab_size_per_layer_input": ("per_layer_token_embd.weight", 0),
    }.items():
        found = metadata.file.tensors.get(source)
        config[name] = found.shape[size] if found is not None else 1  # whose lack is told later
    for key in ("altup.num_inputs", "embedding_length_per_layer_input"):
        metadata.positive(f"{architecture}.{key}")
    layers = config["num_hidden_layers"]
    if config["altup_num_inputs"] > MAX_STREAMS or config.get("num_kv_shared_layers", 0) >= layers:
        raise metadata.wrong(f"{architecture}.altup.num_inputs", config["altup_num_inputs"], f"at most {MAX_STREAMS}")
    found = metadata.file.metadata.get(key := f"{architecture}.activation_sparsity_scale")
    if not isinstance(found, list) or len(found) != layers or not all(isinstance(one, float) for one in found):
        raise metadata.wrong(key, found, f"a list of {layers} numbers")
    config["activation_sparsity_pattern"] = [round(NormalDist().cdf(one), 6) for one in found]


def _add_windows(metadata: Metadata, architecture: str, config: dict[str, Any], each: int) -> None:
    """Which layers have the sliding window: by a list, or without one all but each so many."""
    config["layer_types"] = _layer_types(
        metadata, architecture, "sliding_window_pattern", config, each if config["sliding_window"] is not None else 1
    )


def _layer_types(metadata: Metadata, architecture: str, name: str, config: dict[str, Any], each: int) -> list[str]:
    """Of each layer whether it has full attention: by the list `name`, or without one each `each`-th."""
    layers = config["num_hidden_layers"]
    found = metadata.file.metadata.get(key := f"{architecture}.attention.{name}")
    if found is None:
        found = [(number + 1) % each != 0 for number in range(layers)]
    lengths = layers, metadata.file.metadata[f"{architecture}.block_count"]
    if not isinstance(found, list) or len(found) not in lengths or not all(isinstance(one, bool) for one in found):
        raise metadata.wrong(key, found, f"a list of {layers} truth values")
    other = "linear_attention" if name == "recurrent_layers" else "sliding_attention"
    return [other if one else "full_attention" for one in found[:layers]]


def _add_delta_rule(metadata: Metadata, architecture: str, config: dict[str, Any]) -> None:
    """Which layers have attention, and the sizes of the others."""
    each = metadata.positive(f"{architecture}.full_attention_interval", 4)
    config["layer_types"] = _layer_types(metadata, architecture, "recurrent_layers", config, each)
    inner = metadata.positive(key := f"{architecture}.ssm.inner_size")
    for name in ("conv_kernel", "state_size", "group_count", "time_step_rank"):
        metadata.positive(f"{architecture}.ssm.{name}")
    key_heads, value_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if inner % value_heads or value_heads % key_heads:
        raise metadata.wrong(key, inner, f"a multiple of {value_heads} heads, which are one of {key_heads},")
    config["linear_value_head_dim"] = inner // value_heads


def _add_latent(metadata: Metadata, architecture: str, config: dict[str, Any]) -> None:
    """The sizes of latent attention, and what its families differ in."""
    tensors, heads = metadata.file.tensors, config["num_attention_heads"]
    for name in ("kv_lora_rank", "rope.dimension_count"):
        metadata.positive(f"{architecture}.{name if '.' in name else 'attention.' + name}")
    # Where keys and values are expanded in the file, their lengths are those of a head.
    absorbed, attention = "blk.0.attn_k_b.weight" in tensors, f"{architecture}.attention."
    whole = metadata.positive(attention + ("key_length_mla" if absorbed else "key_length"))
    config["v_head_dim"] = metadata.positive(attention + ("value_length_mla" if absorbed else "value_length"))
    config["qk_nope_head_dim"] = whole - config["qk_rope_head_dim"]
    if config["qk_nope_head_dim"] < 1:
        raise metadata.wrong(f"{architecture}.rope.dimension_count", config["qk_rope_head_dim"], f"less than {whole}")
    config["num_key_value_heads"], config["head_dim"] = heads, config["qk_rope_head_dim"]
    biased = any(name.endswith("exp_probs_b.bias") for name in tensors)
    if not biased and config["norm_topk_prob"]:  # also Mistral Large 3, whose architecture is deepseek2
        config |= {"model_type": "mistral4", "architectures": ["Mistral4ForCausalLM"]}
    elif not biased and config["model_type"] == "deepseek_v3":
        grouped = config["n_group"] > 1
        config |= {"model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"]}
        config["topk_method"] = "group_limited_greedy" if grouped else "greedy"
    sigmoid = config["model_type"] == "deepseek_v3"
    scoring = metadata.file.metadata.get(key := f"{architecture}.expert_gating_func", 2 if sigmoid else 1)
    if scoring != (2 if sigmoid else 1):
        raise metadata.wrong(key, scoring, "2 (sigmoid) with biases of the choice, 1 (softmax) without,")
    if (key := f"{architecture}.rope.scaling.yarn_log_multiplier") in metadata.file.metadata:
        scale = float(f"{metadata.number(key) / 0.1:.6g}")
        config["rope_parameters"] |= {"mscale": scale, "mscale_all_dim": scale}
    if config["model_type"] == "mistral4" and "original_max_position_embeddings" in config["rope_parameters"]:
        _add_query_scale(metadata, architecture, config["rope_parameters"])


def _add_query_scale(metadata: Metadata, architecture: str, rope: dict[str, Any]) -> None:
    """The factor of queries by their position. Files of Mistral Small 4 lack it; 0.1 is the published model's."""
    prefix = f"{architecture}.attention.temperature_"
    length = metadata.positive(f"{prefix}length", original := rope["original_max_position_embeddings"])
    if length != original:
        raise metadata.wrong(f"{prefix}length", length, f"the {original} positions that yarn scales,")
    rope["llama_4_scaling_beta"] = metadata.number(f"{prefix}scale", 0.1)


def _tensors(config: dict[str, Any], family: GGUFArchitecture, file: GGUFFile) -> list[TargetTensor]:
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    query, key = heads * head_dim, kv_heads * head_dim
    of_experts = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    experts = next((config[key] for key in of_experts if config.get(key)), 0)
    sizes = {"Q": query, "K": key, "S": query + 2 * key, "D": head_dim, "H": hidden, "I": inner, "2I": 2 * inner}
    sizes["I"] = config.get("intermediate_size_mlp", inner)
    sizes |= {"A": heads, "k": kv_heads, "E": experts, "M": config.get("moe_intermediate_size", 0)}
    of_shared = ("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size")
    shared = next((config[key] for key in of_shared if config.get(key)), 0)
    counts = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
    shared = shared or config.get("moe_intermediate_size", 0) * next((config[k] for k in counts if k in config), 0)
    sizes |= {"1": 1, "3H": 3 * hidden, "L": config.get("conv_L_cache", 0), "W": shared, "2W": 2 * shared}
    if family.delta_rule:
        key_heads, parts, value = (
            config[f"linear_{name}"] for name in ("num_key_heads", "num_value_heads", "value_head_dim")
        )
        sizes |= {"2Q": 2 * query, "T": parts, "X": parts * value, "d": value, "L": config["linear_conv_kernel_dim"]}
        sizes["C"] = 2 * key_heads * config["linear_key_head_dim"] + parts * value
    if (streams := config.get("altup_num_inputs", 0)) and "laurel_rank" in config:
        sizes |= {"a": streams, "aa": streams**2, "a-1": streams - 1, "l": config["laurel_rank"]}
    if (each := config.get("hidden_size_per_layer_input")) is not None:
        sizes["Y"] = each
        sizes |= {"YL": each * config["num_hidden_layers"], "Z": config.get("vocab_size_per_layer_input", 0)}
    sizes["N"] = config["max_position_embeddings"]
    if family.latent:
        nope, rank, value = config["qk_nope_head_dim"], config["kv_lora_rank"], config["v_head_dim"]
        sizes |= {"q": config["q_lora_rank"] or 0, "U": heads * (nope + config["qk_rope_head_dim"]), "r": rank}
        sizes |= {"R": rank + config["qk_rope_head_dim"], "KV": heads * (nope + value), "V": heads * value}
    if (names := family.mamba2) is not None:
        parts, groups = config[names.heads], config[names.groups]
        channels = parts * config[names.head_dim]
        convolved = channels + 2 * groups * config[names.state]
        sizes |= {"X": channels, "X/G": channels // groups, "G": groups, "T": parts, "C": convolved}
        sizes |= {"P": channels + convolved + parts, "L": config[names.kernel]}
    biased = {name for flag, names in family.biases.items() if config[flag] for name in names}
    biased |= set(family.always_biased)
    left_out = {name for flag, names in family.optional.items() if not config[flag] for name in names}
    if family.latent:
        left_out |= {"attn_q"} if config["q_lora_rank"] else {"attn_q_a", "attn_q_a_norm", "attn_q_b"}
        left_out |= {"exp_probs_b.bias"} if config["model_type"] != "deepseek_v3" else set()
    if config["model_type"] == "stablelm" and config["use_parallel_residual"]:
        left_out.add("ffn_norm")
    if config.get("hidden_size_per_layer_input") == 0:
        left_out |= {"inp_gate", "proj", "post_norm"}
        left_out |= {source for source, _, _ in family.whole}
    blocks = list(family.blocks)
    if config.get("use_qk_norm") and config["model_type"] == "cohere":
        for at, count in (("q", heads), ("k", kv_heads)):
            sizes[at] = count
            blocks.append((f"attn_{at}_norm", f"self_attn.{at}_norm", (at, "D")))
    tiled: dict[str, TiledHeads] = {}
    if family.tiled:
        one = TiledHeads(key_heads, parts // key_heads, 1)
        whole, columns = one._replace(size=value), one._replace(size=value, columns=True)
        tiled = dict.fromkeys(("ssm_a", "ssm_dt.bias", "ssm_alpha", "ssm_beta"), one) | {"ssm_out": columns}
        tiled |= dict.fromkeys(("attn_qkv", "attn_gate", "ssm_conv1d"), whole)
    # Of GLM-4.1V, which has the halves of its rotary pairs where llama.cpp rotates with three axes.
    turned = int(head_dim * config["rope_parameters"].get("partial_rotary_factor", 1.0))
    sorted_pairs = ("attn_q", "attn_k") if family.sorts_pairs_of_axes and has_axes(file) else ()
    wanted = [TargetTensor("token_embd.weight", f"{family.embedding}.weight", (config["vocab_size"], hidden))]

    def add(
        prefix: str, short: str, name: str, shape: tuple[int, ...], rows: Mapping[str, tuple[int, int]] = NO_ROWS
    ) -> None:
        if short in left_out:
            return
        if short == "ssm_ba":
            half = int(name.endswith("a")), config["linear_num_key_heads"]
            wanted.append(TargetTensor(f"{prefix}{short}.weight", f"{name}.weight", shape, half=half))
            return
        if short == "attn_kv_b" and f"{prefix}attn_k_b.weight" in file.tensors:
            pair = f"{prefix}attn_k_b.weight", f"{prefix}attn_v_b.weight"
            parts = heads, config["qk_nope_head_dim"], config["v_head_dim"]
            wanted.append(TargetTensor(pair[0], f"{name}.weight", shape, then=pair[1:], expanded=parts))
            return
        short, _, then = short.partition("+")
        source, further = prefix + short, (f"{prefix}{then}.weight",) if then else ()
        permuted = {"attn_q": heads, "attn_k": kv_heads}.get(short, 0) if family.permuted else 0
        heads_of = tiled.get(short)
        pairs = (head_dim, turned) if short in sorted_pairs else None
        shift = family.norm_shift if short.endswith("norm") and short != "ssm_norm" else 0.0
        joint = f"{prefix}ffn_gate_up_exps.weight"
        if short in ("ffn_gate_exps", "ffn_up_exps") and joint in file.tensors:
            # of each expert the gate, then the up projection
            count, stored = 2 * shape[0], (shape[0], 2 * shape[1], shape[2])
            for number in range(int(short == "ffn_up_exps"), count, 2):
                full = f"{name.format(number // 2)}.weight"
                wanted.append(TargetTensor(joint, full, shape[1:], part=(number, count), reshaped=stored))
            return
        if "{}" in name:
            count = shape[0]
            for expert in range(count):
                for end, one in (("weight", shape[1:]), ("bias", shape[1:2])):
                    if end == "weight" or short in biased:
                        full = f"{name.format(expert)}.{end}"
                        wanted.append(TargetTensor(f"{source}.{end}", full, one, part=(expert, count)))
            return
        reshaped = tuple(sizes[size] for size in family.reshaped.get(short, ()))
        if short.endswith((".weight", ".bias", ".scale", "ssm_a", "ssm_d")) or name.endswith(".weight"):
            wanted.append(
                TargetTensor(source, name, shape, reshaped=reshaped, exponent=short == "ssm_a", tiled=heads_of)
            )
            return
        full, joint = f"{name}.weight", prefix + JOINT
        wanted.append(
            TargetTensor(
                f"{joint if short in rows else source}.weight",
                full,
                shape,
                permuted,
                shift,
                reshaped=reshaped,
                then=further,
                tiled=heads_of,
                pairs=pairs,
                rows=rows.get(short),
            )
        )
        if short in biased:
            within = rows.get(short) if f"{joint}.bias" in file.tensors else None
            end = f"{joint if within else source}.bias"
            wanted.append(TargetTensor(end, f"{name}.bias", shape[:1], permuted, pairs=pairs, rows=within))

    starts = ("num_dense_layers", "first_k_dense_replace", "moe_layer_start_index")
    first_routed = next((config[key] for key in starts if key in config), 0)
    step = config.get("interleave_moe_layer_step", config.get("moe_layer_interval", 1))
    for source, name, shape in family.whole:
        add("", source, name, tuple(sizes[size] for size in shape))
    for layer in range(config["num_hidden_layers"]):
        kind = _layer_kind(config, family, layer)
        routed = layer >= first_routed and (layer + 1) % step == 0
        kinds = (kind, "experts" if experts and routed else "dense")
        own = sizes | _own_sizes(config, layer)
        shares = layer >= config["num_hidden_layers"] - config.get("num_kv_shared_layers", 0)
        every = (*blocks, *(block for kind in kinds for block in family.kinds.get(kind, ())))
        rows = NO_ROWS
        if f"blk.{layer}.{JOINT}.weight" in file.tensors:  # of convert_hf_to_gguf.py --fuse-qkv, and of old ChatGLM
            rows = _rows_of_joint({source: own[shape[0]] for source, _, shape in every if source in QKV})
        for key, name, shape in family.metadata_blocks:
            full, number = f"{family.layers}.{layer}.{name}", file.metadata[key][layer]
            wanted.append(TargetTensor("", full, tuple(own[size] for size in shape), number=number))
        for source, name, shape in every:
            values_are_keys = config.get("attention_k_eq_v") and config["layer_types"][layer] == "full_attention"
            if (shares and source in KEYS_AND_VALUES) or (values_are_keys and source == "attn_v"):
                continue
            add(f"blk.{layer}.", source, f"{family.layers}.{layer}.{name}", tuple(own[size] for size in shape), rows)
    add("", *family.last_norm, (hidden,))
    if not config["tie_word_embeddings"]:
        wanted.append(TargetTensor("output.weight", "lm_head.weight", (config["vocab_size"], hidden)))
        if "output" in biased:
            wanted.append(TargetTensor("output.bias", "lm_head.bias", (config["vocab_size"],)))
    return wanted


def _layer_kind(config: dict[str, Any], family: GGUFArchitecture, layer: int) -> str:
    """A key of GGUFArchitecture.kinds."""
    if not family.layer_types:
        return "attention"
    found = config[family.layer_types_key]
    if family.layer_types_key == ATTENDING:
        return "attention" if layer in found else "recurrent"
    return family.layer_types[found[layer]]


def _rows_of_joint(rows: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """TargetTensor.rows of queries, keys and values, which have this number of rows. Empty without any."""
    first, found, total = 0, {}, sum(rows.values())
    for name, count in rows.items():
        found[name] = first, total
        first += count
    return found


def has_axes(file: GGUFFile) -> bool:
    """Whether rotary positions have three axes: those of models that see images."""
    return f"{file.metadata['general.architecture']}.rope.dimension_sections" in file.metadata


def _own_sizes(config: dict[str, Any], layer: int) -> dict[str, int]:
    """The sizes of a layer that are not those of most (Gemma 4)."""
    if "global_head_dim" not in config:
        return {}
    found, heads, dim = {}, config["num_attention_heads"], config["global_head_dim"]
    if config["layer_types"][layer] == "full_attention":
        found = {"Q": heads * dim, "K": config["num_global_key_value_heads"] * dim, "D": dim}
    if config["use_double_wide_mlp"] and layer >= config["num_hidden_layers"] - config["num_kv_shared_layers"]:
        found["I"] = 2 * config["intermediate_size"]
    return found
