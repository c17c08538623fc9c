"""CUDA graphs: decode steps on a GPU whose hundreds of kernels the host launches with one call.

A step in which each row computes one token is padded to the next captured batch size. A graph reads fixed memory: the
slot and position of each row, which are written before the replay, the ids and page tables of all slots, the weights
and the KV cache. It writes the logits to fixed memory too. A stream executes in order, so a step may be launched before
the previous one has finished.

Padding rows belong to a slot that is never occupied. They compute token 0 at position 0 and write to a padding page.
"""

import logging
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from tgi.microkernel.errors import UserError
from tgi.worker.attention.interface import CapturableBackend, ForwardBatch
from tgi.worker.device_copies import pin_for_copy
from tgi.worker.engine.input_batch import Slots, StepRows
from tgi.worker.gpu_kernels.lora_arguments import LoraRuns
from tgi.worker.head_logits import HeadLogits
from tgi.worker.lora.projections import PROJECTION_GROUPS
from tgi.worker.lora.weights import LoraWeights
from tgi.worker.models.interface import Model

log = logging.getLogger(__name__)

Replay = Callable[[], None]
# Largest difference between the logits of a graph and those of the same step without, as a share of the largest logit.
# They should be equal.
TOLERANCE = 0.05


class GraphCapturer(Protocol):
    """Captures graphs."""

    def capture(self, run: Replay) -> Replay:
        """Returns a function that repeats, on the same memory, what `run` does on the device. `run` has run before."""


class CudaGraphCapturer:
    """Captures CUDA graphs that share the memory pool for intermediate results: no two are replayed concurrently. If
    the largest graph is captured first, the others need no more memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Replay) -> Replay:
        """See GraphCapturer."""
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile: one that loads an adapter allocates memory.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        return graph.replay


class GraphKey(NamedTuple):
    """What a captured step is for."""

    rows: int
    rank: int = 0  # the highest of an adapter; 0: no row has an adapter


class CapturedGraph(NamedTuple):
    """A decode step of `rows` rows."""

    rows: int
    inputs: Tensor  # int64 [2, rows]: slots and positions, read at replay
    replay: Replay


def graph_batch_sizes(requested: tuple[int, ...], max_rows: int) -> list[int]:
    """The batch sizes to capture, ascending; empty if 0 is requested, which is always alone.

    By default 1, 2, 4, then steps of 8 to 64, of 16 to 256 and of 32 to the `max_rows` of a step: padding rows cost
    little, and a graph costs memory and a moment when a step first needs it.
    """
    if 0 in requested:
        return []
    if requested:
        return sorted({rows for rows in requested if rows <= max_rows})
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_rows, 32)]
    return [*(rows for rows in sizes if rows < max_rows), max_rows]


class SlotAdapters:
    """The adapters of the `slots` slots in fixed memory on the device, which graphs read: see LoraRuns.table."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._held: dict[int, LoraWeights] = {}  # what the table has
        self._table: Tensor | None = None
        self._dtype = torch.float32
        self._rank = 0

    def update(self, adapters: dict[int, LoraWeights]) -> int:
        """Writes what has changed since the last call to the table; on a GPU in the order of the kernels. Returns the
        rank for which a step has to be captured: a power of two of at least any rank so far."""
        for slot in adapters.keys() | self._held.keys():
            adapter, held = adapters.get(slot), self._held.get(slot)
            if adapter is held:
                continue
            if adapter is None:
                assert self._table is not None
                self._table[slot].zero_()
                del self._held[slot]
                continue
            assert adapter.table is not None
            if self._table is None:
                shape, device = adapter.table.shape, adapter.table.device
                self._table = torch.zeros(self._slots, *shape, dtype=torch.int64, device=device)
                self._dtype = adapter.dtype
            self._table[slot].copy_(adapter.table)
            self._held[slot] = adapter
            self._rank = max(self._rank, 16, 1 << (adapter.rank - 1).bit_length())
        return self._rank

    def runs(self, slots: Tensor, bounds: Tensor, key: GraphKey) -> LoraRuns:
        """The runs of a step in which each of the slots [rows] has one token."""
        assert self._table is not None
        groups = frozenset(PROJECTION_GROUPS)
        return LoraRuns(self._table, slots.int(), bounds, key.rows, 1, key.rank, self._dtype, groups)


class DecodeGraphs:
    """The captured decode steps of an engine. Requests have at most `max_total_tokens` tokens."""

    def __init__(
        self,
        model: Model,
        attention: CapturableBackend,
        slots: Slots,
        batch_sizes: list[int],
        max_total_tokens: int,
        capturer: GraphCapturer,
    ) -> None:
        self._model = model
        self._attention = attention
        self._slots = slots
        self._max_total_tokens = max_total_tokens
        self._capturer = capturer
        self._page_table = slots.mirror_page_table(attention.padding_page)
        self._sizes = sorted(batch_sizes)  # the first that is large enough is replayed
        self._logits: HeadLogits | None = None  # of the largest graph; all write to its first rows
        self._graphs: dict[GraphKey, CapturedGraph] = {}
        self._adapters = SlotAdapters(slots.padding_slot + 1)

    def __len__(self) -> int:
        """The number of graphs if all are captured."""
        return len(self._sizes)

    @torch.inference_mode()
    def capture(self, limit: int | None = None) -> None:
        """Captures the graphs, the largest first; with `limit`, only that many, and the others when a step needs them.
        Raises UserError if a graph cannot be captured or gives other logits than the same step without it."""
        began = time.monotonic()
        self._logits = None
        keys = [GraphKey(size) for size in self._sizes[::-1][:limit]]
        self._graphs = {key: self._capture_one(key) for key in keys}
        log.debug(
            "captured %d CUDA graphs for decode steps of %s rows in %.1f s",
            len(self._graphs),
            ", ".join(str(key.rows) for key in sorted(self._graphs)) or "no",
            time.monotonic() - began,
        )

    def try_replay(self, rows: StepRows) -> HeadLogits | None:
        """The logits of these R rows, valid until the next step; none of them may need prompt logprobs. None if no
        graph fits."""
        graph = self._find_graph(rows)
        if graph is None or self._logits is None:
            return None
        count = len(rows.slots)
        inputs = np.zeros((2, graph.rows), np.int64)
        inputs[0] = self._slots.padding_slot
        inputs[:, :count] = rows.slots, rows.starts
        graph.inputs.copy_(pin_for_copy(inputs, graph.inputs.device), non_blocking=True)
        graph.replay()
        return self._logits._replace(values=self._logits.values[:count])

    def _find_graph(self, rows: StepRows) -> CapturedGraph | None:
        """The smallest graph for a step in which each row computes and samples one token, without drafts; None if the
        step is another or too large."""
        adapters = self._slots.adapters
        if not self._graphs:  # nothing is captured before `capture`
            return None
        if not rows.plain_decode:
            return None
        rank = 0
        if adapters and not adapters.keys().isdisjoint(rows.slots.tolist()):
            rank = self._adapters.update(adapters)
        while size := next((size for size in self._sizes if size >= len(rows.slots)), None):
            key = GraphKey(size, rank)
            if (graph := self._graphs.get(key) or self._capture_late(key)) is not None:
                return graph
        return None

    def _capture_late(self, key: GraphKey) -> CapturedGraph | None:
        """Captures a graph while requests run, which takes as long as a few steps. None if that fails: the next larger
        graph serves from now on."""
        began = time.monotonic()
        try:
            self._graphs[key] = self._capture_one(key)
        except (UserError, torch.OutOfMemoryError) as error:
            self._sizes.remove(key.rows)
            log.warning("decode steps of %d rows use a larger CUDA graph, or none: %s", key.rows, error)
            return None
        log.debug("captured a CUDA graph of %d rows in %.3f s", key.rows, time.monotonic() - began)
        return self._graphs[key]

    def _capture_one(self, key: GraphKey) -> CapturedGraph:
        rows = key.rows
        inputs = torch.zeros(2, rows, dtype=torch.int64, device=self._page_table.device)
        inputs[0] = self._slots.padding_slot

        def forward() -> HeadLogits:
            batch = self._build_batch(inputs)
            if key.rank:
                batch = batch._replace(lora_runs=self._adapters.runs(inputs[0], batch.cu_query_lens, key))
            return self._model.forward_head(batch, self._attention)

        computed = forward()  # the first run loads and compiles kernels, which cannot be captured
        if self._logits is None:
            self._logits = computed._replace(values=torch.empty_like(computed.values))
        logits = self._logits.values[:rows].zero_()

        def run() -> None:
            logits.copy_(forward().values)

        try:
            graph = CapturedGraph(rows, inputs, self._capturer.capture(run))
            graph.replay()
            self._check(rows, logits, computed.values)
        except RuntimeError as error:
            reason = error.__context__ or error  # the first error; ending the capture failed because of it
            raise UserError(
                f"A decode step of {rows} rows cannot be made a CUDA graph: {reason}. Start with --cuda-graphs 0."
            ) from error
        return graph

    def _check(self, rows: int, found: Tensor, expected: Tensor) -> None:
        """Raises UserError unless the logits [rows, vocab] are close to the expected ones."""
        wrong, largest = float((found - expected).abs().max()), float(expected.abs().max())
        if not wrong <= TOLERANCE * largest:
            raise UserError(
                f"The CUDA graph of a decode step of {rows} rows gives a logit that differs by {wrong:.3g} from the "
                f"step without it; the largest logit is {largest:.3g}, and at most {TOLERANCE} of it are expected. "
                "Start with --cuda-graphs 0."
            )

    def _build_batch(self, inputs: Tensor) -> ForwardBatch:
        """The model's input, computed on the device from slots and positions. The host lengths are those of the longest
        request, so that tables which the model extends on demand (rotary angles) are complete before the capture."""
        slots, positions = inputs
        rows, size, device = inputs.shape[1], self._slots.page_size, inputs.device
        table = self._page_table.index_select(1, slots)
        pages = table.gather(2, (positions // size).expand(len(table), -1)[:, :, None])[:, :, 0]
        return ForwardBatch(
            tokens=self._slots.ids.view(-1).index_select(0, self._slots.id_indices(slots, positions)).long(),
            positions=positions,
            slot_mapping=pages.long() * size + positions % size,
            cu_query_lens=torch.arange(rows + 1, dtype=torch.int32, device=device),
            context_lens=(positions + 1).int(),
            page_table=table,
            logits_indices=torch.arange(rows, device=device),
            query_lens_host=[1] * rows,
            context_lens_host=[self._max_total_tokens] * rows,
            state_slots=None if self._attention.state is None else self._slots.state_slots(slots).int(),
        )
