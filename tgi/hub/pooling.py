"""Recognises models that end in a vector instead of tokens (embeddings, scores of pairs, classes), and reads how they
pool: from config.json and the files of sentence-transformers, without torch."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tgi.microkernel.errors import UserError, reading
from tgi.microkernel.messages.protocol import ModelTask

# Model types whose every token sees the whole text. Others are decoders, which end in a vector only if the directory
# has the files of sentence-transformers or the class is a classifier.
ENCODERS = frozenset(("bert", "camembert", "modernbert", "roberta", "xlm-roberta"))
# Position ids of these begin after the id of padding, so that as many positions are unused.
OFFSET_POSITIONS = frozenset(("camembert", "roberta", "xlm-roberta"))
CLASSIFIER = "ForSequenceClassification"
BIDIRECTIONAL = "use_bidirectional_attention"
MODULES = "modules.json"
# Files besides config.json that say how a model pools: part of its content hash.
POOLING_FILES = (MODULES, "1_Pooling/config.json", "sentence_bert_config.json", "config_sentence_transformers.json")
# Keys of a Pooling module's config.json, and the names of the field.
POOLING_KEYS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}
DENSE_ACTIVATIONS = {"Identity": "none", "Tanh": "tanh", "GELU": "gelu", "ReLU": "relu"}
MAX_MODULES = 16
MAX_POSITIONS = 1 << 31  # with which counters of all requests' tokens stay below 2**63


@dataclass(frozen=True, slots=True)
class DenseModule:
    """A dense layer of sentence-transformers after pooling."""

    directory: Path
    inputs: int
    outputs: int
    bias: bool
    activation: str  # one of DENSE_ACTIVATIONS' values


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    """How a model makes one vector of a text, or of a pair of texts."""

    task: ModelTask  # EMBED or CLASSIFY
    vocab_size: int
    # Whether the tokens of a pair's second text have another type: their ids are sent with `vocab_size` added.
    typed: bool
    pooling: str  # "mean", "cls" (the first token) or "last"
    max_tokens: int  # of a text: what the model was trained for
    longest: int  # tokens that its positions allow
    dense: tuple[DenseModule, ...] = ()
    normalizes: bool = False  # the vector has length 1
    labels: tuple[str, ...] = ()  # of a classifier, by index
    multi_label: bool = False  # each label has a probability of its own
    prompts: tuple[tuple[str, str], ...] = ()  # by name: texts that precede the inputs
    # Of a causal model that ranks: the two tokens of whose logits the difference is the score.
    score_tokens: tuple[str, str] | None = None


def read_pooling_config(directory: Path) -> PoolingConfig | None:
    """The PoolingConfig of a model directory; None for a model that generates text. Raises UserError if the files ask
    for something that is not served, or are damaged."""
    with reading(directory):
        return _read(directory)


def ends_in_vector(config: dict[str, Any], modules: bool) -> bool:
    """Whether the model of a parsed config.json does, with or without modules of sentence-transformers."""
    architecture = str((config.get("architectures") or [""])[0])
    if modules or architecture.endswith(CLASSIFIER) or is_bidirectional(config):
        return True
    return str(config.get("model_type", "")) in ENCODERS


def is_bidirectional(config: dict[str, Any]) -> bool:
    """Whether the tokens of texts see both sides. With "vision" those of images alone do (Gemma 4)."""
    return config.get(BIDIRECTIONAL) not in (None, False, "vision")


def text_positions(config: dict[str, Any]) -> int:
    """The tokens that the positions of a parsed config.json allow."""
    context = min(int(config.get("max_position_embeddings", 512)), MAX_POSITIONS)
    return context - (config.get("pad_token_id", 1) + 1 if config.get("model_type") in OFFSET_POSITIONS else 0)


def _read(directory: Path) -> PoolingConfig | None:
    config = _json(directory / "config.json")
    if not isinstance(config, dict):
        return None  # read_model_config reports it
    kind = str(config.get("model_type", ""))
    architecture = str((config.get("architectures") or [""])[0])
    modules = _json(directory / MODULES)
    classifies = architecture.endswith(CLASSIFIER)
    if not ends_in_vector(config, modules is not None):
        return None
    context = text_positions(config)
    own = _json(directory / "sentence_bert_config.json")
    limit = own.get("max_seq_length") if isinstance(own, dict) else None
    trained = min(limit, context) if isinstance(limit, int) and limit > 0 else context
    vocab_size = int(config.get("vocab_size") or 0)
    typed = kind == "bert" and int(config.get("type_vocab_size") or 0) > 1
    if classifies:
        return _classifier(config, kind, trained, context, vocab_size, typed)
    own = _json(directory / "config_sentence_transformers.json")
    prompts = own.get("prompts") if isinstance(own, dict) else None
    found = PoolingConfig(
        ModelTask.EMBED,
        vocab_size,
        typed,
        "cls" if kind in ENCODERS else "last",
        trained,
        context,
        normalizes=True,
        prompts=tuple((str(name), str(text)) for name, text in prompts.items()) if isinstance(prompts, dict) else (),
    )
    return found if modules is None else _with_modules(found, directory, modules)


def _classifier(
    config: dict[str, Any], kind: str, trained: int, context: int, vocab_size: int, typed: bool
) -> PoolingConfig:
    labels = config.get("id2label")
    if isinstance(labels, dict) and labels:
        names = tuple(str(labels[key]) for key in sorted(labels, key=int))
    else:
        names = tuple(f"LABEL_{index}" for index in range(int(config.get("num_labels") or 2)))
    score_tokens = config.get("classifier_from_token")
    pooling = config.get("classifier_pooling", "cls") if kind in ENCODERS else "last"
    return PoolingConfig(
        ModelTask.CLASSIFY,
        vocab_size,
        typed,
        pooling,
        trained,
        context,
        labels=names[:1] if score_tokens else names,
        multi_label=config.get("problem_type") == "multi_label_classification",
        score_tokens=None if not score_tokens else (str(score_tokens[0]), str(score_tokens[1])),
    )


def _with_modules(found: PoolingConfig, directory: Path, modules: Any) -> PoolingConfig:
    """Adds what modules.json lists: pooling, dense layers and the normalization, in this order."""
    if not isinstance(modules, list) or not 0 < len(modules) <= MAX_MODULES:
        raise UserError(f"{directory / MODULES} is not a list of modules of sentence-transformers.")
    pooling, normalizes, dense = found.pooling, False, []
    for module in modules:
        kind = str(module.get("type", "")).rsplit(".", 1)[-1]
        place = directory / str(module.get("path", ""))
        if not place.resolve().is_relative_to(directory.resolve()) and not place.is_symlink():
            raise UserError(f"{directory / MODULES} names the path {module.get('path')!r} outside of the model.")
        if kind == "Pooling":
            pooling = _pooling(place / "config.json")
        elif kind == "Dense":
            dense.append(_dense(place))
        elif kind == "Normalize":
            normalizes = True
        elif kind not in ("Transformer", "Dropout"):
            raise UserError(
                f"{directory / MODULES} has a module {kind}, which is not served: Transformer, Pooling, Dense and "
                "Normalize are."
            )
    return replace(found, pooling=pooling, dense=tuple(dense), normalizes=normalizes)


def _pooling(path: Path) -> str:
    config = _json(path) or {}
    if isinstance(mode := config.get("pooling_mode"), str):  # as newer releases write it
        chosen = {"lasttoken": "last"}.get(mode, mode)
        modes = [chosen] if chosen in POOLING_KEYS.values() else []
    else:
        modes = [name for key, name in POOLING_KEYS.items() if config.get(key)]
        others = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
        modes = modes if len(others) == 1 else []
    if len(modes) != 1:
        raise UserError(f"{path} does not ask for one of the poolings that are served: mean, cls or last token.")
    return modes[0]


def _dense(place: Path) -> DenseModule:
    config = _json(place / "config.json")
    if not isinstance(config, dict) or not {"in_features", "out_features"} <= config.keys():
        raise UserError(f"{place} is not a Dense module of sentence-transformers: config.json with in_features.")
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rsplit(".", 1)[-1]
    if activation not in DENSE_ACTIVATIONS:
        raise UserError(
            f"{place / 'config.json'}: the activation {activation} is not served; {', '.join(DENSE_ACTIVATIONS)} are."
        )
    bias = config.get("bias") is not False
    inputs, outputs = int(config["in_features"]), int(config["out_features"])
    return DenseModule(place, inputs, outputs, bias, DENSE_ACTIVATIONS[activation])


def _json(path: Path) -> Any:
    """The JSON value of a file; None if there is no such file. Raises UserError if it is damaged."""
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged: {error}. Download the model again.") from error
