"""Interface between models, the engine and attention backends.

`ForwardBatch` describes the tokens of one step, `KVCacheSpec` what a model stores per token, and `AttentionBackend`
what a backend does with both. The other protocols are optional abilities of a backend; the engine checks for them with
isinstance.
"""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from tgi.microkernel.messages.kv_groups import ONE_FULL_GROUP, KVGroup
from tgi.worker.cpu_kernels.kernels import CpuKernels
from tgi.worker.decoder_config import HeadShape
from tgi.worker.gpu_kernels.attention_arguments import HeadTransform
from tgi.worker.gpu_kernels.kernels import GpuKernels
from tgi.worker.gpu_kernels.lora_arguments import AdapterTiles
from tgi.worker.kv_cache_sizes import cpu_head_dim, token_bytes
from tgi.worker.state_cache import StateCache, StateRows, StateSpec

if TYPE_CHECKING:
    from tgi.worker.lora.deltas import AdapterSpan


class ImageRows(NamedTuple):
    """The tokens of a step that stand for parts of images, as the vision tower computed them."""

    indices: Tensor  # int64 [n] into T, distinct
    embeddings: Tensor  # [n, hidden], in place of those of the tokens
    deeper: tuple[Tensor, ...] = ()  # [n, hidden] each: added to the result of each of the first layers


class ImageBlocks(NamedTuple):
    """Which tokens of a step see later ones: those of an image see all of it. No row ends within an image."""

    last_keys: Tensor  # int32 [T]: the last position that each token sees; its own for most. Ascending in each row
    windows_alone: bool  # in layers with a sliding window alone; the others are causal

    def last_seen(self, reach: "Reach") -> Tensor | None:
        """`last_keys` for a layer of this reach; None: the layer is causal."""
        return None if self.windows_alone and reach.window is None else self.last_keys


class EncoderRows(NamedTuple):
    """What an encoder adds to a step: of each prompt, the first tokens are its input."""

    lengths: list[int]  # [R] of the inputs
    # [n, hidden]: the encoder's result for the n tokens of the step that belong to inputs, in order; None: it has none
    hidden: Tensor | None


class ImageMemory(Protocol):
    """Keys and values of images, for layers that attend to them (image_states.py)."""

    addresses: Tensor  # int64 [layers], on CPU: of the memory of each such layer, for a program

    def attend(self, layer: int, queries: Tensor, seen: "SeenImages", scale: float) -> Tensor:
        """The results [T, heads * head_dim] of queries [T, heads, head_dim] in the layer of this number among those.
        Those of tokens that see no image mean nothing."""


class SeenImages(NamedTuple):
    """What the tokens of a step see, in a model that attends to images by cross-attention. They are divided into R
    runs, each of consecutive tokens that see the same. Tensors are on the model's device."""

    states: ImageMemory
    sees: Tensor  # bool [T, 1]: whether the token sees an image
    cu_lens: Tensor  # int32 [R + 1]: the first token of each run
    contexts: Tensor  # int32 [R]: the number of states that a run sees; 1, of a page of zeros, where it sees none
    table: Tensor  # int32 [R, P]: the pages of `states` in which they are
    last_keys: Tensor  # int32 [T]: `contexts` - 1 of each token
    lens_host: list[int]  # tokens of each run
    contexts_host: list[int]  # 0: the run sees none


class ForwardBatch(NamedTuple):
    """Input of one forward pass: R rows (sequences) with T tokens in all, and D tokens whose logits are wanted.

    Row r computes the tokens cu_query_lens[r] .. cu_query_lens[r + 1] - 1 of the flat tensors. After the step its
    context has context_lens[r] tokens, whose pages in KV group g are
    page_table[g, r, : ceil(context_lens[r] / page_size)], in order; those before a sliding window may be any.
    Tensors are on the model's device.
    """

    tokens: Tensor  # int64 [T] token ids
    positions: Tensor  # int64 [T] position of each token in its sequence
    slot_mapping: Tensor  # int64 [G, T] where the token's key and value are stored: page * page_size + offset
    cu_query_lens: Tensor  # int32 [R + 1] cumulative query lengths
    context_lens: Tensor  # int32 [R] context lengths, including the tokens of this step
    page_table: Tensor  # int32 [G, R, P], padded with 0
    # int64 [D] indices into T: the last token of each row that samples, and, with speculation, the draft tokens before.
    logits_indices: Tensor
    query_lens_host: list[int]  # tokens per row, on the host
    context_lens_host: list[int]  # context_lens on the host; in a captured step the longest that a request can have
    lora_spans: "Sequence[AdapterSpan]" = ()  # runs of tokens that use a LoRA adapter
    # int32 [R]: the slot of the StateCache that each row reads and overwrites; no two rows of one. A row without tokens
    # before this step starts from zeros, whatever its slot holds. None: the model has no recurrent layers.
    state_slots: Tensor | None = None
    # int32 [T]: the slot that keeps the state as it is after each token, for the tokens before the drafts of a row; 0
    # for all others. None: the step has no drafts, or the model no recurrent layers.
    kept_states: Tensor | None = None
    adapter_tiles: AdapterTiles | None = None  # instead of `lora_spans` in a captured step
    images: ImageRows | None = None
    # int64 [3, T], or [T] if they are the same on each axis: what the rotary embedding takes in place of `positions`.
    rope_positions: Tensor | None = None
    blocks: ImageBlocks | None = None  # None: all tokens see what is before them alone
    encoder: EncoderRows | None = None  # of an encoder-decoder model
    seen_images: SeenImages | None = None  # None: no token sees one


class Reach(NamedTuple):
    """Which earlier positions the queries of a layer see."""

    window: int | None = None  # the number of the last positions, the query's own included; None: all
    chunked: bool = False  # those of the query's own chunk of `window` positions instead

    def first_seen(self, query: int) -> int:
        """The first position that a query at this one sees; it may be negative."""
        if self.window is None:
            return 0
        return query // self.window * self.window if self.chunked else query - self.window + 1

    def masked(
        self, keys: Tensor, queries: Tensor, begins: Tensor | int = 0, last_keys: Tensor | None = None
    ) -> Tensor:
        """Which keys are masked for a query: those after `last_keys`, by default its own, and those that it does not
        see. Keys and queries are counted from the positions `begins`."""
        later = keys > (queries if last_keys is None else last_keys)
        if self.window is None:
            return later
        seen = (begins + queries) % self.window + 1 if self.chunked else self.window
        return later | (keys <= queries - seen)


class KVCacheSpec(NamedTuple):
    """What a model stores per token and layer (one key and one value per KV head), and how its queries read it.

    Layers are counted without those that have no attention; what these keep of a request is `state`.
    """

    layers: int
    heads: int  # query heads; a multiple of kv_heads
    kv_heads: int
    head_dim: int
    dtype: torch.dtype  # of the model
    # Per-layer sliding window in positions, including the query's own; None = full attention. Empty = all layers full.
    sliding_windows: tuple[int | None, ...] = ()
    softcap: float | None = None  # c: a score s becomes c * tanh(s / c)
    cpu_kernels: CpuKernels | None = None  # None: torch's kernels
    gpu_kernels: GpuKernels | None = None  # None: torch's kernels
    # Type of the cache; None: `dtype`. On CPU only our kernels take other types: bfloat16, and int8 with a
    # float32 scale for each key and value. On a GPU 8-bit floats.
    stored_dtype: torch.dtype | None = None
    # Per-layer (key, value) scales: 8-bit floats are key / scale and value / scale. Empty = 1 for all layers.
    cache_scales: tuple[tuple[float, float], ...] = ()
    groups: Sequence[KVGroup] = ONE_FULL_GROUP  # which layers share page tables
    # Per-layer attention sinks, float32 [heads]: a score without a value, which only adds to the sum that the weights
    # are divided by. Empty = no layer has any.
    sinks: tuple[Tensor, ...] = ()
    state: StateSpec | None = None  # of recurrent layers; None: the model has none
    # None: values have head_dim elements. Otherwise a value is the first value_dim elements of the key, and not stored.
    value_dim: int | None = None
    # Per-layer sizes; empty = kv_heads and head_dim in all layers. Each size has memory of its own in every page, since
    # what another size has left in a page could be no number. See `by_shape`.
    shapes: tuple[HeadShape, ...] = ()
    chosen: tuple[int, ...] | None = None  # of the layers in `groups`, those that this one describes; None: all
    chunked: frozenset[int] = frozenset()  # layers whose queries see their own chunk of `window` positions instead
    slopes: Tensor | None = None  # float32 [heads], of ALiBi: a score is reduced by slope * distance
    # [heads, longest]: what is added to the scores of keys at the distances longest - 1 to 0. Of an encoder-decoder
    # model, whose cross-attention has none; None: any other model.
    position_bias: Tensor | None = None

    @property
    def parts(self) -> int:
        """What is stored of each KV head: key and value, or the key alone."""
        return 2 if self.value_dim is None else 1

    @property
    def result_dim(self) -> int:
        """The elements of a value, and of a head's result."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def cache_head_dim(self) -> int:
        """The elements of a stored key or value, with padding."""
        return self.head_dim if self.cpu_kernels is None else cpu_head_dim(self.head_dim)

    @property
    def cache_dtype(self) -> torch.dtype:
        return self.stored_dtype or self.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values in one page, over the layers of a group."""
        if self.shapes:
            return sum(spec.token_bytes for spec, _ in self.by_shape())
        dtype = self.cache_dtype
        scaled = dtype is torch.int8
        return token_bytes(self.caches, self.kv_heads, self.cache_head_dim, dtype.itemsize, scaled, self.parts)

    @property
    def caches(self) -> int:
        """The number of caches. A layer of each group shares one: in each of its pages are keys and values of one of
        them."""
        return max((cache for _, cache in self.places), default=-1) + 1

    @property
    def places(self) -> list[tuple[int, int]]:
        """For each layer, its group and its cache."""
        if not self.groups[0].layers:
            return [(0, layer) for layer in range(self.layers)]
        groups = {layer: number for number, group in enumerate(self.groups) for layer in group.layers}
        used: Counter[int] = Counter()
        places = []
        for layer in range(self.layers) if self.chosen is None else self.chosen:
            places.append((groups[layer], used[groups[layer]]))
            used[groups[layer]] += 1
        return places

    def by_shape(self) -> "list[tuple[KVCacheSpec, tuple[int, ...]]]":
        """The layers of each size as a spec of their own, with their numbers here."""
        if not self.shapes:
            return [(self, tuple(range(self.layers)))]
        found = []
        for shape in sorted(set(self.shapes)):
            layers = tuple(layer for layer, other in enumerate(self.shapes) if other == shape)
            spec = self._replace(
                layers=len(layers),
                kv_heads=shape.kv_heads,
                head_dim=shape.head_dim,
                sliding_windows=tuple(self.sliding_window(layer) for layer in layers),
                cache_scales=tuple(self.cache_scales[layer] for layer in layers if self.cache_scales),
                sinks=tuple(self.sinks[layer] for layer in layers if self.sinks),
                chunked=frozenset(at for at, layer in enumerate(layers) if layer in self.chunked),
                shapes=(),
                chosen=layers,
            )
            found.append((spec, layers))
        return found

    def layer_bytes(self, page_size: int) -> list[tuple[HeadShape, int]]:
        """The size of each layer, and its bytes in a page of this many tokens; empty: all are alike."""
        found = {
            shape: spec.token_bytes * page_size // spec.caches
            for spec, _ in (self.by_shape() if self.shapes else [])
            for shape in [HeadShape(spec.kv_heads, spec.head_dim)]
        }
        return [(shape, found[shape]) for shape in self.shapes]

    def layer_scales(self, layer: int) -> tuple[float, float]:
        """The (key, value) scales of a layer's cache; (1, 1) for a cache that is not quantized."""
        key, value = self.cache_scales[layer] if self.cache_scales and self.cache_dtype.itemsize == 1 else (1.0, 1.0)
        return key, value if self.value_dim is None else key

    def sliding_window(self, layer: int) -> int | None:
        """The sliding window of a layer; None = full attention."""
        return self.sliding_windows[layer] if self.sliding_windows else None

    def reach(self, layer: int) -> Reach:
        """What the queries of a layer see."""
        return Reach(self.sliding_window(layer), layer in self.chunked)

    def layer_sinks(self, layer: int) -> Tensor | None:
        """The attention sinks of a layer; None = it has none."""
        return self.sinks[layer] if self.sinks else None


class AttentionBackend(Protocol):
    """Owns the KV cache. No other code indexes pages.

    A model calls `plan` once per step, and `write_and_attend` once per layer with that plan.
    """

    page_size: int  # tokens per page
    state: StateCache | None  # of the recurrent layers; None: the model has none

    def plan(self, batch: ForwardBatch) -> Any:
        """Everything that all layers of a step share: kernel arguments, tiles, gather indices, masks."""

    def write_and_attend(self, plan: Any, layer: int, qkv: Tensor, scale: float) -> Tensor:
        """Stores the step's keys and values, then computes causal attention of its queries over each row's context.

        `qkv` [T, heads + parts * kv_heads, head_dim] holds queries, keys and, if they are parts of their own, values;
        or queries alone [T, heads, head_dim], if an earlier layer has stored the keys and values of this cache.
        Returns [T, heads, result_dim] in their dtype.
        """


@runtime_checkable
class TransformingBackend(AttentionBackend, Protocol):
    """A backend that applies a HeadTransform while it stores keys and values."""

    def transform_and_attend(
        self, plan: Any, layer: int, qkv: Tensor, scale: float, transform: HeadTransform
    ) -> Tensor:
        """`write_and_attend` of the transformed queries and keys."""


@runtime_checkable
class CapturableBackend(AttentionBackend, Protocol):
    """A backend whose decode steps can be captured as CUDA graphs: it reads contexts and pages on the device."""

    padding_page: int  # a page that is never allocated to a request; rows that pad a batch write to it


@runtime_checkable
class PrefaultingBackend(AttentionBackend, Protocol):
    """A backend whose KV memory is mapped by the operating system at its first write, which is slow."""

    def prefault_pages(self, used: int, further: int) -> bool:
        """Touches a part of the memory of the `further` pages after the first `used` ones.

        What the pages hold stays. Returns False once all of that memory is mapped.
        """

    def discard_pages(self) -> None:
        """Gives the memory of all pages back to the operating system; they hold zeros."""


@runtime_checkable
class StorableBackend(AttentionBackend, Protocol):
    """A backend whose pages can be kept in files."""

    @property
    def page_memory(self) -> list[Tensor]:
        """The memory of all pages in parts, each [pages, ...]."""


def state_rows(batch: ForwardBatch, attention: AttentionBackend) -> StateRows | None:
    """The state of a step's rows. None: the model has no recurrent layers."""
    if attention.state is None:
        return None
    assert batch.state_slots is not None
    columns = batch.state_slots, batch.cu_query_lens, batch.context_lens, batch.query_lens_host
    return StateRows(attention.state, *columns, batch.kept_states)
