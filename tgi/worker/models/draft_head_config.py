"""DraftHeadConfig: a head that drafts from the hidden states of the model that it belongs to, as data, without torch.

MTP layers are read from the checkpoint of the served model, EAGLE-3 heads from a directory of their own. See
draft_head.py for what they compute.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from tgi.microkernel.errors import UserError
from tgi.worker.decoder_config import CheckpointLayout, DecoderConfig, TensorNames, UnsupportedConfig
from tgi.worker.models.config_reader import read_config_file, read_decoder_config, require_sizes

MAX_LAYERS = 16
# What NVIDIA's trainer may say of a head: key -> the value that is computed, and what another one means.
_REQUIRED: dict[str, tuple[object, str]] = {
    "use_aux_hidden_state": (True, "reads the last hidden states alone"),
    "use_input_layernorm_in_first_layer": (True, "has no norm of the embedding"),
    "use_last_layernorm": (True, "has no last norm"),
    "use_mtp_layernorm": (False, "has norms of its inputs as layers for multi-token prediction"),
    "parallel_draft_step": (1, "predicts several tokens at once"),
}
# Layers that a head may be made of: with heads of queries and keys as in Llama.
_LAYER_TYPES = ("llama", "qwen2", "qwen3", "mistral")
# EAGLE-3 heads by the names of a model of one layer. The training code of the paper calls the layer midlayer.
_EAGLE3_LAYOUT = CheckpointLayout(
    (
        (r"^(model\.)?midlayer\.", "layers.0."),
        (r"^(?=(layers|norm|embed_tokens|fc|fc_norm|input_norm)\.)", "model."),
        (r"^model\.(?=(d2t|t2d|lm_head\.))", ""),
    )
)


class DraftHeadNames(NamedTuple):
    """Names of the parts in the checkpoint; None: the head does not have it."""

    layer: str = ""  # prefix of the tensors of the only decoder layer; "": as of a model
    embedding_norm: str = "model.layers.0.input_layernorm"
    hidden_norm: str | None = None
    projection: str | None = None
    norm: str = "model.norm"
    fusion: str | None = None
    fusion_norms: tuple[str, ...] = ()  # one of all that is tapped, or one for each tap
    targets: str | None = None  # of each id that the head scores, the difference to that of the served model


@dataclass(frozen=True)
class DraftHeadConfig:
    """What a head computes; see draft_head.py."""

    decoder: DecoderConfig  # of the head's layers alone, with the vocabulary of the served model
    names: DraftHeadNames
    taps: tuple[int, ...] = ()  # numbers of layers of the served model: DecoderModel.tap_hidden
    target_hidden: int = 0  # width of each tapped hidden state
    scored: int = 0  # ids that a head of its own scores; 0: it has none
    hidden_first: bool = False  # in the input of the projection
    returns_normed: bool = True  # further drafts go on from the output of the last norm, not from its input


def mtp_configs(config: DecoderConfig) -> list[DraftHeadConfig]:
    """The first MTP layer of this model, as checkpoints have it: DeepSeek-V3 and GLM after the last layer, Qwen3-Next
    and MiMo under prefixes of their own. It is like the last layer with attention, and routed if the model has
    experts. Raises UserError if no layer has attention."""
    if not config.attention_layers:
        raise UserError(
            "A model without attention cannot draft for itself: layers for multi-token prediction have attention. "
            "Choose another --draft-model-id, or --speculate without one."
        )
    layer = config.layers[config.attention_layers[-1]]._replace(routed=config.experts is not None)
    decoder = replace(config, layers=(layer,), recurrent=None)
    after, mimo = f"model.layers.{len(config.layers)}.", "model.mtp_layers.0."
    found = []
    for at, prefix, names in (
        (after, after, ("enorm", "hnorm", "eh_proj", "shared_head.norm")),
        ("mtp.layers.0.", "mtp.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")),
        (mimo, mimo, ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")),
    ):
        embedding, hidden, projection, last = (prefix + name for name in names)
        parts = DraftHeadNames(at, embedding, hidden, projection, last)
        found.append(DraftHeadConfig(decoder, parts, hidden_first=prefix == mimo))
    return found


def read_mtp_config(directory: Path, stored: Collection[str], config: DecoderConfig) -> DraftHeadConfig:
    """The first MTP layer of a model whose checkpoint has tensors of these names. Raises UserError if it has none."""
    forms = mtp_configs(config)
    for head in forms:
        if f"{head.names.projection}.weight" in stored:
            return head
    expected = " or ".join(str(head.names.projection) for head in forms)
    raise UserError(
        f"The model in {directory} cannot draft for itself: it has no layer for multi-token prediction ({expected}). "
        "Choose another --draft-model-id, or --speculate without one."
    )


def read_eagle3_config(directory: Path, served: DecoderConfig | None = None) -> DraftHeadConfig:
    """The EAGLE-3 head of a directory, for this model, whose context it has; None: not known, nor are the taps then.
    Raises UserError if it cannot be computed, or is not for the model."""
    config = read_config_file(directory)
    path, eagle = directory / "config.json", config.get("eagle_config") or {}
    layer = config.get("transformer_layer_config") or config
    if not isinstance(eagle, dict) or not isinstance(layer, dict):
        raise UserError(f"{path} is not that of an EAGLE-3 head: it has no object where one is expected.")
    kind = layer.get("model_type", "llama")
    if kind not in _LAYER_TYPES:
        raise UserError(f"The layer of the EAGLE-3 head in {directory} is one of {kind}, which is not computed.")
    count = layer.get("num_hidden_layers", 1)
    if type(count) is not int or not 0 < count <= MAX_LAYERS:
        raise UserError(f"{path} is not that of an EAGLE-3 head: it has {count!r} layers, 1 to {MAX_LAYERS} expected.")
    for key, (allowed, meaning) in _REQUIRED.items():
        if (value := eagle.get(key, config.get(key, allowed))) not in (None, allowed):
            raise UserError(
                f"The EAGLE-3 head in {directory} {meaning} ({key} {value!r}), which is not computed. Choose another "
                "--draft-model-id."
            )

    def flag(name: str) -> bool:
        return bool(config.get(name, eagle.get(name)))

    try:
        decoder = require_sizes(read_decoder_config(layer | {"model_type": kind, "num_hidden_layers": count}))
        taps = _taps(directory, config, eagle, None if served is None else len(served.layers))
        scored = int(config.get("draft_vocab_size") or decoder.vocab_size)
        target_hidden = int(config.get("target_hidden_size") or decoder.hidden)
    except UnsupportedConfig as reason:
        raise UserError(f"{path} has {reason}, which is not computed in the layer of an EAGLE-3 head.") from reason
    except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise UserError(f"{path} is not that of an EAGLE-3 head: {error!r}.") from error
    if not 0 < scored <= decoder.vocab_size:
        raise UserError(
            f"{path} is not that of an EAGLE-3 head: its draft_vocab_size is {scored}, and its vocab_size "
            f"{decoder.vocab_size}."
        )
    fusion_norms: tuple[str, ...] = ()
    if flag("norm_before_fc"):
        fusion_norms = ("model.input_norm",)
    elif flag("fc_norm"):
        fusion_norms = tuple(f"model.fc_norm.{number}" for number in range(len(taps)))
    # Either the residual stream begins after the norm, or the norm is that before attention.
    first = flag("norm_before_residual")
    names = TensorNames(layout=_EAGLE3_LAYOUT)
    joining = replace(names, attention_before=None if first else "hidden_norm")
    layers = (decoder.layers[0]._replace(joins_embedding=True), *decoder.layers[1:])
    own = DraftHeadNames(
        hidden_norm="model.layers.0.hidden_norm" if first else None,
        fusion="model.fc",
        fusion_norms=fusion_norms,
        targets="d2t" if scored < decoder.vocab_size else None,
    )
    decoder = replace(decoder, layers=layers, tied=False, names=names, joining_names=joining)
    head = DraftHeadConfig(decoder, own, taps, target_hidden, scored, returns_normed=flag("norm_output"))
    if served is None:
        return head
    _require_fit(directory, head, served)
    return replace(head, decoder=replace(decoder, context_length=served.context_length))


def _require_fit(directory: Path, head: DraftHeadConfig, served: DecoderConfig) -> None:
    """Raises UserError if an EAGLE-3 head is not for this model."""
    for what, own, wanted in (
        ("vocab_size", head.decoder.vocab_size, served.vocab_size),
        ("hidden_size", head.target_hidden, served.hidden),
    ):
        if own != wanted:
            raise UserError(
                f"The EAGLE-3 head in {directory} cannot draft for this model: it is for a {what} of {own}, and the "
                f"model's is {wanted}. Choose the --draft-model-id of a head that was trained for the model."
            )
    if served.streams is not None:
        raise UserError(
            f"The EAGLE-3 head in {directory} cannot draft for a model with several streams of hidden states. Choose "
            "another --draft-model-id, or --speculate without one."
        )


def _taps(directory: Path, config: dict[str, Any], eagle: dict[str, Any], layers: int | None) -> tuple[int, ...]:
    """DraftHeadConfig.taps. By default three as in the paper's code; speculators' configurations name them in the same
    way. Those of SGLang's and NVIDIA's trainers, in `eagle_config`, name the layers whose output is tapped."""
    count = layers or 6
    named, after = config.get("eagle_aux_hidden_state_layer_ids"), eagle.get("eagle_aux_hidden_state_layer_ids")
    if named:
        taps = sorted(int(number) for number in named)
    elif after:
        taps = sorted(int(number) + 1 for number in after)
    else:
        taps = sorted((2, count // 2, count - 3))
    if layers is not None and not (taps[0] >= 0 and taps[-1] <= layers and len(taps) <= layers + 1):
        raise UserError(
            f"The EAGLE-3 head in {directory} reads the hidden states before layers {', '.join(map(str, taps))}, and "
            f"the model has layers 0 to {layers - 1}. Choose a head that was trained for the model."
        )
    return tuple(taps)
