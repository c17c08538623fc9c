"""The operations of recurrent layers on the CPU kernels. Each reads and overwrites the state of the step's rows.

See causal_conv.h, delta_rule.h and gate.h.
"""

from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tgi.worker.cpu_kernels.kernels import CpuKernels

MAX_CONV_KERNEL, MAX_STATE_DIM = 8, 256

# Argument types of the functions in interface.cpp.
_CAUSAL_CONV: Sequence[Any] = (*[c_void_p] * 6, *[c_int64] * 5, *[c_void_p] * 3, c_int64, c_int64, c_void_p)
_DELTA_RULE: Sequence[Any] = (*[c_void_p] * 10, c_float, *[c_void_p] * 3, c_int64, c_int64, c_void_p)

_SIGMOID_GATE: Sequence[Any] = (*[c_void_p] * 3, c_int64)


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
    kept: int | None


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


class DeltaRule(NamedTuple):
    """The parameters of `delta_rule`, all tensors in float32."""

    sizes: tuple[int, int, int, int]  # key heads, value heads, elements of a key, of a value
    decay: Tensor  # [value heads]
    offset: Tensor  # [value heads]
    norm: Tensor  # [elements of a value]
    epsilon: float  # of the norm


def delta_rule(
    kernels: CpuKernels, rule: DeltaRule, x: Tensor, z: Tensor, ba: Tensor, state: Tensor, rows: StateAddresses
) -> Tensor:
    """y [T, value heads * elements of a value] of delta_rule.h. `x` has the columns q, k and v, `ba` b and a; `z` may
    be some columns of a larger matrix. `state` is float32 [slots, value heads, elements of a key, of a value]."""
    function = kernels.library.tgi_delta_rule
    function.argtypes, function.restype = _DELTA_RULE, None
    key_heads, value_heads, key_dim, value_dim = rule.sizes
    assert max(key_dim, value_dim) <= MAX_STATE_DIM
    assert x.dtype is z.dtype is ba.dtype is kernels.dtype
    assert x.shape[1] == 2 * key_heads * key_dim + value_heads * value_dim
    ba = ba.contiguous()
    y = torch.empty(len(x), value_heads * value_dim, dtype=x.dtype)
    sizes = (c_int64 * 6)(*rule.sizes, x.stride(0), z.stride(0))
    columns = x, z, ba, y, state, rule.decay, rule.offset, rule.norm
    function(kernels.thread_pool, *(column.data_ptr() for column in columns), sizes, rule.epsilon, *rows)
    return y


def sigmoid_gate(kernels: CpuKernels, x: Tensor, y: Tensor) -> Tensor:
    """y * sigmoid(x) of tensors of one shape, in place of y."""
    function = kernels.library.tgi_sigmoid_gate
    function.argtypes, function.restype = _SIGMOID_GATE, None
    x = x.contiguous()
    assert y.is_contiguous()
    assert x.dtype is y.dtype is kernels.dtype
    assert x.shape == y.shape
    function(kernels.thread_pool, x.data_ptr(), y.data_ptr(), y.numel())
    return y
