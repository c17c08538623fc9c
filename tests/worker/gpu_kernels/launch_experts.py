"""Launches the routing and the products of experts with the sizes of real models."""

from collections.abc import Iterator

import torch
import triton

from tests.worker.gpu_kernels.launch_products import forms
from tgi.worker.gpu_kernels.grouped_matmul import choose_tile, grouped_matmul
from tgi.worker.gpu_kernels.routing import combine, route
from tgi.worker.quantization import float8
from tgi.worker.quantization.weight import QuantizedWeight, Weight

EXPERTS, HIDDEN, INNER, TOP_K = 128, 2048, 768, 8  # of Qwen3-30B-A3B


def launches(dtype: torch.dtype) -> None:
    """See compile_launches.py. How many tokens there are compiles another kernel only where the tile changes. All forms
    of weights are compiled for one capability and type, and plain ones for the others."""
    for tokens, normalized in ((3, True), (8192, False)):
        routing = route(torch.empty(tokens, EXPERTS, dtype=dtype), TOP_K, normalized, 64)
        combine(torch.empty(tokens * TOP_K, HIDDEN, dtype=dtype), routing)
    capability = divmod(triton.runtime.driver.active.get_current_target().arch, 10)
    full = (dtype, capability) == (torch.bfloat16, (9, 0))
    for weight in _weights(dtype, full):
        if isinstance(weight, QuantizedWeight) and weight.floating and capability < float8.MIN_CAPABILITY:
            continue
        for rows in (TOP_K, 8 * EXPERTS, 512 * EXPERTS) if full else (TOP_K, 512 * EXPERTS):
            _products(weight, dtype, rows)


def _weights(dtype: torch.dtype, full: bool) -> Iterator[Weight]:
    """Weights of two experts of HIDDEN inputs, which stand for EXPERTS."""
    yield torch.empty(4 * INNER, HIDDEN, dtype=dtype)
    for number, weight in enumerate(forms(4 * INNER, HIDDEN)):
        if dtype is not torch.float32 and (full or number < 3):
            yield weight


def _products(weight: Weight, dtype: torch.dtype, rows: int) -> None:
    """Both products; the second one has the same number of inputs, and half as many outputs as both parts of the
    first."""
    tile = choose_tile(weight, dtype, rows, EXPERTS)
    routing = route(torch.empty(6, 2, dtype=dtype), 1, True, tile.rows)
    x = torch.empty(6, HIDDEN, dtype=dtype)
    grouped_matmul(x, weight, routing, tile, "silu", gated=True, by_token=True)
    grouped_matmul(x, weight, routing, tile)


if __name__ == "__main__":
    from tests.worker.gpu_kernels.compile_launches import compiled

    print(compiled(launches))
