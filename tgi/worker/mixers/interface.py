"""What DecoderConfig.recurrent has, whichever mixer it is."""

from collections.abc import Iterator
from typing import Protocol

from tgi.worker.tensor_shapes import MatrixShape, StateShape, VectorShape

MAX_CONV_KERNEL, MAX_STATE_DIM = 8, 256  # of our CPU kernels: causal_conv.h and delta_rule.h


class MixerConfig(Protocol):
    """The sizes of a mixer. `name` is the prefix of its tensors in the checkpoint, `local` the range of
    what a rank has of it, in the units that ranks divide: Shard.recurrent."""

    @property
    def state(self) -> dict[str, StateShape]:
        """What a layer keeps of a request."""
        ...

    @property
    def kernel_obstacle(self) -> str:
        """Why our CPU kernels cannot compute it, in words; "" if they can."""
        ...

    @property
    def gpu_kernels(self) -> tuple[str, ...]:
        """The modules of gpu_kernels/ that compute it on a GPU."""
        ...

    def part(self, local: range) -> "MixerConfig":
        """That of a rank."""
        ...

    def matrices(self, hidden: int, local: range, name: str) -> Iterator[MatrixShape]:
        """Its projections; the last one is that of its result."""
        ...

    def vectors(self, hidden: int, local: range, name: str, first: bool) -> Iterator[VectorShape]:
        """Its other tensors. `first`: the rank adds the biases where ranks add up partial sums."""
        ...


def size_obstacle(kernel: int, *sizes: int) -> str:
    """MixerConfig.kernel_obstacle of a convolution over `kernel` tokens, and of matrices of these sizes."""
    if kernel > MAX_CONV_KERNEL:
        return f"the convolutions of its recurrent layers see {kernel} tokens, which is over {MAX_CONV_KERNEL}"
    if (largest := max((0, *sizes))) > MAX_STATE_DIM:
        return f"the states of its recurrent layers have {largest} columns, which is over {MAX_STATE_DIM}"
    return ""
