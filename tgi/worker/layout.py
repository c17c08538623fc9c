"""Lays a step's rows out as tensors: what a model computes, and what its rows draw from. Ids are read on the device."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tgi.worker.batch import Batch
from tgi.worker.lora.deltas import Span
from tgi.worker.masks import Masks
from tgi.worker.params import Draws
from tgi.worker.slots import Rows, Slots
from tgi.worker.staging import sent_together
from tgi.worker.watermark import Watermark

Ints = NDArray[np.int64]


class Layout:
    """The layouts of rows of these slots; `mark` is the watermark of those that ask for one."""

    def __init__(self, slots: Slots, mark: Watermark) -> None:
        self._state = slots
        self._mark = mark
        self._ids = slots.ids.view(-1)

    def batch(self, rows: Rows) -> Batch:
        """Lays the rows' tokens back to back."""
        state, size = self._state, self._state.page_size
        counts = rows.ends - rows.starts
        bounds = np.concatenate(([0], np.cumsum(counts)))
        positions = np.arange(bounds[-1]) + np.repeat(rows.starts - bounds[:-1], counts)
        slots = np.repeat(rows.slots, counts)
        page, offset = np.divmod(positions, size)
        longest = -(-int(rows.ends.max()) // size)
        table = state.page_table[rows.slots, :longest].astype(np.int64)
        ids_at, positions_at, cache_at, cu_query, context, pages, draw_at = self.to_device(
            slots * state.width + positions,
            positions,
            state.page_table[slots, page] * np.int64(size) + offset,
            bounds,
            rows.ends,
            table.ravel(),
            (bounds[1:] - rows.ends)[rows.drawing] + rows.position - 1,
        )
        return Batch(
            tokens=self._ids[ids_at].long(),
            positions=positions_at,
            cache_at=cache_at,
            cu_query=cu_query.int(),
            context=context.int(),
            page_table=pages.int().view(table.shape),
            draw_at=draw_at,
            query_lengths=counts.tolist(),
            context_lengths=rows.ends.tolist(),
            adapted=self._adapted(rows.slots, bounds) if state.adapters else (),
        )

    def _adapted(self, slots: Ints, bounds: Ints) -> list[Span]:
        """The tokens of the rows that have an adapter."""
        adapters = self._state.adapters
        spans = zip(slots.tolist(), *(part.tolist() for part in (bounds[:-1], bounds[1:])), strict=True)
        return [Span(adapters[slot], first, stop) for slot, first, stop in spans if slot in adapters]

    def draws(self, slots: Ints, position: Ints, masks: Masks | None) -> Draws:
        """How slots [E] draw the tokens of these positions, all ids before which are written."""

        def history(chosen: Ints, begins: Ints) -> Tensor:
            ends = position[chosen][:, None]
            places = begins[:, None] + np.arange((ends[:, 0] - begins).max())
            places = np.where(places < ends, places, 0)
            (at,) = self.to_device((places + slots[chosen][:, None] * self._state.width).ravel())
            return self._ids[at].long().view(places.shape)

        return Draws(self._state.params.take(slots), position, history, masks, self._mark)

    def read(self, slots: Ints, position: Ints) -> Tensor:
        """The ids at these positions, int64 on the device."""
        (at,) = self.to_device(slots * self._state.width + position)
        return self._ids[at].long()

    def write(self, slots: Ints, position: Ints, ids: Tensor) -> None:
        """Puts ids there."""
        (at,) = self.to_device(slots * self._state.width + position)
        self._ids[at] = ids.int()

    def to_device(self, *columns: Ints) -> list[Tensor]:
        """Host columns on the device."""
        return sent_together(columns, self._ids.device)
