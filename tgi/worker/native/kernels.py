"""The compiled kernels as functions of tensors. All are bfloat16 and on CPU unless said otherwise, and, but for `x`,
dense.

A call computes on the calling thread and its helpers, and returns when it is done. Only one thread may call.
"""

import ctypes
import weakref
from collections.abc import Callable
from ctypes import c_float, c_int, c_int64, c_void_p
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tgi.worker.best import Best
from tgi.worker.native.arena import Arena, Scratch
from tgi.worker.native.build import Unavailable
from tgi.worker.quantization.codebook import TABLE
from tgi.worker.quantization.weight import GROUPS, Weight

PANEL = 32  # outputs are filled up to whole panels of this many
DEPTH = 32  # inputs must be a multiple of this
PAGE = 32  # positions of a page
WIDEST_HEAD = 256
MOST_ROWS = 32  # of a product
WHOLE = 1 << 17  # in a form: whole numbers
GATED = 1 << 18  # in a form: two weights
MOST_WHOLE = 1 << 16  # inputs of these: sums of products of bytes stay within int32
# So often a helper looks for the next job before it sleeps: some 50 microseconds.
SPINS = 1000

THEN = {name: number for number, name in enumerate(("none", "silu", "gelu", "gelu_tanh", "add", "mul"))}  # of linear.h

# Behind the team, which is the first argument of all.
_SIGNATURES = {
    "tgi_pack": (c_void_p, *[c_int64] * 3, c_void_p, c_int64),
    "tgi_pack_quantized": (*[c_void_p] * 3, *[c_int64] * 3, c_void_p, c_int64),
    "tgi_pack_whole": (*[c_void_p] * 4, *[c_int64] * 3, c_void_p, c_int64),
    "tgi_linear": (c_void_p, c_void_p, c_int64, *[c_void_p] * 5, *[c_int64] * 5),
    "tgi_rows": (c_void_p, c_int64, c_void_p, c_void_p, *[c_int64] * 3),
    "tgi_norm": (*[c_void_p] * 4, *[c_int64] * 4, c_float),
    "tgi_turn": (*[c_void_p] * 3, *[c_int64] * 6),
    "tgi_best": (*[c_void_p] * 5, c_int64, c_int64),
    "tgi_scores": (c_void_p, c_void_p, c_int64, c_void_p, c_float, c_float, *[c_int64] * 3, c_void_p),
    "tgi_head": (c_void_p, c_void_p, c_int64, c_void_p, c_float, c_float, *[c_int64] * 3, *[c_void_p] * 4),
    "tgi_read": (c_void_p, c_int64, c_void_p),
    "tgi_lora": (*[c_void_p] * 7, *[c_int64] * 4),
    "tgi_attend": (
        *(c_void_p, c_int64, c_int64, c_int64, *[c_void_p] * 4, c_int64, c_int64),
        *(c_void_p, c_void_p, c_int64, c_float, c_float),
    ),
}


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _columns(weight: Weight) -> tuple[Tensor | None, ...]:
    return (weight,) if isinstance(weight, Tensor) else tuple(weight)


def _form(weight: Weight) -> int:
    """Form of native/packed.h."""
    if isinstance(weight, Tensor):
        return 16
    if weight.whole:
        return weight.bits | WHOLE
    return weight.bits | weight.group << 8 | (weight.shifts is not None) << 16


def alike(one: Weight, other: Weight) -> bool:
    """Whether two weights can be packed as one."""
    return one.shape == other.shape and _form(one) == _form(other)


class Packed(NamedTuple):
    """A weight [outputs, inputs] as `linear` takes it, or two of this shape."""

    memory: Tensor  # uint8, all there is
    outputs: int
    inputs: int
    form: int  # Form of native/packed.h

    @property
    def shape(self) -> tuple[int, int, int]:
        """Outputs, inputs and form."""
        return self.outputs, self.inputs, self.form


class Rows(NamedTuple):
    """The rows of a step, by the addresses of their columns."""

    places: int  # int64 [T] where each token's key and value go: page * PAGE + offset
    bounds: int  # int32 [R + 1] row r has tokens bounds[r] to bounds[r + 1],
    contexts: int  # int32 [R] sees so many positions,
    pages: int  # int32 [R, width] in these pages
    rows: int
    width: int


class Tiles(NamedTuple):
    """The tokens of a step that have an adapter, in groups of up to MOST_ROWS, all int64."""

    tokens: Tensor  # [S] sorted by adapter
    bounds: Tensor  # [tiles + 1] tile t has tokens[bounds[t]] to tokens[bounds[t + 1] - 1]
    owners: Tensor  # [tiles] whose these are


class Kernels:
    """A loaded library. Raises Unavailable if it cannot be used."""

    def __init__(self, path: Path, threads: int) -> None:
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise Unavailable(f"{path} cannot be loaded: {error}") from error
        library.tgi_start.argtypes, library.tgi_start.restype = (c_int, c_int), c_void_p
        library.tgi_stop.argtypes, library.tgi_stop.restype = (c_void_p,), None
        library.tgi_peak_bytes.argtypes, library.tgi_peak_bytes.restype = (), c_int64
        library.tgi_packed_bytes.argtypes, library.tgi_packed_bytes.restype = (c_int64,) * 3, c_int64
        team = library.tgi_start(threads, SPINS)
        if team is None:
            raise Unavailable("the system does not let this process use AMX")
        weakref.finalize(self, library.tgi_stop, team)
        self.library, self.team, self.threads = library, team, threads
        functions = []
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = (c_void_p, *arguments), None
            functions.append(partial(function, team))
        self._arena = Arena()
        self._pack, self._pack_quantized, self._pack_whole, self._linear, self._rows, self._norm, *others = functions
        self._turn, self._best, self._scores, self._head, self._read, self._lora, self._attend = others
        self._kept_scores, self._peaks = Scratch(), Scratch()
        self._peak_bytes = library.tgi_peak_bytes()  # for each panel of a row

    def pack(self, *weights: Weight) -> Packed:
        """A weight [outputs, inputs] as `linear` takes it; or two `alike`: a gate, and the weight whose products are
        multiplied by what the gate leaves. `inputs` is a multiple of DEPTH. Codes stay what they are.

        With several scales for an output, or shifts, `linear` computes as with `weight.dequantized(torch.bfloat16)`, to
        the bit. With one scale it multiplies whole numbers, of 16 bits for each activation, which is off by up to half
        a unit: by 1 / 65,534 of the largest of its row.
        """
        (outputs, inputs), form = weights[0].shape, _form(weights[0])
        assert inputs % DEPTH == 0
        packed = self._room(outputs, inputs, form | GATED if len(weights) > 1 else form)
        for which, weight in enumerate(weights):
            assert alike(weight, weights[0])
            columns = [None if one is None else one.contiguous() for one in _columns(weight)]  # by name: they must stay
            to = *packed.shape, packed.memory.data_ptr(), which
            if isinstance(weight, Tensor):
                self._pack(*map(_at, columns), *to)
            elif weight.whole:
                assert inputs <= MOST_WHOLE
                codes, scales, _, factors = columns
                self._pack_whole(*map(_at, (codes, scales, factors, TABLE if weight.bits == 4 else None)), *to)
            else:
                assert weight.group in GROUPS
                assert weight.factors is None
                assert not weight.floating
                self._pack_quantized(*map(_at, columns[:3]), *to)
        return packed

    def _room(self, outputs: int, inputs: int, form: int) -> Packed:
        """A weight that is still to be packed."""
        return Packed(self._arena.take(self.library.tgi_packed_bytes(outputs, inputs, form)), outputs, inputs, form)

    def linear(
        self,
        x: Tensor,
        weight: Packed,
        bias: Tensor | None = None,
        then: int = 0,
        other: Tensor | None = None,
        plus: Tensor | None = None,
        wide: bool = False,
    ) -> Tensor:
        """then(x @ weight.T + bias + plus), [rows, outputs]; in float32 if `wide`.

        `bias` [outputs] and `plus` [rows, outputs], some columns of a dense matrix, are float32, `then` is one of
        THEN, `other` what it adds or multiplies with. Of a gate and another weight: the same of the gate, rounded,
        times x @ other.T + bias + plus, where bias and plus have the outputs of both, and nothing is `wide`.
        """
        x = x.contiguous()
        rows, inputs = x.shape
        memory, outputs, _, form = weight
        y = torch.empty(rows, outputs, dtype=torch.float32 if wide else torch.bfloat16)
        self._linear(
            x.data_ptr(), memory.data_ptr(), form, _at(bias), _at(plus), _at(other), None if wide else y.data_ptr(),
            y.data_ptr() if wide else None, rows, inputs, outputs, 0 if plus is None else plus.stride(0), then,
        )  # fmt: skip
        return y

    def rows(self, weight: Packed, ids: Tensor) -> Tensor:
        """The rows of a weight that have these numbers, int64 [n] and all below its outputs: [n, inputs]. As if picked
        from the tensor that was packed, or from `dequantized(torch.bfloat16)` of the codes."""
        ids = ids.contiguous()
        y = torch.empty(len(ids), weight.inputs, dtype=torch.bfloat16)
        self.rows_into(weight, ids, y)()
        return y

    def rows_into(self, weight: Packed, ids: Tensor, y: Tensor) -> Callable[[], None]:
        """What leaves these rows in `y`, which is dense, for whatever is in `ids` then. Both must stay."""
        memory, outputs, inputs, form = weight
        addresses = memory.data_ptr(), form, ids.data_ptr(), y.data_ptr()
        return partial(self._rows, *addresses, len(ids), inputs, outputs)

    def norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, centred: bool) -> Tensor:
        """The norm of x [rows, size] or [rows, parts, size] over its last dimension. `weight` and `bias` are float32,
        [size] or [parts, size]."""
        x = x.contiguous()
        y = torch.empty_like(x)
        parts = 1 if x.ndim == 2 else x.shape[1]
        self._norm(
            x.data_ptr(), weight.data_ptr(), _at(bias), y.data_ptr(), len(x), parts, x.shape[-1], centred, epsilon
        )
        return y

    def turn(self, x: Tensor, heads: int, angles: Tensor, positions: Tensor, neighbours: bool) -> None:
        """Turns the first `heads` heads of x [T, H, head_dim] in place. `angles` is a table of each position's cos and
        sin, float32 [.., 2, turned], positions int64 [T]."""
        tokens, all_heads, head_dim = x.shape
        self._turn(
            x.data_ptr(), angles.data_ptr(), positions.data_ptr(), tokens, all_heads * head_dim, heads, head_dim,
            angles.shape[2], neighbours,
        )  # fmt: skip

    def best(self, scores: Tensor) -> Best:
        """The best of scores float32 [n, size]. NaN counts as minus infinity."""
        rows, size = scores.shape
        best, peaks = Best.empty(rows), self.peaks(rows, size)
        self._best(scores.data_ptr(), peaks.data_ptr(), *map(_at, best), rows, size)
        return best

    def scores(self, x: Tensor, weight: Packed, bias: Tensor | None, scale: float, cap: float | None) -> Tensor:
        """cap * tanh(y / cap), or y without a cap, where y = scale * (x @ weight.T + bias): float32 [rows, outputs]."""
        x = x.contiguous()
        rows, (memory, outputs, inputs, form) = len(x), weight
        y = self._kept_scores.take(4 * rows * outputs).view(torch.float32).view(rows, outputs)
        self._scores(
            x.data_ptr(), memory.data_ptr(), form, _at(bias), scale, cap or 0.0, rows, inputs, outputs, y.data_ptr()
        )
        return y

    def head(self, x: Tensor, weight: Packed, bias: Tensor | None, scale: float, cap: float | None) -> Best:
        """`best` of these scores, to the bit. They are not written down."""
        x = x.contiguous()
        rows, (memory, outputs, inputs, form) = len(x), weight
        best, peaks = Best.empty(rows), self.peaks(rows, outputs)
        self._head(
            x.data_ptr(), memory.data_ptr(), form, _at(bias), scale, cap or 0.0, rows, inputs, outputs,
            peaks.data_ptr(), *map(_at, best),
        )  # fmt: skip
        return best

    def peaks(self, rows: int, size: int) -> Tensor:
        """Room in which the best of so many rows of so many scores is found."""
        return self._peaks.take(self._peak_bytes * rows * -(-size // PANEL))

    def read(self, memory: Tensor) -> int:
        """Reads memory of any dtype, a multiple of 64 bytes, as fast as it goes, to know how fast that is. Returns the
        sum of its bytes as int64 numbers."""
        total = torch.empty(1, dtype=torch.int64)
        self._read(memory.data_ptr(), memory.nbytes, total.data_ptr())
        return int(total)

    def lora(self, x: Tensor, plus: Tensor, tiles: Tiles, adapters: int, bounds: Tensor) -> None:
        """Writes what adapters add to the projections of x [T, inputs] to the rows of plus (float32 [T, width]) that
        have one. The results of projection p go from column bounds[p] on (int64 [parts + 1]). `adapters` is where the
        addresses of the adapters' pairs stand (native/lora.h), in the order of Tiles.owners."""
        self._lora(
            x.data_ptr(), plus.data_ptr(), *(column.data_ptr() for column in tiles), adapters, bounds.data_ptr(),
            x.shape[1], plus.shape[1], len(tiles.owners), len(bounds) - 1,
        )  # fmt: skip

    def attend(
        self, cache: Tensor, qkv: Tensor, rows: Rows, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """Writes the keys and values of qkv [T, heads + 2 * kv_heads, head_dim] to `cache` [pages, kv_heads, 2 * PAGE *
        head_dim], and returns what its queries find there, [T, heads * head_dim]."""
        tokens, all_heads, head_dim = qkv.shape
        kv_heads = cache.shape[1]
        heads = all_heads - 2 * kv_heads
        y = torch.empty(tokens, heads * head_dim, dtype=torch.bfloat16)
        self._attend(
            cache.data_ptr(), heads, kv_heads, head_dim, *rows, qkv.data_ptr(), y.data_ptr(), window or 0, scale,
            softcap or 0.0,
        )  # fmt: skip
        return y
