"""The draft runner: proposes drafts with a draft model, a second, smaller model.

The draft model keeps keys and values of its own on the same pages of the same slots. It samples by the same rules and
with the same noise as the served model, but from its own logits and without grammars: where the two distributions are
alike, the draft is right also for rows that sample. Only the number of accepted drafts depends on this runner. So it
may lag behind, and some of its keys and values may be missing: it does not compute the last draft of a row that ends
when all are accepted, and another request may continue from that row's pages.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tgi.hub.model_config import read_model_config
from tgi.hub.tokenizer_files import read_tokenizer
from tgi.microkernel.errors import UserError
from tgi.microkernel.messages.protocol import Step
from tgi.worker.attention.interface import AttentionBackend, CapturableBackend, ForwardBatch
from tgi.worker.engine.cuda_graphs import CapturedModel, DecodeGraphs
from tgi.worker.engine.input_batch import BatchBuilder, Slots, StepRows
from tgi.worker.models.decoder import DecoderModel
from tgi.worker.models.draft_head import DraftHead
from tgi.worker.models.interface import Model
from tgi.worker.sampling.noise import Noise
from tgi.worker.sampling.sampler import sample_ids

# A row that decodes without drafts is computed here once in this many tokens, because together they cost less. Slots
# take turns: the steps in which two slots are computed differ.
DRAFT_PREFILL_INTERVAL = 32


class DraftModel(NamedTuple):
    """A draft model and its KV cache, which has as many pages as that of the served model. Both share a tokenizer. Or
    a head that drafts (draft_head_runner.py)."""

    model: Model | DraftHead
    attention: AttentionBackend


def require_same_tokenizer(served: Path, draft: Path) -> None:
    """Raises UserError unless the models in these directories have the same token ids, special tokens aside."""
    configs = [read_model_config(directory, weights=False) for directory in (served, draft)]
    files = [config.tokenizer_json for config in configs]
    if all(files) and len({file.read_bytes() for file in files if file is not None}) == 1:
        return
    one, other = (read_tokenizer(config).get_vocab(with_added_tokens=False) for config in configs)
    if one != other:
        same = len(one.items() & other.items())
        raise UserError(
            f"The model in {draft} cannot draft for the one in {served}: their tokenizers differ ({same} of "
            f"{len(one)} and {len(other)} tokens are the same). Choose a --draft-model-id of the same family."
        )


class DraftRunner:
    """Computes the rows of each step on the draft model, and proposes drafts for the rows that want them."""

    def __init__(self, draft_model: DraftModel, slots: Slots, batch_builder: BatchBuilder, noise: Noise) -> None:
        model, self._attention = draft_model
        self.graphs: DecodeGraphs | None = None  # of this model
        assert not isinstance(model, DraftHead)
        self._model = model
        self._slots = slots
        self._batch_builder = batch_builder
        self._noise = noise
        kernels = self._model.kv.gpu_kernels
        self._gpu_sample = None if kernels is None else kernels.sample
        self._vocab_size = slots.vocab_size
        self._num_computed = np.zeros(len(slots.num_known), np.int64)  # by slot: ids that this model has computed

    def captured_model(self, batch_sizes: Sequence[int], chunk_tokens: int) -> CapturedModel | None:
        """What is captured of this model, of steps of these sizes; None: it cannot be."""
        model, attention = self._model, self._attention
        if model.cuda_graph_obstacle is not None or not isinstance(attention, CapturableBackend):
            return None
        assert isinstance(model, DecoderModel)
        return CapturedModel(model, attention, adapters=False)

    def run(self, step: Step, rows: StepRows) -> None:
        """Computes the rows of a validated step, before the served model does. Writes drafts after the known ids of the
        rows that want them."""
        for new in step.slots:
            self._num_computed[new.slot] = self._slots.width  # unknown until its first row shows the cached prefix
        draft_counts = np.zeros_like(rows.ends) if rows.drafts is None else rows.drafts.counts
        ends = rows.ends - draft_counts
        starts = np.minimum(self._num_computed[rows.slots], rows.starts)
        wanted = draft_counts if rows.drafts is not None and rows.drafts.ids is None else np.zeros_like(draft_counts)
        due = (ends + rows.slots) % DRAFT_PREFILL_INTERVAL == 0
        chosen = np.flatnonzero((wanted > 0) | (ends - rows.starts > 1) | due)
        self._num_computed[rows.slots] = starts
        slots, starts, ends, wanted = rows.slots[chosen], starts[chosen], ends[chosen], wanted[chosen]
        while len(slots):
            sampling = np.flatnonzero(wanted)
            now = StepRows(slots, starts, ends, sampling, ends[sampling])
            replayed = self.graphs and self.graphs.try_replay(now)
            head = replayed or self._model.forward_head(self._build_batch(now), self._attention)
            self._num_computed[slots] = ends
            slots, positions, wanted = slots[sampling], now.sampling_positions, wanted[sampling] - 1
            if len(slots):
                batch = self._batch_builder.build_sampling_batch(slots, positions, None)
                ids = sample_ids(self._fit_vocabulary(head.float32()), batch, self._noise, self._gpu_sample)
                self._batch_builder.write_ids(self._batch_builder.id_indices(slots, positions), ids)
            left = wanted > 0
            slots, starts, ends, wanted = slots[left], positions[left], positions[left] + 1, wanted[left]

    def _build_batch(self, rows: StepRows) -> ForwardBatch:
        """The model's input, without adapters. Ids for which this model has no embedding (padding of the served model's
        vocabulary, never sampled) are clamped."""
        batch = self._batch_builder.build_forward_batch(rows)._replace(lora_spans=())
        if self._model.vocab_size < self._vocab_size:
            batch = batch._replace(tokens=batch.tokens.clamp_(max=self._model.vocab_size - 1))
        return batch

    def _fit_vocabulary(self, logits: Tensor) -> Tensor:
        """Logits [n, vocab] padded with -inf or cut to the width of the served model's: models with the same tokenizer
        may pad their vocabularies differently."""
        return F.pad(logits, (0, self._vocab_size - logits.shape[1]), value=-torch.inf)
