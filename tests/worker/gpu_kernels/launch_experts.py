"""Launches the routing and the products of experts with the sizes of real models."""

import torch
import triton

from tests.worker.gpu_kernels.launch_products import forms
from tgi.worker.decoder_config import RouterConfig
from tgi.worker.gpu_kernels.grouped_matmul import choose_tile, grouped_matmul
from tgi.worker.gpu_kernels.routing import combine, route
from tgi.worker.quantization.weight import QuantizedWeight, Weight

QUANTIZED = (0, 1, 2, 10, 11)  # of forms: 8-bit integers, the codebook, 8-bit floats, 4-bit integers, MXFP4
EXPERTS, HIDDEN, INNER, TOP_K = 128, 2048, 768, 8  # of Qwen3-30B-A3B


def launches(dtype: torch.dtype) -> None:
    """See compile_launches.py. How many tokens there are compiles another kernel only where the tile changes. Quantized
    weights are compiled for one capability and type."""
    capability = divmod(triton.runtime.driver.active.get_current_target().arch, 10)
    full = (dtype, capability) == (torch.bfloat16, (9, 0))
    few, many, grouped = RouterConfig(normalized=True), RouterConfig(), RouterConfig("sigmoid", True, True, 8, 4, 2.5)
    for tokens, config in ((3, few), (2048, many), (2048, grouped)) if full else ((3, many),):
        bias = torch.empty(EXPERTS) if config.biased else None
        routing = route(torch.empty(tokens, EXPERTS, dtype=dtype), bias, config, TOP_K, 64)
        combine(torch.empty(tokens * TOP_K, HIDDEN, dtype=dtype), routing)
    # Weights of two experts of HIDDEN inputs, which stand for EXPERTS.
    plain = torch.empty(4 * INNER, HIDDEN, dtype=dtype)
    for rows in (TOP_K, 8 * EXPERTS, 512 * EXPERTS) if full else (512 * EXPERTS,):
        _products(plain, dtype, rows)
    if full:
        for number, weight in enumerate(forms(4 * INNER, HIDDEN)):
            for rows in (TOP_K, 512 * EXPERTS) if number in QUANTIZED else ():
                _products(weight, dtype, rows)


def _products(weight: Weight, dtype: torch.dtype, rows: int) -> None:
    """Both products; the second one has the same number of inputs, and half as many outputs as both parts of the
    first."""
    tile = choose_tile(weight, dtype, rows, EXPERTS)
    routing = route(torch.empty(6, 2, dtype=dtype), None, RouterConfig(normalized=True), 1, tile.rows)
    x = torch.empty(6, HIDDEN, dtype=dtype)
    grouped_matmul(x, weight, routing, tile, "silu", gated=True, by_token=True)
    if rows == TOP_K and not isinstance(weight, QuantizedWeight):
        bias = torch.empty(len(weight), dtype=dtype)
        grouped_matmul(x, weight, routing, tile, "clamped_silu", gated=True, by_token=True, bias=bias)
    grouped_matmul(x, weight, routing, tile)


if __name__ == "__main__":
    from tests.worker.gpu_kernels.compile_launches import compiled

    print(compiled(launches))
