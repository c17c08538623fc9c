"""FlashAttention for long prompts, where it is installed (the extra `gpu`) and quicker than our own kernel.

At the start each installed one computes a small case, which is compared with torch, and then a long prompt with the
model's heads, against our own kernel. The quickest computes the prompts of steps from LEAST_QUERIES queries on; decode
rows, drafts and captured steps stay with ours, and so does all that these libraries lack or that has not been written
for them: caches of 8 bits, sinks, latent attention, several sizes of heads, `--batch-invariant`.
"""

import importlib
import importlib.util
import logging
import statistics
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tgi.worker.gpu_kernels.attention_arguments import Rows
from tgi.worker.gpu_kernels.kernels import GpuKernels
from tgi.worker.gpu_kernels.paged_attention import reference_attention
from tgi.worker.gpu_kernels.self_test import check_close, random_tensor

log = logging.getLogger(__name__)

LEAST_QUERIES = 1024  # of the longest row
TRIAL_TOKENS, TRIALS = 4096, 5
GAIN = 0.95  # of the time of our kernel: what a library has to be quicker than

# (query [T, heads, dim], keys, values [pages, page, kv_heads, dim], rows, scale, window, cap) -> [tokens, heads, dim]:
# the attention of these rows.
Attend = Callable[[Any, Tensor, Tensor, Tensor, Rows, float, int | None, float | None], Tensor]


class Library(NamedTuple):
    """A library with attention over pages, and the compute capabilities that it is for."""

    name: str
    module: str
    capabilities: tuple[int, ...]  # major
    attend: Attend


def _flash4(
    module: Any, query: Tensor, keys: Tensor, values: Tensor, rows: Rows, scale: float, window: int | None, cap: Any
) -> Tensor:
    found = module.flash_attn_varlen_func(
        query,
        keys,
        values,
        cu_seqlens_q=rows.starts,
        max_seqlen_q=rows.longest,
        seqused_k=rows.context,
        page_table=rows.table,
        softmax_scale=scale,
        causal=True,
        window_size=(None, None) if window is None else (window - 1, 0),
        softcap=cap or 0.0,
    )
    result: Tensor = found[0] if isinstance(found, tuple) else found
    return result


def _flash3(
    module: Any, query: Tensor, keys: Tensor, values: Tensor, rows: Rows, scale: float, window: int | None, cap: Any
) -> Tensor:
    found = module.flash_attn_with_kvcache(
        query,
        keys,
        values,
        cache_seqlens=rows.context,
        page_table=rows.table,
        cu_seqlens_q=rows.starts,
        max_seqlen_q=rows.longest,
        softmax_scale=scale,
        causal=True,
        window_size=(-1, -1) if window is None else (window - 1, 0),
        softcap=cap or 0.0,
    )
    result: Tensor = found[0] if isinstance(found, tuple) else found
    return result


LIBRARIES = (
    Library("FlashAttention 4", "flash_attn.cute.interface", (9, 10, 12), _flash4),
    Library("FlashAttention 3", "flash_attn_interface", (9,), _flash3),
)


class PromptAttention(NamedTuple):
    """The chosen library."""

    library: Library
    module: Any

    def serves(self, rows: Rows) -> bool:
        """Whether it computes these rows of a step."""
        return rows.starts is not None and rows.longest >= LEAST_QUERIES and not _capturing()

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        rows: Rows,
        out: Tensor,
        scale: float,
        window: int | None,
        cap: float | None,
    ) -> None:
        """As GpuKernels.paged_attention, for rows that it `serves`."""
        assert rows.starts is not None
        own = slice(rows.first, rows.first + rows.tokens)
        moved = rows._replace(starts=rows.starts - rows.first, table=rows.table.contiguous())
        out[own] = self.library.attend(self.module, query[own], keys, values, moved, scale, window, cap)


class Heads(NamedTuple):
    """What a trial depends on."""

    heads: int
    kv_heads: int
    dim: int
    page: int
    dtype: torch.dtype


@lru_cache
def choose_prompt_attention(kernels: GpuKernels, heads: Heads, device: torch.device) -> PromptAttention | None:
    """The library that computes long prompts with these heads most quickly; None: our own kernel does. One that is
    installed and cannot be used is named in the log."""
    found = [
        library
        for library in LIBRARIES
        if kernels.capability[0] in library.capabilities and importlib.util.find_spec(library.module.split(".")[0])
    ]
    times: list[tuple[float, PromptAttention]] = []
    for library in found:
        try:
            chosen = PromptAttention(library, importlib.import_module(library.module))
            self_test(chosen, heads, device)
            times.append((_trial(kernels, chosen, heads, device), chosen))
        except Exception as error:  # compilers and libraries raise many types
            log.warning(
                "%s is installed, but our own kernel computes long prompts: %s: %s",
                *(library.name, type(error).__name__, error),
            )
    if not times:
        return None
    ours = _trial(kernels, None, heads, device)
    words = ", ".join(f"{chosen.library.name} {spent:.2f} ms" for spent, chosen in times)
    log.info("attention of a prompt of %d tokens: our own kernel %.2f ms, %s", TRIAL_TOKENS, ours, words)
    spent, best = min(times, key=lambda one: one[0])
    return best if spent < GAIN * ours else None


def self_test(chosen: PromptAttention, heads: Heads, device: torch.device) -> None:
    """Two prompts, one of which goes on behind cached tokens, with a window and without. Raises SelfTestFailed."""
    counts, contexts = [37, 20], [37, 150]
    pages = -(-150 // heads.page)
    order = torch.randperm(2 * pages, generator=torch.Generator().manual_seed(4)).view(2, pages)
    query = random_tensor(device, sum(counts), heads.heads, heads.dim, dtype=heads.dtype)
    shape = 2 * pages, heads.page, heads.kv_heads, heads.dim
    keys, values = (random_tensor(device, *shape, dtype=heads.dtype, seed=seed) for seed in (1, 2))
    starts, context = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 37, 57], contexts))
    rows = Rows(0, sum(counts), max(counts), starts, order.int().to(device), context)
    scale = heads.dim**-0.5
    for window, cap in ((None, None), (30, None), (None, 20.0)):
        out = torch.full_like(query, float("nan"))
        chosen.attend(query, keys, values, rows, out, scale, window, cap)
        expected = reference_attention(
            query, keys, values, order.tolist(), counts, contexts, scale, window, cap
        )  # on the host
        check_close(f"attention by {chosen.library.name}", out.cpu(), expected, 0.02)


def _trial(kernels: GpuKernels, chosen: PromptAttention | None, heads: Heads, device: torch.device) -> float:
    """Milliseconds of a prompt of TRIAL_TOKENS, the median of TRIALS."""
    pages = TRIAL_TOKENS // heads.page
    query = random_tensor(device, TRIAL_TOKENS, heads.heads, heads.dim, dtype=heads.dtype)
    keys = random_tensor(device, pages, heads.page, heads.kv_heads, heads.dim, dtype=heads.dtype)
    starts, context = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, TRIAL_TOKENS], [TRIAL_TOKENS]))
    table = torch.arange(pages, dtype=torch.int32, device=device)[None]
    rows, out, scale = Rows(0, TRIAL_TOKENS, TRIAL_TOKENS, starts, table, context), query.clone(), heads.dim**-0.5
    counters = kernels.split_counters(device)

    def run() -> None:
        if chosen is None:
            kernels.paged_attention(query, keys, keys, rows, out, scale, counters=counters)
        else:
            chosen.attend(query, keys, keys, rows, out, scale, None, None)

    run()  # compiles
    return statistics.median(_timed(run, device) for _ in range(TRIALS))


def _timed(run: Callable[[], None], device: torch.device) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
