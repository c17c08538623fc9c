"""CUDA graphs: steps on a GPU whose hundreds of kernels the host launches with one call.

A step in which each row computes one token is padded to the next captured batch size. A graph reads fixed memory: the
slot and position of each row, which are written before the replay, the ids and page tables of all slots, the weights
and the KV cache; in a step with tokens of images the embeddings of all tokens, too. It writes the logits to fixed
memory, and the hidden states where something else reads them: prompt logprobs, and a head that drafts,
which has graphs of its own. A stream executes in order, so a step may be launched before the previous one has finished.

A step with prompt chunks or drafts is one graph as well, while it has so few tokens that the host would need longer to
launch its kernels than the GPU to compute them: some rows of one token each, then a number of tokens, padded too, which
the other rows share as they like. The graph reads their bounds. Longer chunks are computed without a graph, together
with the decode rows of their step: a graph for these would read the weights twice.

Padding rows and tokens belong to a slot that is never occupied. They compute token 0 at position 0 and write to a
padding page.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgi.microkernel.errors import UserError
from tgi.worker.attention.image_states import ImageStates
from tgi.worker.attention.interface import CapturableBackend, ForwardBatch, ImageBlocks, ImageRows, SeenImages
from tgi.worker.device_copies import pin_for_copy
from tgi.worker.engine.input_batch import Slots, StepRows
from tgi.worker.gpu_kernels.lora_arguments import AdapterTiles, PlanShape, padded_rank, write_plan
from tgi.worker.head_logits import HeadLogits
from tgi.worker.lora.projections import PROJECTION_GROUPS
from tgi.worker.lora.weights import LoraWeights
from tgi.worker.models.interface import LogitsReader

log = logging.getLogger(__name__)

Replay = Callable[[], None]
# Largest difference between the logits of a graph and those of the same step without, as a share of the largest logit.
# They should be equal.
TOLERANCE = 0.05
# A GPU computes a chunk of this many operations about as long as a host launches the kernels of a step: 8e12 of them
# take an H100 13 ms. Longer chunks are not captured.
LAUNCHED_OPERATIONS = 8e12
MOST_CHUNK_TOKENS = 2048  # of a captured step
DRAFTED = 16  # tokens of a row at most in steps with drafts alone; a power of two
# A layout with chunks or drafts is captured when it is needed for this time, since that takes as long as a few steps.
USES_BEFORE_CAPTURE = 3
MOST_RAGGED_GRAPHS = 48  # of steps with chunks or drafts; further layouts run without


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
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile: one that loads an adapter allocates memory.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        return graph.replay


class GraphKey(NamedTuple):
    """The layout of a captured step: `rows` rows of one token each, then `tokens` tokens of `others` rows."""

    rows: int
    rank: int = 0  # the highest of an adapter, as in AdapterTiles; 0: no row has an adapter
    tokens: int = 0
    longest: int = 0  # tokens of one of the other rows, for which attention chooses its tiles; `tokens`: prompt chunks
    seeing: bool = False  # some row sees images, in a model whose layers attend to them
    embedded: bool = False  # EmbeddedTokens take the place of the tokens

    @property
    def drafted(self) -> bool:
        """Whether the other rows are short, and all their positions are sampled."""
        return self.longest < self.tokens or 0 < self.tokens <= DRAFTED

    @property
    def others(self) -> int:
        """The rows that share `tokens`, of which at least one is padding."""
        if not self.tokens:
            return 0
        return self.tokens // 2 + 2 if self.drafted else max(4, -(-self.tokens // 16))

    @property
    def query_lens(self) -> list[int]:
        """Tokens of each row as attention sees them at the capture: their sum and their maximum count."""
        if not self.tokens:
            return [1] * self.rows
        whole, rest = divmod(self.tokens, self.longest)
        ragged = [self.longest] * whole + [rest] * bool(rest)
        return [1] * self.rows + ragged + [0] * (self.others - len(ragged))


class StepColumns(NamedTuple):
    """The memory that a graph reads, int64: views of one column, so that one copy writes all. Those from `bounds` on
    are empty where each row has one token."""

    slots: Any  # [tokens of all rows]
    positions: Any  # [tokens of all rows]
    shifted: Any  # [tokens of all rows]: the positions for the rotary embedding, behind images
    bounds: Any  # [all rows + 1]: the first token of each row
    row_slots: Any  # [all rows]
    context_lens: Any  # [all rows]
    logits_indices: Any  # [sampled positions]
    kept: Any  # [tokens of all rows], with drafts: ForwardBatch.kept_states
    plan: Any  # AdapterTiles.plan; empty: no row has an adapter

    @staticmethod
    def of(column: Any, key: GraphKey, sampled: int) -> "StepColumns":
        """The parts of a tensor or array; the plan takes the rest."""
        rows, tokens = key.rows + key.others, key.rows + key.tokens
        views, start = [], 0
        for length in (
            *(tokens, tokens, tokens),
            *((rows + 1, rows, rows, sampled) if key.tokens else (0,) * 4),
            tokens * key.drafted,
        ):
            views.append(column[start : start + length])
            start += length
        views.append(column[start:])
        return StepColumns(*views)

    @staticmethod
    def length(key: GraphKey, sampled: int) -> int:
        """The length of that column without a plan."""
        tokens = (3 + key.drafted) * (key.rows + key.tokens)
        return tokens + 3 * (key.rows + key.others) + 1 + sampled if key.tokens else tokens


class CapturableModel(Protocol):
    """What is captured of a model."""

    vocab_size: int

    def forward_hidden(self, batch: ForwardBatch, attention: CapturableBackend) -> Tensor:
        """The hidden states [rows, hidden], of which the first T belong to the batch."""

    def head(self, hidden: Tensor, indices: Tensor) -> HeadLogits:
        """The result for the rows `indices` of `hidden`."""

    def read_hidden(self, hidden: Tensor, reader: LogitsReader | None) -> None:
        """Gives the hidden states [T, hidden] of a step to what reads them."""

    def embed_batch(self, batch: ForwardBatch) -> Tensor:
        """The embeddings [T, hidden] of a step's tokens, or what they have in place of them."""


class EmbeddedTokens(NamedTuple):
    """The memory that a graph reads of a step with tokens of images: of each token, in the graph's layout."""

    embeddings: Tensor  # [most tokens, hidden]
    deeper: tuple[Tensor, ...]  # [most tokens, hidden] each: ImageRows.deeper, zeros for other tokens
    turns: Tensor  # int64 [3, most tokens]: the positions for the rotary embedding
    blocks: ImageBlocks | None  # of [most tokens]; None: all tokens are causal

    @staticmethod
    def allocate(tokens: int, hidden: Tensor, batch: ForwardBatch) -> "EmbeddedTokens":
        """For steps like this one, whose embeddings are `hidden` [T, hidden]."""
        assert batch.images is not None
        zeros = hidden.new_zeros(tokens, hidden.shape[1])
        blocks = batch.blocks and batch.blocks._replace(last_keys=batch.blocks.last_keys.new_zeros(tokens))
        deeper = tuple(zeros.clone() for _ in batch.images.deeper)
        return EmbeddedTokens(zeros, deeper, batch.positions.new_zeros(3, tokens), blocks)


class CapturedModel(NamedTuple):
    """A model that is captured, and which of its steps."""

    model: CapturableModel
    attention: CapturableBackend
    shifts: bool = False  # PromptParts.shifts
    states: ImageStates | None = None  # PromptParts.states
    embedded: bool = False  # whether steps with tokens of images are captured
    bidirectional: bool = False  # such tokens see later ones
    adapters: bool = True  # whether the adapters of the slots are for this model
    batch_invariant: bool = False  # of adapters: PlanShape.of
    ahead: int = 0  # a token is the id of its slot that is so far behind its position
    inputs: Tensor | None = None  # [most_tokens, hidden] that the model reads: of each token, in the graph's layout
    prompt_logprobs: bool = False  # some steps have a reader
    hidden_states: bool = False  # the model gives its hidden states to something in each step

    def keeps_hidden(self, key: GraphKey) -> bool:
        """Whether a graph keeps its hidden states. Steps of one token in each row have no reader."""
        return self.hidden_states or (self.prompt_logprobs and key.tokens > 0)


class CapturedGraph(NamedTuple):
    """A captured step with `sampled` rows of logits."""

    key: GraphKey
    sampled: int
    inputs: Tensor  # int64: StepColumns, read at replay
    replay: Replay


def chunk_tokens(numbers: int, asked: tuple[int, ...] = ()) -> int:
    """The tokens of prompt chunks in a captured step at most, for a model with this number of parameters. 0 if the
    settings name the sizes of decode steps: then these alone are captured."""
    return 0 if asked else min(MOST_CHUNK_TOKENS, max(256, int(LAUNCHED_OPERATIONS / (2 * max(1, numbers)))))


def chunk_sizes(most: int) -> list[int]:
    """Numbers of tokens of prompt chunks to capture, ascending: where products take most of the time, padding by at
    most a seventh."""
    sizes = [64, 128, *range(256, 1024, 128), *range(1024, MOST_CHUNK_TOKENS + 1, 256)]
    return [tokens for tokens in sizes if tokens <= most]


def lead_sizes(max_rows: int) -> list[int]:
    """Numbers of decode rows before chunks, ascending."""
    sizes = [0, 8, 32, *range(64, 256, 64), *range(256, 512, 128), *range(512, max_rows, 256)]
    return [*(rows for rows in sizes if rows < max_rows), max_rows]


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


class AdapterTable:
    """The adapters of running requests by number, and their matrices in fixed memory on the device, which graphs read:
    AdapterTiles.table. There are `slots` slots, thus at most as many adapters at a time. An adapter that no slot has
    any more leaves its number to another."""

    def __init__(self, slots: int, batch_invariant: bool) -> None:
        self._slots = slots
        self._batch_invariant = batch_invariant
        self._held: dict[int, LoraWeights] = {}  # by slot
        self._numbers: dict[LoraWeights, int] = {}
        self._of_slots = np.full(slots, -1)
        self._table: Tensor | None = None
        self._dtype = torch.float32
        self._rank = 0

    def update(self, adapters: dict[int, LoraWeights]) -> int:
        """Takes the adapters of the slots; on a GPU the table is written in the order of the kernels. Returns the rank
        for which a step has to be captured, at least that of any adapter so far."""
        if adapters == self._held:
            return self._rank
        running = dict.fromkeys(adapters.values())
        self._numbers = {adapter: number for adapter, number in self._numbers.items() if adapter in running}
        free = iter(sorted(set(range(self._slots)) - set(self._numbers.values())))
        for adapter in running.keys() - self._numbers.keys():
            number = next(free)
            self._write(number, adapter)
            self._numbers[adapter] = number
        self._of_slots.fill(-1)
        self._of_slots[list(adapters)] = [self._numbers[adapter] for adapter in adapters.values()]
        self._held = dict(adapters)
        return self._rank

    def write_plan(self, to: StepColumns, key: GraphKey) -> None:
        """Writes the plan of a step whose other columns are complete."""
        if (shape := self.plan_shape(key)) is not None:
            write_plan(to.plan, self._of_slots[to.slots], shape)

    def plan_shape(self, key: GraphKey) -> PlanShape | None:
        """Of a captured step; None: no row has an adapter."""
        rows, tokens = key.rows + key.others, key.rows + key.tokens
        return PlanShape.of(tokens, rows, self._dtype, self._batch_invariant) if key.rank else None

    def tiles(self, plan: Tensor, key: GraphKey) -> AdapterTiles | None:
        """The tiles of a captured step whose plan stands in fixed memory; None: no row has an adapter."""
        if (shape := self.plan_shape(key)) is None:
            return None
        assert self._table is not None
        return AdapterTiles.of(self._table, plan, shape, key.rank, self._dtype, PROJECTION_GROUPS)

    def _write(self, number: int, adapter: LoraWeights) -> None:
        assert adapter.table is not None
        if self._table is None:
            shape, device = adapter.table.shape, adapter.table.device
            self._table = torch.zeros(self._slots, *shape, dtype=torch.int64, device=device)
            self._dtype = adapter.dtype
        self._table[number].copy_(adapter.table)
        self._rank = max(self._rank, padded_rank(adapter.rank))


def most_tokens(batch_sizes: Sequence[int], chunk_tokens: int) -> int:
    """The tokens of the largest captured step, padding included."""
    return max(batch_sizes, default=0) + max(chunk_sizes(chunk_tokens), default=0)


class DecodeGraphs:
    """The captured steps of a model. Requests have at most `max_total_tokens` tokens. Steps with prompt chunks of up
    to `chunk_tokens` tokens, and with drafts, are captured too; 0: neither."""

    def __init__(
        self,
        captured: CapturedModel,
        slots: Slots,
        batch_sizes: list[int],
        max_total_tokens: int,
        capturer: GraphCapturer,
        chunk_tokens: int = 0,
    ) -> None:
        self._captured = captured
        self._model, self._attention = captured.model, captured.attention
        self._slots = slots
        self._max_total_tokens = max_total_tokens
        self._capturer = capturer
        self._page_table = slots.mirror_page_table(captured.attention.padding_page)
        if captured.states is not None:
            captured.states.mirror(slots.padding_slot + 1)
        self._sizes = sorted(batch_sizes)  # the first that is large enough is replayed
        self._most_rows = max(batch_sizes, default=0)
        ragged = chunk_tokens > 0
        self._chunk_sizes = chunk_sizes(chunk_tokens) if ragged else []
        self._lead_sizes = lead_sizes(self._most_rows) if ragged else []
        self._uses: Counter[GraphKey] = Counter()  # of layouts that are not captured
        self._logits: HeadLogits | None = None  # of the largest graph; all write to its first rows
        self._most_tokens = most_tokens(batch_sizes, chunk_tokens)
        self._embedded: EmbeddedTokens | None = None  # made for the first step that has such tokens
        self._hidden: Tensor | None = None  # [most tokens, hidden], to whose first rows graphs write hidden states
        self._graphs: dict[GraphKey, CapturedGraph] = {}
        self._adapters = AdapterTable(slots.padding_slot + 1, captured.batch_invariant)

    def __len__(self) -> int:
        """The number of graphs if all are captured."""
        return len(self._sizes) + (MOST_RAGGED_GRAPHS if self._lead_sizes else 0)

    @torch.inference_mode()
    def capture(self, limit: int | None = None) -> None:
        """Captures the graphs of decode steps, the largest first; with `limit`, only that many, and the others when a
        step needs them. The largest with chunks comes before them, so that later ones need no more memory. Raises
        UserError if a graph cannot be captured or gives other logits than the same step without it."""
        began = time.monotonic()
        self._logits = self._hidden = None
        self._graphs = {}
        keys = [GraphKey(size) for size in self._sizes[::-1][:limit]]
        if self._chunk_sizes:
            most = self._chunk_sizes[-1]
            keys.insert(0, GraphKey(self._lead_sizes[-1], tokens=most, longest=most))
        for key in keys:
            self._graphs[key] = self._capture_one(key)
        log.debug(
            "captured %d CUDA graphs for steps of %s rows in %.1f s",
            len(self._graphs),
            ", ".join(str(key.rows) for key in sorted(self._graphs)) or "no",
            time.monotonic() - began,
        )

    def try_replay(
        self,
        rows: StepRows,
        reader: LogitsReader | None = None,
        inputs: Tensor | None = None,
        seeing: bool = False,
        parts: ForwardBatch | None = None,
    ) -> HeadLogits | None:
        """The logits of the E sampled positions of these rows, valid until the next step, as Model.forward_head gives
        them. `inputs` [T, hidden]: of a model with CapturedModel.inputs. `seeing`: PromptParts.place of these rows.
        `parts`: the batch, if it has tokens of images. None if no graph fits."""
        graph = self._find_graph(rows, seeing, parts)
        if graph is None or self._logits is None:
            return None
        if reader is not None and not self._captured.keeps_hidden(graph.key):
            return None
        columns = self._columns(graph, rows)
        graph.inputs.copy_(pin_for_copy(columns, graph.inputs.device), non_blocking=True)
        reads_hidden = reader is not None or self._captured.hidden_states
        if inputs is None and parts is None and not reads_hidden:
            graph.replay()
            return self._logits_of(rows)
        lead = self._leading(graph.key, rows)
        rest = slice(graph.key.rows, graph.key.rows + int((rows.ends - rows.starts)[lead:].sum()))
        if inputs is not None and self._captured.inputs is not None:
            _spread(inputs, self._captured.inputs, lead, rest)
        if parts is not None:
            self._write_parts(parts, lead, rest)
        graph.replay()
        if self._hidden is not None and reads_hidden:
            hidden = self._hidden[:lead]
            if rest.start < rest.stop:
                hidden = self._hidden[rest] if not lead else torch.cat((hidden, self._hidden[rest]))
            self._model.read_hidden(hidden, reader)
        return self._logits_of(rows)

    def _logits_of(self, rows: StepRows) -> HeadLogits:
        assert self._logits is not None
        return self._logits._replace(values=self._logits.values[: len(rows.sampling_rows)])

    def _write_parts(self, batch: ForwardBatch, lead: int, rest: slice) -> None:
        """Writes the tokens of a step to EmbeddedTokens."""
        to, images = self._embedded, batch.images
        assert to is not None
        _spread(self._model.embed_batch(batch), to.embeddings, lead, rest)
        for level, target in enumerate(to.deeper):
            target.zero_()
            if images is not None:
                whole = target.new_zeros(len(batch.tokens), target.shape[1])
                _spread(whole.index_copy_(0, images.indices, images.deeper[level]), target, lead, rest)
        turns = batch.positions if batch.rope_positions is None else batch.rope_positions
        _spread(turns.expand(3, -1).T, to.turns.T, lead, rest)
        if to.blocks is not None:
            last_keys = batch.positions.int() if batch.blocks is None else batch.blocks.last_keys
            _spread(last_keys, to.blocks.last_keys, lead, rest)

    def _leading(self, key: GraphKey, rows: StepRows) -> int:
        """How many of the rows are those of one token in the layout; the others come after `key.rows` tokens."""
        if not key.tokens:
            return len(rows.slots)
        return 0 if rows.drafts is not None else min(_leading_ones(rows.ends - rows.starts), key.rows)

    def _find_graph(self, rows: StepRows, seeing: bool, parts: ForwardBatch | None) -> CapturedGraph | None:
        """The smallest graph for a step; None if the step is another or too large."""
        adapters = self._slots.adapters if self._captured.adapters else {}
        if not self._graphs:  # nothing is captured before `capture`
            return None
        plain = rows.plain_decode
        if not plain and not self._lead_sizes:
            return None
        if parts is not None and (plain or rows.drafts is not None or not self._fits(parts)):
            return None
        rank = 0
        if adapters and not adapters.keys().isdisjoint(rows.slots.tolist()):
            rank = self._adapters.update(adapters)
        if not plain:
            return self._find_ragged(rows, rank, seeing, parts is not None)
        while size := next((size for size in self._sizes if size >= len(rows.slots)), None):
            key = GraphKey(size, rank, seeing=seeing)
            if (graph := self._graphs.get(key) or self._capture_late(key)) is not None:
                return graph
            self._sizes.remove(size)
        return None

    def _fits(self, batch: ForwardBatch) -> bool:
        """Whether EmbeddedTokens has room for the tokens of images of this batch."""
        if not self._captured.embedded or batch.seen_images is not None:
            return False
        if self._embedded is None:
            if batch.images is None or self._captured.bidirectional != (batch.blocks is not None):
                return False
            self._embedded = EmbeddedTokens.allocate(self._most_tokens, self._model.embed_batch(batch), batch)
        return True

    def _find_ragged(self, rows: StepRows, rank: int, seeing: bool, embedded: bool) -> CapturedGraph | None:
        """The graph for a step with chunks or drafts. None if it is too large, or not captured yet or any more."""
        counts, drafts = rows.ends - rows.starts, rows.drafts is not None
        lead = 0 if drafts else _leading_ones(counts)
        tokens, longest = int(counts[lead:].sum()), int(counts[lead:].max(initial=0))
        drafts &= longest <= DRAFTED
        fitting = [
            next((size for size in sizes if size >= least), None)
            for sizes, least in ((self._lead_sizes, lead), (self._sizes if drafts else self._chunk_sizes, tokens))
        ]
        if rows.drafts is not None and not drafts and self._attention.state is not None:
            return None  # such a graph keeps no states before drafts
        if not longest or fitting[0] is None or fitting[1] is None:
            return None
        tokens = fitting[1]
        longest = min(tokens, 1 << (longest - 1).bit_length()) if drafts else tokens
        key = GraphKey(fitting[0], rank, tokens, longest, seeing, embedded)
        if len(rows.slots) - lead >= key.others or len(rows.sampling_rows) > self._sampled(key):
            return None
        if (graph := self._graphs.get(key)) is not None:
            return graph
        self._uses[key] += 1
        if self._uses[key] != USES_BEFORE_CAPTURE:  # above: it could not be captured
            return None
        if sum(key.tokens > 0 for key in self._graphs) >= MOST_RAGGED_GRAPHS:
            return None
        return self._capture_late(key)

    def _sampled(self, key: GraphKey) -> int:
        """The rows of logits of a graph."""
        return key.tokens if key.drafted else min(key.rows + key.others, self._most_rows)

    def _columns(self, graph: CapturedGraph, rows: StepRows) -> NDArray[np.int64]:
        """What a graph reads in a step of these rows: StepColumns."""
        key, count, padding = graph.key, len(rows.slots), self._slots.padding_slot
        column = np.zeros(graph.inputs.numel(), np.int64)
        to = StepColumns.of(column, key, graph.sampled)
        if not key.tokens:
            to.slots[:count], to.positions[:count] = rows.slots, rows.starts
            to.slots[count:] = padding
            np.add(to.positions, self._slots.shifts[to.slots], to.shifted)
            self._adapters.write_plan(to, key)
            return column
        to.slots.fill(padding)
        counts = rows.ends - rows.starts
        lead = self._leading(key, rows)
        # Rows after the leading ones are as far behind in the layout as that has padding before them.
        ones, others = slice(0, lead), slice(key.rows, key.rows + count - lead)
        to.slots[ones], to.positions[ones] = rows.slots[:lead], rows.starts[:lead]
        ends = counts[lead:].cumsum()
        ragged = slice(key.rows, key.rows + int(ends[-1]))
        to.slots[ragged] = np.repeat(rows.slots[lead:], counts[lead:])
        to.positions[ragged] = np.arange(ends[-1]) + np.repeat(rows.starts[lead:] - ends + counts[lead:], counts[lead:])
        np.add(to.positions, self._slots.shifts[to.slots], to.shifted)
        self._adapters.write_plan(to, key)
        to.row_slots.fill(padding)
        to.context_lens.fill(1)
        to.bounds[: key.rows] = np.arange(key.rows)
        to.bounds[key.rows] = key.rows
        to.bounds[key.rows + 1 :] = key.rows + key.tokens
        to.bounds[others.start + 1 : others.stop + 1] = key.rows + ends
        to.row_slots[ones], to.row_slots[others] = rows.slots[:lead], rows.slots[lead:]
        to.context_lens[ones], to.context_lens[others] = rows.ends[:lead], rows.ends[lead:]
        if rows.drafts is not None and key.drafted:
            self._slots.write_kept_states(to.kept, rows.drafts.counts, key.rows + ends)
        # The row after these has the tokens that are left.
        to.context_lens[others.stop] = max(1, key.tokens - int(ends[-1]))
        row_ends = np.concatenate((np.arange(1, lead + 1), key.rows + ends))
        of_rows = rows.sampling_rows
        to.logits_indices[: len(of_rows)] = (row_ends - rows.ends)[of_rows] + rows.sampling_positions - 1
        return column

    def _capture_late(self, key: GraphKey) -> CapturedGraph | None:
        """Captures a graph while requests run, which takes as long as a few steps. None if that fails: from now on the
        next larger graph serves, or the step runs without one."""
        began = time.monotonic()
        try:
            self._graphs[key] = self._capture_one(key)
        except (UserError, torch.OutOfMemoryError) as error:
            words = f"of {key.rows} rows" + f" and {key.tokens} further tokens" * bool(key.tokens)
            log.warning("steps %s use a larger CUDA graph, or none: %s", words, error)
            return None
        log.debug("captured a CUDA graph of %s in %.3f s", key, time.monotonic() - began)
        return self._graphs[key]

    def _capture_one(self, key: GraphKey) -> CapturedGraph:
        sampled = self._sampled(key) if key.tokens else key.rows
        inputs = torch.from_numpy(self._trial(key, sampled)).to(self._page_table.device)

        def forward() -> HeadLogits:
            batch = self._build_batch(inputs, key, sampled)
            hidden = self._model.forward_hidden(batch, self._attention)
            if self._captured.keeps_hidden(key):
                if self._hidden is None:
                    self._hidden = hidden.new_zeros(self._most_tokens, hidden.shape[1])
                self._hidden[: len(batch.tokens)].copy_(hidden[: len(batch.tokens)])
            return self._model.head(hidden, batch.logits_indices)

        computed = forward()  # the first run loads and compiles kernels, which cannot be captured
        if self._logits is None:
            rows = max(sampled, self._most_rows)
            values = computed.values.new_empty(rows, computed.values.shape[1])
            self._logits = computed._replace(values=values)
        logits = self._logits.values[:sampled].zero_()

        def run() -> None:
            logits.copy_(forward().values)

        words = f"{key.rows} rows" + f" and {key.tokens} further tokens" * bool(key.tokens)
        try:
            graph = CapturedGraph(key, sampled, inputs, self._capturer.capture(run))
            graph.replay()
            self._check(words, logits, computed.values)
        except RuntimeError as error:
            reason = error.__context__ or error  # the first error; ending the capture failed because of it
            raise UserError(
                f"A step of {words} cannot be made a CUDA graph: {reason}. Start with --cuda-graphs 0."
            ) from error
        return graph

    def _trial(self, key: GraphKey, sampled: int) -> NDArray[np.int64]:
        """The inputs of a capture: padding rows of at most a page, so that no two tokens write to one place."""
        shape = self._adapters.plan_shape(key)
        column = np.zeros(StepColumns.length(key, sampled) + (0 if shape is None else shape.length), np.int64)
        to = StepColumns.of(column, key, sampled)
        to.slots.fill(self._slots.padding_slot)
        if key.tokens:
            ends = np.linspace(0, key.tokens, key.others + 1).astype(np.int64)
            counts = np.diff(ends)
            to.positions[key.rows :] = np.arange(key.tokens) - np.repeat(ends[:-1], counts)
            to.bounds[: key.rows] = np.arange(key.rows)
            to.bounds[key.rows :] = key.rows + ends
            to.row_slots.fill(self._slots.padding_slot)
            to.context_lens[: key.rows] = 1
            to.context_lens[key.rows :] = np.maximum(counts, 1)
            to.logits_indices[:] = np.arange(sampled) % (key.rows + key.tokens)
        to.shifted[:] = to.positions
        return column

    def _check(self, words: str, found: Tensor, expected: Tensor) -> None:
        """Raises UserError unless the logits [rows, vocab] are close to the expected ones."""
        wrong, largest = float((found - expected).abs().max()), float(expected.abs().max())
        if not wrong <= TOLERANCE * largest:
            raise UserError(
                f"The CUDA graph of a step of {words} gives a logit that differs by {wrong:.3g} from the "
                f"step without it; the largest logit is {largest:.3g}, and at most {TOLERANCE} of it are expected. "
                "Start with --cuda-graphs 0."
            )

    def _build_batch(self, inputs: Tensor, key: GraphKey, sampled: int) -> ForwardBatch:
        """The model's input, computed on the device from slots and positions. The host lengths are those of the longest
        request, so that tables which the model extends on demand (rotary angles) are complete before the capture."""
        given = StepColumns.of(inputs, key, sampled)
        slots, positions, size, device = given.slots, given.positions, self._slots.page_size, inputs.device
        if key.tokens:
            row_slots, bounds, context, logits = (
                given.row_slots,
                given.bounds.int(),
                given.context_lens.int(),
                given.logits_indices,
            )
        else:
            row_slots, context = slots, (positions + 1).int()
            bounds = torch.arange(key.rows + 1, dtype=torch.int32, device=device)
            logits = torch.arange(key.rows, device=device)
        tables, width = self._page_table.flatten(1), self._page_table.shape[2]
        pages = tables.index_select(1, slots * width + positions // size)
        ids = self._slots.id_indices(slots, positions + self._captured.ahead)
        tokens = self._slots.ids.view(-1).index_select(0, ids).long()
        turns, images, blocks = given.shifted if self._captured.shifts else None, None, None
        if key.embedded:
            assert self._embedded is not None
            embeddings, deeper, turns, blocks = self._embedded
            count = len(positions)
            every = torch.arange(count, device=device)
            images = ImageRows(every, embeddings[:count], tuple(level[:count] for level in deeper))
            turns = turns[:, :count] if self._captured.shifts else None
            blocks = blocks and blocks._replace(last_keys=blocks.last_keys[:count])
        if self._model.vocab_size < self._slots.vocab_size:  # of a draft model: see DraftRunner
            tokens = tokens.clamp_(max=self._model.vocab_size - 1)
        return ForwardBatch(
            tokens=tokens,
            positions=positions,
            slot_mapping=pages.long() * size + positions % size,
            cu_query_lens=bounds,
            context_lens=context,
            page_table=self._page_table.index_select(1, row_slots),
            logits_indices=logits,
            query_lens_host=key.query_lens,
            context_lens_host=[self._max_total_tokens] * (key.rows + key.others),
            state_slots=None if self._attention.state is None else self._slots.state_slots(row_slots).int(),
            rope_positions=turns,
            images=images,
            blocks=blocks,
            kept_states=given.kept.int() if key.drafted and self._attention.state is not None else None,
            adapter_tiles=self._adapters.tiles(given.plan, key),
            seen_images=self._seen_images(row_slots, slots, bounds, key) if key.seeing else None,
        )

    def _seen_images(self, rows: Tensor, tokens: Tensor, bounds: Tensor, key: GraphKey) -> SeenImages:
        assert self._captured.states is not None
        return self._captured.states.of_slots(rows, tokens, bounds, key.query_lens)


def _spread(source: Tensor, target: Tensor, lead: int, rest: slice) -> None:
    """Copies the tokens [T, ...] of a step to a graph's layout, where those from `lead` on are at `rest`."""
    target[:lead].copy_(source[:lead])
    target[rest].copy_(source[lead:])


def _leading_ones(counts: NDArray[np.int64]) -> int:
    """How many of the first rows compute one token."""
    (longer,) = (counts > 1).nonzero()
    return int(longer[0]) if len(longer) else len(counts)
