"""Attention backends: each owns the KV memory and is the only code that indexes pages."""

from typing import TYPE_CHECKING

import torch

from tgi.worker.attention.cpu import CpuAttention
from tgi.worker.batch import Attention, KVShape

if TYPE_CHECKING:
    from tgi.worker.attention.cuda import CudaAttention


def _backend(device: torch.device) -> "type[CpuAttention] | type[CudaAttention]":
    if device.type != "cuda":
        return CpuAttention
    from tgi.worker.attention.cuda import CudaAttention  # imports torch's compiler, which takes over a second

    return CudaAttention


def build_attention(kv: KVShape, pages: int, device: torch.device) -> Attention:
    """The backend of a device, with memory for `pages` pages, numbered from 0."""
    return _backend(device)(kv, pages, device)


def page_size(device: torch.device) -> int:
    """Tokens per page."""
    return _backend(device).page_size


def page_bytes(kv: KVShape, device: torch.device) -> int:
    """Bytes that one page takes, over all layers."""
    return 2 * kv.layers * kv.kv_heads * kv.head_dim * kv.dtype.itemsize * page_size(device)
