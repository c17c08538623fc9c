"""A model directory with some files replaced, for --rope-factor, --tokenizer-config-path and similar flags.

The result is an ordinary model directory of links, so roles need not know the flags.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tgi.hub.gguf_import import cached_directory
from tgi.hub.weight_files import INDEX, choose_weight_files, files_of_index, is_weights, no_safetensors_error
from tgi.microkernel.errors import UserError

# Files of chat templates; each overrides the template in tokenizer_config.json.
TEMPLATES = ("chat_template.json", "chat_template.jinja", "additional_chat_templates")

Files = dict[str, Path | str]  # content of a directory: links, and texts of our own


@dataclass(frozen=True, slots=True)
class ModelOverrides:
    """The requested replacements; None: not replaced. Paths are absolute."""

    rope_factor: float | None = None  # factor of linear rotary scaling
    tokenizer_config: Path | None = None  # a tokenizer_config.json, or a .jinja template
    weights: Path | None = None  # a directory of safetensors
    generation_config: Path | None = None  # a directory with a generation_config.json


def overridden_directory(directory: Path, changes: ModelOverrides, folder: Path) -> Path:
    """`directory` itself if nothing changes, else a directory of links below `folder`, the same for the same overrides.

    Raises UserError if what shall replace the model's files is not there or not what it should be.
    """
    if changes == ModelOverrides():
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
    return cached_directory(folder / name, lambda temporary: _lay_out(files, temporary), lambda *told: None)


def _lay_out(files: Files, directory: Path) -> None:
    for name, content in files.items():
        if isinstance(content, Path):
            (directory / name).symlink_to(content)
        else:
            (directory / name).write_text(content, encoding="utf-8")


def _with_weights(files: Files, weights: Path) -> Files:
    """Takes the weight files and index of another directory; the model's own index only if all its files are there."""
    if not weights.is_dir():
        raise UserError(f"`weights_cache_override` {weights} is not a directory. Name the one that the weights are in.")
    there = {path.name: path.absolute() for path in weights.iterdir()}
    if not choose_weight_files(list(there)):
        raise no_safetensors_error(str(weights), list(there))
    kept = {name: path for name, path in files.items() if not is_weights(name)}
    own = kept.get(INDEX)
    if isinstance(own, Path) and not set(files_of_index(own)) <= set(there):
        del kept[INDEX]
    return kept | {name: path for name, path in there.items() if is_weights(name) or name == INDEX}


def _with_rope(path: Path, factor: float) -> str:
    """config.json with linear rotary scaling instead of its own, and the resulting longer context."""
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
    """Overrides entries of tokenizer_config.json; a given chat template replaces all templates of the model."""
    if not path.is_file():
        raise UserError(f"`tokenizer_config_path` {path} is no file. Name a tokenizer_config.json or a .jinja file.")
    if path.suffix == ".jinja":
        return {name: kept for name, kept in files.items() if name not in TEMPLATES} | {"chat_template.jinja": path}
    given = _object(path)
    dropped = TEMPLATES if given.get("chat_template") else ()
    kept = {name: content for name, content in files.items() if name not in dropped}
    return kept | {"tokenizer_config.json": _merged(directory / "tokenizer_config.json", given)}


def _with_generation_config(directory: Path, folder: Path) -> str:
    """Overrides entries of generation_config.json with those of the file in `folder`."""
    path = folder / "generation_config.json"
    if not path.is_file():
        raise UserError(
            f"`generation_config` {folder} has no generation_config.json. Name a directory that has one, `auto` for "
            "the model's own, or `tgi` for TGI's defaults."
        )
    return _merged(directory / path.name, _object(path))


def _merged(path: Path, given: dict[str, Any]) -> str:
    """The JSON object of the model's file, if it exists, with the given entries overriding it."""
    return json.dumps((_object(path) if path.is_file() else {}) | given)


def _object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} does not hold a JSON object.")
    return value
