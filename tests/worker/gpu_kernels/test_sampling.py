"""The sampling kernel in Triton's interpreter, compared with the CPU's sampler: ids exactly, logprobs to 1e-5."""

import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor

from tests.worker.gpu_kernels.count_operations import counted
from tests.worker.test_sampling import bad_words, bias, sampling_batch
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.worker.gpu_kernels import sampling
from tgi.worker.gpu_kernels.kernels import GpuKernels
from tgi.worker.gpu_kernels.self_test import random_tensor
from tgi.worker.head_logits import HeadLogits
from tgi.worker.sampling.noise import Noise
from tgi.worker.sampling.sampler import SampledTokens, sample, sample_head
from tgi.worker.sampling.sampling_batch import SamplingBatch

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
GPU = GpuKernels((9, 0))
VOCAB = 1300


@pytest.fixture(autouse=True)
def many_splits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Three splits, the last one of 276 tokens; candidates in several blocks."""
    monkeypatch.setattr(sampling, "CHUNK", 512)
    monkeypatch.setattr(sampling, "BLOCK", 128)
    monkeypatch.setattr(sampling, "FEW", tl.constexpr(50))
    with np.errstate(all="ignore"):
        yield


def distinct_logits(rows: int, dtype: torch.dtype) -> Tensor:
    """Logits of which no two of a row are equal, even in bfloat16: which ones top-p keeps is not specified.
    The magnitudes are numbers of bfloat16 between 1/8 and 16."""
    positive = torch.arange(0x3E00, 0x4180, dtype=torch.int16).view(torch.bfloat16).float()
    values = torch.cat((positive, -positive))
    generator = torch.Generator().manual_seed(0)
    order = torch.stack([torch.randperm(len(values), generator=generator)[:VOCAB] for _ in range(rows)])
    return values[order].to(dtype)


def batch_of(samplings: Sequence[SamplingParams], position: int = 5) -> SamplingBatch:
    return sampling_batch(samplings, [[3] * (position + row) for row in range(len(samplings))], [2] * len(samplings))


def compare(head: HeadLogits, batch: SamplingBatch, tolerance: float = 1e-5) -> SampledTokens:
    """What the GPU kernels sample, compared with torch on the CPU."""
    expected = sample(head.float32().clone(), batch, Noise(head.values.shape[1], CPU))
    found = sample_head(head, batch, Noise(head.values.shape[1], CPU), gpu_sample=GPU.sample)
    assert found.ids.dtype == torch.int64
    assert found.ids.tolist() == expected.ids.tolist()
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=tolerance, atol=tolerance, equal_nan=True)
    return found


@pytest.mark.parametrize(("dtype", "rows"), [(torch.bfloat16, 9), (torch.float16, 2), (torch.float32, 4)])
def test_every_mixture_of_parameters(dtype: torch.dtype, rows: int) -> None:
    """And each row has the same bits alone."""
    draw = random.Random(7)
    samplings = [SamplingParams(0), SamplingParams(1, True)]
    for seed in range(rows):
        params = {
            "temperature": draw.choice([0.3, 1.0, 1.7]),
            "top_k": draw.choice([0, 0, 1, 20, 500]),
            "top_p": draw.choice([1.0, 1e-4, 0.5, 0.95]),
            "min_p": draw.choice([0.0, 0.0, 0.02]),
        }
        samplings.append(SamplingParams(seed << 40, draw.random() < 0.8, choice=seed % 2, **params))
    head, batch = HeadLogits(distinct_logits(len(samplings), dtype)), batch_of(samplings)
    found = compare(head, batch)
    for row in range(2, len(samplings), 7):
        chosen = np.array([row])
        alone = sample_head(
            head._replace(values=head.values[row : row + 1]), batch.select(chosen), None, gpu_sample=GPU.sample
        )  # type: ignore[arg-type]
        assert torch.equal(alone.ids, found.ids[row : row + 1])
        assert torch.equal(alone.logprobs, found.logprobs[row : row + 1])


LIMITS = [{}, {"top_k": 40}, {"top_p": 0.7}, {"top_k": 300, "top_p": 0.6}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.9}]


@pytest.mark.parametrize(("listed", "few", "chosen"), [(1 << 15, 32, [0, 3]), (16, 0, [1, 2]), (1 << 15, 2048, [1])])
def test_any_distribution(listed: int, few: int, chosen: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens masked by -inf, a whole split of them, far outliers, and one token nearly certain. More tokens
    may lie between two pivots than are listed, or few altogether."""
    monkeypatch.setattr(sampling, "MAX_LISTED", listed)
    monkeypatch.setattr(sampling, "FEW", tl.constexpr(few))
    base = distinct_logits(1, torch.float32)[0]
    masked, split, outlier, certain = (base.clone() for _ in range(4))
    masked[::3], split[500:1030], outlier[40:700], certain[1299] = -torch.inf, -torch.inf, -1e4, 60.0
    for at in chosen:
        logits = (masked, split, outlier, certain)[at]
        compare(
            HeadLogits(logits.repeat(len(LIMITS), 1)), batch_of([SamplingParams(4, True, **some) for some in LIMITS])
        )


def test_equal_tokens() -> None:
    """Greedy rows take the lowest id of the highest logits. Top-k and top-p keep all that tie with the last one."""
    levels = (torch.arange(VOCAB) % 5).float()
    head = HeadLogits(torch.stack([levels, torch.zeros(VOCAB), levels, levels, torch.zeros(VOCAB)]).bfloat16())
    highest = VOCAB // 5
    limits = [{}, {}, {"top_k": 3}, {"top_k": highest + 1}, {"top_p": 0.5}]
    found = sample_head(
        head, batch_of([SamplingParams(0, False, **some) for some in limits]), None, gpu_sample=GPU.sample
    )  # type: ignore[arg-type]
    kept = torch.log_softmax(torch.tensor([4.0] * highest + [3.0] * highest), -1)[0]
    whole = levels.log_softmax(-1)[4]
    assert found.ids[:2].tolist() == [4, 0]
    assert (found.ids[2:4] % 5).tolist() == [4, 4]
    expected = torch.stack([whole, -torch.tensor(VOCAB).log(), -torch.tensor(highest).log(), kept])
    torch.testing.assert_close(found.logprobs[:4], expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.logprobs[4], found.logprobs[1])


@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_extreme_numbers() -> None:
    """Temperatures at both ends, rows without any token or with infinite ones, and rows of a model that has failed: an
    id is always one of the vocabulary."""
    logits = distinct_logits(7, torch.float32)
    logits[2:5] = -torch.inf
    logits[5] = torch.nan
    logits[6, 8] = torch.inf
    samplings = [SamplingParams(3, True, temperature=1e-38), SamplingParams(3, True, temperature=1e30, top_p=0.5)]
    samplings += [SamplingParams(0), SamplingParams(3, True), SamplingParams(3, True, top_p=0.5, top_k=4)]
    samplings += [SamplingParams(3, True, top_p=0.5), SamplingParams(3, True)]
    found = sample_head(HeadLogits(logits), batch_of(samplings), None, gpu_sample=GPU.sample)  # type: ignore[arg-type]
    expected = sample(logits[:2].clone(), batch_of(samplings[:2]), Noise(VOCAB, CPU))
    assert found.ids[:1].tolist() == expected.ids[:1].tolist()
    torch.testing.assert_close(found.logprobs[:2], expected.logprobs, rtol=1e-4, atol=1e-4)
    assert found.ids[2:5].tolist() == [0, 0, 0]
    assert found.logprobs[2:].isnan().all()
    assert (found.ids >= 0).all()
    assert (found.ids < VOCAB).all()


def test_scaled_and_capped_logits_in_rows_of_a_wider_matrix() -> None:
    wide = torch.cat((distinct_logits(6, torch.bfloat16), torch.full((6, 60), 100.0, dtype=torch.bfloat16)), 1)
    samplings = [SamplingParams(8, True, **some) for some in LIMITS]
    for scale, cap in ((0.25, None), (2.0, 30.0)):
        compare(HeadLogits(wide[:, :VOCAB], scale, cap), batch_of(samplings), 5e-5)


def test_rows_that_torch_processes() -> None:
    """Between plain rows, with limits after the penalties and without; with alternatives, and alone."""
    processed = [
        SamplingParams(1, True, repetition_penalty=1.5, top_p=0.8),
        SamplingParams(2, True, top_k=30, **bias({4: 3.0, 9: -100.0})),
        SamplingParams(3, min_p=0.1, **bad_words([5])),
        SamplingParams(0, count_penalty=0.5, presence_penalty=1.0),
    ]
    others = [SamplingParams(5, True, typical_p=0.5), SamplingParams(6, True, top_n=3, top_k=5)]
    plain = [SamplingParams(7, True, top_p=0.9), SamplingParams(0)]
    for chosen in (
        [plain[0], *processed, plain[1]],
        processed[:2],
        [*others, plain[0]],
        [plain[1], others[1], plain[0], others[0], processed[0]],
    ):
        found = compare(HeadLogits(distinct_logits(len(chosen), torch.bfloat16)), batch_of(chosen))
        listing = [row for row, params in enumerate(chosen) if params.top_n]
        assert (found.top_logprobs is None) == (not listing)
        assert found.top_logprobs is None or found.top_logprobs.rows.tolist() == listing


def test_a_vocabulary_of_one_split() -> None:
    compare(HeadLogits(random_tensor(CPU, 6, 70)), batch_of([SamplingParams(4, True, **some) for some in LIMITS]))


def test_plain_rows_take_few_launches() -> None:
    """And no operation of torch, whatever the number of rows."""
    logits, columns = (torch.empty(256, 128256, device="meta"), torch.empty(7, 256, dtype=torch.int32, device="meta"))
    assert counted(lambda: GPU.sample(logits, columns, False)) == {"_measure_splits": 1, "_merge_splits": 1}
    limited = ("_measure_splits", "_measure_pivots", "_merge_splits", "_collect_splits", "_choose")
    assert counted(lambda: GPU.sample(logits, columns, True)) == dict.fromkeys(limited, 1)
