"""What one forward pass needs: the tokens of a step, back to back, and where their keys and values live."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from tgi.worker.best import Best
from tgi.worker.gpu.kernels import Gpu
from tgi.worker.native.kernels import Kernels

if TYPE_CHECKING:
    from tgi.worker.lora.deltas import Span


class Batch(NamedTuple):
    """One step's rows. T tokens in all, R rows, which draw behind D of the tokens: behind the last one of a row, and
    with speculation behind some before it. Tensors are on the model's device.

    Row r computes tokens cu_query[r] .. cu_query[r+1] - 1 of the flat arrays; after the step its context is
    context[r] tokens long, and its pages, in order, are page_table[r, : ceil(context[r] / page_size)].
    """

    tokens: Tensor  # int64 [T] token ids
    positions: Tensor  # int64 [T] position of each token in its sequence
    cache_at: Tensor  # int64 [T] where its key and value go: page * page_size + offset
    cu_query: Tensor  # int32 [R + 1] running sum of query lengths
    context: Tensor  # int32 [R] context length, this step's tokens included
    page_table: Tensor  # int32 [R, P], padded with 0
    draw_at: Tensor  # int64 [D] index into T of the tokens behind which is drawn
    query_lengths: list[int]  # host copy: tokens computed per row
    context_lengths: list[int]  # host copy of `context`
    adapted: "Sequence[Span]" = ()  # tokens with an adapter
    # One token a row, and what is computed may be recorded: the lengths above hold whenever it runs again, so contexts
    # are what the tensors say, and context_lengths and the page table's width are bounds of them.
    recorded: bool = False


class KVShape(NamedTuple):
    """What a model keeps per token: one key and one value of head_dim numbers for each KV head of each layer; and how
    its queries see them."""

    layers: int
    heads: int  # query heads; a multiple of kv_heads
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    # Of each layer: a query sees the last so many positions, its own included; None: all. Empty: None for all layers.
    windows: tuple[int | None, ...] = ()
    softcap: float | None = None  # c: a score s counts as c * tanh(s / c)
    kernels: Kernels | None = None  # what computes on CPU; None: torch
    gpu: Gpu | None = None  # what computes on a GPU; None: torch
    stored: torch.dtype | None = None  # on a GPU, what keys and values are kept as; None: as they are
    # Of each layer, what keys and values are divided by where they are kept in 8 bits. Empty: 1.
    scales: tuple[tuple[float, float], ...] = ()

    @property
    def kept(self) -> torch.dtype:
        """The type of the cache."""
        return self.stored or self.dtype

    def divisors(self, layer: int) -> tuple[float, float]:
        """What a layer's keys and values in the cache have been divided by."""
        return self.scales[layer] if self.scales and self.kept.itemsize == 1 else (1.0, 1.0)

    def window(self, layer: int) -> int | None:
        """The window of a layer."""
        return self.windows[layer] if self.windows else None


class Attention(Protocol):
    """A backend: owns the KV memory and is the only code that indexes pages.

    `plan` is called once per step, `write_and_attend` once per layer with that plan.
    """

    page_size: int

    def plan(self, batch: Batch) -> Any:
        """Whatever can be derived once for all layers of a step (tiles, gathers, masks)."""

    def write_and_attend(self, plan: Any, layer: int, qkv: Tensor, scale: float) -> Tensor:
        """Stores the keys and values of this step, then attends causally with its queries over each row's whole
        context. `qkv` [T, heads + 2 * kv_heads, head_dim] has each token's queries, keys and values. Returns
        [T, heads, head_dim] in their dtype."""


@runtime_checkable
class Recordable(Attention, Protocol):
    """A backend that computes recorded batches too."""

    spare: int  # number of a page that no request has

    def bounds(self, rows: int, longest: int) -> list[int]:
        """The longest contexts that steps of so many rows should be recorded for, ascending. Requests have up to
        `longest` tokens. Empty if none should."""


@runtime_checkable
class Readied(Attention, Protocol):
    """A backend whose memory the system gives when it is first written to, which takes long."""

    def ready(self, used: int, further: int) -> bool:
        """Has the system give some of the memory of so many further pages behind the first `used`; nobody has written
        to any page behind those. False: it has given all."""


class Reader(Protocol):
    """Wants the logits of more tokens than those that draw, few at a time: together they might not fit."""

    blocks: Sequence[Tensor]  # int64 [n] indices into T each

    def read(self, logits: Tensor) -> None:
        """Takes the raw logits float32 [n, vocab_size] of the next block."""


class Again(NamedTuple):
    """Computes `Model.best` of whatever the columns of a batch hold by then."""

    batch: Batch
    calls: tuple[Callable[[], object], ...]  # one after the other
    best: Best  # what they leave is always here


class Footprint(NamedTuple):
    """What a model's matrices take in memory."""

    bytes: int
    numbers: int


class Model(Protocol):
    """A causal language model over a paged cache."""

    vocab_size: int
    context: int  # the most tokens that a sequence may have
    kv: KVShape
    footprint: Footprint
    device: torch.device
    unrecordable: str | None  # why a forward pass on a GPU cannot be recorded, if it cannot

    def forward(self, batch: Batch, attention: Attention, reader: Reader | None = None) -> Tensor:
        """Raw logits, float32 [D, vocab_size], where tokens are drawn. A reader is given those that it wants."""

    def best(self, batch: Batch, attention: Attention, reader: Reader | None = None) -> Best:
        """The best of these logits, where nothing else is needed of them: no bit differs, but there may be less to
        do."""

    def again(self, batch: Batch, attention: Attention) -> "Again | None":
        """For steps of these rows, one token each, as far as the page table is wide. None: it would save nothing."""

    def adapter(self, directory: Path) -> Any:
        """The LoRA adapter in a directory, ready to compute with this model. Raises UserError where there is none."""
