"""Our kernels on a GPU, as functions of tensors that lie there. A call launches, and does not wait."""

from torch import Tensor

from tgi.worker.quantization.weight import QuantizedWeight


class Gpu:
    """A GPU that our kernels compute on. Its functions are those of the modules of this room, described there; they
    import Triton, which a worker without a GPU neither needs nor pays for."""

    def __init__(self, capability: tuple[int, int]) -> None:
        """`capability` is CUDA's compute capability."""
        self.capability = capability

    @property
    def float8(self) -> bool:
        """Whether it multiplies 8-bit floats."""
        return self.capability >= (8, 9)

    def product(self, x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
        """x @ weight.T + bias of few rows; see product.py."""
        from tgi.worker.gpu.product import product

        return product(x, weight, bias)
