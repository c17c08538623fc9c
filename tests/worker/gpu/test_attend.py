"""Decode attention over pages in place, by our kernels in Triton's interpreter, and by torch."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.worker.batches import Row, make_batch
from tgi.worker.attention import gathered
from tgi.worker.attention.cache import Cache, narrowed
from tgi.worker.batch import Batch, KVShape
from tgi.worker.gpu import attend as module
from tgi.worker.gpu.attend import block_of, stretches_of
from tgi.worker.gpu.kernels import Gpu
from tgi.worker.gpu.trial import numbers

CPU = torch.device("cpu")
GPU, OLDER = Gpu((9, 0)), Gpu((8, 0))
HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
PAGE, SCALE = 16, 0.2
# Of the largest number that is found.
TOLERANCE = {HALF: 2**-10, BRAIN: 2**-7, SINGLE: 1e-6}

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")


class Case:
    """Rows of these contexts, on pages in any order, in a cache whose other places hold what is no number."""

    def __init__(self, kv: KVShape, contexts: Sequence[int]) -> None:
        pages = [-(-length // PAGE) for length in contexts]
        order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(3)).tolist()
        begins = [sum(pages[:row]) for row in range(len(pages))]
        rows = [
            Row([0], length - 1, order[begin : begin + count])
            for length, begin, count in zip(contexts, begins, pages, strict=True)
        ]
        self.kv, self.batch = kv, make_batch(rows, PAGE)
        self.cache = Cache(kv, 0, sum(pages) + 1, PAGE, CPU)
        self.qkv = numbers(CPU, len(rows), kv.heads + 2 * kv.kv_heads, kv.head_dim, dtype=kv.dtype)
        self.keys, self.values = (
            [narrowed(numbers(CPU, n, kv.kv_heads, kv.head_dim, dtype=kv.dtype, seed=seed), kv.kept) for n in contexts]
            for seed in (1, 2)
        )
        for there, given in ((self.cache.keys, self.keys), (self.cache.values, self.values)):
            there.fill_(math.nan)
            for row, known in zip(rows, given, strict=True):
                at = torch.tensor([row.pages[n // PAGE] * PAGE + n % PAGE for n in range(len(known))])
                there.view(torch.uint8).flatten(0, 1)[at] = known.view(torch.uint8)

    def found(self, gpu: Gpu, batch: Batch | None = None, rows: slice = slice(None)) -> Tensor:
        kv, batch = self.kv, batch or self.batch
        rest = batch.page_table[rows], batch.context[rows], SCALE, kv.window(0), kv.softcap
        found: Tensor = gpu.attend(self.qkv[rows], self.cache.keys, self.cache.values, *rest)
        return found

    def expected(self) -> Tensor:
        """In float64."""
        kv, found = self.kv, []
        for qkv, key, value in zip(self.qkv, self.keys, self.values, strict=True):
            query = qkv[: kv.heads].double().unflatten(0, (kv.kv_heads, -1))
            scores = torch.einsum("hgd,khd->hgk", query, key.double()) * SCALE
            if kv.softcap is not None:
                scores = kv.softcap * torch.tanh(scores / kv.softcap)
            scores[..., : max(0, len(key) - (kv.window(0) or len(key)))] = -math.inf
            found.append(torch.einsum("hgk,khd->hgd", scores.softmax(-1), value.double()).flatten(0, 1))
        return torch.stack(found)


def near(found: Tensor, expected: Tensor) -> None:
    off = (found.double() - expected.double()).abs().max() / expected.abs().max()
    assert off <= TOLERANCE[found.dtype], float(off)


@pytest.mark.parametrize(
    ("kv", "contexts"),
    [
        (KVShape(1, 4, 2, 64, SINGLE), (1, 15, 16, 17, 64, 65, 257)),
        (KVShape(1, 3, 3, 64, BRAIN), (1, 16, 300)),
        (KVShape(1, 8, 2, 128, HALF), (17, 2500)),
        (KVShape(1, 7, 1, 96, HALF), (1, 130)),
        (KVShape(1, 16, 2, 256, BRAIN, softcap=3.0), (130,)),
        (KVShape(1, 2, 1, 8, SINGLE, (40,), softcap=0.5), (1, 40, 41, 300)),
        (KVShape(1, 4, 2, 64, HALF, (1000,)), (1000, 3003)),
        (KVShape(1, 20, 1, 32, SINGLE), (70,)),
    ],
)
def test_it_is_causal_attention(kv: KVShape, contexts: Sequence[int]) -> None:
    case = Case(kv, contexts)
    near(case.found(GPU), case.expected())


@pytest.mark.parametrize("gpu", [GPU, OLDER])
@pytest.mark.parametrize("kept", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", [BRAIN, HALF, SINGLE])
def test_a_cache_of_8_bits_is_read_exactly(dtype: torch.dtype, kept: torch.dtype, gpu: Gpu) -> None:
    case = Case(KVShape(1, 4, 2, 64, dtype, stored=kept), (130,))
    near(case.found(gpu), case.expected())


def test_a_row_is_the_same_in_any_batch() -> None:
    """And however wide the table is, or where its pages lie."""
    case = Case(KVShape(1, 4, 2, 64, BRAIN), (33, 700, 5))
    together = case.found(GPU)
    for row in range(3):
        assert torch.equal(case.found(GPU, rows=slice(row, row + 1))[0], together[row])
    wide = torch.nn.functional.pad(case.batch.page_table, (0, 30))
    assert torch.equal(case.found(GPU, case.batch._replace(page_table=wide)), together)


@pytest.mark.parametrize("dtype", [SINGLE, BRAIN])
@pytest.mark.parametrize(("window", "cap"), [(None, None), (50, 2.0)])
def test_it_is_what_torch_computes_of_copies(dtype: torch.dtype, window: int | None, cap: float | None) -> None:
    kv = KVShape(1, 4, 2, 64, dtype, (window,), cap)
    case = Case(kv, (1, 40, 150))
    case.cache.keys.nan_to_num_()
    case.cache.values.nan_to_num_()
    query = case.qkv[:, :4].contiguous()
    near(case.found(GPU), gathered.attend(gathered.plan(case.batch, kv, PAGE), query, case.cache, SCALE, window, cap))


@pytest.mark.parametrize("stored", [None, E4M3, E5M2])
@pytest.mark.parametrize("dtype", [BRAIN, HALF, SINGLE])
def test_what_is_kept_has_the_bits_that_torch_gives_it(dtype: torch.dtype, stored: torch.dtype | None) -> None:
    """Of every number of 16 bits that the type has, of every sign, size and fraction, and of what is none."""
    kv = KVShape(1, 2, 16, 64, dtype, stored=stored, scales=((0.03, 2.5),))
    all_bits = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    some = all_bits.view(HALF if dtype is HALF else BRAIN).to(dtype)
    if dtype is BRAIN and stored is None:
        some = some.nan_to_num(7.0, math.inf, -math.inf)
    qkv = torch.cat([torch.zeros(32, 2, 64, dtype=dtype), some.view(32, 32, 64)], 1)
    places = torch.randperm(48, generator=torch.Generator().manual_seed(0))[:32]
    ours, torchs = (Cache(kv._replace(gpu=gpu), 0, 3, PAGE, CPU) for gpu in (GPU, None))
    for cache in (ours, torchs):
        cache.write(qkv, places)
    for one, other in ((ours.keys, torchs.keys), (ours.values, torchs.values)):
        assert one.float().isfinite().all() or stored is None
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_a_context_is_divided_by_its_length_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert [stretches_of(kv_heads) for kv_heads in (1, 2, 3, 8, 32)] == [module.MOST_STRETCHES] * 5
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MOST_STRETCHES", 64)
        assert [stretches_of(kv_heads) for kv_heads in (1, 2, 3, 8, 32)] == [64, 64, 32, 16, 16]
    sizes = [(64, BRAIN), (128, HALF), (256, HALF), (128, SINGLE), (512, SINGLE)]
    assert [block_of(width, dtype) for width, dtype in sizes] == [64, 64, 32, 32, 16]
