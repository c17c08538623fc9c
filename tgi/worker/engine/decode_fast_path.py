"""Decode fast path: decode steps on CPU that continue the previous step without building a batch.

While few requests run, nearly all steps have the rows of the previous step, each one token further. The host does
little work in a step, but reading the weights evicts everything else from the core's caches, and then each kind of
torch or numpy operation costs the host about 50 microseconds, even on a single number. So this path uses as few kinds
of operation as possible: it adds 1 to the columns of the prepared batch in place.
"""

import time
from typing import NamedTuple

import numpy as np
import torch

from tgi.microkernel.messages.protocol import Step, StepResult
from tgi.worker.attention.interface import AttentionBackend, ForwardBatch
from tgi.worker.engine.input_batch import Slots, StepRows
from tgi.worker.greedy import GreedyTokens
from tgi.worker.models.interface import Model, PreparedDecode

# Page table entries beyond those of the longest row. When they are used up, the columns are prepared again.
SPARE_PAGES = 8


class GreedyStep(NamedTuple):
    """A computed step in which each row computed one token and took the greedy one."""

    step: Step
    rows: StepRows
    batch: ForwardBatch
    greedy: GreedyTokens


class DecodeStreak:
    """Consecutive decode steps of the same rows, computed by a model's PreparedDecode.

    The columns of its batch are updated in place. `Slots` lags behind: `commit` writes to it what the steps since the
    last commit have sampled.
    """

    def __init__(self, previous: GreedyStep, slots: Slots, prepared: PreparedDecode) -> None:
        step, rows, _, greedy = previous
        batch = prepared.batch
        self._slots = slots
        self._rows = rows
        self._prepared = prepared
        self._row_columns = step.rows, step.counts, step.samples
        self._context_lens, self._positions, self._slot_mapping, self._page_table, self._tokens = (
            column.numpy()
            for column in (batch.context_lens, batch.positions, batch.slot_mapping, batch.page_table, batch.tokens)
        )
        # Of rows whose rotary positions are others than their positions, by as much in each step.
        self._turns = None if batch.rope_positions is None else batch.rope_positions.numpy()
        self._turned_by = 0 if self._turns is None else self._turns - self._positions
        self._tokens[:] = greedy.ids.numpy()
        self._logprobs = prepared.greedy.logprobs.numpy()
        self._ids = prepared.greedy.ids.numpy()
        self._longest = int(rows.ends.max())
        self._max_context = min(batch.page_table.shape[-1] * slots.page_size, slots.width - 1)
        self._steps_in_page = self._count_steps_in_page()
        self._uncommitted: list[bytes] = []  # the int32 ids of each step since the last commit
        self._uncommitted_from = rows.ends + 1  # the context lengths after the first of these

    def continues(self, step: Step) -> bool:
        """Whether the step has these rows, each one token further, and the prepared columns have room for it."""
        return (
            self._longest < self._max_context
            and (step.rows, step.counts, step.samples) == self._row_columns
            and step.starts == self._context_lens.tobytes()
            and not (step.slots or step.drafts or step.tower)
        )

    def run_step(self, step: Step) -> StepResult:
        """Computes a step that `continues` accepted. Raises BadStep if a page is missing."""
        began = time.monotonic()
        if self._steps_in_page == 0 or step.page_tables:
            self._update_pages(step)
        else:
            self._steps_in_page -= 1
            self._context_lens += 1
            self._positions += 1
            if self._turns is not None:
                self._turns += 1
            self._slot_mapping += 1
        self._longest += 1
        for call in self._prepared.calls:
            call()
        self._tokens[:] = self._ids
        ids = self._ids.astype(np.int32).tobytes()
        self._uncommitted.append(ids)
        forward_us = int((time.monotonic() - began) * 1e6)
        return StepResult(step.number, step.epoch, step.samples, ids, self._logprobs.tobytes(), forward_us)

    def commit(self) -> None:
        """Writes the ids and lengths of all steps so far to the slots."""
        if count := len(self._uncommitted):
            ids = np.frombuffer(b"".join(self._uncommitted), np.int32).reshape(count, -1)
            indices = self._slots.id_indices(self._rows.slots, self._uncommitted_from + np.arange(count)[:, None])
            self._slots.ids.view(-1).numpy()[indices] = ids
            self._uncommitted_from = self._uncommitted_from + count
            self._slots.commit_rows(self._rows._replace(ends=self._uncommitted_from - 1))
            self._uncommitted.clear()

    def _update_pages(self, step: Step) -> None:
        """Sets the columns for a step in which some rows begin a page or get one."""
        self.commit()
        self._slots.apply_step(step)
        rows = self._slots.validate_rows(step)
        self._context_lens[:] = rows.ends
        self._positions[:] = rows.starts
        if self._turns is not None:
            self._turns[:] = rows.starts + self._turned_by
        self._slot_mapping[:] = self._slots.slot_mapping(rows.slots, rows.starts)
        self._page_table[:] = self._slots.select_tables(rows.slots, self._page_table.shape[-1])
        self._steps_in_page = self._count_steps_in_page()

    def _count_steps_in_page(self) -> int:
        """The number of steps for which all rows have room in their last page."""
        return int((-self._context_lens % self._slots.page_size).min())


class DecodeFastPath:
    """Runs the steps of an engine that continue its previous step."""

    def __init__(self, model: Model, attention: AttentionBackend, slots: Slots) -> None:
        self._model = model
        self._attention = attention
        self._slots = slots
        self._supported = True  # by the model
        self._previous: GreedyStep | None = None
        self._streak: DecodeStreak | None = None

    def reset(self) -> None:
        """Drops the previous step and what is not committed of it."""
        self._previous = self._streak = None

    def commit(self) -> None:
        """Writes all ids sampled so far to the slots, and drops the previous step."""
        if self._streak is not None:
            self._streak.commit()
        self.reset()

    def try_step(self, step: Step) -> StepResult | None:
        """The result of the step if it continues the previous one. None: it needs a batch; then all ids sampled so far
        are committed to the slots."""
        previous, self._previous = self._previous, None
        if previous is not None and step.rows == previous.step.rows and not (step.slots or step.drafts or step.tower):
            prepared = self._model.prepare_decode(self._add_spare_pages(previous), self._attention)
            if prepared is None:
                self._supported = False
            else:
                self._streak = DecodeStreak(previous, self._slots, prepared)
        streak, self._streak = self._streak, None
        if streak is None:
            return None
        try:
            if streak.continues(step):
                result = streak.run_step(step)
                self._streak = streak
                return result
        finally:
            if self._streak is None:
                streak.commit()
        return None

    def remember_greedy_step(self, step: Step, rows: StepRows, batch: ForwardBatch, greedy: GreedyTokens) -> None:
        """Remembers a step that was computed from a batch and needed only the greedy tokens."""
        if not self._supported or not rows.plain_decode or batch.lora_spans:
            return
        if batch.rope_positions is not None and batch.rope_positions.ndim > 1:
            return  # of a token of an image: the next token's positions are others than one later
        if self._slots.faults.keys().isdisjoint(rows.slots.tolist()):
            self._previous = GreedyStep(step, rows, batch, greedy)

    def _add_spare_pages(self, previous: GreedyStep) -> ForwardBatch:
        """The batch with room for further pages in its page table."""
        width = previous.batch.page_table.shape[-1] + SPARE_PAGES
        pages = self._slots.select_tables(previous.rows.slots, width)
        return previous.batch._replace(page_table=torch.from_numpy(pages))
