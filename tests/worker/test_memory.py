"""The deployment's limits: derived from memory and settings, with errors for settings that do not fit."""

import logging
from pathlib import Path

import pytest

from tgi.microkernel.errors import UserError
from tgi.microkernel.settings.table import Settings
from tgi.worker.decoder_config import HeadShape
from tgi.worker.engine import memory
from tgi.worker.engine.memory import (
    MAX_CPU_CACHE_BYTES,
    CacheMemory,
    CacheRequirements,
    PreviousCache,
    cache_memory_on_cuda,
    cache_memory_on_host,
    choose_limits,
)

GB = 1 << 30
CPU = CacheRequirements(context=2048, page_size=16, page_bytes=1 << 20, vocab_size=100, dtype="bfloat16", device="cpu")
CUDA = CPU._replace(device="cuda", context=131072)


def room(default: int) -> CacheMemory:
    return CacheMemory(default, 2 * default)


def test_limits_follow_from_memory() -> None:
    limits = choose_limits(Settings(), CPU, room(GB // 2))
    assert (limits.pages, limits.max_batch_total_tokens) == (512, 8192)
    assert (limits.max_total_tokens, limits.max_input_tokens) == (2048, 2047)
    assert (limits.max_batch_prefill_tokens, limits.max_batch_size) == (512, 128)
    assert (limits.page_size, limits.vocab_size, limits.dtype, limits.device) == (16, 100, "bfloat16", "cpu")
    # Two requests of 64 tokens never fill more than 8 pages.
    assert choose_limits(Settings(max_batch_size=2, max_total_tokens=64), CPU, room(GB)).pages == 8
    # On a GPU the rest keeps prefixes.
    assert choose_limits(Settings(max_batch_size=2, max_total_tokens=64), CUDA, room(GB)).pages == 1024
    limits = choose_limits(Settings(), CUDA, room(20 * GB))
    assert (limits.pages, limits.max_total_tokens) == (20 << 10, 131072)
    assert (limits.max_batch_prefill_tokens, limits.max_batch_size) == (4096, 256)
    assert choose_limits(Settings(), CUDA, room(GB)).max_total_tokens == 1024 * 16


@pytest.mark.parametrize(
    ("gigabytes", "clients", "tokens", "rows"),
    [(22, 512, 4096, 256), (45, 512, 4096, 512), (79, 128, 8192, 256), (79, 600, 8192, 1024), (140, 4096, 16384, 1024)],
)
def test_limits_of_a_gpu_follow_from_its_memory(gigabytes: int, clients: int, tokens: int, rows: int) -> None:
    """Not more rows than clients can ask for. What the settings choose comes first, and what a worker had before."""
    found = cache_memory_on_cuda(gigabytes * GB, gigabytes * GB, Settings(), GB)
    settings = Settings(max_concurrent_requests=clients)
    limits = choose_limits(settings, CUDA, found)
    assert (limits.max_batch_prefill_tokens, limits.max_batch_size) == (tokens, rows)
    assert limits.pages == found.default >> 20
    chosen = Settings(max_concurrent_requests=clients, max_batch_size=3, max_batch_prefill_tokens=100)
    limits = choose_limits(chosen, CUDA, found)
    assert (limits.max_batch_prefill_tokens, limits.max_batch_size) == (100, 3)
    assert choose_limits(settings, CUDA, found, PreviousCache(limits.pages, 77)).max_batch_size == 77


def test_a_restarted_worker_keeps_the_pages_of_its_deployment() -> None:
    assert choose_limits(Settings(), CPU, CacheMemory(90 << 20, GB), PreviousCache(100, 128)).pages == 100
    assert choose_limits(Settings(), CPU, CacheMemory(110 << 20, GB), PreviousCache(100, 128)).pages == 100
    assert choose_limits(Settings(), CPU, CacheMemory(90 << 20, 99 << 20), PreviousCache(100, 128)).pages == 90


def test_cache_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    half = Settings(cuda_memory_fraction=0.5)
    assert cache_memory_on_cuda(70 * GB, 80 * GB, half, GB) == (26 * GB, 29 * GB, 80 * GB)
    assert cache_memory_on_cuda(10 * GB, 80 * GB, half, GB) == (0, 0, 80 * GB)
    monkeypatch.setattr(memory, "available_memory", lambda: 8 * GB)
    assert cache_memory_on_host() == (2 * GB, 8 * GB, 0)
    monkeypatch.setattr(memory, "available_memory", lambda: 1000 * GB)
    assert cache_memory_on_host() == (MAX_CPU_CACHE_BYTES, 1000 * GB, 0)


def test_each_size_of_heads_has_a_part_of_every_page() -> None:
    small, large = (HeadShape(2, 64), 10 << 10), (HeadShape(1, 128), 7 << 10)
    mixed = CPU._replace(windows=(40, None, 40, 40), shapes=(small, large, small, small), page_bytes=37 << 10)
    limits = choose_limits(Settings(), mixed, room(GB))
    assert [group.layers for group in limits.groups] == [[1], [0], [2], [3]]
    assert {group.page_bytes for group in limits.groups} == {17 << 10}
    assert choose_limits(Settings(), mixed._replace(windows=(None,) * 4), room(GB)).groups[0].page_bytes == 37 << 10


def test_settings_take_precedence() -> None:
    settings = Settings(
        max_batch_total_tokens=1000, max_total_tokens=500, max_input_tokens=100, max_batch_prefill_tokens=64,
        max_batch_size=7,
    )  # fmt: skip
    limits = choose_limits(settings, CPU, room(GB))
    assert (limits.pages, limits.max_batch_total_tokens) == (63, 1008)
    assert (limits.max_total_tokens, limits.max_input_tokens) == (500, 100)
    assert (limits.max_batch_prefill_tokens, limits.max_batch_size) == (64, 7)


@pytest.mark.parametrize("state", [1 << 10, 1 << 20, 20 << 20])
def test_pages_and_recurrent_states_share_the_memory(state: int) -> None:
    settings, required = Settings(max_batch_size=9), CPU._replace(state_bytes=state)
    limits = choose_limits(settings, required, room(GB))
    *_, group = limits.groups
    assert (group.kind, group.page_bytes, limits.state_slots) == ("recurrent", state, 10 + group.snapshots)
    assert GB - required.page_bytes - state < limits.cache_bytes <= GB
    assert group.snapshots == 1 + min(limits.pages // 16, limits.pages * required.page_bytes // (3 * state))
    assert choose_limits(settings, required, CacheMemory(GB // 2, GB), PreviousCache(limits.pages, 9)) == limits
    with pytest.raises(UserError, match="recurrent states of 128 requests"):
        choose_limits(Settings(max_batch_size=128), required, room(129 * state))


@pytest.mark.parametrize("page_bytes", [CPU.page_bytes, 0])
def test_fewer_requests_run_at_once_where_their_states_are_large(
    page_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Pages of models without attention take no memory; what the states leave is for snapshots."""
    required = CPU._replace(page_bytes=page_bytes, state_bytes=GB // 40)
    with caplog.at_level(logging.INFO):
        limits = choose_limits(Settings(), required, room(GB))
    assert limits.max_batch_size == 20 - 2
    assert "18 requests run at once instead of 128" in caplog.text
    assert (limits.max_total_tokens, limits.groups[0].page_bytes) == (CPU.context, page_bytes)
    assert limits.state_slots * required.state_bytes + limits.pages * page_bytes == limits.cache_bytes <= GB
    if not page_bytes:
        assert limits.pages == 18 * CPU.context // CPU.page_size  # all requests at full length
        assert limits.cache_bytes > GB * 0.85
    again = choose_limits(Settings(), required, CacheMemory(GB * 9 // 10, GB), PreviousCache(limits.pages, 18))
    assert (again.pages, again.max_batch_size) == (limits.pages, 18)


@pytest.mark.parametrize(
    ("settings", "available", "words"),
    [
        (Settings(max_batch_total_tokens=10**6), GB, "Not enough memory to handle `max_batch_total_tokens=1000000`"),
        (Settings(max_total_tokens=1000), 32 << 20, "Not enough memory to handle `max_total_tokens=1000`"),
        (Settings(), 0, "Not enough memory"),
        (Settings(max_total_tokens=3000), GB, "at most 2048 tokens"),
        (Settings(max_input_tokens=2048), GB, "`max_input_tokens` must be < `max_total_tokens`"),
        (
            Settings(max_batch_prefill_tokens=3000, max_batch_total_tokens=2000),
            GB << 2,
            "`max_batch_prefill_tokens` must be <= `max_batch_total_tokens`",
        ),
    ],
)
def test_settings_that_do_not_fit_are_rejected(settings: Settings, available: int, words: str) -> None:
    with pytest.raises(UserError) as error:
        choose_limits(settings, CPU, room(available))
    assert words in str(error.value)


def test_a_step_can_prefill_a_token_of_each_row_by_default() -> None:
    assert choose_limits(Settings(max_batch_size=600), CPU, room(GB)).max_batch_prefill_tokens == 600
    assert choose_limits(Settings(max_batch_prefill_tokens=16), CPU, room(GB)).max_batch_prefill_tokens == 16
