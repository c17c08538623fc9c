"""Our kernels on a GPU, as functions of tensors that lie there. A call launches, and does not wait."""

from typing import NamedTuple


class Gpu(NamedTuple):
    """A GPU that our kernels compute on."""

    capability: tuple[int, int]  # CUDA's compute capability

    @property
    def float8(self) -> bool:
        """Whether it multiplies 8-bit floats."""
        return self.capability >= (8, 9)
