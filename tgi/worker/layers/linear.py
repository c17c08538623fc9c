"""Linear layers that are batch invariant: each row of the result has the same bits, however many rows share a call.
On a GPU they are only with our GPU kernels and `--batch-invariant`: see `find_product`.

torch on CPU: the weight is reordered once for oneDNN, which then serves any number of rows. But oneDNN chooses a kernel
by the number of rows, and kernels sum in different orders. So calls are made with few different row counts only, at
most one tile or a multiple of it, and `choose_row_counts` measures on this machine which counts agree bit for bit. Few
counts also keep the number of kernels small that oneDNN generates, at 0.3 to 5 ms each.

The epilogue (silu, gelu, add, mul) runs inside the kernel, on the float32 sums: without rounding in between and without
another pass over memory. It also keeps silu exact: torch's elementwise silu uses another exp() for the odd elements at
the end of each thread's share, so its result depends on the number of rows and threads.

Our own CPU kernels are batch invariant for any row count. They, and our GPU kernels, take quantized weights as they are
stored.
"""

import copy
import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tgi.worker.activations import ACTIVATIONS, FACTORED, clamped_mul
from tgi.worker.cpu_kernels.experts import PackedLinear
from tgi.worker.cpu_kernels.kernels import EPILOGUES, NO_FACTORS, WHOLE_VOCABULARY, CpuKernels, VocabularyShards
from tgi.worker.cpu_kernels.program import LoraTarget, Program
from tgi.worker.gpu_kernels.kernels import GpuKernels
from tgi.worker.greedy import GreedyTokens, find_greedy_tokens
from tgi.worker.head_logits import HeadLogits
from tgi.worker.layers.norm import Norm
from tgi.worker.quantization import float8
from tgi.worker.quantization.weight import QuantizedWeight, Weight, as_plain, stack_weights

log = logging.getLogger(__name__)

# The reference row count: other counts are used only if they give the same bits. Longer calls are split into tiles of
# this many rows, or of larger agreeing counts.
ROW_TILE = 32
SMALL_ROW_COUNTS = (2, 4, 8, 16)
LARGE_ROW_COUNTS = (64, 128)
# Weights with more elements are measured with fewer calls and never run with LARGE_ROW_COUNTS: it bounds startup time.
LARGE_WEIGHT = 1 << 23

_run = torch.ops.mkldnn._linear_pointwise.default
_run_binary = torch.ops.mkldnn._linear_pointwise.binary
# Epilogues of one operand that oneDNN has: its name and algorithm.
_UNARY = {"none": ("none", ""), "silu": ("swish", ""), "gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh")}
_BINARY = {"add", "mul", "clamped_mul"}


class RowCounts(NamedTuple):
    """The row counts that calls may have, ascending. Empty: any count."""

    sizes: tuple[int, ...]

    def padded(self, rows: int) -> int:
        """The row count that `rows` rows are padded to."""
        if not self.sizes:
            return rows
        if rows > ROW_TILE:
            return -(-rows // ROW_TILE) * ROW_TILE
        return next(size for size in self.sizes if size >= rows)

    def split(self, rows: int) -> list[tuple[int, int]]:
        """The calls that compute a padded number of rows, as (start, stop); the largest counts first."""
        if not self.sizes:
            return [(0, rows)]
        calls, start = [], 0
        for size in reversed(self.sizes):
            while rows - start >= size:
                calls.append((start, start + size))
                start += size
        return calls


ANY_ROWS = RowCounts(())
ONE_TILE = RowCounts((ROW_TILE,))


class Linear:
    """y = epilogue(x @ weight.T + bias), for x [rows, inputs] and weight [outputs, inputs].

    `epilogue` is "none", an activation of activations.ACTIVATIONS, or of FACTORED with `factors`, or, with a second
    operand [rows, outputs] in the call, "add", "mul" or "clamped_mul" (see activations.clamped_mul).

    With `gated`, a second weight (our own kernels only), y is activations.gated of both products. The activated gate is
    rounded to `dtype` first; `bias` holds the outputs of both weights, one after the other.

    `dtype` is that of x and y and must be given for a quantized weight. The caller may free the weight: on CPU this
    object holds a reordered copy. `partial_sum`: the weight has the inputs of one rank, so y is complete when it is
    added up over all ranks. `kernels` are our CPU kernels, `gpu` our GPU kernels; both compute with quantized
    weights directly. Without them, a quantized weight is dequantized at load on CPU, and as in `find_product` on CUDA.
    """

    def __init__(
        self,
        weight: Weight,
        bias: Tensor | None = None,
        epilogue: str = "none",
        kernels: CpuKernels | None = None,
        dtype: torch.dtype | None = None,
        gated: Weight | None = None,
        gpu: GpuKernels | None = None,
        partial_sum: bool = False,
        factors: tuple[float, float] = NO_FACTORS,
    ) -> None:
        outputs, inputs = weight.shape
        self.outputs, self.inputs = int(outputs), int(inputs)
        self.epilogue = epilogue
        self.partial_sum = partial_sum
        self.factors = factors
        if dtype is None:
            assert isinstance(weight, Tensor)
            dtype = weight.dtype
        self.dtype = dtype
        self.row_counts = ONE_TILE if weight.device.type == "cpu" and gpu is None else ANY_ROWS
        self._bias = bias
        self._weight: Any  # in the format of the implementation: packed, reordered, quantized or plain
        self._call: Callable[..., Tensor]
        self._kernels = kernels
        self._gpu = gpu
        if kernels is not None:
            self.row_counts = ANY_ROWS
            self._weight = kernels.pack_weight(weight) if gated is None else kernels.pack_weight(weight, gated)
            self._bias = None if bias is None else bias.to(torch.float32)
        elif weight.device.type == "cpu" and gpu is None and reorders(dtype):
            self._weight = torch.ops.mkldnn._reorder_linear_weight(as_plain(weight, dtype))
            self._call = self._onednn_binary if epilogue in _BINARY else self._onednn
        else:
            if gated is not None:
                weight = stack_weights((weight, gated), dtype)
            self._weight = as_plain(weight, dtype) if weight.device.type == "cpu" and gpu is None else weight
            self._product = find_product(self._weight, bias, dtype, gpu)
            self._call = self._torch if gated is None else self._torch_gated
            if gpu is not None and epilogue == "add" and bias is None and isinstance(self._weight, Tensor):
                self._call = self._torch_accumulate

    def __call__(self, x: Tensor, other: Tensor | None = None, addend: Tensor | None = None) -> Tensor:
        """y for x [rows, inputs]. `other` is the second operand of a binary epilogue.

        `addend` (our CPU kernels only) is added before the epilogue: float32 [rows, outputs], or, of a gated layer, the
        outputs of both weights.
        """
        if self._kernels is not None:
            return self._kernels.linear(
                x, self._weight, self._bias, EPILOGUES[self.epilogue], other, addend, False, self.factors
            )
        assert addend is None
        rows = x.shape[0]
        padded = self.row_counts.padded(rows)
        if padded != rows:
            x = F.pad(x, (0, 0, 0, padded - rows))
            other = None if other is None else F.pad(other, (0, 0, 0, padded - rows))
        calls = self.row_counts.split(padded)
        if len(calls) == 1:
            y = self._call(x, other)
        else:
            y = torch.cat([self._call(x[a:b], None if other is None else other[a:b]) for a, b in calls])
        return y if padded == rows else y[:rows]

    def logits(self, x: Tensor, scale: float = 1.0, cap: float | None = None) -> Tensor:
        """cap * tanh(scale * y / cap), or scale * y without a cap, where y = linear(x): float32 [rows, outputs].

        Our CPU kernels do not round y to `dtype` in between.
        """
        if self._kernels is not None:
            return self._kernels.logits(x, self._weight, self._bias, scale, cap)
        return HeadLogits(self(x), scale, cap).float32()

    def greedy_tokens(
        self,
        x: Tensor,
        scale: float = 1.0,
        cap: float | None = None,
        shards: VocabularyShards = WHOLE_VOCABULARY,
    ) -> GreedyTokens:
        """The greedy tokens of `logits`, bit for bit. Our CPU kernels do not materialize the logits, and may have
        `shards` of several ranks."""
        if self._kernels is not None:
            return self._kernels.greedy_head(x, self._weight, self._bias, scale, cap, shards)
        assert shards is WHOLE_VOCABULARY
        return find_greedy_tokens(self.logits(x, scale, cap))

    def activate(self, x: Tensor) -> Tensor:
        """The activation, by torch or our GPU kernels."""
        if self._gpu is not None:
            return self._gpu.activation(x.contiguous(), self.epilogue, self.factors)
        if self.epilogue in FACTORED:
            return FACTORED[self.epilogue](x, *self.factors)
        return ACTIVATIONS[self.epilogue](x)

    @property
    def packed(self) -> PackedLinear:
        """The weight and the bias as our CPU kernels take them, which this layer must have."""
        assert self._kernels is not None
        return PackedLinear(self._weight, self._bias)

    def lookup(self, outputs: Tensor, first: int = 0) -> Tensor:
        """Rows of the weight, as an embedding: [n, inputs] for int64 [n]; zeros for those that it does not have. The
        first row has the number `first`. Our CPU kernels only."""
        assert self._kernels is not None
        return self._kernels.gather_rows(self._weight, outputs, first)

    def prepare_lookup(self, outputs: Tensor, out: Tensor, first: int = 0) -> Callable[[], object]:
        """A call that writes `lookup` of the current contents of `outputs` to `out`. Our CPU kernels only."""
        assert self._kernels is not None
        return self._kernels.row_gatherer(self._weight, outputs, out, first)

    def without_epilogue(self) -> "Linear":
        """A layer of the same weight without the epilogue; a gated layer returns the outputs of both weights.

        It has row counts of its own, to be chosen by `choose_row_counts`.
        """
        other = copy.copy(self)
        other.epilogue, other.row_counts = "none", ONE_TILE if self.row_counts.sizes else ANY_ROWS
        other._call = other._onednn if self._call in (self._onednn, self._onednn_binary) else other._torch
        return other

    def apply_gate(self, sums: Tensor) -> Tensor:
        """The result [rows, outputs] of a gated layer from the outputs of both weights. Our GPU kernels only."""
        assert self._gpu is not None
        return self._gpu.gated_activation(sums, self.epilogue)

    def append_to(self, program: Program, x: int, y: int, other: int = 0, delta: LoraTarget | None = None) -> None:
        """Appends a call of this layer to a program; x, y and other are buffer numbers. Our CPU kernels only.

        `delta` is the LoRA delta added before the epilogue.
        """
        program.linear(x, y, self._weight, self._bias, EPILOGUES[self.epilogue], other, delta, self.factors)

    def append_greedy_to(
        self,
        program: Program,
        x: int,
        y: int,
        norm: Norm,
        scale: float,
        cap: float | None,
        shards: VocabularyShards = WHOLE_VOCABULARY,
    ) -> None:
        """Appends `greedy_tokens` of the normalized rows of buffer x to a program; y is scratch of x's width."""
        arguments = norm.weight, norm.bias, norm.epsilon, norm.centred
        program.head(x, y, arguments, self._weight, self._bias, scale, cap, shards)

    def _onednn(self, x: Tensor, other: Tensor | None) -> Tensor:
        name, algorithm = _UNARY.get(self.epilogue, _UNARY["none"])
        y = _run(x, self._weight, self._bias, name, [], algorithm)
        return y if self.epilogue in _UNARY else self.activate(y)

    def _onednn_binary(self, x: Tensor, other: Tensor | None) -> Tensor:
        if self.epilogue == "clamped_mul":
            assert other is not None
            return clamped_mul(_run(x, self._weight, self._bias, "none", [], ""), other)
        return _run_binary(x, other, self._weight, self._bias, self.epilogue)

    def _torch(self, x: Tensor, other: Tensor | None) -> Tensor:
        y = self._product(x)
        if self.epilogue in FACTORED or self.epilogue in ACTIVATIONS:
            return self.activate(y)
        if other is None or self.epilogue not in _BINARY:
            return y
        if self.epilogue == "clamped_mul":
            return clamped_mul(y, other)
        return y.add_(other) if self.epilogue == "add" else y.mul_(other)

    def _torch_accumulate(self, x: Tensor, other: Tensor | None) -> Tensor:
        """The product adds to `other` as it is written, so the sum takes no launch of its own."""
        assert other is not None
        assert self._gpu is not None
        if self._gpu.batch_invariant:
            return self._gpu.matmul(x, self._weight, into=other)
        return other.addmm_(x, self._weight.t())

    def _torch_gated(self, x: Tensor, other: Tensor | None) -> Tensor:
        return self.apply_gate(self._product(x))


def reorders(dtype: torch.dtype) -> bool:
    """Whether oneDNN computes in this dtype on this CPU."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype is torch.float32


def choose_row_counts(layers: Iterable[Linear]) -> RowCounts:
    """Measures the row counts for which all these layers agree bit for bit, and sets them in each layer.

    Returns what the model should pad its rows to. One layer of each shape is measured, with random rows from a fixed
    seed, so that a restart chooses the same.
    """
    layers = list(layers)
    if any(layer.row_counts == ANY_ROWS for layer in layers):
        return ANY_ROWS
    shapes = {(layer.inputs, layer.outputs, layer.epilogue, layer.dtype): layer for layer in layers}
    agreed = set(SMALL_ROW_COUNTS + LARGE_ROW_COUNTS)
    for layer in shapes.values():
        for size in sorted(agreed):
            if _is_large(layer) and size > ROW_TILE:
                continue
            if not _agrees(layer, size):
                agreed.discard(size)
    rows = RowCounts(tuple(sorted({ROW_TILE, *agreed})))
    small = RowCounts(tuple(size for size in rows.sizes if size <= ROW_TILE))
    for layer in layers:
        layer.row_counts = small if _is_large(layer) else rows
    log.debug("linear layers: row counts %s agree bit for bit", ", ".join(map(str, rows.sizes)))
    return rows


def _is_large(layer: Linear) -> bool:
    return layer.inputs * layer.outputs > LARGE_WEIGHT


def _agrees(layer: Linear, size: int) -> bool:
    """Whether calls of `size` rows give the same bits as calls of ROW_TILE rows, at every offset."""
    count = max(size, ROW_TILE)
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(count, layer.inputs, generator=generator).to(layer.dtype)
    other = None
    if layer.epilogue in _BINARY:
        other = torch.randn(count, layer.outputs, generator=generator).to(layer.dtype)

    def call(start: int, stop: int) -> Tensor:
        return layer._call(x[start:stop], None if other is None else other[start:stop])

    expected = torch.cat([call(start, start + ROW_TILE) for start in range(0, count, ROW_TILE)])
    starts = range(0, count, size)
    if _is_large(layer):
        starts = starts[:: len(starts) - 1]
    return all(torch.equal(call(start, start + size), expected[start : start + size]) for start in starts)


# Rows up to which our GPU kernel multiplies with 8-bit floats, by the expected cost of rounding the activations to
# them. Estimated, not measured on a GPU.
KERNEL_MAX_ROWS_FP8 = 16

Product = Callable[[Tensor], Tensor]


def find_product(weight: Weight, bias: Tensor | None, dtype: torch.dtype, gpu: GpuKernels | None) -> Product:
    """The function x @ weight.T + bias of x [rows, inputs] in `dtype`, for a weight that may be quantized (on CUDA).

    Our GPU kernels decode quantized weights tile by tile within the product; the whole matrix is never dequantized.
    With 8-bit floats of one scale for each output, on a device that multiplies them, calls with many rows quantize the
    activations too; not so with kernels that are batch invariant, which compute any number of rows in one way. Without
    our kernels each call dequantizes the whole weight or multiplies 8-bit floats.
    """
    invariant = gpu is not None and gpu.batch_invariant
    if isinstance(weight, Tensor):
        return partial(gpu.matmul if gpu is not None and invariant else F.linear, weight=weight, bias=bias)
    if gpu is None:
        decoding: Product = partial(_dequantize_and_multiply, weight, bias, dtype)
    else:
        decoding = partial(gpu.quantized_matmul, weight=weight, bias=bias)
    whole_rows = weight.floating and weight.scales.shape[1] == 1
    if invariant or not whole_rows or dtype is torch.float32 or not float8.has_float8_matmul(weight.device):
        return decoding
    scaled = float8.quantize_rows if gpu is None else gpu.quantize_rows
    many_rows = partial(float8.float8_matmul, weight=weight, bias=bias, row_quantizer=scaled)
    return many_rows if gpu is None else partial(_multiply_by_rows, decoding, many_rows)


def _dequantize_and_multiply(weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype, x: Tensor) -> Tensor:
    return F.linear(x, weight.dequantized(dtype), bias)


def _multiply_by_rows(few_rows: Product, many_rows: Product, x: Tensor) -> Tensor:
    return few_rows(x) if x.shape[0] <= KERNEL_MAX_ROWS_FP8 else many_rows(x)
