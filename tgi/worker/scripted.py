"""A worker without a model: deterministic tokens at a set pace, and a strict reader of every step it is sent.

It keeps what a real worker would keep (ids, page tables, what each page holds) and refuses a step that a real worker
would answer with garbage, naming the fault. So it is a worker for tests, a yardstick for the stack around the model,
and the scheduler's conscience. It obeys no grammar and no bad words. An adapter is any directory with an
adapter_config.json: what is in it changes what is said.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

from tgi.kernel.errors import ProtocolError
from tgi.kernel.messages import MOST_DRAFTS, Result, Step
from tgi.kernel.pack import ints
from tgi.kernel.presence import Limits
from tgi.worker.lora.shelf import Shelf, Unread
from tgi.worker.occupant import Occupant, Violation, need, occupant_of
from tgi.worker.sayings import PROMPT, Said, guess, ids_of, result_of, say, tell


class Script(NamedTuple):
    """What the scripted worker pretends to be."""

    pages: int = 4096
    page_size: int = 16
    slots: int = 256
    vocab_size: int = 49152
    max_total_tokens: int = 8192
    max_batch_prefill_tokens: int = 4096
    step_us: int = 0  # how long a step takes at least; 0: as fast as possible

    def limits(self) -> Limits:
        """The limits that such a worker reports."""
        total = min(self.max_total_tokens, self.pages * self.page_size)
        return Limits(
            max_total_tokens=total,
            max_input_tokens=total - 1,
            max_batch_total_tokens=self.pages * self.page_size,
            max_batch_prefill_tokens=self.max_batch_prefill_tokens,
            max_batch_size=self.slots,
            pages=self.pages,
            page_size=self.page_size,
            vocab_size=self.vocab_size,
            dtype="float32",
            device="cpu",
        )


class ScriptedWorker:
    """Runs steps. `run_step` is a pure function of the steps so far: no clock, no socket, no randomness."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.limits = script.limits()
        self.adapters = Shelf(Unread)
        self._ids = ids_of(script.vocab_size)
        self.reset()

    def reset(self) -> None:
        """Forgets everything: a new scheduler, or a new epoch."""
        self.epoch = 0
        self.number = 0
        self._slots: dict[int, Occupant] = {}
        # What each page holds: the chain after each of its tokens. And who has it in a table.
        self._pages: list[list[int]] = [[] for _ in range(self.script.pages)]
        self._holders: list[set[int]] = [set() for _ in range(self.script.pages)]

    def run_step(self, step: Step) -> Result:
        """The result of a step; `error` names what is wrong with it."""
        try:
            return self._run(step)
        except (Violation, ProtocolError) as fault:
            return Result(step.number, step.epoch, b"", b"", b"", error=f"step {step.number}: {fault}")

    def _run(self, step: Step) -> Result:
        if step.epoch > self.epoch:
            self.reset()
            self.epoch = step.epoch
        need(step.epoch == self.epoch, f"epoch {step.epoch} is over, {self.epoch} is in force")
        need(step.number == self.number + 1, f"number {step.number} follows {self.number}")
        self.number = step.number
        self._occupy(step)
        self._append_pages(step)
        rows, starts, counts = ints(step.rows), ints(step.starts), ints(step.counts)
        need(len(rows) == len(starts) == len(counts) == len(step.draws), "rows, starts, counts and draws differ")
        need(len(set(rows)) == len(rows), "a slot has two rows")
        need(bool(rows), "no rows")
        need(set(step.draws) <= {0, 1}, "draws are 0 or 1")
        drafts = self._drafts(step, len(rows))
        total = sum(counts) + sum(map(len, drafts))
        need(
            total <= max(self.limits.max_batch_prefill_tokens, len(rows)),
            f"{total} tokens are over the limit of {self.limits.max_batch_prefill_tokens} a step",
        )
        for slot, start, count, row_drafts in zip(rows, starts, counts, drafts, strict=True):
            self._claim(slot, start, count, len(row_drafts))
        said: list[list[Said]] = []
        told: list[Said] = []
        for slot, start, count, draw, row_drafts in zip(rows, starts, counts, step.draws, drafts, strict=True):
            told += self._compute(slot, start, count)
            if draw:
                said.append(self._draw(slot, row_drafts))
        result = result_of(step.number, step.epoch, said, told)
        faults = [self._slots[slot].fault for slot in rows]
        return result._replace(faults=faults) if any(faults) else result

    def _drafts(self, step: Step, rows: int) -> list[list[int | None]]:
        """The drafts of each row; None is one that this worker is to find."""
        if not step.drafts:
            need(not step.draft_ids, "draft_ids without drafts")
            return [[]] * rows
        counts, ids = ints(step.drafts), ints(step.draft_ids)
        need(len(counts) == rows, "rows and drafts differ")
        need(
            min(counts) >= 0 and max(counts) <= MOST_DRAFTS,
            f"a row has {min(counts)} or {max(counts)} drafts; 0 to {MOST_DRAFTS} are possible",
        )
        need(all(draw for count, draw in zip(counts, step.draws, strict=True) if count), "drafts without draws")
        need(not ids or len(ids) == sum(counts), f"{len(ids)} draft_ids for {sum(counts)} drafts")
        need(all(0 <= token < self.script.vocab_size for token in ids), "a draft is not in the vocabulary")
        each = iter(ids)
        return [[next(each, None) for _ in range(count)] for count in counts]

    def _occupy(self, step: Step) -> None:
        seen = set()
        for new in step.slots:
            occupant = occupant_of(new, self.limits, self.adapters)
            need(new.slot not in seen, f"slot {new.slot} gets two occupants")
            seen.add(new.slot)
            if old := self._slots.get(new.slot):
                for page in old.table:
                    self._holders[page].discard(new.slot)
            self._slots[new.slot] = occupant

    def _append_pages(self, step: Step) -> None:
        slots, pages = ints(step.page_slots), ints(step.page_ids)
        need(len(slots) == len(pages), "page_slots and page_ids differ in length")
        for slot, page in zip(slots, pages, strict=True):
            need(0 <= page < self.script.pages, f"page {page} of {self.script.pages}")
            occupant = self._occupant(slot)
            need(slot not in self._holders[page], f"page {page} is in the table of slot {slot} twice")
            occupant.table.append(page)
            self._holders[page].add(slot)

    def _claim(self, slot: int, start: int, count: int, drafts: int) -> None:
        """Checks the row against what is known, and takes its new pages from whoever had them."""
        occupant = self._occupant(slot)
        size = self.script.page_size
        end = start + count
        if count < 1:
            raise Violation(f"slot {slot}: {count} tokens to compute")
        if end > len(occupant.ids):
            raise Violation(f"slot {slot}: position {end - 1} of {len(occupant.ids)} known ids")
        if end + drafts > len(occupant.table) * size:
            raise Violation(f"slot {slot}: {len(occupant.table)} pages do not cover {end + drafts} tokens")
        if drafts and end + drafts >= self.limits.max_total_tokens:
            raise Violation(f"slot {slot}: {drafts} drafts behind {end} tokens are over the limit of a request")
        if not occupant.computed and start > 0:
            self._find_prefix(slot, occupant, start)
        if start != occupant.computed:
            raise Violation(f"slot {slot}: starts at {start}, but {occupant.computed} tokens are computed")
        for page in occupant.table[occupant.claimed :]:
            self._take(page, slot)
        occupant.claimed = len(occupant.table)

    def _find_prefix(self, slot: int, occupant: Occupant, start: int) -> None:
        """The first row of a slot starts behind a cached prefix: its pages must be full of just these tokens."""
        size = self.script.page_size
        asked = occupant.slot.prompt_from
        if asked and start >= asked:
            raise Violation(f"slot {slot}: starts at {start}, but logprobs are wanted from {asked} on")
        chain = occupant.chain
        for at in range(0, start, size):
            page = occupant.table[at // size]
            held = self._pages[page]
            if len(held) < size:
                raise Violation(f"slot {slot}: page {page} is shared with {len(held)} of {size} tokens in it")
            for offset, token in enumerate(occupant.ids[at : min(at + size, start)]):
                chain = hash((chain, token))
                if held[offset] != chain:
                    raise Violation(f"slot {slot}: page {page} holds other tokens than its prefix")
        occupant.claimed = -(-start // size)
        occupant.chain = chain
        occupant.computed = start

    def _take(self, page: int, slot: int) -> None:
        """`slot` will write into this page: its old content is gone for everybody else."""
        self._pages[page] = []
        for other in self._holders[page]:
            if other != slot:
                self._slots[other].lost = f"page {page} was given to slot {slot}"

    def _compute(self, slot: int, start: int, count: int) -> list[Said]:
        """Computes a row. Returns what it tells of the prompt."""
        occupant = self._slots[slot]
        if occupant.lost:
            raise Violation(f"slot {slot} computes, but its {occupant.lost}")
        size = self.script.page_size
        asked = occupant.slot
        told = []
        chain = occupant.chain
        for position in range(start, start + count):
            chain = hash((chain, occupant.ids[position]))
            if 0 < asked.prompt_from <= position + 1 < asked.prompt_tokens:
                number = hash((chain, PROMPT)) % (1 << 32)
                told.append(tell(number, occupant.ids[position + 1], asked.prompt_top_n, self._ids))
            page = occupant.table[position // size]
            held = self._pages[page]
            if position % size == len(held):
                held.append(chain)
            elif held[position % size] != chain:  # only the last token of a whole cached prompt is computed again
                raise Violation(f"slot {slot} writes other tokens into the shared page {page}")
        occupant.chain = chain
        occupant.computed = start + count
        return told

    def _draw(self, slot: int, drafts: Sequence[int | None]) -> list[Said]:
        """The next ids: one, and one more behind each draft that is what was drawn."""
        said = []
        for draft in drafts:
            drawn, likely = self._draw_one(slot)
            said.append(drawn)
            if drawn[0] != (likely if draft is None else draft):
                return said
            self._compute(slot, len(self._slots[slot].ids) - 1, 1)
        return [*said, self._draw_one(slot)[0]]

    def _draw_one(self, slot: int) -> tuple[Said, int]:
        """The next id, its logprob and the likeliest tokens; and what a draft model would have thought."""
        occupant = self._slots[slot]
        known = len(occupant.ids)
        if occupant.computed != known:
            raise Violation(f"slot {slot} draws at {occupant.computed} of {known} known ids")
        if known >= self.limits.max_total_tokens:
            raise Violation(f"slot {slot}: token {known} is over the limit of a request")
        number = hash((occupant.chain, occupant.noise)) % (1 << 32)
        said = say(number, occupant.top_n, self._ids)
        occupant.ids.append(said[0])
        return said, guess(number, self._ids)

    def _occupant(self, slot: int) -> Occupant:
        occupant = self._slots.get(slot)
        if occupant is None:
            raise Violation(f"slot {slot} is empty")
        return occupant


class ScriptedEngine:
    """The scripted worker as the loop wants it, at its set pace."""

    def __init__(self, script: Script) -> None:
        self._worker = ScriptedWorker(script)
        self._seconds = script.step_us / 1e6
        self.limits = self._worker.limits
        self.adapters = self._worker.adapters

    def reset(self) -> None:
        """Forgets all requests."""
        self._worker.reset()

    def spare(self) -> bool:
        """False: it has nothing to do beside its steps."""
        return False

    def launch(self, step: Step) -> Result:
        """Runs the step, taking as long as the script says."""
        begin = time.monotonic()
        result = self._worker.run_step(step)
        left = self._seconds - (time.monotonic() - begin)
        if left > 0:
            time.sleep(left)
        return result._replace(forward_us=int((time.monotonic() - begin) * 1e6))

    def done(self, pending: Result) -> bool:
        """Always: launching computes."""
        return True

    def collect(self, pending: Result) -> Result:
        """The result."""
        return pending
