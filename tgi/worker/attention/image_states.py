"""Keys and values of images, for a model whose layers attend to them (Llama 3.2 Vision).

They are in pages of fixed memory, which a step reads by page tables as it reads those of tokens: so a program of the
CPU kernels and a CUDA graph read them, too. Images that follow each other without text between them are one sequence,
of which a token sees the first part, up to an image.

On CPU each query is computed alone, over exactly the keys that it sees, or by our kernels, which sum each row in an
order of its own. So its bits are the same in any batch and in any chunk.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tgi.worker.attention.cuda import launches, to_cache_dtype
from tgi.worker.attention.interface import KVCacheSpec, SeenImages
from tgi.worker.cpu_kernels.arena import map_region
from tgi.worker.cpu_kernels.kernels import PAGE_SIZE, AttentionRows, KVCache
from tgi.worker.device_copies import copy_columns_to_device, copy_to_device
from tgi.worker.kv_cache_sizes import GPU_PAGE_SIZE

# What the layers make of an image: of each, keys and values [n, 2 * kv_heads, head_dim].
Projected = Sequence[Tensor]


class TooManyImages(Exception):
    """A step sees more images than there is memory for."""


class StoredImages(NamedTuple):
    """Images that follow each other."""

    pages: list[int]
    ends: list[int]  # the states up to the end of each image


class Run(NamedTuple):
    """Consecutive tokens of a step that see the first `context` states of these images; 0: none."""

    tokens: int
    images: StoredImages | None = None
    context: int = 0


class ImageStates:
    """Implements ImageMemory: the states of the images used last, in memory for `images` images of up to `largest`
    states. `kv`: of the layers that attend to them, counted on their own. `project` makes what these layers keep of a
    tower's result [n, hidden].
    """

    def __init__(
        self,
        kv: KVCacheSpec,
        images: int,
        largest: int,
        device: torch.device,
        project: Callable[[Tensor], Projected],
    ) -> None:
        self.project = project
        self._kv = kv
        self._device = device
        self._kernels = kv.cpu_kernels if device.type == "cpu" else None
        self.page_size = GPU_PAGE_SIZE if self._kernels is None else PAGE_SIZE
        self.pages = images * -(-largest // self.page_size)  # the one after the last stays zero
        shape: tuple[int, ...] = (2, self.pages + 1, self.page_size, kv.kv_heads, kv.head_dim)
        if self._kernels is not None:
            shape = (self.pages + 1, kv.kv_heads, 2, PAGE_SIZE, kv.cache_head_dim)
        self._memory = [_zeros(shape, kv.dtype, device) for _ in range(kv.layers)]
        # For a program: the address of each layer's memory.
        self.addresses = torch.tensor([memory.data_ptr() for memory in self._memory])
        self._counters = None if kv.gpu_kernels is None else kv.gpu_kernels.split_counters(device)
        self._free = list(range(self.pages))[::-1]
        self._stored: OrderedDict[tuple[bytes, ...], StoredImages] = OrderedDict()
        self._used: set[tuple[bytes, ...]] = set()  # in this step
        # Of each slot, on the device, for captured steps: `mirror`.
        self._tables: Tensor | None = None
        self._contexts = torch.empty(0)
        self._placed: dict[int, tuple[StoredImages, int]] = {}  # what the slots have there

    def begin_step(self) -> None:
        """From now on, images of earlier steps may be removed."""
        self._used.clear()

    def find(self, digests: tuple[bytes, ...], make: Callable[[], Sequence[Projected]]) -> StoredImages:
        """The images of these contents, which `make` projects if they are not there. Raises TooManyImages."""
        if (found := self._stored.get(digests)) is None:
            made = make()
            ends = np.cumsum([len(image[0]) for image in made]).tolist()
            found = StoredImages(self._allocate(-(-ends[-1] // self.page_size)), ends)
            for layer, parts in enumerate(zip(*made, strict=True)):
                self._write(layer, found.pages, torch.cat(parts))
            self._stored[digests] = found
        self._stored.move_to_end(digests)
        self._used.add(digests)
        return found

    def _allocate(self, pages: int) -> list[int]:
        while len(self._free) < pages:
            unused = next((one for one in self._stored if one not in self._used), None)
            if unused is None:
                raise TooManyImages(
                    f"the images of one step take more than the {self.pages} pages of {self.page_size} states that "
                    "there are for them"
                )
            self._free += self._stored.pop(unused).pages
        return [self._free.pop() for _ in range(pages)]

    def _write(self, layer: int, pages: list[int], pairs: Tensor) -> None:
        at = np.arange(len(pairs))
        places = np.array(pages)[at // self.page_size] * self.page_size + at % self.page_size
        if self._kernels is not None:
            self._kernels.write_kv(KVCache(self._by_head(layer), 0), pairs, torch.from_numpy(places))
            return
        pairs = to_cache_dtype(pairs, self._kv.dtype).unflatten(1, (2, -1)).transpose(0, 1)
        self._memory[layer].flatten(1, 2).index_copy_(1, copy_to_device(places, self._device), pairs)

    def _by_head(self, layer: int) -> Tensor:
        """The memory of a layer as our CPU kernels take it."""
        return self._memory[layer].view(torch.uint8).view(self.pages + 1, self._kv.kv_heads, -1)

    def seen(self, runs: Sequence[Run]) -> SeenImages | None:
        """What the tokens of a step see; None: none sees any image."""
        contexts = np.array([run.context for run in runs], np.int32)
        if not contexts.any():
            return None
        lens = np.array([run.tokens for run in runs])
        table = np.full((len(runs), -(-int(contexts.max()) // self.page_size)), self.pages, np.int32)
        for row, (_, images, context) in zip(table, runs, strict=True):
            if images is not None:
                used = -(-context // self.page_size)
                row[:used] = images.pages[:used]
        bounds, last = np.append(0, lens.cumsum()).astype(np.int32), np.repeat(np.maximum(contexts, 1) - 1, lens)
        columns = np.repeat(contexts > 0, lens), bounds, np.maximum(contexts, 1), table.ravel(), last
        sees, cu_lens, seen, pages, last_keys = copy_columns_to_device(columns, self._device)
        return SeenImages(
            states=self,
            sees=sees.bool()[:, None],
            cu_lens=cu_lens.int(),
            contexts=seen.int(),
            table=pages.int().view(table.shape),
            last_keys=last_keys.int(),
            lens_host=lens.tolist(),
            contexts_host=contexts.tolist(),
        )

    def mirror(self, slots: int) -> None:
        """Keeps on the device from now on what each of the slots sees, for `of_slots`."""
        if self._tables is None:
            self._tables = torch.full((slots, self.pages), self.pages, dtype=torch.int32, device=self._device)
            self._contexts = torch.zeros(slots, dtype=torch.int32, device=self._device)

    def place(self, slot: int, images: StoredImages | None, context: int) -> None:
        """The next tokens of this slot see these states."""
        placed = self._placed.get(slot)
        if self._tables is None or placed == (None if images is None else (images, context)):
            return
        if images is None:
            del self._placed[slot]
            self._contexts[slot].zero_()
            return
        self._placed[slot] = images, context
        pages, count = copy_columns_to_device((np.array(images.pages), np.array([context])), self._device)
        self._tables[slot, : len(images.pages)] = pages.int()
        self._contexts[slot] = count.int()[0]

    def of_slots(self, rows: Tensor, tokens: Tensor, cu_lens: Tensor, lens_host: list[int]) -> SeenImages:
        """What the rows of a captured step see, which belong to the slots `rows` [R] and have tokens of the slots
        `tokens` [T]."""
        assert self._tables is not None
        seen = self._contexts.index_select(0, tokens)
        return SeenImages(
            states=self,
            sees=(seen > 0)[:, None],
            cu_lens=cu_lens,
            contexts=self._contexts.index_select(0, rows).clamp(min=1),
            table=self._tables.index_select(0, rows),
            last_keys=seen.clamp(min=1) - 1,
            lens_host=lens_host,
            contexts_host=[self.pages * self.page_size] * len(lens_host),
        )

    def attend(self, layer: int, queries: Tensor, seen: SeenImages, scale: float) -> Tensor:
        if self._kernels is not None:
            cache = KVCache(self._by_head(layer), 0)
            return self._kernels.paged_attention(
                cache, queries.contiguous(), program_rows(seen), scale, None, None, shared_heads=self._kv.heads
            )
        if (kernels := self._kv.gpu_kernels) is not None:
            keys, values = self._memory[layer]
            result = torch.empty_like(queries, memory_format=torch.contiguous_format)
            for rows in launches(seen.lens_host, seen.cu_lens, seen.table, seen.contexts, kernels.batch_invariant):
                last_keys = None if rows.starts is None else seen.last_keys
                kernels.paged_attention(
                    queries, keys, values, rows, result, scale, counters=self._counters, last_keys=last_keys
                )
            return result.flatten(1)
        return self._attend_run_by_run(layer, queries, seen, scale).flatten(1)

    def _attend_run_by_run(self, layer: int, queries: Tensor, seen: SeenImages, scale: float) -> Tensor:
        result = torch.zeros_like(queries, memory_format=torch.contiguous_format)
        first = 0
        for table, count, context in zip(seen.table, seen.lens_host, seen.contexts_host, strict=True):
            stop = first + count
            if context:
                used = table[: -(-context // self.page_size)].long()
                pairs = self._memory[layer][:, used].flatten(1, 2)[:, :context].transpose(1, 2)
                together = 1 if self._device.type == "cpu" else count
                for begin in range(first, stop, together):
                    result[begin : begin + together] = _attend(queries[begin : begin + together], pairs, scale)
            first = stop
        return result


def program_rows(seen: SeenImages) -> AttentionRows:
    """The runs of a step as our CPU kernels take them."""
    rows, width = seen.table.shape
    lens, contexts = seen.cu_lens.data_ptr(), seen.contexts.data_ptr()
    return AttentionRows(0, lens, contexts, seen.table.data_ptr(), rows, width, seen.last_keys.data_ptr())


def _attend(queries: Tensor, pairs: Tensor, scale: float) -> Tensor:
    """Of queries [n, heads, dim] to pairs [2, kv_heads, states, dim]. The queries of a KV head are rows of one matrix,
    so that its keys are read once."""
    count, heads, dim = queries.shape
    kv_heads = pairs.shape[1]
    by_head = queries.view(count, kv_heads, -1, dim).transpose(0, 1).reshape(1, kv_heads, -1, dim)
    mixed = F.scaled_dot_product_attention(by_head, pairs[:1], pairs[1:], scale=scale)
    return mixed.view(kv_heads, count, -1, dim).transpose(0, 1).reshape(count, heads, dim)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On CPU, memory that the operating system maps at its first write."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(map_region(math.prod(shape) * dtype.itemsize), dtype=dtype).view(shape)
