"""Attention on the CPU kernels: correct, and the same bits for every chunking, batch and number of threads."""

import copy
import math
import mmap
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.cases import each_case
from tests.worker.cpu_kernels.available import EMULATED, VARIANTS, load_variant
from tests.worker.test_attention import CPU, Sequence, draw_sinks, expected, run, split
from tgi.worker.attention import build_attention, page_bytes, page_size
from tgi.worker.attention.cpu_kernels import CpuKernelAttention
from tgi.worker.attention.interface import KVCacheSpec
from tgi.worker.cpu_kernels.arena import LARGE_PAGE
from tgi.worker.cpu_kernels.kernels import PAGE_SIZE

pytestmark = pytest.mark.slow

BEST = next(iter(VARIANTS))
# Positions of the sequences of a case: several parts of the sums (PART_SIZE in attention.cpp).
FEW, MANY = (530, 80, 60), (1060, 300, 150)
# By the type of queries, keys, values and results.
CLOSE = {
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
    torch.float16: {"rtol": 3e-3, "atol": 3e-3},
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
}


def shape(
    heads: int,
    kv_heads: int,
    head_dim: int,
    variant: str = BEST,
    window: int | None = None,
    cap: float | None = None,
    threads: int = 1,
    value_dim: int | None = None,
) -> KVCacheSpec:
    kernels = load_variant(variant, threads)
    sizes = heads, kv_heads, head_dim
    return KVCacheSpec(2, *sizes, kernels.dtype, (None, window), cap, kernels, value_dim=value_dim)


class Case(NamedTuple):
    """The sizes of a model, some sequences, and the expected attention of each layer for each of them."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    cap: float | None
    sinks: tuple[Tensor, ...]
    value_dim: int | None
    sequences: tuple[Sequence, ...]
    right: list[list[Tensor]]

    def sequences_in(self, dtype: torch.dtype) -> list[Sequence]:
        """The sequences in this type, which represents their bfloat16 numbers exactly."""
        copies = [copy.copy(one) for one in self.sequences]
        for one in copies:
            one.query, one.key, one.value = (column.to(dtype) for column in (one.query, one.key, one.value))
        return copies


@pytest.fixture(
    scope="module",
    params=[
        # A window in the second layer takes the emulator half of the time that full attention in both takes it.
        (2, 2, 32, 40, None, True, None) if EMULATED else (4, 4, 32, None, None, False, None),
        (3 if EMULATED else 9, 1 if EMULATED else 3, 64, 40, None, True, None),
        (2 if EMULATED else 8, 2, 128, 64, 0.5, False, None),
        (40, 1, 32, 700, None, True, None),
        (2 if EMULATED else 4, 1 if EMULATED else 2, 256, 513, 30.0, True, None),
        # Values are parts of keys: of sizes that are no multiples of 32, and of the largest.
        (2 if EMULATED else 20, 1, 72, 40, None, False, 44),
        (2 if EMULATED else 10, 1, 64 if EMULATED else 576, 400, None, True, 32 if EMULATED else 512),
    ],
    ids=str,
)
def case(request: pytest.FixtureRequest) -> Case:
    """Cached, since float64 takes far longer than the kernels; all variants are compared with it."""
    heads, kv_heads, head_dim, window, cap, with_sinks, value_dim = request.param
    sinks = draw_sinks(heads) if with_sinks else ()
    sizes = heads, kv_heads, head_dim
    kv = KVCacheSpec(2, *sizes, torch.bfloat16, (None, window), cap, sinks=sinks, value_dim=value_dim)
    # Cases without a window and with long ones have the most parts; keys of 576 numbers cost as much as all others.
    most, other, short = FEW if EMULATED or head_dim > 256 or (window is not None and window < 100) else MANY
    if EMULATED and (kv_heads, head_dim) == (2, 32):  # the case of test_neon.py, where threads have parts of the sums
        most = 200
    sequences = Sequence(most, kv, 0), Sequence(short, kv, 1, seed=1), Sequence(other, kv, 2, seed=2)
    if head_dim > 256:  # scores of the size that those of the other cases have, whose rounding the results show
        for one in sequences:
            one.query = one.query / 4
    layers = [(0.3, sees, cap, kv.layer_sinks(layer)) for layer, sees in enumerate(kv.sliding_windows)]
    right = [[expected(one, *options) for one in sequences] for options in layers]
    return Case(*sizes, window, cap, sinks, value_dim, sequences, right)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_token_is_correct_and_the_same_in_any_chunk_and_batch(variant: str, case: Case) -> None:
    kv = shape(case.heads, case.kv_heads, case.head_dim, variant, case.window, case.cap, threads=2)
    kv = kv._replace(sinks=case.sinks, value_dim=case.value_dim)
    long, short, other = case.sequences_in(kv.dtype)
    end, short_end, other_end = (len(one.query) for one in (long, short, other))
    for layer, right in enumerate(case.right):
        attention = build_attention(kv, 300, CPU)
        assert isinstance(attention, CpuKernelAttention)
        whole = [run(attention, (one, 0, len(one.query)), layer=layer)[0] for one in (long, short, other)]
        for found, wanted in zip(whole, right, strict=True):
            torch.testing.assert_close(found.double(), wanted, **CLOSE[kv.dtype])
        again = build_attention(kv, 300, CPU)
        half = end // 2 - 30
        for start, stop in ((0, 7), (7, half), (half, half + 1), (half + 1, end - 10), (end - 10, end - 1)):
            assert torch.equal(run(again, (long, start, stop), layer=layer)[0], whole[0][start:stop])
        run(again, (short, 0, 33), (other, 0, other_end - 20), layer=layer)
        last, rest, few = (long, end - 1, end), (short, 33, short_end), (other, other_end - 20, other_end)
        decode, chunk, few_found = run(again, last, rest, few, layer=layer)
        assert torch.equal(decode, whole[0][end - 1 :])
        assert torch.equal(chunk, whole[1][33:])
        assert torch.equal(few_found, whole[2][other_end - 20 :])
        one, two = run(again, (long, half + 80, half + 81), (short, short_end - 1, short_end), layer=layer)
        assert torch.equal(one, whole[0][half + 80 : half + 81])
        assert torch.equal(two, whole[1][short_end - 1 :])


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    """More positions than a part of the sums has (PART_SIZE in attention.cpp)."""
    heads = 2 if EMULATED else 6
    sequence = Sequence(530, shape(heads, 1, 64), 0)
    one, four = (build_attention(shape(heads, 1, 64, threads=threads), 200, CPU) for threads in (1, 4))
    assert torch.equal(split(four, sequence, [529, 1]), split(one, sequence, [530]))


@each_case("value_dim", [None, 20])
@each_case("variant", VARIANTS)
def test_an_overflow_does_not_reach_the_next_owner_of_a_page(variant: str, value_dim: int | None) -> None:
    kv = shape(4, 2, 32, variant, value_dim=value_dim)
    attention = build_attention(kv, 100, CPU)
    broken = Sequence(96, kv, 0)
    broken.key.fill_(math.inf)
    broken.value.fill_(math.nan)
    run(attention, (broken, 0, 96))
    sequence = Sequence(35, kv, 0)
    (found,) = run(attention, (sequence, 0, 35))
    torch.testing.assert_close(found.double(), expected(sequence), **CLOSE[kv.dtype])


@each_case("value_dim", [None, 36])
@each_case("stored", [torch.bfloat16, torch.int8])
@each_case("element", ["bfloat16", "float32"])
def test_a_cache_of_another_type_is_close_and_the_same_in_any_chunk(
    element: str, stored: torch.dtype, value_dim: int | None
) -> None:
    """Of a page in bfloat16 half the bytes of float32; in int8 a byte for each number, and a scale for each key and
    value that is stored."""
    variant = next(name for name, one in VARIANTS.items() if one.element == element)
    plain = shape(8, 2, 40, variant, value_dim=value_dim)
    kv = plain._replace(stored_dtype=stored)
    row = 64 + 4 if stored is torch.int8 else 2 * 64  # of 40 numbers, padded
    assert page_bytes(kv, CPU) == 2 * (2 if value_dim is None else 1) * 2 * row * PAGE_SIZE
    sequence = Sequence(700, plain, 0)
    attention, again = build_attention(kv, 200, CPU), build_attention(kv, 200, CPU)
    whole = split(attention, sequence, [700])
    torch.testing.assert_close(whole.double(), expected(sequence), rtol=5e-2, atol=5e-2)
    assert torch.equal(split(again, sequence, [33, 1, 500, 1]), whole)
    if stored is kv.dtype:
        assert torch.equal(split(build_attention(plain, 200, CPU), sequence, [700]), whole)


def test_a_page_takes_the_declared_bytes() -> None:
    kv = shape(4, 2, 64)
    assert page_size(kv, CPU) == PAGE_SIZE
    assert page_bytes(kv, CPU) == 2 * 2 * 2 * 64 * kv.dtype.itemsize * PAGE_SIZE


def test_pre_faulting_maps_memory_ahead_and_keeps_pages_in_use() -> None:
    kv = shape(2, 1, 64)
    attention = CpuKernelAttention(kv, 2000, kv.cpu_kernels)  # 8 KB a page and layer: 256 pages are a large one
    used = [cache[:300] for cache in attention._cache]
    for pages in used:
        pages.fill_(1.0)
    before = resident()
    calls = 0
    while attention.prefault_pages(300, 600):
        calls += 1
    assert calls == 2 * 2  # pages 512 to 1024 of two layers; those up to 512 came with the ones in use
    assert resident() - before >= 4 * LARGE_PAGE
    assert all(bool((pages == 1.0).all()) for pages in used)
    assert all(not cache[300:].any() for cache in attention._cache)
    # Further pages have been used meanwhile, up to the last one.
    assert attention.prefault_pages(1025, 600)
    while attention.prefault_pages(1025, 10_000):
        pass
    assert not attention.prefault_pages(2000, 600)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
