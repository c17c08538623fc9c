"""A model directory with some files replaced, as --rope-factor, --tokenizer-config-path and others ask for.

The result is an ordinary model directory of links, so that no role needs to know what was asked for.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tgi.hub.cache import cached
from tgi.hub.safetensors import INDEX, choose, indexed, is_weights, refuse_pickled
from tgi.kernel.errors import UserError

# Where a chat template may stand besides tokenizer_config.json; all of them win over it.
TEMPLATES = ("chat_template.json", "chat_template.jinja", "additional_chat_templates")

Files = dict[str, Path | str]  # what a directory holds: links, and texts of our own


@dataclass(frozen=True, slots=True)
class Changes:
    """What is to be different from the model's own directory; None where nothing is. Paths are absolute."""

    rope_factor: float | None = None  # of linear scaling
    tokenizer_config: Path | None = None  # a tokenizer_config.json, or a .jinja template
    weights: Path | None = None  # a directory of safetensors
    generation_config: Path | None = None  # a directory with a generation_config.json


def changed(directory: Path, changes: Changes, place: Path) -> Path:
    """`directory` itself if nothing changes, else a directory of links below `place`, the same for the same changes.

    Raises UserError if what shall replace the model's files is not there or not what it should be.
    """
    if changes == Changes():
        return directory
    files: Files = {path.name: path.absolute() for path in directory.iterdir()}
    if changes.weights:
        files = _with_weights(files, changes.weights)
    if changes.rope_factor is not None:
        files["config.json"] = _with_rope(directory / "config.json", changes.rope_factor)
    if changes.tokenizer_config:
        files = _with_tokenizer_config(files, directory, changes.tokenizer_config)
    if changes.generation_config:
        files["generation_config.json"] = _with_generation_config(directory, changes.generation_config)
    name = hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()[:16]
    return cached(place / name, lambda temporary: _lay_out(files, temporary), lambda *told: None)


def _lay_out(files: Files, directory: Path) -> None:
    for name, content in files.items():
        if isinstance(content, Path):
            (directory / name).symlink_to(content)
        else:
            (directory / name).write_text(content, encoding="utf-8")


def _with_weights(files: Files, weights: Path) -> Files:
    """The weight files of another directory. Its index counts; the model's own does if all that it names is there."""
    if not weights.is_dir():
        raise UserError(f"`weights_cache_override` {weights} is not a directory. Name the one that the weights are in.")
    there = {path.name: path.absolute() for path in weights.iterdir()}
    if not choose(list(there)):
        raise refuse_pickled(str(weights), list(there))
    kept = {name: path for name, path in files.items() if not is_weights(name)}
    own = kept.get(INDEX)
    if isinstance(own, Path) and not set(indexed(own)) <= set(there):
        del kept[INDEX]
    return kept | {name: path for name, path in there.items() if is_weights(name) or name == INDEX}


def _with_rope(path: Path, factor: float) -> str:
    """config.json with linear rotary scaling in place of its own, and the longer context that follows from it."""
    config = _object(path)
    text = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    trained = text.get("max_position_embeddings")
    if not isinstance(trained, int):
        raise UserError(f"{path} has no max_position_embeddings, so --rope-scaling and --rope-factor do not apply.")
    own = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if any(isinstance(value, dict) for value in own.values()):
        raise UserError(f"{path} has rotary scalings per kind of layer: --rope-scaling and --rope-factor do not apply.")
    trained = own.get("original_max_position_embeddings", trained)
    scaling = {"rope_type": "linear", "factor": factor, "original_max_position_embeddings": trained}
    scaling |= {"rope_theta": own["rope_theta"]} if "rope_theta" in own else {}
    text.pop("rope_scaling", None)
    text["rope_parameters" if "rope_parameters" in text else "rope_scaling"] = scaling
    text["max_position_embeddings"] = int(trained * factor)
    return json.dumps(config)


def _with_tokenizer_config(files: Files, directory: Path, path: Path) -> Files:
    """The given entries over the model's own; a chat template among them replaces all that the model brings."""
    if not path.is_file():
        raise UserError(f"`tokenizer_config_path` {path} is no file. Name a tokenizer_config.json or a .jinja file.")
    if path.suffix == ".jinja":
        return {name: kept for name, kept in files.items() if name not in TEMPLATES} | {"chat_template.jinja": path}
    given = _object(path)
    dropped = TEMPLATES if given.get("chat_template") else ()
    kept = {name: content for name, content in files.items() if name not in dropped}
    return kept | {"tokenizer_config.json": _merged(directory / "tokenizer_config.json", given)}


def _with_generation_config(directory: Path, place: Path) -> str:
    """The entries of the file in `place` over the model's own."""
    path = place / "generation_config.json"
    if not path.is_file():
        raise UserError(
            f"`generation_config` {place} has no generation_config.json. Name a directory that has one, `auto` for the "
            "model's own, or `tgi` for TGI's defaults."
        )
    return _merged(directory / path.name, _object(path))


def _merged(path: Path, given: dict[str, Any]) -> str:
    """The JSON object in the model's file, which need not exist, with the given entries over its own."""
    return json.dumps((_object(path) if path.is_file() else {}) | given)


def _object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} does not hold a JSON object.")
    return value
