"""The layers of a model as one call: operations that are written down once, at load, and replayed for each step.

Operations are those of kernels.py and compute the same bits. They find and leave rows in buffers, which are called by
their numbers. See native/program.h.
"""

import weakref
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from tgi.worker.best import Best
from tgi.worker.native.kernels import Kernels, Packed, Rows, Tiles

# Behind the program, which is the first argument of all.
_SIGNATURES = {
    "tgi_program_norm": (*[c_int64] * 3, c_void_p, c_void_p, *[c_int64] * 3, c_float),
    "tgi_program_linear": (*[c_int64] * 5, c_void_p, c_int64, c_void_p, *[c_int64] * 3),
    "tgi_program_lora": (c_int64, c_int64, c_int64),
    "tgi_program_turn": (*[c_int64] * 6,),
    "tgi_program_attend": (*[c_int64] * 7, c_float, c_float),
    "tgi_program_add": (c_int64, c_int64, c_float),
    "tgi_program_head": (
        *(c_int64, c_int64, c_void_p, c_void_p, c_int64, c_int64, c_float),
        *(c_void_p, c_int64, c_void_p, c_int64, c_float, c_float),
    ),
    "tgi_program_run": (*[c_void_p] * 10, c_int64, c_int64, c_void_p, c_void_p),
}
NOWHERE = -1


class Delta(NamedTuple):
    """Which of the columns that adapters add are added here."""

    place: int
    column: int = 0


class Adapted(NamedTuple):
    """What adapters add in a step: native/program.h's struct of this name."""

    fields: Tensor  # as int64 numbers
    kept: object  # what these are the addresses of


def adapted(tiles: Tiles, adapters: int, places: Sequence["tuple[Tensor, Tensor, Tensor] | None"]) -> Adapted:
    """From the tokens of so many adapters and, for each place that a program knows, where the adapters' pairs stand
    [layers, adapters], `bounds` and `plus` as Kernels.lora takes them; None where none adds anything."""
    fields = [*(column.data_ptr() for column in tiles), len(tiles.owners), adapters]
    for place in places:
        if place is None:
            fields += [0] * 5
            continue
        pairs, bounds, plus = place
        fields += [plus.data_ptr(), pairs.data_ptr(), bounds.data_ptr(), plus.shape[1], len(bounds) - 1]
    return Adapted(torch.tensor(fields), (tiles, places))


_Drawing = c_int64 * 6  # native/program.h's struct Drawing


class Ready(NamedTuple):
    """A step for a program, which may be run again when its columns have become those of another."""

    best: Best | None
    arguments: tuple[object, ...]
    kept: object  # what these are the addresses of


class Program:
    """Buffers of these widths, and what is done with them. Buffer 0 is the caller's, the others are scratch, which
    grows to the largest step. Weights that are written down have to stay where they are."""

    def __init__(self, kernels: Kernels, widths: Sequence[int]) -> None:
        library = kernels.library
        library.tgi_program.argtypes, library.tgi_program.restype = (c_void_p, c_int64), c_void_p
        library.tgi_program_end.argtypes, library.tgi_program_end.restype = (c_void_p,), None
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = (c_void_p, *arguments), None
        self._outputs = 0  # scores of a token
        self.operations: list[str] = []  # their names, in their order
        self.clock: Tensor | None = None  # float64 [operations]: runs add the seconds of each to it
        self._library = library
        self._team = kernels.team
        self._kernels = kernels  # keeps the team
        self._widths = list(widths)
        self._at = library.tgi_program((c_int64 * len(widths))(*widths), len(widths))
        weakref.finalize(self, library.tgi_program_end, self._at)

    def norm(
        self, x: int, y: int, start: int, weight: Tensor, bias: Tensor | None, epsilon: float, centred: bool
    ) -> None:
        """Kernels.norm of the numbers from `start` on of the rows of x, to the same place in y, which is as wide."""
        assert self._widths[x] == self._widths[y]
        parts = 1 if weight.ndim == 1 else len(weight)
        at = None if bias is None else bias.data_ptr()
        self._write("norm", x, y, start, weight.data_ptr(), at, parts, weight.shape[-1], centred, epsilon)

    def linear(
        self,
        x: int,
        y: int,
        weight: Packed,
        bias: Tensor | None = None,
        then: int = 0,
        other: int = 0,
        delta: Delta | None = None,
    ) -> None:
        """Kernels.linear; `other`, which may be y, is left alone unless `then` needs it."""
        memory, outputs, inputs, form = weight
        assert (self._widths[x], self._widths[y]) == (inputs, outputs)
        place, column = delta or (NOWHERE, 0)
        at = None if bias is None else bias.data_ptr()
        self._write("linear", x, other, y, place, column, memory.data_ptr(), form, at, inputs, outputs, then)

    def lora(self, x: int, place: int, layer: int) -> None:
        """Kernels.lora for one of the places of a step's Adapted."""
        self._write("lora", x, place, layer)

    def turn(self, x: int, rope: int, heads: int, head_dim: int, turned: int, neighbours: bool) -> None:
        """Kernels.turn, by one of the tables that a step brings."""
        self._write("turn", x, rope, heads, head_dim, turned, neighbours)

    def attend(
        self,
        qkv: int,
        y: int,
        layer: int,
        heads: tuple[int, int],
        head_dim: int,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> None:
        """Kernels.attend on the cache of a layer; `heads` are those of queries and of keys."""
        assert self._widths[y] == heads[0] * head_dim
        self._write("attend", qkv, y, layer, *heads, head_dim, window or 0, scale, softcap or 0.0)

    def add(self, x: int, y: int, scale: float) -> None:
        """y + scale * x to y, both rounded."""
        assert self._widths[x] == self._widths[y]
        self._write("add", x, y, scale)

    def head(
        self,
        x: int,
        y: int,
        norm: tuple[Tensor, Tensor | None, float, bool],
        weight: Packed,
        bias: Tensor | None,
        scale: float,
        cap: float | None,
    ) -> None:
        """Kernels.head of the tokens that `run` is to find the best for, normed as in Kernels.norm; y is scratch."""
        scales, shifts, epsilon, centred = norm
        memory, self._outputs, inputs, form = weight
        assert self._widths[x] == self._widths[y] == inputs
        addresses = [None if one is None else one.data_ptr() for one in (scales, shifts, memory, bias)]
        self._write(
            "head", x, y, *addresses[:2], inputs, centred, epsilon, addresses[2], form, addresses[3], self._outputs,
            scale, cap or 0.0,
        )  # fmt: skip

    def ready(
        self,
        rows: Tensor,
        positions: Tensor,
        angles: Sequence[tuple[Tensor, Tensor]],
        caches: Tensor,
        step: Rows,
        adapted: Adapted | None = None,
        draw_at: Tensor | None = None,
    ) -> Ready:
        """What `run` takes for these rows, buffer 0, which are computed in place, and, if draw_at (int64 [D] among the
        rows) is given, what `head` finds for those. `angles` are those of each rope (Rotary.angles);
        `caches` has their addresses, int64 [layers]."""
        assert rows.is_contiguous()
        best = peaks = drawing = None
        if draw_at is not None:
            best, peaks = Best.empty(len(draw_at)), self._kernels.peaks(len(draw_at), self._outputs)
            columns = (column.data_ptr() for column in (peaks, *best))
            drawing = _Drawing(draw_at.data_ptr(), len(draw_at), *columns)
        tables = (c_void_p * len(angles))(*(table.data_ptr() for table, _ in angles))
        arguments = (
            rows.data_ptr(), positions.data_ptr(), tables, caches.data_ptr(),
            None if adapted is None else adapted.fields.data_ptr(), *step, drawing,
        )  # fmt: skip
        return Ready(best, arguments, (rows, positions, angles, caches, adapted, draw_at, peaks))

    def run(self, ready: Ready) -> Best | None:
        """Replays the program on what stands there now. What it has found is written to the same memory each time."""
        clock = None if self.clock is None else self.clock.data_ptr()
        self._library.tgi_program_run(self._at, self._team, *ready.arguments, clock)
        return ready.best

    def _write(self, name: str, *arguments: object) -> None:
        self.operations.append(name)
        getattr(self._library, f"tgi_program_{name}")(self._at, *arguments)
