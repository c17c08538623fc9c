"""Lays a step's rows out as tensors: what a model computes, and what its rows draw from. Ids are read on the device."""

from typing import Any

import numpy as np
import torch
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
        # The same memory where the device is the host: numpy moves a few numbers in a fraction of torch's time.
        self._here = self._ids.numpy() if self._ids.device.type == "cpu" else None

    def batch(self, rows: Rows) -> Batch:
        """Lays the rows' tokens back to back."""
        state, size = self._state, self._state.page_size
        counts = rows.ends - rows.starts
        bounds = np.zeros(len(counts) + 1, np.int64)
        counts.cumsum(out=bounds[1:])
        if bounds[-1] == len(counts):  # a token each
            slots, positions = rows.slots, rows.starts
        else:
            slots = np.repeat(rows.slots, counts)
            positions = np.arange(bounds[-1]) + np.repeat(rows.starts - bounds[:-1], counts)
        longest = -(-int(rows.ends.max()) // size)
        table = state.page_table[rows.slots, :longest]
        ids_at, positions_at, cache_at, cu_query, context, pages, draw_at = self.to_device(
            state.ids_at(slots, positions),
            positions,
            state.cache_at(slots, positions),
            bounds.astype(np.int32),
            rows.ends.astype(np.int32),
            table.ravel(),
            (bounds[1:] - rows.ends)[rows.drawing] + rows.position - 1,
        )
        return Batch(
            tokens=self.read(ids_at),
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
            (at,) = self.to_device(self._state.ids_at(slots[chosen][:, None], places).ravel())
            return self.read(at).view(places.shape)

        return Draws(self._state.params.take(slots), position, history, masks, self._mark)

    def places(self, slots: Ints, position: Ints) -> Tensor:
        """Where the ids of these positions stand, int64 on the device."""
        return self.to_device(self._state.ids_at(slots, position))[0]

    def read(self, places: Tensor) -> Tensor:
        """The ids there, int64."""
        if self._here is None:
            return self._ids[places].long()
        return torch.from_numpy(self._here[places.numpy()].astype(np.int64))

    def write(self, places: Tensor, ids: Tensor) -> None:
        """Puts ids there."""
        if self._here is None:
            self._ids[places] = ids.int()
        else:
            self._here[places.numpy()] = ids.numpy()

    def to_device(self, *columns: NDArray[Any]) -> list[Tensor]:
        """Host columns on the device."""
        return sent_together(columns, self._ids.device)
