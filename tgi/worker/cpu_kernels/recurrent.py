"""The operations of recurrent layers on the CPU kernels. Each reads and overwrites the state of the step's rows.

See causal_conv.h.
"""

from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tgi.worker.cpu_kernels.kernels import CpuKernels

MAX_CONV_KERNEL = 8

# Argument types of the functions in interface.cpp.
_CAUSAL_CONV: Sequence[Any] = (*[c_void_p] * 6, *[c_int64] * 5, *[c_void_p] * 3, c_int64, c_int64)


class ConvForm(IntEnum):
    """What is convolved: enum class ConvForm of causal_conv.h."""

    PLAIN = 0  # silu(conv(x))
    GATED = 1  # c * conv(b * u) of x = [b, c, u]


class StateAddresses(NamedTuple):
    """The rows of a step and their slots: struct StateRows of causal_conv.h."""

    slots: int
    bounds: int
    contexts: int
    rows: int
    slot_bytes: int


def causal_conv(
    kernels: CpuKernels,
    x: Tensor,
    window: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    form: ConvForm,
    rows: StateAddresses,
) -> Tensor:
    """The convolution [T, channels] of the first columns of x [T, columns]. `weight` is float32 [kernel, channels], for
    the oldest input first, `bias` float32 [channels], `window` the state [slots, kernel - 1, channels]."""
    function = kernels.library.tgi_causal_conv
    function.argtypes, function.restype = _CAUSAL_CONV, None
    size, channels = weight.shape
    assert size <= MAX_CONV_KERNEL
    assert x.dtype is window.dtype is kernels.dtype
    y = torch.empty(len(x), channels, dtype=x.dtype)
    function(
        kernels.thread_pool, x.data_ptr(), y.data_ptr(), window.data_ptr(), weight.data_ptr(),
        None if bias is None else bias.data_ptr(), channels, size, x.stride(0), channels, form, *rows,
    )  # fmt: skip
    return y
