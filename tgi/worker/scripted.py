"""A worker without a model: deterministic tokens at a set pace, and a strict reader of every step it is sent.

It keeps what a real worker would keep (ids, page tables, what each page holds) and refuses a step that a real worker
would answer with garbage, naming the fault. So it is a worker for tests, a yardstick for the stack around the model,
and the scheduler's conscience. It obeys no grammar. An adapter is any directory with an adapter_config.json: what is in
it changes what is said.
"""

import time
from dataclasses import dataclass, field
from typing import NamedTuple

from tgi.kernel.errors import ProtocolError
from tgi.kernel.messages import MOST_PROMPT_TOPS, Limits, Result, Sampling, Slot, Step, decode
from tgi.kernel.pack import floats, ints
from tgi.worker.lora.shelf import Shelf, Unread, missing
from tgi.worker.sayings import PROMPT, Said, ids_of, noise_of, result_of, say, tell


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


class Violation(Exception):
    """A step that breaks the protocol; the text says how."""


@dataclass(slots=True)
class Occupant:
    """One slot's request. `chain` is the running hash of the ids computed so far: equal chains, equal KV."""

    ids: list[int]
    noise: int
    top_n: int
    slot: Slot
    table: list[int] = field(default_factory=list)
    claimed: int = 0  # pages of `table` looked at so far
    computed: int = 0
    chain: int = 0
    lost: str = ""  # who took a page of this slot
    adapter: Unread | None = None
    fault: str = ""  # why it cannot draw


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
        _need(step.epoch == self.epoch, f"epoch {step.epoch} is over, {self.epoch} is in force")
        _need(step.number == self.number + 1, f"number {step.number} follows {self.number}")
        self.number = step.number
        self._occupy(step)
        self._append_pages(step)
        rows, starts, counts = ints(step.rows), ints(step.starts), ints(step.counts)
        _need(len(rows) == len(starts) == len(counts) == len(step.draws), "rows, starts, counts and draws differ")
        _need(len(set(rows)) == len(rows), "a slot has two rows")
        _need(bool(rows), "no rows")
        _need(set(step.draws) <= {0, 1}, "draws are 0 or 1")
        total = sum(counts)
        _need(
            total <= max(self.limits.max_batch_prefill_tokens, len(rows)),
            f"{total} tokens are over the limit of {self.limits.max_batch_prefill_tokens} a step",
        )
        for slot, start, count in zip(rows, starts, counts, strict=True):
            self._claim(slot, start, count)
        said: list[Said] = []
        told: list[Said] = []
        for slot, start, count, draw in zip(rows, starts, counts, step.draws, strict=True):
            told += self._compute(slot, start, count)
            if draw:
                said.append(self._draw(slot))
        result = result_of(step.number, step.epoch, said, told)
        faults = [self._slots[slot].fault for slot, draw in zip(rows, step.draws, strict=True) if draw]
        return result._replace(faults=faults) if any(faults) else result

    def _occupy(self, step: Step) -> None:
        seen = set()
        for new in step.slots:
            ids = ints(new.tokens)
            sampling = decode(new.sampling)
            _need(0 <= new.slot < self.script.slots, f"slot {new.slot} of {self.script.slots}")
            _need(new.slot not in seen, f"slot {new.slot} gets two occupants")
            _need(isinstance(sampling, Sampling), f"slot {new.slot}: sampling is not a Sampling")
            _need(
                1 <= new.prompt_tokens <= len(ids), f"slot {new.slot}: {new.prompt_tokens} of {len(ids)} ids are prompt"
            )
            _need(
                len(ids) < self.limits.max_total_tokens, f"slot {new.slot}: {len(ids)} tokens leave no room for another"
            )
            _need(
                min(ids) >= 0 and max(ids) < self.script.vocab_size, f"slot {new.slot}: an id is not in the vocabulary"
            )
            _need(
                0 <= new.prompt_from < len(ids) and 0 <= new.prompt_top_n <= MOST_PROMPT_TOPS,
                f"slot {new.slot}: logprobs from position {new.prompt_from} of {len(ids)} on, with {new.prompt_top_n}",
            )
            biased = ints(sampling.bias_ids)
            _need(len(biased) == len(floats(sampling.biases)), f"slot {new.slot}: bias_ids and biases differ in length")
            _need(
                all(0 <= token < self.script.vocab_size for token in biased),
                f"slot {new.slot}: a biased id is not in the vocabulary",
            )
            seen.add(new.slot)
            if old := self._slots.get(new.slot):
                for page in old.table:
                    self._holders[page].discard(new.slot)
            occupant = Occupant(ids, noise_of(sampling), sampling.top_n, new)
            # Pages that an adapter computed are no other's.
            occupant.chain = int.from_bytes(sampling.adapter_digest)
            if sampling.adapter:
                occupant.adapter = self.adapters.find(sampling.adapter_digest)
                occupant.fault = "" if occupant.adapter else missing(sampling.adapter)
            self._slots[new.slot] = occupant

    def _append_pages(self, step: Step) -> None:
        slots, pages = ints(step.page_slots), ints(step.page_ids)
        _need(len(slots) == len(pages), "page_slots and page_ids differ in length")
        for slot, page in zip(slots, pages, strict=True):
            _need(0 <= page < self.script.pages, f"page {page} of {self.script.pages}")
            occupant = self._occupant(slot)
            _need(slot not in self._holders[page], f"page {page} is in the table of slot {slot} twice")
            occupant.table.append(page)
            self._holders[page].add(slot)

    def _claim(self, slot: int, start: int, count: int) -> None:
        """Checks the row against what is known, and takes its new pages from whoever had them."""
        occupant = self._occupant(slot)
        size = self.script.page_size
        end = start + count
        if count < 1:
            raise Violation(f"slot {slot}: {count} tokens to compute")
        if end > len(occupant.ids):
            raise Violation(f"slot {slot}: position {end - 1} of {len(occupant.ids)} known ids")
        if end > len(occupant.table) * size:
            raise Violation(f"slot {slot}: {len(occupant.table)} pages do not cover {end} tokens")
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

    def _draw(self, slot: int) -> Said:
        """The next id, its logprob and the likeliest tokens."""
        occupant = self._slots[slot]
        known = len(occupant.ids)
        if occupant.computed != known:
            raise Violation(f"slot {slot} draws at {occupant.computed} of {known} known ids")
        if known >= self.limits.max_total_tokens:
            raise Violation(f"slot {slot}: token {known} is over the limit of a request")
        said = say(hash((occupant.chain, occupant.noise)) % (1 << 32), occupant.top_n, self._ids)
        occupant.ids.append(said[0])
        return said

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


def _need(holds: bool, fault: str) -> None:
    """For checks made once a step or once a request: the text is built even where nothing is wrong."""
    if not holds:
        raise Violation(fault)
