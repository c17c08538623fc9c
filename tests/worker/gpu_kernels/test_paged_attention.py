"""paged_attention and write_kv in Triton's interpreter, compared with torch."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.worker.batches import Row, make_batch
from tgi.worker.attention import cuda
from tgi.worker.attention.cuda import LayerKVCache, to_cache_dtype
from tgi.worker.attention.interface import ForwardBatch, KVCacheSpec
from tgi.worker.gpu_kernels import paged_attention as module
from tgi.worker.gpu_kernels.kernels import GpuKernels
from tgi.worker.gpu_kernels.paged_attention import block_size_of, splits_of
from tgi.worker.gpu_kernels.self_test import random_tensor

CPU = torch.device("cpu")
GPU, OLDER = GpuKernels((9, 0)), GpuKernels((8, 0))
HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
PAGE, SCALE = 16, 0.2
# Relative to the largest number of the result.
TOLERANCE = {HALF: 2**-10, BRAIN: 2**-7, SINGLE: 1e-6}

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")


class Case:
    """Rows with these context lengths, on pages in any order, in a cache whose other slots are NaN."""

    def __init__(self, kv: KVCacheSpec, contexts: Sequence[int]) -> None:
        pages = [-(-length // PAGE) for length in contexts]
        order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(3)).tolist()
        begins = [sum(pages[:row]) for row in range(len(pages))]
        rows = [
            Row([0], length - 1, order[begin : begin + count])
            for length, begin, count in zip(contexts, begins, pages, strict=True)
        ]
        self.kv, self.batch = kv, make_batch(rows, PAGE)
        self.cache = LayerKVCache(kv, 0, sum(pages) + 1, PAGE, CPU)
        self.qkv = random_tensor(CPU, len(rows), kv.heads + 2 * kv.kv_heads, kv.head_dim, dtype=kv.dtype)
        shape = kv.kv_heads, kv.head_dim
        self.keys, self.values = (
            [to_cache_dtype(random_tensor(CPU, n, *shape, dtype=kv.dtype, seed=seed), kv.cache_dtype) for n in contexts]
            for seed in (1, 2)
        )
        for there, given in ((self.cache.keys, self.keys), (self.cache.values, self.values)):
            there.fill_(math.nan)
            for row, known in zip(rows, given, strict=True):
                at = torch.tensor([row.pages[n // PAGE] * PAGE + n % PAGE for n in range(len(known))])
                there.view(torch.uint8).flatten(0, 1)[at] = known.view(torch.uint8)

    def found(self, gpu: GpuKernels, batch: ForwardBatch | None = None, rows: slice = slice(None)) -> Tensor:
        kv, batch = self.kv, batch or self.batch
        rest = batch.page_table[rows], batch.context_lens[rows], SCALE, kv.sliding_window(0), kv.softcap
        found: Tensor = gpu.paged_attention(self.qkv[rows], self.cache.keys, self.cache.values, *rest)
        return found

    def expected(self) -> Tensor:
        """In float64."""
        kv, found = self.kv, []
        for qkv, key, value in zip(self.qkv, self.keys, self.values, strict=True):
            query = qkv[: kv.heads].double().unflatten(0, (kv.kv_heads, -1))
            scores = torch.einsum("hgd,khd->hgk", query, key.double()) * SCALE
            if kv.softcap is not None:
                scores = kv.softcap * torch.tanh(scores / kv.softcap)
            scores[..., : max(0, len(key) - (kv.sliding_window(0) or len(key)))] = -math.inf
            found.append(torch.einsum("hgk,khd->hgd", scores.softmax(-1), value.double()).flatten(0, 1))
        return torch.stack(found)


def near(found: Tensor, expected: Tensor) -> None:
    off = (found.double() - expected.double()).abs().max() / expected.abs().max()
    assert off <= TOLERANCE[found.dtype], float(off)


@pytest.mark.parametrize(
    ("kv", "contexts"),
    [
        (KVCacheSpec(1, 4, 2, 64, SINGLE), (1, 15, 16, 17, 64, 65, 257)),
        (KVCacheSpec(1, 3, 3, 64, BRAIN), (1, 16, 300)),
        (KVCacheSpec(1, 8, 2, 128, HALF), (17, 2500)),
        (KVCacheSpec(1, 7, 1, 96, HALF), (1, 130)),
        (KVCacheSpec(1, 16, 2, 256, BRAIN, softcap=3.0), (130,)),
        (KVCacheSpec(1, 2, 1, 8, SINGLE, (40,), softcap=0.5), (1, 40, 41, 300)),
        (KVCacheSpec(1, 4, 2, 64, HALF, (1000,)), (1000, 3003)),
        (KVCacheSpec(1, 20, 1, 32, SINGLE), (70,)),
    ],
)
def test_paged_attention_is_causal(kv: KVCacheSpec, contexts: Sequence[int]) -> None:
    case = Case(kv, contexts)
    near(case.found(GPU), case.expected())


@pytest.mark.parametrize("gpu", [GPU, OLDER])
@pytest.mark.parametrize("kept", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", [BRAIN, HALF, SINGLE])
def test_an_8_bit_cache_is_read_exactly(dtype: torch.dtype, kept: torch.dtype, gpu: GpuKernels) -> None:
    case = Case(KVCacheSpec(1, 4, 2, 64, dtype, stored_dtype=kept), (130,))
    near(case.found(gpu), case.expected())


def test_a_row_is_the_same_in_any_batch() -> None:
    """For any width of the page table and any pages."""
    case = Case(KVCacheSpec(1, 4, 2, 64, BRAIN), (33, 700, 5))
    together = case.found(GPU)
    for row in range(3):
        assert torch.equal(case.found(GPU, rows=slice(row, row + 1))[0], together[row])
    wide = torch.nn.functional.pad(case.batch.page_table, (0, 30))
    assert torch.equal(case.found(GPU, case.batch._replace(page_table=wide)), together)


@pytest.mark.parametrize("dtype", [SINGLE, BRAIN])
@pytest.mark.parametrize(("window", "cap"), [(None, None), (50, 2.0)])
def test_paged_attention_matches_torch_on_gathered_pages(
    dtype: torch.dtype, window: int | None, cap: float | None
) -> None:
    kv = KVCacheSpec(1, 4, 2, 64, dtype, (window,), cap)
    case = Case(kv, (1, 40, 150))
    case.cache.keys.nan_to_num_()
    case.cache.values.nan_to_num_()
    query = case.qkv[:, :4].contiguous()
    near(
        case.found(GPU),
        cuda.attend_padded(cuda.plan_padded_decode(case.batch, kv, PAGE), query, case.cache, SCALE, window, cap),
    )


@pytest.mark.parametrize("stored", [None, E4M3, E5M2])
@pytest.mark.parametrize("dtype", [BRAIN, HALF, SINGLE])
def test_written_keys_and_values_match_torchs_conversion(dtype: torch.dtype, stored: torch.dtype | None) -> None:
    """For every 16-bit number of the type, including infinity and NaN."""
    kv = KVCacheSpec(1, 2, 16, 64, dtype, stored_dtype=stored, cache_scales=((0.03, 2.5),))
    all_bits = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    some = all_bits.view(HALF if dtype is HALF else BRAIN).to(dtype)
    if dtype is BRAIN and stored is None:
        some = some.nan_to_num(7.0, math.inf, -math.inf)
    qkv = torch.cat([torch.zeros(32, 2, 64, dtype=dtype), some.view(32, 32, 64)], 1)
    places = torch.randperm(48, generator=torch.Generator().manual_seed(0))[:32]
    ours, torchs = (LayerKVCache(kv._replace(gpu_kernels=gpu), 0, 3, PAGE, CPU) for gpu in (GPU, None))
    for cache in (ours, torchs):
        cache.write(qkv, places)
    for one, other in ((ours.keys, torchs.keys), (ours.values, torchs.values)):
        assert one.float().isfinite().all() or stored is None
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_the_splits_follow_from_the_context_length_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert [splits_of(kv_heads) for kv_heads in (1, 2, 3, 8, 32)] == [module.MAX_SPLITS] * 5
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_SPLITS", 64)
        assert [splits_of(kv_heads) for kv_heads in (1, 2, 3, 8, 32)] == [64, 64, 32, 16, 16]
    sizes = [(64, BRAIN), (128, HALF), (256, HALF), (128, SINGLE), (512, SINGLE)]
    assert [block_size_of(width, dtype) for width, dtype in sizes] == [64, 64, 32, 32, 16]
