"""What a module of families says of each model_type: a ModelFamily, and what most of them share."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tgi.worker.decoder_config import LatentConfig, TensorNames
from tgi.worker.mixers.interface import MixerConfig

Values = dict[str, Any]  # keys of config.json

# Keys that config.json may have in every family, with the defaults of transformers.
COMMON_KEYS: Values = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rope_parameters": None,
    "partial_rotary_factor": None,
    "original_max_position_embeddings": None,
}

RMS = {"rms_norm_eps": 1e-6}
RMS5 = {"rms_norm_eps": 1e-5}
BIASES = {"attention_bias": False, "mlp_bias": False}


LLAMA = TensorNames()


@dataclass(frozen=True)
class ModelFamily:
    """A model_type. The defaults describe llama."""

    # Keys of config.json that the family reads in addition to COMMON_KEYS, or with other defaults.
    keys: Values = field(default_factory=dict)
    # Fields of DecoderConfig that are constant in the family.
    fixed: Values = field(default_factory=dict)
    names: TensorNames = LLAMA
    # Keys of config.json, by the names that other families have for them.
    key_names: dict[str, str] = field(default_factory=dict)
    inner_configs: tuple[str, ...] = ()  # keys of config.json whose values have further keys
    # Values of config.json that early releases of the family have -> their current names.
    aliases: dict[str, str] = field(default_factory=dict)
    scale_embedding_by_width: bool = False  # the embedding is multiplied by sqrt(hidden)
    interleaved_rope: bool = False  # see RopeConfig.interleaved
    optional_query_key_norm: str = "each"  # the kind of norm that `use_qk_norm` asks for
    # Reads latent attention from these keys and the whole config.json; None: it has no such attention.
    latent: Callable[[Values, Values], LatentConfig] | None = None
    # Reads further fields of DecoderConfig, as `latent`.
    computed: Callable[[Values, Values], Values] | None = None
    # Keys that must have this value, if config.json has them.
    required: Values = field(default_factory=dict)
    parallel_norms: bool = False  # in a parallel layer the MLP has a norm of its own
    attention: bool = True  # some layers have it
    has_mlp: bool = True  # so have all layers
    one_part: bool = False  # a layer is attention, a recurrent mixer or an MLP, as config.json says
    # Reads the mixer of recurrent layers, as `latent`; None: there are none.
    mixer: Callable[[Values, Values], MixerConfig] | None = None
    # Reads what single layers have for themselves, as fields of LayerConfig for each; None: nothing.
    layer_sizes: Callable[[Values, Values], list[Values]] | None = None
    mixes_both: bool = False  # each layer has the mixer next to attention
    # "learned": a vector for each position is added to the embedding. It and "none" rotate nothing.
    positions: str = "rotary"
    positions_optional: bool = False  # without a rope_theta in config.json, nothing is rotated
    router: Values = field(default_factory=dict)  # fields of RouterConfig that are constant in the family
    parallel_experts: bool = False  # see ExpertsConfig.parallel
    rope_in_windows_only: bool = False  # where some layers have a sliding window, the others have no rotary embedding


class Variant(NamedTuple):
    """Another name under which models of a family are published, above all the text part of a multimodal one."""

    family: str
    keys: Values = {}  # those that have other defaults than in the family
    names: TensorNames | None = None  # where not those of the family
