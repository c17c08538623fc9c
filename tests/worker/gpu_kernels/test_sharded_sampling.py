"""The sampling kernel in Triton's interpreter on two ranks that have a part of the vocabulary each, over gloo."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor

from scripts.benchmarks.rank_processes import RankCall, Ranks, rank_group
from tests.worker.gpu_kernels.interpreter_fixes import fix_interpreter
from tests.worker.gpu_kernels.test_sampling import GPU, VOCAB, batch_of, distinct_logits
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.worker.gpu_kernels import sampling
from tgi.worker.head_logits import HeadLogits, VocabularyShard
from tgi.worker.sampling.noise import Noise
from tgi.worker.sampling.sampler import SampledTokens, sample_head

pytestmark = pytest.mark.slow

WIDTHS = [672, VOCAB - 672]
PLAIN = [SamplingParams(0), *(SamplingParams(seed, True, temperature=0.5 + seed / 4) for seed in range(1, 6))]


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with rank_group(2, __name__) as ranks:
        yield ranks


class CountingCommunicator:
    """Counts the numbers that a rank receives."""

    def __init__(self, call: RankCall) -> None:
        self.gloo, self.rank, self.ranks, self.received = call.gloo, call.gloo.rank, 2, 0

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        self.received += len(x) * sum(widths)
        return self.gloo.all_gather(x, widths)


def sampled(call: RankCall, limited: bool, scale: float, cap: float | None) -> tuple[SampledTokens, SampledTokens, int]:
    """What two ranks sample, and what is sampled of the joined logits; the numbers that a rank received. Equal highest
    logits of a greedy row are on both ranks."""
    fix_interpreter()
    sampling.CHUNK, sampling.BLOCK, sampling.FEW = 512, 128, tl.constexpr(50)
    communicator = CountingCommunicator(call)
    shard = VocabularyShard(communicator, WIDTHS)  # type: ignore[arg-type]
    batch = batch_of([*PLAIN, SamplingParams(9, True, top_k=3)] if limited else PLAIN)
    logits = distinct_logits(len(batch.positions), torch.bfloat16)
    logits[0, 900] = logits[0, 40] = 30
    own = logits[:, shard.first : shard.first + WIDTHS[call.gloo.rank]]
    noise = Noise(VOCAB, torch.device("cpu"))
    with np.errstate(all="ignore"):
        found = sample_head(HeadLogits(own, scale, cap, shard), batch, noise, gpu_sample=GPU.sample)
        joined = sample_head(HeadLogits(logits, scale, cap), batch, noise, gpu_sample=GPU.sample)
    return found, joined, communicator.received


@pytest.mark.parametrize(("scale", "cap"), [(1.0, None), (0.5, 20.0)])
def test_plain_rows_exchange_the_maxima_of_splits(scale: float, cap: float | None, two: Ranks) -> None:
    """Their ids are those of the joined logits. Sums of exponentials are added in another order."""
    for found, joined, received in two.call(f"{__name__}.sampled", False, scale, cap):
        assert found.ids.tolist() == joined.ids.tolist()
        assert found.ids[0] == 40
        torch.testing.assert_close(found.logprobs, joined.logprobs, rtol=1e-6, atol=1e-6)
        assert received == 6 * len(PLAIN) * 4  # six numbers of each row's two splits of each rank


def test_with_other_rows_they_exchange_logits(two: Ranks) -> None:
    for found, joined, received in two.call(f"{__name__}.sampled", True, 1.0, None):
        assert torch.equal(found.ids, joined.ids)
        assert torch.equal(found.logprobs, joined.logprobs)
        assert received == (len(PLAIN) + 1) * VOCAB
