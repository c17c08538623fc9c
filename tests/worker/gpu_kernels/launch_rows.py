"""Launches the row-wise kernels with the sizes of real models."""

import torch

from tgi.worker.activations import ACTIVATIONS
from tgi.worker.gpu_kernels.gated_activation import activation, gated_activation, sigmoid_gate
from tgi.worker.gpu_kernels.lora import add_lora
from tgi.worker.gpu_kernels.lora_arguments import AdapterTiles, PlanShape
from tgi.worker.gpu_kernels.matmul import matmul
from tgi.worker.gpu_kernels.norm import norm, norm_in_place


def launches(dtype: torch.dtype) -> None:
    """See compile_launches.py. How many tokens there are, and where a step puts their positions, compiles nothing
    more."""
    for tokens in (3, 1, 16):
        _of_a_step(tokens, dtype)


def _of_a_step(tokens: int, dtype: torch.dtype) -> None:
    x, qkv = torch.empty(tokens, 2048, dtype=dtype), torch.empty(tokens, 48 * 128, dtype=dtype)
    matmul(x, torch.empty(4096, 2048, dtype=dtype), into=torch.empty(tokens, 4096, dtype=dtype))
    matmul(x, torch.empty(4096, 2048, dtype=dtype), torch.empty(4096, dtype=dtype))
    norm(x, torch.empty(2048), None, 1e-5, False)
    norm(x, torch.empty(2048), torch.empty(2048), 1e-5, True)
    norm_in_place(qkv[:, 4096:5120], torch.empty(1024), None, 1e-5, False)
    for head_dim in (64, 128):
        part = qkv[:, : 40 * head_dim].unflatten(1, (40, head_dim))
        norm_in_place(part, torch.empty(40, head_dim), None, 1e-5, head_dim == 64)
    for then in ACTIVATIONS:
        gated_activation(torch.empty(tokens, 2 * 8192, dtype=dtype), then)
    for then in ("relu2", "xielu"):
        activation(torch.empty(tokens, 8192, dtype=dtype), then, (0.7, 0.4))
    if tokens == 3:
        _lora(dtype)
    sigmoid_gate(torch.empty(tokens, 8192, dtype=dtype), torch.empty(tokens, 8192, dtype=dtype))


def _lora(dtype: torch.dtype) -> None:
    """Queries, keys and values; and one projection; of few tokens, whose plan begins anywhere, and of many."""
    table, three = torch.zeros(2, 32, 7, 3, dtype=torch.int64), ((0, 0, 4096), (1, 4096, 1024), (2, 5120, 1024))
    for tokens, rank, projections in ((40, 16, three), (40, 128, ((3, 0, 4096),)), (2048, 16, three)):
        shape = PlanShape.of(tokens, 40, dtype, False)
        plan = torch.zeros(1 + shape.length, dtype=torch.int64)
        for begin in (0, 1):
            tiles = AdapterTiles.of(table, plan[begin : begin + shape.length], shape, rank, dtype)
            x, y = torch.empty(tokens, 4096, dtype=dtype), torch.empty(tokens, 6144, dtype=dtype)
            add_lora(x, y, tiles, 5, projections)
