"""Sizes the KV cache, and derives the deployment's limits from it."""

import logging
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from tgi.microkernel.errors import UserError
from tgi.microkernel.host.control_groups import available_memory
from tgi.microkernel.messages.kv_groups import (
    ONE_FULL_GROUP,
    GroupKind,
    KVGroup,
    cache_tokens,
    group_layers,
    longest_request,
    make_groups,
    pages_needed,
)
from tgi.microkernel.messages.protocol import DeploymentLimits
from tgi.microkernel.settings.table import CPU_KV_CACHE_DTYPES, DEFAULT_BATCH_SIZE, DEFAULT_PREFILL_TOKENS, Settings
from tgi.worker.decoder_config import HeadShape

log = logging.getLogger(__name__)

# Memory of a CUDA graph on a GPU in addition to the pool that the graphs share: a node for each kernel.
GRAPH_BYTES = 8 << 20
# On CPU the default cache takes this share of the available memory, because other processes need memory too.
CPU_SHARE = 0.25
MAX_CPU_CACHE_BYTES = 4 << 30
# Of recurrent layers: positions of a long prompt from one snapshot of the state to the next.
SNAPSHOT_INTERVAL = 1024
# Of images that the vision tower has computed, kept until others need the memory.
FEATURE_BYTES = 256 << 20
# Where layers attend to images: images of running requests, which are kept as long as these run. Requests with more run
# one at a time.
RUNNING_IMAGES = {"cpu": 4, "cuda": 16}
# There is a snapshot for this number of positions that the pages hold, since most prompts are shorter than an interval.
# But the pages take at least this multiple of the memory of the snapshots.
POSITIONS_PER_SNAPSHOT = 256
PAGES_TO_SNAPSHOTS = 3
# By default fewer requests run at once where their recurrent states would take more than this share of the cache.
STATES_SHARE = 0.5
# States are kept before this many drafts of a step, or before those of one request if these are more. Speculation gains
# with few requests.
DRAFT_STATES = 32


class CacheRequirements(NamedTuple):
    """What the models need of the KV cache."""

    context: int  # the longest sequence that the models can compute, in tokens
    page_size: int  # tokens
    page_bytes: int  # of all layers of the served model and the draft model together
    vocab_size: int
    dtype: str
    device: str
    windows: Sequence[int | None] = ()  # of the layers, as in KVCacheSpec; empty: all layers keep all positions
    # Of the layers, what has memory of its own in a page (KVCacheSpec.shapes), and its bytes; empty: all are alike.
    shapes: Sequence[tuple[HeadShape, int]] = ()
    state_bytes: int = 0  # of a request's recurrent state; 0: the model has no recurrent layers
    # Where pages take no memory, since no layer has attention: pages for each snapshot, by what fits.
    spacing: int = 0

    @property
    def unit_bytes(self) -> int:
        """Bytes of a page or, where pages take no memory, of a state."""
        return self.page_bytes or self.state_bytes

    @property
    def _pages_per_snapshot(self) -> int:
        least = -(-POSITIONS_PER_SNAPSHOT // self.page_size)
        if not self.page_bytes:
            return max(self.spacing, least)
        return max(-(-PAGES_TO_SNAPSHOTS * self.state_bytes // self.page_bytes), least)

    def snapshots(self, pages: int) -> int:
        """The snapshots of recurrent states for this number of pages."""
        return 1 + pages // self._pages_per_snapshot

    def state_bytes_in_all(self, rows: int, pages: int, drafts: int) -> int:
        """Bytes of the recurrent states of this many requests, of rows that pad a batch, of snapshots, and before this
        many drafts."""
        return (rows + 1 + self.snapshots(pages) + drafts) * self.state_bytes

    def pages_within(self, memory: int, rows: int, drafts: int) -> int:
        """The pages that fit into this number of bytes next to the recurrent states; negative if those do not fit."""
        each = self._pages_per_snapshot
        left = memory - self.state_bytes_in_all(rows, 0, drafts)
        return left * each // (self.page_bytes * each + self.state_bytes)


def stored_images(device: str, max_images: int) -> int:
    """The images for whose states layers that attend to images have memory: those of running requests, or of one that
    runs without others. On CPU memory is taken when an image needs it."""
    return max(RUNNING_IMAGES[device], max_images)


def feature_bytes(image_bytes: int, device: str, max_images: int) -> int:
    """Bytes for what is kept of images. `image_bytes`: of the states of the largest image, if layers attend to images,
    else 0."""
    images = RUNNING_IMAGES[device] if device == "cpu" else stored_images(device, max_images)
    return max(FEATURE_BYTES, images * image_bytes)


class PreviousCache(NamedTuple):
    """What a worker chose before it was restarted."""

    pages: int
    rows: int


class CacheMemory(NamedTuple):
    """Memory for the KV cache, in bytes."""

    default: int  # used if the settings do not choose a size
    available: int
    device: int = 0  # of the whole GPU; 0: no GPU, or unknown


def max_batch_size(settings: Settings, device: str, device_bytes: int = 0) -> int:
    """The number of requests that run at once, on a GPU with this much memory in all. Rows that no client can ask for
    would take memory and CUDA graphs for nothing."""
    most = settings.max_concurrent_requests * settings.max_best_of
    least = DEFAULT_BATCH_SIZE[device]
    return settings.max_batch_size or min(_by_memory(DEFAULT_BATCH_SIZE, device, device_bytes, 16), max(least, most))


def max_prefill_tokens(settings: Settings, device: str, device_bytes: int = 0) -> int:
    """The number of tokens computed in one step; by default at least one for each running request."""
    rows = max_batch_size(settings, device, device_bytes)
    return settings.max_batch_prefill_tokens or max(_by_memory(DEFAULT_PREFILL_TOKENS, device, device_bytes, 128), rows)


def _by_memory(defaults: dict[str, int], device: str, device_bytes: int, each: int) -> int:
    """A power of two of at most `each` for each GiB of a GPU, between the limits for GPUs."""
    if device == "cpu":
        return defaults[device]
    wanted = each * device_bytes >> 30
    return min(defaults["large"], max(defaults[device], 1 << wanted.bit_length() >> 1))


def max_draft_states(settings: Settings, device: str) -> int:
    """The drafts of a step before which the states of recurrent layers are kept."""
    each = settings.speculate or 0
    return min(each * max_batch_size(settings, device), max(each, DRAFT_STATES))


def require_kv_cache_dtype(name: str | None, device: str) -> None:
    """Raises UserError if the value of --kv-cache-dtype is not for this device, "cpu" or "cuda"."""
    if name is not None and (on_cpu := name in CPU_KV_CACHE_DTYPES) != (device == "cpu"):
        places = ("CPU", "GPUs") if on_cpu else ("GPUs", "CPU")
        raise UserError(
            f"`kv_cache_dtype` is {name}, a type of the KV cache for {places[0]}, but this worker computes on "
            f"{'a GPU' if on_cpu else 'CPU'}. Leave out --kv-cache-dtype, or choose one for {places[1]}."
        )


def require_context(settings: Settings, context: int) -> None:
    """Raises UserError if requests are to be longer than the models can compute."""
    if (settings.max_total_tokens or 0) > context:
        raise UserError(
            f"`max_total_tokens` is {settings.max_total_tokens}, but the model's sequences have at most {context} "
            "tokens. Lower --max-total-tokens or leave it out."
        )


def cache_memory_on_cuda(free: int, total: int, settings: Settings, activations: int) -> CacheMemory:
    """Memory on a GPU with `free` bytes of `total`, without what the settings reserve and without the activations of a
    step."""
    available = free - (1.0 - settings.cuda_memory_fraction) * total
    return CacheMemory(
        max(0, int(available * settings.memory_fraction) - activations), max(0, int(available) - activations), total
    )


def cache_memory_on_host(available: int | None = None) -> CacheMemory:
    """Memory on a host where the worker can allocate this number of bytes; None: on this host, measured."""
    available = available_memory() if available is None else available
    return CacheMemory(min(int(available * CPU_SHARE), MAX_CPU_CACHE_BYTES), available)


def choose_limits(
    settings: Settings, required: CacheRequirements, memory: CacheMemory, previous: PreviousCache | None = None
) -> DeploymentLimits:
    """The limits of a deployment. `previous`: of the cache before this worker was restarted; limits hold for the life
    of a deployment, even if a little less memory is free now.

    Raises UserError where the settings ask for more than there is, with TGI's message where TGI has one.
    """
    rows = previous.rows if previous else rows_at_once(settings, required, memory)
    tokens = max_prefill_tokens(settings, required.device, memory.device)
    require_context(settings, required.context)
    longest, size = settings.max_total_tokens or required.context, required.page_size
    groups = make_groups(required.windows, longest)
    if required.shapes and groups is not ONE_FULL_GROUP:
        kinds: Counter[tuple[HeadShape, int]] = Counter()
        for group in groups:
            kinds |= Counter(required.shapes[layer] for layer in group.layers)
        required = required._replace(page_bytes=sum(count * each for (_, each), count in kinds.items()))
    else:
        layers = len(required.windows) or 1
        required = required._replace(page_bytes=required.page_bytes * group_layers(groups, layers) // layers)
    if not required.page_bytes:
        most = rows * pages_needed(groups, longest, tokens, size)
        left = memory.default // required.state_bytes - rows - 2 - max_draft_states(settings, required.device)
        required = required._replace(spacing=-(-most // max(1, left)))
    pages = _pages(settings, required, memory, previous and previous.pages, groups, longest, rows)
    longest = longest_request(groups, pages, tokens, size, longest)
    capacity = cache_tokens(groups, pages, tokens, size, longest) if longest else 0
    if capacity < (settings.max_total_tokens or 2):
        raise UserError(
            f"Not enough memory to handle `max_total_tokens={settings.max_total_tokens or 2}`: the KV cache holds "
            f"{capacity} tokens. Lower --max-total-tokens, or raise --max-batch-total-tokens if there is memory."
        )
    max_input_tokens = settings.max_input_tokens or longest - 1
    if max_input_tokens >= longest:
        raise UserError(
            f"`max_input_tokens` must be < `max_total_tokens`. Given: {max_input_tokens} and {longest}, which is what "
            "model and KV cache allow. Lower --max-input-tokens."
        )
    if settings.max_batch_prefill_tokens and settings.max_batch_prefill_tokens > capacity:
        raise UserError(
            f"`max_batch_prefill_tokens` must be <= `max_batch_total_tokens`. "
            f"Given: {settings.max_batch_prefill_tokens} and {capacity}"
        )
    log.debug(
        "KV cache of %d tokens, %.2f GB at most, in %d groups; requests of up to %d tokens, %d at once",
        *(capacity, pages * required.page_bytes / 1e9, len(groups), longest, rows),
    )
    return DeploymentLimits(
        max_total_tokens=longest,
        max_input_tokens=max_input_tokens,
        max_batch_total_tokens=capacity,
        max_batch_prefill_tokens=min(tokens, capacity),
        max_batch_size=rows,
        pages=pages,
        page_size=required.page_size,
        vocab_size=required.vocab_size,
        dtype=required.dtype,
        device=required.device,
        groups=[
            *(group._replace(page_bytes=required.page_bytes) for group in groups),
            *recurrent_groups(settings, required, required.snapshots(pages)),
        ],
    )


def rows_at_once(settings: Settings, required: CacheRequirements, memory: CacheMemory) -> int:
    """The requests that run at once: the settings' choice, else as many as by default, but fewer where their recurrent
    states are large."""
    rows = max_batch_size(settings, required.device, memory.device)
    if settings.max_batch_size is not None or not required.state_bytes:
        return rows
    # One more state is for rows that pad a batch, and one is a snapshot.
    others = 2 + max_draft_states(settings, required.device)
    fitting = max(1, int(memory.default * STATES_SHARE) // required.state_bytes - others)
    if fitting < rows:
        log.info(
            "%d requests run at once instead of %d: the recurrent state of each takes %.1f MB, and they get %.0f%% of "
            "the %.2f GB for the KV cache. Choose otherwise with --max-batch-size.",
            *(fitting, rows, required.state_bytes / 1e6, 100 * STATES_SHARE, memory.default / 1e9),
        )
    return min(rows, fitting)


def recurrent_groups(settings: Settings, required: CacheRequirements, snapshots: int) -> list[KVGroup]:
    """The group of the recurrent layers, if there are any, with this many snapshots."""
    group = KVGroup(
        GroupKind.RECURRENT,
        page_bytes=required.state_bytes,
        snapshots=snapshots,
        interval=SNAPSHOT_INTERVAL,
        drafts=max_draft_states(settings, required.device),
    )
    return [group] if required.state_bytes else []


def _pages(
    settings: Settings,
    required: CacheRequirements,
    memory: CacheMemory,
    previous_pages: int | None,
    groups: Sequence[KVGroup],
    longest: int,
    rows: int,
) -> int:
    """The number of pages: the settings' choice, else as many as fit, on CPU at most what all requests at full length
    use."""
    size = required.page_size
    step_tokens = max_prefill_tokens(settings, required.device, memory.device)
    drafts = max_draft_states(settings, required.device)
    if settings.max_batch_total_tokens is not None:
        longest = min(longest, settings.max_batch_total_tokens)
        tokens = -(-settings.max_batch_total_tokens // size)
        pages = -(-tokens * pages_needed(groups, longest, step_tokens, size) // -(-longest // size))
        if (taken := pages * required.page_bytes + required.state_bytes_in_all(rows, pages, drafts)) > memory.available:
            raise UserError(
                f"Not enough memory to handle `max_batch_total_tokens={settings.max_batch_total_tokens}`: that "
                f"takes {taken / 1e9:.2f} GB and {memory.available / 1e9:.2f} GB are free. "
                "Lower --max-batch-total-tokens."
            )
        return pages
    if previous_pages is not None and previous_pages <= required.pages_within(memory.available, rows, drafts):
        return previous_pages
    if (fitting := required.pages_within(memory.default, rows, drafts)) < 1 and required.state_bytes:
        raise UserError(
            f"Not enough memory for the recurrent states of {rows} requests: they take "
            f"{required.state_bytes_in_all(rows, 0, drafts) / 1e9:.2f} GB of the {memory.default / 1e9:.2f} GB for the "
            f"KV cache. Lower --max-batch-size{' or --speculate' * bool(drafts)}."
        )
    if required.device == "cuda":  # what requests do not need keeps prefixes
        return fitting
    return min(fitting, rows * pages_needed(groups, longest, step_tokens, size))
