"""Runs steps on a model: builds the batch, computes, samples, and brings what was drawn back to the host."""

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from llguidance import LLTokenizer

from tgi.kernel.messages import Result, Step
from tgi.kernel.presence import Limits
from tgi.kernel.summary import Served
from tgi.worker.batch import Attention, Model, Readied, Recordable
from tgi.worker.drafting import Draft, Drafter
from tgi.worker.grammar import Grammars
from tgi.worker.layout import Layout
from tgi.worker.loop import Poisoned
from tgi.worker.lora.shelf import Shelf
from tgi.worker.masks import Masks
from tgi.worker.noise import Noise
from tgi.worker.params import Draws
from tgi.worker.prompts import PromptReader, Told, prompt_columns, wanted
from tgi.worker.recorded import Recorded, Recorder
from tgi.worker.repeated import Repeated
from tgi.worker.sampling import Drawn, sample
from tgi.worker.slots import BadStep, Ints, Rows, Slots
from tgi.worker.staging import sent, to_host
from tgi.worker.tops import Tops, columns
from tgi.worker.verify import Drafted, begins, count_kept, followed, keep
from tgi.worker.watermark import Watermark

# The system takes long to give memory for keys and values, so this much stands ready while nobody waits.
READY_TOKENS = 4096

# The fault of a row for which bad words, alone or with a grammar, leave no token.
NO_TOKEN = "its `bad_words` leave no token to go on with"


class Pending(NamedTuple):
    """A launched step. On CUDA the host copies are there once `end` has happened."""

    number: int
    epoch: int
    drawn: Drawn  # on the host
    told: Told | None  # of prompts, on the host
    masks: Masks | None
    faults: list[str]  # as in Result; an entry for each row if `worded` is given
    drafted: Drafted | None  # on the host
    worded: Ints | None  # [D] which rows of the step draw, -1 for those without bad words; None: no row has any
    forward_us: int  # on CPU; on CUDA the events tell
    begin: torch.cuda.Event | None
    end: torch.cuda.Event | None


class Recording(NamedTuple):
    """How decode steps are recorded."""

    recorder: Recorder
    attention: Recordable  # the engine's
    rows: list[int]  # see recorded.sizes


class TorchEngine:
    """A model with its KV cache and slots. Steps are launched in order; on CPU launching computes. A step that is
    launched after one with drafts may have rows of the same slots once the latter is collected.

    `tokens` makes the table that grammars need, when the first one comes. `draft` is a draft model, if there is one.
    `mark` is the watermark of the rows that ask for one. Decode steps are recorded if `recording` says how.
    """

    def __init__(
        self,
        model: Model,
        attention: Attention,
        limits: Limits,
        tokens: Callable[[], LLTokenizer] | None = None,
        draft: Draft | None = None,
        mark: Watermark | None = None,
        recording: Recording | None = None,
    ) -> None:
        self.limits = limits
        self.served: Served | None = None  # for the start summary; set by start_engine
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
        self._layout = Layout(self._slots, mark or Watermark(model.vocab_size, model.device))
        self._repeated = Repeated(model, attention, self._slots)
        self._drafter = draft and Drafter(draft, self._slots, self._layout, self._noise)
        self._recorded = recording and Recorded(
            model, recording.attention, self._slots, recording.rows, limits.max_total_tokens, recording.recorder
        )

    def record(self, most: int | None = None) -> int:
        """Records the decode steps, or the so many largest; see Recorded.record. How many there are in all: 0 if
        nobody said how to record."""
        if self._recorded is None:
            return 0
        self._recorded.record(most)
        return len(self._recorded)

    def reset(self) -> None:
        """Forgets all requests."""
        self._repeated.forget()
        self._slots.reset()

    def spare(self) -> bool:
        """Uses a moment in which nobody wants anything to have memory for the next READY_TOKENS, at most some
        milliseconds of it. False: there is enough."""
        if not isinstance(self._attention, Readied):
            return False
        return self._attention.ready(self._slots.used, -(-READY_TOKENS // self.limits.page_size))

    def launch(self, step: Step) -> Pending | Result:
        """Starts a step. Raises BadStep where it does not fit, and Poisoned where the device is lost.

        After any other error the rows of this step count as not computed, and those of other slots go on.
        """
        if (result := self._repeated.result(step)) is not None:
            return result
        began = time.monotonic()
        try:
            with torch.inference_mode():
                return self._launch(step, began)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            raise
        except torch.AcceleratorError as error:
            raise Poisoned(str(error)) from error
        except RuntimeError as error:
            self._need_device(error)
            raise

    def done(self, pending: Pending | Result) -> bool:
        """Whether the step's result is on the host."""
        return isinstance(pending, Result) or pending.end is None or pending.end.query()

    def collect(self, pending: Pending | Result) -> Result:
        """Waits for the step and packs what it drew."""
        if isinstance(pending, Result):
            return pending
        forward_us = pending.forward_us
        if pending.begin is not None and pending.end is not None:
            try:
                pending.end.synchronize()
            except torch.AcceleratorError as error:
                raise Poisoned(str(error)) from error
            forward_us = int(pending.begin.elapsed_time(pending.end) * 1000)
        drawn, masks, counts = pending.drawn, pending.masks, b"\x01" * len(pending.drawn.ids)
        if pending.drafted is not None:
            kept = count_kept(pending.drafted, drawn.ids, masks and masks.reach)
            self._slots.accept(pending.drafted.slots, kept - 1)
            drawn, counts = keep(pending.drafted, drawn, kept), kept.astype(np.uint8).tobytes()
        faults = pending.faults
        if pending.worded is not None:
            drew = np.repeat(pending.worded, np.frombuffer(counts, np.uint8))  # the row of each token
            dead = drew[(drew >= 0) & np.isnan(drawn.logprobs.numpy())]  # a logprob is NaN if no token was left
            faults = [fault or (NO_TOKEN if row in dead else "") for row, fault in enumerate(faults)]
            faults = faults if any(faults) else []
        ids = drawn.ids.numpy().astype(np.int32)
        top_counts, top_ids, top_logprobs = columns(drawn.tops, len(ids))
        prompt_logprobs, prompt_top_ids, prompt_top_logprobs = prompt_columns(pending.told)
        return Result(
            pending.number,
            pending.epoch,
            counts,
            ids.tobytes(),
            drawn.logprobs.numpy().tobytes(),
            forward_us,
            top_counts=top_counts,
            top_ids=top_ids,
            top_logprobs=top_logprobs,
            prompt_logprobs=prompt_logprobs,
            prompt_top_ids=prompt_top_ids,
            prompt_top_logprobs=prompt_top_logprobs,
            faults=faults,
        )

    def _launch(self, step: Step, began: float) -> Pending:
        self._slots.apply(step)
        rows = self._slots.rows(step)
        begin = end = None
        if self._cuda:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
        drafted = self._drafted(step, rows)
        reader = self._reader(rows)
        drawing = rows.slots[rows.drawing]
        slots = drawing if drafted is None else drafted.slots
        places, masks, worded = self._layout.places(drawing, rows.position), None, None
        logits = self._recorded.logits(rows) if self._recorded is not None and reader is None else None
        if logits is None and self._slots.params.greedy[drawing].all():
            batch = self._layout.batch(rows)
            best = self._model.best(batch, self._attention, reader)
            drawn = Drawn(best.ids, best.logprobs, None)
            if self._drafter is None:  # which has to see every step
                self._repeated.computed(step, rows, batch, best)
        else:
            if logits is None:
                logits = self._model.forward(self._layout.batch(rows), self._attention, reader)
            masks = self._grammars.masks(slots, drafted)
            draws = self._layout.draws(drawing, rows.position, masks)
            drawn = sample(logits, draws, self._noise, self._model.kv.kernels)
            worded = _worded(rows, draws)
        # Behind a draft that is not accepted nobody reads before it is written again.
        self._layout.write(places, drawn.ids)
        told = None if reader is None else reader.told()
        self._slots.advance(rows)
        if end is not None:
            drawn = _drawn_to_host(drawn)
            told = told and Told(to_host(told.logprobs), told.top_n, *map(to_host, told[2:]))
            end.record()
        if masks is not None:
            self._grammars.drawn(slots, masks, drawn.ids, end, drafted)
        forward_us = int((time.monotonic() - began) * 1e6)
        faults = self._faults(step, rows, masks)
        if worded is not None:
            faults = faults or [""] * len(rows.slots)
        return Pending(step.number, step.epoch, drawn, told, masks, faults, drafted, worded, forward_us, begin, end)

    def _faults(self, step: Step, rows: Rows, masks: Masks | None) -> list[str]:
        """Result.faults: for lack of an adapter, or of text that a grammar allows."""
        lost, stuck = self._slots.faults, masks is not None and any(masks.faults)
        if not lost and not stuck:
            return []
        faults = [lost.get(slot, "") for slot in rows.slots.tolist()]
        if masks is not None and stuck:
            for row, fault in zip(np.flatnonzero(np.frombuffer(step.draws, np.uint8)), masks.faults, strict=True):
                faults[row] = faults[row] or fault
        return faults if any(faults) else []  # the lost one may have ended

    def _need_device(self, error: RuntimeError) -> None:
        """Raises Poisoned if the device is lost, which Triton, whose launches may be the first to hear of it, tells by
        no type of error."""
        try:
            if self._cuda:
                torch.cuda.synchronize(self._device)
        except torch.AcceleratorError:
            raise Poisoned(str(error)) from error

    def _drafted(self, step: Step, rows: Rows) -> Drafted | None:
        """Writes the rows' drafts behind what is known, if they have any. On CUDA they come to the host too, and the
        host waits for none but those of a draft model that grammars need to see."""
        if self._drafter is not None:
            self._drafter.follow(step, rows)
        if rows.drafts is None:
            return None
        lengths = rows.drafts.lengths
        compared = followed(lengths)
        places = self._layout.places(rows.slots[rows.drawing[compared]], rows.position[compared])
        there = None
        if rows.drafts.ids is not None:
            drafts = torch.from_numpy(rows.drafts.ids)
            self._layout.write(places, sent(rows.drafts.ids, self._device))
        else:
            if self._drafter is None:
                raise BadStep("drafts without draft_ids, and there is no draft model to find them")
            drafts = self._layout.read(places)
            if self._cuda:
                there = torch.cuda.Event()
                drafts = to_host(drafts)
                there.record()
        drafted = Drafted(rows.slots[rows.drawing[begins(lengths)]], lengths, drafts)
        self._grammars.look_ahead(drafted, there)
        return drafted

    def _reader(self, rows: Rows) -> PromptReader | None:
        """Whoever reads what these rows are to tell of their prompts, if they are."""
        found = wanted(self._slots, rows)
        if found is None:
            return None
        at, next_at = self._layout.to_device(found.at, found.next_at)
        return PromptReader(found, at, self._slots.ids.view(-1)[next_at].long())


def _worded(rows: Rows, draws: Draws) -> Ints | None:
    """Pending.worded."""
    places = np.flatnonzero(draws.params.bad_words)
    if not len(places):
        return None
    drawing = np.unique(rows.drawing)
    return np.where(np.isin(drawing, rows.drawing[places]), drawing, -1)


def _no_tokens() -> LLTokenizer:
    raise RuntimeError("this engine was given no tokens")


def _drawn_to_host(drawn: Drawn) -> Drawn:
    """All that was drawn, on its way there."""
    tops = drawn.tops and Tops(drawn.tops.rows, *map(to_host, drawn.tops[1:]))
    return Drawn(to_host(drawn.ids), to_host(drawn.logprobs), tops)
