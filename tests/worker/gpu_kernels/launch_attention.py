"""Launches paged_attention and rotate_and_write_kv with the sizes of real models."""

import torch
import triton

from tests.worker.gpu_kernels.compile_launches import compiled
from tgi.worker.gpu_kernels.attention_arguments import HeadNorm, Rotation, Rows
from tgi.worker.gpu_kernels.kv_write import rotate_and_write_kv
from tgi.worker.gpu_kernels.paged_attention import COUNTERS, paged_attention

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Cache type, head_dim, cap, by capability and type: every branch of the kernel is compiled for some GPU.
LAUNCHED: dict[tuple[int, torch.dtype], list[tuple[torch.dtype, int, float | None]]] = {
    (80, BRAIN): [(BRAIN, 128, None)],
    (90, BRAIN): [(E4M3, 128, None), (BRAIN, 256, 50.0), (BRAIN, 512, None)],
    (100, BRAIN): [(E5M2, 80, None)],
    (80, HALF): [(E4M3, 64, None)],
    (90, SINGLE): [(SINGLE, 64, None)],
}


def launches(dtype: torch.dtype) -> None:
    """See compile_launches.py. A selection, since each takes half a second."""
    capability = triton.runtime.driver.active.get_current_device()
    for kept, dim, cap in LAUNCHED[capability, dtype]:
        launch(dtype, kept, dim, cap, divmod(capability, 10))
    if (capability, dtype) == (90, BRAIN):
        launch(dtype, dtype, 128, None, divmod(capability, 10), chunked=True, slopes=torch.empty(32))
        launch(dtype, dtype, 256, None, divmod(capability, 10), ahead=True)


def everything(dtype: torch.dtype) -> None:
    """All combinations that models have. It takes minutes: python -m tests.worker.gpu_kernels.launch_attention."""
    capability = triton.runtime.driver.active.get_current_device()
    for kept in (dtype, E4M3, E5M2):
        for dim, cap in ((64, None), (80, None), (96, None), (128, None), (256, 50.0), (512, None)):
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
    chunked: bool = False,
    slopes: torch.Tensor | None = None,
    ahead: bool = False,
) -> None:
    """How many rows there are, how wide their table is and where a step puts both, and how far is seen, compiles
    nothing more."""
    keys, values = (torch.empty(9, 16, kv_heads, dim, dtype=kept) for _ in range(2))
    weight = torch.empty(heads + kv_heads, dim)
    for rows, window in ((3, None), (1, None), (16, 7), (2, 16)):
        qkv = torch.empty(rows, heads + 2 * kv_heads, dim, dtype=dtype)
        positions = torch.zeros(1 + rows, dtype=torch.int64)[1:]
        for rotation, norm in (
            (Rotation(torch.empty(9, 2, dim), positions, False), None),
            (Rotation(torch.empty(9, 2, dim // 2), positions, True), HeadNorm(weight, 1e-5)),
        ):
            query = rotate_and_write_kv(qkv, keys, values, positions, (1.0, 1.0), rotation, norm)
        table, context = (torch.zeros(1 + rows, *shape, dtype=torch.int32)[1:] for shape in ((rows,), ()))
        starts = torch.zeros(2 + rows, dtype=torch.int32)[1:]
        counters = torch.zeros(COUNTERS, dtype=torch.int32)
        for longest, splits in ((1, 16), (1, 1), (700, 1)):
            given = Rows(0, rows, longest, starts if longest > 1 else None, table, context)
            paged_attention(
                *(query, keys, values, given, query, 0.1, window, cap),
                capability=capability,
                counters=counters,
                splits=splits,
                chunked=chunked and window is not None,
                slopes=slopes,
                last_keys=positions.int() if ahead else None,
            )


if __name__ == "__main__":
    print(compiled(everything))
