"""The sampler: from the model's logits to the next token of each row, its logprob, and the top-n alternatives.

The logits processors (logits_processors.py) come first. Then greedy rows take the argmax, and the others sample by the
Gumbel-max trick. The result of a row has the same bits in any batch: each operation works row by row (a plain `sum`
does not: torch divides a single row among threads), and the noise depends on the request alone (noise.py).
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgi.worker.device_copies import copy_to_device
from tgi.worker.greedy import FindGreedyTokens, argmax, find_greedy_tokens
from tgi.worker.head_logits import HeadLogits, VocabularyShard
from tgi.worker.sampling.logits_processors import (
    PENALTIES_AND_MASKS,
    apply_logits_processors,
    select_rows,
    write_rows,
)
from tgi.worker.sampling.noise import Noise, noise_keys
from tgi.worker.sampling.sampling_batch import SamplingBatch, has_limits, pack_columns
from tgi.worker.sampling.top_logprobs import TopLogprobs, find_top_logprobs

# GpuKernels.sample.
SampleRows = Callable[[Tensor, Tensor, bool, float, float | None, VocabularyShard | None], tuple[Tensor, Tensor]]


class SampledTokens(NamedTuple):
    """The next tokens of D rows."""

    ids: Tensor  # int64 [D]
    logprobs: Tensor  # float32 [D]
    top_logprobs: TopLogprobs | None  # None if no row asks for alternatives


def sample_head(
    head: HeadLogits,
    batch: SamplingBatch,
    noise: Noise,
    find_greedy: FindGreedyTokens = find_greedy_tokens,
    gpu_sample: SampleRows | None = None,
) -> SampledTokens:
    """Samples from the model's logits of D rows, which may be overwritten.

    Our GPU kernels, where given, sample plain rows from the logits as they are. The other rows are copied for torch,
    which applies penalties and masks; from there on our kernels sample these rows too, unless a row has typical-p or
    XTC, or asks for alternatives. Where ranks divide the vocabulary, they exchange all logits, unless all rows are
    plain and without limits: then only the maxima of splits.
    """
    if gpu_sample is None:
        return sample(head.float32(), batch, noise, find_greedy)
    plain = batch.params.plain.all()
    if head.shard is not None and (not plain or has_limits(batch.params, head.shard.vocab)):
        head = head.joined()
    if plain:
        return SampledTokens(*_sample_plain(head, batch, gpu_sample), None)
    rows = np.flatnonzero(~batch.params.plain)
    if len(rows) == len(batch.positions):
        return _sample_processed(head.float32(), batch, noise, gpu_sample)
    ids, logprobs = _sample_plain(head, batch, gpu_sample)
    chosen = head._replace(values=select_rows(head.values, rows))
    others = _sample_processed(chosen.float32(), batch.select(rows), noise, gpu_sample)
    write_rows(ids, rows, others.ids)
    write_rows(logprobs, rows, others.logprobs)
    top = others.top_logprobs
    return SampledTokens(ids, logprobs, top and top._replace(rows=rows[top.rows]))


def sample(
    logits: Tensor, batch: SamplingBatch, noise: Noise, find_greedy: FindGreedyTokens = find_greedy_tokens
) -> SampledTokens:
    """Samples from the model's logits float32 [D, vocab], which are overwritten.

    Logprobs, also those of the alternatives, are log_softmax of the processed logits. Only the rows that ask for
    alternatives get all logprobs.
    """
    apply_logits_processors(logits, batch)
    greedy = find_greedy(logits)
    ids = _replace_sampled(greedy.ids, logits, batch, noise)
    logprobs = logits.gather(1, ids[:, None])[:, 0] - greedy.highest + greedy.logprobs
    asking = np.flatnonzero(batch.params.top_n > 0)
    top_logprobs = None
    if len(asking):
        all_logprobs = (
            select_rows(logits, asking)
            - select_rows(greedy.highest[:, None], asking)
            + select_rows(greedy.logprobs[:, None], asking)
        )
        top_logprobs = find_top_logprobs(
            all_logprobs, asking, batch.params.top_n[asking], batch.params.listed_ids[asking]
        )
    return SampledTokens(ids, logprobs, top_logprobs)


def sample_ids(logits: Tensor, batch: SamplingBatch, noise: Noise, gpu_sample: SampleRows | None = None) -> Tensor:
    """Samples ids int64 [D] from the model's logits float32 [D, vocab], which are overwritten. Our GPU kernels, where
    given, sample batches of plain rows."""
    if gpu_sample is not None and batch.params.plain.all():
        return _sample_plain(HeadLogits(logits), batch, gpu_sample)[0]
    apply_logits_processors(logits, batch)
    return _replace_sampled(argmax(logits), logits, batch, noise)


def gumbel_argmax(logits: Tensor, row_keys: NDArray[np.int32], noise: Noise) -> Tensor:
    """Samples ids int64 [n] from softmax(logits) as argmax(p / q) with q ~ Exponential(1) (the Gumbel-max trick).

    In logarithms argmax(logit - log q): the denominator of the softmax is the same for a whole row.
    """
    chosen = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    device_keys = copy_to_device(row_keys, logits.device)
    for begin in range(0, logits.shape[0], noise.rows):
        block = slice(begin, begin + noise.rows)
        q = noise.exponentials(device_keys[block])
        chosen[block] = argmax(torch.sub(logits[block], q.log_(), out=q))
    return chosen


def _sample_plain(head: HeadLogits, batch: SamplingBatch, gpu_sample: SampleRows) -> tuple[Tensor, Tensor]:
    """The ids and logprobs of rows that have temperature, top-k, top-p and min-p at most."""
    vocab_size = head.values.shape[1] if head.shard is None else head.shard.vocab
    columns = copy_to_device(pack_columns(batch, vocab_size), head.values.device)
    return gpu_sample(head.values, columns, has_limits(batch.params, vocab_size), head.scale, head.cap, head.shard)


def _sample_processed(logits: Tensor, batch: SamplingBatch, noise: Noise, gpu_sample: SampleRows) -> SampledTokens:
    """Samples from the model's logits float32 [D, vocab], which are overwritten."""
    params = batch.params
    if ((params.typical_p < 1.0) | (params.xtc_probability > 0) | (params.top_n > 0)).any():
        return sample(logits, batch, noise)
    apply_logits_processors(logits, batch, PENALTIES_AND_MASKS)
    return SampledTokens(*_sample_plain(HeadLogits(logits), batch, gpu_sample), None)


def _replace_sampled(greedy_ids: Tensor, logits: Tensor, batch: SamplingBatch, noise: Noise) -> Tensor:
    """The greedy ids [D], with sampled ids in the rows that sample."""
    if not batch.params.samples.any():
        return greedy_ids
    ids, rows = greedy_ids.clone(), np.flatnonzero(batch.params.samples)
    row_keys = noise_keys(batch.params.seed[rows], batch.positions[rows], batch.params.choice[rows])
    write_rows(ids, rows, gumbel_argmax(select_rows(logits, rows), row_keys, noise))
    return ids
