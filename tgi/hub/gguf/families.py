"""The architectures of GGUF files that import knows, as data: as llama.cpp's convert_hf_to_gguf.py writes them, and as
its model code reads what that omits. To add one, add an entry to FAMILIES.
"""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

# "a+b" is the tensor whose rows are those of a, then those of b.
# Sizes: A number of query heads, k of key heads, Q all of them, K all key heads, S queries, keys and values, D one
# head; H hidden state, 3H three of them; I MLP, 2I its two joint matrices; E number of experts, M one expert; L tokens
# that a convolution reads. Of Mamba2: X its channels, X/G those of a group, G number of groups, T heads, C channels of
# the convolution, P the joint projection; W all shared experts, 2W their two joint matrices. N positions. Of latent
# attention: q the inner width of queries, U all queries, V all values, R the key, r the latent, KV keys and values. Of
# streams: a their number, aa its square, l the rank of residuals. Y the input of a layer, YL those of all layers, Z the
# vocabulary of these. Of the delta rule: 2Q queries and their gates, C channels of the convolution, T value heads, X
# all values, d one of them.
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
_BIASED = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down")
_ATTENTION_BIASES: dict[str, tuple[str, ...]] = {"attention_bias": ("attn_q", "attn_k", "attn_v", "attn_output")}
_MLP_BIASES: dict[str, tuple[str, ...]] = {"mlp_bias": ("ffn_down", "ffn_up", "ffn_gate")}


class Mamba2Names(NamedTuple):
    """Keys of config.json."""

    kernel: str
    state: str
    heads: str
    groups: str
    head_dim: str


@dataclass(frozen=True)
class GGUFArchitecture:
    """One architecture. A name with "{}" is one tensor for all experts, or all streams but one; one that ends in
    .weight or .bias is whole, and so is its name in the result. Where the latter alone does, the name in the file
    ends without it."""

    model_type: str
    architecture: str
    blocks: tuple[Block, ...]  # of all layers
    # Key of config.json -> tensors that have a bias if it is set; the bias of the first one decides.
    biases: dict[str, tuple[str, ...]] = field(default_factory=dict)
    always_biased: tuple[str, ...] = ()
    # Metadata key without the architecture prefix -> key of config.json, for optional numbers.
    numbers: dict[str, str] = field(default_factory=dict)
    fixed: dict[str, object] = field(default_factory=dict)  # entries of config.json
    permuted: bool = False  # llama.cpp's converter reorders the rows of q and k
    norm_shift: float = 0.0  # what the converter adds to the scales of all norms
    epsilon: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")
    # Those of layers of a kind: "attention"; without key heads "mlp", if they have only that, or "recurrent"; "dense",
    # the first ones, or "experts".
    kinds: dict[str, tuple[Block, ...]] = field(default_factory=dict)
    required: dict[str, object] = field(default_factory=dict)  # metadata keys that must have this value, if present
    rotates_part: bool = False  # of a head
    layer_types: dict[str, str] = field(default_factory=dict)  # kinds of layers by their names in config.json
    layer_types_key: str = "layer_types"
    mamba2: Mamba2Names | None = None
    reshaped: dict[str, tuple[str, ...]] = field(default_factory=dict)  # shapes in the file, if not those in the result
    whole: tuple[Block, ...] = ()  # that belong to no layer
    # Key of config.json -> tensors that layers have if it is set.
    optional: dict[str, tuple[str, ...]] = field(default_factory=dict)
    # Tensors whose numbers are metadata: keys without the prefix of the architecture, with one number of each layer.
    metadata_blocks: tuple[Block, ...] = ()
    further: tuple[str, ...] = ()  # metadata keys that architecture.py reads for this architecture
    attention: bool = True  # some layers have it
    rotary: bool = True  # with rotary positions
    latent: bool = False  # it is latent attention
    delta_rule: bool = False  # of the layers but each n-th, which have attention
    # The converter puts the first rows of rotary pairs before the second ones, if positions have three axes.
    sorts_pairs_of_axes: bool = False
    tiled: bool = False  # its value heads are in the order of their number within a key head, then of the key head
    last_norm: tuple[str, str] = ("output_norm", "model.norm")
    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    # A tensor, or a metadata key without the architecture prefix: a file that has it, and not as 0, is of the other.
    instead: tuple[str, "GGUFArchitecture"] | None = None


_NO_PADDING: dict[str, object] = {"pad_token_id": None}  # transformers' default lies outside smaller vocabularies
_GEMMA: dict[str, object] = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
_LAYER_NORM = "attention.layer_norm_epsilon"

_NUMBERS_OF_EXPERTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
_GRANITE = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_LFM2: tuple[Block, ...] = (("attn_norm", "operator_norm", ("H",)), ("ffn_norm", "ffn_norm", ("H",)))
_LFM2_MLP: tuple[Block, ...] = (
    ("ffn_gate", "feed_forward.w1", ("I", "H")),
    ("ffn_up", "feed_forward.w3", ("I", "H")),
    ("ffn_down", "feed_forward.w2", ("H", "I")),
)
_LFM2_MIXERS: dict[str, tuple[Block, ...]] = {
    "attention": (
        *_ATTENTION[:3],
        ("attn_output", "self_attn.out_proj", ("H", "Q")),
        ("attn_q_norm", "self_attn.q_layernorm", ("D",)),
        ("attn_k_norm", "self_attn.k_layernorm", ("D",)),
    ),
    "recurrent": (
        ("shortconv.in_proj", "conv.in_proj", ("3H", "H")),
        ("shortconv.conv", "conv.conv", ("H", "1", "L")),
        ("shortconv.out_proj", "conv.out_proj", ("H", "H")),
    ),
}


def _mamba2(prefix: str) -> tuple[Block, ...]:
    return (
        ("ssm_in", f"{prefix}.in_proj", ("P", "H")),
        ("ssm_conv1d", f"{prefix}.conv1d", ("C", "1", "L")),
        ("ssm_conv1d.bias", f"{prefix}.conv1d.bias", ("C",)),
        ("ssm_dt.bias", f"{prefix}.dt_bias", ("T",)),
        ("ssm_a", f"{prefix}.A_log", ("T",)),
        ("ssm_d", f"{prefix}.D", ("T",)),
        ("ssm_norm", f"{prefix}.norm", ("X",)),
        ("ssm_out", f"{prefix}.out_proj", ("H", "X")),
    )


_MAMBA2_SHAPES: dict[str, tuple[str, ...]] = {
    "ssm_conv1d": ("C", "L"),
    "ssm_a": ("T", "1"),
    "ssm_d": ("T", "1"),
    "ssm_norm": ("G", "X/G"),
}
_NEMOTRON_H: dict[str, tuple[Block, ...]] = {
    "attention": tuple((name, own.replace("self_attn", "mixer"), shape) for name, own, shape in _ATTENTION),
    "recurrent": _mamba2("mixer"),
    "mlp": (("ffn_up", "mixer.up_proj", ("I", "H")), ("ffn_down", "mixer.down_proj", ("H", "I"))),
}
_LFM2_NORM = ("token_embd_norm", "model.embedding_norm")

_NEMOTRON = GGUFArchitecture(
    "nemotron_h",
    "NemotronHForCausalLM",
    (("attn_norm", "norm", ("H",)),),
    rotary=False,
    fixed={"mlp_hidden_act": "relu2", "n_group": 1, "topk_group": 1},
    epsilon=("attention.layer_norm_rms_epsilon", "layer_norm_epsilon"),
    layer_types={"linear_attention": "recurrent", "full_attention": "attention", "mlp": "mlp"},
    layer_types_key="layers_block_type",
    mamba2=Mamba2Names("conv_kernel", "ssm_state_size", "mamba_num_heads", "n_groups", "mamba_head_dim"),
    reshaped=_MAMBA2_SHAPES,
    kinds=_NEMOTRON_H,
    last_norm=("output_norm", "backbone.norm_f"),
    embedding="backbone.embeddings",
    layers="backbone.layers",
)

_GPT_BLOCKS: tuple[Block, ...] = (
    ("attn_qkv", "self_attn.qkv_proj", ("S", "H")),
    ("attn_output", "self_attn.o_proj", ("H", "Q")),
    ("ffn_up", "mlp.up_proj", ("I", "H")),
    ("ffn_down", "mlp.down_proj", ("H", "I")),
    *_NORMS,
)
_GPT_BIASED = (
    "attn_norm",
    "ffn_norm",
    "attn_qkv",
    "attn_output",
    "ffn_up",
    "ffn_down",
    "output_norm",
    "token_embd_norm",
)
_GPT: dict[str, object] = {"hidden_act": "gelu_new", "activation_function": "gelu_new"}

_LAYER_INPUT: tuple[Block, ...] = (
    ("inp_gate", "per_layer_input_gate", ("Y", "H")),
    ("proj", "per_layer_projection", ("H", "Y")),
    ("post_norm", "post_per_layer_input_norm", ("H",)),
)
_LAYER_INPUTS: tuple[Block, ...] = (
    ("per_layer_token_embd", "model.embed_tokens_per_layer", ("Z", "YL")),
    ("per_layer_model_proj", "model.per_layer_model_projection", ("YL", "H")),
    ("per_layer_proj_norm", "model.per_layer_projection_norm", ("Y",)),
)
_STREAMS = (("proj", "projections.{}"), ("unembd_proj", "unembed_projections.{}"))
_QWEN_EXPERTS: tuple[Block, ...] = (
    ("ffn_gate_inp", "mlp.gate", ("E", "H")),
    ("ffn_gate_exps", "mlp.experts.{}.gate_proj", ("E", "M", "H")),
    ("ffn_up_exps", "mlp.experts.{}.up_proj", ("E", "M", "H")),
    ("ffn_down_exps", "mlp.experts.{}.down_proj", ("E", "H", "M")),
    ("ffn_gate_inp_shexp", "mlp.shared_expert_gate", ("1", "H")),
    ("ffn_gate_shexp", "mlp.shared_expert.gate_proj", ("W", "H")),
    ("ffn_up_shexp", "mlp.shared_expert.up_proj", ("W", "H")),
    ("ffn_down_shexp", "mlp.shared_expert.down_proj", ("H", "W")),
)
_QWEN_NUMBERS_OF_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}


def _delta_kinds(*gates: Block) -> dict[str, tuple[Block, ...]]:
    return {
        "attention": (("attn_q", "self_attn.q_proj", ("2Q", "H")), *_ATTENTION[1:], *_HEAD_NORMS),
        "recurrent": (
            ("attn_qkv", "linear_attn.in_proj_qkv", ("C", "H")),
            ("attn_gate", "linear_attn.in_proj_z", ("X", "H")),
            *gates,
            ("ssm_conv1d", "linear_attn.conv1d", ("C", "1", "L")),
            ("ssm_dt.bias", "linear_attn.dt_bias", ("T",)),
            ("ssm_a", "linear_attn.A_log", ("T",)),
            ("ssm_norm", "linear_attn.norm", ("d",)),
            ("ssm_out", "linear_attn.out_proj", ("H", "X")),
        ),
    }


_NUMBERS_OF_DELTA = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
_QWEN35 = GGUFArchitecture(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    (("attn_norm", "input_layernorm", ("H",)), ("post_attention_norm", "post_attention_layernorm", ("H",))),
    numbers=_NUMBERS_OF_DELTA,
    fixed=_NO_PADDING,
    norm_shift=1.0,
    rotates_part=True,
    kinds=_delta_kinds(
        ("ssm_beta", "linear_attn.in_proj_b", ("T", "H")), ("ssm_alpha", "linear_attn.in_proj_a", ("T", "H"))
    ),
    further=("attention.recurrent_layers",),
    layer_types={"linear_attention": "recurrent", "full_attention": "attention"},
    delta_rule=True,
)
_QWEN35_MOE: dict[str, Any] = {
    "model_type": "qwen3_5_moe_text",
    "architecture": "Qwen3_5MoeForCausalLM",
    "numbers": {**_QWEN_NUMBERS_OF_EXPERTS, **_NUMBERS_OF_DELTA},
    "fixed": {"norm_topk_prob": True, **_NO_PADDING},
}


_EXPERTS: tuple[Block, ...] = (
    ("ffn_gate_exps", "mlp.experts.{}.gate_proj", ("E", "M", "H")),
    ("ffn_up_exps", "mlp.experts.{}.up_proj", ("E", "M", "H")),
    ("ffn_down_exps", "mlp.experts.{}.down_proj", ("E", "H", "M")),
)


def _routed(bias: str, shape: tuple[str, ...] = ("E",)) -> tuple[Block, ...]:
    return (
        ("ffn_gate_inp", "mlp.gate", ("E", "H")),
        ("exp_probs_b.bias", bias, shape),
        *_EXPERTS,
        ("ffn_gate_shexp", "mlp.shared_experts.gate_proj", ("W", "H")),
        ("ffn_up_shexp", "mlp.shared_experts.up_proj", ("W", "H")),
        ("ffn_down_shexp", "mlp.shared_experts.down_proj", ("H", "W")),
    )


_NUMBERS_OF_ROUTED = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace",
}
_ROUTED: dict[str, object] = {"norm_topk_prob": False, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1}
_SIGMOID: dict[str, object] = {"expert_gating_func": 2}

# A llama with experts.
_MIXTRAL = GGUFArchitecture(
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
    numbers=_NUMBERS_OF_EXPERTS,
    permuted=True,
)

_OLMO2 = GGUFArchitecture(
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
)
# An OLMo 2 with windows in some layers, whose rotary angles are not scaled.
_OLMO3 = replace(
    _OLMO2,
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    numbers={"attention.sliding_window": "sliding_window"},
    fixed=_NO_PADDING,
    further=("attention.sliding_window_pattern", "rope.freq_base_swa"),
)
# Falcon 7B, in the configuration form of later Falcon models (new_decoder_architecture), with one norm a block.
_FALCON = GGUFArchitecture(
    "falcon",
    "FalconForCausalLM",
    (*_GPT_BLOCKS[:4], ("attn_norm", "input_layernorm", ("H",))),
    always_biased=("attn_norm", "attn_norm_2", "output_norm"),
    fixed={"activation": "gelu", "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1, "bias": False},
    epsilon=(_LAYER_NORM, "layer_norm_epsilon"),
)
_FALCON_40B = replace(
    _FALCON,
    blocks=(
        *_GPT_BLOCKS[:4],
        ("attn_norm", "post_attention_layernorm", ("H",)),
        ("attn_norm_2", "input_layernorm", ("H",)),
    ),
    fixed={**_FALCON.fixed, "num_ln_in_parallel_attn": 2},
)

# Kimi K2, GLM-4.7-Flash and Mistral Large 3, too: architecture.py tells them apart (_add_latent).
_DEEPSEEK = GGUFArchitecture(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    (
        ("attn_q", "self_attn.q_proj", ("U", "H")),
        ("attn_q_a", "self_attn.q_a_proj", ("q", "H")),
        ("attn_q_a_norm", "self_attn.q_a_layernorm", ("q",)),
        ("attn_q_b", "self_attn.q_b_proj", ("U", "q")),
        ("attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa", ("R", "H")),
        ("attn_kv_a_norm", "self_attn.kv_a_layernorm", ("r",)),
        ("attn_kv_b", "self_attn.kv_b_proj", ("KV", "r")),
        ("attn_output", "self_attn.o_proj", ("H", "V")),
        *_NORMS,
    ),
    numbers={
        **_NUMBERS_OF_ROUTED,
        "attention.kv_lora_rank": "kv_lora_rank",
        "attention.q_lora_rank": "q_lora_rank",
        "rope.dimension_count": "qk_rope_head_dim",
    },
    fixed={
        **_ROUTED,
        **{"q_lora_rank": None, "rope_interleave": True, "num_nextn_predict_layers": 0, **_NO_PADDING},
    },
    further=(
        *("attention.key_length_mla", "attention.value_length_mla", "rope.scaling.yarn_log_multiplier"),
        *("expert_gating_func", "attention.temperature_scale", "attention.temperature_length"),
    ),
    kinds={
        "dense": _MLP,
        "experts": _routed("mlp.gate.e_score_correction_bias"),
    },
    latent=True,
)

_GRANITE_HYBRID = GGUFArchitecture(
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    _NORMS,
    numbers={
        **_GRANITE,
        **_NUMBERS_OF_EXPERTS,
        "expert_shared_feed_forward_length": "shared_intermediate_size",
    },
    fixed={"num_local_experts": 0},
    permuted=True,
    layer_types={"mamba": "recurrent", "attention": "attention"},
    mamba2=Mamba2Names("mamba_d_conv", "mamba_d_state", "mamba_n_heads", "mamba_n_groups", "mamba_d_head"),
    reshaped=_MAMBA2_SHAPES,
    kinds={
        "attention": _ATTENTION,
        "recurrent": _mamba2("mamba"),
        "dense": (
            ("ffn_gate+ffn_up", "shared_mlp.input_linear", ("2W", "H")),
            ("ffn_down", "shared_mlp.output_linear", ("H", "W")),
        ),
        "experts": (
            ("ffn_gate_shexp+ffn_up_shexp", "shared_mlp.input_linear", ("2W", "H")),
            ("ffn_down_shexp", "shared_mlp.output_linear", ("H", "W")),
            ("ffn_gate_inp", "block_sparse_moe.router.layer", ("E", "H")),
            ("ffn_gate_exps", "mlp.experts.{}.gate_proj", ("E", "I", "H")),
            ("ffn_up_exps", "mlp.experts.{}.up_proj", ("E", "I", "H")),
            ("ffn_down_exps", "mlp.experts.{}.down_proj", ("E", "H", "I")),
        ),
    },
)
_BAMBA = replace(
    _GRANITE_HYBRID,
    model_type="bamba",
    architecture="BambaForCausalLM",
    blocks=(
        *((name, own.replace("mlp", "feed_forward"), shape) for name, own, shape in _MLP),
        ("attn_norm", "input_layernorm", ("H",)),
        ("ffn_norm", "pre_ff_layernorm", ("H",)),
    ),
    numbers={},
    fixed={},
    required={"rope.scaling.finetuned": True},
    rotates_part=True,
    layer_types_key="attn_layer_indices",
    kinds={"attention": _ATTENTION, "recurrent": _mamba2("mamba")},
    last_norm=("output_norm", "model.final_layernorm"),
)

FAMILIES: dict[str, GGUFArchitecture] = {
    "llama": GGUFArchitecture(  # also the name of mistral models, which compute the same
        "llama",
        "LlamaForCausalLM",
        _ATTENTION + _MLP + _NORMS,
        _ATTENTION_BIASES | _MLP_BIASES,
        permuted=True,
        instead=("expert_count", _MIXTRAL),
    ),
    "qwen2": GGUFArchitecture(
        "qwen2", "Qwen2ForCausalLM", _ATTENTION + _MLP + _NORMS, always_biased=("attn_q", "attn_k", "attn_v")
    ),
    "qwen3": GGUFArchitecture(
        "qwen3", "Qwen3ForCausalLM", _ATTENTION + _MLP + _NORMS + _HEAD_NORMS, biases=_ATTENTION_BIASES
    ),
    "phi3": GGUFArchitecture(
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
        further=("rope.scaling.attn_factor",),
        fixed=_NO_PADDING,
        rotates_part=True,
    ),
    "phimoe": GGUFArchitecture(
        "phimoe",
        "PhimoeForCausalLM",
        (
            *_ATTENTION,
            *_NORMS,
            ("ffn_gate_inp", "block_sparse_moe.gate", ("E", "H")),
            ("ffn_gate_exps", "block_sparse_moe.experts.{}.w1", ("E", "I", "H")),
            ("ffn_up_exps", "block_sparse_moe.experts.{}.w3", ("E", "I", "H")),
            ("ffn_down_exps", "block_sparse_moe.experts.{}.w2", ("E", "H", "I")),
        ),
        _ATTENTION_BIASES,
        always_biased=("attn_norm", "ffn_norm", "output_norm", "output"),
        numbers=_NUMBERS_OF_EXPERTS | {"attention.sliding_window": "sliding_window"},
        fixed={"lm_head_bias": True, **_NO_PADDING},
        further=("rope.scaling.attn_factor",),
    ),
    "granite": GGUFArchitecture(
        "granite",
        "GraniteForCausalLM",
        _ATTENTION + _MLP + _NORMS,
        _ATTENTION_BIASES | _MLP_BIASES,
        numbers=_GRANITE,
        permuted=True,
    ),
    "gemma": GGUFArchitecture("gemma", "GemmaForCausalLM", _ATTENTION + _MLP + _NORMS, fixed=_GEMMA, norm_shift=1.0),
    "gemma2": GGUFArchitecture(
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
    "gemma3": GGUFArchitecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        _ATTENTION + _MLP + _FOUR_NORMS + _HEAD_NORMS,
        numbers={
            "attention.sliding_window": "sliding_window",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        fixed=_GEMMA,
        further=("rope.freq_base_swa",),
        norm_shift=1.0,
    ),
    "llama4": GGUFArchitecture(
        "llama4_text",
        "Llama4ForCausalLM",
        _ATTENTION + _NORMS,
        numbers={
            **_NUMBERS_OF_EXPERTS,
            "expert_feed_forward_length": "moe_intermediate_size",
            "feed_forward_length": "intermediate_size_mlp",
            "interleave_moe_layer_step": "interleave_moe_layer_step",
        },
        fixed={
            **{"interleave_moe_layer_step": 1, "no_rope_layer_interval": 4, "attention_chunk_size": 8192},
            **{"attn_temperature_tuning": True, "floor_scale": 8192, "attn_scale": 0.1, **_NO_PADDING},
        },
        kinds={
            "dense": tuple((name, own.replace("mlp", "feed_forward"), shape) for name, own, shape in _MLP),
            "experts": (
                ("ffn_gate_inp", "feed_forward.router", ("E", "H")),
                ("ffn_gate_exps", "feed_forward.experts.{}.gate_proj", ("E", "M", "H")),
                ("ffn_up_exps", "feed_forward.experts.{}.up_proj", ("E", "M", "H")),
                ("ffn_down_exps", "feed_forward.experts.{}.down_proj", ("E", "H", "M")),
                ("ffn_gate_shexp", "feed_forward.shared_expert.gate_proj", ("M", "H")),
                ("ffn_up_shexp", "feed_forward.shared_expert.up_proj", ("M", "H")),
                ("ffn_down_shexp", "feed_forward.shared_expert.down_proj", ("H", "M")),
            ),
        },
    ),
    "gemma4": GGUFArchitecture(
        "gemma4_text",
        "Gemma4ForCausalLM",
        (
            *_ATTENTION,
            *_MLP,
            *_FOUR_NORMS,
            *_HEAD_NORMS,
            *_LAYER_INPUT,
            ("layer_output_scale.weight", "layer_scalar", ("1",)),
        ),
        numbers={
            "attention.sliding_window": "sliding_window",
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "attention.key_length": "global_head_dim",
            "attention.key_length_swa": "head_dim",
            "final_logit_softcapping": "final_logit_softcapping",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
            "expert_count": "num_experts",
            "expert_used_count": "top_k_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        fixed={**_GEMMA, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "num_experts": 0},
        further=(
            *("attention.sliding_window_pattern", "attention.value_length_swa"),
            *("rope.freq_base_swa", "rope.dimension_count_swa"),
        ),
        kinds={
            "dense": (),
            "experts": (
                ("ffn_gate_inp", "router.proj", ("E", "H")),
                ("ffn_gate_inp.scale", "router.scale", ("H",)),
                ("ffn_gate_exps", "experts.{}.gate_proj", ("E", "M", "H")),
                ("ffn_up_exps", "experts.{}.up_proj", ("E", "M", "H")),
                ("ffn_down_exps", "experts.{}.down_proj", ("E", "H", "M")),
                ("ffn_down_exps.scale", "router.per_expert_scale", ("E",)),
                ("post_ffw_norm_1", "post_feedforward_layernorm_1", ("H",)),
                ("pre_ffw_norm_2", "pre_feedforward_layernorm_2", ("H",)),
                ("post_ffw_norm_2", "post_feedforward_layernorm_2", ("H",)),
            ),
        },
        whole=_LAYER_INPUTS,
    ),
    "gemma3n": GGUFArchitecture(
        "gemma3n_text",
        "Gemma3nForCausalLM",
        (
            *_ATTENTION,
            *_MLP,
            *_FOUR_NORMS,
            *_HEAD_NORMS,
            *_LAYER_INPUT,
            ("altup_router", "altup.modality_router", ("a", "H")),
            ("altup_router_norm", "altup.router_norm", ("H",)),
            ("altup_predict_coef", "altup.prediction_coefs", ("aa", "a")),
            ("altup_correct_coef", "altup.correction_coefs", ("a", "a")),
            ("altup_correct_scale.weight", "altup.correct_output_scale", ("H",)),
            ("laurel_l", "laurel.linear_left", ("l", "H")),
            ("laurel_r", "laurel.linear_right", ("H", "l")),
            ("laurel_post_norm", "laurel.post_laurel_norm", ("H",)),
        ),
        numbers={
            "attention.sliding_window": "sliding_window",
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "final_logit_softcapping": "final_logit_softcapping",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
            "altup.active_idx": "altup_active_idx",
            "altup.num_inputs": "altup_num_inputs",
        },
        fixed=_GEMMA,
        further=("attention.sliding_window_pattern", "rope.freq_base_swa"),
        whole=(
            *_LAYER_INPUTS,
            *((f"altup_{name}", f"model.altup_{own}", ("a-1", "H", "H")) for name, own in _STREAMS),
        ),
    ),
    "olmo2": replace(_OLMO2, instead=("attention.sliding_window", _OLMO3)),
    "smollm3": GGUFArchitecture(
        "smollm3",
        "SmolLM3ForCausalLM",
        _ATTENTION + _MLP + _NORMS,
        _ATTENTION_BIASES | _MLP_BIASES,
        fixed={"no_rope_layer_interval": 4, **_NO_PADDING},
        permuted=True,
    ),
    "command-r": GGUFArchitecture(
        "cohere",
        "CohereForCausalLM",
        (*_ATTENTION, *_MLP, ("attn_norm", "input_layernorm", ("H",))),
        _ATTENTION_BIASES,
        numbers={"logit_scale": "logit_scale"},
        epsilon=(_LAYER_NORM, "layer_norm_eps"),
    ),
    "starcoder2": GGUFArchitecture(
        "starcoder2",
        "Starcoder2ForCausalLM",
        (*_ATTENTION, ("ffn_up", "mlp.c_fc", ("I", "H")), ("ffn_down", "mlp.c_proj", ("H", "I")), *_NORMS),
        {"use_bias": _BIASED},
        always_biased=("attn_norm", "ffn_norm", "output_norm"),
        fixed={"hidden_act": "gelu_pytorch_tanh"},
        epsilon=(_LAYER_NORM, "norm_epsilon"),
    ),
    "gpt-oss": GGUFArchitecture(
        "gpt_oss",
        "GptOssForCausalLM",
        (
            *_ATTENTION,
            ("attn_sinks.weight", "self_attn.sinks", ("A",)),
            ("attn_norm", "input_layernorm", ("H",)),
            ("post_attention_norm", "post_attention_layernorm", ("H",)),
            ("ffn_gate_inp", "mlp.router", ("E", "H")),
            ("ffn_gate_exps", "mlp.experts.{}.gate_proj", ("E", "I", "H")),
            ("ffn_up_exps", "mlp.experts.{}.up_proj", ("E", "I", "H")),
            ("ffn_down_exps", "mlp.experts.{}.down_proj", ("E", "H", "I")),
        ),
        always_biased=(
            *("attn_q", "attn_k", "attn_v", "attn_output"),
            *("ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"),
        ),
        numbers={
            **_NUMBERS_OF_EXPERTS,
            "attention.sliding_window": "sliding_window",
            "expert_feed_forward_length": "intermediate_size",
        },
        fixed=_NO_PADDING,
    ),
    "qwen3moe": GGUFArchitecture(
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
    "olmoe": GGUFArchitecture(
        "olmoe",
        "OlmoeForCausalLM",
        (
            *_ATTENTION,
            *_NORMS,
            ("attn_q_norm", "self_attn.q_norm", ("Q",)),
            ("attn_k_norm", "self_attn.k_norm", ("K",)),
            ("ffn_gate_inp", "mlp.gate", ("E", "H")),
            ("ffn_gate_exps", "mlp.experts.{}.gate_proj", ("E", "I", "H")),
            ("ffn_up_exps", "mlp.experts.{}.up_proj", ("E", "I", "H")),
            ("ffn_down_exps", "mlp.experts.{}.down_proj", ("E", "H", "I")),
        ),
        numbers={"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"},
        fixed={"norm_topk_prob": False},
    ),
    "seed_oss": GGUFArchitecture(
        "seed_oss",
        "SeedOssForCausalLM",
        (
            *_ATTENTION,
            *_MLP,
            ("attn_norm", "input_layernorm", ("H",)),
            ("post_attention_norm", "post_attention_layernorm", ("H",)),
        ),
        {"attention_bias": ("attn_q", "attn_k", "attn_v"), "attention_out_bias": ("attn_output",)},
    ),
    "ernie4_5": GGUFArchitecture(
        "ernie4_5", "Ernie4_5ForCausalLM", _ATTENTION + _MLP + _NORMS, {"use_bias": (*_BIASED, "ffn_gate")}
    ),
    "hunyuan-dense": GGUFArchitecture(
        "hunyuan_v1_dense",
        "HunYuanDenseV1ForCausalLM",
        (
            *_ATTENTION,
            *_MLP,
            *_NORMS,
            ("attn_q_norm", "self_attn.query_layernorm", ("D",)),
            ("attn_k_norm", "self_attn.key_layernorm", ("D",)),
        ),
    ),
    "apertus": GGUFArchitecture(
        "apertus",
        "ApertusForCausalLM",
        (
            *_ATTENTION,
            *_MLP[1:],
            *_HEAD_NORMS,
            ("attn_norm", "attention_layernorm", ("H",)),
            ("ffn_norm", "feedforward_layernorm", ("H",)),
        ),
        _ATTENTION_BIASES,
        fixed={"hidden_act": "xielu", **_NO_PADDING},
        metadata_blocks=(
            ("xielu.alpha_p", "mlp.act_fn.alpha_p", ("1",)),
            ("xielu.alpha_n", "mlp.act_fn.alpha_n", ("1",)),
            ("xielu.beta", "mlp.act_fn.beta", ()),
            ("xielu.eps", "mlp.act_fn.eps", ()),
        ),
    ),
    "arcee": GGUFArchitecture(
        "arcee",
        "ArceeForCausalLM",
        _ATTENTION + _MLP[1:] + _NORMS,
        _ATTENTION_BIASES | {"mlp_bias": ("ffn_down", "ffn_up")},
        fixed={"hidden_act": "relu2"},
        permuted=True,
    ),
    "glm4": GGUFArchitecture(
        "glm4",
        "Glm4ForCausalLM",
        (
            *_ATTENTION,
            ("ffn_up", "mlp.gate_up_proj", ("2I", "H")),
            ("ffn_down", "mlp.down_proj", ("H", "I")),
            ("attn_norm", "input_layernorm", ("H",)),
            ("post_attention_norm", "post_self_attn_layernorm", ("H",)),
            ("ffn_norm", "post_attention_layernorm", ("H",)),
            ("post_ffw_norm", "post_mlp_layernorm", ("H",)),
        ),
        {"attention_bias": ("attn_q", "attn_k", "attn_v")},
        fixed=_NO_PADDING,
        rotates_part=True,
        further=("rope.dimension_sections",),
        sorts_pairs_of_axes=True,
    ),
    "cohere2": GGUFArchitecture(
        "cohere2",
        "Cohere2ForCausalLM",
        (*_ATTENTION, *_MLP, ("attn_norm", "input_layernorm", ("H",))),
        numbers={"logit_scale": "logit_scale", "attention.sliding_window": "sliding_window"},
        fixed={"sliding_window_pattern": 4},
        epsilon=(_LAYER_NORM, "layer_norm_eps"),
    ),
    "lfm2": GGUFArchitecture(
        "lfm2",
        "Lfm2ForCausalLM",
        _LFM2 + _LFM2_MLP,
        kinds=_LFM2_MIXERS,
        numbers={"shortconv.l_cache": "conv_L_cache"},
        fixed={"block_auto_adjust_ff_dim": False},
        epsilon=("attention.layer_norm_rms_epsilon", "norm_eps"),
        layer_types={"full_attention": "attention", "conv": "recurrent"},
        reshaped={"shortconv.conv": ("H", "L")},
        last_norm=_LFM2_NORM,
    ),
    "lfm2moe": GGUFArchitecture(
        "lfm2_moe",
        "Lfm2MoeForCausalLM",
        _LFM2,
        kinds={
            **_LFM2_MIXERS,
            "dense": _LFM2_MLP,
            "experts": (
                ("ffn_gate_inp", "feed_forward.gate", ("E", "H")),
                ("exp_probs_b.bias", "feed_forward.expert_bias", ("E",)),
                ("ffn_gate_exps", "feed_forward.experts.{}.w1", ("E", "M", "H")),
                ("ffn_up_exps", "feed_forward.experts.{}.w3", ("E", "M", "H")),
                ("ffn_down_exps", "feed_forward.experts.{}.w2", ("E", "H", "M")),
            ),
        },
        numbers={
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_weights_scale": "routed_scaling_factor",
            "leading_dense_block_count": "num_dense_layers",
            "shortconv.l_cache": "conv_L_cache",
        },
        epsilon=("attention.layer_norm_rms_epsilon", "norm_eps"),
        required={"expert_gating_func": 2, "expert_weights_norm": True},  # sigmoid
        layer_types={"full_attention": "attention", "conv": "recurrent"},
        reshaped={"shortconv.conv": ("H", "L")},
        last_norm=_LFM2_NORM,
    ),
    "qwen2moe": GGUFArchitecture(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        (
            *_ATTENTION,
            *_NORMS,
            *_QWEN_EXPERTS,
        ),
        always_biased=("attn_q", "attn_k", "attn_v"),
        numbers=_QWEN_NUMBERS_OF_EXPERTS,
        fixed={"norm_topk_prob": False},
    ),
    # The text part of Qwen3.5 computes the same, and has the rows of the input projections in the order of the file.
    "qwen3next": replace(
        _QWEN35,
        blocks=(*_QWEN35.blocks, *_QWEN_EXPERTS),
        kinds=_delta_kinds(
            ("ssm_ba", "linear_attn.in_proj_b", ("T", "H")), ("ssm_ba", "linear_attn.in_proj_a", ("T", "H"))
        ),
        **_QWEN35_MOE,
    ),
    "qwen35": replace(
        _QWEN35,
        blocks=(*_QWEN35.blocks, *_MLP),
        further=("rope.dimension_sections", "attention.recurrent_layers"),
        tiled=True,
    ),
    "qwen35moe": replace(
        _QWEN35,
        blocks=(*_QWEN35.blocks, *_QWEN_EXPERTS),
        further=("rope.dimension_sections", "attention.recurrent_layers"),
        tiled=True,
        **_QWEN35_MOE,
    ),
    "exaone4": GGUFArchitecture(
        "exaone4",
        "Exaone4ForCausalLM",
        (
            *_ATTENTION,
            *_MLP,
            *_HEAD_NORMS,
            ("post_attention_norm", "post_attention_layernorm", ("H",)),
            ("post_ffw_norm", "post_feedforward_layernorm", ("H",)),
        ),
        numbers={"attention.sliding_window": "sliding_window"},
        fixed={"sliding_window": None, **_NO_PADDING},
        further=("attention.sliding_window_pattern",),
    ),
    "granitemoe": GGUFArchitecture(
        "granitemoe",
        "GraniteMoeForCausalLM",
        (
            *_ATTENTION,
            *_NORMS,
            ("ffn_gate_inp", "block_sparse_moe.router.layer", ("E", "H")),
            ("ffn_gate_exps", "mlp.experts.{}.gate_proj", ("E", "I", "H")),
            ("ffn_up_exps", "mlp.experts.{}.up_proj", ("E", "I", "H")),
            ("ffn_down_exps", "mlp.experts.{}.down_proj", ("E", "H", "I")),
        ),
        _ATTENTION_BIASES,
        numbers={**_GRANITE, **_NUMBERS_OF_EXPERTS},
        permuted=True,
    ),
    "dots1": GGUFArchitecture(
        "dots1",
        "Dots1ForCausalLM",
        (*_ATTENTION, *_NORMS, *_HEAD_NORMS),
        _ATTENTION_BIASES,
        numbers=_NUMBERS_OF_ROUTED,
        fixed={**_ROUTED, "sliding_window": None},
        required=_SIGMOID,
        further=("expert_shared_feed_forward_length",),
        kinds={"dense": _MLP, "experts": _routed("mlp.gate.e_score_correction_bias")},
    ),
    "glm4moe": GGUFArchitecture(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        (
            *_ATTENTION,
            *_HEAD_NORMS,
            ("attn_norm", "input_layernorm", ("H",)),
            ("post_attention_norm", "post_attention_layernorm", ("H",)),
        ),
        {"attention_bias": ("attn_q", "attn_k", "attn_v")},
        numbers=_NUMBERS_OF_ROUTED,
        fixed={**_ROUTED, "first_k_dense_replace": 0},
        required=_SIGMOID,
        further=("rope.dimension_sections",),
        rotates_part=True,
        optional={"use_qk_norm": ("attn_q_norm", "attn_k_norm")},
        kinds={"dense": _MLP, "experts": _routed("mlp.gate.e_score_correction_bias")},
    ),
    "exaone-moe": GGUFArchitecture(
        "exaone_moe",
        "ExaoneMoeForCausalLM",
        (*_ATTENTION, *_NORMS, *_HEAD_NORMS),
        numbers={
            **_NUMBERS_OF_ROUTED,
            "expert_count": "num_experts",
            "expert_shared_count": "num_shared_experts",
            "attention.sliding_window": "sliding_window",
        },
        fixed={**_ROUTED, **_NO_PADDING, "sliding_window": None, "first_k_dense_replace": 0},
        required=_SIGMOID,
        further=("attention.sliding_window_pattern", "expert_shared_feed_forward_length"),
        kinds={"dense": _MLP, "experts": _routed("mlp.e_score_correction_bias")},
    ),
    "ernie4_5-moe": GGUFArchitecture(
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        (*_ATTENTION, *_NORMS),
        {"use_bias": ("attn_q", "attn_k", "attn_v", "attn_output")},
        numbers={
            "expert_count": "moe_num_experts",
            "expert_used_count": "moe_k",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_count": "moe_num_shared_experts",
            "leading_dense_block_count": "moe_layer_start_index",
            "interleave_moe_layer_step": "moe_layer_interval",
        },
        required={"expert_gating_func": 1, "expert_weights_norm": True},  # softmax
        further=("expert_shared_feed_forward_length",),
        kinds={"dense": _MLP, "experts": _routed("mlp.moe_statics.e_score_correction_bias", ("1", "E"))},
    ),
    "minimax-m2": GGUFArchitecture(
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        (
            *_ATTENTION,
            *_NORMS,
            ("attn_q_norm", "self_attn.q_norm", ("Q",)),
            ("attn_k_norm", "self_attn.k_norm", ("K",)),
            ("ffn_gate_inp", "block_sparse_moe.gate", ("E", "H")),
            ("exp_probs_b.bias", "block_sparse_moe.e_score_correction_bias", ("E",)),
            ("ffn_gate_exps", "block_sparse_moe.experts.{}.w1", ("E", "I", "H")),
            ("ffn_up_exps", "block_sparse_moe.experts.{}.w3", ("E", "I", "H")),
            ("ffn_down_exps", "block_sparse_moe.experts.{}.w2", ("E", "H", "I")),
        ),
        numbers={**_NUMBERS_OF_EXPERTS, "expert_feed_forward_length": "intermediate_size"},
        fixed=_NO_PADDING,
        required={**_SIGMOID, "expert_weights_norm": True},
        rotates_part=True,
    ),
    "hunyuan-moe": GGUFArchitecture(
        "hunyuan_v1_moe",
        "HunYuanMoEV1ForCausalLM",
        (
            *_ATTENTION,
            *_NORMS,
            ("attn_q_norm", "self_attn.query_layernorm", ("D",)),
            ("attn_k_norm", "self_attn.key_layernorm", ("D",)),
            ("ffn_gate_inp", "mlp.gate.wg", ("E", "H")),
            ("ffn_gate_exps", "mlp.experts.{}.gate_proj", ("E", "I", "H")),
            ("ffn_up_exps", "mlp.experts.{}.up_proj", ("E", "I", "H")),
            ("ffn_down_exps", "mlp.experts.{}.down_proj", ("E", "H", "I")),
            ("ffn_gate_shexp", "mlp.shared_mlp.gate_proj", ("I", "H")),
            ("ffn_up_shexp", "mlp.shared_mlp.up_proj", ("I", "H")),
            ("ffn_down_shexp", "mlp.shared_mlp.down_proj", ("H", "I")),
        ),
        numbers={"expert_count": "num_experts", "expert_used_count": "moe_topk"},
        required={"expert_shared_count": 1},
        further=("expert_feed_forward_length", "expert_shared_feed_forward_length"),
    ),
    "gpt2": GGUFArchitecture(
        "gpt2",
        "GPT2LMHeadModel",
        _GPT_BLOCKS,
        always_biased=_GPT_BIASED,
        fixed=_GPT,
        epsilon=(_LAYER_NORM, "layer_norm_epsilon"),
        whole=(("position_embd", "model.embed_positions", ("N", "H")),),
    ),
    "bloom": GGUFArchitecture(
        "bloom",
        "BloomForCausalLM",
        _GPT_BLOCKS,
        always_biased=_GPT_BIASED,
        fixed=_GPT,
        epsilon=(_LAYER_NORM, "layer_norm_epsilon"),
        whole=(("token_embd_norm", "model.embed_norm", ("H",)),),
    ),
    "mpt": GGUFArchitecture(
        "mpt",
        "MptForCausalLM",
        (
            ("attn_qkv", "attn.Wqkv", ("S", "H")),
            ("attn_output", "attn.out_proj", ("H", "Q")),
            ("ffn_up", "ffn.up_proj", ("I", "H")),
            ("ffn_down", "ffn.down_proj", ("H", "I")),
            ("attn_norm", "norm_1", ("H",)),
            ("ffn_norm", "norm_2", ("H",)),
        ),
        numbers={"context_length": "max_seq_len"},
        fixed={"hidden_act": "gelu"},
        further=("attention.max_alibi_bias", "attention.clamp_kqv"),
        epsilon=(_LAYER_NORM, "layer_norm_epsilon"),
        last_norm=("output_norm", "transformer.norm_f"),
        embedding="transformer.wte",
        layers="transformer.blocks",
    ),
    "mistral3": GGUFArchitecture(  # Mistral Small 3.1, and Ministral 3, which scales queries by position
        "ministral3",
        "Ministral3ForCausalLM",
        _ATTENTION + _MLP + _NORMS,
        permuted=True,
        fixed=_NO_PADDING,
        further=("attention.temperature_scale", "rope.scaling.yarn_log_multiplier"),
    ),
    "stablelm": GGUFArchitecture(
        "stablelm",
        "StableLmForCausalLM",
        _ATTENTION
        + _MLP
        + _NORMS
        + (
            ("attn_q_norm", "self_attn.q_layernorm.norms.{}", ("A", "D")),
            ("attn_k_norm", "self_attn.k_layernorm.norms.{}", ("k", "D")),
        ),
        {"use_qkv_bias": ("attn_q", "attn_k", "attn_v")},
        always_biased=("attn_norm", "ffn_norm", "output_norm"),
        optional={"qk_layernorm": ("attn_q_norm", "attn_k_norm")},
        epsilon=(_LAYER_NORM, "layer_norm_eps"),
        rotates_part=True,
    ),
    "nemotron": GGUFArchitecture(
        "nemotron",
        "NemotronForCausalLM",
        _ATTENTION + _MLP[1:] + _NORMS,
        _ATTENTION_BIASES | {"mlp_bias": ("ffn_down", "ffn_up")},
        always_biased=("attn_norm", "ffn_norm", "output_norm"),
        fixed={"hidden_act": "relu2"},
        norm_shift=1.0,
        epsilon=(_LAYER_NORM, "norm_eps"),
        rotates_part=True,
    ),
    "chatglm": GGUFArchitecture(
        "glm",
        "GlmForCausalLM",
        (
            *_ATTENTION,
            ("ffn_up", "mlp.gate_up_proj", ("2I", "H")),
            ("ffn_down", "mlp.down_proj", ("H", "I")),
            *_NORMS,
        ),
        {"attention_bias": ("attn_q", "attn_k", "attn_v")},
        fixed=_NO_PADDING,
        rotates_part=True,
    ),
    "phi2": GGUFArchitecture(
        "phi",
        "PhiForCausalLM",
        (
            *_ATTENTION[:3],
            ("attn_output", "self_attn.dense", ("H", "Q")),
            ("ffn_up", "mlp.fc1", ("I", "H")),
            ("ffn_down", "mlp.fc2", ("H", "I")),
            ("attn_norm", "input_layernorm", ("H",)),
        ),
        always_biased=(*_BIASED, "attn_norm", "output_norm", "output"),
        fixed={"hidden_act": "gelu_new"},
        epsilon=(_LAYER_NORM, "layer_norm_eps"),
        rotates_part=True,
        last_norm=("output_norm", "model.final_layernorm"),
    ),
    "gptneox": GGUFArchitecture(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        _GPT_BLOCKS,
        always_biased=_GPT_BIASED,
        numbers={"use_parallel_residual": "use_parallel_residual"},
        fixed={"hidden_act": "gelu", "attention_bias": True},
        epsilon=(_LAYER_NORM, "layer_norm_eps"),
        rotates_part=True,
    ),
    "falcon": replace(_FALCON, instead=("blk.0.attn_norm_2.weight", _FALCON_40B)),
    "starcoder": GGUFArchitecture(
        "gpt_bigcode",
        "GPTBigCodeForCausalLM",
        _GPT_BLOCKS,
        always_biased=_GPT_BIASED,
        fixed={"activation_function": "gelu_pytorch_tanh", "multi_query": True},
        epsilon=(_LAYER_NORM, "layer_norm_epsilon"),
        whole=(("position_embd", "model.embed_positions", ("N", "H")),),
    ),
    "dbrx": GGUFArchitecture(
        "dbrx",
        "DbrxForCausalLM",
        (
            ("attn_qkv", "self_attn.Wqkv", ("S", "H")),
            ("attn_output", "self_attn.out_proj", ("H", "Q")),
            ("attn_norm", "input_layernorm", ("H",)),
            ("attn_output_norm", "post_attention_layernorm", ("H",)),
            ("ffn_gate_inp", "mlp.router.layer", ("E", "H")),
            ("ffn_gate_exps", "mlp.experts.{}.gate_proj", ("E", "I", "H")),
            ("ffn_up_exps", "mlp.experts.{}.up_proj", ("E", "I", "H")),
            ("ffn_down_exps", "mlp.experts.{}.down_proj", ("E", "H", "I")),
        ),
        numbers={
            "expert_count": "moe_num_experts",
            "expert_used_count": "moe_top_k",
            "attention.clamp_kqv": "clip_qkv",
        },
        fixed={"moe_normalize_expert_weights": 1.0},
        epsilon=(_LAYER_NORM, "layer_norm_eps"),
    ),
    "mamba2": GGUFArchitecture(
        "mamba2",
        "Mamba2ForCausalLM",
        (("attn_norm", "norm", ("H",)), *_mamba2("mixer")),
        {"use_bias": ("ssm_in", "ssm_out")},
        fixed={"expand": 2},
        epsilon=("attention.layer_norm_rms_epsilon", "layer_norm_epsilon"),
        mamba2=Mamba2Names("conv_kernel", "state_size", "num_heads", "n_groups", "head_dim"),
        reshaped=_MAMBA2_SHAPES,
        attention=False,
        last_norm=("output_norm", "backbone.norm_f"),
        embedding="backbone.embeddings",
        layers="backbone.layers",
    ),
    "falcon-h1": GGUFArchitecture(  # whose factors the converter has multiplied with the weights
        "falcon_h1",
        "FalconH1ForCausalLM",
        (
            *_ATTENTION,
            *_mamba2("mamba"),
            *((name, own.replace("mlp", "feed_forward"), shape) for name, own, shape in _MLP),
            ("attn_norm", "input_layernorm", ("H",)),
            ("ffn_norm", "pre_ff_layernorm.weight", ("H",)),
        ),
        numbers={"ssm.inner_size": "mamba_d_ssm"},
        fixed={
            "mamba_norm_before_gate": False,
            **dict.fromkeys(("attention_in_multiplier", "attention_out_multiplier", "key_multiplier"), 1.0),
            **dict.fromkeys(("ssm_in_multiplier", "ssm_out_multiplier", "embedding_multiplier"), 1.0),
            **{"lm_head_multiplier": 1.0, "mlp_multipliers": [1.0] * 2, "ssm_multipliers": [1.0] * 5},
        },
        optional={"mamba_rms_norm": ("ssm_norm",)},
        mamba2=Mamba2Names("mamba_d_conv", "mamba_d_state", "mamba_n_heads", "mamba_n_groups", "mamba_d_head"),
        reshaped=_MAMBA2_SHAPES,
        last_norm=("output_norm", "model.final_layernorm"),
    ),
    "deepseek2": _DEEPSEEK,
    "mistral4": replace(_DEEPSEEK, model_type="mistral4", architecture="Mistral4ForCausalLM"),
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": replace(
        _NEMOTRON,
        numbers={
            "expert_count": "n_routed_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
            "expert_shared_count": "n_shared_experts",
            "expert_weights_norm": "norm_topk_prob",
            "expert_weights_scale": "routed_scaling_factor",
        },
        required={"expert_group_count": 1, "expert_group_used_count": 1},
        layer_types={"linear_attention": "recurrent", "full_attention": "attention", "moe": "mlp"},
        kinds={
            **_NEMOTRON_H,
            "mlp": (
                ("ffn_gate_inp", "mixer.gate", ("E", "H")),
                ("exp_probs_b.bias", "mixer.gate.e_score_correction_bias", ("E",)),
                ("ffn_up_exps", "mixer.experts.{}.up_proj", ("E", "M", "H")),
                ("ffn_down_exps", "mixer.experts.{}.down_proj", ("E", "H", "M")),
                ("ffn_up_shexp", "mixer.shared_experts.up_proj", ("W", "H")),
                ("ffn_down_shexp", "mixer.shared_experts.down_proj", ("H", "W")),
            ),
        },
    ),
    "granitehybrid": replace(_BAMBA, instead=("attention.scale", _GRANITE_HYBRID)),
}

# The text part of models that see images. With text alone all sections of the rotary embedding have one position.
FAMILIES |= {
    name: replace(FAMILIES[text], further=("rope.dimension_sections",))
    for name, text in (("qwen2vl", "qwen2"), ("qwen3vl", "qwen3"), ("qwen3vlmoe", "qwen3moe"))
}

FAMILIES["gemma-embedding"] = replace(
    FAMILIES["gemma3"],
    architecture="Gemma3TextModel",
    fixed={**_GEMMA, "use_bidirectional_attention": True, "dtype": "float32"},
    required={"attention.causal": False},
)

# Architectures that are not models to serve: name -> why they are refused.
REFUSED = {"eagle3": "heads that draft are read from their directory with config.json and safetensors"}
# Encoders with layers that are not computed: name -> which.
REFUSED_ENCODERS = {
    "nomic-bert": "a BERT with rotary positions and gated MLPs, which is not computed",
    "nomic-bert-moe": "a BERT with rotary positions and experts, which is not computed",
    "jina-bert-v2": "a BERT with ALiBi and gated MLPs, which is not computed",
    "jina-bert-v3": "a RoBERTa with rotary positions, which is not computed",
    "neo-bert": "a BERT with rotary positions, RMS norms and gated MLPs, which is not computed",
    "eurobert": "an encoder with the layers of a llama, which is not computed",
    "llama-embed": "a llama whose tokens see both sides, which is not read from files",
    "t5encoder": "the encoder of a T5 alone, which makes no vectors here",
}
