"""Fixes Triton's interpreter for bfloat16: its matrix products multiply bit patterns, and
cuts float32 off where a GPU rounds."""

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_create_dot, _cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl


def _widened(x: TensorHandle) -> TensorHandle:
    """bfloat16 to float32, by adding 16 zero bits."""
    if x.dtype.scalar is not tl.bfloat16:
        return x
    return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _rounded(x: TensorHandle) -> TensorHandle:
    """float32 to bfloat16: to nearest, ties to even."""
    bits = np.ascontiguousarray(x.data).view(np.uint32)
    nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return TensorHandle(np.where(np.isnan(x.data), bits >> 16 | 0x40, nearest).astype(np.uint16), tl.bfloat16)


def _dot(self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, *rest: Any) -> TensorHandle:
    return _create_dot(self, _widened(a), _widened(b), *rest)


def _converted(self: InterpreterBuilder, x: TensorHandle, dtype: tl.dtype) -> TensorHandle:
    kinds = x.dtype.scalar, dtype.scalar
    if kinds == (tl.bfloat16, tl.float32):
        return _widened(x)
    return _rounded(x) if kinds == (tl.float32, tl.bfloat16) else _cast(self, x, dtype)


def fix_interpreter() -> None:
    """Patches the interpreter for the rest of this process."""
    InterpreterBuilder.create_dot = _dot
    InterpreterBuilder.cast_impl = _converted
