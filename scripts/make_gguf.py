#!/usr/bin/env python
"""Writes a GGUF file from a model directory as llama.cpp's converter does, tokenizer included.

scripts/make_gguf.py DIR FILE.gguf --format BF16
"""

import argparse
import json
import math
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from statistics import NormalDist
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, TensorNameMap, get_tensor_name_map
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file

from scripts.make_model import OTHER_NAMES
from tgi.hub.pooling import OFFSET_POSITIONS, read_pooling_config
from tgi.hub.weight_files import OF_DECODER, text_name
from tgi.microkernel.messages.protocol import ModelTask

ARCHITECTURES = {
    "gemma3_text": MODEL_ARCH.GEMMA3,
    "cohere": MODEL_ARCH.COMMAND_R,
    "mixtral": MODEL_ARCH.LLAMA,
    "qwen3_moe": MODEL_ARCH.QWEN3MOE,
    "gpt_oss": MODEL_ARCH.GPT_OSS,
    "hunyuan_v1_dense": MODEL_ARCH.HUNYUAN_DENSE,
    "lfm2_moe": MODEL_ARCH.LFM2MOE,
    "granitemoehybrid": MODEL_ARCH.GRANITE_HYBRID,
    "qwen2_moe": MODEL_ARCH.QWEN2MOE,
    "qwen3_next": MODEL_ARCH.QWEN3NEXT,
    "qwen3_5_text": MODEL_ARCH.QWEN35,
    "qwen3_5_moe_text": MODEL_ARCH.QWEN35MOE,
    "falcon_h1": MODEL_ARCH.FALCON_H1,
    "gemma3n_text": MODEL_ARCH.GEMMA3N,
    "granitemoe": MODEL_ARCH.GRANITE_MOE,
    "glm4_moe": MODEL_ARCH.GLM4_MOE,
    "exaone_moe": MODEL_ARCH.EXAONE_MOE,
    "ernie4_5_moe": MODEL_ARCH.ERNIE4_5_MOE,
    "minimax_m2": MODEL_ARCH.MINIMAXM2,
    "hunyuan_v1_moe": MODEL_ARCH.HUNYUAN_MOE,
    "gemma4_text": MODEL_ARCH.GEMMA4,
    "llama4_text": MODEL_ARCH.LLAMA4,
    "ministral3": MODEL_ARCH.MISTRAL3,
    "olmo3": MODEL_ARCH.OLMO2,
    "glm": MODEL_ARCH.CHATGLM,
    "phi": MODEL_ARCH.PHI2,
    "gpt_neox": MODEL_ARCH.GPTNEOX,
    "gpt_bigcode": MODEL_ARCH.STARCODER,
    "bamba": MODEL_ARCH.GRANITE_HYBRID,
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), MODEL_ARCH.DEEPSEEK2),
}
PERMUTED = ("llama", "ministral3", "mixtral", "granite", "smollm3", "arcee", "granitemoe", "granitemoehybrid", "bamba")
# Blocks of types that the gguf package does not quantize to: the offset of each float16 scale, and its size relative to
# others, so that random codes have a mean of 0.
SCALES = {
    GGMLQuantizationType.Q2_K: {80: 1.0, 82: 1.5},
    GGMLQuantizationType.Q3_K: {108: 1.0},
    GGMLQuantizationType.Q4_K: {0: 1.0, 2: 7.5},
    GGMLQuantizationType.Q5_K: {0: 1.0, 2: 15.5},
    GGMLQuantizationType.Q6_K: {208: 1.0},
    GGMLQuantizationType.IQ4_XS: {0: 1.0},
    GGMLQuantizationType.IQ2_XXS: {0: 1.0},
    GGMLQuantizationType.IQ3_S: {0: 1.0},
    GGMLQuantizationType.IQ1_S: {0: 1.0},
}
DELTA = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
SHIFTED = ("gemma", "gemma2", "gemma3_text", "nemotron", *DELTA)
# Further entries if config.json has them: key of config.json -> key without the architecture.
NUMBERS = {
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon",
    "norm_eps": "attention.layer_norm_rms_epsilon",
    "conv_L_cache": "shortconv.l_cache",
    "num_dense_layers": "leading_dense_block_count",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "logit_scale": "logit_scale",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "head_dim": "attention.key_length",
    "layer_norm_epsilon": "attention.layer_norm_rms_epsilon",
    "conv_kernel": "ssm.conv_kernel",
    "ssm_state_size": "ssm.state_size",
    "mamba_num_heads": "ssm.time_step_rank",
    "n_groups": "ssm.group_count",
    "mamba_d_conv": "ssm.conv_kernel",
    "mamba_d_state": "ssm.state_size",
    "mamba_n_heads": "ssm.time_step_rank",
    "mamba_n_groups": "ssm.group_count",
    "shared_intermediate_size": "expert_shared_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}

GPT = ("gpt2", "bloom", "mpt", "falcon", "gpt_bigcode")
# Whose joint matrices have of each key head its queries, its key and its value.
BY_HEAD = ("bloom", "gpt_neox", "falcon", "gpt_bigcode")
NUMBERS_OF_DELTA = {
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
}
NUMBERS_OF_STREAMS = {
    "num_kv_shared_layers": "attention.shared_kv_layers",
    "hidden_size_per_layer_input": "embedding_length_per_layer_input",
    "altup_active_idx": "altup.active_idx",
    "altup_num_inputs": "altup.num_inputs",
}
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4")
NUMBERS_OF_LATENT = {
    "kv_lora_rank": "attention.kv_lora_rank",
    "q_lora_rank": "attention.q_lora_rank",
    "v_head_dim": "attention.value_length_mla",
    "qk_rope_head_dim": "rope.dimension_count",
    "first_k_dense_replace": "leading_dense_block_count",
}

PLAIN = (".bias", "norm.weight", "ffn_gate_inp.weight", "conv.weight", "conv1d.weight", "ssm_a", "ssm_d")
# Of Nemotron-H with experts.
NUMBERS_OF_EXPERTS = {
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "norm_topk_prob": "expert_weights_norm",
    "routed_scaling_factor": "expert_weights_scale",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
}


# Of all families whose experts are preceded by dense layers, or shared.
ROUTED = ("dots1", "glm4_moe", "exaone_moe")
NUMBERS_OF_ROUTED = {
    **NUMBERS_OF_EXPERTS,
    "num_experts": "expert_count",
    "num_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
}
NUMBERS_OF_ERNIE = {
    "moe_num_experts": "expert_count",
    "moe_k": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "moe_num_shared_experts": "expert_shared_count",
    "moe_layer_start_index": "leading_dense_block_count",
    "moe_layer_interval": "interleave_moe_layer_step",
}


def architecture(kind: str) -> MODEL_ARCH:
    """The gguf package's name of a model type."""
    return ARCHITECTURES.get(kind) or next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == kind)


def joined(tensors: dict[str, torch.Tensor], outputs_first: bool = False) -> dict[str, np.ndarray]:
    """As float32, all experts of a layer in one tensor. Joint ones of gpt-oss and Llama 4 have the inputs first."""
    found: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in tensors.items():
        values = tensor.to(torch.float32).numpy()
        if re.fullmatch(r"model\.layers\.\d+\.experts\.\w+", name):  # Gemma 4
            found[f"{name}.weight"] = values
            continue
        if match := re.fullmatch(r"(.*\.experts\.)(gate_up|down)_proj(_bias)?", name):
            end = "bias" if match[3] else "weight"
            values = values if match[3] or outputs_first else values.swapaxes(1, 2)
            middle = values.shape[1] // 2
            halves = (
                [slice(0, middle), slice(middle, None)]
                if "feed_forward" in name or outputs_first
                else [slice(0, None, 2), slice(1, None, 2)]
            )
            parts = (
                {"down": values}
                if match[2] == "down"
                else dict(zip(("gate", "up"), (values[:, half] for half in halves), strict=True))
            )
            found |= {f"{match[1]}{part}_proj.{end}": np.ascontiguousarray(one) for part, one in parts.items()}
            continue
        if name.endswith((".conv.conv.weight", ".conv1d.weight")):
            values = values.squeeze(1)
        if name.endswith("input_linear.weight"):  # of Granite
            stem, rows = name.removesuffix("input_linear.weight"), values.shape[-2] // 2
            found |= {f"{stem}first.weight": values[..., :rows, :], f"{stem}second.weight": values[..., rows:, :]}
            continue
        if name.endswith((".A_log", ".D")):
            values = values[:, None] if name.endswith("D") else -np.exp(values[:, None], dtype=np.float64)
            values = values.astype(np.float32)
        if match := re.fullmatch(r"(.*\.experts|model\.altup_\w+)\.(\d+)\.(.*)", name):
            experts.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = values
        else:
            found[name] = values
    return found | {name: np.stack([each[n] for n in range(len(each))]) for name, each in experts.items()}


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's convert_hf_to_gguf.py stores llama's q and k projections."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def tiled(values: np.ndarray, name: str, key_heads: int, each: int, before: int) -> np.ndarray:
    """Value heads of the delta rule as llama.cpp sorts them: by their number within a key head, then by the key head.
    `before` rows of queries and keys precede them in joint tensors."""
    if "out_proj" in name:
        return np.ascontiguousarray(tiled(values.T, "", key_heads, each, before).T)
    first = before if "qkv" in name or "conv1d" in name else 0
    by_head = values[first:].reshape(key_heads, each, -1, *values.shape[1:]).swapaxes(0, 1)
    return np.concatenate((values[:first], by_head.reshape(-1, *values.shape[1:])))


def random_blocks(values: np.ndarray, block: GGMLQuantizationType) -> np.ndarray:
    """Random blocks of a type in SCALES, about as large as the values."""
    weights, stored = GGML_QUANT_SIZES[block]
    raw = np.random.default_rng(0).integers(0, 256, (values.size // weights, stored), dtype=np.uint8)
    fitting = 1.0
    for _ in range(2):
        for at, size in SCALES[block].items():
            raw[:, at : at + 2] = np.array([size * fitting], np.float16).view(np.uint8)
        fitting = values.std() / dequantize(raw, block).std()
    return raw.reshape(*values.shape[:-1], -1)


def write_gguf(
    model: Path,
    path: Path,
    quantization: str | Callable[[str], str] = "F32",
    metadata: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    fused: bool = False,
    joint: bool = False,
    absorbed: bool = True,
    name_of_architecture: str = "",
) -> Path:
    """`metadata` overrides keys; a value of None leaves a key out. `quantization` is a block type, or says the
    one of each stored name; where rows are no multiple of its blocks, float16. Norms, biases and routers stay float32.
    `fused`: gates of experts and their up projections are one tensor. `joint`: so are queries, keys and values.
    `absorbed`: the expansion of latents to keys is transposed, apart from that to values.
    """
    config = json.loads((model / "config.json").read_text())
    kind = config["model_type"]
    config |= {name: config[own] for name, own in OTHER_NAMES.get(kind, {}).items() if own in config}
    if kind == "mamba2":
        config |= {"mamba_n_heads": config["num_heads"], "mamba_n_groups": config["n_groups"]}
        config |= {"mamba_d_head": config["head_dim"], "mamba_d_state": config["state_size"], "head_dim": None}
    if kind == "glm4_moe_lite":
        config["first_k_dense_replace"] = config["mlp_layer_types"].count("dense")
    layers = config.get("layers_block_type") or config.get("layer_types") or []
    number = MODEL_ARCH.NEMOTRON_H_MOE if "moe" in layers else architecture(name_of_architecture or kind)
    arch, count = MODEL_ARCH_NAMES[number], config.get("num_hidden_layers") or len(layers)
    names = get_tensor_name_map(number, count)
    heads = config["num_attention_heads"]
    kv_heads, inner = (
        config.get("num_key_value_heads", heads),
        config.get("intermediate_size", 4 * config["hidden_size"]),
    )
    rope = config.get("rope_parameters") or {}
    tensors = load_file(model / "model.safetensors")
    if "embed_tokens.weight" in tensors:  # of a decoder that was saved without its head
        tensors = {f"model.{name}": tensor for name, tensor in tensors.items()}
    keys = {
        f"{arch}.block_count": count,
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": inner,
        f"{arch}.attention.head_count": heads,
        f"{arch}.attention.head_count_kv": kv_heads,
        f"{arch}.rope.freq_base": rope.get("full_attention", rope).get("rope_theta"),
        **{f"{arch}.{stored}": config[name] for name, stored in NUMBERS.items() if config.get(name)},
        **tokenizer_metadata(model),
    }
    if rope.get("rope_type") == "yarn":
        keys |= {
            f"{arch}.rope.scaling.type": "yarn",
            f"{arch}.rope.scaling.factor": rope["factor"],
            f"{arch}.rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        }
    if rope.get("rope_type") == "longrope":
        original = rope["original_max_position_embeddings"]
        keys[f"{arch}.rope.scaling.original_context_length"] = original
        scale = config["max_position_embeddings"] / original
        own = math.sqrt(1 + math.log(scale) / math.log(original))  # whatever short_mscale is
        keys[f"{arch}.rope.scaling.attn_factor"] = rope.get("attention_factor", own)
        sorts = ("short", "long")
        extra = {f"rope_factors_{sort}.weight": np.array(rope[f"{sort}_factor"], np.float32) for sort in sorts}
    if kind in ("lfm2", "lfm2_moe", "nemotron_h", "granitemoehybrid"):
        keys[f"{arch}.attention.head_count_kv"] = [kv_heads * (layer == "full_attention") for layer in layers]
    if kind == "nemotron_h":
        keys = {key: value for key, value in keys.items() if ".expert_" not in key}
        if "moe" in layers:
            keys |= {f"{arch}.{stored}": config[name] for name, stored in NUMBERS_OF_EXPERTS.items()}
        inner = config["moe_intermediate_size" if "moe" in layers else "intermediate_size"]
        keys[f"{arch}.feed_forward_length"] = [inner * (layer in ("mlp", "moe")) for layer in layers]
        keys[f"{arch}.ssm.inner_size"] = config["mamba_num_heads"] * config["mamba_head_dim"]
        keys[f"{arch}.attention.layer_norm_epsilon"] = keys.pop(f"{arch}.attention.layer_norm_rms_epsilon")
        keys[f"{arch}.rope.dimension_count"] = config["hidden_size"] // heads  # whatever head_dim is
    if kind == "bamba":
        keys[f"{arch}.attention.head_count_kv"] = [kv_heads * (n in config["attn_layer_indices"]) for n in range(count)]
        keys[f"{arch}.ssm.inner_size"] = config["mamba_n_heads"] * config["mamba_d_head"]
        keys[f"{arch}.rope.scaling.finetuned"] = True
    if kind == "granitemoehybrid":
        keys[f"{arch}.ssm.inner_size"] = config["mamba_n_heads"] * config["mamba_d_head"]
        keys[f"{arch}.rope.scaling.finetuned"] = config["position_embedding_type"] == "rope"
    if kind == "lfm2":
        keys[f"{arch}.feed_forward_length"] = len(tensors["model.layers.0.feed_forward.w1.weight"])
    if kind == "lfm2_moe":
        keys[f"{arch}.expert_gating_func"] = 2
    if config.get("head_dim"):
        keys[f"{arch}.attention.value_length"] = config["head_dim"]
    if rope.get("partial_rotary_factor"):
        keys[f"{arch}.rope.dimension_count"] = int(
            rope["partial_rotary_factor"] * (config.get("head_dim") or config["hidden_size"] // heads)
        )
    if config.get("sliding_window") and kind != "starcoder2":
        keys[f"{arch}.attention.sliding_window"] = config["sliding_window"]
    if kind in ("phi3", "phimoe"):
        keys.setdefault(f"{arch}.attention.sliding_window", 0)
    if kind == "gemma3n_text":
        keys |= {f"{arch}.{stored}": config[name] for name, stored in NUMBERS_OF_STREAMS.items()}
        keys[f"{arch}.rope.freq_base_swa"] = rope["sliding_attention"]["rope_theta"]
        keys[f"{arch}.activation_sparsity_scale"] = [
            NormalDist().inv_cdf(part) if part else -math.inf for part in config["activation_sparsity_pattern"]
        ]
    if kind == "llama4_text":
        keys[f"{arch}.feed_forward_length"] = config["intermediate_size_mlp"]
        keys[f"{arch}.expert_feed_forward_length"] = inner
        keys[f"{arch}.interleave_moe_layer_step"] = config["moe_layers"][0] + 1
    if kind == "gemma4_text":
        full = config["per_layer_config"][str(layers.index("full_attention"))]
        whole_dim, wide = full["head_dim"], count - config["num_kv_shared_layers"] * config["use_double_wide_mlp"]
        own_heads = [
            kv_heads if layer == "sliding_attention" else full.get("num_key_value_heads", kv_heads) for layer in layers
        ]
        keys |= {
            f"{arch}.attention.{of}_length{end}": size
            for of in ("key", "value")
            for end, size in (("", whole_dim), ("_swa", config["head_dim"]))
        }
        keys |= {
            f"{arch}.attention.head_count_kv": own_heads,
            f"{arch}.feed_forward_length": [inner * (1 + (number >= wide)) for number in range(count)],
            f"{arch}.attention.shared_kv_layers": config["num_kv_shared_layers"],
            f"{arch}.embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
            f"{arch}.expert_used_count": config.get("top_k_experts"),
            f"{arch}.rope.freq_base_swa": rope["sliding_attention"]["rope_theta"],
            f"{arch}.rope.dimension_count": whole_dim,
            f"{arch}.rope.dimension_count_swa": config["head_dim"],
        }
        turned = int(whole_dim * rope["full_attention"]["partial_rotary_factor"] / 2)
        extra = {"rope_freqs.weight": np.array([1.0] * turned + [1e30] * (whole_dim // 2 - turned), np.float32)}
    if kind == "ministral3":
        keys[f"{arch}.attention.temperature_scale"] = rope["llama_4_scaling_beta"]
        keys[f"{arch}.rope.scaling.yarn_log_multiplier"] = rope["mscale_all_dim"]
    if kind in ("gpt_neox", "stablelm"):
        keys[f"{arch}.use_parallel_residual"] = config["use_parallel_residual"]
    if kind == "olmo3":
        keys[f"{arch}.rope.freq_base_swa"] = rope["sliding_attention"]["rope_theta"]
    if kind in ("nemotron", "phi", "gpt_neox", "stablelm", "dbrx"):
        ends = "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"
        keys[f"{arch}.{ends[0]}"] = keys.pop(f"{arch}.{ends[1]}", keys.get(f"{arch}.{ends[0]}", 1e-5))
    if kind == "dbrx":
        experts = config["ffn_config"]
        keys[f"{arch}.feed_forward_length"] = experts["ffn_hidden_size"]
        keys |= {f"{arch}.expert_count": experts["moe_num_experts"], f"{arch}.expert_used_count": experts["moe_top_k"]}
        keys |= {f"{arch}.attention.clamp_kqv": config["attn_config"]["clip_qkv"]}
        keys |= {f"{arch}.attention.head_count_kv": config["attn_config"]["kv_n_heads"]}
    if kind in ("exaone4", "exaone_moe", "gemma3n_text", "gemma4_text", "olmo3"):
        keys[f"{arch}.attention.sliding_window_pattern"] = [layer == "sliding_attention" for layer in layers]
    if kind in GPT:
        keys[f"{arch}.attention.layer_norm_epsilon"] = keys.pop(f"{arch}.attention.layer_norm_rms_epsilon")
    if kind == "mpt":
        keys[f"{arch}.attention.max_alibi_bias"] = 8.0
        keys[f"{arch}.attention.clamp_kqv"] = config["attn_config"]["clip_qkv"]
    if kind == "falcon_h1":  # whose factors are multiplied with the weights, here 1
        del keys[f"{arch}.embedding_scale"]
    if kind in ("mamba2", "falcon_h1"):
        keys[f"{arch}.ssm.inner_size"] = config["mamba_n_heads"] * config["mamba_d_head"]
    if kind == "mamba2":
        keys |= {f"{arch}.attention.head_count": 0, f"{arch}.feed_forward_length": 0}
        keys[f"{arch}.attention.head_count_kv"] = None
    if kind in DELTA:
        keys |= {f"{arch}.{stored}": config[name] for name, stored in NUMBERS_OF_DELTA.items()}
        keys[f"{arch}.ssm.inner_size"] = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        keys[f"{arch}.full_attention_interval"] = layers.index("full_attention") + 1
    if kind in DELTA[1:]:
        keys[f"{arch}.rope.dimension_sections"] = [11, 11, 10, 0]
        keys[f"{arch}.attention.recurrent_layers"] = [layer == "linear_attention" for layer in layers]
    if kind in ROUTED:
        keys |= {f"{arch}.{stored}": config[name] for name, stored in NUMBERS_OF_ROUTED.items() if name in config}
    if kind in (*ROUTED, "minimax_m2"):
        keys[f"{arch}.expert_gating_func"] = 2
    if kind == "ernie4_5_moe":
        keys |= {f"{arch}.{stored}": config[name] for name, stored in NUMBERS_OF_ERNIE.items()}
    if kind == "hunyuan_v1_moe":
        keys[f"{arch}.expert_used_count"] = config["moe_topk"][0]
    if kind in LATENT:
        keys |= {
            f"{arch}.{stored}": config[name]
            for name, stored in (NUMBERS_OF_LATENT | NUMBERS_OF_EXPERTS).items()
            if config.get(name)
        }
        whole, rank = config["qk_nope_head_dim"] + config["qk_rope_head_dim"], config["kv_lora_rank"]
        if absorbed:
            keys[f"{arch}.attention.key_length_mla"] = whole
            keys[f"{arch}.attention.head_count_kv"] = 1
        keys[f"{arch}.attention.key_length"] = rank + config["qk_rope_head_dim"] if absorbed else whole
        values_of_head = keys.pop(f"{arch}.attention.value_length_mla")
        keys[f"{arch}.attention.value_length"] = rank if absorbed else values_of_head
        keys[f"{arch}.attention.value_length_mla"] = values_of_head if absorbed else None
        keys[f"{arch}.expert_gating_func"] = 1 if kind in ("deepseek_v2", "mistral4") else 2
        if "mscale_all_dim" in rope:
            keys[f"{arch}.rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    if kind == "apertus":
        for factor in ("alpha_p", "alpha_n", "beta", "eps"):
            of_layers = [tensors.pop(f"model.layers.{layer}.mlp.act_fn.{factor}") for layer in range(count)]
            keys[f"xielu.{factor}"] = [float(one) for one in of_layers]
    keys |= metadata or {}
    writer = GGUFWriter(path, arch)
    for key, value in keys.items():
        add(writer, key, value)
    plain_tensors = joined(tensors, kind in (*DELTA, "mistral4"))
    for name in [name for name in plain_tensors if absorbed and name.endswith("kv_b_proj.weight")]:
        both = plain_tensors.pop(name).reshape(heads, -1, config["kv_lora_rank"])
        keys_of_heads, values_of_heads = np.split(both, [config["qk_nope_head_dim"]], axis=1)
        plain_tensors[name.replace("kv_b", "k_b")] = np.ascontiguousarray(keys_of_heads.swapaxes(1, 2))
        plain_tensors[name.replace("kv_b", "v_b")] = np.ascontiguousarray(values_of_heads)
    for name in [name for name in plain_tensors if name.endswith("in_proj_qkvz.weight")]:
        key, values_of_key = config["linear_key_head_dim"], config["linear_value_head_dim"]
        values_of_key *= config["linear_num_value_heads"] // config["linear_num_key_heads"]
        by_head = plain_tensors.pop(name).reshape(config["linear_num_key_heads"], -1, config["hidden_size"])
        *qkv, z = np.split(by_head, np.cumsum((key, key, values_of_key)), axis=1)
        flat = [part.reshape(-1, config["hidden_size"]) for part in qkv]
        plain_tensors[name.replace("qkvz", "qkv")] = np.concatenate(flat)
        plain_tensors[name.replace("qkvz", "z")] = np.ascontiguousarray(z.reshape(-1, config["hidden_size"]))
    if kind in DELTA[1:]:
        key_heads, each = config["linear_num_key_heads"], config["linear_num_value_heads"]
        plain_tensors |= {
            name: tiled(values, name, key_heads, each // key_heads, 2 * key_heads * config["linear_key_head_dim"])
            for name, values in plain_tensors.items()
            if ".linear_attn." in name and not name.endswith("norm.weight")
        }
    for name in [name for name in plain_tensors if fused and name.endswith("experts.gate_proj.weight")]:
        gate, up = (plain_tensors.pop(name.replace("gate_proj", f"{part}_proj")) for part in ("gate", "up"))
        plain_tensors[name.replace("gate_proj", "gate_up_proj")] = np.concatenate((gate, up), axis=1)
    for layer in range(count if kind == "stablelm" and config["qk_layernorm"] else 0):
        for part, of_part in (("q", heads), ("k", kv_heads)):
            stem = f"model.layers.{layer}.self_attn.{part}_layernorm"
            each = [plain_tensors.pop(f"{stem}.norms.{head}.weight") for head in range(of_part)]
            plain_tensors[f"{stem}.weight"] = np.stack(each)
    together: dict[str, np.ndarray] = {}
    for name, values in plain_tensors.items():
        if kind in PERMUTED and (".q_proj." in name or ".k_proj." in name):
            values = permute(values, heads if ".q_proj." in name else kv_heads)
        if kind == "dbrx" and "experts.mlp" in name:
            values = values.reshape(config["ffn_config"]["moe_num_experts"], -1, config["hidden_size"])
            values = np.ascontiguousarray(values.swapaxes(1, 2)) if name.endswith("w2") else values
        if kind == "gpt2" and values.ndim == 2 and ".h." in name:
            values = np.ascontiguousarray(values.T)
        if kind in BY_HEAD and ("query_key_value" in name or "c_attn" in name):
            by_head = values.reshape(kv_heads, heads // kv_heads + 2, -1, *values.shape[1:])
            parts = np.split(by_head, (heads // kv_heads, heads // kv_heads + 1), axis=1)
            values = np.concatenate([part.reshape(-1, *values.shape[1:]) for part in parts])
        if kind in SHIFTED and name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            values = values + 1
        if name.endswith(("mixer.norm.weight", "mamba.norm.weight")):
            values = values.reshape(config.get("n_groups") or config["mamba_n_groups"], -1)
        whole = (
            name
            + ".weight" * name.endswith(("sinks", "output_scale", "layer_scalar", "mlp.w1", "mlp.w2", "mlp.v1"))
            + ".bias" * name.endswith("expert_bias")
        )
        whole = (
            re.sub("(e_score_correction|dt)_bias$", r"\1.bias", whole)
            .replace("mamba.dt.", "mamba.dt_proj.")
            .replace("attn.dt.", "attn.dt_proj.")
        )
        others = (
            whole.removeprefix("model."),
            whole.removeprefix("transformer."),
            re.sub(r"^backbone(.*)\.mixer\.experts", r"model\1.mlp.experts", whole),
        )
        found = (names.get_name(one, (".weight", ".bias")) for one in (whole, *others))
        stored = next((one for one in found if one is not None), None)
        if match := re.fullmatch(r"model\.layers\.(\d+)\.router\.(scale|per_expert_scale)", name):
            stored = f"blk.{match[1]}.ffn_{'gate_inp' if match[2] == 'scale' else 'down_exps'}.scale"
        if match := re.fullmatch(r"model\.layers\.(\d+)\.(.*)\.(first|second|output_linear)\.weight", name):
            end = "_exps" if match[2] != "shared_mlp" else "_shexp" * bool(config["num_local_experts"])
            part = {"first": "gate", "second": "up", "output_linear": "down"}[match[3]]
            stored = f"blk.{match[1]}.ffn_{part}{end}.weight"
        assert stored is not None, name
        if joint and (match := re.fullmatch(r"(blk\.\d+\.attn_)[qkv](\.weight|\.bias)", stored)):
            together[stored] = values
            of_joint = [f"{match[1]}{part}{match[2]}" for part in "qkv"]
            if any(one not in together for one in of_joint):
                continue
            stored, values = f"{match[1]}qkv{match[2]}", np.concatenate([together[one] for one in of_joint])
        plain = values.ndim == 1 or stored.endswith(PLAIN)
        asked = quantization if isinstance(quantization, str) else quantization(stored)
        block = GGMLQuantizationType["F32" if plain else asked]
        if values.shape[-1] % GGML_QUANT_SIZES[block][0]:
            block = GGMLQuantizationType.F16
        raw = random_blocks(values, block) if block in SCALES else quantize(values, block)
        writer.add_tensor(stored, raw, raw_dtype=block)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_t5_gguf(model: Path, path: Path, quantization: str = "F32", metadata: dict[str, Any] | None = None) -> Path:
    """The same of an encoder-decoder model."""
    config = json.loads((model / "config.json").read_text())
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    left = config["vocab_size"] - len(vocabulary)
    types = [{"<pad>": 3, "</s>": 3, "<unk>": 2}.get(token, 1) for token, _ in vocabulary]
    keys: dict[str, Any] = {
        "t5.context_length": 512,
        "t5.embedding_length": config["d_model"],
        "t5.feed_forward_length": config["d_ff"],
        "t5.block_count": config["num_layers"],
        "t5.decoder_block_count": config["num_decoder_layers"],
        "t5.attention.head_count": config["num_heads"],
        "t5.attention.key_length": config["d_kv"],
        "t5.attention.value_length": config["d_kv"],
        "t5.attention.layer_norm_epsilon": config["layer_norm_epsilon"],
        "t5.attention.layer_norm_rms_epsilon": config["layer_norm_epsilon"],
        "t5.attention.relative_buckets_count": config["relative_attention_num_buckets"],
        "t5.decoder_start_token_id": config["decoder_start_token_id"],
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [token for token, _ in vocabulary] + [f"[PAD{number}]" for number in range(left)],
        "tokenizer.ggml.scores": [score for _, score in vocabulary] + [-10000.0] * left,
        "tokenizer.ggml.token_type": types + [5] * left,
        "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.ggml.remove_extra_whitespaces": "WhitespaceSplit" in json.dumps(tokenizer["pre_tokenizer"]),
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.padding_token_id": 0,
    }
    writer = GGUFWriter(path, "t5")
    for key, value in (keys | (metadata or {})).items():
        add(writer, key, value)
    names = get_tensor_name_map(MODEL_ARCH.T5, max(config["num_layers"], config["num_decoder_layers"]))
    for name, tensor in load_file(model / "model.safetensors").items():
        stored, values = names.get_name(name, (".weight",)), tensor.float().numpy()
        assert stored is not None, name
        block = GGMLQuantizationType["F32" if values.ndim == 1 or "rel_b" in stored else quantization]
        if values.shape[-1] % GGML_QUANT_SIZES[block][0]:
            block = GGMLQuantizationType.F16
        writer.add_tensor(stored, quantize(values, block), raw_dtype=block)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# Of models that end in a vector: the architecture, and the prefix of tensors under the head of a classifier.
VECTORS = {
    "bert": (MODEL_ARCH.BERT, "bert."),
    "roberta": (MODEL_ARCH.BERT, "roberta."),
    "xlm-roberta": (MODEL_ARCH.BERT, "roberta."),
    "modernbert": (MODEL_ARCH.MODERN_BERT, "model."),
    "distilbert": (MODEL_ARCH.BERT, "distilbert."),
}
POOLING_TYPES = {"mean": 1, "cls": 2, "last": 3}
LEFT_OUT = ("pooler.dense.", "cls.predictions.", "embeddings.position_ids")


def write_vector_gguf(
    model: Path, path: Path, quantization: str = "F32", metadata: dict[str, Any] | None = None
) -> Path:
    """The same of a model that ends in a vector."""
    pooling = read_pooling_config(model)
    assert pooling is not None
    config = json.loads((model / "config.json").read_text())
    kind = config["model_type"]
    classifies = pooling.task is ModelTask.CLASSIFY
    pools = {} if classifies else {"pooling_type": POOLING_TYPES[pooling.pooling]}
    if kind not in VECTORS:
        arch = "gemma-embedding" if kind == "gemma3_text" else MODEL_ARCH_NAMES[architecture(kind)]
        dense = {
            f"dense_{number}.weight": load_file(one.directory / "model.safetensors")["linear.weight"].numpy()
            for number, one in enumerate(pooling.dense, 2)
        }
        own: dict[str, Any] = {f"{arch}.{key}": value for key, value in pools.items()}
        if kind == "gemma3_text":
            theta = config["rope_parameters"]["sliding_attention"]["rope_theta"]
            own |= {f"{arch}.rope.freq_base_swa": theta, f"{arch}.attention.causal": False}
        return write_gguf(model, path, quantization, own | (metadata or {}), dense, name_of_architecture=arch)
    number, prefix = VECTORS[kind]
    arch, count = MODEL_ARCH_NAMES[number], config["num_hidden_layers"]
    offset = config["pad_token_id"] + 1 if kind in OFFSET_POSITIONS else 0
    keys: dict[str, Any] = {
        "block_count": count,
        "context_length": config["max_position_embeddings"] - offset,
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.layer_norm_epsilon": config.get("layer_norm_eps") or config["norm_eps"],
        "attention.causal": False,
        **pools,
    }
    if kind == "modernbert":
        rope = config["rope_parameters"]
        keys |= {
            "attention.sliding_window": config["local_attention"],
            "attention.sliding_window_pattern": config.get("global_attn_every_n_layers", 2),
            "rope.freq_base": rope["full_attention"]["rope_theta"],
            "rope.freq_base_swa": rope["sliding_attention"]["rope_theta"],
            "hidden_activation": config["hidden_activation"],
        }
    if classifies:
        keys |= {"classifier.output_labels": list(pooling.labels)}
        keys |= {"classifier.pooling_type": POOLING_TYPES[pooling.pooling]} if kind == "modernbert" else {}
    whole = {f"{arch}.{key}": value for key, value in keys.items()} | vector_tokenizer(model, kind)
    if kind != "modernbert":
        whole["tokenizer.ggml.token_type_count"] = config.get("type_vocab_size", 1)
    writer = GGUFWriter(path, arch)
    for key, value in (whole | (metadata or {})).items():
        add(writer, key, value)
    names = get_tensor_name_map(number, count)
    for name, tensor in load_file(model / "model.safetensors").items():
        bare = name.removeprefix(prefix)
        if bare.startswith(LEFT_OUT):
            continue
        if classifies and kind in ("bert", "modernbert"):
            bare = re.sub(r"^classifier\.", "classifier.out_proj.", bare)
        values = tensor.float().numpy()
        if "position_embeddings" in bare:
            values = values[offset:]
        stored = names.get_name(bare, (".weight", ".bias"))
        assert stored is not None, name
        plain = values.ndim == 1 or values.shape[-1] % 32 or stored.startswith(("token_types", "position"))
        block = GGMLQuantizationType["F32" if plain else quantization]
        writer.add_tensor(stored, quantize(np.ascontiguousarray(values), block), raw_dtype=block)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def vector_tokenizer(model: Path, kind: str) -> dict[str, Any]:
    """GGUF metadata of the tokenizer of an encoder: that of WordPiece for BERT, whatever the model's is."""
    if kind not in ("bert", "distilbert"):
        tokenizer = tokenizer_metadata(model)
        ends = {"tokenizer.ggml.seperator_token_id": tokenizer["tokenizer.ggml.eos_token_id"]}
        double = {"tokenizer.ggml.add_sep_token": kind != "modernbert"}
        return (
            tokenizer
            | ends
            | double
            | dict.fromkeys((f"tokenizer.ggml.add_{end}_token" for end in ("bos", "eos")), True)
        )
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    settings = json.loads((model / "tokenizer_config.json").read_text())
    special = {entry["content"]: entry["id"] for entry in tokenizer["added_tokens"]}
    vocabulary = tokenizer["model"]["vocab"] | special
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    normalizer = tokenizer["normalizer"] or {}
    given = {
        f"tokenizer.ggml.normalizer.{key}": normalizer[key]
        for key in ("lowercase", "strip_accents")
        if normalizer.get(key) is not None
    }
    ids = {
        f"tokenizer.ggml.{role}_token_id": special[settings[name]]
        for role, names in ROLES_OF_BERT.items()
        for name in names
        if settings.get(name) in special
    }
    return {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [
            token if token in special else token[2:] if token.startswith("##") else "\u2581" + token for token in tokens
        ],
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        **given,
        **ids,
    }


ROLES_OF_BERT = {
    **{"bos": ("bos_token", "cls_token"), "eos": ("eos_token", "sep_token"), "seperator": ("eos_token", "sep_token")},
    **{"cls": ("bos_token", "cls_token"), "padding": ("pad_token",), "unknown": ("pad_token", "unk_token")},
}


class VisionPart(NamedTuple):
    """A multimodal model_type, as llama.cpp's converter writes it."""

    projector: str
    text: tuple[str, str] = ("", "")  # the text part's model_type where it is alone, and its architecture in a file
    names: tuple[tuple[str, str], ...] = ()  # of tensors that the gguf package does not map
    tokens: dict[str, str] = {}  # of small models: published ones
    numbers: dict[str, str] = {}  # metadata keys: those of config.json that are not in each vision_config
    constants: dict[str, Any] = {}  # metadata that the converter writes whatever config.json has
    # What processors have by default.
    mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    deviation: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)


_QWEN_TOKENS = {"<image>": "<|image_pad|>", "<|video|>": "<|video_pad|>"}
_QWEN3_NAMES = (
    (r"merger\.linear_fc1", "mm.0"),
    (r"merger\.linear_fc2", "mm.2"),
    (r"merger\.norm", "v.post_ln"),
    (r"deepstack_merger_list\.(\d+)\.(?:linear_)?(\w+)", r"v.deepstack.\1.\2"),
)
_GELU = {"clip.use_gelu": True}
_EPSILON = "clip.vision.attention.layer_norm_epsilon"
_MERGED = {"clip.vision.spatial_merge_size": "spatial_merge_size"}
_QWEN2_SIZES = {_EPSILON: 1e-6, "clip.vision.image_size": 560}
_QWEN3 = VisionPart(
    *("qwen3vl_merger", ("qwen3", "qwen3vl"), _QWEN3_NAMES, _QWEN_TOKENS, _MERGED),
    constants={**_GELU, _EPSILON: 1e-6},
)
_LLAVA_NAMES = (
    (r"multi_modal_projector\.linear_1", "mm.0"),
    (r"multi_modal_projector\.linear_2", "mm.2"),
    ("image_newline", "model.image_newline"),
)
_PIXTRAL_TOKENS = {"<image>": "[IMG]", "<row>": "[IMG_BREAK]", "<|vision_end|>": "[IMG_END]"}
_GEMMA4_TOKENS = {
    **{"<image>": "<|image|>", "<|vision_start|>": "<|image>", "<|vision_end|>": "<image|>", "<row>": "<|audio|>"},
    **{"<fake_token_around_image>": "<|audio>", "<global-img>": "<audio|>"},
}
_GLM_TOKENS = {
    **{"<image>": "<|image|>", "<|vision_start|>": "<|begin_of_image|>", "<|vision_end|>": "<|end_of_image|>"},
    **{"<fake_token_around_image>": "<|begin_of_video|>", "<end_of_utterance>": "<|end_of_video|>"},
}
_HALF, _ZERO, _ONE = (0.5, 0.5, 0.5), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
_POOLED = {"clip.vision.projector.scale_factor": "pooling_kernel_size"}
VISION_PARTS = {
    "gemma3": VisionPart("gemma3", constants=_GELU, mean=_HALF, deviation=_HALF),
    "gemma4": VisionPart(
        *("gemma4v", ("", ""), (), _GEMMA4_TOKENS, _POOLED, {"clip.vision.image_size": 224}, _ZERO, _ONE)
    ),
    "gemma4_unified": VisionPart(
        "gemma4uv",
        ("gemma4_text", ""),
        (
            (r"vision_embedder\.patch_dense", "v.patch_embd"),
            (r"vision_embedder\.patch_ln(\d)", r"v.patch_norm.\1"),
            (r"vision_embedder\.pos_norm", "v.patch_norm.3"),
            (r"vision_embedder\.pos_embedding", "v.position_embd.weight"),
        ),
        _GEMMA4_TOKENS,
        {**_POOLED, "clip.vision.embedding_length": "mm_embed_dim"},
        mean=_ZERO,
        deviation=_ONE,
    ),
    "glm4v": VisionPart("glm4v", ("glm4", ""), tokens=_GLM_TOKENS),
    "glm4v_moe": VisionPart("glm4v", ("glm4_moe", ""), tokens=_GLM_TOKENS),
    "idefics3": VisionPart(
        "idefics3",
        numbers={"clip.vision.projector.scale_factor": "scale_factor"},
        constants=_GELU,
        mean=_HALF,
        deviation=_HALF,
    ),
    "internvl": VisionPart(
        "internvl",
        names=(
            (r"multi_modal_projector\.layer_norm", "mm.model.mlp.0"),
            (r"multi_modal_projector\.linear_1", "mm.model.mlp.1"),
            (r"multi_modal_projector\.linear_2", "mm.model.mlp.3"),
        ),
        tokens={"<image>": "<IMG_CONTEXT>", "<|vision_start|>": "<img>", "<|vision_end|>": "</img>"},
        constants={"clip.vision.projector.scale_factor": 2},
    ),
    "lfm2_vl": VisionPart(
        "lfm2",
        tokens={
            **{"<|vision_start|>": "<|image_start|>", "<|vision_end|>": "<|image_end|>"},
            "<global-img>": "<|img_thumbnail|>",
        },
        numbers={"clip.vision.projector.scale_factor": "downsample_factor"},
        constants={**_GELU, "clip.vision.image_size": 256},
        mean=_HALF,
        deviation=_HALF,
    ),
    "llama4": VisionPart(
        "llama4",
        names=((r"multi_modal_projector\.linear_1", "mm.model.fc"),),
        numbers={_EPSILON: "norm_eps"},
        mean=_HALF,
        deviation=_HALF,
    ),
    "llava": VisionPart("mlp", names=_LLAVA_NAMES),
    "llava_next": VisionPart("mlp", names=_LLAVA_NAMES),
    "mistral3": VisionPart(*("pixtral", ("llama", "mistral3"), (), _PIXTRAL_TOKENS, _MERGED, {_EPSILON: 1e-5})),
    "pixtral": VisionPart("pixtral", ("llama", ""), tokens=_PIXTRAL_TOKENS, constants={_EPSILON: 1e-5}),
    "qwen2_5_vl": VisionPart("qwen2.5vl_merger", ("qwen2", "qwen2vl"), tokens=_QWEN_TOKENS, constants=_QWEN2_SIZES),
    "qwen2_vl": VisionPart("qwen2vl_merger", ("qwen2", "qwen2vl"), tokens=_QWEN_TOKENS, constants=_QWEN2_SIZES),
    "qwen3_5": _QWEN3._replace(text=("", "")),
    "qwen3_5_moe": _QWEN3._replace(text=("", "")),
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3._replace(text=("qwen3_moe", "qwen3vlmoe")),
}
# Metadata keys: names in a vision_config, of which one is there.
VISION_NUMBERS = {
    "image_size": ("image_size",),
    "patch_size": ("patch_size",),
    "embedding_length": ("embed_dim", "hidden_size"),
    "feed_forward_length": ("intermediate_size", "hidden_size"),
    "block_count": ("num_hidden_layers", "depth"),
    "attention.head_count": ("num_attention_heads", "num_heads"),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "rms_norm_eps"),
}


def write_gguf_pair(
    model: Path,
    path: Path,
    mmproj: Path,
    metadata: dict[str, Any] | None = None,
    *,
    swapped: bool = False,
    half: bool = False,
) -> None:
    """Writes a multimodal model as the file of its text part and that of its vision part, whose keys `metadata`
    overrides. `swapped`: the two matrices of an MLP have each other's names, as they once had. `half`: matrices of the
    text part are bfloat16, and those of the vision part float16, as published ones are; else float32."""
    config, tensors = json.loads((model / "config.json").read_text()), load_file(model / "model.safetensors")
    vision, images = config["vision_config"], json.loads((model / "preprocessor_config.json").read_text())
    kind = "pixtral" if vision.get("model_type") == "pixtral" and config["model_type"] == "llava" else ""
    part = VISION_PARTS[kind or config["model_type"]]
    text = {name: one for name, one in tensors.items() if name.startswith(OF_DECODER) or text_name(name) != name}
    with TemporaryDirectory() as scratch:
        directory = Path(scratch)
        of_text = {"hidden_size_per_layer_input": 0} | config["text_config"]
        of_text["model_type"] = part.text[0] or of_text["model_type"]
        sections = (of_text.get("rope_parameters") or {}).get("mrope_section")
        plain = {text_name(name): one for name, one in text.items()}
        if sections and of_text["model_type"] == "glm4":
            plain = {name: sorted_pairs(one, name, of_text) for name, one in plain.items()}
        if of_text["model_type"] == "qwen3_moe":
            plain = {name: one for joint, tensor in plain.items() for name, one in of_experts(joint, tensor)}
        save_file(plain, directory / "model.safetensors")
        (directory / "config.json").write_text(json.dumps(of_text))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            given = (model / name).read_text()
            for old, new in part.tokens.items():
                given = re.sub(re.escape(json.dumps(old)[1:-1]), new, given)
            (directory / name).write_text(given)
        arch = part.text[1] or MODEL_ARCH_NAMES[architecture(of_text["model_type"])]
        more: dict[str, Any] = {f"{arch}.rope.dimension_sections": [*sections, 0]} if sections else {}
        if deeper := vision.get("deepstack_visual_indexes"):
            more[f"{arch}.n_deepstack_layers"] = len(deeper)
        if arch == "gemma4":
            more["tokenizer.ggml.padding_token_id"] = of_text["pad_token_id"]
        write_gguf(directory, path, "BF16" if half else "F32", more, name_of_architecture=part.text[1])
    found = {key: next((vision[one] for one in names if one in vision), 0) for key, names in VISION_NUMBERS.items()}
    keys: dict[str, Any] = {
        f"clip.vision.{key}": one[0] if isinstance(one, list) else one for key, one in found.items() if one is not None
    }
    keys["clip.vision.projection_dim"] = config["text_config"]["hidden_size"]
    keys |= {key: config.get(name, vision.get(name)) for key, name in part.numbers.items()}
    keys |= {"general.architecture": None, "clip.has_vision_encoder": True, "clip.projector_type": part.projector}
    keys["clip.vision.image_mean"] = images.get("image_mean", [*part.mean])
    keys["clip.vision.image_std"] = images.get("image_std", [*part.deviation])
    if "merge_size" in images:  # as llama.cpp reads them
        keys["clip.vision.image_min_pixels"] = images["size"]["shortest_edge"]
        keys["clip.vision.image_max_pixels"] = images["size"]["longest_edge"]
    keys |= {f"clip.use_{act}": True for act in ("gelu", "silu") if act == vision.get("hidden_act")}
    if config["model_type"] == "gemma3":
        side = int(config["mm_tokens_per_image"] ** 0.5)
        keys["clip.vision.projector.scale_factor"] = vision["image_size"] // vision["patch_size"] // side
    if config["model_type"] == "idefics3":
        keys["clip.vision.preproc_image_size"] = images["size"]["longest_edge"]
    if config["model_type"] == "qwen2_vl":
        keys["clip.vision.feed_forward_length"] = vision["embed_dim"] * vision["mlp_ratio"]
    if "fullatt_block_indexes" in vision:
        keys["clip.vision.n_wa_pattern"] = vision["fullatt_block_indexes"][0] + 1
    if indexes := vision.get("deepstack_visual_indexes"):
        keys["clip.vision.is_deepstack_layers"] = [layer in indexes for layer in range(vision["depth"])]
    if "num_position_embeddings" in vision:
        keys["clip.vision.image_size"] = int(vision["num_position_embeddings"] ** 0.5) * vision["patch_size"]
    if part.projector == "mlp":
        keys["clip.vision.block_count"] += config["vision_feature_layer"] + 1
    if pairs := config.get("image_grid_pinpoints"):
        keys["clip.vision.image_grid_pinpoints"] = [side for pair in pairs for side in pair]
    if part.projector == "internvl":
        keys["clip.vision.preproc_max_tiles"] = images["max_patches"]
    keys.setdefault("clip.vision.image_size", 224)  # as the converter has it where it means nothing
    keys["clip.vision.image_size"] = keys["clip.vision.image_size"] or 224
    if part.projector == "llama4":
        keys["clip.vision.projector.scale_factor"] = round(1 / vision["pixel_shuffle_ratio"])
    keys |= part.constants
    writer = GGUFWriter(mmproj, "clip")
    for key, value in (keys | (metadata or {})).items():
        add(writer, key, value)
    if part.projector == "pixtral":  # the end of a row of patches, of which llama.cpp makes a part of the image
        added = json.loads((model / "tokenizer.json").read_text())["added_tokens"]
        row = next(one["id"] for one in added if one["content"] == "<row>")
        writer.add_tensor("v.token_embd.img_break", plain["model.embed_tokens.weight"][row].float().numpy())
    for name, values in joined({name: one for name, one in tensors.items() if name not in text}).items():
        if ".head." in name or (part.projector == "mlp" and "post_layernorm" in name):
            continue
        if swapped:
            name = re.sub("mlp.fc([12])", lambda found: f"mlp.fc{3 - int(found[1])}", name)
        for stored, one in stored_vision(part, name, values, vision):
            layer = re.match(r"v\.blk\.(\d+)", stored)
            if layer is None or int(layer[1]) < keys["clip.vision.block_count"]:
                one = np.ascontiguousarray(one)
                matrix = one.ndim > 1 and not stored.startswith("v.position_embd")
                writer.add_tensor(stored, one.astype(np.float16) if half and matrix else one)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def stored_vision(
    part: VisionPart, name: str, values: np.ndarray, vision: dict[str, Any]
) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a file that a tensor of a vision part becomes."""
    stored = vision_tensor_name(part, name, vision)
    if values.ndim == 5:  # of two frames
        yield from ((stored, values[:, :, 0]), (f"{stored}.1", values[:, :, 1]))
        return
    if "attn_qkv" in stored and part.projector.startswith("qwen2"):
        yield from ((stored.replace("qkv", one), rows) for one, rows in zip("qkv", np.split(values, 3), strict=True))
        return
    if "soft_emb_norm" in name:
        values = values + 1
    if part.projector == "pixtral" and re.search("attn_[qk]", stored):
        values = permute(values, vision["num_attention_heads"])
    side = vision["patch_size"]
    if part.projector in ("gemma4v", "lfm2") and stored == "v.patch_embd.weight":
        values = values.reshape(-1, side, side, 3).transpose(0, 3, 1, 2)
    if part.projector == "gemma4uv" and stored.startswith(("v.patch_embd.weight", "v.patch_norm.1.")):
        side *= vision["pooling_kernel_size"]
        values = values.reshape(-1, side, side, 3).transpose(0, 3, 1, 2).reshape(values.shape)
    if part.projector == "gemma4uv" and stored.startswith("v.position"):
        values = values.transpose(1, 0, 2)
    yield stored, values.squeeze() if values.ndim == 1 or values.shape[0] == 1 else values


def vision_tensor_name(part: VisionPart, name: str, vision: dict[str, Any]) -> str:
    """The name in a file."""
    plain = name.removeprefix("model.").removeprefix("visual.")
    for pattern, own in part.names:
        if match := re.fullmatch(rf"{pattern}(\.weight|\.bias)?", plain):
            stored = match.expand(own) + (match[match.re.groups] or "")
            deeper = re.match(r"v\.deepstack\.(\d+)", stored)
            if deeper is None:
                return stored
            return stored.replace(deeper[1], str(vision["deepstack_visual_indexes"][int(deeper[1])]), 1)
    names = _vision_names(1 + vision.get("depth", vision.get("num_hidden_layers", 0)))
    whole = name.replace("_projection_weight", "_projection.weight")
    others = (
        *(whole, whole.removeprefix("model."), whole.replace("tower.", "tower.vision_model.")),
        whole.removeprefix("model.").replace("tower.", "tower.vision_model."),
        f"model.{whole}",
        whole.replace("model.vision_tower.encoder.", "vision_model.model.").replace(".linear.", "."),
    )
    mapped = next((found for one in others if (found := names.get_name(one, (".weight", ".bias")))), None)
    assert mapped is not None, name
    ends = ("weight", "bias", "class_embd", "std_bias", "std_scale")
    return str(mapped) if mapped.endswith(ends) else f"{mapped}.weight"


@cache
def _vision_names(blocks: int) -> TensorNameMap:
    return get_tensor_name_map(MODEL_ARCH.MMPROJ, blocks)


def of_experts(joint: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The matrices of each expert; those of Qwen3-VL are one tensor, with the inputs first."""
    stem, _, end = joint.rpartition(".experts.")
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(end if stem else "")
    if parts is None:
        yield joint, tensor
        return
    for number, expert in enumerate(tensor.transpose(1, 2)):
        for part, rows in zip(parts, expert.chunk(len(parts)), strict=True):
            yield f"{stem}.experts.{number}.{part}.weight", rows.contiguous()


def sorted_pairs(tensor: torch.Tensor, name: str, config: dict[str, Any]) -> torch.Tensor:
    """With the first rows of rotary pairs before the second ones, as llama.cpp rotates with three axes."""
    if "q_proj" not in name and "k_proj" not in name:
        return tensor
    heads = tensor.reshape(-1, config["head_dim"], *tensor.shape[1:])
    turned = int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"])
    rows = heads[:, :turned]
    return torch.cat((rows[:, ::2], rows[:, 1::2], heads[:, turned:]), 1).reshape(tensor.shape).contiguous()


def add(writer: GGUFWriter, key: str, value: Any) -> None:
    """Adds a metadata value with the type that it has."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)


def tokenizer_metadata(model: Path) -> dict[str, Any]:
    """GGUF metadata of a model's tokenizer."""
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    settings = json.loads((model / "tokenizer_config.json").read_text())
    vocabulary = tokenizer["model"]["vocab"] | {one["content"]: one["id"] for one in tokenizer["added_tokens"]}
    special = {entry["content"] for entry in tokenizer["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    splits = json.dumps(tokenizer["pre_tokenizer"])
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2" if "Split" in splits else "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in tokenizer["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": vocabulary[settings["bos_token"]],
        "tokenizer.ggml.eos_token_id": vocabulary[settings["eos_token"]],
        "tokenizer.ggml.padding_token_id": vocabulary[settings["pad_token"]],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": settings["chat_template"],
    }


def main() -> None:
    """Parses the command line, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a model directory")
    parser.add_argument("file", type=Path, help="the file to write")
    parser.add_argument("--format", default="BF16", choices=("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"))
    arguments = parser.parse_args()
    write_gguf(arguments.model, arguments.file, arguments.format)


if __name__ == "__main__":
    main()
