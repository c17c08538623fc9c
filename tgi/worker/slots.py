"""What the worker keeps of each running request: token ids on the device, and on the host all that plans a step."""

from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgi.kernel.errors import ProtocolError
from tgi.kernel.messages import MOST_DRAFTS, MOST_PROMPT_TOPS, Sampling, Slot, Step, decode
from tgi.worker.grammar import Grammars
from tgi.worker.lora.shelf import Shelf, missing
from tgi.worker.params import Params
from tgi.worker.staging import sent, sent_together
from tgi.worker.verify import begins

EMPTY = -2  # nobody is in the slot
NEW = -1  # nothing is computed yet: the first row may start behind a cached prefix

Ints = NDArray[np.int64]
Numbers = TypeVar("Numbers", Ints, Tensor)


class BadStep(Exception):
    """A step that does not fit what the worker knows; the text says how."""


class Drafts(NamedTuple):
    """What the rows of a step are thought to draw."""

    counts: Ints  # [R]
    lengths: Ints  # [D] in how many places each row that draws does so: 1 + its drafts
    ids: Ints | None  # [sum(counts)]; None: the draft model is to find them


class Rows(NamedTuple):
    """The rows of a step as host columns, checked against the slots. D of them draw, in E places: behind the known ids
    of a row, and behind each of its drafts."""

    slots: Ints  # [R]
    starts: Ints  # [R] first position
    ends: Ints  # [R] context length after the step, drafts included
    drawing: Ints  # [E] which row draws
    position: Ints  # [E] of the token that it draws
    drafts: Drafts | None = None  # None: no row has any, so E = D

    @property
    def plain(self) -> bool:
        """Whether each row computes one token and draws behind it, and none has drafts."""
        one_each = len(self.drawing) == len(self.slots) and int((self.ends - self.starts).max()) == 1
        return one_each and self.drafts is None


class Slots:
    """State of `count` slots, each with room for `tokens` ids and the pages of as many.

    Ids live on the device, because drawn ones are read by the next step before the host has seen them. Lengths and
    page tables are the host's: it knows them one step ahead.
    """

    def __init__(
        self,
        count: int,
        tokens: int,
        pages: int,
        page_size: int,
        vocab_size: int,
        device: torch.device,
        grammars: Grammars,
        shelf: Shelf,
    ) -> None:
        self.width = tokens + 1
        self.page_size = page_size
        self._pages = pages
        self.vocab_size = vocab_size
        self.spare = count  # a slot that nobody occupies, with the id 0
        self.ids = torch.empty(count + 1, self.width, dtype=torch.int32, device=device)
        self.ids[self.spare].zero_()
        self.page_table = np.zeros((count, -(-self.width // page_size)), np.int32)
        self.known = np.zeros(count, np.int64)  # ids, drawn ones included
        self.computed = np.full(count, EMPTY)  # ids whose keys and values are in the cache
        self.held = np.zeros(count, np.int64)  # pages
        self.used = 0  # pages from the first on to the last one that anybody has had
        self.params = Params.empty(count)
        self.prompt_from = np.zeros(count, np.int64)  # Slot's fields
        self.prompt_top_n = np.zeros(count, np.int64)
        self.adapters: dict[int, Any] = {}  # of the slots that have one
        self.faults: dict[int, str] = {}  # why slots cannot go on
        self._grammars = grammars
        self._shelf = shelf
        self._table: Tensor | None = None  # of `mirror`

    def mirror(self, page: int) -> Tensor:
        """Keeps the page table on the device too from now on, before anybody occupies a slot: int32 [count + 1, pages
        of the longest request]. Whatever nobody has written is `page`, and so all of the spare slot's."""
        shape = (self.spare + 1, self.page_table.shape[1])
        self._table = torch.full(shape, page, dtype=torch.int32, device=self.ids.device)
        return self._table

    def reset(self) -> None:
        """Empties all slots."""
        self.computed.fill(EMPTY)
        self.adapters.clear()
        self.faults.clear()
        self._grammars.reset()

    def apply(self, step: Step) -> None:
        """Lets the step's new occupants in and appends its pages. Raises BadStep."""
        for new in step.slots:
            self._occupy(new)
        owners, pages = _ints(step.page_slots), _ints(step.page_ids)
        if len(owners) != len(pages):
            raise BadStep("page_slots and page_ids differ in length")
        if not len(owners):
            return
        self._need_occupied(owners)
        _need_within(pages, self._pages, "page")
        self.used = max(self.used, int(pages.max()) + 1)
        # The n-th page of a slot in this step goes n places behind those that it holds.
        order = np.argsort(owners, kind="stable")
        sorted_owners = owners[order]
        places = self.held[sorted_owners] + np.arange(len(order)) - np.searchsorted(sorted_owners, sorted_owners)
        if places.max() >= self.page_table.shape[1]:
            raise BadStep(f"slot {sorted_owners[places.argmax()]} gets more pages than a request can have")
        self.page_table[sorted_owners, places] = pages[order]
        if self._table is not None:
            at = sorted_owners * self.page_table.shape[1] + places
            at_there, there = sent_together((at, pages[order]), self.ids.device)
            self._table.view(-1)[at_there] = there.int()
        np.maximum.at(self.held, sorted_owners, places + 1)

    def rows(self, step: Step) -> Rows:
        """The step's rows. Raises BadStep if they do not follow what is known of their slots."""
        slots, starts, counts = _ints(step.rows), _ints(step.starts), _ints(step.counts)
        draws = np.frombuffer(step.draws, np.uint8)
        if not len(slots) == len(starts) == len(counts) == len(draws):
            raise BadStep("rows, starts, counts and draws differ in length")
        if not len(slots):
            raise BadStep("no rows")
        self._need_occupied(slots)
        if len(set(slots.tolist())) != len(slots):
            raise BadStep("a slot has two rows")
        ends = starts + counts
        drafts = _drafts(step, draws, self.vocab_size) if step.drafts else None
        reach = ends if drafts is None else ends + drafts.counts
        computed, known = self.computed[slots], self.known[slots]
        begun = np.where(computed == NEW, starts, computed)
        faults = {
            "has no token to compute": counts < 1,
            "does not start where its computed tokens end": (starts != begun) | (starts < 0),
            "goes beyond its known ids": ends > known,
            "goes beyond its pages": reach > self.held[slots] * self.page_size,
            "draws before its last known id": (draws != 0) & (ends != known),
            "draws beyond the longest request": (draws != 0) & (reach >= self.width),
        }
        wrong = np.array(list(faults.values()))
        if wrong.any():
            fault, row = np.argwhere(wrong)[0]
            raise BadStep(
                f"the row of slot {slots[row]} {list(faults)[fault]}: positions {starts[row]} to {reach[row] - 1}, "
                f"{known[row]} ids known, {computed[row]} computed, {self.held[slots[row]]} pages"
            )
        (drawing,) = draws.nonzero()
        if drafts is None:
            return Rows(slots, starts, ends, drawing, ends[drawing])
        places = np.arange(drafts.lengths.sum()) - np.repeat(begins(drafts.lengths), drafts.lengths)
        drawing = np.repeat(drawing, drafts.lengths)
        return Rows(slots, starts, reach, drawing, ends[drawing] + places, drafts)

    def ids_at(self, slots: Numbers, positions: Numbers) -> Numbers:
        """Where the ids of these positions of these slots stand in `ids`, counted from its first number on."""
        return slots * self.width + positions

    def cache_at(self, slots: Ints, positions: Ints) -> Ints:
        """Where the keys and values of these positions [n] of these slots [n] go, as Batch.cache_at."""
        page, offset = np.divmod(positions, self.page_size)
        return self.page_table[slots, page] * np.int64(self.page_size) + offset

    def advance(self, rows: Rows) -> None:
        """The rows are computed, or will be before anything that is launched later; those that draw have one token
        more. Of their drafts `accept` tells."""
        ends = rows.ends if rows.drafts is None else rows.ends - rows.drafts.counts
        self.computed[rows.slots] = ends
        drawing = rows.slots[rows.drawing]
        self.known[drawing] = self.computed[drawing] + 1

    def accept(self, slots: Ints, counts: Ints) -> None:
        """So many drafts of these slots' last rows are what was drawn, each with another token behind it."""
        self.computed[slots] += counts
        self.known[slots] += counts

    def _occupy(self, new: Slot) -> None:
        slot = new.slot
        _need_within(np.array([slot]), len(self.known), "slot")
        ids = _ints(new.tokens)
        if not 0 < len(ids) < self.width:
            raise BadStep(f"slot {slot} gets {len(ids)} ids; 1 to {self.width - 1} fit")
        _need_within(ids, self.vocab_size, "token id")
        sampling = decode(new.sampling)
        if not isinstance(sampling, Sampling):
            raise ProtocolError(f"slot {slot}: expected a Sampling, got {type(sampling).__name__}")
        if not 0 < new.prompt_tokens <= len(ids):
            raise BadStep(f"slot {slot}: {new.prompt_tokens} of {len(ids)} ids are prompt")
        if not 0 <= new.prompt_from < len(ids) or not 0 <= new.prompt_top_n <= MOST_PROMPT_TOPS:
            raise BadStep(
                f"slot {slot}: logprobs from position {new.prompt_from} of {len(ids)} ids on, {new.prompt_top_n} "
                f"likeliest; the first id has none, and {MOST_PROMPT_TOPS} are the most"
            )
        try:
            self.params.put(slot, sampling, new.prompt_tokens)
        except (ValueError, OverflowError) as error:
            raise BadStep(f"slot {slot}: {error}") from error
        if (bias := self.params.bias[slot]) is not None:
            _need_within(bias.ids, self.vocab_size, "biased token id")
        if (ends := self.params.end_ids[slot]) is not None:
            _need_within(ends, self.vocab_size, "end id")
        _need_within(_ints(sampling.bad_word_ids), self.vocab_size, "bad word id")
        self.ids[slot, : len(ids)] = sent(ids.astype(np.int32), self.ids.device)
        self.prompt_from[slot] = new.prompt_from
        self.prompt_top_n[slot] = min(new.prompt_top_n, self.vocab_size)
        self.known[slot] = len(ids)
        self.computed[slot] = NEW
        self.held[slot] = 0
        self._grammars.occupy(slot, sampling.grammar, ids[new.prompt_tokens :].tolist())
        self._adapt(slot, sampling)

    def _adapt(self, slot: int, sampling: Sampling) -> None:
        """The slot's occupant holds its adapter, whatever becomes of the name. Without it, it is at fault."""
        self.adapters.pop(slot, None)
        self.faults.pop(slot, None)
        if sampling.adapter:
            found = self._shelf.find(sampling.adapter_digest)
            if found is None:
                self.faults[slot] = missing(sampling.adapter)
            else:
                self.adapters[slot] = found

    def _need_occupied(self, slots: Ints) -> None:
        _need_within(slots, len(self.known), "slot")
        empty = self.computed[slots] == EMPTY
        if empty.any():
            raise BadStep(f"slot {slots[empty.argmax()]} is empty")


def _drafts(step: Step, draws: NDArray[np.uint8], vocab_size: int) -> Drafts | None:
    """The drafts of a step, if it has any. Raises BadStep."""
    counts, ids = _ints(step.drafts), _ints(step.draft_ids)
    if len(counts) != len(draws):
        raise BadStep("rows and drafts differ in length")
    _need_within(counts, MOST_DRAFTS + 1, "a number of drafts")
    if counts[draws == 0].any():
        raise BadStep("a row that does not draw has drafts")
    if not counts.any():
        return None
    if not len(ids):
        return Drafts(counts, 1 + counts[draws != 0], None)
    if len(ids) != counts.sum():
        raise BadStep(f"{len(ids)} draft_ids for {counts.sum()} drafts")
    _need_within(ids, vocab_size, "draft id")
    return Drafts(counts, 1 + counts[draws != 0], ids)


def _need_within(values: Ints, limit: int, what: str) -> None:
    wrong = (values < 0) | (values >= limit)
    if wrong.any():
        raise BadStep(f"{what} {values[wrong.argmax()]} is not within 0 to {limit - 1}")


def _ints(column: bytes) -> Ints:
    """An int32 column as int64, for index arithmetic."""
    return np.frombuffer(column, np.int32).astype(np.int64)
