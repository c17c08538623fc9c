"""The draft head runner: proposes drafts with a head that reads the hidden states of the served model
(models/draft_head.py).

The head keeps keys and values of its own on the same pages of the same slots. It computes the rows of each step after
the served model has, from its hidden states and the ids that it sampled, and keeps its output at each sampled position:
the next step's drafts go on from there. As with a draft model, only the number of accepted drafts depends on this
runner. So keys and values of a cached prefix may be those of another continuation.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tgi.microkernel.messages.protocol import Step
from tgi.microkernel.settings.table import MAX_SPECULATED_TOKENS
from tgi.worker.attention.interface import AttentionBackend, CapturableBackend, ForwardBatch
from tgi.worker.engine.cuda_graphs import CapturedModel, DecodeGraphs, most_tokens
from tgi.worker.engine.input_batch import BatchBuilder, Slots, StepRows
from tgi.worker.head_logits import HeadLogits
from tgi.worker.models.decoder import DecoderModel
from tgi.worker.models.draft_head import DraftHead
from tgi.worker.models.interface import LogitsReader
from tgi.worker.sampling.noise import Noise
from tgi.worker.sampling.sampler import sample_ids


class CapturableHead:
    """A head as it is captured: its results are its outputs. Implements CapturableModel."""

    def __init__(self, model: DraftHead, inputs: Tensor) -> None:
        """`inputs` [most tokens, hidden]: h of a captured step."""
        self.vocab_size = model.vocab_size
        self._model, self._inputs = model, inputs

    def forward_hidden(self, batch: ForwardBatch, attention: AttentionBackend) -> Tensor:
        return self._model.forward(batch, self._inputs[: len(batch.tokens)], attention)

    def head(self, hidden: Tensor, indices: Tensor) -> HeadLogits:
        return HeadLogits(hidden.index_select(0, indices))

    def read_hidden(self, hidden: Tensor, reader: LogitsReader | None) -> None:
        """Nothing reads them."""

    def embed_batch(self, batch: ForwardBatch) -> Tensor:
        raise NotImplementedError("a head computes text alone")


class DraftHeadRunner:
    """Computes the rows of each step on the head, and proposes drafts for the rows that want them."""

    def __init__(
        self,
        head: DraftHead,
        attention: AttentionBackend,
        served: DecoderModel,
        slots: Slots,
        batch_builder: BatchBuilder,
        noise: Noise,
    ) -> None:
        self.graphs: DecodeGraphs | None = None  # of the head
        self._head, self._attention = head, attention
        self._slots = slots
        self._batch_builder = batch_builder
        self._noise = noise
        kernels = head.kv.gpu_kernels
        self._gpu_sample = None if kernels is None else kernels.sample
        self._tapped: Tensor | None = None  # of the step that the served model computes, as `tap_hidden` gives it
        # The head's output at the sampled positions of each slot's latest row, of which the first is in `_first`.
        shape = len(slots.num_known), 1 + MAX_SPECULATED_TOKENS, head.hidden_size
        self._outputs = torch.zeros(shape, dtype=served.kv.dtype, device=served.device)
        self._first = np.zeros(len(slots.num_known), np.int64)
        served.tap_hidden(head.taps, self._read_tapped)

    def captured_model(self, batch_sizes: Sequence[int], chunk_tokens: int) -> CapturedModel | None:
        """What is captured of the head, of steps of these sizes; None: it cannot be."""
        head, attention = self._head, self._attention
        if head.cuda_graph_obstacle is not None or not isinstance(attention, CapturableBackend):
            return None
        inputs = self._outputs.new_zeros(most_tokens(batch_sizes, chunk_tokens), head.hidden_size)
        return CapturedModel(CapturableHead(head, inputs), attention, adapters=False, ahead=1, inputs=inputs)

    def run(self, step: Step, rows: StepRows) -> None:
        """Writes drafts after the known ids of the rows that want them, before the served model computes the step."""
        self._tapped = None
        if rows.drafts is None or rows.drafts.ids is not None:
            return
        wanted = rows.drafts.counts
        chosen = np.flatnonzero(wanted)
        slots, wanted = rows.slots[chosen], wanted[chosen]
        positions = rows.ends[chosen] - wanted - 2  # of the latest output: that before the last known id
        places = (positions - self._first[slots]).clip(0, MAX_SPECULATED_TOKENS)
        hidden = self._outputs[tuple(self._batch_builder.to_device(slots, places))]
        while True:
            batch = self._batch_builder.build_sampling_batch(slots, positions + 2, None)
            ids = sample_ids(self._head.logits(hidden), batch, self._noise, self._gpu_sample)
            self._batch_builder.write_ids(self._batch_builder.id_indices(slots, positions + 2), ids)
            wanted = wanted - 1
            left = np.flatnonzero(wanted)
            if not len(left):
                return
            slots, positions, wanted = slots[left], positions[left] + 1, wanted[left]
            (kept,) = self._batch_builder.to_device(left)
            now = StepRows(slots, positions, positions + 1, np.arange(len(slots)), positions + 1)
            hidden = self._forward(now, hidden[kept])

    def follow(self, rows: StepRows) -> None:
        """Computes the rows of a step that the served model has computed, and whose sampled ids are written."""
        assert self._tapped is not None
        outputs, self._tapped = self._forward(rows, self._head.fuse(self._tapped)), None
        sampling = rows.slots[rows.sampling_rows]
        firsts, lengths = np.unique(rows.sampling_rows, return_counts=True)
        starts = np.cumsum(lengths) - lengths
        self._first[rows.slots[firsts]] = rows.sampling_positions[starts] - 1
        places = np.arange(len(sampling)) - np.repeat(starts, lengths)
        kept = np.flatnonzero(places <= MAX_SPECULATED_TOKENS)
        targets = self._batch_builder.to_device(sampling[kept], places[kept], kept)
        self._outputs[targets[0], targets[1]] = outputs[targets[2]]

    def _forward(self, rows: StepRows, hidden: Tensor) -> Tensor:
        """The head's outputs [E, hidden] at the sampled positions of rows with this h [T, hidden]."""
        replayed = None if self.graphs is None else self.graphs.try_replay(rows, inputs=hidden)
        if replayed is not None:
            return replayed.values
        batch = self._build_batch(rows)
        return self._head.forward(batch, hidden, self._attention)[batch.logits_indices]

    def _build_batch(self, rows: StepRows) -> ForwardBatch:
        """The head's input, without adapters: at each position the next id."""
        counts = rows.ends - rows.starts
        slots = np.repeat(rows.slots, counts)
        offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        following = self._batch_builder.id_indices(slots, np.repeat(rows.starts, counts) + offsets + 1)
        batch = self._batch_builder.build_forward_batch(rows)
        return batch._replace(tokens=self._batch_builder.read_ids(following), lora_spans=())

    def _read_tapped(self, tapped: Tensor) -> None:
        self._tapped = tapped
