"""Fixes Triton's interpreter for bfloat16: its matrix products multiply bit patterns, and
cuts float32 off where a GPU rounds. And it executes assembly, of a few instructions.

It replaces the functions of `triton.language` once, not at each launch and call of a device function, keeps what it
computed for each operation (types of numpy, shapes, constants), so that equal shapes are the same object and are not
compared by their sizes, takes short ways where operands have one type, and leaves out assertions that are not checked.
Nearly all of the interpreter's time passes in such code, not in numpy. That takes less than a tenth of the time."""

import inspect
from collections.abc import Callable
from functools import cache, lru_cache
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

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
        self.sizes = sizes
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


def _equal_dtypes(self: tl.dtype, other: object) -> bool:
    if self is other:
        return True
    return self.name == other.name if type(other) is tl.dtype else _dtypes_equal(self, other)


def _block(element_ty: tl.dtype, shape: _Shape) -> tl.block_type:
    found = tl.block_type.__new__(tl.block_type)
    found.element_ty, found.all_of_shape = element_ty, shape
    found.shape, found.numel = shape.of_types, shape.count
    return found


@cache
def _joint_shape(left: _Shape, right: _Shape) -> _Shape | None:
    """The shape to which blocks of these two are broadcast; None: the interpreter finds out, or raises."""
    if left is _SCALAR or right is _SCALAR:
        return right if left is _SCALAR else left
    sizes = [(max(pair), min(pair)) for pair in zip(left.sizes, right.sizes, strict=False)]
    if len(left.sizes) != len(right.sizes) or any(least not in (1, most) for most, least in sizes):
        return None
    return _shape(tuple(most for most, _ in sizes))


def _shape_of(x: tl.tensor) -> _Shape:
    kind = x.type
    return kind.all_of_shape if type(kind) is tl.block_type else _SCALAR


def _broadcast(self: TritonSemantic, lhs: tl.tensor, rhs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    if lhs.shape is rhs.shape:
        return lhs, rhs
    shape = _joint_shape(_shape_of(lhs), _shape_of(rhs))
    if shape is None:
        return _broadcast_impl_value(self, lhs, rhs)
    return _expanded(lhs, shape), _expanded(rhs, shape)


def _expanded(x: tl.tensor, shape: _Shape) -> tl.tensor:
    if _shape_of(x) is shape:
        return x
    data = x.handle.data
    there = np.full(shape.sizes, data, data.dtype) if data.size == 1 else np.broadcast_to(data, shape.sizes)
    return tl.tensor(TensorHandle(there, x.handle.dtype), _block(x.dtype, shape))


_check_types = TritonSemantic.binary_op_type_checking_impl
_WHOLE, _EXACT = (tl.int32, tl.int64), (tl.int1, tl.int32, tl.int64, tl.float32, tl.float64)
_ADDED = {id(dtype) for dtype in _WHOLE}  # to pointers
_WIDER = {id(tl.int64), id(tl.float32)}  # than int32, which becomes this
# Numbers that become constants of the type of the other operand.
_NUMBERS = {id(tl.float32): (int, float)} | {id(dtype): (int,) for dtype in _WHOLE}
_SAME, _SAME_BUT_QUOTIENTS = {id(dtype) for dtype in _EXACT}, {id(tl.float16), id(tl.bfloat16)}


_scalar_constant = TritonSemantic.scalar_constant


@lru_cache(4096)
def _constant(value: float, dtype: tl.dtype) -> tl.tensor:
    return _scalar_constant(interpreter.interpreter_semantic, value, dtype)


def _make_constant(self: TritonSemantic, value: Any, dtype: tl.dtype) -> tl.tensor:
    return _constant(value, dtype) if id(dtype) in _NUMBERS else _scalar_constant(self, value, dtype)


_INTEGERS, _FLOATS = frozenset(tl.dtype.SINT_TYPES + tl.dtype.UINT_TYPES), frozenset(tl.dtype.FP_TYPES)


def _operands(
    self: TritonSemantic,
    lhs: Any,
    rhs: Any,
    allow_lhs_ptr: bool = False,
    allow_rhs_ptr: bool = False,
    arithmetic_check: bool = True,
    div_or_mod: bool = False,
) -> tuple[tl.tensor, tl.tensor]:
    """The operands in one type and of one shape. Types are not converted where they are the same; numbers take the type
    of the other operand. numpy broadcasts the data in the operation that follows."""
    if type(lhs) is tl.tensor and type(rhs) is tl.tensor:
        left, right = lhs.dtype, rhs.dtype
        key = id(left)
        if left is right:
            known = key in _SAME or (key in _SAME_BUT_QUOTIENTS and not div_or_mod)
        elif right is tl.int32 and key in _WIDER:
            return _as_one_shape(self, lhs, _cast_number(self, rhs, left))
        elif left is tl.int32 and id(right) in _WIDER:
            return _as_one_shape(self, _cast_number(self, lhs, right), rhs)
        else:
            known = allow_lhs_ptr and type(left) is tl.pointer_type and id(right) in _ADDED
        if known:
            return _as_one_shape(self, lhs, rhs)
    elif type(lhs) is tl.tensor:
        if type(rhs) in _NUMBERS.get(id(lhs.dtype), ()) and -(2**31) <= rhs < 2**31:
            return _as_one_shape(self, lhs, _constant(rhs, lhs.dtype))
    elif type(rhs) is tl.tensor and type(lhs) in _NUMBERS.get(id(rhs.dtype), ()) and -(2**31) <= lhs < 2**31:
        return _as_one_shape(self, _constant(lhs, rhs.dtype), rhs)
    return _check_types(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)


def _as_one_shape(self: TritonSemantic, lhs: tl.tensor, rhs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    if lhs.shape is rhs.shape:
        return lhs, rhs
    one, other = _shape_of(lhs), _shape_of(rhs)
    shape = _joint_shape(one, other)
    if shape is None:
        return _broadcast_impl_value(self, lhs, rhs)
    if one is not shape:
        lhs = tl.tensor(lhs.handle, _block(lhs.dtype, shape))
    if other is not shape:
        rhs = tl.tensor(rhs.handle, _block(rhs.dtype, shape))
    return lhs, rhs


_cast_any = TritonSemantic.cast
_NARROW = (tl.float16, tl.bfloat16)
_NUMERIC = (*_EXACT[1:], *_NARROW, tl.int8, tl.int16, tl.uint8, tl.uint16, tl.uint32, tl.uint64)
# Conversions in one step.
_DIRECT = {
    (id(one), id(other))
    for one in (tl.int1, *_NUMERIC)
    for other in (_NUMERIC if one not in _NARROW else (tl.float32,))
}  # fmt: skip


def _cast_number(self: TritonSemantic, x: tl.tensor, dst_ty: tl.dtype, rounding: Any = None) -> tl.tensor:
    there = dst_ty.scalar
    if x.dtype is there:
        return x
    if rounding is not None or (id(x.dtype), id(there)) not in _DIRECT:
        return _cast_any(self, x, dst_ty, rounding)
    shape = _shape_of(x)
    return tl.tensor(self.builder.cast_impl(x.handle, there), there if shape is _SCALAR else _block(there, shape))


_index = tl.tensor.__getitem__
_ALL = slice(None)


def _getitem(self: tl.tensor, places: Any) -> tl.tensor:
    """x[:, None] and the like."""
    if type(places) is not tuple or self.type is self.dtype or any(one is not None and one != _ALL for one in places):
        return _index(self, places, _semantic=interpreter.interpreter_semantic)
    data = self.handle.data[places]
    return tl.tensor(TensorHandle(data, self.handle.dtype), _block(self.dtype, _shape(data.shape)))


def _binary_op(self: InterpreterBuilder, lhs: TensorHandle, rhs: TensorHandle, op: Callable[..., Any]) -> TensorHandle:
    found, dtype = op(lhs.data, rhs.data), lhs.dtype
    if found.itemsize > _itemsize(dtype):
        found = found.astype(_np_dtype(dtype))
    return TensorHandle(found, dtype)


def _itemsize(dtype: tl.dtype) -> int:
    return 8 if type(dtype) is tl.pointer_type else dtype.itemsize or 1


def _init_handle(self: TensorHandle, data: Any, dtype: tl.dtype) -> None:
    self.data, self.dtype = data, dtype


_unwrap_if_constexpr = tl.core._unwrap_if_constexpr


_UNWRAPPED = {tl.tensor, tl.dtype, int, float, bool, str, type(None)}


def _unwrap(value: Any) -> Any:
    kind = type(value)
    if kind in _UNWRAPPED:
        return value
    return value.value if kind is tl.constexpr else _unwrap_if_constexpr(value)


def _patch_attr(obj: Any, name: str, member: Any, *rest: Any) -> None:
    """Replaces a builtin of `triton.language` by one with the interpreter's semantics."""
    inner = getattr(member, "__wrapped__", member)  # which does not ask whether there are any

    def call(*arguments: Any, **named: Any) -> Any:
        named["_semantic"] = interpreter.interpreter_semantic
        return inner(*arguments, **named)

    setattr(obj, name, call)


def _operator(name: str, reflected: bool) -> Callable[[tl.tensor, Any], tl.tensor]:
    """A sum, difference or product as an operator."""
    semantic = interpreter.interpreter_semantic
    compute = getattr(semantic, name)
    if reflected:
        return lambda self, other: compute(_unwrap(other), self, False)
    return lambda self, other: compute(self, _unwrap(other), False)


class _Parameters(NamedTuple):
    """Of a kernel."""

    names: tuple[str, ...]
    defaults: dict[str, Any]
    constants: set[str]


@cache
def _parameters(fn: Callable[..., Any]) -> _Parameters:
    parameters = inspect.signature(fn).parameters.values()
    executor = interpreter.GridExecutor(fn, [one.name for one in parameters], None)
    defaults = {one.name: one.default for one in parameters if one.default is not inspect.Parameter.empty}
    return _Parameters(tuple(executor.arg_names), defaults, set(executor.constexprs))


@cache
def _pointer_type(dtype: torch.dtype) -> tl.pointer_type:
    return interpreter._implicit_cvt(torch.empty(1, dtype=dtype)).type


def _as_argument(value: Any) -> Any:
    if type(value) is not torch.Tensor:
        return interpreter._implicit_cvt(value)
    kind = _pointer_type(value.dtype)
    return tl.tensor(TensorHandle(np.array([value.data_ptr()], np.uint64), kind), kind)


_run = interpreter.InterpretedFunction.run


def _launch(self: interpreter.InterpretedFunction, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
    """Calls a kernel for each program, with tensors on CPU as they are: without copies of their storages."""
    if warmup or any(isinstance(one, torch.Tensor) and not one.is_cpu for one in (*arguments, *named.values())):
        return _run(self, *arguments, grid=grid, warmup=warmup, **named)
    fn = self.rewrite()
    names, defaults, constants = _parameters(fn)
    given = defaults | dict(zip(names, arguments, strict=False))
    given |= {name: value for name, value in named.items() if name in names}
    given = {name: value if name in constants else _as_argument(value) for name, value in given.items()}
    sizes = (*(grid(given) if callable(grid) else grid), 1, 1)[:3]
    builder = interpreter.interpreter_builder
    builder.set_grid_dim(*sizes)
    for place in np.ndindex(*sizes):
        builder.grid_idx = place
        try:
            fn(**given)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error
    return None


class _Kept:
    """A scope that leaves `triton.language` as the interpreter has made it."""

    def restore(self) -> None: ...


def fix_interpreter() -> None:
    """Patches the interpreter for the rest of this process."""
    interpreter._patch_attr = _patch_attr
    interpreter._patch_lang(
        FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core})
    )  # modules of its globals
    interpreter._patch_lang = lambda fn: _Kept()
    interpreter._get_np_dtype = _np_dtype
    # Seven operations for each sum and product, for an assertion that is checked in debug mode only.
    TritonSemantic.binary_op_sanitize_overflow_impl = lambda *arguments: None
    tl.core._unwrap_if_constexpr = _unwrap
    TritonSemantic.broadcast_impl_value, TritonSemantic.binary_op_type_checking_impl = _broadcast, _operands
    TritonSemantic.cast, TritonSemantic.scalar_constant = _cast_number, _make_constant
    tl.tensor.__getitem__ = _getitem
    tl.dtype.is_int = lambda self: self.name in _INTEGERS
    tl.dtype.is_floating = lambda self: self.name in _FLOATS
    for name in ("add", "sub", "mul"):
        setattr(tl.tensor, f"__{name}__", _operator(name, False))
        setattr(tl.tensor, f"__r{name}__", _operator(name, True))
    TensorHandle.__init__, InterpreterBuilder.binary_op = _init_handle, _binary_op
    TensorHandle.set_attr = lambda self, key, value: None  # hints for the compiler
    interpreter.InterpretedFunction.run = _launch
    tl.tensor.__init__ = _init_tensor
    tl.dtype.__eq__ = _equal_dtypes
    tl.block_type.__init__, tl.block_type.__eq__ = _init_block_type, _equal_block_types
    tl.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    tl.block_type.to_ir = lambda self, builder: self
    InterpreterBuilder.create_dot = _dot
    InterpreterBuilder.cast_impl = _converted
    InterpreterBuilder.create_fp_to_fp = _narrowed
    InterpreterBuilder.create_inline_asm = _executed
