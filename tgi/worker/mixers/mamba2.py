"""State space duality, the mixer of Mamba2 and the families that are built on it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from tgi.worker.mixers.interface import size_obstacle
from tgi.worker.tensor_shapes import MatrixShape, StateShape, VectorShape


class GatedNormKind(StrEnum):
    """What becomes of the result y of a Mamba2 mixer with its gate z."""

    NONE = "none"  # y silu(z)
    GATE_FIRST = "gate_first"  # norm(y silu(z))
    GATE_LAST = "gate_last"  # norm(y) silu(z)


@dataclass(frozen=True)
class Mamba2Config:
    """State space duality of cpu_kernels/ssd.h, of a convolution of x, B and C over the last `kernel` tokens. Each of
    the `groups` has a B, a C, and as many neighbouring heads; norm is an RMS norm over the heads of a group.

    Implements MixerConfig. Ranks divide the groups or, where those are fewer, compute all of them.
    """

    heads: int
    groups: int
    head_dim: int
    state_dim: int  # elements of a B and of a C
    kernel: int
    conv_bias: bool = True
    bias: bool = False  # of both projections
    limits: tuple[float, float] = (0.0, float("inf"))  # of a time step
    norm: str = GatedNormKind.GATE_FIRST
    # Factors of the parts of the input projection, z, x, B, C and dt, and of the result (Falcon-H1).
    scales: tuple[float, float, float, float, float] = (1.0,) * 5
    output_scale: float = 1.0

    @property
    def inner(self) -> int:
        """Elements of all heads."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """What is convolved: x, B and C."""
        return self.inner + 2 * self.groups * self.state_dim

    @property
    def outputs(self) -> int:
        """Of the input projection: z, the channels and the time step of each head."""
        return self.inner + self.channels + self.heads

    @property
    def state(self) -> dict[str, StateShape]:
        """The last inputs of the convolution, the oldest first, and a matrix of each head."""
        return {
            "window": StateShape((self.kernel - 1, self.channels)),
            "matrix": StateShape((self.heads, self.state_dim, self.head_dim), wide=True),
        }

    @property
    def kernel_obstacle(self) -> str:
        return size_obstacle(self.kernel, self.state_dim, self.head_dim)

    @property
    def gpu_kernels(self) -> tuple[str, ...]:
        return "causal_conv", "ssd"

    def part(self, local: range) -> "Mamba2Config":
        return replace(self, groups=len(local), heads=len(local) * self.heads // self.groups)

    def columns(self, local: range) -> range:
        """The elements of the heads of these groups."""
        each = self.inner // self.groups
        return range(local.start * each, local.stop * each)

    def matrices(self, hidden: int, local: range, name: str) -> Iterator[MatrixShape]:
        yield MatrixShape(f"{name}.in_proj", self.outputs, hidden, self.part(local).outputs, range(hidden))
        yield MatrixShape(f"{name}.out_proj", hidden, self.inner, hidden, self.columns(local))

    def vectors(self, hidden: int, local: range, name: str, first: bool) -> Iterator[VectorShape]:
        own = self.part(local)
        for vector in ("A_log", "dt_bias", "D"):
            yield VectorShape(f"{name}.{vector}", self.heads, own.heads, True)
        yield VectorShape(f"{name}.conv1d.weight", self.channels * self.kernel, own.channels * self.kernel, True)
        if self.conv_bias:
            yield VectorShape(f"{name}.conv1d.bias", self.channels, own.channels, True)
        # Without a norm, its weight holds `output_scale`.
        stored = 0 if self.norm == GatedNormKind.NONE else self.inner
        yield VectorShape(f"{name}.norm.weight", stored, own.inner, True)
        if self.bias:
            yield VectorShape(f"{name}.in_proj.bias", self.outputs, own.outputs, False)
            held = hidden * (first or own.inner == self.inner)
            yield VectorShape(f"{name}.out_proj.bias", hidden, held, False)
