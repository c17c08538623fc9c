"""What recurrent layers have in common: a mixer between two projections, and how it gets its tensors."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from tgi.worker.cpu_kernels.kernels import CpuKernels
from tgi.worker.cpu_kernels.program import Program
from tgi.worker.gpu_kernels.kernels import GpuKernels
from tgi.worker.layers.linear import Linear
from tgi.worker.state_cache import StateRows


class RecurrentMixer(Protocol):
    """Mixes the tokens of each row, whose state it reads and overwrites."""

    @property
    def widths(self) -> tuple[int, int, int]:
        """The columns of its input, of its result, and of its scratch memory in a program."""
        ...

    @property
    def linears(self) -> list[Linear]: ...

    def __call__(self, normed: Tensor, x: Tensor, rows: StateRows) -> Tensor:
        """The result [T, columns] of x [T, columns], the projected input. `normed` [.., hidden] is the input of the
        layer."""
        ...

    def append_to(self, program: Program, normed: int, x: int, gates: int, y: int) -> None:
        """Appends it to a program: of the buffers of the layer's input and of its own, x, which it may overwrite, with
        scratch memory in `gates`, written to y."""


class Recurrence(NamedTuple):
    """A recurrent mixer with its projections."""

    input: Linear
    mixer: RecurrentMixer
    output: Linear


class ChosenRows(NamedTuple):
    """Outputs of a matrix that reads the hidden states."""

    name: str  # after the mixer's prefix
    outputs: int  # of the matrix
    chosen: Tensor  # int64 [n]


class MixerTensors(Protocol):
    """The tensors of the mixer of a layer, by their names after its prefix, on the model's device."""

    @property
    def kernels(self) -> CpuKernels | GpuKernels | None:
        """Our own kernels; None: torch's."""
        ...

    @property
    def norm_epsilon(self) -> float:
        """Of the model's norms."""
        ...

    def input(self, parts: Sequence[ChosenRows], bias: bool = False) -> Linear:
        """The chosen outputs of these matrices, one after the other, as one layer."""
        ...

    def gates(self, parts: Sequence[ChosenRows]) -> Linear:
        """The same of matrices that are never quantized."""
        ...

    def output(self, name: str, inputs: int, local: range, bias: bool = False) -> Linear:
        """The last projection, [hidden, inputs], with the inputs `local`."""
        ...

    def vector(self, name: str, chosen: Tensor, *shape: int) -> Tensor:
        """The rows `chosen` (int64 [n]) of a tensor of this shape, in float32."""
        ...
