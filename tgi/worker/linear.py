"""Linear layers whose every row comes out bit for bit the same, however many rows share the call.

On CPU the weight is reordered once for oneDNN, which then serves every number of rows. A matrix product picks its
kernel by the number of rows, and kernels differ in the order of their sums. So calls are made with few different
numbers of rows only, up to a tile, and `choose_rows` tries on this machine which of them agree bit for bit. Those few
are also all that oneDNN has to generate kernels for, which takes 0.3 to 5 ms for each new number of rows.

The epilogue (silu, gelu, add, mul) runs inside the kernel, on the float32 sums: no rounding in between, no second pass.
It is also what keeps silu exact: an elementwise torch operation takes another exp() for the odd elements at the end
of each thread's share, so its result would depend on the number of rows and threads.
"""

import copy
import logging
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tgi.worker.best import Best, find_best
from tgi.worker.gpu.kernels import Gpu
from tgi.worker.native.kernels import THEN, Kernels
from tgi.worker.native.program import Delta, Program
from tgi.worker.products import find_product
from tgi.worker.quantization.joining import matrix
from tgi.worker.quantization.weight import Weight, plain

log = logging.getLogger(__name__)

# Calls of this many rows are what all others are compared with; every longer call is made of such tiles, or larger.
TILE = 32
SMALLER = (2, 4, 8, 16)
LARGER = (64, 128)
# A weight with more elements is tried with fewer calls and no larger tiles, so that trying stays quick.
LARGE_WEIGHT = 1 << 23

_run = torch.ops.mkldnn._linear_pointwise.default
_run_binary = torch.ops.mkldnn._linear_pointwise.binary
# What the layer does to its sums: oneDNN's name and variant of it, and torch's.
_UNARY = {"none": ("none", ""), "silu": ("swish", ""), "gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh")}
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
_BINARY = {"add", "mul"}


class Rows(NamedTuple):
    """The numbers of rows that a call may have, ascending. Empty: any."""

    sizes: tuple[int, ...]

    def padded(self, rows: int) -> int:
        """How many rows a call for `rows` rows computes."""
        if not self.sizes:
            return rows
        if rows > TILE:
            return -(-rows // TILE) * TILE
        return next(size for size in self.sizes if size >= rows)

    def tiles(self, rows: int) -> list[tuple[int, int]]:
        """The calls, as (start, stop), that compute a padded number of rows: largest first."""
        if not self.sizes:
            return [(0, rows)]
        found, start = [], 0
        for size in reversed(self.sizes):
            while rows - start >= size:
                found.append((start, start + size))
                start += size
        return found


ANY_ROWS = Rows(())
ONE_TILE = Rows((TILE,))


class Linear:
    """y = then(x @ weight.T + bias), for x [rows, inputs] and weight [outputs, inputs].

    `then` is "none", "silu", "gelu", "gelu_tanh" (gelu with tanh in place of the error function), or, with a second
    argument [rows, outputs] in the call, "add" or "mul".
    With `gated`, a second weight for our own kernels, y = then(x @ weight.T + bias) * (x @ gated.T + bias), where the
    left side is rounded first and `bias` has the outputs of both, one behind the other.
    Weights given may be freed afterwards: on CPU this object keeps its own reordered copies. `dtype`, that of x and y,
    must be given for a quantized weight. Our own kernels compute with one as it is, torch's on CPU with what it stands
    for, and on CUDA products.py says how. `kernels` are those on CPU, `gpu` those on a GPU.
    """

    def __init__(
        self,
        weight: Weight,
        bias: Tensor | None = None,
        then: str = "none",
        kernels: Kernels | None = None,
        dtype: torch.dtype | None = None,
        gated: Weight | None = None,
        gpu: Gpu | None = None,
    ) -> None:
        outputs, inputs = weight.shape
        self.outputs, self.inputs = int(outputs), int(inputs)
        self.then = then
        if dtype is None:
            assert isinstance(weight, Tensor)
            dtype = weight.dtype
        self.dtype = dtype
        self.rows = ONE_TILE if weight.device.type == "cpu" and gpu is None else ANY_ROWS
        self._bias = bias
        self._weight: Any  # as whatever computes takes it
        self._call: Callable[..., Tensor]
        self._kernels = kernels
        self._gpu = gpu
        if kernels is not None:
            self.rows = ANY_ROWS
            self._weight = kernels.pack(weight) if gated is None else kernels.pack(weight, gated)
            self._bias = None if bias is None else bias.to(torch.float32)
        elif weight.device.type == "cpu" and gpu is None and reorders(dtype):
            self._weight = torch.ops.mkldnn._reorder_linear_weight(plain(weight, dtype))
            self._call = self._reordered_binary if then in _BINARY else self._reordered
        else:
            if gated is not None:
                weight = matrix((weight, gated), dtype)
            self._weight = plain(weight, dtype) if weight.device.type == "cpu" and gpu is None else weight
            self._product = find_product(self._weight, bias, dtype, gpu)
            self._call = self._plain if gated is None else self._gated

    def __call__(self, x: Tensor, other: Tensor | None = None, plus: Tensor | None = None) -> Tensor:
        """`plus`, float32 [rows, outputs] or, like the bias, with the outputs of two weights, is added before `then`;
        only our own kernels take it."""
        if self._kernels is not None:
            return self._kernels.linear(x, self._weight, self._bias, THEN[self.then], other, plus)
        assert plus is None
        rows = x.shape[0]
        padded = self.rows.padded(rows)
        if padded != rows:
            x = F.pad(x, (0, 0, 0, padded - rows))
            other = None if other is None else F.pad(other, (0, 0, 0, padded - rows))
        tiles = self.rows.tiles(padded)
        if len(tiles) == 1:
            y = self._call(x, other)
        else:
            y = torch.cat([self._call(x[a:b], None if other is None else other[a:b]) for a, b in tiles])
        return y if padded == rows else y[:rows]

    def write(self, program: Program, x: int, y: int, other: int = 0, delta: Delta | None = None) -> None:
        """Writes this layer down as it is called, with numbers of buffers for x, other and the result, and the delta in
        place of `plus`. For our own kernels."""
        program.linear(x, y, self._weight, self._bias, THEN[self.then], other, delta)

    def scores(self, x: Tensor, scale: float = 1.0, cap: float | None = None) -> Tensor:
        """cap * tanh(scale * y / cap), or scale * y without a cap, where y = linear(x); float32 [rows, outputs]. Our
        own kernels do not round in between."""
        if self._kernels is not None:
            return self._kernels.scores(x, self._weight, self._bias, scale, cap)
        y = self(x).to(torch.float32)
        if scale != 1.0:
            y = y * scale
        return y if cap is None else torch.tanh(y / cap) * cap

    def best(self, x: Tensor, scale: float = 1.0, cap: float | None = None) -> Best:
        """The best of these scores. Our own kernels do without them, and find the same bits."""
        if self._kernels is not None:
            return self._kernels.head(x, self._weight, self._bias, scale, cap)
        return find_best(self.scores(x, scale, cap))

    def lookup(self, outputs: Tensor) -> Tensor:
        """The weights of some outputs, int64 [n]: [n, inputs]. For our own kernels."""
        assert self._kernels is not None
        return self._kernels.rows(self._weight, outputs)

    def lookup_into(self, outputs: Tensor, found: Tensor) -> Callable[[], object]:
        """What leaves these in `found`, whatever `outputs` holds when it is called. For our own kernels."""
        assert self._kernels is not None
        return self._kernels.rows_into(self._weight, outputs, found)

    def bare(self) -> "Linear":
        """The same layer without `then`, and of two weights with the outputs of both. It shares the weight, and has
        numbers of rows of its own."""
        other = copy.copy(self)
        other.then, other.rows = "none", ONE_TILE if self.rows.sizes else ANY_ROWS
        other._call = other._reordered if self._call in (self._reordered, self._reordered_binary) else other._plain
        return other

    def write_best(self, program: Program, x: int, y: int, norm: tuple, scale: float, cap: float | None) -> None:
        """Writes `best` of normed rows down; y is scratch as wide as x."""
        program.head(x, y, norm, self._weight, self._bias, scale, cap)

    def gate(self, sums: Tensor) -> Tensor:
        """What comes of the outputs of both weights, [rows, 2 * outputs]. For our own kernels on a GPU."""
        assert self._gpu is not None
        return self._gpu.gate(sums, self.then)

    def _gated(self, x: Tensor, other: Tensor | None) -> Tensor:
        return self.gate(self._product(x))

    def _reordered(self, x: Tensor, other: Tensor | None) -> Tensor:
        name, variant = _UNARY[self.then]
        return _run(x, self._weight, self._bias, name, [], variant)

    def _reordered_binary(self, x: Tensor, other: Tensor | None) -> Tensor:
        return _run_binary(x, other, self._weight, self._bias, self.then)

    def _plain(self, x: Tensor, other: Tensor | None) -> Tensor:
        y = self._product(x)
        if self.then in ACTIVATIONS:
            return ACTIVATIONS[self.then](y)
        if other is None or self.then not in _BINARY:
            return y
        return y.add_(other) if self.then == "add" else y.mul_(other)


def reorders(dtype: torch.dtype) -> bool:
    """Whether oneDNN computes with this number format on this CPU."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype is torch.float32


def choose_rows(layers: Iterable[Linear]) -> Rows:
    """Finds the numbers of rows for which these layers agree bit for bit, sets them in each layer, and returns what
    the model should pad its rows to.

    One layer of each shape is tried, with random rows from a fixed seed, so a restart chooses the same.
    """
    layers = list(layers)
    if any(layer.rows is ANY_ROWS for layer in layers):
        return ANY_ROWS
    shapes = {(layer.inputs, layer.outputs, layer.then, layer.dtype): layer for layer in layers}
    agreed = set(SMALLER + LARGER)
    for layer in shapes.values():
        for size in sorted(agreed):
            if _is_large(layer) and size > TILE:
                continue
            if not _agrees(layer, size):
                agreed.discard(size)
    rows = Rows(tuple(sorted({TILE, *agreed})))
    small = Rows(tuple(size for size in rows.sizes if size <= TILE))
    for layer in layers:
        layer.rows = small if _is_large(layer) else rows
    log.debug("linear layers run with %s rows, which agree bit for bit", ", ".join(map(str, rows.sizes)))
    return rows


def _is_large(layer: Linear) -> bool:
    return layer.inputs * layer.outputs > LARGE_WEIGHT


def _agrees(layer: Linear, size: int) -> bool:
    """Whether calls of `size` rows give the same bits as calls of TILE rows, at every offset."""
    count = max(size, TILE)
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(count, layer.inputs, generator=generator).to(layer.dtype)
    other = None
    if layer.then in _BINARY:
        other = torch.randn(count, layer.outputs, generator=generator).to(layer.dtype)

    def call(start: int, stop: int) -> Tensor:
        return layer._call(x[start:stop], None if other is None else other[start:stop])

    expected = torch.cat([call(start, start + TILE) for start in range(0, count, TILE)])
    starts = range(0, count, size)
    if _is_large(layer):
        starts = starts[:: len(starts) - 1]
    return all(torch.equal(call(start, start + size), expected[start : start + size]) for start in starts)
