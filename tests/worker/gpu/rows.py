"""What works row by row, called with the sizes of real models."""

import torch
from torch import Tensor

from tgi.worker.gpu.gate import gate
from tgi.worker.gpu.norm import norm, norm_in_place
from tgi.worker.gpu.turn import turn
from tgi.worker.linear import ACTIVATIONS

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TOKENS = 3


def launches() -> None:
    """Every combination of what kernels are compiled for."""
    for dtype in DTYPES:
        _norms(dtype)
        _turns(dtype)
        for then in ACTIVATIONS:
            gate(torch.empty(TOKENS, 2 * 8192, dtype=dtype), then)


def _norms(dtype: torch.dtype) -> None:
    def scales(*shape: int) -> Tensor:
        return torch.empty(shape)

    x, qkv = torch.empty(TOKENS, 2048, dtype=dtype), torch.empty(TOKENS, 48 * 128, dtype=dtype)
    for centred in (False, True):
        for bias in (None, scales(2048)):
            norm(x, scales(2048), bias, 1e-5, centred)
        for head_dim in (64, 128):
            part = qkv[:, : 40 * head_dim].unflatten(1, (40, head_dim))
            norm_in_place(part, scales(40, head_dim), None, 1e-5, centred)
        norm_in_place(qkv[:, 4096:5120], scales(1024), None, 1e-5, centred)


def _turns(dtype: torch.dtype) -> None:
    for head_dim, turned in ((64, 64), (128, 128), (80, 32)):
        for neighbours in (False, True):
            x, table = torch.empty(TOKENS, 48, head_dim, dtype=dtype), torch.empty(9, 2, turned)
            turn(x, 40, table, torch.zeros(TOKENS, dtype=torch.int64), neighbours)
