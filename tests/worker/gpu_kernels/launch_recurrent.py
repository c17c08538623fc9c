"""Launches the mixers of recurrent layers and latent attention with the sizes of real models."""

import math
from collections.abc import Sequence

import torch
import triton

from tgi.worker.cpu_kernels.recurrent import DeltaRule, GatedNorm, GatedNormForm, Ssd
from tgi.worker.gpu_kernels.attention_arguments import Rotation, Rows
from tgi.worker.gpu_kernels.causal_conv import causal_conv, random_rows
from tgi.worker.gpu_kernels.delta_rule import delta_rule
from tgi.worker.gpu_kernels.latent_write import rotate_and_write_latent
from tgi.worker.gpu_kernels.paged_attention import COUNTERS, paged_attention
from tgi.worker.gpu_kernels.ssd import gated_norm, ssd
from tgi.worker.state_cache import StateTensor

CPU = torch.device("cpu")
# Rows and longest queries: few rows, many rows, and prompts.
STEPS = (1, 1), (300, 1), (100, 700)
# Of latent attention, type of the cache, heads (of DeepSeek-V3 and GLM-4.7-Flash) and steps, by capability and type.
LATENT = {
    (90, torch.bfloat16): [(torch.bfloat16, 128, STEPS), (torch.float8_e4m3fn, 128, STEPS[:1])],
    (90, torch.float32): [(torch.float32, 20, STEPS[2:])],
}


def launches(dtype: torch.dtype) -> None:
    """See compile_launches.py. How many rows there are, and where a step puts them, compiles nothing more. A selection,
    since the longest take several seconds."""
    capability = triton.runtime.driver.active.get_current_device()
    for counts in ([1, 1, 1], [1, 40]) if capability == 90 or dtype is torch.float16 else ():
        _lfm2(dtype, counts)
        if capability == 90:
            _qwen3_next(dtype, counts)
            _nemotron_h(dtype, counts)
    for kept, heads, steps in LATENT.get((capability, dtype), ()):
        _latent(dtype, kept, heads, steps, divmod(capability, 10))


def _lfm2(dtype: torch.dtype, counts: list[int]) -> None:
    """A convolution over three tokens."""
    window = StateTensor((2, 2048), dtype)
    rows = random_rows(CPU, counts, counts, window=window)
    x = torch.empty(sum(counts), 3 * 2048, dtype=dtype)
    causal_conv(x, torch.empty(3, 2048), None, True, rows, *rows.cache.tensors)


def _qwen3_next(dtype: torch.dtype, counts: list[int]) -> None:
    """The gated delta rule of 32 value heads for 16 key heads of 128 elements."""
    keys, values, tokens = 16 * 128, 32 * 128, sum(counts)
    first, second = StateTensor((3, 2 * keys + values), dtype), StateTensor((32, 128, 128), torch.float32)
    rows = random_rows(CPU, counts, counts, window=first, matrix=second)
    window, matrix = rows.cache.tensors
    x = torch.empty(tokens, 2 * (keys + values), dtype=dtype)
    mixed = causal_conv(x, torch.empty(4, 2 * keys + values), None, False, rows, window)
    rule = DeltaRule((16, 32, 128, 128), torch.empty(32), torch.empty(32), torch.empty(128), 1e-6)
    for invariant in (False, True):
        z, ba = x[:, 2 * keys + values :], torch.empty(tokens, 64, dtype=dtype)
        delta_rule(rule, mixed, z, ba, matrix, rows, batch_invariant=invariant)


def _nemotron_h(dtype: torch.dtype, counts: list[int]) -> None:
    """State space duality of 128 heads of 64 elements in 8 groups; decode rows also with drafts."""
    rule = Ssd((128, 8, 64, 128), *(torch.empty(128) for _ in range(3)), (1.0, 0.0, math.inf))
    first, second = StateTensor((3, rule.channels), dtype), StateTensor((128, 128, 64), torch.float32)
    rows = random_rows(CPU, counts, counts, window=first, matrix=second)
    window, matrix = rows.cache.tensors
    x = torch.empty(sum(counts), rule.channels + rule.inner + 128, dtype=dtype)
    kept = torch.zeros(sum(counts), dtype=torch.int32)
    for own in (rows, rows._replace(kept=kept)) if max(counts) == 1 else (rows,):
        mixed = causal_conv(x, torch.empty(4, rule.channels), torch.empty(rule.channels), False, own, window)
        y = ssd(rule, mixed, x[:, -128:], matrix, own)
        gated_norm(GatedNorm(GatedNormForm.GATE_FIRST, torch.empty(rule.inner), 8, 1.0, 1e-5), y, x[:, -8320:-128])


def _latent(
    dtype: torch.dtype, kept: torch.dtype, heads: int, steps: Sequence[tuple[int, int]], capability: tuple[int, int]
) -> None:
    """Keys of 512 latent and 64 rotated elements."""
    keys, counters = torch.empty(9, 16, 1, 576, dtype=kept), torch.zeros(COUNTERS, dtype=torch.int32)
    for count, longest in steps:
        positions = torch.zeros(1 + count, dtype=torch.int64)[1:]
        qkv = torch.empty(count, heads + 1, 576, dtype=dtype)
        query = rotate_and_write_latent(
            qkv, keys, positions, 1.0, Rotation(torch.empty(9, 2, 64), positions, True, 512)
        )
        table, context = torch.zeros(count, 7, dtype=torch.int32), torch.zeros(count, dtype=torch.int32)
        starts = torch.zeros(count + 1, dtype=torch.int32) if longest > 1 else None
        rows, out = Rows(0, count, longest, starts, table, context), torch.empty(count, heads, 512, dtype=dtype)
        paged_attention(query, keys, keys[..., :512], rows, out, 0.1, capability=capability, counters=counters)


if __name__ == "__main__":
    from tests.worker.gpu_kernels.compile_launches import compiled

    print(compiled(launches))
