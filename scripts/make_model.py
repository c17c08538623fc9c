#!/usr/bin/env python
"""Makes a small model with random weights, a tokenizer and a chat template: an ordinary model directory.

    scripts/make_model.py llama DIR
    scripts/make_model.py qwen2 DIR --shape qwen2.5-0.5b --seed 3

The weights come from transformers' classes, so transformers can load the model. Their scale separates greedy choices
well, biases and norms are not neutral, and the tokenizer splits emoji and CJK characters into several tokens. The same
arguments make the same files.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

DEEPSEEK_EXPERTS = {
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.8,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
}

LATENT = {"kv_lora_rank": 48, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
LATENT_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 32,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
QWEN_DELTA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 20,
}
QWEN_DELTA_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
MAMBA2 = {
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 20,
    "time_step_limit": (0.3, 2.0),
}

SLIDING, FULL = "sliding_attention", "full_attention"

# The transformers configuration of each kind, and settings of its tiny model besides the shape.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "ministral3": (
        "Ministral3Config",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 64.0,
                "original_max_position_embeddings": 32,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.3,
            }
        },
    ),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "phi3": ("Phi3Config", {"partial_rotary_factor": 0.75, "sliding_window": 40}),
    "granite": (
        "GraniteConfig",
        {
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.6,
            "logits_scaling": 1.7,
            "attention_bias": True,
        },
    ),
    "gemma": ("GemmaConfig", {}),
    "gemma2": (
        "Gemma2Config",
        {
            "sliding_window": 40,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 5.0,
            "query_pre_attn_scalar": 24,
        },
    ),
    "gemma3_text": ("Gemma3TextConfig", {"sliding_window": 40, "sliding_window_pattern": 3}),
    "gemma3n_text": (
        "Gemma3nTextConfig",
        {
            "num_hidden_layers": 5,
            "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL],
            "sliding_window": 40,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": 500,
            "activation_sparsity_pattern": [0.8, 0.0, 0.95, 0.0, 0.0],
            "altup_active_idx": 1,
            "altup_num_inputs": 3,
            "laurel_rank": 8,
        },
    ),
    "gemma4_text": (
        "Gemma4TextConfig",
        {
            "num_hidden_layers": 5,
            "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL],
            "sliding_window": 40,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": 512,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 3,
            "moe_intermediate_size": 32,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma4_unified_text": (
        "Gemma4UnifiedTextConfig",
        {
            "layer_types": [SLIDING, SLIDING, FULL],
            "sliding_window": 40,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
        },
    ),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": ("Olmo3Config", {"sliding_window": 40}),
    "exaone4": ("Exaone4Config", {"sliding_window": 40, "sliding_window_pattern": 2}),
    "seed_oss": ("SeedOssConfig", {}),
    "ernie4_5": ("Ernie4_5Config", {"use_bias": True}),
    "helium": ("HeliumConfig", {}),
    "hunyuan_v1_dense": ("HunYuanDenseV1Config", {}),
    "glm": ("GlmConfig", {}),
    "glm4": ("Glm4Config", {}),
    "stablelm": ("StableLmConfig", {"use_qkv_bias": True}),
    "cohere2": ("Cohere2Config", {"sliding_window": 40, "sliding_window_pattern": 2, "logit_scale": 0.4}),
    "smollm3": ("SmolLM3Config", {"no_rope_layer_interval": 2}),
    "cohere": ("CohereConfig", {"use_qk_norm": True, "logit_scale": 0.4}),
    "apertus": (
        "ApertusConfig",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 12000000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            }
        },
    ),
    "arcee": ("ArceeConfig", {"mlp_bias": True}),
    "nemotron": ("NemotronConfig", {"attention_bias": True}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": 40}),
    "phi": ("PhiConfig", {}),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "gptj": ("GPTJConfig", {"rotary_dim": 8}),
    "falcon": ("FalconConfig", {"new_decoder_architecture": True}),
    "bloom": ("BloomConfig", {}),
    "mpt": ("MptConfig", {}),
    "gpt2": ("GPT2Config", {}),
    "gpt_bigcode": ("GPTBigCodeConfig", {}),
    "opt": ("OPTConfig", {}),
    "dbrx": ("DbrxConfig", {}),
    "phimoe": ("PhimoeConfig", {"num_local_experts": 6, "attention_bias": True, "lm_head_bias": True}),
    "llama4_text": (
        "Llama4TextConfig",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "intermediate_size": 40,
            "intermediate_size_mlp": 100,
            "moe_layers": [0, 2],
            "no_rope_layers": [1, 0, 1],
            "attention_chunk_size": 40,
            "floor_scale": 30,
            "attn_scale": 0.3,
        },
    ),
    "minimax_m2": (
        "MiniMaxM2Config",
        {"num_local_experts": 6, "num_experts_per_tok": 3, "rope_parameters": {"partial_rotary_factor": 0.5}},
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "mlp_only_layers": [1],
        },
    ),
    "olmoe": ("OlmoeConfig", {"num_experts": 6, "num_experts_per_tok": 3}),
    "glm4_moe": (
        "Glm4MoeConfig",
        {**DEEPSEEK_EXPERTS, "n_routed_experts": 8, "use_qk_norm": True, "attention_bias": True},
    ),
    "dots1": ("Dots1Config", {**DEEPSEEK_EXPERTS, "n_routed_experts": 8, "sliding_window": None}),
    "exaone_moe": (
        "ExaoneMoeConfig",
        {
            **{key: value for key, value in DEEPSEEK_EXPERTS.items() if key != "n_shared_experts"},
            "num_experts": 8,
            "sliding_window": 40,
            "sliding_window_pattern": 2,
        },
    ),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        {"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 32, "moe_num_shared_experts": 2, "use_bias": False},
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        {
            **DEEPSEEK_EXPERTS,
            **LATENT,
            "n_routed_experts": 8,
            "q_lora_rank": None,
            "topk_method": "group_limited_greedy",
            "norm_topk_prob": False,
            "rope_parameters": LATENT_YARN,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {**DEEPSEEK_EXPERTS, **LATENT, "n_routed_experts": 8, "q_lora_rank": 24, "rope_parameters": LATENT_YARN},
    ),
    "glm4_moe_lite": (
        "Glm4MoeLiteConfig",
        {
            **{key: value for key, value in DEEPSEEK_EXPERTS.items() if key != "first_k_dense_replace"},
            **LATENT,
            "n_routed_experts": 8,
            "q_lora_rank": 24,
            "attention_bias": True,
        },
    ),
    "mistral4": (
        "Mistral4Config",
        {
            **DEEPSEEK_EXPERTS,
            **LATENT,
            "n_routed_experts": 8,
            "q_lora_rank": 24,
            "rope_parameters": LATENT_YARN | {"mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3},
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 40,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "granitemoe": (
        "GraniteMoeConfig",
        {
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.6,
            "logits_scaling": 1.7,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
        },
    ),
    "hunyuan_v1_moe": ("HunYuanMoEV1Config", {"num_experts": 6, "moe_topk": [3, 3, 3]}),
    "lfm2": ("Lfm2Config", {"full_attn_idxs": [1], "block_multiple_of": 20}),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "routed_scaling_factor": 1.4,
        },
    ),
    "qwen3_next": ("Qwen3NextConfig", {**QWEN_DELTA, **QWEN_DELTA_EXPERTS, "mlp_only_layers": [1]}),
    "qwen3_5_text": ("Qwen3_5TextConfig", QWEN_DELTA),
    "qwen3_5_moe_text": ("Qwen3_5MoeTextConfig", {**QWEN_DELTA, **QWEN_DELTA_EXPERTS}),
    "olmo_hybrid": (
        "OlmoHybridConfig",
        {
            **QWEN_DELTA,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 20,  # as many keys as values: transformers saves thirds of a convolution
        },
    ),
    "mamba2": (
        "Mamba2Config",
        {"num_heads": 4, "n_groups": 2, "state_size": 20, "time_step_limit": (0.3, 2.0), "use_bias": True},
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe"],
            "mamba_num_heads": 6,
            "mamba_head_dim": 20,
            "n_groups": 2,
            "ssm_state_size": 20,
            "time_step_min": 0.3,
            "mlp_bias": False,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 48,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.8,
        },
    ),
    "bamba": ("BambaConfig", {**MAMBA2, "attn_layer_indices": [1]}),
    "falcon_h1": (
        "FalconH1Config",
        {
            **MAMBA2,
            "mamba_d_ssm": 120,
            "mamba_rms_norm": True,
            "lm_head_multiplier": 0.7,
            "embedding_multiplier": 1.6,
            "mlp_multipliers": [0.8, 1.3],
            "key_multiplier": 0.6,
            "attention_in_multiplier": 1.2,
            "attention_out_multiplier": 0.9,
            "ssm_in_multiplier": 1.1,
            "ssm_out_multiplier": 0.7,
            "ssm_multipliers": [0.8, 1.3, 0.9, 1.2, 0.7],
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {
            **MAMBA2,
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.6,
            "logits_scaling": 1.7,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "shared_intermediate_size": 48,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "sliding_window": None}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
        },
    ),
    "persimmon": ("PersimmonConfig", {}),  # runs through transformers
}
# Where it need not be hidden / heads.
HEAD_DIM = (
    *("qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text"),
    *("gemma4_unified_text", "qwen3_moe"),
    *("gpt_oss", "seed_oss", "ernie4_5", "glm", "glm4", "hunyuan_v1_dense", "hunyuan_v1_moe", "ministral3"),
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "llama4_text", "nemotron_h"),
)
KINDS = tuple(CONFIGS)
# Names that configurations have for those of others.
GPT_NAMES = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
MPT_NAMES = {
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "max_position_embeddings": "max_seq_len",
}
OTHER_NAMES = {
    "dbrx": MPT_NAMES,
    "gptj": GPT_NAMES,
    "gpt2": GPT_NAMES,
    "falcon": {"num_key_value_heads": "num_kv_heads", "intermediate_size": "ffn_hidden_size"},
    "bloom": {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "max_position_embeddings": "seq_length"},
    "mpt": MPT_NAMES,
    "gpt_bigcode": GPT_NAMES,
    "opt": {"intermediate_size": "ffn_dim"},
}

# Norms that scale by 1 + weight. Twice as large activations would leave float32 too few digits for 1e-4 of a logprob.
CENTRED_NORMS = ("layernorm.weight", "model.norm.weight", "q_norm.weight", "k_norm.weight")

# Common to the shapes of known models.
KNOWN: dict[str, Any] = {"vocab": 32000, "tie": True, "dtype": "bfloat16"}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {},
    "tiny2": {"hidden": 64, "layers": 2},
    "two-layer": KNOWN | {"hidden": 64, "layers": 2, "heads": 2, "kv_heads": 2, "intermediate": 256},
    "smollm2-135m": KNOWN | {"hidden": 576, "layers": 30, "heads": 9, "kv_heads": 3, "intermediate": 1536},
    "qwen2.5-0.5b": KNOWN | {"hidden": 896, "layers": 24, "heads": 14, "kv_heads": 2, "intermediate": 4864},
    "llama-3.2-1b": KNOWN | {"hidden": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "intermediate": 8192},
    "qwen2.5-1.5b": KNOWN | {"hidden": 1536, "layers": 28, "heads": 12, "kv_heads": 2, "intermediate": 8960},
}

SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|endoftext|>")

QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}<|eos|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)

TEXT = """
The capital of France is Paris, and the capital of Japan is Tokyo. A river runs through the city, and in the evening
people walk along the water. What is the answer to the question? The answer is that nobody knows, but everyone asks.
She said: "It's not what you think; we'll see, won't we?" In 1984 there were 365 days, and 3.14159 is nearly pi.
def main(argument: int = 0) -> None:\n    return [value * 2 for value in range(argument)]\n
Le garçon naïf a mangé une crème brûlée à la fête de Noël. Die Straße ist größer als früher. El niño comió piñas.
Привет, мир! Как дела? Всё хорошо, спасибо. 今天天气很好，我们去公园散步。日本語の文章もあります。 안녕하세요 세계.
Emoji: 😀 😃 🎉 🚀 👍🏽 👨‍👩‍👧‍👦 🇫🇷 ❤️ and symbols: → ≤ ∑ € ½ …
"""


def training_text(vocab: int) -> list[str]:
    """The text that the tokenizer is trained on: TEXT, and made-up words enough for large vocabularies."""
    if vocab <= 600:
        return [TEXT]
    draw = random.Random(0)
    syllables = [
        c + v + e for c in "bcdfghklmnprstvwz" for v in ("a", "e", "i", "o", "u", "ai", "ou") for e in "lmnrst "
    ]
    words = ["".join(draw.choices(syllables, k=draw.randint(1, 3))).strip() for _ in range(vocab * 2)]
    return [TEXT, *(" ".join(draw.choices(words, k=50)) for _ in range(vocab // 8))]


def make_tokenizer(kind: str, directory: Path, vocab: int, context: int) -> None:
    """Trains a byte-level BPE of `vocab` ids (special tokens first) and writes it with its chat template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if kind == "qwen2":  # transformers overrides the pre-tokenizer of this kind
        split = pre_tokenizers.Split(Regex(QWEN2_SPLIT), "isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_text(vocab), trainer)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|bos|>",
            "eos_token": "<|eos|>",
            "pad_token": "<|pad|>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": context,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def make_config(kind: str, shape: dict[str, Any], more: dict[str, Any]) -> Any:
    """The transformers configuration of a kind."""
    import transformers

    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    arguments: dict[str, Any] = dict(
        vocab_size=shape["vocab"],
        hidden_size=shape["hidden"],
        intermediate_size=shape["intermediate"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        max_position_embeddings=shape["context"],
        tie_word_embeddings=shape["tie"],
        **ids,
    )
    if kind in HEAD_DIM or shape["head_dim"]:
        arguments["head_dim"] = shape["head_dim"] or 2 * shape["hidden"] // shape["heads"]
    if kind == "helium":  # its class would set 128, and expect what it does not check
        arguments["head_dim"] = shape["hidden"] // shape["heads"]
    if kind in ("gemma4_text", "gemma4_unified_text"):
        arguments["global_head_dim"] = 2 * arguments["head_dim"]
    name, options = CONFIGS[kind]
    if "kv_lora_rank" in options:
        arguments["num_key_value_heads"] = shape["heads"]
    if kind in ("gpt_neox", "gptj", "gpt2", "gpt_bigcode", "opt", "bloom", "mpt", "persimmon"):
        del arguments["num_key_value_heads"]
    if kind == "dbrx":
        arguments["tie_word_embeddings"] = False  # all that its class knows
        heads, inner = arguments.pop("num_key_value_heads"), arguments.pop("intermediate_size")
        arguments["attn_config"] = {"clip_qkv": 1.2, "kv_n_heads": heads, "rope_theta": 500000.0}
        experts = {"moe_num_experts": 6, "moe_top_k": 3}
        arguments["ffn_config"] = {"hidden_size": shape["hidden"], "ffn_hidden_size": inner, **experts}
    if kind in ("bloom", "mpt"):  # always four times as wide
        del arguments["intermediate_size"]
    if kind == "mamba2":  # whose class wants to know
        arguments["head_dim"] = 2 * shape["hidden"] // options["num_heads"]
    if kind == "opt":
        arguments["word_embed_proj_dim"] = shape["hidden"]
    arguments |= {own: arguments.pop(name) for name, own in OTHER_NAMES.get(kind, {}).items()}
    return getattr(transformers, name)(**arguments | options | more)


def fill(model: Any, seed: int) -> None:
    """Randomizes every weight: matrices preserve the scale of activations, biases and norms are not neutral."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    centred = model.config.get_text_config().model_type.startswith(("qwen3_next", "qwen3_5"))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float32)
            if name.endswith(("alpha_p", "alpha_n")):  # of xielu
                value = 0.5 * noise
            elif weight.ndim == 1:
                around = 0 if name.endswith("bias") or (name.endswith(CENTRED_NORMS) and centred) else 1
                around = -2 if name.endswith("A_log") else around  # a state remembers ten tokens
                value = around + 0.1 * noise
            elif "embed" in name or "wte" in name or "wpe" in name:
                value = 0.4 * noise
            elif "lm_head" in name:
                value = noise * 3 / weight.shape[-1] ** 0.5
            else:
                fan_in = weight.shape[0] if "c_" in name else weight.shape[-1]  # GPT-2's Conv1D is transposed
                value = noise / fan_in**0.5
                if name.endswith("gate_up_proj_bias"):  # of gpt-oss, some of whose activations are clamped
                    value = 4 * noise
                if name.endswith(("o_proj.weight", "down_proj.weight", "c_proj.weight")):
                    value *= 2  # layers outweigh the embedding, or a tied head would repeat its input forever
            weight.copy_(value)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
            if name.endswith("layer_scalar"):
                buffer.copy_(0.8 + 0.2 * torch.rand(buffer.shape, generator=generator))


def make_model(
    kind: str,
    directory: Path | str,
    *,
    seed: int = 0,
    hidden: int = 64,
    layers: int = 3,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    intermediate: int | None = None,
    vocab: int = 512,
    context: int = 2048,
    dtype: str = "float32",
    tie: bool = False,
    more: tuple[tuple[str, Any], ...] = (),
) -> Path:
    """Writes a model of `kind` (one of KINDS) to `directory` and returns it.

    `more` are configuration entries that override those of the kind. `vocab` is at least 300; the tokenizer has
    exactly as many ids as the embedding unless its text runs out of pairs.
    """
    import torch
    import transformers

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    shape = {
        "hidden": hidden,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate": intermediate or 2 * hidden,
        "vocab": vocab,
        "context": context,
        "tie": tie,
    }
    config = make_config(kind, shape, dict(more))
    config.dtype = getattr(torch, dtype)
    if kind == "mistral4":  # transformers has no Auto class for it
        model = transformers.Mistral4ForCausalLM(config).to(config.dtype)
    else:
        model = transformers.AutoModelForCausalLM.from_config(config).to(config.dtype)
    fill(model, seed)
    model.generation_config.do_sample = False
    model.save_pretrained(directory)
    make_tokenizer(kind, directory, vocab, context)
    return directory


def write_json(path: Path, value: Any) -> None:
    """Writes indented JSON."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def main() -> None:
    """Parses the command line, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("directory", type=Path)
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), default="tiny", help="a named shape; other options win over it"
    )
    for name in ("seed", "hidden", "layers", "heads", "kv-heads", "head-dim", "intermediate", "vocab", "context"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--tie", action="store_true", default=None, help="share the embedding with the output layer")
    arguments = vars(parser.parse_args())
    kind, directory = arguments.pop("kind"), arguments.pop("directory")
    import transformers

    transformers.utils.logging.disable_progress_bar()
    options = SHAPES[arguments.pop("shape")] | {k: v for k, v in arguments.items() if v is not None}
    make_model(kind, directory, **options)


if __name__ == "__main__":
    main()
