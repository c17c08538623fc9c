"""Finds and checks the weight files of a model directory without reading tensors."""

import json
import struct
from pathlib import Path
from typing import Any, NamedTuple

from tgi.microkernel.errors import UserError

INDEX = "model.safetensors.index.json"
NOT_WEIGHTS = ("arguments", "args", "training")
PICKLED = (".bin", ".pt", ".pth", ".ckpt")
MAX_HEADER = 100 << 20  # the limit of the format's own library


class StoredTensor(NamedTuple):
    """A tensor of a safetensors file, by its header."""

    dtype: str  # in the format's words: "BF16", "I8"
    shape: tuple[int, ...]


def is_weights(name: str) -> bool:
    """Whether a file at the root of a model directory contains weights, by its name."""
    return name.endswith(".safetensors") and not any(word in name for word in NOT_WEIGHTS)


def choose_weight_files(names: list[str]) -> list[str]:
    """The weight files among the files at the root of a model directory, sorted. Empty if there are none.

    Some repositories contain the weights twice; `consolidated` files are then in another program's layout.
    """
    weights = sorted(name for name in names if is_weights(name))
    return [name for name in weights if not name.startswith("consolidated")] or weights


def no_safetensors_error(where: str, names: list[str]) -> UserError:
    """The error for a directory or repository without safetensors."""
    pickled = sorted(name for name in names if name.endswith(PICKLED))
    if not pickled:
        return UserError(f"{where} has no weights: no .safetensors file was found. Is the download complete?")
    return UserError(
        f"{where} has its weights only as {pickled[0]}, a format that can run code when it is loaded. Only safetensors "
        "are served. Convert them on a machine where you trust the file: "
        "AutoModelForCausalLM.from_pretrained(NAME).save_pretrained(DIR)."
    )


def weights_identity(directory: Path) -> list[list[Any]]:
    """What tells the weights of a model directory, and its configuration, from others: names, sizes and times of files,
    where they really are (in the Hub's cache the name is a digest)."""
    files = sorted(path.resolve() for path in directory.iterdir() if is_weights(path.name) or path.suffix == ".json")
    return [[path.name, (status := path.stat()).st_size, status.st_mtime_ns] for path in files]


def weight_files(directory: Path) -> tuple[Path, ...]:
    """The weight files of a model directory, sorted. Raises UserError if some are missing or damaged."""
    names = [path.name for path in directory.iterdir()]
    chosen = choose_weight_files(names)
    if (directory / INDEX).is_file():
        chosen = files_of_index(directory / INDEX)
        missing = [name for name in chosen if name not in names]
        if missing:
            raise UserError(
                f"{directory} lacks {len(missing)} of the {len(chosen)} weight files that {INDEX} names, such as "
                f"{missing[0]}. Download the model again."
            )
    if not chosen:
        raise no_safetensors_error(str(directory), names)
    files = tuple(directory / name for name in chosen)
    for file in files:
        _check(file)
    return files


def files_of_index(path: Path) -> list[str]:
    """The files that a weights index names, sorted. Raises UserError if it is damaged."""
    try:
        names = json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()
        if not all(isinstance(name, str) and "/" not in name for name in names):
            raise ValueError("a file name was expected for each tensor")
        return sorted(set(names))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"{path} is damaged: {error}. Download the model again.") from error


def weight_map(directory: Path) -> dict[str, str]:
    """The entry of a weights index for all safetensors files of a directory."""
    files = choose_weight_files([path.name for path in directory.iterdir()])
    return {name: file for file in files for name in _check(directory / file)}


# How the names of the decoder's tensors begin in a model of text alone, and those of layers for drafts.
OF_DECODER = (
    "model.layers.", "model.embed_tokens.", "model.norm.", "model.embedding_norm.", "lm_head.", "mtp.",
    "model.embed_tokens_per_layer.", "model.per_layer_model_projection.", "model.per_layer_projection_norm.",
)  # fmt: skip
OF_AUDIO = ("model.audio_tower.", "model.embed_audio.")  # in multimodal models; not served
# Prefixes of the text part of multimodal models, and what stands there in a model of text alone.
TEXT_PREFIXES = (("model.language_model.", "model."), ("model.text_model.", "model."), ("language_model.", ""))


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """The tensors of a model directory by `text_name`, from the headers of its weight files. Raises UserError."""
    return {text_name(name): tensor for path in weight_files(directory) for name, tensor in _check(path).items()}


def text_name(name: str) -> str:
    """The name that a tensor of a multimodal model's text part has in a model of text alone; other names as they are.

    model.language_model.layers.0… and language_model.model.layers.0… are model.layers.0…
    """
    for prefix, plain in TEXT_PREFIXES:
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return name


def _check(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file. Compares the file size with the header: truncation is the most common damage."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 0 < length <= min(MAX_HEADER, size - 8):
                raise ValueError("it does not begin as a safetensors file does")
            header: Any = json.loads(file.read(length))
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            found = {name: StoredTensor(entry["dtype"], tuple(entry["shape"])) for name, entry in entries.items()}
            expected = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except (ValueError, KeyError, IndexError, AttributeError, TypeError) as error:
        raise UserError(f"The weights file {path} is damaged: {error}. Download it again.") from error
    except OSError as error:
        raise UserError(f"The weights file {path} cannot be read: {error}.") from error
    if expected != size:
        raise UserError(
            f"The weights file {path} is damaged: it has {size} bytes and its header speaks of {expected}. "
            "Download it again."
        )
    return found
