"""Attention backends: each owns the KV memory and is the only code that indexes pages."""

import torch

from tgi.worker.attention.cpu import CpuAttention
from tgi.worker.attention.native import NativeAttention
from tgi.worker.batch import Attention, KVShape


def build_attention(kv: KVShape, pages: int, device: torch.device) -> Attention:
    """The backend of a model and device, with memory for `pages` pages, numbered from 0."""
    if device.type == "cuda":
        from tgi.worker.attention.cuda import CudaAttention  # imports torch's compiler, which takes over a second

        return CudaAttention(kv, pages, device)
    if kv.kernels is not None:
        return NativeAttention(kv, pages, kv.kernels)
    return CpuAttention(kv, pages, device)


def page_size(kv: KVShape, device: torch.device) -> int:
    """Tokens per page."""
    if device.type == "cuda":
        from tgi.worker.attention.cuda import CudaAttention

        return CudaAttention.page_size
    return CpuAttention.page_size if kv.kernels is None else NativeAttention.page_size


def page_bytes(kv: KVShape, device: torch.device) -> int:
    """Bytes that one page takes, over all layers."""
    return 2 * kv.layers * kv.kv_heads * kv.head_dim * kv.kept.itemsize * page_size(kv, device)
