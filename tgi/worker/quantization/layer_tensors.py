"""Access to the tensors of one layer of a checkpoint, with checks of shape and type, and what is read of them."""

from typing import Protocol

import torch
from torch import Tensor

from tgi.microkernel.errors import UserError
from tgi.worker.checkpoint import Checkpoint
from tgi.worker.quantization.weight import QuantizedWeight

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
WORDS = (torch.int32,)
INDICES = (torch.int32, torch.int64)


class StoredWeight(Protocol):
    """A weight as a checkpoint has it."""

    def unsupported_reason(self, exact: bool = False, float8: bool = False) -> str | None:
        """Why QuantizedWeight cannot represent this weight; None: it can. `exact`: scales are not rounded to float16.
        `float8`: the device multiplies 8-bit floats."""

    def quantized(self, exact: bool = False) -> QuantizedWeight:
        """The same weight. `unsupported_reason` must be None."""

    def dequantized(self) -> Tensor:
        """The weight, float32 [outputs, inputs]."""


class LayerTensors:
    """The tensors NAME.qweight, NAME.scales, … of the layer NAME, whose weight is [outputs, inputs].

    Raises UserError naming file and tensor where one is missing or not as expected.
    """

    def __init__(self, checkpoint: Checkpoint, name: str, outputs: int, inputs: int) -> None:
        self.name, self.outputs, self.inputs = name, outputs, inputs
        self._checkpoint = checkpoint

    def __contains__(self, column: str) -> bool:
        return f"{self.name}.{column}" in self._checkpoint

    def stored(self, column: str) -> Tensor:
        """A tensor of any shape and dtype."""
        return self._checkpoint.raw_tensor(f"{self.name}.{column}")

    def read_checked(self, column: str, dtypes: tuple[torch.dtype, ...], *shape: int) -> Tensor:
        """A tensor that must have this shape and one of these dtypes; floats must be finite."""
        found = self.stored(column)
        if tuple(found.shape) != shape:
            raise self._checkpoint.shape_error(f"{self.name}.{column}", found.shape, shape)
        if found.dtype not in dtypes:
            raise self.unfit(column, f"has dtype {_dtype_names(found.dtype)}; {_dtype_names(*dtypes)} is expected")
        if found.dtype in FLOATS and not found.isfinite().all():
            raise self.unfit(column, "has numbers that are not finite")
        return found

    def plain(self) -> Tensor:
        """The plain weight of a layer that is not quantized."""
        return self._checkpoint.weight(self.name, self.outputs, self.inputs)

    def group_count(self, size: int) -> int:
        """The number of groups of `size` inputs; -1: all inputs are one group."""
        size = self.inputs if size == -1 else size
        if size <= 0 or self.inputs % size:
            raise UserError(
                f"The weight {self.name!r} in {self._checkpoint.directory} has {self.inputs} inputs, which do not "
                f"divide into groups of {size}. Check that config and weights are from the same model."
            )
        return self.inputs // size

    def word_count(self, numbers: int, bits: int) -> int:
        """The number of 32-bit words that hold this many outputs or inputs, which must fill them."""
        if numbers * bits % 32:
            raise UserError(
                f"The weight {self.name!r} in {self._checkpoint.directory} has {self.outputs} outputs and "
                f"{self.inputs} inputs, which do not fill words of {32 // bits} numbers. Check that config and weights "
                f"are from the same model."
            )
        return numbers * bits // 32

    def group_order(self, column: str, groups: int) -> Tensor | None:
        """The group of each input, int64 [inputs]; None if groups are consecutive inputs."""
        if column not in self:
            return None
        found = self.read_checked(column, INDICES, self.inputs).to(torch.int64)
        if not 0 <= int(found.min()) <= int(found.max()) < groups:
            raise self.unfit(column, f"names group {int(found.max())} or less than 0, but there are {groups} groups")
        followed = torch.arange(self.inputs) // (self.inputs // groups)
        return None if torch.equal(found, followed) else found

    def unfit(self, column: str, what: str) -> UserError:
        """The error to raise for a tensor that is present and unfit."""
        name = f"{self.name}.{column}"
        return UserError(
            f"Tensor {name!r} in {self._checkpoint.file_of(name)} {what}. Check that config and weights are from the "
            f"same model."
        )


def _dtype_names(*dtypes: torch.dtype) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
