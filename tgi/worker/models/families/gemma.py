"""The Gemma family."""

from dataclasses import replace
from statistics import NormalDist

from tgi.worker.decoder_config import (
    HeadShape,
    LayerInputConfig,
    StackedExperts,
    StreamsConfig,
    TensorNames,
    UnsupportedConfig,
)
from tgi.worker.models.families.family import RMS, ModelFamily, Values
from tgi.worker.models.families.readings import has_sliding_window

_GEMMA = {
    **RMS,
    "head_dim": 256,
    "attention_bias": False,
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "use_bidirectional_attention": None,
}
_GEMMA2 = {
    **_GEMMA,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "final_logit_softcapping": None,
    "sliding_window": 4096,
    "layer_types": None,
}
_GEMMA4 = {
    **_GEMMA,
    "hidden_activation": "gelu_pytorch_tanh",
    "final_logit_softcapping": None,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "layer_types": None,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
        "sliding_attention": {},
    },
    "per_layer_config": None,
    "global_head_dim": 512,
    "num_global_key_value_heads": None,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
    "pad_token_id": 0,
    "enable_moe_block": False,
    "num_experts": None,
    "top_k_experts": None,
    "moe_intermediate_size": None,
    "norm_topk_prob": True,
}
_GEMMA4_FIXED = {"query_key_norm": "head", "value_norm": True, "attention_scale": 1.0, "layer_scales": True}
_FOUR_NORMS = TensorNames(
    attention_after="post_attention_layernorm",
    mlp_before="pre_feedforward_layernorm",
    mlp_after="post_feedforward_layernorm",
)


def _layer_sizes(values: Values, config: Values) -> list[Values]:
    """What the layers of Gemma 4 have of their own, and what belongs to an earlier layer, as fields of LayerConfig."""
    count = config["num_hidden_layers"]
    slides = [has_sliding_window(values, number) for number in range(count)]
    if slides[-1]:  # transformers would leave out that window
        raise UnsupportedConfig("a last layer with a sliding window")
    shapes = [_head_shape(values, config, number, slides[number]) for number in range(count)]
    first = count - values["num_kv_shared_layers"]  # of those that share
    sizes: list[Values] = []
    for number, shape in enumerate(shapes):
        shares = None
        if number >= first:
            shares = max((other for other in range(first) if slides[other] == slides[number]), default=None)
            if shares is None or shapes[shares] != shape:
                raise UnsupportedConfig("num_kv_shared_layers")
        wide = number >= first and values["use_double_wide_mlp"]
        sizes.append(
            {
                **shape._asdict(),
                "keys_as_values": bool(values["attention_k_eq_v"]) and not slides[number],
                "shares": shares,
                "intermediate": 2 * config["intermediate_size"] if wide else None,
            }
        )
    return sizes


def _head_shape(values: Values, config: Values, number: int, slides: bool) -> HeadShape:
    """The sizes of a layer's keys and values."""
    kv_heads = values["num_key_value_heads"] or config["num_attention_heads"]
    usual, own = {"head_dim": values["head_dim"], "num_key_value_heads": kv_heads}, Values()
    if values["per_layer_config"] is not None:
        own = values["per_layer_config"].get(str(number), {})
    elif not slides:
        own = {"head_dim": values["global_head_dim"]}
        if values["attention_k_eq_v"] and values["num_global_key_value_heads"] is not None:
            own["num_key_value_heads"] = values["num_global_key_value_heads"]
    if unknown := own.keys() - usual.keys():
        raise UnsupportedConfig(f"{', '.join(sorted(unknown))} of single layers")
    sizes = usual | own
    return HeadShape(sizes["num_key_value_heads"], sizes["head_dim"])


def _layer_inputs(values: Values, config: Values) -> Values:
    width = values["hidden_size_per_layer_input"]
    if not width:
        return {"layer_inputs": None}
    return {
        "layer_inputs": LayerInputConfig(width, values["vocab_size_per_layer_input"], values.get("pad_token_id") or 0)
    }


def _gemma3n_sizes(values: Values, config: Values) -> list[Values]:
    """As `_layer_sizes`, of Gemma 3n."""
    count, widths, sparsity = config["num_hidden_layers"], config["intermediate_size"], values["sparsity"]
    if sparsity is None:
        sparsity = [0.95 if count > 10 and number < 10 else 0.0 for number in range(count)]
    widths, sparsity = (one if isinstance(one, list) else [one] * count for one in (widths, sparsity))
    slides, first = (
        [has_sliding_window(values, number) for number in range(count)],
        count - values["num_kv_shared_layers"],
    )
    sizes: list[Values] = []
    for number, (width, part) in enumerate(zip(widths, sparsity, strict=True)):
        shares = None
        if number >= first:
            shares = max((other for other in range(first) if slides[other] == slides[number]), default=None)
            if shares is None:
                raise UnsupportedConfig("num_kv_shared_layers")
        above = NormalDist().inv_cdf(part) if part > 0 else None
        own = width if width != max(widths) or above is not None else None
        sizes.append({"intermediate": own, "sparse_above": above, "shares": shares})
    return sizes


def _gemma3n_parts(values: Values, config: Values) -> Values:
    """The streams of Gemma 3n, and what makes its layers' inputs."""
    streams = StreamsConfig(values["altup_num_inputs"], values["altup_active_idx"], bool(values["altup_correct_scale"]))
    return {**_layer_inputs(values, config), "streams": streams, "residual_rank": values["laurel_rank"]}


FAMILIES: dict[str, ModelFamily] = {
    "gemma": ModelFamily(
        _GEMMA, {"norm_offset": 1.0}, aliases={"gelu": "gelu_pytorch_tanh"}, scale_embedding_by_width=True
    ),
    "gemma2": ModelFamily(
        {**_GEMMA2, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0, "sliding_window_pattern": 2},
        {"norm_offset": 1.0},
        _FOUR_NORMS,
        scale_embedding_by_width=True,
    ),
    "gemma3_text": ModelFamily(
        {**_GEMMA2, "sliding_window_pattern": 6, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0},
        {"norm_offset": 1.0, "query_key_norm": "head"},
        _FOUR_NORMS,
        scale_embedding_by_width=True,
    ),
    "gemma3n_text": ModelFamily(
        {
            **_GEMMA,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 32768,
            "num_key_value_heads": 2,
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
            "final_logit_softcapping": 30.0,
            "sliding_window": 512,
            "sliding_window_pattern": 5,
            "layer_types": None,
            "vocab_size_per_layer_input": 262144,
            "hidden_size_per_layer_input": 256,
            "num_kv_shared_layers": 15,
            "laurel_rank": 64,
            "altup_num_inputs": 4,
            "altup_active_idx": 0,
            "altup_correct_scale": True,
            "sparsity": None,
        },
        {"query_key_norm": "head", "value_norm": True, "attention_scale": 1.0},
        _FOUR_NORMS,
        key_names={"sparsity": "activation_sparsity_pattern"},
        computed=_gemma3n_parts,
        layer_sizes=_gemma3n_sizes,
        scale_embedding_by_width=True,
    ),
    "gemma4_text": ModelFamily(
        _GEMMA4,
        _GEMMA4_FIXED,
        replace(
            _FOUR_NORMS,
            router="router.proj",
            expert_gate="experts.{}.gate_proj",
            expert_up="experts.{}.up_proj",
            expert_down="experts.{}.down_proj",
            stacked=StackedExperts("experts.gate_up_proj", "experts.down_proj"),
        ),
        computed=_layer_inputs,
        layer_sizes=_layer_sizes,
        scale_embedding_by_width=True,
        router={"expert_scaled": True},
        parallel_experts=True,
    ),
    "gemma4_unified_text": ModelFamily(
        {**_GEMMA4, "sliding_window": 1024, "max_position_embeddings": 262144, "hidden_size_per_layer_input": 0},
        _GEMMA4_FIXED,
        _FOUR_NORMS,
        computed=_layer_inputs,
        layer_sizes=_layer_sizes,
        scale_embedding_by_width=True,
    ),
}
