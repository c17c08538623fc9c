"""Shapes of the tensors of a model, without torch: weights, and what recurrent layers keep of a request."""

from typing import NamedTuple


class MatrixShape(NamedTuple):
    """A matrix, and the part of it that a shard has."""

    name: str  # of its layer in the checkpoint; matrices of the same name are fused in one tensor
    outputs: int
    inputs: int
    local_outputs: int
    local_inputs: range
    quantizable: bool = True  # routers are not, nor what is converted at load
    stack: str = ""  # matrices of the same stack become one weight, in one form; "": this one alone

    @property
    def local_numbers(self) -> int:
        """Parameters of the part."""
        return self.local_outputs * len(self.local_inputs)


class VectorShape(NamedTuple):
    """The weight of a norm, or a bias."""

    name: str  # of the tensor
    numbers: int  # as stored; 0: it is no tensor of the checkpoint
    local_numbers: int  # as the shard holds it
    norm: bool  # or sinks: held in float32; a bias has the model's dtype


class StateShape(NamedTuple):
    """A tensor that a recurrent layer keeps of a request."""

    shape: tuple[int, ...]
    wide: bool = False  # in float32, else in the model's dtype
