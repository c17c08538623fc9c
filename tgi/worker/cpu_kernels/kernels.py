"""The compiled CPU kernels as functions of tensors. Unless stated otherwise, tensors have the type of the library
(`CpuKernels.dtype`) and are on CPU and, except for `x`, contiguous.

A call computes on the calling thread and on those of the pool, and returns when the result is complete. Only one thread
may call. No result depends on the number of threads, nor a row's result on the other rows.
"""

import weakref
from collections.abc import Callable
from ctypes import CDLL, c_float, c_int, c_int64, c_void_p
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tgi.worker.cpu_kernels.arena import Arena, ScratchBuffer
from tgi.worker.cpu_kernels.build import KernelsUnavailable
from tgi.worker.greedy import GreedyTokens
from tgi.worker.kv_cache_sizes import CPU_PAGE_SIZE
from tgi.worker.quantization.weight import CODEBOOK, Weight
from tgi.worker.quantization.weight_forms import GROUPS, MX_GROUP

PANEL = 32  # outputs of a panel (packed_weight.h); the last panel is padded
PAGE_SIZE = CPU_PAGE_SIZE  # positions of a KV page
MAX_HEAD_DIM = 576
MAX_TILE_ROWS = 32  # rows of a tile product (dot_tile.h, fma_tile.h)
# Flags of a format code.
SHIFTS_FORMAT = 1 << 16  # groups have shifts
INTEGER_FORMAT = 1 << 17  # integers with one scale for each output
GATED_FORMAT = 1 << 18  # a gate and an up projection
HALF_FORMAT = 1 << 19  # a plain weight of 16 bits is float16; without the flag, bfloat16
SCALES32_FORMAT = 1 << 20  # scales and shifts of groups are float32; without the flag, float16
FLOAT4_FORMAT = 1 << 21  # 4-bit codes in groups are floats
MXFP4_FORMAT = 1 << 22  # in groups of 32 whose scales are powers of two
MAX_MXFP4_SCALE, MIN_MXFP4_SCALE = 2.0**40, 2.0**-40  # smaller scales count as 0
MAX_INTEGER_INPUTS = 1 << 16  # so that sums of products of bytes stay within int32
SPIN_COUNT = 1000  # polls of a pool thread for the next job before it sleeps: about 50 microseconds

# By the numbers of `enum class Epilogue` in linear.h.
_NAMES = (
    "none",
    "silu",
    "gelu",
    "gelu_tanh",
    "relu",
    "relu2",
    "clamped_silu",
    "xielu",
    "clip",
    "add",
    "mul",
    "clamped_mul",
)
EPILOGUES = {name: number for number, name in enumerate(_NAMES)}

NO_FACTORS = (0.0, 0.0)  # of an epilogue that has none

# Argument types of the functions in interface.cpp, without the thread pool, the first argument of all.
_SIGNATURES = {
    "tgi_pack": (c_void_p, *[c_int64] * 3, c_void_p, c_int64),
    "tgi_pack_grouped": (*[c_void_p] * 3, *[c_int64] * 3, c_void_p, c_int64),
    "tgi_pack_integer": (*[c_void_p] * 4, *[c_int64] * 3, c_void_p, c_int64),
    "tgi_linear": (c_void_p, c_void_p, c_int64, *[c_void_p] * 5, *[c_int64] * 5, c_float, c_float),
    "tgi_gather_rows": (c_void_p, c_int64, c_void_p, c_void_p, *[c_int64] * 4),
    "tgi_norm": (*[c_void_p] * 4, *[c_int64] * 4, c_float),
    "tgi_rope": (*[c_void_p] * 3, *[c_int64] * 6),
    "tgi_head_products": (*[c_void_p] * 4, *[c_int64] * 6),
    "tgi_argmax": (*[c_void_p] * 5, c_int64, c_int64),
    "tgi_logits": (c_void_p, c_void_p, c_int64, c_void_p, c_float, c_float, *[c_int64] * 3, c_void_p),
    "tgi_greedy_head": (
        *(c_void_p, c_void_p, c_int64, c_void_p, c_float, c_float, *[c_int64] * 3),
        *(c_void_p, c_void_p, c_int64, *[c_void_p] * 4),
    ),
    "tgi_read_memory": (c_void_p, c_int64, c_void_p),
    "tgi_fma_peak": (c_int64, c_void_p),
    "tgi_lora": (*[c_void_p] * 7, *[c_int64] * 4),
    "tgi_write_kv": (c_void_p, *[c_int64] * 3, c_void_p, c_int64, c_void_p),
    "tgi_attention": (
        *(c_void_p, *[c_int64] * 5, *[c_void_p] * 4, c_int64, c_int64, c_void_p, c_int64),
        *(c_void_p, c_void_p, c_int64, c_float, c_float, c_int64, c_void_p, c_int64, c_int64, c_void_p),
    ),
}


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _columns(weight: Weight) -> tuple[Tensor | None, ...]:
    return (weight,) if isinstance(weight, Tensor) else tuple(weight)


def format_code(weight: Weight) -> int:
    """The code of WeightFormat in packed_weight.h."""
    if isinstance(weight, Tensor):
        return 8 * weight.dtype.itemsize | (HALF_FORMAT if weight.dtype is torch.float16 else 0)
    if weight.is_integer:
        return weight.bits | INTEGER_FORMAT
    flags = SHIFTS_FORMAT if weight.shifts is not None else 0
    flags |= SCALES32_FORMAT if weight.scales.dtype is torch.float32 else 0
    flags |= FLOAT4_FORMAT if weight.is_float4 else 0
    flags |= MXFP4_FORMAT if weight.is_float4 and weight.group == MX_GROUP and _are_powers(weight.scales) else 0
    return weight.bits | weight.group << 8 | flags


def _are_powers(scales: Tensor) -> bool:
    """Whether all scales are those of MXFP4_FORMAT."""
    scales = scales.float()
    powers = (torch.frexp(scales).mantissa == 0.5) & (scales <= MAX_MXFP4_SCALE)
    return bool((powers | ((scales >= 0) & (scales < MIN_MXFP4_SCALE))).all())


def can_pack_together(one: Weight, other: Weight) -> bool:
    """Whether two weights have the same shape and format, as `pack_weight` needs of a gate and an up projection."""
    return one.shape == other.shape and format_code(one) == format_code(other)


class PackedWeight(NamedTuple):
    """A weight [outputs, inputs] in the layout of packed_weight.h, or a gate and an up projection, each of this
    shape."""

    memory: Tensor  # uint8 [bytes]
    outputs: int
    inputs: int
    form: int  # the code of its WeightFormat in packed_weight.h

    @property
    def shape(self) -> tuple[int, int, int]:
        """Outputs, inputs and format code."""
        return self.outputs, self.inputs, self.form


class PackedHeads(NamedTuple):
    """A weight of each head, all of one shape and format."""

    heads: list[PackedWeight]
    addresses: Tensor  # int64 [heads], of their memory


def join_heads(heads: list[PackedWeight]) -> PackedHeads:
    """These weights with their addresses."""
    return PackedHeads(heads, torch.tensor([one.memory.data_ptr() for one in heads]))


class AttentionRows(NamedTuple):
    """The attention batch of a step: addresses and sizes of its columns (AttentionBatch in kv_cache.h)."""

    slots: int  # int64 [T] slot mapping: where each token's key and value go, page * PAGE_SIZE + offset
    bounds: int  # int32 [R + 1]: row r has the tokens bounds[r] to bounds[r + 1] - 1
    context_lengths: int  # int32 [R]: context lengths
    pages: int  # int32 [R, width]: page tables
    rows: int
    width: int
    last_keys: int | None = None  # int32 [T]: the last position that each token sees; None: its own
    windows_alone: bool = False  # `last_keys` holds for layers with a sliding window, and the others are causal


class KVCache(NamedTuple):
    """The keys and values of one layer, in the layout of kv_cache.h."""

    memory: Tensor  # uint8 [pages, kv_heads, bytes of a page of a head], zero at first
    form: int  # CpuKernels.kv_form of their type


class LoraTiles(NamedTuple):
    """The tokens of a step that have an adapter, in tiles of up to MAX_TILE_ROWS tokens of one adapter; all int64."""

    tokens: Tensor  # [S] sorted by adapter
    bounds: Tensor  # [tiles + 1]: tile t has tokens[bounds[t]] to tokens[bounds[t + 1] - 1]
    owners: Tensor  # [tiles]: number of the tile's adapter


class VocabularyShards(NamedTuple):
    """How the output head is divided among ranks: all but the last have multiples of PANEL."""

    group: int | None = None  # SharedMemoryCommunicator.handle; None: this is the only rank
    outputs: tuple[int, ...] = ()  # logits of each rank

    @property
    def arguments(self) -> tuple[int | None, object, int]:
        """As functions of the library take them."""
        return self.group, (c_int64 * len(self.outputs))(*self.outputs), len(self.outputs)

    def panels(self, outputs: int) -> int:
        """Panels of all ranks; `outputs`: of the only rank."""
        return sum(-(-each // PANEL) for each in self.outputs or (outputs,))


WHOLE_VOCABULARY = VocabularyShards()


class CpuKernels:
    """A loaded library with its thread pool. `dtype` is the type of activations and of the KV cache that the library
    was compiled for. Raises KernelsUnavailable if it cannot be used.

    Products are computed by one of two engines: the dot engine multiplies bfloat16 numbers, on processors that have
    instructions for it; the FMA engine, everywhere else and for other types, widens all numbers to float32 (exactly).
    """

    def __init__(self, path: Path, threads: int, dtype: torch.dtype = torch.bfloat16) -> None:
        try:
            library = CDLL(str(path))
        except OSError as error:
            raise KernelsUnavailable(f"{path} cannot be loaded: {error}") from error
        library.tgi_start.argtypes, library.tgi_start.restype = (c_int, c_int), c_void_p
        library.tgi_stop.argtypes, library.tgi_stop.restype = (c_void_p,), None
        library.tgi_block_maximum_bytes.argtypes, library.tgi_block_maximum_bytes.restype = (), c_int64
        library.tgi_packed_bytes.argtypes, library.tgi_packed_bytes.restype = (c_int64,) * 3, c_int64
        self.library, self.dtype = library, dtype
        self.dot_engine = library.tgi_dot_engine() == 1
        self._arena = Arena()
        self._logits_buffer, self._block_maxima_buffer = ScratchBuffer(), ScratchBuffer()
        self._block_maximum_bytes = library.tgi_block_maximum_bytes()  # for each panel of a row
        self._start_threads(threads)

    def restart_threads(self, threads: int) -> None:
        """Starts threads in a process that was forked from the one that has loaded the library. Calls that were
        prepared before are not valid there."""
        self._stop.detach()  # of threads that do not exist here
        self._start_threads(threads)

    def _start_threads(self, threads: int) -> None:
        thread_pool = self.library.tgi_start(threads, SPIN_COUNT)
        if thread_pool is None:
            raise KernelsUnavailable("the system does not let this process use AMX")
        self._stop = weakref.finalize(self, self.library.tgi_stop, thread_pool)
        self.thread_pool, self.threads = thread_pool, threads
        functions = {}
        for name, arguments in _SIGNATURES.items():
            function = getattr(self.library, name)
            function.argtypes, function.restype = (c_void_p, *arguments), None
            functions[name] = partial(function, thread_pool)
        self._pack, self._pack_integer = functions["tgi_pack"], functions["tgi_pack_integer"]
        self._pack_grouped, self._linear = functions["tgi_pack_grouped"], functions["tgi_linear"]
        self._gather_rows, self._norm = functions["tgi_gather_rows"], functions["tgi_norm"]
        self._head_products = functions["tgi_head_products"]
        self._rope, self._argmax = functions["tgi_rope"], functions["tgi_argmax"]
        self._logits, self._greedy_head = functions["tgi_logits"], functions["tgi_greedy_head"]
        self._read_memory, self._lora = functions["tgi_read_memory"], functions["tgi_lora"]
        self._attention, self._fma_peak = functions["tgi_attention"], functions["tgi_fma_peak"]
        self._write_kv = functions["tgi_write_kv"]

    def supported_weight(self, weight: Weight) -> Weight:
        """The weight in types that `pack_weight` takes. Codes of a quantized weight are never converted.

        The dot engine takes plain weights in bfloat16, and scales of groups with shifts in float16. Otherwise a plain
        weight gets this library's type, except that with float32 one of 16 bits is kept: products widen it, which is
        exact and reads half the memory.
        """
        if not isinstance(weight, Tensor):
            weight = weight.with_group_scales()
            if weight.is_integer or not self.dot_engine or weight.shifts is None:
                return weight
            return weight.with_factors(torch.float16)
        keep = self.dtype is torch.float32 and weight.dtype in (torch.bfloat16, torch.float16)
        return weight if keep else weight.to(self.dtype)

    def pack_weight(self, *weights: Weight) -> PackedWeight:
        """Packs a weight [outputs, inputs] for `linear`; or two that `can_pack_together`: a gate and an up projection.
        Both have types as of `supported_weight`. Quantized codes are not converted.

        What `linear` multiplies with, by engine:

        - The FMA engine multiplies the activations with the exact values of the weight and rounds sums to float32 only:
          in a quantized weight, those of the products with the codes of a group, which are scaled afterwards.
        - The dot engine computes with scales of groups, or shifts, exactly as with
          `weight.dequantized(torch.bfloat16)`. With one scale for each output it quantizes the activations to 16-bit
          integers, with an error of at most half a unit: 1 / 65,534 of the largest magnitude of the row.
        """
        (outputs, inputs), form = weights[0].shape, format_code(weights[0])
        packed = self._empty_packed(outputs, inputs, form | GATED_FORMAT if len(weights) > 1 else form)
        for part, weight in enumerate(weights):
            assert can_pack_together(weight, weights[0])
            columns = [None if one is None else one.contiguous() for one in _columns(weight)]  # referenced until packed
            to = *packed.shape, packed.memory.data_ptr(), part
            if isinstance(weight, Tensor):
                assert not self.dot_engine or weight.dtype is torch.bfloat16
                self._pack(*map(_address, columns), *to)
            elif weight.is_integer:
                assert inputs <= MAX_INTEGER_INPUTS
                codes, scales, _, factors = columns
                self._pack_integer(
                    *map(_address, (codes, scales, factors, CODEBOOK if weight.bits == 4 else None)), *to
                )
            else:
                assert weight.group in GROUPS
                assert weight.shifts is None or weight.shifts.dtype is weight.scales.dtype
                assert not self.dot_engine or weight.shifts is None or weight.scales.dtype is torch.float16
                assert weight.factors is None or not weight.factors.shape[1]
                assert not weight.floating
                codes, scales, shifts, _ = columns
                if weight.is_float4:  # codes stand for twice the number, an integer
                    assert scales is not None
                    scales = scales / 2
                self._pack_grouped(*map(_address, (codes, scales, shifts)), *to)
        return packed

    def _empty_packed(self, outputs: int, inputs: int, form: int) -> PackedWeight:
        """Uninitialized memory for a packed weight."""
        return PackedWeight(
            self._arena.allocate(self.library.tgi_packed_bytes(outputs, inputs, form)), outputs, inputs, form
        )

    def linear(
        self,
        x: Tensor,
        weight: PackedWeight,
        bias: Tensor | None = None,
        then: int = 0,
        other: Tensor | None = None,
        plus: Tensor | None = None,
        wide: bool = False,
        factors: tuple[float, float] = NO_FACTORS,
    ) -> Tensor:
        """epilogue(x @ weight.T + bias + plus), [rows, outputs]; in float32 if `wide`.

        `bias` [outputs] is float32. `plus` [rows, outputs], float32, may be some columns of a larger matrix: the sums
        of LoRA adapters. `then` is one of EPILOGUES, `other` [rows, outputs] the operand of the last three, `factors`
        those of xielu and clip. With a gate and an up projection: epilogue(x @ gate.T + bias + plus), rounded, times
        x @ up.T + bias + plus, where bias and plus have the gate's outputs first and then the up projection's; `wide`
        is not supported.
        """
        x = x.contiguous()
        assert x.dtype is self.dtype
        rows, inputs = x.shape
        memory, outputs, _, form = weight
        y = torch.empty(rows, outputs, dtype=torch.float32 if wide else self.dtype)
        self._linear(
            x.data_ptr(), memory.data_ptr(), form, _address(bias), _address(plus), _address(other),
            None if wide else y.data_ptr(), y.data_ptr() if wide else None,
            rows, inputs, outputs, 0 if plus is None else plus.stride(0), then, *factors,
        )  # fmt: skip
        return y

    def gather_rows(self, weight: PackedWeight, ids: Tensor, first: int = 0) -> Tensor:
        """Embedding rows: the rows `ids` (int64 [n]) of a weight, whose first row has the id `first`: [n, inputs].
        Exactly as picked from the tensor that was packed, or from `dequantized` of a quantized weight, in the type of
        this library; zeros for an id that the weight does not have."""
        ids = ids.contiguous()
        y = torch.empty(len(ids), weight.inputs, dtype=self.dtype)
        self.row_gatherer(weight, ids, y, first)()
        return y

    def row_gatherer(self, weight: PackedWeight, ids: Tensor, y: Tensor, first: int = 0) -> Callable[[], None]:
        """A function that writes the rows whose numbers are in `ids` at the time of the call to `y` [n, inputs]. The
        caller keeps both tensors alive."""
        memory, outputs, inputs, form = weight
        addresses = memory.data_ptr(), form, ids.data_ptr(), y.data_ptr()
        return partial(self._gather_rows, *addresses, len(ids), inputs, outputs, first)

    def norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, centred: bool) -> Tensor:
        """RMS norm of x [rows, size] or [rows, parts, size] over its last dimension; layer norm if `centred`. `weight`
        and `bias` are float32, [size] or [parts, size]."""
        x = x.contiguous()
        y = torch.empty_like(x)
        parts = 1 if x.ndim == 2 else x.shape[1]
        self._norm(
            x.data_ptr(), weight.data_ptr(), _address(bias), y.data_ptr(), len(x), parts, x.shape[-1], centred, epsilon
        )
        return y

    def pack_heads(self, weights: Tensor) -> PackedHeads:
        """Packs weights [heads, outputs, inputs] for `head_products`."""
        return join_heads([self.pack_weight(weight.contiguous()) for weight in weights])

    def head_products(self, x: Tensor, weights: PackedHeads, kept: int, last: Tensor | None = None) -> Tensor:
        """The product of each head of x [rows, heads * (inputs + kept)] with its weight, followed by the last `kept`
        elements of the head: [rows, heads * (outputs + kept)]. `last` [rows, outputs + kept]: one more head of the
        result."""
        x = x.contiguous()
        (_, outputs, inputs, form), heads = weights.heads[0], len(weights.heads)
        width = (heads + (last is not None)) * (outputs + kept)
        y = torch.empty(len(x), width, dtype=self.dtype)
        if last is not None:
            last = last.contiguous()
        self._head_products(
            x.data_ptr(), _address(last), y.data_ptr(), weights.addresses.data_ptr(), heads, form, outputs, inputs,
            kept, len(x),
        )  # fmt: skip
        return y

    def apply_rope(
        self, x: Tensor, heads: int, angles: Tensor, positions: Tensor, neighbours: bool, start: int = 0
    ) -> None:
        """Applies rotary position embedding to the first `heads` heads of x [T, H, head_dim], in place. `angles` is a
        table of the cos and the sin of each position, float32 [.., 2, rotary_dim], `positions` int64 [T]. `neighbours`:
        pairs are elements 2 i and 2 i + 1, else i and i + rotary_dim / 2. The rotated elements begin at `start`."""
        tokens, all_heads, head_dim = x.shape
        self._rope(
            x.data_ptr() + start * x.itemsize, angles.data_ptr(), positions.data_ptr(), tokens, all_heads * head_dim,
            heads, head_dim, angles.shape[2], neighbours,
        )  # fmt: skip

    def greedy_tokens(self, logits: Tensor) -> GreedyTokens:
        """The greedy tokens of logits float32 [n, vocabulary]. NaN counts as minus infinity."""
        rows, size = logits.shape
        best, peaks = GreedyTokens.empty(rows), self.block_maxima_memory(rows, -(-size // PANEL))
        self._argmax(logits.data_ptr(), peaks.data_ptr(), *map(_address, best), rows, size)
        return best

    def logits(self, x: Tensor, weight: PackedWeight, bias: Tensor | None, scale: float, cap: float | None) -> Tensor:
        """Logits: cap * tanh(y / cap), or y without a cap, where y = scale * (x @ weight.T + bias): float32 [rows,
        outputs]. Their memory is reused by the next call once no tensor refers to it."""
        x = x.contiguous()
        rows, (memory, outputs, inputs, form) = len(x), weight
        y = self._logits_buffer.allocate(4 * rows * outputs).view(torch.float32).view(rows, outputs)
        self._logits(
            x.data_ptr(),
            memory.data_ptr(),
            form,
            _address(bias),
            scale,
            cap or 0.0,
            rows,
            inputs,
            outputs,
            y.data_ptr(),
        )
        return y

    def greedy_head(
        self,
        x: Tensor,
        weight: PackedWeight,
        bias: Tensor | None,
        scale: float,
        cap: float | None,
        shards: VocabularyShards = WHOLE_VOCABULARY,
    ) -> GreedyTokens:
        """`greedy_tokens` of these `logits`, those of all ranks, bit for bit, without storing the logits."""
        x = x.contiguous()
        rows, (memory, outputs, inputs, form) = len(x), weight
        best, peaks = GreedyTokens.empty(rows), self.block_maxima_memory(rows, shards.panels(outputs))
        self._greedy_head(
            x.data_ptr(), memory.data_ptr(), form, _address(bias), scale, cap or 0.0, rows, inputs, outputs,
            *shards.arguments, peaks.data_ptr(), *map(_address, best),
        )  # fmt: skip
        return best

    def block_maxima_memory(self, rows: int, panels: int) -> Tensor:
        """Scratch memory in which the greedy tokens of `rows` rows of `panels` panels of logits are found."""
        return self._block_maxima_buffer.allocate(self._block_maximum_bytes * rows * panels)

    def read_memory(self, memory: Tensor) -> int:
        """Reads a tensor of any dtype, of a multiple of 64 bytes, to measure the memory bandwidth. Returns the sum of
        its bytes, taken as int64 numbers."""
        total = torch.empty(1, dtype=torch.int64)
        self._read_memory(memory.data_ptr(), memory.nbytes, total.data_ptr())
        return int(total)

    def fma_peak(self, chunks: int) -> int:
        """Runs the multiply-adds of the engine of products in that many chunks, each some 20 microseconds of a thread,
        to measure their peak rate. Returns the number of operations, two for each multiply-add."""
        operations = torch.empty(1, dtype=torch.int64)
        self._fma_peak(chunks, operations.data_ptr())
        return int(operations)

    def lora(self, x: Tensor, plus: Tensor, tiles: LoraTiles, adapters: int, bounds: Tensor) -> None:
        """Writes the LoRA sums of projections of x [T, inputs] to the rows of plus (float32 [T, width]) whose token has
        an adapter. Projection p has the columns from bounds[p] on (int64 [parts + 1]). `adapters` is the address of an
        array with the address of each adapter's pairs (LoraPair in lora.h), in the order of LoraTiles.owners."""
        self._lora(
            x.data_ptr(), plus.data_ptr(), *(column.data_ptr() for column in tiles), adapters, bounds.data_ptr(),
            x.shape[1], plus.shape[1], len(tiles.owners), len(bounds) - 1,
        )  # fmt: skip

    def paged_attention(
        self,
        cache: KVCache,
        qkv: Tensor,
        rows: AttentionRows,
        scale: float,
        window: int | None,
        softcap: float | None,
        ahead: int = 0,
        sinks: Tensor | None = None,
        value_dim: int | None = None,
        shared_heads: int | None = None,
        chunked: bool = False,
        slopes: Tensor | None = None,
    ) -> Tensor:
        """Writes the keys and values of qkv [T, heads + 2 * kv_heads, head_dim] to `cache`, and returns the attention
        of its queries, [T, heads * head_dim]. A query sees `ahead` positions after its own; 0: causal attention.
        `sinks` float32 [heads] and `value_dim` are those of KVCacheSpec: with the latter, qkv has no values, and the
        result is [T, heads * value_dim]. With `shared_heads`, the number of query heads, qkv has queries alone: an
        earlier layer has written the keys and values. `chunked`: a query sees its own chunk of `window` positions.
        `slopes` float32 [heads] are those of ALiBi."""
        tokens, all_heads, head_dim = qkv.shape
        kv_heads = cache.memory.shape[1]
        heads = shared_heads or all_heads - (2 if value_dim is None else 1) * kv_heads
        y = torch.empty(tokens, heads * (value_dim or head_dim), dtype=self.dtype)
        self._attention(
            cache.memory.data_ptr(), cache.form, heads, kv_heads, head_dim, value_dim or 0, *rows, qkv.data_ptr(),
            y.data_ptr(), window or 0, scale, softcap or 0.0, ahead, _address(sinks), shared_heads is not None, chunked,
            _address(slopes),
        )  # fmt: skip
        return y

    def write_kv(self, cache: KVCache, pairs: Tensor, slots: Tensor) -> None:
        """Writes keys and values [n, 2 * kv_heads, head_dim] to the places `slots` int64 [n] (AttentionRows.slots)."""
        count, heads, head_dim = pairs.shape
        address = cache.memory.data_ptr()
        self._write_kv(address, cache.form, heads // 2, head_dim, slots.data_ptr(), count, pairs.data_ptr())

    def kv_form(self, dtype: torch.dtype) -> int:
        """The number in `enum class KvForm` of kv_cache.h of a cache of this type: that of the library, bfloat16 or
        int8."""
        return 0 if dtype is self.dtype else {torch.bfloat16: 1, torch.int8: 2}[dtype]
