"""Attention of a model whose layers have keys and values of several sizes: each size has a backend of its own."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tgi.worker.attention.cuda import CudaAttention, CudaPlan
from tgi.worker.attention.interface import AttentionBackend, ForwardBatch, StorableBackend
from tgi.worker.gpu_kernels.attention_arguments import HeadTransform
from tgi.worker.state_cache import StateCache


class AttentionByShape:
    """Implements AttentionBackend with backends for some layers each; see KVCacheSpec.by_shape."""

    state: StateCache | None = None  # set by build_attention

    def __init__(self, backends: Sequence[tuple[AttentionBackend, Sequence[int]]]) -> None:
        """The backends, with the numbers of their layers in the model."""
        self._backends = [backend for backend, _ in backends]
        self._places = {
            layer: (number, own) for number, (_, layers) in enumerate(backends) for own, layer in enumerate(layers)
        }
        self.page_size = self._backends[0].page_size

    @property
    def page_memory(self) -> list[Tensor]:
        storable = [backend for backend in self._backends if isinstance(backend, StorableBackend)]
        return [part for backend in storable for part in backend.page_memory]

    def plan(self, batch: ForwardBatch) -> list[Any]:
        return [backend.plan(batch) for backend in self._backends]

    def write_and_attend(self, plan: list[Any], layer: int, qkv: Tensor, scale: float) -> Tensor:
        number, own = self._places[layer]
        return self._backends[number].write_and_attend(plan[number], own, qkv, scale)


class CudaAttentionByShape(AttentionByShape):
    """The same of CudaAttention; implements CapturableBackend and TransformingBackend."""

    def __init__(self, backends: Sequence[tuple[CudaAttention, Sequence[int]]]) -> None:
        super().__init__(backends)
        self._cuda = [backend for backend, _ in backends]
        self.padding_page = self._cuda[0].padding_page

    def transform_and_attend(
        self, plan: list[CudaPlan], layer: int, qkv: Tensor, scale: float, transform: HeadTransform
    ) -> Tensor:
        number, own = self._places[layer]
        return self._cuda[number].transform_and_attend(plan[number], own, qkv, scale, transform)
