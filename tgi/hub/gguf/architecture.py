"""Maps a GGUF file's metadata and tensor names to those of Hugging Face models."""

import math
from dataclasses import dataclass, field
from typing import Any

from tgi.hub.gguf.reader import GGUFFile
from tgi.microkernel.errors import UserError

MAX_LAYERS = 1024
MAX_EXPERTS = 1024

# Prefixes of keys that change the computation: an unknown key with one of them is refused.
HEEDED = (
    *("attention.", "rope.", "expert_", "embedding_scale", "residual_scale", "logit_scale"),
    *("attn_logit_softcapping", "final_logit_softcapping"),
)
KNOWN = {
    *(f"attention.{key}" for key in ("head_count", "head_count_kv", "key_length", "value_length")),
    "attention.layer_norm_rms_epsilon",
    "attention.layer_norm_epsilon",
    *(f"rope.{key}" for key in ("dimension_count", "freq_base", "scaling.type", "scaling.factor")),
    *(f"rope.scaling.{key}" for key in ("original_context_length", "finetuned", "yarn_beta_fast", "yarn_beta_slow")),
}

# Llama 3.1's rope scaling is stored as one divisor per frequency. All published models of the family have these
# bounds and differ in the factor. (https://github.com/meta-llama/llama-models, models/llama3/model.py, apply_scaling)
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class Metadata:
    """Typed access to metadata. Raises UserError for a missing or invalid value."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file

    def string(self, key: str) -> str:
        """A required string."""
        value = self.file.metadata.get(key)
        if not isinstance(value, str):
            raise self.wrong(key, value, "a string")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer of at least 0."""
        value = self.file.metadata.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.wrong(key, value, "a whole number")
        return value

    def positive(self, key: str, default: int | None = None) -> int:
        """An integer of at least 1."""
        value = self.integer(key, default)
        if value == 0:
            raise self.wrong(key, value, "a positive number")
        return value

    def per_layer(self, key: str, layers: int) -> list[int]:
        """A list with an integer of at least 0 for each layer."""
        value = self.file.metadata.get(key)
        if not isinstance(value, list) or len(value) != layers or not all(type(n) is int and n >= 0 for n in value):
            raise self.wrong(key, value, f"a list of {layers} whole numbers")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive finite number."""
        value = self.file.metadata.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.wrong(key, value, "a positive number")
        return float(f"{value:.7g}")  # 1e-5 stored as float32 reads 9.999999747378752e-06

    def wrong(self, key: str, value: Any, expected: str) -> UserError:
        """The error for a missing or invalid value."""
        found = "is missing" if value is None else f"is {str(value)[:80]!r}"
        return UserError(f"{self.file.path}: the metadata key {key!r} {found}; {expected} was expected.")


# Architectures as llama.cpp's convert_hf_to_gguf.py writes them, and as its model code reads what that omits.

# Sizes: A number of query heads, Q all of them, K all key heads, S queries, keys and values, D one head; H hidden
# state, 3H three of them; I MLP, 2I its two joint matrices; E number of experts, M one expert; L tokens that a
# convolution reads.
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


@dataclass(frozen=True)
class GGUFArchitecture:
    """One architecture. A name with "{}" is one tensor for all experts; one that ends in .weight or .bias is whole, and
    so is its name in the result."""

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
    # Those of layers of a kind: "attention", or "recurrent" without key heads; "dense", the first ones, or "experts".
    kinds: dict[str, tuple[Block, ...]] = field(default_factory=dict)
    required: dict[str, object] = field(default_factory=dict)  # metadata keys that must have this value, if present
    rotates_part: bool = False  # of a head
    layer_types: tuple[str, str] | None = None  # names in config.json of layers with attention, and of recurrent ones
    reshaped: dict[str, tuple[str, ...]] = field(default_factory=dict)  # shapes in the file, if not those in the result
    last_norm: tuple[str, str] = ("output_norm", "model.norm")


_NO_PADDING: dict[str, object] = {"pad_token_id": None}  # transformers' default lies outside smaller vocabularies
_GEMMA: dict[str, object] = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
_LAYER_NORM = "attention.layer_norm_epsilon"

_NUMBERS_OF_EXPERTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
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
_LFM2_NORM = ("token_embd_norm", "model.embedding_norm")

FAMILIES: dict[str, GGUFArchitecture] = {
    "llama": GGUFArchitecture(  # also the name of mistral models, which compute the same
        "llama",
        "LlamaForCausalLM",
        _ATTENTION + _MLP + _NORMS,
        _ATTENTION_BIASES | _MLP_BIASES,
        permuted=True,
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
        fixed=_NO_PADDING,
        rotates_part=True,
    ),
    "granite": GGUFArchitecture(
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
        norm_shift=1.0,
    ),
    "olmo2": GGUFArchitecture(
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
        layer_types=("full_attention", "conv"),
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
        layer_types=("full_attention", "conv"),
        reshaped={"shortconv.conv": ("H", "L")},
        last_norm=_LFM2_NORM,
    ),
}

# A llama with experts.
MIXTRAL = GGUFArchitecture(
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


@dataclass(frozen=True, slots=True)
class TargetTensor:
    """A tensor of the resulting model: its name in the file, its name and shape in the result.

    weights.py undoes what llama.cpp's converter has done: where `heads` is set, it has reordered the rows of each head;
    where `shift` is set, it has added that to all numbers; where `part` is set, (n, count), it has put `count` of these
    into one tensor, of which this is the nth; `reshaped` is the shape in the file, if it has changed it.
    """

    source: str
    name: str
    shape: tuple[int, ...]
    heads: int = 0
    shift: float = 0.0
    part: tuple[int, int] | None = None
    reshaped: tuple[int, ...] = ()

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape in the file."""
        return self.reshaped or (self.shape if self.part is None else (self.part[1], *self.shape))

    @property
    def matrix(self) -> bool:
        """Whether this is the weight of a linear layer, the embedding or the head, except routers of experts."""
        return len(self.shape) == 2 and not self.source.endswith(("norm.weight", "ffn_gate_inp.weight"))


@dataclass(frozen=True, slots=True)
class ConversionPlan:
    """The configuration and tensors of the resulting model directory."""

    config: dict[str, Any]
    tensors: list[TargetTensor]


def plan_conversion(file: GGUFFile) -> ConversionPlan:
    """Checks that the file has a complete model of a supported architecture. Raises UserError otherwise."""
    metadata = Metadata(file)
    architecture = metadata.string("general.architecture")
    family = FAMILIES.get(architecture)
    if family is None:
        known = ", ".join(FAMILIES)
        raise UserError(
            f"{file.path} holds a model of architecture {architecture!r}; import knows {known}. "
            "Use the model's safetensors version instead."
        )
    if metadata.integer(f"{architecture}.expert_count", 0) and architecture == "llama":
        family = MIXTRAL
    known_keys = KNOWN | set(family.numbers) | set(family.required)
    for name, value in family.required.items():
        if file.metadata.get(key := f"{architecture}.{name}", value) != value:
            raise metadata.wrong(key, file.metadata[key], str(value))
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
    return ConversionPlan(config, wanted)


def _config(metadata: Metadata, architecture: str, family: GGUFArchitecture) -> dict[str, Any]:
    tensors = metadata.file.tensors
    hidden = metadata.positive(f"{architecture}.embedding_length")
    layers = metadata.positive(f"{architecture}.block_count")
    heads = metadata.positive(f"{architecture}.attention.head_count")
    if layers > MAX_LAYERS:
        raise metadata.wrong(f"{architecture}.block_count", layers, f"at most {MAX_LAYERS}")
    own_kv_heads = []
    if family.layer_types is None:
        kv_heads = metadata.positive(f"{architecture}.attention.head_count_kv", heads)
    else:
        own_kv_heads = metadata.per_layer(f"{architecture}.attention.head_count_kv", layers)
        kv_heads = max(own_kv_heads)
        if {*own_kv_heads} - {0} != {kv_heads}:
            raise metadata.wrong(f"{architecture}.attention.head_count_kv", own_kv_heads, "0 or one other number")
    head_dim = metadata.positive(f"{architecture}.attention.key_length", max(1, hidden // heads))
    context = metadata.positive(f"{architecture}.context_length")
    if heads % kv_heads:
        raise metadata.wrong(f"{architecture}.attention.head_count_kv", kv_heads, f"a divisor of {heads}")
    turned = metadata.positive(f"{architecture}.rope.dimension_count", head_dim)
    if head_dim % 2 or metadata.integer(f"{architecture}.attention.value_length", head_dim) != head_dim:
        raise metadata.wrong(f"{architecture}.attention.value_length", head_dim, f"the head size {head_dim}, even,")
    if turned % 2 or turned > head_dim or (turned != head_dim and not family.rotates_part):
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
    if family.layer_types is not None:
        config["layer_types"] = [family.layer_types[count == 0] for count in own_kv_heads]
    for name, sources in family.biases.items():
        config[name] = f"blk.0.{sources[0]}.bias" in tensors
    _add_unstated_values(metadata, architecture, family, config)
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
        bounds = {"beta_fast": 32.0, "beta_slow": 1.0}
        for name, default in bounds.items():
            bounds[name] = metadata.number(f"{architecture}.rope.scaling.yarn_{name}", default)
        return scaled | {"original_max_position_embeddings": original} | bounds
    raise metadata.wrong(f"{architecture}.rope.scaling.type", kind, "none, linear or yarn")


def _llama3(metadata: Metadata, theta: float, head_dim: int) -> dict[str, Any]:
    """Derives the factor from the stored divisors and checks that the formula reproduces all of them."""
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


def _add_unstated_values(
    metadata: Metadata, architecture: str, family: GGUFArchitecture, config: dict[str, Any]
) -> None:
    """Adds values that llama.cpp's model code hard-codes for some architectures and the file omits."""
    kind, layers = config["model_type"], config["num_hidden_layers"]
    if kind == "gpt_oss":
        config["rope_parameters"]["truncate"] = False
    if "expert_count" in family.numbers:
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


def _tensors(config: dict[str, Any], family: GGUFArchitecture) -> list[TargetTensor]:
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    query, key = heads * head_dim, kv_heads * head_dim
    experts = config.get("num_local_experts") or config.get("num_experts") or 0
    sizes = {"Q": query, "K": key, "S": query + 2 * key, "D": head_dim, "H": hidden, "I": inner, "2I": 2 * inner}
    sizes |= {"A": heads, "E": experts, "M": config.get("moe_intermediate_size", 0)}
    sizes |= {"1": 1, "3H": 3 * hidden, "L": config.get("conv_L_cache", 0)}
    biased = {name for flag, names in family.biases.items() if config[flag] for name in names}
    biased |= set(family.always_biased)
    blocks = list(family.blocks)
    if config.get("use_qk_norm"):
        for at, count in (("q", heads), ("k", kv_heads)):
            sizes[at] = count
            blocks.append((f"attn_{at}_norm", f"self_attn.{at}_norm", (at, "D")))
    wanted = [TargetTensor("token_embd.weight", "model.embed_tokens.weight", (config["vocab_size"], hidden))]

    def add(prefix: str, short: str, name: str, shape: tuple[int, ...]) -> None:
        source = prefix + short
        permuted = {"attn_q": heads, "attn_k": kv_heads}.get(short, 0) if family.permuted else 0
        shift = family.norm_shift if short.endswith("norm") else 0.0
        if "{}" in name:
            for expert in range(experts):
                for end, one in (("weight", shape[1:]), ("bias", shape[1:2])):
                    if end == "weight" or short in biased:
                        full = f"{name.format(expert)}.{end}"
                        wanted.append(TargetTensor(f"{source}.{end}", full, one, part=(expert, experts)))
            return
        if short.endswith((".weight", ".bias")):
            wanted.append(TargetTensor(source, name, shape))
            return
        reshaped = tuple(sizes[size] for size in family.reshaped.get(short, ()))
        wanted.append(TargetTensor(f"{source}.weight", f"{name}.weight", shape, permuted, shift, reshaped=reshaped))
        if short in biased:
            wanted.append(TargetTensor(f"{source}.bias", f"{name}.bias", shape[:1], permuted))

    for layer in range(config["num_hidden_layers"]):
        recurs = family.layer_types is not None and config["layer_types"][layer] == family.layer_types[1]
        dense = layer < config.get("num_dense_layers", 0)
        kinds = ("recurrent" if recurs else "attention", "dense" if dense else "experts")
        for source, name, shape in (*blocks, *(block for kind in kinds for block in family.kinds.get(kind, ()))):
            add(f"blk.{layer}.", source, f"model.layers.{layer}.{name}", tuple(sizes[size] for size in shape))
    add("", *family.last_norm, (hidden,))
    if not config["tie_word_embeddings"]:
        wanted.append(TargetTensor("output.weight", "lm_head.weight", (config["vocab_size"], hidden)))
    return wanted
