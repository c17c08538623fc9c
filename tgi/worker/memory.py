"""How large the KV cache is, and the limits that follow from it."""

import logging
from pathlib import Path
from typing import NamedTuple

import psutil

from tgi.kernel.errors import UserError
from tgi.kernel.presence import Limits
from tgi.kernel.settings import BATCH_SIZE, PREFILL_TOKENS, Settings

log = logging.getLogger(__name__)

# What a recorded step takes on a GPU beside the memory that it shares with the others: a node for each kernel.
RECORDING_BYTES = 8 << 20
# On CPU the cache competes with everything else on the host.
CPU_SHARE = 0.25
CPU_MOST_BYTES = 4 << 30
# Where a container's memory limit and use stand (cgroup v2).
CGROUP = Path("/sys/fs/cgroup")


class Need(NamedTuple):
    """What one model asks of the cache."""

    context: int  # the longest sequence that it can compute
    page_size: int
    page_bytes: int
    vocab_size: int
    dtype: str
    device: str


class Room(NamedTuple):
    """Bytes for the cache."""

    default: int  # what it takes if nobody says otherwise
    most: int  # what is there


def batch_size(settings: Settings, device: str) -> int:
    """Requests that run at once."""
    return settings.max_batch_size or BATCH_SIZE[device]


def prefill_tokens(settings: Settings, device: str) -> int:
    """Tokens computed in one step; by default at least one for each request that runs."""
    return settings.max_batch_prefill_tokens or max(PREFILL_TOKENS[device], batch_size(settings, device))


def available_on_host() -> int:
    """Bytes that this process could still use, by the host's or the container's account."""
    free = psutil.virtual_memory().available
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        if limit != "max":
            used = int((CGROUP / "memory.current").read_text())
            statistics = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
            free = min(free, int(limit) - used + int(statistics.get("inactive_file", 0)))  # cached files make room
    except (OSError, ValueError):
        pass  # no cgroup v2 here: the host's figure stands
    return max(0, free)


def room_on_cuda(free: int, total: int, settings: Settings, activations: int) -> Room:
    """Room on a GPU with `free` bytes of `total`: less what the user reserves and what steps take."""
    most = free - (1.0 - settings.cuda_memory_fraction) * total
    return Room(max(0, int(most * settings.memory_fraction) - activations), max(0, int(most) - activations))


def room_on_host() -> Room:
    """Room in the host's memory, which everything else on the host wants too."""
    most = available_on_host()
    return Room(min(int(most * CPU_SHARE), CPU_MOST_BYTES), most)


def choose_limits(settings: Settings, need: Need, room: Room, held: int | None = None) -> Limits:
    """The limits of a worker. `held` pages are what the same deployment had before this worker was restarted: limits
    hold for a deployment's life, though the memory that is free just now may be a little less.

    Raises UserError where the settings ask for more than there is, in TGI's words where TGI has some.
    """
    rows = batch_size(settings, need.device)
    tokens = prefill_tokens(settings, need.device)
    longest = settings.max_total_tokens or need.context
    if longest > need.context:
        raise UserError(
            f"`max_total_tokens` is {longest}, but the model's sequences have at most {need.context} tokens. "
            "Lower --max-total-tokens or leave it out."
        )
    pages = _pages(settings, need, room, held, rows * -(-longest // need.page_size))
    capacity = pages * need.page_size
    if capacity < (settings.max_total_tokens or 2):
        raise UserError(
            f"Not enough memory to handle `max_total_tokens={settings.max_total_tokens or 2}`: the KV cache holds "
            f"{capacity} tokens. Lower --max-total-tokens, or raise --max-batch-total-tokens if there is memory."
        )
    longest = min(longest, capacity)
    most_input = settings.max_input_tokens or longest - 1
    if most_input >= longest:
        raise UserError(
            f"`max_input_tokens` must be < `max_total_tokens`. Given: {most_input} and {longest}, which is what model "
            "and KV cache allow. Lower --max-input-tokens."
        )
    if settings.max_batch_prefill_tokens and settings.max_batch_prefill_tokens > capacity:
        raise UserError(
            f"`max_batch_prefill_tokens` must be <= `max_batch_total_tokens`. "
            f"Given: {settings.max_batch_prefill_tokens} and {capacity}"
        )
    log.debug(
        "KV cache of %d tokens, %.2f GB at most; requests of up to %d tokens, %d at once",
        capacity,
        pages * need.page_bytes / 1e9,
        longest,
        rows,
    )
    return Limits(
        max_total_tokens=longest,
        max_input_tokens=most_input,
        max_batch_total_tokens=capacity,
        max_batch_prefill_tokens=min(tokens, capacity),
        max_batch_size=rows,
        pages=pages,
        page_size=need.page_size,
        vocab_size=need.vocab_size,
        dtype=need.dtype,
        device=need.device,
    )


def _pages(settings: Settings, need: Need, room: Room, held: int | None, enough: int) -> int:
    """How many pages: as many as the user says, else as fit, and no more than all requests at their longest fill."""
    if settings.max_batch_total_tokens is not None:
        pages = -(-settings.max_batch_total_tokens // need.page_size)
        if pages * need.page_bytes > room.most:
            raise UserError(
                f"Not enough memory to handle `max_batch_total_tokens={settings.max_batch_total_tokens}`: that takes "
                f"{pages * need.page_bytes / 1e9:.2f} GB and {room.most / 1e9:.2f} GB are free. "
                "Lower --max-batch-total-tokens."
            )
        return pages
    if held is not None and held * need.page_bytes <= room.most:
        return held
    return min(room.default // need.page_bytes, enough)
