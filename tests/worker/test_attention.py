"""Attention on CPU with torch, and the arguments of attention on CUDA, with a reference in place of its kernels.

Our own CPU kernels: cpu_kernels/test_attention.py. Our own GPU kernel: gpu_kernels/test_paged_attention.py.
"""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.cases import each_case
from tests.worker.batches import PAGE, Row, make_batch
from tests.worker.cpu_kernels.available import EMULATED, VARIANTS, load_variant
from tgi.worker.attention import build_attention, page_bytes, page_size
from tgi.worker.attention.cuda import CudaAttention, to_cache_dtype
from tgi.worker.attention.interface import AttentionBackend, ImageBlocks, KVCacheSpec
from tgi.worker.attention.packed import PackedAttention, PackedSequences
from tgi.worker.attention.tile_planner import KEY_BLOCK
from tgi.worker.attention.torch_cpu import TorchCpuAttention, agreeing_shapes, choose_shapes

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEADS = ((4, 4), (9, 3), (8, 2), (40, 1))
REFERENCE_BLOCK = 128  # queries of which `expected` computes all scores at once


class Sequence:
    """Random queries, keys and values of one sequence, and its pages. `stored`: values are no parts of keys."""

    def __init__(self, length: int, kv: KVCacheSpec, first_page: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw(heads: int) -> Tensor:
            return torch.randn(length, heads, kv.head_dim, generator=generator).to(kv.dtype)

        self.query, self.key, self.value = draw(kv.heads), draw(kv.kv_heads), draw(kv.kv_heads)
        self.stored = True
        if kv.value_dim is not None:
            self.value, self.stored = self.key[..., : kv.value_dim], False
        self.pages = [first_page + 3 * n for n in range(-(-length // PAGE))][::-1]


Chunk = tuple[Sequence, int, int]


def run(attention: AttentionBackend, *chunks: Chunk, layer: int = 0, scale: float = 0.3) -> list[Tensor]:
    """Runs one step with positions start .. stop - 1 of each sequence: their results [stop - start, heads, dim]."""
    rows = [Row([0] * (stop - start), start, sequence.pages) for sequence, start, stop in chunks]
    batch = make_batch(rows, attention.page_size)
    qkv = torch.cat(
        [
            torch.cat([one[start:stop] for one in (s.query, s.key, s.value)[: 3 if s.stored else 2]], 1)
            for s, start, stop in chunks
        ]
    )
    found = attention.write_and_attend(attention.plan(batch), layer, qkv, scale)
    width = chunks[0][0].value.shape[2]
    return list(found.reshape(len(qkv), -1, width).split([stop - start for _, start, stop in chunks]))


def draw_sinks(heads: int, layers: int = 2) -> tuple[Tensor, ...]:
    """KVCacheSpec.sinks, some of which outweigh all keys."""
    return tuple(3 * torch.randn(layers, heads, generator=torch.Generator().manual_seed(9)))


def expected(
    sequence: Sequence,
    scale: float = 0.3,
    window: int | None = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
    chunked: bool = False,
    slopes: Tensor | None = None,
    last: Tensor | None = None,
) -> Tensor:
    """Causal attention in float64, [length, heads, head_dim]. A sink is one more key, whose value is 0. `chunked`: a
    query sees its own chunk of `window` positions. `last` [length]: the last position that each
    sees, by default its own."""
    group = sequence.query.shape[1] // sequence.key.shape[1]
    query = sequence.query.double().transpose(0, 1)
    keys, values = (x.double().transpose(0, 1).repeat_interleave(group, 0) for x in (sequence.key, sequence.value))
    found = []
    for start in range(0, len(sequence.query), REFERENCE_BLOCK):  # with the positions that these queries see
        first, stop = max(0, start + 1 - (window or start + 1)), start + REFERENCE_BLOCK  # of a chunk, too
        ends = torch.arange(len(query[0])) if last is None else last
        key, value = (x[:, first : int(ends[start:stop].max()) + 1] for x in (keys, values))
        scores = query[:, start:stop] @ key.transpose(1, 2) * scale
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        distance = torch.arange(start, start + scores.shape[1])[:, None] - torch.arange(first, first + scores.shape[2])
        if slopes is not None:
            scores = scores - slopes.double()[:, None, None] * distance
        seen: int | Tensor = window or len(keys[0])
        if chunked:
            seen = (torch.arange(start, start + scores.shape[1]) % seen + 1)[:, None]
        later = torch.arange(first, first + scores.shape[2]) > ends[start:stop, None]
        scores.masked_fill_(later | (distance >= seen), -math.inf)
        if sinks is not None:
            scores = torch.cat((sinks.double()[:, None, None].expand(-1, scores.shape[1], 1), scores), -1)
            value = F.pad(value, (0, 0, 1, 0))
        found.append(scores.softmax(-1) @ value)
    return torch.cat(found, 1).transpose(0, 1)


def split(attention: AttentionBackend, sequence: Sequence, sizes: list[int]) -> Tensor:
    """Results of the whole sequence in chunks of these sizes, of which the last one repeats."""
    found, start, length = [], 0, len(sequence.query)
    while start < length:
        stop = min(length, start + sizes[min(len(found), len(sizes) - 1)])
        found += run(attention, (sequence, start, stop))
        start = stop
    return torch.cat(found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_results_against_float64(dtype: torch.dtype, heads: int, kv_heads: int) -> None:
    kv = KVCacheSpec(2, heads, kv_heads, 16, dtype)
    attention = build_attention(kv, 200, CPU)
    sequence = Sequence(700, kv, 5)
    (found,) = run(attention, (sequence, 0, 700), layer=1)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(found.double(), expected(sequence), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "value_dim", "dtype"),
    [
        *((*sizes, dtype) for sizes in ((9, 3, 64, None), (40, 1, 16, None), (16, 1, 72, 56)) for dtype in DTYPES),
        (4, 4, 16, None, torch.bfloat16),
        (8, 2, 128, None, torch.float32),
        (14, 2, 64, None, torch.bfloat16),
    ],
)
def test_batch_invariance(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, value_dim: int | None) -> None:
    kv = KVCacheSpec(1, heads, kv_heads, head_dim, dtype, value_dim=value_dim)
    long, short, other = Sequence(1100, kv, 0), Sequence(90, kv, 1, seed=1), Sequence(400, kv, 2, seed=2)
    attention = build_attention(kv, 300, CPU)
    whole = [run(attention, (sequence, 0, len(sequence.query)))[0] for sequence in (long, short, other)]
    if value_dim is not None:
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
        torch.testing.assert_close(whole[1].double(), expected(short), rtol=tolerance, atol=tolerance)

    again = build_attention(kv, 300, CPU)
    assert torch.equal(split(again, long, [7, 500, 100]), whole[0])
    assert torch.equal(split(again, short, [1]), whole[1])
    assert torch.equal(split(again, other, [120, 1, 1, 2, 3, 5, 9, 40, 1, 1, 90]), whole[2])

    mixed = build_attention(kv, 300, CPU)
    run(mixed, (long, 0, 1099), (short, 0, 33), (other, 0, 380))
    decode, chunk, few = run(mixed, (long, 1099, 1100), (short, 33, 80), (other, 380, 385))
    assert torch.equal(decode, whole[0][1099:])
    assert torch.equal(chunk, whole[1][33:80])
    assert torch.equal(few, whole[2][380:385])
    ones = run(mixed, (other, 385, 386), (short, 80, 81), (long, 600, 601))
    for found, sequence, at in zip(ones, (2, 1, 0), (385, 80, 600), strict=True):
        assert torch.equal(found[0], whole[sequence][at])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dtype", "window", "cap", "sinks"),
    [
        (4, 2, torch.float32, 40, None, True),
        (4, 2, torch.bfloat16, 512, None, False),
        (20, 1, torch.float32, 700, None, False),
        (6, 2, torch.bfloat16, 512, None, True),
        (4, 2, torch.float32, None, 0.5, True),
        (4, 1, torch.bfloat16, 600, 0.5, False),
    ],
)
def test_batch_invariance_of_windows_soft_caps_and_sinks(
    heads: int, kv_heads: int, dtype: torch.dtype, window: int | None, cap: float | None, sinks: bool
) -> None:
    kv = KVCacheSpec(2, heads, kv_heads, 16, dtype, (None, window), cap, sinks=draw_sinks(heads) if sinks else ())
    long, short = Sequence(1300, kv, 0), Sequence(150, kv, 1, seed=1)
    attention = build_attention(kv, 300, CPU)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    for layer, visible in [*enumerate(kv.sliding_windows)][1:]:  # full attention alone is tested above
        whole = [run(attention, (sequence, 0, len(sequence.query)), layer=layer)[0] for sequence in (long, short)]
        for sequence, found in zip((long, short), whole, strict=True):
            reference_result = expected(sequence, window=visible, cap=cap, sinks=kv.layer_sinks(layer))
            torch.testing.assert_close(found.double(), reference_result, rtol=tolerance, atol=tolerance)
        again = build_attention(kv, 300, CPU)
        for start, stop in ((0, 7), (7, 520), (520, 521), (521, 1290), (1290, 1291), (1291, 1299)):
            (found,) = run(again, (long, start, stop), layer=layer)
            assert torch.equal(found, whole[0][start:stop]), (start, stop)
        run(again, (short, 0, 140), layer=layer)
        decode, few = run(again, (long, 1299, 1300), (short, 140, 150), layer=layer)
        assert torch.equal(decode, whole[0][1299:])
        assert torch.equal(few, whole[1][140:])
        one, other = run(again, (long, 1100, 1101), (short, 149, 150), layer=layer)
        assert torch.equal(one, whole[0][1100:1101])
        assert torch.equal(other, whole[1][149:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cap", [None, 0.5])
def test_results_do_not_depend_on_the_thread_count(dtype: torch.dtype, cap: float | None) -> None:
    kv = KVCacheSpec(1, 6, 1, 64, dtype, softcap=cap)
    sequence = Sequence(600, kv, 0)
    (one,) = run(build_attention(kv, 200, CPU), (sequence, 0, 600))
    torch.set_num_threads(2)
    attention = build_attention(kv, 200, CPU)
    assert torch.equal(split(attention, sequence, [599, 1]), one)


@pytest.mark.parametrize("native", [False, True])
def test_packed_sequences_with_sinks(native: bool) -> None:
    kernels = load_variant(next(name for name, one in VARIANTS.items() if one.element == "float32")) if native else None
    kv = KVCacheSpec(2, 6, 2, 32, torch.float32, (None, 40), cpu_kernels=kernels, sinks=draw_sinks(6))
    sequences = Sequence(90, kv, 0), Sequence(37, kv, 1, seed=1)
    attention = PackedAttention(kv, [0, 0], 200)
    plan = attention.plan(PackedSequences.of([np.zeros(len(one.query)) for one in sequences], CPU))
    qkv = torch.cat([torch.cat([one.query, one.key, one.value], 1) for one in sequences])
    for layer, window in enumerate(kv.sliding_windows):
        found = attention.write_and_attend(plan, layer, qkv, 0.3).view(127, 6, 32).double()
        right = torch.cat([expected(one, 0.3, window, None, kv.layer_sinks(layer)) for one in sequences])
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


def test_decode_of_many_rows() -> None:
    kv = KVCacheSpec(1, 9, 3, 64, torch.bfloat16)
    sequences = [Sequence(40 + 37 * n, kv, 200 * n, seed=n) for n in range(20)]
    attention = build_attention(kv, 4000, CPU)
    run(attention, *((sequence, 0, len(sequence.query) - 1) for sequence in sequences))
    together = run(attention, *((sequence, len(sequence.query) - 1, len(sequence.query)) for sequence in sequences))
    for sequence, found in zip(sequences, together, strict=True):
        last = len(sequence.query) - 1
        assert torch.equal(run(attention, (sequence, last, last + 1))[0], found)
        torch.testing.assert_close(found[0].double(), expected(sequence)[-1], rtol=2e-2, atol=2e-2)


def test_earlier_contents_of_pages_do_not_matter() -> None:
    kv = KVCacheSpec(1, 4, 2, 16, torch.float32)
    attention = build_attention(kv, 100, CPU)
    sequence = Sequence(50, kv, 0)
    (fresh,) = run(attention, (sequence, 0, 50))
    for seed in (7, 8):  # writes page 0 too, with which page tables are padded
        run(attention, (Sequence(400, kv, seed - 7, seed=seed), 0, 400))
    (used,) = run(attention, (sequence, 0, 50))
    assert torch.equal(used, fresh)


def test_an_overflow_does_not_reach_the_next_owner_of_the_pages() -> None:
    kv = KVCacheSpec(1, 4, 2, 16, torch.float16)
    attention = build_attention(kv, 100, CPU)
    broken = Sequence(64, kv, 0)
    broken.key.fill_(math.inf)
    broken.value.fill_(math.nan)
    run(attention, (broken, 0, 64))
    sequence = Sequence(35, kv, 0)
    (found,) = run(attention, (sequence, 0, 35))
    torch.testing.assert_close(found.double(), expected(sequence), rtol=2e-3, atol=2e-3)


@each_case("dtype", DTYPES)
@each_case("group", [1, 3, 8, 20, 40])
def test_tile_shapes_fit_a_group_of_heads_and_include_the_whole_block(dtype: torch.dtype, group: int) -> None:
    shapes = choose_shapes(KVCacheSpec(1, 2 * group, 2, 64, dtype))
    assert group <= shapes.single_rows <= shapes.multi_rows
    assert shapes.last_blocks[-1] == KEY_BLOCK


def test_the_measured_shapes_are_reproducible() -> None:
    found = agreeing_shapes(64)
    agreeing_shapes.cache_clear()
    assert agreeing_shapes(64) == found


def test_page_size_and_bytes() -> None:
    kv = KVCacheSpec(3, 4, 2, 16, torch.bfloat16)
    assert page_size(kv, CPU) == PAGE
    assert page_bytes(kv, CPU) == 3 * 2 * 2 * 16 * 2 * PAGE
    assert isinstance(build_attention(kv, 2, CPU), TorchCpuAttention)


# --- CUDA: arguments of the kernels -----------------------------------------------------------------------------------


@each_case(("heads", "kv_heads"), [(4, 4), (6, 2)])
@each_case("window", [None, 20])
@each_case("cap", [None, 0.5])
@each_case("sinks", [False, True])
def test_torchs_kernels_on_cuda(heads: int, kv_heads: int, window: int | None, cap: float | None, sinks: bool) -> None:
    drawn = draw_sinks(heads) if sinks else ()
    kv = KVCacheSpec(2, heads, kv_heads, 16, torch.float32, (5, window), softcap=cap, sinks=drawn)
    on_cuda(kv)
    on_cuda(kv._replace(value_dim=12))


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_cuda_8_bit_cache(stored: torch.dtype) -> None:
    """Values beyond the range of 8 bits are clamped; scales are applied at writing and reading."""
    kv = KVCacheSpec(2, 6, 2, 16, torch.float32, stored_dtype=stored, cache_scales=((1.0, 1.0), (0.05, 20.0)))
    assert page_bytes(kv, torch.device("cuda")) * 4 == page_bytes(kv._replace(stored_dtype=None), torch.device("cuda"))
    on_cuda(kv)
    on_cuda(kv._replace(value_dim=12))


def on_cuda(kv: KVCacheSpec) -> None:
    """Runs chunks of two sequences in the second layer with CudaAttention, against `expected`."""
    attention = CudaAttention(kv, 100, CPU)
    one, two = Sequence(90, kv, 0), Sequence(37, kv, 1, seed=1)
    one.value[3, 0, 0] = 1e6
    one.key[80, 1, 2] = -1e6
    run(attention, (one, 0, 60), (two, 0, 36), layer=1)
    chunk, decode = run(attention, (one, 60, 90), (two, 36, 37), layer=1)
    for sequence in (one, two):
        scaled = zip((sequence.key, sequence.value), kv.layer_scales(1), strict=True)
        sequence.key, sequence.value = (
            to_cache_dtype(x, kv.cache_dtype, scale).to(kv.dtype) * scale for x, scale in scaled
        )
        if not sequence.stored:
            sequence.value = sequence.key[..., : kv.value_dim]
    options = kv.sliding_window(1), kv.softcap, kv.layer_sinks(1)
    first, second = (expected(sequence, 0.3, *options) for sequence in (one, two))
    torch.testing.assert_close(chunk.double(), first[60:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(decode.double(), second[36:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", ["torch", "torch as on CUDA", *VARIANTS])
def test_chunks_alibi_and_keys_of_an_earlier_layer(variant: str) -> None:
    """A query sees its own chunk of positions, or is reduced by its distance from a key; in any division into steps.
    Queries alone find the keys and values that an earlier layer has written."""
    ours = not variant.startswith("torch")
    length = 600 if ours and EMULATED else 700
    kernels = load_variant(variant) if ours else None
    kv = KVCacheSpec(3, 6, 2, 32, torch.float32 if kernels is None else kernels.dtype, (None, 70, 513), None, kernels)
    limit = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}[kv.dtype]
    slopes = 0.5 ** torch.arange(1.0, 7)
    for one, layers in ((kv._replace(chunked=frozenset((1, 2))), (1, 2)), (kv._replace(slopes=slopes), (0, 1))):
        sequence, other = Sequence(length, one, 0), Sequence(90, one, 1, seed=1)
        for layer in layers:

            def memory(one: KVCacheSpec = one) -> AttentionBackend:
                return CudaAttention(one, 300, CPU) if variant == "torch as on CUDA" else build_attention(one, 300, CPU)

            options = one.sliding_window(layer), None, None, layer in one.chunked, one.slopes
            attention = memory()
            found = run(attention, (sequence, 0, length), (other, 0, 90), layer=layer)
            for result, right in zip(
                found, (expected(sequence, 0.3, *options), expected(other, 0.3, *options)), strict=True
            ):
                torch.testing.assert_close(result.double(), right, rtol=limit, atol=limit)
            batch = make_batch([Row([0] * length, 0, sequence.pages)], attention.page_size)
            alone = attention.write_and_attend(attention.plan(batch), layer, sequence.query, 0.3)
            assert torch.equal(alone.reshape(found[0].shape), found[0])
            again = memory()
            for start, stop in ((0, 33), (33, 500), (500, 501), (501, length)):
                part = run(again, (other, 0, 20), (sequence, start, stop), layer=layer)[1]
                if variant == "torch as on CUDA":  # whose sums depend on the step
                    torch.testing.assert_close(part, found[0][start:stop], rtol=1e-5, atol=1e-5)
                else:
                    assert torch.equal(part, found[0][start:stop])


@each_case("variant", ["torch", "torch as on CUDA", *VARIANTS])
@each_case("windows_alone", [False, True])
def test_blocks_see_each_other(variant: str, windows_alone: bool) -> None:
    """Tokens of a block see all of it, in any chunks that end outside blocks; rows without any are as always."""
    kernels = None if variant.startswith("torch") else load_variant(variant)
    kv = KVCacheSpec(2, 6, 2, 32, torch.float32 if kernels is None else kernels.dtype, (None, 70), None, kernels)
    limit = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}[kv.dtype]
    sequence, other = Sequence(330, kv, 0), Sequence(90, kv, 1, seed=1)
    last = torch.arange(330)
    for start, stop in ((3, 53), (60, 61), (200, 264), (270, 300)):
        last[start:stop] = stop - 1

    def step(attention: AttentionBackend, layer: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        rows = [Row([0] * 90, 0, other.pages), Row([0] * (stop - start), start, sequence.pages)]
        batch = make_batch(rows, attention.page_size)
        blocks = ImageBlocks(torch.cat((torch.arange(90), last[start:stop])).int(), windows_alone)
        columns = zip(*((one.query, one.key, one.value) for one in (other, sequence)), strict=True)
        qkv = torch.cat([torch.cat((one, two[start:stop])) for one, two in columns], 1)
        found = attention.write_and_attend(attention.plan(batch._replace(blocks=blocks)), layer, qkv, 0.3)
        one, two = found.reshape(len(qkv), -1, 32).split([90, stop - start])
        return one, two

    def memory() -> AttentionBackend:
        return CudaAttention(kv, 300, CPU) if variant == "torch as on CUDA" else build_attention(kv, 300, CPU)

    for layer in (0, 1):
        causal = windows_alone and layer == 0
        right = expected(sequence, window=kv.sliding_window(layer), last=None if causal else last)
        together, whole = step(memory(), layer, 0, 330)
        torch.testing.assert_close(whole.double(), right, rtol=limit, atol=limit)
        alone = run(memory(), (other, 0, 90), layer=layer)[0]
        torch.testing.assert_close(together, alone, rtol=0, atol=1e-6 if variant == "torch as on CUDA" else 0)
        again = memory()
        for start, stop in ((0, 57), (57, 264), (264, 301), (301, 302), (302, 330)):
            part = step(again, layer, start, stop)[1]
            torch.testing.assert_close(part, whole[start:stop], rtol=0, atol=1e-5 if variant.startswith("torch") else 0)
