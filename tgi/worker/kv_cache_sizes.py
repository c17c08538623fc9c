"""Sizes of the KV cache, computed without torch."""

import math

STATE_ALIGNMENT = 64  # bytes; each tensor of a recurrent state begins at a multiple
GPU_PAGE_SIZE, CPU_PAGE_SIZE = 16, 32  # tokens of a page on GPUs, and with our own CPU kernels
CPU_DIM_MULTIPLE = 32  # our CPU kernels pad each key and value in a page to a multiple of this
SCALE_BYTES = 4  # int8 has a float32 scale for each key and value


def cpu_head_dim(head_dim: int) -> int:
    """The elements of each key and value that our CPU kernels store: the rest is zero."""
    return -(-head_dim // CPU_DIM_MULTIPLE) * CPU_DIM_MULTIPLE


def token_bytes(layers: int, kv_heads: int, stored_dim: int, itemsize: int, scaled: bool, parts: int = 2) -> int:
    """Bytes of a token's keys and values over all layers, of `stored_dim` elements each; `scaled`: with scales.
    `parts`: 1 where values are parts of the keys."""
    return parts * layers * kv_heads * (stored_dim * itemsize + (SCALE_BYTES if scaled else 0))


def state_tensor_bytes(shape: tuple[int, ...], itemsize: int) -> int:
    """Bytes of a tensor in a slot of recurrent state, padding included."""
    return -(-math.prod(shape) * itemsize // STATE_ALIGNMENT) * STATE_ALIGNMENT
