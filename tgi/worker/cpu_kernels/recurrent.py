"""The operations of recurrent layers on the CPU kernels. Each reads and overwrites the state of the step's rows.

See causal_conv.h, delta_rule.h, ssd.h and gate.h.
"""

from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tgi.worker.cpu_kernels.kernels import CpuKernels
from tgi.worker.mixers.interface import MAX_CONV_KERNEL, MAX_STATE_DIM

# Argument types of the functions in interface.cpp.
_CAUSAL_CONV: Sequence[Any] = (*[c_void_p] * 6, *[c_int64] * 5, *[c_void_p] * 3, c_int64, c_int64, c_void_p)
_DELTA_RULE: Sequence[Any] = (*[c_void_p] * 10, c_float, c_float, *[c_void_p] * 3, c_int64, c_int64, c_void_p)
_SSD: Sequence[Any] = (*[c_void_p] * 9, *[c_float] * 3, *[c_void_p] * 3, c_int64, c_int64, c_void_p)
_GATED_NORM: Sequence[Any] = (*[c_void_p] * 4, *[c_int64] * 4, c_float, c_float, c_int64)

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
    most: float = 1.0  # what sigmoid(b) is multiplied with: m of delta_rule.h


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
    function(kernels.thread_pool, *(column.data_ptr() for column in columns), sizes, rule.epsilon, rule.most, *rows)
    return y


class Ssd(NamedTuple):
    """The parameters of `ssd`, all tensors in float32."""

    sizes: tuple[int, int, int, int]  # heads, groups, elements of a head, of a B or C
    decay: Tensor  # [heads]
    offset: Tensor  # [heads]
    skip: Tensor  # [heads]
    factors: tuple[float, float, float]  # dt_scale, and the bounds of a time step

    @property
    def inner(self) -> int:
        """Columns of the result."""
        return self.sizes[0] * self.sizes[2]

    @property
    def channels(self) -> int:
        """Columns of x, B and C."""
        return self.inner + 2 * self.sizes[1] * self.sizes[3]


def ssd(kernels: CpuKernels, rule: Ssd, x: Tensor, dt: Tensor, state: Tensor, rows: StateAddresses) -> Tensor:
    """y [T, heads * elements of a head] of ssd.h. `x` has the columns x, B and C; `dt` [T, heads] may be some columns
    of a larger matrix. `state` is float32 [slots, heads, elements of a B, of a head]."""
    function = kernels.library.tgi_ssd
    function.argtypes, function.restype = _SSD, None
    assert x.dtype is dt.dtype is kernels.dtype
    assert x.shape[1] == rule.channels
    y = torch.empty(len(x), rule.inner, dtype=x.dtype)
    sizes = (c_int64 * 6)(*rule.sizes, x.stride(0), dt.stride(0))
    columns = x, dt, y, state, rule.decay, rule.offset, rule.skip
    function(kernels.thread_pool, *(column.data_ptr() for column in columns), sizes, *rule.factors, *rows)
    return y


class GatedNormForm(IntEnum):
    """What is normed: enum class GatedNormForm of ssd.h."""

    NONE = 0  # weight y g, with g = silu(gate_scale z)
    GATE_FIRST = 1  # weight norm(y g)
    GATE_LAST = 2  # weight norm(y) g


class GatedNorm(NamedTuple):
    """The parameters of `gated_norm`."""

    form: GatedNormForm
    weight: Tensor  # float32 [columns]
    groups: int  # parts of the columns, each normed by itself
    gate_scale: float
    epsilon: float


def gated_norm(kernels: CpuKernels, norm: GatedNorm, y: Tensor, z: Tensor) -> Tensor:
    """y [T, columns], normed and gated in place; `z` [T, columns] may be some columns of a larger matrix."""
    function = kernels.library.tgi_gated_norm
    function.argtypes, function.restype = _GATED_NORM, None
    assert y.dtype is z.dtype is kernels.dtype
    assert y.is_contiguous()
    addresses = (column.data_ptr() for column in (y, z, norm.weight))
    sizes = len(y), norm.groups, y.shape[1] // norm.groups, z.stride(0)
    function(kernels.thread_pool, *addresses, *sizes, norm.gate_scale, norm.epsilon, norm.form)
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
