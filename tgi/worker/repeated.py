"""Decode steps on CPU that have the rows of the step before, each a token further: they are not laid out anew.

While few requests run, nearly all steps are so. What the host does for a step is little, but the weights of a step
drive all else out of the core's caches, and then each kind of operation costs the host some 50 microseconds, be it on a
single number. So here are as few kinds as can be.
"""

import time
from typing import NamedTuple

import numpy as np

from tgi.kernel.messages import Result, Step
from tgi.worker.batch import Again, Attention, Batch, Model
from tgi.worker.best import Best
from tgi.worker.slots import Rows, Slots


class Latest(NamedTuple):
    """A step that has been computed: each row had one token and has drawn the likeliest behind it."""

    step: Step
    rows: Rows
    batch: Batch
    best: Best


class Streak:
    """The steps that follow one of these rows. Their columns lie where those of the first lay."""

    def __init__(self, latest: Latest, slots: Slots, again: Again) -> None:
        step, rows, batch, best = latest
        self._slots = slots
        self._rows = rows
        self._again = again
        self._same = step.rows, step.counts, step.draws
        self._context, self._positions, self._cache_at, self._tokens = (
            column.numpy() for column in (batch.context, batch.positions, batch.cache_at, batch.tokens)
        )
        self._tokens[:] = best.ids.numpy()
        self._logprobs = again.best.logprobs.numpy()
        self._ids = again.best.ids.numpy()
        self._drawn: list[bytes] = []  # the ids of each step
        # Until a row comes to the end of its page, or of the longest request.
        self._left = min(int((-rows.ends % slots.page_size).min()), slots.width - 1 - int(rows.ends.max()))

    def goes_on(self, step: Step) -> bool:
        """Whether this is the next one."""
        return (
            self._left > 0
            and (step.rows, step.counts, step.draws) == self._same
            and step.starts == self._context.tobytes()
            and not _changes(step)
        )

    def result(self, step: Step) -> Result:
        """Computes the next one."""
        began = time.monotonic()
        self._left -= 1
        self._context += 1
        self._positions += 1
        self._cache_at += 1
        for call in self._again.calls:
            call()
        self._tokens[:] = self._ids
        ids = self._ids.astype(np.int32).tobytes()
        self._drawn.append(ids)
        forward_us = int((time.monotonic() - began) * 1e6)
        return Result(step.number, step.epoch, step.draws, ids, self._logprobs.tobytes(), forward_us)

    def end(self) -> None:
        """Lets the slots know what has been computed and drawn."""
        rows, count = self._rows, len(self._drawn)
        if count:
            drawn = np.frombuffer(b"".join(self._drawn), np.int32).reshape(count, -1)
            places = rows.slots * self._slots.width + rows.position + np.arange(1, count + 1)[:, None]
            self._slots.ids.view(-1).numpy()[places] = drawn
            self._slots.advance(rows._replace(ends=rows.ends + count))


class Repeated:
    """Knows whether the next step of an engine goes on where the latest has ended."""

    def __init__(self, model: Model, attention: Attention, slots: Slots) -> None:
        self._model = model
        self._attention = attention
        self._slots = slots
        self._latest: Latest | None = None
        self._streak: Streak | None = None

    def forget(self) -> None:
        """What was computed matters no more."""
        self._latest = self._streak = None

    def result(self, step: Step) -> Result | None:
        """What the step draws, if it goes on. None: it is to be laid out. Then the slots know all that was drawn."""
        latest, self._latest = self._latest, None
        if latest is not None and step.rows == latest.step.rows and not _changes(step):
            again = self._model.again(latest.batch, self._attention)
            self._streak = again and Streak(latest, self._slots, again)
        streak = self._streak
        if streak is None:
            return None
        if streak.goes_on(step):
            return streak.result(step)
        self._streak = None
        streak.end()
        return None

    def computed(self, step: Step, rows: Rows, batch: Batch, best: Best) -> None:
        """A step has been laid out and computed that wanted nothing but the likeliest tokens."""
        one_each = len(batch.tokens) == len(rows.slots) == len(rows.drawing)
        if one_each and rows.drafts is None and not batch.adapted and not self._slots.faults:
            self._latest = Latest(step, rows, batch, best)


def _changes(step: Step) -> bool:
    """Whether it has more to say than which rows to compute."""
    return bool(step.slots or step.page_slots or step.drafts)
