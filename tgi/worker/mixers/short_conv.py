"""The gated short convolution of LFM2."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tgi.worker.mixers.interface import size_obstacle
from tgi.worker.tensor_shapes import MatrixShape, StateShape, VectorShape


@dataclass(frozen=True)
class ShortConvConfig:
    """A gated convolution over the last `kernel` tokens (LFM2): with b, c and u the three parts of a projection of the
    input, y = out(c * conv(b * u)), where conv weighs each of its channels by itself.

    Implements MixerConfig. Ranks divide the channels.
    """

    channels: int
    kernel: int
    bias: bool = False  # of the convolution and of both projections

    @property
    def state(self) -> dict[str, StateShape]:
        """The last inputs, the oldest first."""
        return {"window": StateShape((self.kernel - 1, self.channels))}

    @property
    def kernel_obstacle(self) -> str:
        return size_obstacle(self.kernel)

    @property
    def gpu_kernels(self) -> tuple[str, ...]:
        return ("causal_conv",)

    def part(self, local: range) -> "ShortConvConfig":
        return replace(self, channels=len(local))

    def matrices(self, hidden: int, local: range, name: str) -> Iterator[MatrixShape]:
        for _ in range(3):
            yield MatrixShape(
                f"{name}.in_proj", self.channels, hidden, len(local), range(hidden), stack=f"{name}.in_proj"
            )
        yield MatrixShape(f"{name}.out_proj", hidden, self.channels, hidden, local)

    def vectors(self, hidden: int, local: range, name: str, first: bool) -> Iterator[VectorShape]:
        yield VectorShape(f"{name}.conv.weight", self.channels * self.kernel, len(local) * self.kernel, True)
        if self.bias:
            yield VectorShape(f"{name}.conv.bias", self.channels, len(local), True)
            yield VectorShape(f"{name}.in_proj.bias", 3 * self.channels, 3 * len(local), False)
            held = hidden * (first or len(local) == self.channels)
            yield VectorShape(f"{name}.out_proj.bias", hidden, held, False)
