"""Launches paged_attention and write_kv with the sizes of real models."""

import torch
import triton

from tests.worker.gpu_kernels.compile_launches import compiled
from tgi.worker.gpu_kernels.kv_write import write_kv
from tgi.worker.gpu_kernels.paged_attention import paged_attention

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Cache type, head_dim, cap, by capability and type: every branch of the kernel is compiled for some GPU.
LAUNCHED: dict[tuple[int, torch.dtype], list[tuple[torch.dtype, int, float | None]]] = {
    (80, BRAIN): [(BRAIN, 128, None)],
    (90, BRAIN): [(E4M3, 128, None), (BRAIN, 256, 50.0)],
    (100, BRAIN): [(E5M2, 80, None)],
    (80, HALF): [(E4M3, 64, None)],
    (90, SINGLE): [(SINGLE, 64, None)],
}


def launches(dtype: torch.dtype) -> None:
    """See compile_launches.py. A selection, since each takes half a second."""
    capability = triton.runtime.driver.active.get_current_device()
    for kept, dim, cap in LAUNCHED[capability, dtype]:
        launch(dtype, kept, dim, cap, divmod(capability, 10))


def everything(dtype: torch.dtype) -> None:
    """All combinations that models have. It takes minutes: python -m tests.worker.gpu_kernels.launch_attention."""
    capability = triton.runtime.driver.active.get_current_device()
    for kept in (dtype, E4M3, E5M2):
        for dim, cap in ((64, None), (80, None), (96, None), (128, None), (256, 50.0)):
            for heads, kv_heads in ((32, 8), (32, 32), (14, 2), (24, 1)):
                launch(dtype, kept, dim, cap, divmod(capability, 10), heads, kv_heads)


def launch(
    dtype: torch.dtype,
    kept: torch.dtype,
    dim: int,
    cap: float | None,
    capability: tuple[int, int],
    heads: int = 32,
    kv_heads: int = 8,
) -> None:
    """How many rows there are, how wide their table is and where a step puts both, and how far is seen, compiles
    nothing more."""
    keys, values = (torch.empty(9, 16, kv_heads, dim, dtype=kept) for _ in range(2))
    for rows, window in ((3, None), (1, 16), (16, 7)):
        qkv = torch.empty(rows, heads + 2 * kv_heads, dim, dtype=dtype)
        table, context = (torch.zeros(1 + rows, *shape, dtype=torch.int32)[1:] for shape in ((rows,), ()))
        write_kv(qkv, keys, values, torch.zeros(1 + rows, dtype=torch.int64)[1:])
        paged_attention(qkv, keys, values, table, context, 0.1, window, cap, capability)


if __name__ == "__main__":
    print(compiled(everything))
