"""Triton's interpreter, put right: it multiplies the bits of bfloat16 numbers where matrices are multiplied."""

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_as_it_is = InterpreterBuilder.create_dot


def _widened(x: TensorHandle) -> TensorHandle:
    """bfloat16 as float32, which it is the upper half of."""
    if x.dtype.scalar is not tl.bfloat16:
        return x
    return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _create_dot(self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, *rest: Any) -> TensorHandle:
    return _as_it_is(self, _widened(a), _widened(b), *rest)


def put_right() -> None:
    """From now on products of bfloat16 matrices are right."""
    InterpreterBuilder.create_dot = _create_dot  # type: ignore[method-assign]
