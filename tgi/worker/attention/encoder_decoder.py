"""Attention of a decoder to itself and to an encoder's result, over one paged KV cache, with torch's kernels.

At the positions of a prompt that the encoder computes, the pages hold keys and values for cross-attention; from the
decoder's first position on, those of self-attention. Both have the same shape, so a request needs pages as any other.

Each query is computed alone, over exactly the keys that it sees. So its bits depend on nothing but its own sequence:
they are the same in any batch and in any chunk.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tgi.worker.attention.interface import ForwardBatch, KVCacheSpec
from tgi.worker.state_cache import StateCache


class SeenSlots(NamedTuple):
    """What one query sees, as indices of keys and values in a cache."""

    encoded: Tensor  # int64 [n]
    own: Tensor  # int64 [m], its own included
    bias: Tensor  # [1, heads, 1, m], of the scores of `own`


class EncoderDecoderPlan(NamedTuple):
    """The tokens of a step, as indices into its T tokens, and where their keys and values are stored."""

    encoder_tokens: Tensor  # int64 [n]
    decoder_tokens: Tensor  # int64 [N]
    slot_mapping: Tensor  # int64 [T]
    seen: list[SeenSlots]  # of each token of the decoder


class EncoderDecoderAttention:
    """Implements AttentionBackend for a KVCacheSpec with a `position_bias`. Steps have ForwardBatch.encoder.

    A cache is [2, slots, heads, head_dim].
    """

    state: StateCache | None = None

    def __init__(self, kv: KVCacheSpec, pages: int, page_size: int, device: torch.device) -> None:
        assert kv.position_bias is not None
        self.page_size = page_size
        self._heads = kv.heads
        self._pages = pages
        self._bias = kv.position_bias
        shape = 2, pages * page_size, kv.heads, kv.head_dim
        # Slots are written before they are read.
        self._caches = [torch.empty(shape, dtype=kv.dtype, device=device) for _ in range(kv.layers)]

    @property
    def page_memory(self) -> list[Tensor]:
        return [cache.view(2, self._pages, -1).transpose(0, 1) for cache in self._caches]

    def plan(self, batch: ForwardBatch) -> EncoderDecoderPlan:
        assert batch.encoder is not None
        device, begin = batch.tokens.device, 0
        encoder: list[int] = []
        decoder: list[int] = []
        seen: list[SeenSlots] = []
        offsets = torch.arange(self.page_size, device=device)
        for row, (count, end) in enumerate(zip(batch.query_lens_host, batch.context_lens_host, strict=True)):
            length, start = batch.encoder.lengths[row], end - count
            parted = min(max(length - start, 0), count)
            encoder += range(begin, begin + parted)
            decoder += range(begin + parted, begin + count)
            begin += count
            pages = batch.page_table[0, row, : -(-end // self.page_size), None].long()
            slots = (pages * self.page_size + offsets).view(-1)
            for at in range(start + parted, end):
                own = slots[length : at + 1]
                # Copied: kernels for GPUs need an aligned address.
                bias = self._bias[None, :, None, self._bias.shape[1] - len(own) :].contiguous()
                seen.append(SeenSlots(slots[:length], own, bias))
        first, second = (torch.tensor(part, dtype=torch.int64, device=device) for part in (encoder, decoder))
        return EncoderDecoderPlan(first, second, batch.slot_mapping[0], seen)

    def write_encoded(self, plan: EncoderDecoderPlan, layer: int, pairs: Tensor) -> None:
        """Stores keys and values [n, 2 * heads, head_dim] of the step's tokens of the encoder."""
        self._write(layer, plan.slot_mapping[plan.encoder_tokens], pairs)

    def write_and_attend(self, plan: EncoderDecoderPlan, layer: int, qkv: Tensor, scale: float) -> Tensor:
        """See AttentionBackend: self-attention of the N tokens of the decoder."""
        self._write(layer, plan.slot_mapping[plan.decoder_tokens], qkv[:, self._heads :])
        slots, biases = [seen.own for seen in plan.seen], [seen.bias for seen in plan.seen]
        return self._attend(layer, qkv[:, : self._heads], slots, biases, scale)

    def attend_encoded(self, plan: EncoderDecoderPlan, layer: int, query: Tensor, scale: float) -> Tensor:
        """Cross-attention of queries [N, heads, head_dim] to the encoder's result: as many results."""
        return self._attend(layer, query, [seen.encoded for seen in plan.seen], [None] * len(plan.seen), scale)

    def _write(self, layer: int, slots: Tensor, pairs: Tensor) -> None:
        for part, cache in zip(pairs.split(self._heads, dim=1), self._caches[layer], strict=True):
            cache.index_copy_(0, slots, part)

    def _attend(
        self, layer: int, queries: Tensor, slots: list[Tensor], biases: Sequence[Tensor | None], scale: float
    ) -> Tensor:
        result = torch.zeros_like(queries, memory_format=torch.contiguous_format)
        for at, (chosen, bias) in enumerate(zip(slots, biases, strict=True)):
            if not len(chosen):  # of an input without ids, as in warm-up
                continue
            keys, values = self._caches[layer].index_select(1, chosen).transpose(1, 2)[:, None]
            query = queries[at, None, :, None]
            result[at] = F.scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=scale)[0, :, 0]
        return result
