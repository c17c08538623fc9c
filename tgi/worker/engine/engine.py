"""The torch engine: launches a step on the model, samples, and collects the result from the device."""

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from llguidance import LLTokenizer

from tgi.microkernel.host.heap import release_freed_memory
from tgi.microkernel.messages.protocol import DeploymentLimits, HeldPages, Step, StepResult
from tgi.microkernel.observability.progress import WorkerFacts
from tgi.worker.attention.interface import (
    AttentionBackend,
    CapturableBackend,
    ForwardBatch,
    PrefaultingBackend,
    StorableBackend,
)
from tgi.worker.device_copies import copy_to_device, copy_to_host
from tgi.worker.engine.cuda_graphs import CapturedModel, DecodeGraphs, GraphCapturer
from tgi.worker.engine.decode_fast_path import DecodeFastPath
from tgi.worker.engine.draft_head_runner import DraftHeadRunner
from tgi.worker.engine.draft_runner import DraftModel, DraftRunner
from tgi.worker.engine.input_batch import BatchBuilder, Ints, Slots, StepRows
from tgi.worker.engine.interface import BadStep, OutOfMemory, Poisoned
from tgi.worker.engine.page_files import PageFiles
from tgi.worker.engine.prompt_logprobs import (
    PromptLogprobReader,
    PromptLogprobTensors,
    find_prompt_positions,
    prompt_logprobs_columns,
)
from tgi.worker.engine.prompt_parts import PromptParts
from tgi.worker.lora.registry import AdapterRegistry
from tgi.worker.models.decoder import DecoderModel
from tgi.worker.models.draft_head import DraftHead
from tgi.worker.models.interface import Model
from tgi.worker.sampling.grammar import GrammarManager
from tgi.worker.sampling.noise import Noise
from tgi.worker.sampling.sampler import SampledTokens, sample_head
from tgi.worker.sampling.sampling_batch import SamplingBatch
from tgi.worker.sampling.token_bitmask import GrammarBitmask
from tgi.worker.sampling.top_logprobs import TopLogprobs, top_logprobs_columns
from tgi.worker.sampling.verification import (
    DraftBatch,
    count_accepted,
    draft_positions_mask,
    keep_accepted,
    row_offsets,
)
from tgi.worker.sampling.watermark import Watermark
from tgi.worker.vision.prompt_images import TowerWork

# The operating system takes long to hand out KV memory, so idle time is used to fault in memory for this many tokens.
PREFAULT_TOKENS = 4096

# The fault of a row for which bad words, alone or with a grammar, leave no token.
NO_TOKEN_LEFT = "its `bad_words` leave no token to go on with"


class PendingStep(NamedTuple):
    """A launched step. On CUDA the host copies are complete once `end_event` has happened."""

    number: int
    epoch: int
    sampled: SampledTokens  # on the host
    prompt_logprobs: PromptLogprobTensors | None  # on the host
    grammar_bitmask: GrammarBitmask | None
    faults: list[str]  # as in StepResult; with an entry for each row if `bad_word_rows` is not None
    drafts: DraftBatch | None  # on the host
    # [D] for each sampling row its index in the step, -1 if it has no bad words; None: no row has any
    bad_word_rows: Ints | None
    forward_us: int  # on CPU; on CUDA it is measured by the events
    begin_event: torch.cuda.Event | None
    end_event: torch.cuda.Event | None
    images: TowerWork


class GraphCaptureConfig(NamedTuple):
    """How steps are captured as CUDA graphs."""

    capturer: GraphCapturer
    attention: CapturableBackend  # the engine's
    batch_sizes: list[int]  # see cuda_graphs.graph_batch_sizes
    chunk_tokens: int = 0  # see cuda_graphs.chunk_tokens


class TorchEngine:
    """A model with its KV cache and slots. Steps are launched in order; on CPU, `launch` computes the step. A step that
    follows one with drafts may have rows of the same slots, or drafts if the model has recurrent layers, only after the
    latter is collected.

    `load_token_table` makes the table that grammars need, when the first one arrives. `draft_model` proposes drafts.
    `watermark` serves the rows that ask for it. `graph_capture` enables CUDA graphs. `images`: the model has a vision
    tower, or an encoder.
    """

    def __init__(
        self,
        model: Model,
        attention: AttentionBackend,
        limits: DeploymentLimits,
        load_token_table: Callable[[], LLTokenizer] | None = None,
        draft_model: DraftModel | None = None,
        watermark: Watermark | None = None,
        graph_capture: GraphCaptureConfig | None = None,
        images: PromptParts | None = None,
    ) -> None:
        self.limits = limits
        self.served: WorkerFacts | None = None  # for the start summary; set by start_engine
        self.page_files: PageFiles | None = None  # set by start_engine
        self.adapters = AdapterRegistry(lambda directory: model.load_adapter(directory))
        self._model = model
        self._attention = attention
        self._device = model.device
        self._cuda = model.device.type == "cuda"
        self._noise = Noise(model.vocab_size, model.device)
        self._grammars = GrammarManager(load_token_table or _no_token_table)
        self._images = images
        self._slots = Slots(
            limits.max_batch_size,
            limits.max_total_tokens,
            limits.pages,
            attention.page_size,
            model.vocab_size,
            model.device,
            self._grammars,
            self.adapters,
            limits.groups,
            images,
        )
        attentions = [attention] if draft_model is None else [attention, draft_model.attention]
        parts = [one.page_memory for one in attentions if isinstance(one, StorableBackend)]
        # The parts of all pages, each [pages, ...]; None: they cannot be kept in files.
        self.page_memory = [part for one in parts for part in one] if len(parts) == len(attentions) else None
        watermark = watermark or Watermark(model.vocab_size, model.device)
        self._batch_builder = BatchBuilder(self._slots, watermark, attention.state is not None)
        self._decode_fast_path = DecodeFastPath(model, attention, self._slots)
        self._draft_runner = draft_model and self._make_draft_runner(*draft_model)
        self._decode_graphs: DecodeGraphs | None = None
        if graph_capture is not None:
            self._decode_graphs = self._make_graphs(self._captured_model(graph_capture), graph_capture)
            if self._draft_runner is not None:
                drafting = self._draft_runner.captured_model(graph_capture.batch_sizes, graph_capture.chunk_tokens)
                self._draft_runner.graphs = drafting and self._make_graphs(drafting, graph_capture)

    def _captured_model(self, config: GraphCaptureConfig) -> CapturedModel:
        """The served model, whose hidden states prompt logprobs and a head that drafts read."""
        assert isinstance(self._model, DecoderModel)
        gpu = self._model.kv.gpu_kernels
        return CapturedModel(
            self._model,
            config.attention,
            batch_invariant=gpu is not None and gpu.batch_invariant,
            shifts=self._images is not None and self._images.shifts,
            states=None if self._images is None else self._images.states,
            embedded=self._model.embeds_alone,
            bidirectional=self._images is not None and bool(self._images.undivided),
            prompt_logprobs=True,
            hidden_states=isinstance(self._draft_runner, DraftHeadRunner),
        )

    def _make_graphs(self, captured: CapturedModel, config: GraphCaptureConfig) -> DecodeGraphs:
        rest = config.batch_sizes, self.limits.max_total_tokens, config.capturer, config.chunk_tokens
        return DecodeGraphs(captured, self._slots, *rest)

    def _make_draft_runner(
        self, model: Model | DraftHead, attention: AttentionBackend
    ) -> DraftRunner | DraftHeadRunner:
        rest = self._slots, self._batch_builder, self._noise
        if not isinstance(model, DraftHead):
            return DraftRunner(DraftModel(model, attention), *rest)
        assert isinstance(self._model, DecoderModel)
        return DraftHeadRunner(model, attention, self._model, *rest)

    def capture_decode_graphs(self, limit: int | None = None) -> int:
        """Captures the graphs of the models, or only the `limit` largest of each (see DecodeGraphs.capture). Returns
        how many there are in all; 0 without a GraphCaptureConfig."""
        drafting = None if self._draft_runner is None else self._draft_runner.graphs
        found = [graphs for graphs in (self._decode_graphs, drafting) if graphs is not None]
        for graphs in found:
            graphs.capture(limit)
        return sum(map(len, found))

    def reset(self) -> None:
        self._decode_fast_path.reset()
        self._slots.reset()

    def held_pages(self) -> list[HeldPages]:
        self._decode_fast_path.commit()
        return self._slots.held_pages()

    def prefault_memory(self) -> bool:
        """While idle, faults in KV memory for the next PREFAULT_TOKENS tokens, a few milliseconds of it in each call.
        False: all of it is there."""
        if not isinstance(self._attention, PrefaultingBackend):
            return False
        pages = -(-PREFAULT_TOKENS // self.limits.page_size)
        used = self._slots.touched_pages
        if self.page_files is not None:
            used = max(used, self.page_files.touched_pages)
        return self._attention.prefault_pages(used, pages)

    def release_memory(self) -> None:
        if not self._cuda:
            release_freed_memory()

    def launch(self, step: Step) -> PendingStep | StepResult:
        """Starts a step. Raises BadStep where it does not match the slots, OutOfMemory, and Poisoned where the
        device is lost.

        After any other error the rows of this step count as not computed, and other slots are not affected.
        """
        if step.state_copies:
            self._copy_states(step)
        if (result := self._decode_fast_path.try_step(step)) is not None:
            return result
        began = time.monotonic()
        try:
            with torch.inference_mode():
                return self._launch(step, began)
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            raise OutOfMemory(str(error)) from error
        except torch.AcceleratorError as error:
            raise Poisoned(str(error)) from error
        except RuntimeError as error:
            self._raise_if_device_lost(error)
            raise

    def _copy_states(self, step: Step) -> None:
        self._decode_fast_path.commit()
        copies = self._slots.state_copies(step)
        if self._attention.state is None:
            raise BadStep("state_copies, but the model has no recurrent layers")
        with torch.inference_mode():
            for source, target in copies:
                self._attention.state.copy(source, target)

    def _take_back_states(self, drafts: DraftBatch, kept: Ints) -> None:
        """Copies the states before the first rejected drafts to the slots of their rows. `kept` counts the tokens that
        are kept of each row: that is one more than its accepted drafts."""
        if (state := self._attention.state) is None:
            return
        counts = drafts.lengths - 1
        rejected = kept - 1 < counts
        sources = self._slots.kept_state(row_offsets(counts) + kept - 1)[rejected]
        targets = self._slots.state_slots(drafts.slots)[rejected]
        with torch.inference_mode():
            for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
                state.copy(source, target)

    def is_done(self, pending: PendingStep | StepResult) -> bool:
        return isinstance(pending, StepResult) or pending.end_event is None or pending.end_event.query()

    def collect(self, pending: PendingStep | StepResult) -> StepResult:
        if isinstance(pending, StepResult):
            return pending
        forward_us = pending.forward_us
        if pending.begin_event is not None and pending.end_event is not None:
            try:
                pending.end_event.synchronize()
            except torch.AcceleratorError as error:
                raise Poisoned(str(error)) from error
            forward_us = int(pending.begin_event.elapsed_time(pending.end_event) * 1000)
        sampled, bitmask, counts = pending.sampled, pending.grammar_bitmask, b"\x01" * len(pending.sampled.ids)
        if pending.drafts is not None:
            kept = count_accepted(pending.drafts, sampled.ids, bitmask and bitmask.reach)
            self._slots.commit_accepted_drafts(pending.drafts.slots, kept - 1)
            self._take_back_states(pending.drafts, kept)
            sampled, counts = keep_accepted(pending.drafts, sampled, kept), kept.astype(np.uint8).tobytes()
        faults = pending.faults
        if pending.bad_word_rows is not None:
            row_of_token = np.repeat(pending.bad_word_rows, np.frombuffer(counts, np.uint8))
            # A logprob is NaN if all logits of the row were -inf.
            without_token = row_of_token[(row_of_token >= 0) & np.isnan(sampled.logprobs.numpy())]
            faults = [fault or (NO_TOKEN_LEFT if row in without_token else "") for row, fault in enumerate(faults)]
            faults = faults if any(faults) else []
        ids = sampled.ids.numpy().astype(np.int32)
        top_counts, top_ids, top_logprobs = top_logprobs_columns(sampled.top_logprobs, len(ids))
        prompt_logprobs, prompt_top_ids, prompt_top_logprobs = prompt_logprobs_columns(pending.prompt_logprobs)
        return StepResult(
            pending.number,
            pending.epoch,
            counts,
            ids.tobytes(),
            sampled.logprobs.numpy().tobytes(),
            forward_us,
            top_counts=top_counts,
            top_ids=top_ids,
            top_logprobs=top_logprobs,
            prompt_logprobs=prompt_logprobs,
            prompt_top_ids=prompt_top_ids,
            prompt_top_logprobs=prompt_top_logprobs,
            row_errors=faults,
            encoder_us=pending.images.us,
            encoder_positions=pending.images.positions,
        )

    def _launch(self, step: Step, began: float) -> PendingStep | StepResult:
        self._slots.apply_step(step)
        if step.tower:
            self._slots.advance_tower(step.tower)
            if not step.rows:
                work = TowerWork() if self._images is None else self._images.take_work()
                took = int(1e6 * (time.monotonic() - began))
                columns = step.number, step.epoch, b"", b"", b""
                return StepResult(*columns, took, encoder_us=work.us, encoder_positions=work.positions)
        rows = self._slots.validate_rows(step)
        begin_event = end_event = None
        if self._cuda:
            begin_event, end_event = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin_event.record()
        drafts = self._write_drafts(step, rows)
        reader = self._prompt_logprob_reader(rows)
        sampling_slots = rows.slots[rows.sampling_rows]
        slots = sampling_slots if drafts is None else drafts.slots
        indices = self._batch_builder.id_indices(sampling_slots, rows.sampling_positions)
        bitmask, bad_word_rows = None, None
        logits = None
        batch: ForwardBatch | None = None
        if self._decode_graphs is not None:
            seeing = False
            if self._images is not None and self._images.computes(rows.slots, rows.starts):
                batch = self._forward_batch(rows)
            elif self._images is not None:
                seeing = self._images.place(rows.slots, self._slots.faults)
            logits = self._decode_graphs.try_replay(rows, reader, seeing=seeing, parts=batch)
        gpu_sample = None if self._model.kv.gpu_kernels is None else self._model.kv.gpu_kernels.sample
        if logits is None and gpu_sample is None and self._slots.params.greedy[sampling_slots].all():
            batch = batch or self._forward_batch(rows)
            greedy = self._model.forward_greedy(batch, self._attention, reader)
            sampled = SampledTokens(greedy.ids, greedy.logprobs, None)
            if self._draft_runner is None:  # a draft runner needs every step
                self._decode_fast_path.remember_greedy_step(step, rows, batch, greedy)
        else:
            if logits is None:
                batch = batch or self._forward_batch(rows)
                logits = self._model.forward_head(batch, self._attention, reader)
            bitmask = self._grammars.wait_for_bitmask(slots, drafts)
            sampling_batch = self._batch_builder.build_sampling_batch(sampling_slots, rows.sampling_positions, bitmask)
            sampled = sample_head(logits, sampling_batch, self._noise, self._model.find_greedy_tokens, gpu_sample)
            bad_word_rows = _find_bad_word_rows(rows, sampling_batch)
        # Ids after a rejected draft are overwritten before they are read.
        self._batch_builder.write_ids(indices, sampled.ids)
        if isinstance(self._draft_runner, DraftHeadRunner):
            self._draft_runner.follow(rows)
        prompt_logprobs = None if reader is None else reader.finish()
        self._slots.commit_rows(rows)
        if end_event is not None:
            sampled = _sampled_to_host(sampled)
            prompt_logprobs = prompt_logprobs and prompt_logprobs.to_host()
            end_event.record()
        if bitmask is not None:
            self._grammars.accept_sampled(slots, bitmask, sampled.ids, end_event, drafts)
        forward_us = int((time.monotonic() - began) * 1e6)
        faults = self._row_faults(step, rows, bitmask)
        if bad_word_rows is not None:
            faults = faults or [""] * len(rows.slots)
        return PendingStep(
            number=step.number,
            epoch=step.epoch,
            sampled=sampled,
            prompt_logprobs=prompt_logprobs,
            grammar_bitmask=bitmask,
            faults=faults,
            drafts=drafts,
            bad_word_rows=bad_word_rows,
            forward_us=forward_us,
            begin_event=begin_event,
            end_event=end_event,
            images=TowerWork() if self._images is None else self._images.take_work(),
        )

    def _forward_batch(self, rows: StepRows) -> ForwardBatch:
        """The model's input, with the images of the rows."""
        batch = self._batch_builder.build_forward_batch(rows)
        if self._images is None:
            return batch
        return self._images.add_to(batch, rows.slots, rows.starts, self._slots.faults)

    def _row_faults(self, step: Step, rows: StepRows, bitmask: GrammarBitmask | None) -> list[str]:
        """StepResult.faults: rows whose adapter is not loaded, or whose grammar allows no token."""
        slot_faults, stuck = self._slots.faults, bitmask is not None and any(bitmask.faults)
        if not slot_faults and not stuck:
            return []
        faults = [slot_faults.get(slot, "") for slot in rows.slots.tolist()]
        if bitmask is not None and stuck:
            for row, fault in zip(np.flatnonzero(np.frombuffer(step.samples, np.uint8)), bitmask.faults, strict=True):
                faults[row] = faults[row] or fault
        return faults if any(faults) else []  # the slot with a fault may have no row in this step

    def _raise_if_device_lost(self, error: RuntimeError) -> None:
        """Raises Poisoned if the device is lost. Triton's launches may be the first to fail then, with a RuntimeError
        of no specific type."""
        try:
            if self._cuda:
                torch.cuda.synchronize(self._device)
        except torch.AcceleratorError:
            raise Poisoned(str(error)) from error

    def _write_drafts(self, step: Step, rows: StepRows) -> DraftBatch | None:
        """Writes the rows' drafts after their known ids. On CUDA, drafts of a draft model are copied to the host too,
        because grammars need them there; the host does not wait for the copy."""
        if self._draft_runner is not None:
            self._draft_runner.run(step, rows)
        if rows.drafts is None:
            return None
        lengths = rows.drafts.lengths
        has_draft = draft_positions_mask(lengths)
        indices = self._batch_builder.id_indices(
            rows.slots[rows.sampling_rows[has_draft]], rows.sampling_positions[has_draft]
        )
        copied = None
        if rows.drafts.ids is not None:
            ids = torch.from_numpy(rows.drafts.ids)
            self._batch_builder.write_ids(indices, copy_to_device(rows.drafts.ids, self._device))
        else:
            if self._draft_runner is None:
                raise BadStep("drafts without draft_ids, and there is no draft model to find them")
            ids = self._batch_builder.read_ids(indices)
            if self._cuda:
                copied = torch.cuda.Event()
                ids = copy_to_host(ids)
                copied.record()
        drafts = DraftBatch(rows.slots[rows.sampling_rows[row_offsets(lengths)]], lengths, ids)
        self._grammars.compute_draft_bitmasks(drafts, copied)
        return drafts

    def _prompt_logprob_reader(self, rows: StepRows) -> PromptLogprobReader | None:
        """Reads the prompt logprobs that these rows ask for, if any."""
        positions = find_prompt_positions(self._slots, rows)
        if positions is None:
            return None
        logits_indices, next_indices = self._batch_builder.to_device(positions.logits_indices, positions.next_indices)
        next_ids = self._slots.ids.view(-1)[next_indices].long()
        scored = self._model.scored if isinstance(self._model, DecoderModel) else self._model.vocab_size
        return PromptLogprobReader(positions, logits_indices, next_ids, scored)


def _find_bad_word_rows(rows: StepRows, batch: SamplingBatch) -> Ints | None:
    """PendingStep.bad_word_rows."""
    if batch.params.unprocessed.all():
        return None
    positions = np.flatnonzero(batch.params.bad_words)
    if not len(positions):
        return None
    sampling_rows = np.unique(rows.sampling_rows)
    return np.where(np.isin(sampling_rows, rows.sampling_rows[positions]), sampling_rows, -1)


def _no_token_table() -> LLTokenizer:
    raise RuntimeError("this engine has no token table for grammars")


def _sampled_to_host(sampled: SampledTokens) -> SampledTokens:
    """Starts the copies of what was sampled to the host."""
    top = sampled.top_logprobs
    if top is not None:
        top = TopLogprobs(top.rows, copy_to_host(top.counts), copy_to_host(top.ids), copy_to_host(top.logprobs))
    return SampledTokens(copy_to_host(sampled.ids), copy_to_host(sampled.logprobs), top)
