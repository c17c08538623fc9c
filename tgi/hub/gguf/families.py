"""What each architecture of GGUF is in Hugging Face's terms, as data: names of tensors, metadata, biases.

As llama.cpp's convert_hf_to_gguf.py writes them, and as its model code reads what that leaves out.
"""

from dataclasses import dataclass, field

# Sizes of tensors, by name: Q of all query heads, K of all key heads, S of both and the values, D of one head; H of the
# hidden state; I of the MLP, 2I of its two joint matrices; E experts, M of one expert.
Block = tuple[str, str, tuple[str, ...]]  # name in the file, name in the result, shape

_ATTENTION: tuple[Block, ...] = (
    ("attn_q", "self_attn.q_proj", ("Q", "H")),
    ("attn_k", "self_attn.k_proj", ("K", "H")),
    ("attn_v", "self_attn.v_proj", ("K", "H")),
    ("attn_output", "self_attn.o_proj", ("H", "Q")),
)
_MLP: tuple[Block, ...] = (
    ("ffn_gate", "mlp.gate_proj", ("I", "H")),
    ("ffn_up", "mlp.up_proj", ("I", "H")),
    ("ffn_down", "mlp.down_proj", ("H", "I")),
)
_NORMS: tuple[Block, ...] = (
    ("attn_norm", "input_layernorm", ("H",)),
    ("ffn_norm", "post_attention_layernorm", ("H",)),
)
_HEAD_NORMS: tuple[Block, ...] = (
    ("attn_q_norm", "self_attn.q_norm", ("D",)),
    ("attn_k_norm", "self_attn.k_norm", ("D",)),
)
_FOUR_NORMS: tuple[Block, ...] = (
    ("attn_norm", "input_layernorm", ("H",)),
    ("post_attention_norm", "post_attention_layernorm", ("H",)),
    ("ffn_norm", "pre_feedforward_layernorm", ("H",)),
    ("post_ffw_norm", "post_feedforward_layernorm", ("H",)),
)
_ATTENTION_BIASES: dict[str, tuple[str, ...]] = {"attention_bias": ("attn_q", "attn_k", "attn_v", "attn_output")}
_MLP_BIASES: dict[str, tuple[str, ...]] = {"mlp_bias": ("ffn_down", "ffn_up", "ffn_gate")}


@dataclass(frozen=True)
class Family:
    """One architecture. Where a name has "{}", one tensor holds those of all experts."""

    model_type: str
    architecture: str
    blocks: tuple[Block, ...]
    # Key of config.json -> tensors that have a bias if it is set, which the first one's bias shows.
    biases: dict[str, tuple[str, ...]] = field(default_factory=dict)
    always_biased: tuple[str, ...] = ()
    # Metadata key without its architecture -> key of config.json, for numbers that the file may have.
    numbers: dict[str, str] = field(default_factory=dict)
    fixed: dict[str, object] = field(default_factory=dict)  # entries of config.json
    permuted: bool = False  # llama.cpp's converter has reordered the rows of q and k
    norm_shift: float = 0.0  # what it has added to the scales of all norms
    epsilon: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")


_NO_PADDING: dict[str, object] = {"pad_token_id": None}  # transformers' own lies outside of smaller vocabularies
_GEMMA: dict[str, object] = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
_LAYER_NORM = "attention.layer_norm_epsilon"

FAMILIES: dict[str, Family] = {
    "llama": Family(  # mistral models carry this name too, and compute the same
        "llama",
        "LlamaForCausalLM",
        _ATTENTION + _MLP + _NORMS,
        _ATTENTION_BIASES | _MLP_BIASES,
        permuted=True,
    ),
    "qwen2": Family(
        "qwen2", "Qwen2ForCausalLM", _ATTENTION + _MLP + _NORMS, always_biased=("attn_q", "attn_k", "attn_v")
    ),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM", _ATTENTION + _MLP + _NORMS + _HEAD_NORMS, _ATTENTION_BIASES),
    "phi3": Family(
        "phi3",
        "Phi3ForCausalLM",
        (
            ("attn_qkv", "self_attn.qkv_proj", ("S", "H")),
            ("attn_output", "self_attn.o_proj", ("H", "Q")),
            ("ffn_up", "mlp.gate_up_proj", ("2I", "H")),
            ("ffn_down", "mlp.down_proj", ("H", "I")),
            *_NORMS,
        ),
        numbers={"attention.sliding_window": "sliding_window"},
        fixed=_NO_PADDING,
    ),
    "granite": Family(
        "granite",
        "GraniteForCausalLM",
        _ATTENTION + _MLP + _NORMS,
        _ATTENTION_BIASES | _MLP_BIASES,
        numbers={
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
        permuted=True,
    ),
    "gemma": Family("gemma", "GemmaForCausalLM", _ATTENTION + _MLP + _NORMS, fixed=_GEMMA, norm_shift=1.0),
    "gemma2": Family(
        "gemma2",
        "Gemma2ForCausalLM",
        _ATTENTION + _MLP + _FOUR_NORMS,
        numbers={
            "attention.sliding_window": "sliding_window",
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        fixed=_GEMMA,
        norm_shift=1.0,
    ),
    "gemma3": Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        _ATTENTION + _MLP + _FOUR_NORMS + _HEAD_NORMS,
        numbers={
            "attention.sliding_window": "sliding_window",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        fixed=_GEMMA,
        norm_shift=1.0,
    ),
    "olmo2": Family(
        "olmo2",
        "Olmo2ForCausalLM",
        (
            *_ATTENTION,
            *_MLP,
            ("attn_q_norm", "self_attn.q_norm", ("Q",)),
            ("attn_k_norm", "self_attn.k_norm", ("K",)),
            ("post_attention_norm", "post_attention_layernorm", ("H",)),
            ("post_ffw_norm", "post_feedforward_layernorm", ("H",)),
        ),
        _ATTENTION_BIASES,
    ),
    "smollm3": Family(
        "smollm3",
        "SmolLM3ForCausalLM",
        _ATTENTION + _MLP + _NORMS,
        _ATTENTION_BIASES | _MLP_BIASES,
        fixed={"no_rope_layer_interval": 4, **_NO_PADDING},
        permuted=True,
    ),
    "command-r": Family(
        "cohere",
        "CohereForCausalLM",
        (*_ATTENTION, *_MLP, ("attn_norm", "input_layernorm", ("H",))),
        _ATTENTION_BIASES,
        numbers={"logit_scale": "logit_scale"},
        epsilon=(_LAYER_NORM, "layer_norm_eps"),
    ),
    "starcoder2": Family(
        "starcoder2",
        "Starcoder2ForCausalLM",
        (*_ATTENTION, ("ffn_up", "mlp.c_fc", ("I", "H")), ("ffn_down", "mlp.c_proj", ("H", "I")), *_NORMS),
        {"use_bias": ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down")},
        always_biased=("attn_norm", "ffn_norm", "output_norm"),
        fixed={"hidden_act": "gelu_pytorch_tanh"},
        epsilon=(_LAYER_NORM, "norm_epsilon"),
    ),
    "qwen3moe": Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        (
            *_ATTENTION,
            *_NORMS,
            *_HEAD_NORMS,
            ("ffn_gate_inp", "mlp.gate", ("E", "H")),
            ("ffn_gate_exps", "mlp.experts.{}.gate_proj", ("E", "M", "H")),
            ("ffn_up_exps", "mlp.experts.{}.up_proj", ("E", "M", "H")),
            ("ffn_down_exps", "mlp.experts.{}.down_proj", ("E", "H", "M")),
        ),
        _ATTENTION_BIASES,
        numbers={
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        fixed={"norm_topk_prob": True},
    ),
}

# A llama with experts.
MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    (
        *_ATTENTION,
        *_NORMS,
        ("ffn_gate_inp", "block_sparse_moe.gate", ("E", "H")),
        ("ffn_gate_exps", "block_sparse_moe.experts.{}.w1", ("E", "I", "H")),
        ("ffn_up_exps", "block_sparse_moe.experts.{}.w3", ("E", "I", "H")),
        ("ffn_down_exps", "block_sparse_moe.experts.{}.w2", ("E", "H", "I")),
    ),
    numbers={"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
    permuted=True,
)
