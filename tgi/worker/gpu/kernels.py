"""Our kernels on a GPU, as functions of tensors that lie there. A call launches, and does not wait."""

from functools import partial


class Gpu:
    """A GPU that our kernels compute on. Its functions are those of the modules of this room, described there; they
    import Triton, which a worker without a GPU neither needs nor pays for."""

    def __init__(self, capability: tuple[int, int]) -> None:
        """`capability` is CUDA's compute capability."""
        from tgi.worker.gpu import attend, float8, gate, keep, norm, product, turn

        self.capability = capability
        self.norm, self.norm_in_place = norm.norm, norm.norm_in_place
        self.turn = turn.turn
        self.gate = gate.gate
        self.product = product.product
        self.scaled = float8.scaled
        self.keep = keep.keep
        self.attend = partial(attend.attend, capability=capability)
