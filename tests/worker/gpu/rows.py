"""What works row by row, called with the sizes of real models."""

import torch

from tgi.worker.gpu.gate import gate
from tgi.worker.gpu.norm import norm, norm_in_place
from tgi.worker.gpu.turn import turn
from tgi.worker.linear import ACTIVATIONS

TOKENS = 3


def launches(dtype: torch.dtype) -> None:
    """See compiling.py."""
    x, qkv = torch.empty(TOKENS, 2048, dtype=dtype), torch.empty(TOKENS, 48 * 128, dtype=dtype)
    norm(x, torch.empty(2048), None, 1e-5, False)
    norm(x, torch.empty(2048), torch.empty(2048), 1e-5, True)
    norm_in_place(qkv[:, 4096:5120], torch.empty(1024), None, 1e-5, False)
    for head_dim in (64, 128):
        part = qkv[:, : 40 * head_dim].unflatten(1, (40, head_dim))
        norm_in_place(part, torch.empty(40, head_dim), None, 1e-5, head_dim == 64)
    positions = torch.zeros(TOKENS, dtype=torch.int64)
    for head_dim, turned, neighbours in ((64, 64, False), (128, 128, False), (128, 128, True), (80, 32, False)):
        turn(torch.empty(TOKENS, 48, head_dim, dtype=dtype), 40, torch.empty(9, 2, turned), positions, neighbours)
    for then in ACTIVATIONS:
        gate(torch.empty(TOKENS, 2 * 8192, dtype=dtype), then)
