"""Reads tensors from the safetensors files of a model directory, mapped into memory, never copied."""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tgi.kernel.errors import UserError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class Checkpoint:
    """The tensors of a directory by name: of model.safetensors, or of the files that the index names.

    Raises UserError naming the file, and the tensor, where something is missing, broken or not as expected.
    Tensors stay valid after `close`; they are views on the mapped file and must not be written to.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._stack = ExitStack()
        self._files: dict[Path, Any] = {}
        self._where: dict[str, Path] = {}
        if (directory / INDEX).is_file():
            self._where = self._read_index(directory / INDEX)
        elif (directory / SINGLE).is_file():
            path = directory / SINGLE
            self._where = dict.fromkeys(self._open(path).keys(), path)
        else:
            raise UserError(_nothing_here(directory))

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def __iter__(self) -> Iterator[str]:
        """The names of all tensors."""
        return iter(self._where)

    def close(self) -> None:
        """Lets go of the files. Mappings live on while a tensor uses them."""
        self._stack.close()
        self._files.clear()

    def tensor(self, name: str, *shape: int) -> Tensor:
        """The tensor of that name, which must have that shape, and numbers in float32, bfloat16 or float16."""
        found = self.stored(name)
        if tuple(found.shape) != shape:
            raise self.other_shape(name, found.shape, shape)
        if found.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise UserError(
                f"Tensor {name!r} in {self._where[name]} has dtype {str(found.dtype).removeprefix('torch.')}. "
                f"Weights in float32, bfloat16 and float16 can be loaded."
            )
        return found

    def weight(self, name: str, outputs: int, inputs: int) -> Tensor:
        """The weight [outputs, inputs] of the layer of that name: a checkpoint is a Source (quantization/source.py)."""
        return self.tensor(f"{name}.weight", outputs, inputs)

    def stored(self, name: str) -> Tensor:
        """The tensor of that name, whatever its shape and dtype."""
        if name not in self._where:
            raise UserError(
                f"The weights in {self.directory} have no tensor {name!r}. The model's config.json asks for it; "
                f"check that both are from the same model and that the download is complete."
            )
        path = self._where[name]
        try:
            found: Tensor = self._open(path).get_tensor(name)
        except SafetensorError as error:
            raise UserError(f"Tensor {name!r} cannot be read from {path}: {error}. {_AGAIN}") from error
        return found

    def place(self, name: str) -> Path:
        """The file of a tensor; the directory, if there is none of that name."""
        return self._where.get(name, self.directory)

    def other_shape(self, name: str, shape: Sequence[int], asked: Sequence[int]) -> UserError:
        """What to raise where a tensor, or what several stand for together, has not the shape that is asked for."""
        return UserError(
            f"Tensor {name!r} in {self.place(name)} has shape {list(shape)}, but the model's "
            f"config.json asks for {list(asked)}. Check that both are from the same model."
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
            places = json.loads(path.read_text())["weight_map"].items()
            return {str(name): self.directory / _inside(file) for name, file in places}
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise UserError(f"{path} is not an index of safetensors files: {error!r}. {_AGAIN}") from error


_AGAIN = "It is incomplete or damaged: fetch the model again."


def _inside(file: str) -> str:
    """A file name of the index, which must not lead out of the directory."""
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
    return f"{directory} has no weights: expected {SINGLE}, or {INDEX} and the files that it names."
