"""The tensors that a checkpoint stores for one layer, checked as they are read."""

import torch
from torch import Tensor

from tgi.kernel.errors import UserError
from tgi.worker.checkpoint import Checkpoint

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
WORDS = (torch.int32,)
INDICES = (torch.int32, torch.int64)


class Columns:
    """The tensors NAME.qweight, NAME.scales, … of the layer NAME, whose weight is [outputs, inputs].

    Raises UserError naming file and tensor where one is missing or not as expected.
    """

    def __init__(self, checkpoint: Checkpoint, name: str, outputs: int, inputs: int) -> None:
        self.name, self.outputs, self.inputs = name, outputs, inputs
        self._checkpoint = checkpoint

    def __contains__(self, column: str) -> bool:
        return f"{self.name}.{column}" in self._checkpoint

    def stored(self, column: str) -> Tensor:
        """A tensor of whatever shape and dtype."""
        return self._checkpoint.stored(f"{self.name}.{column}")

    def read(self, column: str, dtypes: tuple[torch.dtype, ...], *shape: int) -> Tensor:
        """A tensor that must have this shape and one of these dtypes. Those of FLOATS must be finite."""
        found = self.stored(column)
        if tuple(found.shape) != shape:
            raise self._checkpoint.other_shape(f"{self.name}.{column}", found.shape, shape)
        if found.dtype not in dtypes:
            raise self.unfit(column, f"has dtype {_named(found.dtype)}; {_named(*dtypes)} is expected")
        if found.dtype in FLOATS and not found.isfinite().all():
            raise self.unfit(column, "has numbers that are not finite")
        return found

    def plain(self) -> Tensor:
        """The weight of a layer that is not quantized."""
        return self._checkpoint.weight(self.name, self.outputs, self.inputs)

    def groups(self, size: int) -> int:
        """Into how many groups of so many inputs the weight divides; -1: all inputs are one group."""
        size = self.inputs if size == -1 else size
        if size <= 0 or self.inputs % size:
            raise UserError(
                f"The weight {self.name!r} in {self._checkpoint.directory} has {self.inputs} inputs, which do not "
                f"divide into groups of {size}. Check that config and weights are from the same model."
            )
        return self.inputs // size

    def words(self, numbers: int, bits: int) -> int:
        """How many words of 32 bits hold so many of the weight's outputs or inputs, which have to fill them."""
        if numbers * bits % 32:
            raise UserError(
                f"The weight {self.name!r} in {self._checkpoint.directory} has {self.outputs} outputs and "
                f"{self.inputs} inputs, which do not fill words of {32 // bits} numbers. Check that config and weights "
                f"are from the same model."
            )
        return numbers * bits // 32

    def order(self, column: str, groups: int) -> Tensor | None:
        """The group of each input, int64 [inputs], where they do not follow each other; None: they do."""
        if column not in self:
            return None
        found = self.read(column, INDICES, self.inputs).to(torch.int64)
        if not 0 <= int(found.min()) <= int(found.max()) < groups:
            raise self.unfit(column, f"names group {int(found.max())} or less than 0, but there are {groups} groups")
        followed = torch.arange(self.inputs) // (self.inputs // groups)
        return None if torch.equal(found, followed) else found

    def unfit(self, column: str, what: str) -> UserError:
        """What to raise for a tensor that is there."""
        name = f"{self.name}.{column}"
        return UserError(
            f"Tensor {name!r} in {self._checkpoint.place(name)} {what}. Check that config and weights are from the "
            f"same model."
        )


def _named(*dtypes: torch.dtype) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
