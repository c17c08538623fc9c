"""The input batch: the state of each slot, the checked rows of a step, and the tensors that model and sampler get.

`Slots` holds the state of running requests. `Slots.validate_rows` turns a step into `StepRows`. `BatchBuilder` turns
these into a `ForwardBatch` for the model and a `SamplingBatch` for the sampler.
"""

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgi.microkernel.errors import ProtocolError
from tgi.microkernel.messages.kv_groups import ONE_FULL_GROUP, KVGroup, paged_groups, recurrent_group
from tgi.microkernel.messages.protocol import (
    MAX_DRAFT_TOKENS,
    MAX_PROMPT_TOP_TOKENS,
    HeldPages,
    PageExtra,
    SlotAssignment,
    Step,
    decode,
)
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.worker.attention.interface import ForwardBatch
from tgi.worker.device_copies import copy_columns_to_device, copy_to_device
from tgi.worker.engine.interface import BadStep
from tgi.worker.engine.prompt_parts import PromptParts
from tgi.worker.lora.deltas import AdapterSpan
from tgi.worker.lora.registry import AdapterRegistry, missing_adapter_fault
from tgi.worker.sampling.grammar import GrammarManager
from tgi.worker.sampling.sampling_batch import SamplingBatch, SamplingColumns
from tgi.worker.sampling.token_bitmask import GrammarBitmask
from tgi.worker.sampling.verification import row_offsets
from tgi.worker.sampling.watermark import Watermark
from tgi.worker.vision.image_file import BadImage

# Values of Slots.num_computed that are not counts.
EMPTY = -2  # no request occupies the slot
NEW = -1  # nothing is computed yet; the first row may start after a cached prefix

NO_PAGE = -1  # in Step.page_ids and HeldPages.page_ids

Ints = NDArray[np.int64]
Number = TypeVar("Number", np.int32, np.int64)
IntsOrTensor = TypeVar("IntsOrTensor", Ints, Tensor)


class StepDrafts(NamedTuple):
    """The draft tokens of a step's R rows, D of which sample."""

    counts: Ints  # [R] drafts of each row
    lengths: Ints  # [D] positions that each sampling row samples: 1 + its drafts
    ids: Ints | None  # [sum(counts)]; None: the draft model proposes them


class StepRows(NamedTuple):
    """The R rows of a step as host columns, checked against the slots. D rows sample at E positions: after the known
    ids of the row, and after each of its drafts."""

    slots: Ints  # [R]
    starts: Ints  # [R] first position
    ends: Ints  # [R] context length after the step, drafts included
    sampling_rows: Ints  # [E] the row of each sampled position
    sampling_positions: Ints  # [E] the position of the token that is sampled
    drafts: StepDrafts | None = None  # None: no row has drafts, so E = D

    @property
    def plain_decode(self) -> bool:
        """Whether each row computes one token, samples the next one, and has no drafts."""
        if self.drafts is not None or len(self.sampling_rows) != len(self.slots):
            return False
        return not np.count_nonzero(self.ends - self.starts > 1)

    @property
    def logits_indices(self) -> Ints:
        """[E] the token before each sampled position, among the T tokens of the step."""
        stops = (self.ends - self.starts).cumsum()
        return (stops - self.ends)[self.sampling_rows] + self.sampling_positions - 1


class Slots:
    """State of `count` slots, each with room for `tokens` ids and, in each KV group, the pages of as many.

    Token ids live on the device, because the next step reads sampled ids before the host has them. Lengths and page
    tables live on the host, which knows them one step ahead.
    """

    def __init__(
        self,
        count: int,
        tokens: int,
        pages: int,
        page_size: int,
        vocab_size: int,
        device: torch.device,
        grammars: GrammarManager,
        adapter_registry: AdapterRegistry,
        groups: Sequence[KVGroup] = ONE_FULL_GROUP,
        images: PromptParts | None = None,
    ) -> None:
        self.width = tokens + 1
        self._groups = paged_groups(groups)
        self._sliding = np.array([group.slides for group in self._groups])
        self._recurrent = recurrent_group(groups)
        snapshots = 0 if self._recurrent is None else self._recurrent.snapshots
        self._snapshots = np.full(
            (snapshots, 2), NO_PAGE
        )  # of each: its slot while it holds that request, and its page
        self.page_size = page_size
        self._pages = pages
        self.vocab_size = vocab_size
        self.padding_slot = count  # never occupied; its ids are 0
        self.ids = torch.empty(count + 1, self.width, dtype=torch.int32, device=device)
        self.ids[self.padding_slot].zero_()
        # Table s * G + g belongs to slot s and group g. Pages before a sliding window are not read.
        self.page_table = np.zeros((count * len(self._groups), -(-self.width // page_size)), np.int32)
        self.num_known = np.zeros(count, np.int64)  # ids, sampled ones included
        self.num_computed = np.full(count, EMPTY)  # ids whose keys and values are in the cache; or EMPTY, or NEW
        self.num_pages = np.zeros(count * len(self._groups), np.int64)  # of each page table
        # A request keeps its pages at least until its latest row is computed, but for those that no later row needs. So
        # a page of an ended request still holds what it held then unless another request got it, to write it, in a
        # later step.
        self._steps = 0  # applied so far
        self._written_from = np.zeros(pages, np.int64)  # the step in which each page was given to be written
        self._latest_row = np.zeros(count, np.int64)  # the step of each slot's latest row
        self._extras: list[list[PageExtra]] = [[]] * count  # as in SlotAssignment
        self.touched_pages = 0  # 1 + the highest page id that any request has had
        self.params = SamplingColumns.allocate(count)
        self.prompt_logprobs_from = np.zeros(count, np.int64)  # as in SlotAssignment
        self.prompt_top_n = np.zeros(count, np.int64)
        self.adapters: dict[int, Any] = {}  # by slot, for requests with an adapter
        self.faults: dict[int, str] = {}  # by slot: why the request cannot continue
        self.shifts = np.zeros(count + 1, np.int64)  # PromptParts.shift
        self._grammars = grammars
        self._adapter_registry = adapter_registry
        self._images = images  # None: the model has no vision tower and no encoder
        self._encodes_prompt = images is not None and images.encodes_prompt
        self._device_page_table: Tensor | None = None

    def mirror_page_table(self, padding_page: int) -> Tensor:
        """Keeps a copy of the page tables on the device from now on, int32 [G, count + 1, pages of the longest
        request]. Entries that are not assigned, thus all of the padding slot, are `padding_page`. All slots must be
        empty at the first call; later calls, for another model, return the same copy."""
        if self._device_page_table is not None:
            return self._device_page_table
        shape = (len(self._groups), self.padding_slot + 1, self.page_table.shape[1])
        self._device_page_table = torch.full(shape, padding_page, dtype=torch.int32, device=self.ids.device)
        return self._device_page_table

    def reset(self) -> None:
        self.num_computed.fill(EMPTY)
        self.adapters.clear()
        self.faults.clear()
        self._grammars.reset()
        if self._images is not None:
            self._images.reset()

    def state_copies(self, step: Step) -> list[tuple[int, int]]:
        """The source and target of each of the step's copies of states, as slots of the StateCache. Raises BadStep. To
        be called before `apply_step`."""
        slots, snapshots = _int64_column(step.state_copies), len(self._snapshots)
        if len(slots) % 2 or slots.min(initial=0) < -snapshots or slots.max(initial=0) >= self.padding_slot:
            raise BadStep(f"state_copies {slots} with {self.padding_slot} slots and {snapshots} snapshots")
        for source, target in slots.reshape(-1, 2):
            if source >= 0 > target:
                self._snapshots[-1 - target] = source, self.num_computed[source] // self.page_size - 1
        copied = np.where(slots < 0, slots + 1 + self.padding_slot + snapshots, self.state_slots(slots))
        return [(source, target) for source, target in copied.reshape(-1, 2).tolist()]

    def state_slots(self, slots: IntsOrTensor) -> IntsOrTensor:
        """The slots of the StateCache where these slots have their states. That of the padding slot is 0; after the
        last slot come the snapshots."""
        return (slots + 1) % (self.padding_slot + 1)

    def kept_state(self, draft: IntsOrTensor) -> IntsOrTensor:
        """The slot of the StateCache that keeps the state before each of these drafts, counted over all rows of a step.
        They come after the snapshots."""
        return self.padding_slot + 1 + len(self._snapshots) + draft

    def write_kept_states(self, kept: Ints, counts: Ints, ends: Ints) -> None:
        """Writes ForwardBatch.kept_states [T] of a step to zeros, for rows with these numbers of drafts, which end with
        the tokens `ends` - 1. The last known token of a row comes before its first draft."""
        number = np.arange(counts.sum())
        kept[np.repeat(ends - counts - 1 - row_offsets(counts), counts) + number] = self.kept_state(number)

    def apply_step(self, step: Step) -> None:
        """Assigns the step's new requests to their slots and appends its pages. Raises BadStep."""
        self._steps += 1
        for new in step.slots:
            self._assign(new)
        if not (step.page_tables or step.page_ids):
            return
        owners, pages = _int64_column(step.page_tables), _int64_column(step.page_ids)
        if len(owners) != len(pages):
            raise BadStep("page_tables and page_ids differ in length")
        slots, groups = np.divmod(owners, len(self._groups))
        self._require_occupied(slots)
        given = (pages != NO_PAGE) | ~self._sliding[groups]
        _require_within(pages[given], self._pages, "page")
        pages = np.where(given, pages, 0)
        self.touched_pages = max(self.touched_pages, int(pages.max()) + 1)
        # The n-th page of a table in this step goes n entries after its present pages.
        order = np.argsort(owners, kind="stable")
        sorted_owners = owners[order]
        entries = self.num_pages[sorted_owners] + np.arange(len(order)) - np.searchsorted(sorted_owners, sorted_owners)
        if entries.max() >= self.page_table.shape[1]:
            table = sorted_owners[entries.argmax()]
            raise BadStep(f"slot {table // len(self._groups)} gets more pages than a request can have")
        self.page_table[sorted_owners, entries] = pages[order]
        if self._device_page_table is not None:
            sorted_slots, sorted_groups = np.divmod(sorted_owners, len(self._groups))
            rows = sorted_groups * (self.padding_slot + 1) + sorted_slots
            indices = rows * self.page_table.shape[1] + entries
            device_indices, device_pages = copy_columns_to_device((indices, pages[order]), self.ids.device)
            self._device_page_table.view(-1)[device_indices] = device_pages.int()
        np.maximum.at(self.num_pages, sorted_owners, entries + 1)
        # The first pages of a new request may be a cached prefix, which it does not write: see validate_rows.
        self._written_from[pages[self.num_computed[slots] != NEW]] = self._steps

    def advance_tower(self, column: bytes) -> None:
        """Computes slices of the vision tower: Step.tower. Raises BadStep."""
        if self._images is None or len(numbers := _int64_column(column)) % 3:
            raise BadStep(
                f"{len(column)} bytes of tower slices, for a model {'with' if self._images else 'without'} a tower"
            )
        slots, indices, slices = numbers.reshape(-1, 3).T
        self._require_occupied(slots)
        for slot, index, count in zip(slots.tolist(), indices.tolist(), slices.tolist(), strict=True):
            if index < 0 or count < 1:
                raise BadStep(f"{count} tower slices of image {index} of slot {slot}")
            self._images.advance(slot, index, count, self.faults)

    def validate_rows(self, step: Step) -> StepRows:
        """The step's rows. Raises BadStep if they do not continue the state of their slots."""
        slots, starts, counts = _int64_column(step.rows), _int64_column(step.starts), _int64_column(step.counts)
        samples = np.frombuffer(step.samples, np.uint8)
        if not len(slots) == len(starts) == len(counts) == len(samples):
            raise BadStep("rows, starts, counts and samples differ in length")
        if not len(slots):
            raise BadStep("no rows")
        self._require_occupied(slots)
        seen = np.zeros(self.padding_slot, np.bool_)
        seen[slots] = True
        if np.count_nonzero(seen) != len(slots):
            raise BadStep("a slot has two rows")
        ends, pages = starts + counts, self.num_pages[slots]
        if len(self._groups) > 1:
            pages = self._tables(self.num_pages)[slots].min(axis=1)
        drafts = _validate_drafts(step, samples, self.vocab_size) if step.drafts else None
        if drafts is not None and self._recurrent is not None and drafts.counts.sum() > self._recurrent.drafts:
            raise BadStep(f"{drafts.counts.sum()} drafts; states are kept for {self._recurrent.drafts}")
        draft_ends = ends if drafts is None else ends + drafts.counts
        computed, known = self.num_computed[slots], self.num_known[slots]
        new, sampled = computed == NEW, samples != 0
        faults = {
            "has no token to compute": counts < 1,
            "does not start where its computed tokens end": ((starts != computed) & ~new) | (starts < 0),
            "goes beyond its known ids": ends > known,
            "goes beyond its pages": draft_ends > pages * self.page_size,
            "samples before its last known id": sampled & (ends != known),
            "samples beyond the longest request": sampled & (draft_ends >= self.width),
        }
        if np.count_nonzero(reduce(or_, faults.values())):
            fault, row = np.argwhere(np.array(list(faults.values())))[0]
            raise BadStep(
                f"the row of slot {slots[row]} {list(faults)[fault]}: positions {starts[row]} to "
                f"{draft_ends[row] - 1}, {known[row]} ids known, {computed[row]} computed, "
                f"{pages[row]} pages"
            )
        for row in new.nonzero()[0]:
            cached = starts[row] // self.page_size
            for table in slots[row] * len(self._groups) + np.arange(len(self._groups)):
                self._written_from[self.page_table[table, cached : self.num_pages[table]]] = self._steps
        self._latest_row[slots] = self._steps
        (sampling,) = samples.nonzero()
        if drafts is None:
            return StepRows(slots, starts, ends, sampling, ends[sampling])
        offsets = np.arange(drafts.lengths.sum()) - np.repeat(row_offsets(drafts.lengths), drafts.lengths)
        sampling = np.repeat(sampling, drafts.lengths)
        return StepRows(slots, starts, draft_ends, sampling, ends[sampling] + offsets, drafts)

    def id_indices(self, slots: IntsOrTensor, positions: IntsOrTensor) -> IntsOrTensor:
        """Indices into the flat `ids` of these positions of these slots."""
        return slots * self.width + positions

    def slot_mapping(self, slots: Ints, positions: Ints) -> Ints:
        """Where the keys and values of these positions [n] of these slots [n] are stored (ForwardBatch.slot_mapping):
        page * page_size + offset, [G, n]."""
        page, offset = np.divmod(positions, self.page_size)
        return self._tables(self.page_table)[slots, :, page].T * np.int64(self.page_size) + offset

    def select_tables(self, slots: Ints, width: int) -> NDArray[np.int32]:
        """The first `width` pages of these slots [n] in each group, [G, n, width]."""
        return np.ascontiguousarray(self._tables(self.page_table)[slots, :, :width].swapaxes(0, 1))

    def _tables(self, columns: NDArray[Number]) -> NDArray[Number]:
        """A view of what there is for each page table, [slots, G, ...]."""
        return columns.reshape(-1, len(self._groups), *columns.shape[1:])

    def commit_rows(self, rows: StepRows) -> None:
        """Counts the rows as computed (or computed before any later launch), and one more token as known in each row
        that samples. Accepted drafts are added by `commit_accepted_drafts`."""
        ends = rows.ends if rows.drafts is None else rows.ends - rows.drafts.counts
        self.num_computed[rows.slots] = ends
        sampling_slots = rows.slots[rows.sampling_rows]
        self.num_known[sampling_slots] = self.num_computed[sampling_slots] + 1

    def commit_accepted_drafts(self, slots: Ints, counts: Ints) -> None:
        """Adds the number of drafts that were accepted in the last rows of these slots."""
        self.num_computed[slots] += counts
        self.num_known[slots] += counts

    def held_pages(self) -> list[HeldPages]:
        held = []
        for slot in (self.num_computed > 0).nonzero()[0]:
            computed = int(self.num_computed[slot])
            full = computed // self.page_size
            pages = self._tables(self.page_table)[slot, :, :full].copy()
            pages[self._written_from[pages] > self._latest_row[slot]] = NO_PAGE
            for number, group in enumerate(self._groups):
                pages[number, : group.first_kept(computed, self.page_size)] = NO_PAGE
            (found,) = (pages != NO_PAGE).any(axis=0).nonzero()
            if len(found) and slot not in self.faults:
                pages = np.ascontiguousarray(pages[:, : found[-1] + 1])
                ids = self.ids[slot, : (found[-1] + 1) * self.page_size].cpu().numpy()
                columns = pages.tobytes()
                if self._recurrent is not None:
                    columns += self._held_snapshots(int(slot), pages.shape[1]).tobytes()
                held.append(HeldPages(ids.tobytes(), columns, self._extras[slot]))
        return held

    def _held_snapshots(self, slot: int, pages: int) -> NDArray[np.int32]:
        """For each of the request's first pages the snapshot taken at its end, or NO_PAGE."""
        held = np.full(pages, NO_PAGE, np.int32)
        (numbers,) = ((self._snapshots[:, 0] == slot) & (self._snapshots[:, 1] < pages)).nonzero()
        held[self._snapshots[numbers, 1]] = numbers
        return held

    def _assign(self, new: SlotAssignment) -> None:
        slot = new.slot
        _require_within(np.array([slot]), len(self.num_known), "slot")
        ids = _int64_column(new.token_ids)
        if not 0 < len(ids) < self.width:
            raise BadStep(f"slot {slot} gets {len(ids)} ids; 1 to {self.width - 1} fit")
        _require_within(ids, self.vocab_size, "token id")
        params = decode(new.sampling)
        if not isinstance(params, SamplingParams):
            raise ProtocolError(f"slot {slot}: expected SamplingParams, got {type(params).__name__}")
        if not 0 < new.prompt_tokens <= len(ids):
            raise BadStep(f"slot {slot}: {new.prompt_tokens} of {len(ids)} ids are prompt")
        if not 0 <= new.prompt_logprobs_from < len(ids) or not 0 <= new.prompt_top_n <= MAX_PROMPT_TOP_TOKENS:
            raise BadStep(
                f"slot {slot}: prompt logprobs from position {new.prompt_logprobs_from} of {len(ids)} ids with "
                f"{new.prompt_top_n} alternatives; the first id has no logprob, and at most {MAX_PROMPT_TOP_TOKENS} "
                "alternatives are possible"
            )
        try:
            history_from = new.prompt_tokens - 1 if self._encodes_prompt else 0
            self.params.assign(slot, params, new.prompt_tokens, history_from)
        except (ValueError, OverflowError) as error:
            raise BadStep(f"slot {slot}: {error}") from error
        if (bias := self.params.bias[slot]) is not None:
            _require_within(bias.ids, self.vocab_size, "biased token id")
        if (ends := self.params.end_ids[slot]) is not None:
            _require_within(ends, self.vocab_size, "end id")
        _require_within(_int64_column(params.bad_word_ids), self.vocab_size, "bad word id")
        _require_within(_int64_column(params.listed_ids), self.vocab_size, "listed id")
        _require_within(_int64_column(params.reasoning_close_ids), self.vocab_size, "closing id")
        self.ids[slot, : len(ids)] = copy_to_device(ids.astype(np.int32), self.ids.device)
        self.prompt_logprobs_from[slot] = new.prompt_logprobs_from
        self.prompt_top_n[slot] = min(new.prompt_top_n, self.vocab_size)
        self.num_known[slot] = len(ids)
        self.num_computed[slot] = NEW
        self._tables(self.num_pages)[slot] = 0
        self._snapshots[self._snapshots[:, 0] == slot] = NO_PAGE
        self._extras[slot] = new.extras
        self._grammars.assign_slot(slot, params, ids[new.prompt_tokens :].tolist())
        self._assign_adapter(slot, params)
        if self._images is not None:
            self._images.discard(slot)
        if new.images or self._encodes_prompt:
            self._assign_images(new, ids)
        self.shifts[slot] = 0 if self._images is None else self._images.shift(slot)

    def _assign_images(self, new: SlotAssignment, ids: Ints) -> None:
        """Records a fault if the images do not fit the prompt. Raises BadStep if the model takes none."""
        if self._images is None:
            raise BadStep(f"slot {new.slot} gets images, but the model has no vision tower")
        try:
            self._images.assign(new.slot, new.images, ids[: new.prompt_tokens])
        except BadImage as error:
            self.faults[new.slot] = str(error)

    def _assign_adapter(self, slot: int, params: SamplingParams) -> None:
        """Keeps a reference to the request's adapter, so that unloading its name does not affect it. Records a fault if
        the adapter is not loaded."""
        self.adapters.pop(slot, None)
        self.faults.pop(slot, None)
        if params.adapter:
            adapter = self._adapter_registry.find_content(params.adapter_digest)
            if adapter is None:
                self.faults[slot] = missing_adapter_fault(params.adapter)
            else:
                self.adapters[slot] = adapter

    def _require_occupied(self, slots: Ints) -> None:
        _require_within(slots, len(self.num_known), "slot")
        empty = self.num_computed[slots] == EMPTY
        if np.count_nonzero(empty):
            raise BadStep(f"slot {slots[empty.argmax()]} is empty")


class BatchBuilder:
    """Builds the inputs of model and sampler from rows of these slots; `watermark` serves the rows that ask for it.
    `recurrent`: the model has recurrent layers."""

    def __init__(self, slots: Slots, watermark: Watermark, recurrent: bool = False) -> None:
        self._slots = slots
        self._watermark = watermark
        self._recurrent = recurrent
        self._ids = slots.ids.view(-1)
        # The same memory where the device is the host: numpy moves a few numbers in a fraction of torch's time.
        self._host_ids = self._ids.numpy() if self._ids.device.type == "cpu" else None

    def build_forward_batch(self, rows: StepRows) -> ForwardBatch:
        """The model's input: the tokens of the rows, one row after another."""
        state, size = self._slots, self._slots.page_size
        counts = rows.ends - rows.starts
        bounds = np.zeros(len(counts) + 1, np.int64)
        counts.cumsum(out=bounds[1:])
        if bounds[-1] == len(counts):  # one token in each row
            slots, positions = rows.slots, rows.starts
        else:
            slots = np.repeat(rows.slots, counts)
            positions = np.arange(bounds[-1]) + np.repeat(rows.starts - bounds[:-1], counts)
        max_pages = -(-int(rows.ends.max()) // size)
        table = state.select_tables(rows.slots, max_pages)
        id_indices, device_positions, slot_mapping, cu_query_lens, context_lens, pages, logits_indices = self.to_device(
            state.id_indices(slots, positions),
            positions,
            state.slot_mapping(slots, positions).ravel(),
            bounds.astype(np.int32),
            rows.ends.astype(np.int32),
            table.ravel(),
            rows.logits_indices,
        )
        kept = None
        if self._recurrent and rows.drafts is not None:
            column = np.zeros(bounds[-1], np.int64)
            state.write_kept_states(column, rows.drafts.counts, bounds[1:])
            kept = self.to_device(column)[0].int()
        return ForwardBatch(
            tokens=self.read_ids(id_indices),
            positions=device_positions,
            slot_mapping=slot_mapping.view(len(table), -1),
            cu_query_lens=cu_query_lens.int(),
            context_lens=context_lens.int(),
            page_table=pages.int().view(table.shape),
            logits_indices=logits_indices,
            query_lens_host=counts.tolist(),
            context_lens_host=rows.ends.tolist(),
            lora_spans=self._lora_spans(rows.slots, bounds) if state.adapters else (),
            state_slots=self.to_device(state.state_slots(rows.slots))[0].int() if self._recurrent else None,
            kept_states=kept,
        )

    def build_sampling_batch(self, slots: Ints, positions: Ints, bitmask: GrammarBitmask | None) -> SamplingBatch:
        """The sampler's input for slots [E] that sample the tokens of these positions [E]. All earlier ids are
        written by the time the sampler reads them."""

        def token_history(chosen: Ints, begins: Ints, ends: Ints) -> Tensor:
            lengths = ends - begins
            first, counts = self.to_device(self._slots.id_indices(slots[chosen], begins), lengths)
            offsets = torch.arange(max(1, int(lengths.max())), device=first.device)
            indices = first[:, None] + offsets * (offsets < counts[:, None])
            return self.read_ids(indices.view(-1)).view(indices.shape)

        return SamplingBatch(self._slots.params.select(slots), positions, token_history, bitmask, self._watermark)

    def id_indices(self, slots: Ints, positions: Ints) -> Tensor:
        """`Slots.id_indices` as int64 on the device."""
        return self.to_device(self._slots.id_indices(slots, positions))[0]

    def read_ids(self, indices: Tensor) -> Tensor:
        if self._host_ids is None:
            return self._ids[indices].long()
        return torch.from_numpy(self._host_ids[indices.numpy()].astype(np.int64))

    def write_ids(self, indices: Tensor, ids: Tensor) -> None:
        if self._host_ids is None:
            self._ids[indices] = ids.int()
        else:
            self._host_ids[indices.numpy()] = ids.numpy()

    def to_device(self, *columns: NDArray[Any]) -> list[Tensor]:
        """Host columns on the device, in one copy."""
        return copy_columns_to_device(columns, self._ids.device)

    def _lora_spans(self, slots: Ints, bounds: Ints) -> list[AdapterSpan]:
        """The tokens of the rows that have an adapter."""
        adapters = self._slots.adapters
        spans = zip(slots.tolist(), *(part.tolist() for part in (bounds[:-1], bounds[1:])), strict=True)
        return [AdapterSpan(adapters[slot], first, stop) for slot, first, stop in spans if slot in adapters]


def _validate_drafts(step: Step, samples: NDArray[np.uint8], vocab_size: int) -> StepDrafts | None:
    """The drafts of a step, if it has any. Raises BadStep."""
    counts, ids = _int64_column(step.drafts), _int64_column(step.draft_ids)
    if len(counts) != len(samples):
        raise BadStep("rows and drafts differ in length")
    _require_within(counts, MAX_DRAFT_TOKENS + 1, "a number of drafts")
    if counts[samples == 0].any():
        raise BadStep("a row that does not sample has drafts")
    if not counts.any():
        return None
    if not len(ids):
        return StepDrafts(counts, 1 + counts[samples != 0], None)
    if len(ids) != counts.sum():
        raise BadStep(f"{len(ids)} draft_ids for {counts.sum()} drafts")
    _require_within(ids, vocab_size, "draft id")
    return StepDrafts(counts, 1 + counts[samples != 0], ids)


def _require_within(values: Ints, limit: int, what: str) -> None:
    wrong = (values < 0) | (values >= limit)
    if np.count_nonzero(wrong):  # several times as quick as any(), in each step
        raise BadStep(f"{what} {values[wrong.argmax()]} is not within 0 to {limit - 1}")


def _int64_column(column: bytes) -> Ints:
    """An int32 column of a message as int64, for index arithmetic."""
    return np.frombuffer(column, np.int32).astype(np.int64)
