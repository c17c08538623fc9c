"""Attention by our own kernels: right, and the same bits in any chunk, batch and number of threads."""

import math
import mmap
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.worker.ours import library
from tests.worker.test_attention import CPU, Sequence, expected, run, split
from tests.worker.test_native import VARIANTS
from tgi.worker.attention import build_attention, page_bytes, page_size
from tgi.worker.attention.native import NativeAttention
from tgi.worker.batch import KVShape
from tgi.worker.native.arena import LARGE_PAGE
from tgi.worker.native.kernels import PAGE, Kernels

CLOSE = {"rtol": 2e-2, "atol": 2e-2}


def shape(
    heads: int,
    kv_heads: int,
    head_dim: int,
    variant: str = "best",
    window: int | None = None,
    cap: float | None = None,
    threads: int = 1,
) -> KVShape:
    kernels = Kernels(library(*VARIANTS[variant]), threads)
    return KVShape(2, heads, kv_heads, head_dim, torch.bfloat16, (None, window), cap, kernels)


class Case(NamedTuple):
    """Sizes of a model, sequences of it, and of each layer what attention over each of them should be."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    cap: float | None
    sequences: tuple[Sequence, ...]
    right: list[list[Tensor]]


@pytest.fixture(
    scope="module",
    params=[
        (4, 4, 32, None, None),
        (9, 3, 64, 40, None),
        (8, 2, 128, 64, 0.5),
        (40, 1, 32, 700, None),
        (4, 2, 256, 513, 30.0),
    ],
    ids=str,
)
def case(request: pytest.FixtureRequest) -> Case:
    """Float64 takes far longer than the kernels: both variants are held against the same."""
    heads, kv_heads, head_dim, window, cap = request.param
    kv = shape(heads, kv_heads, head_dim, "best", window, cap)
    sequences = Sequence(1100, kv, 0), Sequence(150, kv, 1, seed=1), Sequence(400, kv, 2, seed=2)
    right = [[expected(one, window=sees, cap=cap) for one in sequences] for sees in kv.windows]
    return Case(heads, kv_heads, head_dim, window, cap, sequences, right)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_token_is_right_and_the_same_in_any_chunk_and_batch(variant: str, case: Case) -> None:
    kv = shape(case.heads, case.kv_heads, case.head_dim, variant, case.window, case.cap, threads=2)
    long, short, other = case.sequences
    for layer, right in enumerate(case.right):
        attention = build_attention(kv, 300, CPU)
        assert isinstance(attention, NativeAttention)
        whole = [run(attention, (one, 0, len(one.query)), layer=layer)[0] for one in (long, short, other)]
        for found, wanted in zip(whole, right, strict=True):
            torch.testing.assert_close(found.double(), wanted, **CLOSE)
        again = build_attention(kv, 300, CPU)
        for start, stop in ((0, 7), (7, 520), (520, 521), (521, 1090), (1090, 1099)):
            assert torch.equal(run(again, (long, start, stop), layer=layer)[0], whole[0][start:stop])
        run(again, (short, 0, 33), (other, 0, 380), layer=layer)
        decode, chunk, few = run(again, (long, 1099, 1100), (short, 33, 150), (other, 380, 400), layer=layer)
        assert torch.equal(decode, whole[0][1099:])
        assert torch.equal(chunk, whole[1][33:])
        assert torch.equal(few, whole[2][380:])
        one, two = run(again, (long, 600, 601), (short, 149, 150), layer=layer)
        assert torch.equal(one, whole[0][600:601])
        assert torch.equal(two, whole[1][149:])


def test_threads_change_nothing() -> None:
    sequence = Sequence(600, shape(6, 1, 64), 0)
    one, four = (build_attention(shape(6, 1, 64, threads=threads), 200, CPU) for threads in (1, 4))
    assert torch.equal(split(four, sequence, [599, 1]), split(one, sequence, [600]))


def test_an_overflow_stays_with_its_request() -> None:
    kv = shape(4, 2, 32)
    attention = build_attention(kv, 100, CPU)
    broken = Sequence(96, kv, 0)
    broken.key.fill_(math.inf)
    broken.value.fill_(math.nan)
    run(attention, (broken, 0, 96))
    sequence = Sequence(35, kv, 0)
    (found,) = run(attention, (sequence, 0, 35))
    torch.testing.assert_close(found.double(), expected(sequence), **CLOSE)


def test_pages_take_what_is_said() -> None:
    kv = shape(4, 2, 64)
    assert page_size(kv, CPU) == PAGE
    assert page_bytes(kv, CPU) == 2 * 2 * 2 * 64 * 2 * PAGE


def test_memory_is_had_before_it_is_needed_and_what_is_in_use_stays() -> None:
    kv = shape(2, 1, 64)
    attention = NativeAttention(kv, 2000, kv.kernels)  # 8 KB a page and layer: 256 pages are a large one
    used = [cache[:300] for cache in attention._cache]
    for pages in used:
        pages.fill_(1.0)
    before = resident()
    calls = 0
    while attention.ready(300, 600):
        calls += 1
    assert calls == 2 * 2  # pages 512 to 1024 of two layers; those up to 512 came with the ones in use
    assert resident() - before >= 4 * LARGE_PAGE
    assert all(bool((pages == 1.0).all()) for pages in used)
    assert all(not cache[300:].any() for cache in attention._cache)
    # Others have come into use meanwhile, up to the last page.
    assert attention.ready(1025, 600)
    while attention.ready(1025, 10_000):
        pass
    assert not attention.ready(2000, 600)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
