"""Attention backends. Each owns the KV cache and is the only code that indexes its pages.

interface      ForwardBatch, KVCacheSpec and the protocols of a backend; read this first
torch_cpu      CPU, with torch's flash attention kernel
tile_planner   divides a step into tiles for torch_cpu
cpu_kernels    CPU, with our own kernels
packed         whole sequences without a cache, of models that end in a vector
cuda           NVIDIA GPUs, with our own kernels
encoder_decoder  a decoder's attention to itself and to an encoder's result, with torch's kernels
cross_attention  of tokens to the states of images, with torch's kernels
by_shape       layers with keys and values of several sizes, on any of the backends for torch's kernels
sequence       of one sequence, where torch computes sequence by sequence
"""

import torch

from tgi.worker.attention.by_shape import AttentionByShape
from tgi.worker.attention.cpu_kernels import CpuKernelAttention
from tgi.worker.attention.cuda import CudaAttention
from tgi.worker.attention.encoder_decoder import EncoderDecoderAttention
from tgi.worker.attention.interface import AttentionBackend, KVCacheSpec
from tgi.worker.attention.torch_cpu import TorchCpuAttention
from tgi.worker.state_cache import StateCache


def build_attention(
    kv: KVCacheSpec, pages: int, device: torch.device, state_slots: int = 0, shared: bool = False
) -> AttentionBackend:
    """The backend for a model on a device, with memory for `pages` pages, numbered from 0, and, if the model has
    recurrent layers, for `state_slots` slots of their state. `shared`: processes that are forked from this one have the
    same pages and states, if our CPU kernels compute."""
    if kv.position_bias is not None:
        return EncoderDecoderAttention(kv, pages, page_size(kv, device), device)
    if kv.cpu_kernels is not None and device.type == "cpu":
        backend: AttentionBackend = CpuKernelAttention(kv, pages, kv.cpu_kernels, shared)
    else:
        own = CudaAttention if device.type == "cuda" else TorchCpuAttention
        backends = [(own(spec, pages, device), layers) for spec, layers in kv.by_shape()]
        backend = AttentionByShape(backends) if len(backends) > 1 else backends[0][0]
    if kv.state is not None:
        backend.state = StateCache(kv.state, state_slots, device, shared)
    return backend


def page_size(kv: KVCacheSpec, device: torch.device) -> int:
    """Tokens per page."""
    if device.type == "cuda":
        return CudaAttention.page_size
    return TorchCpuAttention.page_size if kv.cpu_kernels is None else CpuKernelAttention.page_size


def page_bytes(kv: KVCacheSpec, device: torch.device) -> int:
    """Bytes of one page, over the layers of a group."""
    return kv.token_bytes * page_size(kv, device)
