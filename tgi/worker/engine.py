"""Runs steps on a model: builds the batch, computes, samples, and brings what was drawn back to the host."""

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from llguidance import LLTokenizer
from numpy.typing import NDArray
from torch import Tensor

from tgi.kernel.messages import Limits, Result, Step
from tgi.worker.batch import Attention, Batch, Model
from tgi.worker.grammar import Grammars
from tgi.worker.loop import Poisoned
from tgi.worker.lora.deltas import Span
from tgi.worker.lora.shelf import Shelf
from tgi.worker.masks import Masks
from tgi.worker.noise import Noise
from tgi.worker.params import Draws
from tgi.worker.prompts import PromptReader, Told, prompt_columns, wanted
from tgi.worker.sampling import Drawn, sample
from tgi.worker.slots import Rows, Slots
from tgi.worker.tops import Tops, columns


class Pending(NamedTuple):
    """A launched step. On CUDA the host copies are there once `end` has happened."""

    number: int
    epoch: int
    drawn: Drawn  # on the host
    told: Told | None  # of prompts, on the host
    faults: list[str]  # as in Result
    forward_us: int  # on CPU; on CUDA the events tell
    begin: torch.cuda.Event | None
    end: torch.cuda.Event | None


class TorchEngine:
    """A model with its KV cache and slots. Steps are launched in order; on CPU launching computes.

    `tokens` makes the table that grammars need, when the first one comes.
    """

    def __init__(
        self, model: Model, attention: Attention, limits: Limits, tokens: Callable[[], LLTokenizer] | None = None
    ) -> None:
        self.limits = limits
        self.adapters = Shelf(lambda directory: model.adapter(directory))
        self._model = model
        self._attention = attention
        self._device = model.device
        self._cuda = model.device.type == "cuda"
        self._noise = Noise(model.vocab_size, model.device)
        self._grammars = Grammars(tokens or _no_tokens)
        self._slots = Slots(
            limits.max_batch_size,
            limits.max_total_tokens,
            limits.pages,
            attention.page_size,
            model.vocab_size,
            model.device,
            self._grammars,
            self.adapters,
        )

    def reset(self) -> None:
        """Forgets all requests."""
        self._slots.reset()

    def launch(self, step: Step) -> Pending:
        """Starts a step. Raises BadStep where it does not fit, and Poisoned where the device is lost.

        After any other error the rows of this step count as not computed, and those of other slots go on.
        """
        began = time.monotonic()
        try:
            with torch.inference_mode():
                return self._launch(step, began)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            raise
        except torch.AcceleratorError as error:
            raise Poisoned(str(error)) from error

    def done(self, pending: Pending) -> bool:
        """Whether the step's result is on the host."""
        return pending.end is None or pending.end.query()

    def collect(self, pending: Pending) -> Result:
        """Waits for the step and packs what it drew."""
        forward_us = pending.forward_us
        if pending.begin is not None and pending.end is not None:
            try:
                pending.end.synchronize()
            except torch.AcceleratorError as error:
                raise Poisoned(str(error)) from error
            forward_us = int(pending.begin.elapsed_time(pending.end) * 1000)
        ids = pending.drawn.ids.numpy().astype(np.int32)
        top_counts, top_ids, top_logprobs = columns(pending.drawn.tops, len(ids))
        prompt_logprobs, prompt_top_ids, prompt_top_logprobs = prompt_columns(pending.told)
        return Result(
            pending.number,
            pending.epoch,
            b"\x01" * len(ids),
            ids.tobytes(),
            pending.drawn.logprobs.numpy().tobytes(),
            forward_us,
            top_counts=top_counts,
            top_ids=top_ids,
            top_logprobs=top_logprobs,
            prompt_logprobs=prompt_logprobs,
            prompt_top_ids=prompt_top_ids,
            prompt_top_logprobs=prompt_top_logprobs,
            faults=pending.faults,
        )

    def _launch(self, step: Step, began: float) -> Pending:
        self._slots.apply(step)
        rows = self._slots.rows(step)
        begin = end = None
        if self._cuda:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
        batch = self._batch(rows)
        reader = self._reader(rows)
        logits = self._model.forward(batch, self._attention, reader)
        slots = rows.slots[rows.drawing]
        masks = self._grammars.masks(slots)
        drawn = self._draw(rows, logits, masks)
        told = None if reader is None else reader.told()
        self._slots.advance(rows)
        if end is not None:
            drawn = _drawn_to_host(drawn)
            told = told and Told(_to_host(told.logprobs), told.top_n, *map(_to_host, told[2:]))
            end.record()
        if masks is not None:
            self._grammars.drawn(slots, masks, drawn.ids, end)
        forward_us = int((time.monotonic() - began) * 1e6)
        faults = self._faults(slots, masks)
        return Pending(step.number, step.epoch, drawn, told, faults, forward_us, begin, end)

    def _batch(self, rows: Rows) -> Batch:
        """Lays the rows' tokens back to back."""
        state, size = self._slots, self._slots.page_size
        counts = rows.ends - rows.starts
        bounds = np.concatenate(([0], np.cumsum(counts)))
        positions = np.arange(bounds[-1]) + np.repeat(rows.starts - bounds[:-1], counts)
        slots = np.repeat(rows.slots, counts)
        page, offset = np.divmod(positions, size)
        longest = -(-int(rows.ends.max()) // size)
        table = state.page_table[rows.slots, :longest].astype(np.int64)
        ids_at, positions_at, cache_at, cu_query, context, pages, draw_at = self._to_device(
            slots * state.width + positions,
            positions,
            state.page_table[slots, page] * np.int64(size) + offset,
            bounds,
            rows.ends,
            table.ravel(),
            bounds[1:][rows.drawing] - 1,
        )
        return Batch(
            tokens=state.ids.view(-1)[ids_at].long(),
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

    def _adapted(self, slots: NDArray[np.int64], bounds: NDArray[np.int64]) -> list[Span]:
        """The tokens of the rows that have an adapter."""
        adapters = self._slots.adapters
        spans = zip(slots.tolist(), *(part.tolist() for part in (bounds[:-1], bounds[1:])), strict=True)
        return [Span(adapters[slot], first, stop) for slot, first, stop in spans if slot in adapters]

    def _faults(self, slots: NDArray[np.int64], masks: Masks | None) -> list[str]:
        """Why these drawing rows cannot draw, as in Result."""
        faults = masks.faults if masks else []
        if self._slots.faults:
            own = [self._slots.faults.get(slot, "") for slot in slots.tolist()]
            faults = [mine or other for mine, other in zip(own, faults or [""] * len(own), strict=True)]
        return faults if any(faults) else []

    def _reader(self, rows: Rows) -> PromptReader | None:
        """Whoever reads what these rows are to tell of their prompts, if they are."""
        found = wanted(self._slots, rows)
        if found is None:
            return None
        at, next_at = self._to_device(found.at, found.next_at)
        return PromptReader(found, at, self._slots.ids.view(-1)[next_at].long())

    def _draw(self, rows: Rows, logits: Tensor, masks: Masks | None) -> Drawn:
        """Draws for the rows that do, and writes the ids behind those that are known."""
        if not len(rows.drawing):
            return Drawn(torch.empty(0, dtype=torch.int64), torch.empty(0), None)
        state = self._slots
        slots, position = rows.slots[rows.drawing], rows.ends[rows.drawing]

        def history(chosen: NDArray[np.int64], begins: NDArray[np.int64]) -> Tensor:
            ends = position[chosen][:, None]
            places = begins[:, None] + np.arange((ends[:, 0] - begins).max())
            places = np.where(places < ends, places, 0)
            (at,) = self._to_device((places + slots[chosen][:, None] * state.width).ravel())
            return state.ids.view(-1)[at].long().view(places.shape)

        draws = Draws(state.params.take(slots), position, history, masks)
        drawn = sample(logits, draws, self._noise)
        (at,) = self._to_device(slots * state.width + position)
        state.ids.view(-1)[at] = drawn.ids.int()
        return drawn

    def _to_device(self, *columns: NDArray[np.int64]) -> list[Tensor]:
        """Host columns on the device: on CUDA in one copy from pinned memory that does not stall the host."""
        if not self._cuda:
            return [torch.from_numpy(column) for column in columns]
        packed = torch.from_numpy(np.concatenate(columns)).pin_memory().to(self._device, non_blocking=True)
        return list(packed.split([len(column) for column in columns]))


def _no_tokens() -> LLTokenizer:
    raise RuntimeError("this engine was given no tokens")


def _to_host(values: Tensor) -> Tensor:
    """A copy in pinned memory, under way on the current stream."""
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)


def _drawn_to_host(drawn: Drawn) -> Drawn:
    """The same for all that was drawn."""
    tops = drawn.tops and Tops(drawn.tops.rows, *map(_to_host, drawn.tops[1:]))
    return Drawn(_to_host(drawn.ids), _to_host(drawn.logprobs), tops)
