"""Decode steps on a GPU as recordings: hundreds of kernels that the host starts with one call.

A step whose rows have one token each is padded to the next size for which there is a recording. All that a recording
reads lies where it lay when it was made: each row's slot and position, which are written before it is played, the ids
and the page tables of all slots, the weights and the cache. It leaves the logits in one place too. Work on a stream is
done in order, so a step may be sent before the one before it is over.

Rows that fill a step up are of a slot that nobody occupies. They compute the token 0 at position 0 over and over, and
keep it on a page that is nobody's.
"""

import logging
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from tgi.kernel.errors import UserError
from tgi.worker.batch import Batch, Model, Recordable
from tgi.worker.slots import Rows, Slots
from tgi.worker.staging import staged

log = logging.getLogger(__name__)

Play = Callable[[], None]
# Logits of a recording and of what it records may differ by so much of the largest. They should not at all.
TOLERANCE = 0.05


class Recorder(Protocol):
    """Makes recordings."""

    def record(self, run: Play) -> Play:
        """What does again, on the same memory, all that `run` does on the device. `run` has run before."""


class CudaGraphs:
    """Records CUDA graphs. They share the memory that is needed only while one is played: none is played beside
    another. Whoever records the largest first needs no more than that one."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Play) -> Play:
        """See Recorder."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        return graph.replay


class Take(NamedTuple):
    """One recording: of `rows` rows with contexts of up to `bound` tokens."""

    rows: int
    bound: int
    where: Tensor  # int64 [2, rows]: slots and positions, read when it is played
    play: Play


def sizes(asked: tuple[int, ...], most: int) -> list[int]:
    """The numbers of rows that steps are padded to, ascending; none if 0 is asked for, which stands alone.

    By default powers of two up to the `most` rows of a step. Reading the weights takes most of a decode step's time up
    to some hundred rows, so rows too many cost little, and each recording costs time at start and memory.
    """
    if 0 in asked:
        return []
    if asked:
        return sorted({rows for rows in asked if rows <= most})
    return [*(1 << power for power in range(most.bit_length()) if 1 << power < most), most]


class Recorded:
    """The recordings of one engine. `longest` is the most tokens that a request may have."""

    def __init__(
        self, model: Model, attention: Recordable, slots: Slots, rows: list[int], longest: int, recorder: Recorder
    ) -> None:
        self._model = model
        self._attention = attention
        self._slots = slots
        self._longest = longest
        self._recorder = recorder
        self._table = slots.mirror(attention.spare)
        self._shapes = [(size, bound) for size in rows for bound in attention.bounds(size, longest)]
        self._logits = torch.empty(0, model.vocab_size, device=model.device)
        self._takes: list[Take] = []  # ascending: the first that is large enough is the one to play

    def __len__(self) -> int:
        """How many recordings there can be."""
        return len(self._shapes)

    @torch.inference_mode()
    def record(self, most: int | None = None) -> None:
        """Makes the recordings, the largest first; or of these the first so many. Raises UserError where one cannot be
        made, or does not give what a plain step gives."""
        began, rows = time.monotonic(), max((size for size, _ in self._shapes), default=0)
        self._logits = torch.zeros(rows, self._model.vocab_size, device=self._model.device)
        self._takes = []
        for size, bound in sorted(self._shapes, reverse=True)[:most]:
            self._takes.insert(0, self._take(size, bound))
        log.debug(
            "recorded %d decode steps of %s rows in %.1f s",
            len(self._takes),
            ", ".join(map(str, sorted({take.rows for take in self._takes}))) or "no",
            time.monotonic() - began,
        )

    def logits(self, rows: Rows) -> Tensor | None:
        """The logits float32 [R, vocab] of these rows, none of which has a reader, good until the next step. None if
        there is no recording for them, and they must be computed plainly."""
        take = self._fitting(rows)
        if take is None:
            return None
        count = len(rows.slots)
        where = np.zeros((2, take.rows), np.int64)
        where[0] = self._slots.spare
        where[:, :count] = rows.slots, rows.starts
        take.where.copy_(staged(where, take.where.device), non_blocking=True)
        take.play()
        return self._logits[:count]

    def _fitting(self, rows: Rows) -> Take | None:
        """The one place that says which steps are played: those in which every row computes one token and draws once,
        none has an adapter, and a recording is large enough."""
        adapters = self._slots.adapters
        if not rows.plain or (adapters and not adapters.keys().isdisjoint(rows.slots.tolist())):
            return None
        count, longest = len(rows.slots), int(rows.ends.max())
        return next((take for take in self._takes if take.rows >= count and take.bound >= longest), None)

    def _take(self, rows: int, bound: int) -> Take:
        where = torch.zeros(2, rows, dtype=torch.int64, device=self._table.device)
        where[0] = self._slots.spare

        def run() -> None:
            self._logits[:rows] = self._model.forward(self._batch(where, bound), self._attention)

        run()  # loads, chooses and makes whatever the first time needs
        expected = self._logits[:rows].clone()
        self._logits.zero_()
        try:
            take = Take(rows, bound, where, self._recorder.record(run))
            take.play()
            self._check(rows, expected)
        except RuntimeError as error:
            reason = error.__context__ or error  # what went wrong first; then the recording could not be ended either
            raise UserError(
                f"A decode step of {rows} rows cannot be made a CUDA graph: {reason}. Start with --cuda-graphs 0."
            ) from error
        return take

    def _check(self, rows: int, expected: Tensor) -> None:
        """Raises UserError unless logits [rows, vocab] are what is expected."""
        wrong, largest = float((self._logits[:rows] - expected).abs().max()), float(expected.abs().max())
        if not wrong <= TOLERANCE * largest:
            raise UserError(
                f"A recorded decode step of {rows} rows differs from a plain one by {wrong:.3g} in a logit, where the "
                f"largest is {largest:.3g} and {TOLERANCE} of it are expected at most. Start with --cuda-graphs 0."
            )

    def _batch(self, where: Tensor, bound: int) -> Batch:
        """Computed on the device alone, out of slots and positions. The model hears of the longest request, so that
        whatever it makes as far as contexts go (rotary angles) is whole before anything is recorded that reads it."""
        slots, positions = where
        rows, size, device = where.shape[1], self._slots.page_size, where.device
        table = self._table[:, : -(-bound // size)].index_select(0, slots)
        pages = table.gather(1, (positions // size)[:, None])[:, 0]
        return Batch(
            tokens=self._slots.ids.view(-1).index_select(0, self._slots.ids_at(slots, positions)).long(),
            positions=positions,
            cache_at=pages.long() * size + positions % size,
            cu_query=torch.arange(rows + 1, dtype=torch.int32, device=device),
            context=(positions + 1).int(),
            page_table=table,
            draw_at=torch.arange(rows, device=device),
            query_lengths=[1] * rows,
            context_lengths=[self._longest] * rows,
            recorded=True,
        )
