"""Fixes Triton's interpreter for bfloat16: its matrix products multiply bit patterns, and
cuts float32 off where a GPU rounds. And it executes assembly, of a few instructions.

It replaces the functions of `triton.language` once, not at each launch and call of a device function, keeps what it
computed for each operation (types of numpy, shapes), so that equal shapes are the same object and are not compared by
their sizes, and leaves out assertions that are not checked. That takes a sixth of the time."""

from functools import cache
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton._utils import validate_block_shape
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_create_dot, _cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl
_create_fp_to_fp = InterpreterBuilder.create_fp_to_fp


def _widened(x: TensorHandle) -> TensorHandle:
    """bfloat16 to float32, by adding 16 zero bits, and 8-bit floats."""
    if x.dtype.scalar is tl.float8e4nv:
        floats = torch.from_numpy(np.ascontiguousarray(x.data).view(np.uint8)).view(torch.float8_e4m3fn)
        return TensorHandle(floats.float().numpy(), tl.float32)
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


def _narrowed(self: InterpreterBuilder, x: TensorHandle, dtype: tl.dtype, *rest: Any) -> TensorHandle:
    """float32 to 8-bit floats, to nearest."""
    if (x.dtype.scalar, dtype.scalar) != (tl.float32, tl.float8e4nv):
        return _create_fp_to_fp(self, x, dtype, *rest)
    floats = torch.from_numpy(np.ascontiguousarray(x.data)).to(torch.float8_e4m3fn)
    return TensorHandle(floats.view(torch.uint8).numpy(), tl.float8e4nv)


def _permuted(a: Any, b: Any, selector: Any) -> Any:
    """prmt.b32: each four bits select one of eight bytes, or its sign in all bits."""
    found = np.uint32(0)
    pool = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    for at in range(4):
        choice = selector >> np.uint32(4 * at) & np.uint32(15)
        byte = (pool >> ((choice & np.uint32(7)) * np.uint32(8)).astype(np.uint64)).astype(np.uint32) & np.uint32(255)
        byte = np.where(choice & np.uint32(8), (byte >> np.uint32(7)) * np.uint32(255), byte)
        found = found | byte << np.uint32(8 * at)
    return found


_INSTRUCTIONS = {
    "prmt.b32": _permuted,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "shr.u32": lambda a, b: a >> b,
}


def _executed(
    self: InterpreterBuilder, assembly: str, constraints: str, values: Any, types: Any, pure: bool, pack: int
) -> Any:
    """Instructions between integers of 32 bits, for one element at a time."""
    assert pack == 1
    outputs = constraints.count("=")
    registers = {f"${outputs + at}": value.data.view(np.uint32) for at, value in enumerate(values)}
    for line in assembly.strip("{} \n").split(";"):
        name, *rest = line.split(maxsplit=1) or [""]
        if name in ("", ".reg"):
            continue
        target, *operands = (one.strip() for one in rest[0].split(","))
        read = [registers[one] if one in registers else np.full(1, int(one, 0), np.uint32) for one in operands]
        registers[target] = _INSTRUCTIONS[name](*read)
    found = [TensorHandle(registers[f"${at}"].view(np.int32), tl.int32) for at in range(outputs)]
    return SimpleNamespace(get_result=found.__getitem__)


_get_np_dtype = interpreter._get_np_dtype
_scalar_np_dtype = cache(_get_np_dtype)


def _np_dtype(dtype: tl.dtype) -> np.dtype[Any]:
    """The type of numpy for the elements of a tensor."""
    scalar = dtype.scalar
    return _get_np_dtype(scalar) if scalar.is_ptr() else _scalar_np_dtype(scalar)


class _Shape:
    """Of the blocks of these sizes: what their types and their tensors state."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.of_types, self.count = tl.tuple(list(sizes)), validate_block_shape(sizes) if sizes else 1
        self.of_tensors = tl.constexpr(self.count), tl.tuple([tl.constexpr(size) for size in sizes])


_shape = cache(_Shape)  # so equal shapes are the same object
_SCALAR = _shape(())


def _init_block_type(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
    sizes = tuple([one.value if isinstance(one, tl.constexpr) else one for one in shape])
    if not sizes:
        raise TypeError("0d block_type is forbidden")
    self.element_ty, self.all_of_shape = element_ty, _shape(sizes)
    self.shape, self.numel = self.all_of_shape.of_types, self.all_of_shape.count


def _equal_block_types(self: tl.block_type, other: object) -> bool:
    return isinstance(other, tl.block_type) and self.shape is other.shape and self.element_ty == other.element_ty


def _init_tensor(self: tl.tensor, handle: TensorHandle, dtype: tl.dtype) -> None:
    self.handle, self.type, self.dtype = handle, dtype, dtype.scalar
    self.numel, self.shape = (dtype.all_of_shape if dtype.is_block() else _SCALAR).of_tensors


_broadcast_impl_value, _dtypes_equal = TritonSemantic.broadcast_impl_value, tl.dtype.__eq__


def _broadcast(self: TritonSemantic, lhs: tl.tensor, rhs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    return (lhs, rhs) if lhs.shape is rhs.shape else _broadcast_impl_value(self, lhs, rhs)


_unwrap_if_constexpr = tl.core._unwrap_if_constexpr


def _unwrap(value: Any) -> Any:
    kind = type(value)
    if kind is tl.tensor:
        return value
    return value.value if kind is tl.constexpr else _unwrap_if_constexpr(value)


class _Kept:
    """A scope that leaves `triton.language` as the interpreter has made it."""

    def restore(self) -> None: ...


def fix_interpreter() -> None:
    """Patches the interpreter for the rest of this process."""
    interpreter._patch_lang(
        FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core})
    )  # modules of its globals
    interpreter._patch_lang = lambda fn: _Kept()
    interpreter._get_np_dtype = _np_dtype
    # Seven operations for each sum and product, for an assertion that is checked in debug mode only.
    TritonSemantic.binary_op_sanitize_overflow_impl = lambda *arguments: None
    tl.core._unwrap_if_constexpr = _unwrap
    TritonSemantic.broadcast_impl_value = _broadcast
    tl.tensor.__init__ = _init_tensor
    tl.dtype.__eq__ = lambda self, other: self is other or _dtypes_equal(self, other)
    tl.block_type.__init__, tl.block_type.__eq__ = _init_block_type, _equal_block_types
    tl.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    tl.block_type.to_ir = lambda self, builder: self
    InterpreterBuilder.create_dot = _dot
    InterpreterBuilder.cast_impl = _converted
    InterpreterBuilder.create_fp_to_fp = _narrowed
    InterpreterBuilder.create_inline_asm = _executed
