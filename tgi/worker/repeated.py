"""Decode steps on CPU that have the rows of the step before, each a token further: they are not laid out anew.

While few requests run, nearly all steps are so. What the host does for a step is little, but the weights of a step
drive all else out of the core's caches, and then each kind of operation costs the host some 50 microseconds, be it on a
single number. So here are as few kinds as can be.
"""

import time
from typing import NamedTuple

import numpy as np
import torch

from tgi.kernel.messages import Result, Step
from tgi.worker.batch import Again, Attention, Batch, Model
from tgi.worker.best import Best
from tgi.worker.slots import Rows, Slots

# A streak goes on over so many more pages than its longest row has. Then its columns are made anew.
FURTHER_PAGES = 8


class Latest(NamedTuple):
    """A step that has been computed: each row had one token and has drawn the likeliest behind it."""

    step: Step
    rows: Rows
    batch: Batch
    best: Best


class Streak:
    """The steps that follow one of these rows. Their columns lie where those of `batch` lay, whose page table is wide
    enough for longer contexts. `settle` lets the slots know what they have come to."""

    def __init__(self, latest: Latest, slots: Slots, again: Again) -> None:
        step, rows, _, best = latest
        batch = again.batch
        self._slots = slots
        self._rows = rows
        self._again = again
        self._same = step.rows, step.counts, step.draws
        self._context, self._positions, self._cache_at, self._pages, self._tokens = (
            column.numpy()
            for column in (batch.context, batch.positions, batch.cache_at, batch.page_table, batch.tokens)
        )
        self._tokens[:] = best.ids.numpy()
        self._logprobs = again.best.logprobs.numpy()
        self._ids = again.best.ids.numpy()
        self._longest = int(rows.ends.max())
        self._most = min(batch.page_table.shape[1] * slots.page_size, slots.width - 1)
        self._in_page = self._until_a_page_ends()
        self._drawn: list[bytes] = []  # the ids of each step of which the slots do not know
        self._since = rows.ends + 1  # the contexts of the first of these

    def goes_on(self, step: Step) -> bool:
        """Whether this is the next one."""
        return (
            self._longest < self._most
            and (step.rows, step.counts, step.draws) == self._same
            and step.starts == self._context.tobytes()
            and not (step.slots or step.drafts)
        )

    def result(self, step: Step) -> Result:
        """Computes the next one. Raises BadStep if a page is missing."""
        began = time.monotonic()
        if self._in_page == 0 or step.page_slots:
            self._turn_pages(step)
        else:
            self._in_page -= 1
            self._context += 1
            self._positions += 1
            self._cache_at += 1
        self._longest += 1
        for call in self._again.calls:
            call()
        self._tokens[:] = self._ids
        ids = self._ids.astype(np.int32).tobytes()
        self._drawn.append(ids)
        forward_us = int((time.monotonic() - began) * 1e6)
        return Result(step.number, step.epoch, step.draws, ids, self._logprobs.tobytes(), forward_us)

    def settle(self) -> None:
        """Of all steps so far."""
        if count := len(self._drawn):
            drawn = np.frombuffer(b"".join(self._drawn), np.int32).reshape(count, -1)
            places = self._slots.ids_at(self._rows.slots, self._since + np.arange(count)[:, None])
            self._slots.ids.view(-1).numpy()[places] = drawn
            self._since = self._since + count
            self._slots.advance(self._rows._replace(ends=self._since - 1))
            self._drawn.clear()

    def _turn_pages(self, step: Step) -> None:
        """Some rows go on in another page."""
        self.settle()
        self._slots.apply(step)
        rows = self._slots.rows(step)
        self._context[:] = rows.ends
        self._positions[:] = rows.starts
        self._cache_at[:] = self._slots.cache_at(rows.slots, rows.starts)
        self._pages[:] = self._slots.page_table[rows.slots, : self._pages.shape[1]]
        self._in_page = self._until_a_page_ends()

    def _until_a_page_ends(self) -> int:
        """How many further tokens all rows have room for."""
        return int((-self._context % self._slots.page_size).min())


class Repeated:
    """Knows whether the next step of an engine goes on where the latest has ended."""

    def __init__(self, model: Model, attention: Attention, slots: Slots) -> None:
        self._model = model
        self._attention = attention
        self._slots = slots
        self._able = True  # the model is
        self._latest: Latest | None = None
        self._streak: Streak | None = None

    def forget(self) -> None:
        """What was computed matters no more."""
        self._latest = self._streak = None

    def result(self, step: Step) -> Result | None:
        """What the step draws, if it goes on. None: it is to be laid out. Then the slots know all that was drawn."""
        latest, self._latest = self._latest, None
        if latest is not None and step.rows == latest.step.rows and not (step.slots or step.drafts):
            again = self._model.again(self._wide(latest), self._attention)
            if again is None:
                self._able = False
            else:
                self._streak = Streak(latest, self._slots, again)
        streak, self._streak = self._streak, None
        if streak is None:
            return None
        try:
            if streak.goes_on(step):
                result = streak.result(step)
                self._streak = streak
                return result
        finally:
            if self._streak is None:
                streak.settle()
        return None

    def computed(self, step: Step, rows: Rows, batch: Batch, best: Best) -> None:
        """A step has been laid out and computed that wanted nothing but the likeliest tokens."""
        if not self._able or not rows.plain or batch.adapted:
            return
        if self._slots.faults.keys().isdisjoint(rows.slots.tolist()):
            self._latest = Latest(step, rows, batch, best)

    def _wide(self, latest: Latest) -> Batch:
        """The batch with room for further pages."""
        width = latest.batch.page_table.shape[1] + FURTHER_PAGES
        pages = self._slots.page_table[latest.rows.slots, :width]
        return latest.batch._replace(page_table=torch.from_numpy(pages))
