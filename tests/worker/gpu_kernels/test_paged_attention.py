"""paged_attention and rotate_and_write_kv in Triton's interpreter, compared with torch."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.cases import each_case
from tests.worker.batches import Row, make_batch
from tgi.worker.attention.cuda import CudaAttention, PagedCache, to_cache_dtype
from tgi.worker.attention.interface import ImageBlocks, KVCacheSpec
from tgi.worker.gpu_kernels import paged_attention as module
from tgi.worker.gpu_kernels.attention_arguments import Rows
from tgi.worker.gpu_kernels.kernels import GpuKernels
from tgi.worker.gpu_kernels.paged_attention import Tile, latent_heads, latent_tile, splits_for, tile_for
from tgi.worker.gpu_kernels.self_test import random_tensor

CPU = torch.device("cpu")
GPU, OLDER = GpuKernels((9, 0)), GpuKernels((8, 0))
HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
PAGE, SCALE = 16, 0.2
SINKS = (3 * random_tensor(CPU, 4, seed=4),)
CHUNKED, SLOPES = frozenset({0}), torch.tensor([0.5, 0.25, 0.0625, 1.0])
# Relative to the largest number of the result.
TOLERANCE = {HALF: 2**-10, BRAIN: 2**-7, SINGLE: 1e-6}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered"),
]


class Case:
    """Rows with these numbers of queries and context lengths, on pages in any order, in a cache whose other slots are
    NaN."""

    def __init__(self, kv: KVCacheSpec, rows: Sequence[tuple[int, int]]) -> None:
        contexts = [length for _, length in rows]
        pages = [-(-length // PAGE) for length in contexts]
        order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(3)).tolist()
        begins = [sum(pages[:row]) for row in range(len(pages))]
        tables = [order[begin : begin + count] for begin, count in zip(begins, pages, strict=True)]
        self.counts = [count for count, _ in rows]
        self.kv = kv
        self.batch = make_batch(
            [Row([0] * n, length - n, own) for (n, length), own in zip(rows, tables, strict=True)], PAGE
        )
        self.cache = PagedCache(kv, sum(pages) + 1, PAGE, CPU)
        self.query = random_tensor(CPU, sum(self.counts), kv.heads, kv.head_dim, dtype=kv.dtype)
        shape = kv.kv_heads, kv.head_dim
        self.keys, self.values = (
            [to_cache_dtype(random_tensor(CPU, n, *shape, dtype=kv.dtype, seed=seed), kv.cache_dtype) for n in contexts]
            for seed in (1, 2)
        )
        for there, given in ((self.cache.keys, self.keys), (self.cache.values, self.values)):
            there.fill_(math.nan)
            for own, known, count in zip(tables, given, self.counts, strict=True):
                first = max(0, kv.reach(0).first_seen(len(known) - count))  # others are given back
                at = torch.tensor([own[n // PAGE] * PAGE + n % PAGE for n in range(first, len(known))])
                there.view(torch.uint8).flatten(0, 1)[at] = known[first:].view(torch.uint8)

    def found(self, gpu: GpuKernels = GPU, splits: int | None = None, tile: Tile | None = None) -> Tensor:
        kv, batch, longest = self.kv, self.batch, max(self.counts)
        counters, out = gpu.split_counters(CPU), torch.full_like(self.query, math.nan)
        rows = Rows(
            *(0, len(self.query), longest, batch.cu_query_lens if longest > 1 else None),
            *(batch.page_table[0], batch.context_lens),
        )
        gpu.paged_attention(
            *(self.query, self.cache.keys, self.cache.values, rows, out, SCALE, kv.sliding_window(0), kv.softcap),
            sinks=kv.layer_sinks(0),
            chunked=0 in kv.chunked,
            slopes=kv.slopes,
            counters=counters,
            splits=splits,
            tile=tile,
        )
        assert not counters.any()
        return out

    def expected(self) -> Tensor:
        """In float64."""
        kv, found = self.kv, []
        for mine, key, value in zip(self.query.double().split(self.counts), self.keys, self.values, strict=True):
            scores = torch.einsum("thgd,khd->thgk", mine.unflatten(1, (kv.kv_heads, -1)), key.double()) * SCALE
            if kv.softcap is not None:
                scores = kv.softcap * torch.tanh(scores / kv.softcap)
            own = torch.arange(len(key) - len(mine), len(key))[:, None, None, None]
            at = torch.arange(len(key))
            hidden = kv.reach(0).masked(at, own)
            if kv.slopes is not None:
                scores = scores - kv.slopes.double().view(kv.kv_heads, -1, 1) * (own - at)
            scores = scores.masked_fill(hidden, -math.inf)
            if kv.sinks:  # a key whose value is 0
                sinks = kv.sinks[0].double().view(kv.kv_heads, -1, 1).expand(len(mine), -1, -1, -1)
                scores = torch.cat((scores, sinks), -1)
            weights = scores.softmax(-1)[..., : len(key)]
            found.append(torch.einsum("thgk,khd->thgd", weights, value.double()).flatten(1, 2))
        return torch.cat(found)


def near(found: Tensor, expected: Tensor) -> None:
    off = (found.double() - expected.double()).abs().max() / expected.abs().max()
    assert off <= TOLERANCE[found.dtype], float(off)


def ones(*contexts: int) -> list[tuple[int, int]]:
    """Decode rows."""
    return [(1, length) for length in contexts]


@pytest.mark.parametrize(
    ("kv", "rows", "splits"),
    [
        (KVCacheSpec(1, 4, 2, 64, SINGLE), ones(1, 15, 16, 17, 64, 65, 257), None),
        (KVCacheSpec(1, 3, 3, 64, BRAIN), ones(1, 16, 300), 2),
        (KVCacheSpec(1, 8, 2, 128, HALF), ones(17, 2500), 8),
        (KVCacheSpec(1, 7, 1, 96, HALF), ones(1, 130), 1),
        (KVCacheSpec(1, 16, 2, 256, BRAIN, softcap=3.0), ones(130), 4),
        (KVCacheSpec(1, 2, 1, 8, SINGLE, (40,), softcap=0.5), ones(1, 40, 41, 300), 4),
        (KVCacheSpec(1, 4, 2, 64, HALF, (1000,)), ones(1000, 3003), 2),
        (KVCacheSpec(1, 20, 1, 32, SINGLE), ones(70), None),
        # Prompts, chunks and drafts.
        (KVCacheSpec(1, 4, 2, 64, SINGLE), [(1, 1), (2, 2), (70, 70), (33, 90)], None),
        (KVCacheSpec(1, 7, 1, 64, HALF), [(40, 40), (9, 100), (1, 30)], None),
        (KVCacheSpec(1, 4, 2, 80, BRAIN, (20,)), [(40, 40), (5, 90)], None),
        (KVCacheSpec(1, 4, 4, 256, SINGLE, softcap=2.0), [(20, 50)], None),
        (KVCacheSpec(1, 4, 1, 64, BRAIN), [(4, 200), (8, 8), (1, 90)], 4),
        (KVCacheSpec(1, 6, 2, 32, SINGLE, (15,)), [(8, 120), (3, 3)], 8),
        (KVCacheSpec(1, 4, 2, 64, HALF, stored_dtype=E5M2), [(20, 40), (1, 17)], None),
        # In chunks, and with ALiBi.
        (KVCacheSpec(1, 4, 2, 64, SINGLE, (50,), chunked=CHUNKED), ones(1, 50, 51, 257), 2),
        (KVCacheSpec(1, 4, 1, 64, BRAIN, (33,), chunked=CHUNKED), [(90, 90), (40, 120), (1, 67)], None),
        (KVCacheSpec(1, 4, 2, 64, SINGLE, slopes=SLOPES), ones(1, 64, 257), 4),
        (KVCacheSpec(1, 4, 4, 32, HALF, softcap=5.0, slopes=SLOPES), [(40, 40), (9, 100), (1, 3)], None),
        (KVCacheSpec(1, 4, 2, 64, HALF, (30,), stored_dtype=E5M2, slopes=SLOPES), [(20, 40), (1, 17)], 2),
        # With sinks.
        (KVCacheSpec(1, 4, 2, 64, SINGLE, sinks=SINKS), ones(1, 64, 257), 4),
        (KVCacheSpec(1, 4, 1, 64, BRAIN, (20,), sinks=SINKS), [(40, 40), (1, 90)], 1),
        (KVCacheSpec(1, 4, 2, 32, SINGLE, softcap=2.0, sinks=SINKS), [(40, 40), (9, 100)], 2),
        (KVCacheSpec(1, 4, 2, 64, HALF, stored_dtype=E5M2, sinks=SINKS), [(20, 40), (1, 17)], None),
    ],
)
def test_paged_attention_is_causal(kv: KVCacheSpec, rows: list[tuple[int, int]], splits: int | None) -> None:
    case = Case(kv, rows)
    near(case.found(splits=splits), case.expected())


@pytest.mark.parametrize("tile", [Tile(16, 16, 1, 1), Tile(32, 128, 1, 1), Tile(128, 32, 1, 1)])
def test_any_tile_gives_the_same_attention(tile: Tile) -> None:
    case = Case(KVCacheSpec(1, 6, 2, 32, SINGLE), [(1, 50), (50, 70), (3, 3)])
    near(case.found(tile=tile, splits=2), case.expected())


@each_case("gpu", [GPU, OLDER])
@each_case("kept", [E4M3, E5M2])
@each_case("dtype", [BRAIN, HALF, SINGLE])
def test_an_8_bit_cache_is_read_exactly(dtype: torch.dtype, kept: torch.dtype, gpu: GpuKernels) -> None:
    case = Case(KVCacheSpec(1, 4, 2, 64, dtype, stored_dtype=kept), ones(130))
    near(case.found(gpu), case.expected())


def test_a_row_is_the_same_in_any_batch_of_the_same_splits() -> None:
    """For any width of the page table and any pages."""
    kv = KVCacheSpec(1, 4, 2, 64, BRAIN)
    case = Case(kv, ones(33, 700, 5))
    together = case.found(splits=4)
    case.batch = case.batch._replace(page_table=torch.nn.functional.pad(case.batch.page_table, (0, 30)))
    assert torch.equal(case.found(splits=4), together)
    batch, query = case.batch, case.query
    for row in range(3):
        part = slice(row, row + 1)
        case.batch = batch._replace(page_table=batch.page_table[:, part], context_lens=batch.context_lens[part])
        case.query, case.counts = query[part], [1]
        assert torch.equal(case.found(splits=4)[0], together[row])


@pytest.mark.parametrize("layer", [0, 1])
def test_decode_rows_before_prompts_have_a_launch_of_their_own(layer: int) -> None:
    """In layers with a window, tokens of an image see it to its end."""
    kv = KVCacheSpec(2, 4, 2, 16, SINGLE, (None, 9))
    known = make_batch([Row(range(30), 0, [3, 1]), Row(range(17), 0, [0, 4])])
    step = make_batch([Row([5], 30, [3, 1]), Row([6], 17, [0, 4]), Row(range(20), 0, [2, 6]), Row([7], 0, [5])])
    last = step.positions.clone()
    last[5:19] = 16
    step = step._replace(blocks=ImageBlocks(last.int(), True))
    found = []
    for gpu in (GPU, None):
        attention = CudaAttention(kv._replace(gpu_kernels=gpu), 8, CPU)
        attention.write_and_attend(attention.plan(known), layer, random_tensor(CPU, 47, 8, 16), 0.2)
        plan = attention.plan(step)
        if gpu is not None:
            assert [(group.first, group.tokens, group.longest) for group in plan.groups[0]] == [(0, 2, 1), (2, 21, 20)]
        found.append(attention.write_and_attend(plan, layer, random_tensor(CPU, 23, 8, 16, seed=1), 0.2))
    assert torch.allclose(*found, atol=1e-6)


@each_case("stored", [None, E4M3, E5M2])
@each_case("dtype", [BRAIN, HALF, SINGLE])
def test_written_keys_and_values_match_torchs_conversion(dtype: torch.dtype, stored: torch.dtype | None) -> None:
    """For every 16-bit number of the type, including infinity and NaN."""
    kv = KVCacheSpec(1, 2, 16, 64, dtype, stored_dtype=stored, cache_scales=((0.03, 2.5),))
    all_bits = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    some = all_bits.view(HALF if dtype is HALF else BRAIN).to(dtype)
    if dtype is BRAIN and stored is None:
        some = some.nan_to_num(7.0, math.inf, -math.inf)
    qkv = torch.cat([torch.zeros(32, 2, 64, dtype=dtype), some.view(32, 32, 64)], 1)
    places = torch.randperm(48, generator=torch.Generator().manual_seed(0))[:32]
    ours, torchs = (PagedCache(kv, 3, PAGE, CPU) for _ in range(2))
    GPU.rotate_and_write_kv(qkv, ours.keys, ours.values, places, kv.layer_scales(0))
    torchs.write(qkv, places, kv.layer_scales(0))
    for one, other in ((ours.keys, torchs.keys), (ours.values, torchs.values)):
        assert one.float().isfinite().all() or stored is None
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_few_rows_are_divided_into_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SPLITS", 16)
    assert [splits_for(rows, 8) for rows in (1, 2, 8, 16, 32, 33, 256)] == [16, 16, 4, 2, 1, 1, 1]
    for width, dtype in ((64, BRAIN), (128, HALF), (256, HALF), (128, SINGLE), (512, BRAIN), (512, SINGLE)):
        for queries in (1, 16, 17, 64, 1000):
            tile, smaller = (tile_for(queries, width, dtype, capability) for capability in ((9, 0), (8, 9)))
            assert tile.keys * width * dtype.itemsize <= 32 << 10
            assert tile.queries in (16, 64, 128)
            assert smaller.queries <= tile.queries


def test_heads_of_latent_attention_are_divided_among_programs() -> None:
    """Into more while rows are few; never unevenly, and never into more than half of shared memory has room for."""
    assert [latent_heads(rows, 128, (9, 0)) for rows in (1, 31, 32, 300)] == [16, 16, 64, 64]
    assert [latent_heads(rows, 20, (8, 0)) for rows in (1, 300)] == [10, 20]
    assert latent_heads(1, 128, (9, 0), batch_invariant=True) == 64
    assert latent_heads(300, 128, (8, 9)) == 32
    assert latent_tile(700, BRAIN, (8, 9)).queries == 32
