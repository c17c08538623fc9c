"""Reads tensors from the safetensors files of a model directory, mapped into memory without a copy."""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from typing_extensions import override

from tgi.hub.weight_files import OF_AUDIO, OF_DECODER, text_name
from tgi.microkernel.errors import UserError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class Checkpoint:
    """The tensors of a directory by name, from model.safetensors or the files of its index. Those of the text part of a
    multimodal model have the names that they have in a model of text alone.

    Raises UserError, naming file and tensor, if one is missing, damaged or not as expected. Tensors are views of the
    mapped file: they must not be written to, and stay valid after `close`.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._stack = ExitStack()
        self._files: dict[Path, Any] = {}
        if (directory / INDEX_FILE).is_file():
            stored = self._read_index(directory / INDEX_FILE)
        elif (directory / SINGLE_FILE).is_file():
            path = directory / SINGLE_FILE
            stored = dict.fromkeys(self._open(path).keys(), path)
        else:
            raise UserError(_nothing_here(directory))
        self._file_by_name = {text_name(name): path for name, path in stored.items()}
        self._stored_names = {text_name(name): name for name in stored}

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __contains__(self, name: str) -> bool:
        return name in self._file_by_name

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_by_name)

    def close(self) -> None:
        """Closes the files. A file stays mapped as long as a tensor uses it."""
        self._stack.close()
        self._files.clear()

    def tensor(self, name: str, *shape: int) -> Tensor:
        """The tensor of this name. Raises UserError unless it has this shape and is float32, bfloat16 or float16."""
        tensor = self.raw_tensor(name)
        if tuple(tensor.shape) != shape:
            raise self.shape_error(name, tensor.shape, shape)
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise UserError(
                f"Tensor {name!r} in {self._file_by_name[name]} has dtype {str(tensor.dtype).removeprefix('torch.')}. "
                f"Weights in float32, bfloat16 and float16 can be loaded."
            )
        return tensor

    def weight(self, name: str, outputs: int, inputs: int) -> Tensor:
        """The weight [outputs, inputs] of a layer; implements WeightSource (quantization/weight_sources.py)."""
        return self.tensor(f"{name}.weight", outputs, inputs)

    def raw_tensor(self, name: str) -> Tensor:
        """The tensor of this name, with any shape and dtype."""
        if name not in self._file_by_name:
            raise UserError(
                f"The weights in {self.directory} have no tensor {name!r}. The model's config.json asks for it; "
                f"check that both are from the same model and that the download is complete."
            )
        path = self._file_by_name[name]
        try:
            tensor: Tensor = self._open(path).get_tensor(self._stored_names[name])
        except SafetensorError as error:
            raise UserError(f"Tensor {name!r} cannot be read from {path}: {error}. {_AGAIN}") from error
        return tensor

    def outside_text(self) -> dict[str, Tensor]:
        """The tensors of the vision part of a multimodal model, by their stored names."""
        others = (name for name in self if not name.startswith((*OF_DECODER, *OF_AUDIO)))
        return {self._stored_names[name]: self.raw_tensor(name) for name in others}

    def file_of(self, name: str) -> Path:
        """The file of a tensor; the directory, if no tensor has this name."""
        return self._file_by_name.get(name, self.directory)

    def shape_error(self, name: str, shape: Sequence[int], expected: Sequence[int]) -> UserError:
        """The error for a tensor, or a weight stored as several tensors, whose shape is not the expected one."""
        return UserError(
            f"Tensor {name!r} in {self.file_of(name)} has shape {list(shape)}, but the model's "
            f"config.json asks for {list(expected)}. Check that both are from the same model."
        )

    def _open(self, path: Path) -> Any:
        if path not in self._files:
            try:
                self._files[path] = self._stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise UserError(f"{path} cannot be read as safetensors: {error}. {_AGAIN}") from error
        return self._files[path]

    def _read_index(self, path: Path) -> dict[str, Path]:
        try:
            files = json.loads(path.read_text())["weight_map"].items()
            return {str(name): self.directory / _inside(file) for name, file in files}
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise UserError(f"{path} is not an index of safetensors files: {error!r}. {_AGAIN}") from error


class RandomCheckpoint(Checkpoint):
    """A checkpoint of random bfloat16 tensors, which are made on `device` and read from no file. A tensor depends on
    its name and shape alone, so a worker that replaces another has the same weights."""

    def __init__(self, device: torch.device, directory: Path = Path()) -> None:
        self.directory = directory
        self._device = device

    def __contains__(self, name: str) -> bool:
        return not name.endswith(_OF_QUANTIZED_WEIGHTS)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def close(self) -> None:
        """Nothing is open."""

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Matrices preserve the scale of activations; vectors are ones, biases zeros."""
        if len(shape) == 1:
            value = 0.0 if name.endswith(".bias") else 1.0
            return torch.full(shape, value, dtype=torch.bfloat16, device=self._device)
        generator = torch.Generator(self._device).manual_seed(crc32(name.encode()))
        made = torch.empty(shape, dtype=torch.bfloat16, device=self._device)
        return made.normal_(0, shape[-1] ** -0.5, generator=generator)

    @override
    def raw_tensor(self, name: str) -> Tensor:
        raise UserError(f"--load-format dummy makes plain weights, and has no tensor {name!r}.")

    @override
    def file_of(self, name: str) -> Path:
        return self.directory


# Ends of the names of tensors that only quantized weights and caches have.
_OF_QUANTIZED_WEIGHTS = (".codes", ".scales", "_scale")
_AGAIN = "It is incomplete or damaged: fetch the model again."


def _inside(file: str) -> str:
    """A file name of the index. Raises ValueError if it leads out of the directory."""
    if Path(file).name != file:
        raise ValueError(f"{file!r} is not a file name")
    return file


def _nothing_here(directory: Path) -> str:
    others = [*directory.glob("*.bin"), *directory.glob("*.pt"), *directory.glob("*.pth")]
    if others:
        return (
            f"{directory} has its weights in {others[0].name}, a pickled file, which can run code and is never loaded. "
            f"Convert it to safetensors, for example with transformers' save_pretrained in a place that you trust."
        )
    return f"{directory} has no weights: expected {SINGLE_FILE}, or {INDEX_FILE} and the files that it names."
