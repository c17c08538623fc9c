"""The MTP runner: proposes drafts with the served model's layer for multi-token prediction (models/mtp.py).

The layer keeps keys and values of its own on the same pages of the same slots. It computes the rows of each step after
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
from tgi.worker.models.interface import LogitsReader
from tgi.worker.models.mtp import MtpModel
from tgi.worker.sampling.noise import Noise
from tgi.worker.sampling.sampler import sample_ids


class CapturableMtp:
    """The layer as it is captured: its results are its outputs. Implements CapturableModel."""

    def __init__(self, model: MtpModel, inputs: Tensor) -> None:
        """`inputs` [most tokens, hidden]: the served model's hidden states of a captured step."""
        self.vocab_size = model.vocab_size
        self._model, self._inputs = model, inputs

    def forward_hidden(self, batch: ForwardBatch, attention: AttentionBackend) -> Tensor:
        return self._model.forward(batch, self._inputs[: len(batch.tokens)], attention)

    def head(self, hidden: Tensor, indices: Tensor) -> HeadLogits:
        return HeadLogits(hidden.index_select(0, indices))

    def read_hidden(self, hidden: Tensor, reader: LogitsReader | None) -> None:
        """Nothing reads them."""

    def embed_batch(self, batch: ForwardBatch) -> Tensor:
        raise NotImplementedError("an MTP layer computes text alone")


class MtpRunner:
    """Computes the rows of each step on the MTP layer, and proposes drafts for the rows that want them."""

    def __init__(
        self,
        model: MtpModel,
        attention: AttentionBackend,
        served: DecoderModel,
        slots: Slots,
        batch_builder: BatchBuilder,
        noise: Noise,
    ) -> None:
        self.graphs: DecodeGraphs | None = None  # of the layer
        self._model, self._attention = model, attention
        self._slots = slots
        self._batch_builder = batch_builder
        self._noise = noise
        kernels = model.kv.gpu_kernels
        self._gpu_sample = None if kernels is None else kernels.sample
        self._hidden: Tensor | None = None  # [T, hidden] of the step that the served model computes
        # The layer's output at the sampled positions of each slot's latest row, of which the first is in `_first`.
        shape = len(slots.num_known), 1 + MAX_SPECULATED_TOKENS, served.hidden_size
        self._outputs = torch.zeros(shape, dtype=served.kv.dtype, device=served.device)
        self._first = np.zeros(len(slots.num_known), np.int64)
        served.hidden_reader = self._read_hidden

    def captured_model(self, batch_sizes: Sequence[int], chunk_tokens: int) -> CapturedModel | None:
        """What is captured of the layer, of steps of these sizes; None: it cannot be."""
        model, attention = self._model, self._attention
        if model.decoder.cuda_graph_obstacle is not None or not isinstance(attention, CapturableBackend):
            return None
        inputs = self._outputs.new_zeros(most_tokens(batch_sizes, chunk_tokens), self._outputs.shape[2])
        return CapturedModel(CapturableMtp(model, inputs), attention, adapters=False, ahead=1, inputs=inputs)

    def run(self, step: Step, rows: StepRows) -> None:
        """Writes drafts after the known ids of the rows that want them, before the served model computes the step."""
        self._hidden = None
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
            ids = sample_ids(self._model.logits(hidden), batch, self._noise, self._gpu_sample)
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
        assert self._hidden is not None
        outputs, self._hidden = self._forward(rows, self._hidden), None
        sampling = rows.slots[rows.sampling_rows]
        firsts, lengths = np.unique(rows.sampling_rows, return_counts=True)
        starts = np.cumsum(lengths) - lengths
        self._first[rows.slots[firsts]] = rows.sampling_positions[starts] - 1
        places = np.arange(len(sampling)) - np.repeat(starts, lengths)
        kept = np.flatnonzero(places <= MAX_SPECULATED_TOKENS)
        targets = self._batch_builder.to_device(sampling[kept], places[kept], kept)
        self._outputs[targets[0], targets[1]] = outputs[targets[2]]

    def _forward(self, rows: StepRows, hidden: Tensor) -> Tensor:
        """The layer's outputs [E, hidden] at the sampled positions of rows with these hidden states [T, hidden]."""
        replayed = None if self.graphs is None else self.graphs.try_replay(rows, inputs=hidden)
        if replayed is not None:
            return replayed.values
        batch = self._build_batch(rows)
        return self._model.forward(batch, hidden, self._attention)[batch.logits_indices]

    def _build_batch(self, rows: StepRows) -> ForwardBatch:
        """The layer's input, without adapters: at each position the next id."""
        counts = rows.ends - rows.starts
        slots = np.repeat(rows.slots, counts)
        offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        following = self._batch_builder.id_indices(slots, np.repeat(rows.starts, counts) + offsets + 1)
        batch = self._batch_builder.build_forward_batch(rows)
        return batch._replace(tokens=self._batch_builder.read_ids(following), lora_spans=())

    def _read_hidden(self, hidden: Tensor) -> None:
        self._hidden = hidden
