"""Interface between the engine and a model."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tgi.worker.attention.interface import AttentionBackend, ForwardBatch, KVCacheSpec
from tgi.worker.greedy import FindGreedyTokens, GreedyTokens
from tgi.worker.head_logits import HeadLogits


class LogitsReader(Protocol):
    """Receives the logits of tokens that are not sampled (prompt logprobs), block by block to bound the memory."""

    blocks: Sequence[Tensor]  # int64 [n] each: indices into the tokens of the batch

    def read_logits(self, logits: Tensor) -> None:
        """Receives the raw logits float32 [n, vocab_size] of the next block."""


class PreparedDecode(NamedTuple):
    """A greedy decode step with all arguments bound: `calls` compute it again for the current contents of `batch`."""

    batch: ForwardBatch
    calls: tuple[Callable[[], object], ...]  # to be called in order
    greedy: GreedyTokens  # the calls overwrite these tensors with their result


class WeightFootprint(NamedTuple):
    """Size of a model's weight matrices."""

    bytes: int
    numbers: int  # count of parameters, as in the unquantized model


class Model(Protocol):
    """A causal language model over a paged KV cache."""

    vocab_size: int
    context_length: int  # maximal tokens of a sequence
    kv: KVCacheSpec
    footprint: WeightFootprint
    device: torch.device
    cuda_graph_obstacle: str | None  # why forward passes cannot be captured as CUDA graphs; None: they can
    find_greedy_tokens: FindGreedyTokens  # with the bits of forward_greedy

    def forward(self, batch: ForwardBatch, attention: AttentionBackend, reader: LogitsReader | None = None) -> Tensor:
        """Raw logits float32 [D, vocab_size] at batch.logits_indices. `reader` receives the logits of its blocks."""

    def forward_head(
        self, batch: ForwardBatch, attention: AttentionBackend, reader: LogitsReader | None = None
    ) -> HeadLogits:
        """The logits of `forward`. With our GPU kernels, which read any type, they stay in the model's dtype."""

    def forward_greedy(
        self, batch: ForwardBatch, attention: AttentionBackend, reader: LogitsReader | None = None
    ) -> GreedyTokens:
        """The greedy tokens of `forward`, bit for bit, possibly without materializing all logits."""

    def prepare_decode(self, batch: ForwardBatch, attention: AttentionBackend) -> PreparedDecode | None:
        """Prepares repeated greedy steps of these rows, one token each, for contexts that fit the page table's width.

        None if that would not be faster than `forward_greedy`.
        """

    def load_adapter(self, directory: Path) -> Any:
        """Loads the LoRA adapter of a directory for this model. Raises UserError if it is missing or does not fit."""
