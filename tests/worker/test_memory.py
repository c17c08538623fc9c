"""Limits follow from memory and settings; what cannot be had is refused in words."""

from pathlib import Path

import pytest

from tgi.kernel.errors import UserError
from tgi.kernel.settings import Settings
from tgi.worker import memory
from tgi.worker.memory import CPU_MOST_BYTES, Need, Room, choose_limits, room_on_cuda, room_on_host

GB = 1 << 30
CPU = Need(context=2048, page_size=16, page_bytes=1 << 20, vocab_size=100, dtype="bfloat16", device="cpu")
CUDA = CPU._replace(device="cuda", context=131072)


def room(default: int) -> Room:
    return Room(default, 2 * default)


def test_limits_follow_from_the_room() -> None:
    limits = choose_limits(Settings(), CPU, room(GB // 2))
    assert (limits.pages, limits.max_batch_total_tokens) == (512, 8192)
    assert (limits.max_total_tokens, limits.max_input_tokens) == (2048, 2047)
    assert (limits.max_batch_prefill_tokens, limits.max_batch_size) == (512, 128)
    assert (limits.page_size, limits.vocab_size, limits.dtype, limits.device) == (16, 100, "bfloat16", "cpu")
    # Two requests of 64 tokens never fill more than 8 pages.
    assert choose_limits(Settings(max_batch_size=2, max_total_tokens=64), CPU, room(GB)).pages == 8
    limits = choose_limits(Settings(), CUDA, room(20 * GB))
    assert (limits.pages, limits.max_total_tokens) == (20 << 10, 131072)
    assert (limits.max_batch_prefill_tokens, limits.max_batch_size) == (4096, 256)
    assert choose_limits(Settings(), CUDA, room(GB)).max_total_tokens == 1024 * 16


def test_a_restarted_worker_takes_what_its_deployment_had() -> None:
    assert choose_limits(Settings(), CPU, Room(90 << 20, GB), held=100).pages == 100
    assert choose_limits(Settings(), CPU, Room(110 << 20, GB), held=100).pages == 100
    assert choose_limits(Settings(), CPU, Room(90 << 20, 99 << 20), held=100).pages == 90


def test_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    half = Settings(cuda_memory_fraction=0.5)
    assert room_on_cuda(70 * GB, 80 * GB, half, GB) == (26 * GB, 29 * GB)
    assert room_on_cuda(10 * GB, 80 * GB, half, GB) == (0, 0)
    monkeypatch.setattr(memory, "available_on_host", lambda: 8 * GB)
    assert room_on_host() == (2 * GB, 8 * GB)
    monkeypatch.setattr(memory, "available_on_host", lambda: 1000 * GB)
    assert room_on_host() == (CPU_MOST_BYTES, 1000 * GB)


def test_the_user_decides() -> None:
    settings = Settings(
        max_batch_total_tokens=1000, max_total_tokens=500, max_input_tokens=100, max_batch_prefill_tokens=64,
        max_batch_size=7,
    )  # fmt: skip
    limits = choose_limits(settings, CPU, room(GB))
    assert (limits.pages, limits.max_batch_total_tokens) == (63, 1008)
    assert (limits.max_total_tokens, limits.max_input_tokens) == (500, 100)
    assert (limits.max_batch_prefill_tokens, limits.max_batch_size) == (64, 7)


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
def test_what_cannot_be_had_is_refused(settings: Settings, available: int, words: str) -> None:
    with pytest.raises(UserError) as error:
        choose_limits(settings, CPU, room(available))
    assert words in str(error.value)


def test_a_step_has_room_for_every_running_row_unless_the_user_says_otherwise() -> None:
    assert choose_limits(Settings(max_batch_size=600), CPU, room(GB)).max_batch_prefill_tokens == 600
    assert choose_limits(Settings(max_batch_prefill_tokens=16), CPU, room(GB)).max_batch_prefill_tokens == 16


def test_a_containers_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    without = memory.available_on_host()
    assert without > 0
    (tmp_path / "memory.max").write_text("5000000\n")
    (tmp_path / "memory.current").write_text("2000000\n")
    (tmp_path / "memory.stat").write_text("anon 1500000\ninactive_file 500000\n")
    assert memory.available_on_host() == 3500000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.available_on_host() > 3500000
