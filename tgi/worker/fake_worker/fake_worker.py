"""The fake worker: a worker without a model, with deterministic tokens at a set pace and strict checks of each step.

It keeps the state that a real worker keeps (ids, page tables, the content of each page) and rejects a step for which a
real worker would compute garbage, naming the fault. So it serves as a worker for tests, as a baseline for measuring the
rest of the stack, and as a checker of the scheduler. It ignores bad words. A grammar changes the tokens, which do not
match it. Any directory with an adapter_config.json is an adapter; its content changes the tokens. With
`--scripted-answers` prompts get the answers of a file, so that a client can be tried with answers that are known.
"""

import json
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from tgi.microkernel.errors import ProtocolError
from tgi.microkernel.messages.codec import FLOAT32, INT32, pack_column, unpack_float32, unpack_int32
from tgi.microkernel.messages.kv_groups import (
    KVGroup,
    cache_tokens,
    longest_request,
    paged_groups,
    recurrent_group,
)
from tgi.microkernel.messages.protocol import (
    MAX_DRAFT_TOKENS,
    MAX_PROMPT_TOP_TOKENS,
    DeploymentLimits,
    HeldPages,
    SlotAssignment,
    Step,
    StepResult,
    decode,
)
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.worker.fake_worker.fake_tokens import (
    PROMPT_KEY,
    FakeToken,
    fake_draft,
    fake_prompt_logprob,
    fake_result,
    fake_token,
    fake_vector,
    fake_vocabulary,
    noise_key,
)
from tgi.worker.lora.registry import AdapterRegistry, FakeAdapter, missing_adapter_fault

NO_PAGE = -1  # in Step.page_ids and HeldPages.page_ids


class ScriptedAnswer(NamedTuple):
    """The answer to prompts in which the ids `after` occur in this order, with any others between them."""

    after: Sequence[int]
    answer: Sequence[int]  # the last one is repeated for as long as the request goes on: an end token


def read_answers(path: Path) -> tuple[ScriptedAnswer, ...]:
    """The file of `--scripted-answers`: a JSON list of [after, answer] in the order in which they are tried."""
    return tuple(ScriptedAnswer(after, answer) for after, answer in json.loads(path.read_text()))


class FakeWorkerConfig(NamedTuple):
    """The limits and the pace of a fake worker."""

    pages: int = 4096
    page_size: int = 16
    slots: int = 256
    vocab_size: int = 49152
    max_total_tokens: int = 8192
    max_batch_prefill_tokens: int = 4096
    device: str = "cpu"  # that it reports
    groups: tuple[KVGroup, ...] = (KVGroup(),)
    tower_slices: int = 1
    step_us: int = 0  # the shortest duration of a step in microseconds; 0: as fast as possible
    answers: tuple[ScriptedAnswer, ...] = ()

    def limits(self) -> DeploymentLimits:
        """The limits that the worker reports."""
        size, step, groups = self.page_size, self.max_batch_prefill_tokens, [*self.groups]
        total = longest_request(groups, self.pages, step, size, self.max_total_tokens)
        return DeploymentLimits(
            max_total_tokens=total,
            max_input_tokens=total - 1,
            max_batch_total_tokens=cache_tokens(groups, self.pages, step, size, total),
            max_batch_prefill_tokens=self.max_batch_prefill_tokens,
            max_batch_size=self.slots,
            pages=self.pages,
            page_size=self.page_size,
            vocab_size=self.vocab_size,
            dtype="float32",
            device=self.device,
            groups=groups,
            tower_slices=self.tower_slices,
        )


class FakeEngine:
    """A FakeWorker behind the interface of the worker loop, at its set pace."""

    def __init__(self, config: FakeWorkerConfig) -> None:
        self._worker = FakeWorker(config)
        self._seconds = config.step_us / 1e6
        self.limits = self._worker.limits
        self.adapters = self._worker.adapters

    def reset(self) -> None:
        self._worker.reset()

    def held_pages(self) -> list[HeldPages]:
        return self._worker.held_pages()

    def prefault_memory(self) -> bool:
        """False: there is no memory to prefault."""
        return False

    def release_memory(self) -> None:
        """No effect."""

    def launch(self, step: Step) -> StepResult:
        begin = time.monotonic()
        result = self._worker.run_step(step)
        left = self._seconds - (time.monotonic() - begin)
        if left > 0:
            time.sleep(left)
        return result._replace(forward_us=int((time.monotonic() - begin) * 1e6))

    def is_done(self, pending: StepResult) -> bool:
        return True

    def collect(self, pending: StepResult) -> StepResult:
        return pending


class Violation(Exception):
    """A step that breaks the protocol; the text names the fault."""


@dataclass(slots=True)
class FakeRequest:
    """The request in a slot. `chain` is the running hash of the computed ids; equal chains mean equal KV content."""

    ids: list[int]
    noise: int
    top_n: int
    slot: SlotAssignment
    page_tables: list[list[int]]  # of each KV group
    new_pages: list[tuple[int, int]]  # group and index of those that are neither checked nor cleared
    computed: int = 0
    chain: int = 0
    lost: dict[tuple[int, int], str] = field(default_factory=dict)  # by group and index: who was given this page
    adapter: FakeAdapter | None = None
    fault: str = ""  # why it cannot sample
    answer: Sequence[int] = ()  # of `--scripted-answers`
    listed: Sequence[int] = ()  # the tokens to list in place of the likeliest


class FakeWorker:
    """Checks and computes steps. Results depend on the steps so far only: no clock, no socket, no randomness."""

    def __init__(self, config: FakeWorkerConfig) -> None:
        self.config = config
        self.limits = config.limits()
        self.adapters = AdapterRegistry(FakeAdapter)
        self._ids = fake_vocabulary(config.vocab_size)
        # Of each page: the group that has written it, then the chain after each of its tokens.
        self._pages: list[list[int]] = [[0] for _ in range(self.config.pages)]
        self._groups = paged_groups(config.groups)
        self._recurrent = recurrent_group(config.groups)
        # The recurrent states: the chain after all tokens computed in a slot; snapshot n is at -1 - n.
        self._states: dict[int, int] = {}
        self.reset()

    def share_memory(self, previous: "FakeWorker") -> None:
        """Takes over the pages and states of another worker."""
        self._pages, self._states = previous._pages, previous._states

    def lose_rows(self, step: Step) -> None:
        """What the rows of a step write to pages and states is void: it has failed, or was interrupted."""
        size = self.config.page_size
        for slot in (*unpack_int32(step.rows), *unpack_int32(step.state_copies)[1::2]):
            self._states[slot] = -1  # no chain
        for slot, start in zip(unpack_int32(step.rows), unpack_int32(step.starts), strict=True):
            for table in self._slots[slot].page_tables:
                for number, page in enumerate(table[start // size :], start // size):
                    if page != NO_PAGE:
                        del self._pages[page][1 + max(0, start - number * size) :]

    def reset(self) -> None:
        """Removes all requests: a new scheduler. The content of the pages stays."""
        self.epoch = 0
        self.number = 0
        self._slots: dict[int, FakeRequest] = {}
        # Of each page: the slots that have it in their tables.
        self._holders: list[set[int]] = [set() for _ in range(self.config.pages)]

    def held_pages(self) -> list[HeldPages]:
        """The full pages of each slot that still hold its tokens, in each group those that are needed."""
        held = []
        size = self.config.page_size
        for request in self._slots.values():
            adapter = decode(request.slot.sampling).adapter_digest
            chain = int.from_bytes(adapter) if request.adapter is not None else 0
            full = request.computed // size
            ids, columns = request.ids[: full * size], []
            chains = list(accumulate(ids, lambda chain, token: hash((chain, token)), initial=chain))[1:]
            for number, (group, table) in enumerate(zip(self._groups, request.page_tables, strict=True)):
                first = group.first_kept(request.computed, size)
                content = [[number, *chains[index * size : (index + 1) * size]] for index in range(full)]
                columns += [
                    page if index >= first and page != NO_PAGE and self._pages[page] == content[index] else NO_PAGE
                    for index, page in enumerate(table[:full])
                ]
            if self._recurrent is not None:
                snapshots = {chain: -1 - slot for slot, chain in self._states.items() if slot < 0}
                columns += [snapshots.get(chain, NO_PAGE) for chain in chains[size - 1 :: size]]
            if full and not request.fault:
                pages = pack_column(INT32, columns)
                held.append(HeldPages(pack_column(INT32, ids), pages, request.slot.extras))
        return held

    def run_step(self, step: Step) -> StepResult:
        """The result of a step; `error` names the first fault of the step, if it has one."""
        try:
            return self._run(step)
        except (Violation, ProtocolError) as fault:
            return StepResult(step.number, step.epoch, b"", b"", b"", error=f"step {step.number}: {fault}")

    def _run(self, step: Step) -> StepResult:
        if step.epoch > self.epoch:
            self.reset()
            self.epoch = step.epoch
        require(step.epoch == self.epoch, f"epoch {step.epoch} is over, {self.epoch} is in force")
        require(step.number == self.number + 1, f"number {step.number} follows {self.number}")
        self.number = step.number
        self._copy_states(step)
        self._assign_slots(step)
        self._append_pages(step)
        rows, starts, counts = unpack_int32(step.rows), unpack_int32(step.starts), unpack_int32(step.counts)
        require(len(rows) == len(starts) == len(counts) == len(step.samples), "rows, starts, counts and samples differ")
        require(len(set(rows)) == len(rows), "a slot has two rows")
        self._check_tower(unpack_int32(step.tower))
        require(bool(rows or step.tower), "no rows")
        require(set(step.samples) <= {0, 1}, "samples are 0 or 1")
        drafts = self._drafts(step, len(rows))
        total = sum(counts) + sum(map(len, drafts))
        require(
            total <= max(self.limits.max_batch_prefill_tokens, len(rows)),
            f"{total} tokens are over the limit of {self.limits.max_batch_prefill_tokens} a step",
        )
        for slot, start, count, row_drafts in zip(rows, starts, counts, drafts, strict=True):
            self._check_row(slot, start, count, len(row_drafts))
        sampled: list[list[FakeToken]] = []
        prompt_logprobs: list[FakeToken] = []
        vectors: array[float] = array(FLOAT32)
        for slot, start, count, samples, row_drafts in zip(rows, starts, counts, step.samples, drafts, strict=True):
            prompt_logprobs += self._compute(slot, start, count)
            request = self._slots[slot]
            if samples:
                sampled.append(self._sample(slot, row_drafts))
            elif start + count == len(request.ids) and not request.slot.prompt_logprobs_from:
                vectors.extend(fake_vector(request.chain))
        result = fake_result(step.number, step.epoch, sampled, prompt_logprobs, vectors.tobytes())
        faults = [self._slots[slot].fault for slot in rows]
        return result._replace(row_errors=faults) if any(faults) else result

    def _check_tower(self, column: Sequence[int]) -> None:
        require(len(column) % 3 == 0, "tower slices are triples")
        for slot, image, slices in zip(column[::3], column[1::3], column[2::3], strict=True):
            require(slot in self._slots, f"tower slices of the empty slot {slot}")
            require(image >= 0 and 1 <= slices <= self.limits.tower_slices, f"{slices} tower slices of image {image}")

    def _drafts(self, step: Step, rows: int) -> list[list[int | None]]:
        """The drafts of each row; None stands for a draft that the draft model proposes."""
        if not step.drafts:
            require(not step.draft_ids, "draft_ids without drafts")
            return [[]] * rows
        counts, ids = unpack_int32(step.drafts), unpack_int32(step.draft_ids)
        require(len(counts) == rows, "rows and drafts differ")
        require(
            min(counts) >= 0 and max(counts) <= MAX_DRAFT_TOKENS,
            f"a row has {min(counts)} or {max(counts)} drafts; 0 to {MAX_DRAFT_TOKENS} are possible",
        )
        require(
            all(samples for count, samples in zip(counts, step.samples, strict=True) if count), "drafts without samples"
        )
        require(not ids or len(ids) == sum(counts), f"{len(ids)} draft_ids for {sum(counts)} drafts")
        most = sum(counts) if self._recurrent is None else self._recurrent.drafts
        require(sum(counts) <= most, f"{sum(counts)} drafts, but states are kept for {most}")
        require(all(0 <= token < self.config.vocab_size for token in ids), "a draft is not in the vocabulary")
        each = iter(ids)
        return [[next(each, None) for _ in range(count)] for count in counts]

    def _assign_slots(self, step: Step) -> None:
        seen = set()
        for new in step.slots:
            request = fake_request(new, self.limits, self.adapters)
            request.answer = self._answer_to(request.ids[: new.prompt_tokens])
            require(new.slot not in seen, f"slot {new.slot} gets two requests")
            seen.add(new.slot)
            if old := self._slots.get(new.slot):
                for table in old.page_tables:
                    for page in table:
                        if page != NO_PAGE:
                            self._holders[page].discard(new.slot)
            self._slots[new.slot] = request

    def _append_pages(self, step: Step) -> None:
        tables, pages = unpack_int32(step.page_tables), unpack_int32(step.page_ids)
        require(len(tables) == len(pages), "page_tables and page_ids differ in length")
        if not pages:
            return
        groups = self._groups
        starts = dict(zip(unpack_int32(step.rows), unpack_int32(step.starts), strict=False))
        for table, page in zip(tables, pages, strict=True):
            slot, group = divmod(table, len(groups))
            request = self._request_in(slot)
            if page == NO_PAGE:
                require(groups[group].slides, f"no page in table {table}, whose group keeps all")
            else:
                require(0 <= page < self.config.pages, f"page {page} of {self.config.pages}")
                if slot in self._holders[page]:
                    needed = self._needed_pages(request, starts.get(slot, request.computed))
                    require(page not in needed, f"page {page} is in the table of slot {slot} twice")
                self._holders[page].add(slot)
            request.new_pages.append((group, len(request.page_tables[group])))
            request.page_tables[group].append(page)

    def _copy_states(self, step: Step) -> None:
        slots = unpack_int32(step.state_copies)
        snapshots = 0 if self._recurrent is None else self._recurrent.snapshots
        fits = all(-snapshots <= slot < self.config.slots for slot in slots)
        require(fits, f"state_copies {slots} with {self.config.slots} slots and {snapshots} snapshots")
        for source, target in zip(slots[::2], slots[1::2], strict=True):
            require(source in self._states, f"state_copies {slots} of a state that is not there")
            self._states[target] = self._states[source]

    def _needed_pages(self, request: FakeRequest, position: int) -> set[int]:
        """The pages that the request needs from this position on."""
        needed: set[int] = set()
        for group, table in zip(self._groups, request.page_tables, strict=True):
            needed.update(table[group.first_kept(position, self.config.page_size) :])
        return needed

    def _check_row(self, slot: int, start: int, count: int, drafts: int) -> None:
        """Checks the row against the state of its slot, and clears its new pages."""
        request = self._request_in(slot)
        size = self.config.page_size
        end = start + count
        if count < 1:
            raise Violation(f"slot {slot}: {count} tokens to compute")
        if end > len(request.ids):
            raise Violation(f"slot {slot}: position {end - 1} of {len(request.ids)} known ids")
        for table in request.page_tables:
            if end + drafts > len(table) * size:
                raise Violation(f"slot {slot}: {len(table)} pages do not cover {end + drafts} tokens")
        if drafts and end + drafts >= self.limits.max_total_tokens:
            raise Violation(f"slot {slot}: {drafts} drafts after {end} tokens are over the limit of a request")
        if not request.computed and start > 0:
            self._check_prefix(slot, request, start)
        if start != request.computed:
            raise Violation(f"slot {slot}: starts at {start}, but {request.computed} tokens are computed")
        if request.new_pages:
            for group, index in request.new_pages:
                self._clear_page(request.page_tables[group][index], slot, group)
            request.new_pages.clear()

    def _check_prefix(self, slot: int, request: FakeRequest, start: int) -> None:
        """Checks the cached prefix before the first row of a slot: its pages must hold exactly these tokens."""
        size = self.config.page_size
        asked = request.slot.prompt_logprobs_from
        if asked and start >= asked:
            raise Violation(f"slot {slot}: starts at {start}, but logprobs are wanted from {asked} on")
        chain = request.chain
        for index, at in enumerate(range(0, start, size)):
            chains = list(accumulate(request.ids[at : min(at + size, start)], lambda a, b: hash((a, b)), initial=chain))
            chain = chains[-1]
            for number, (group, table) in enumerate(zip(self._groups, request.page_tables, strict=True)):
                page = table[index]
                if index < group.first_kept(start, size):
                    continue
                if page == NO_PAGE:
                    raise Violation(f"slot {slot}: group {number} lacks page {index} of the prefix")
                held = self._pages[page]
                if len(held) <= size:
                    raise Violation(f"slot {slot}: page {page} is shared with {len(held) - 1} of {size} tokens in it")
                if held[: len(chains)] != [number, *chains[1:]]:
                    raise Violation(f"slot {slot}: page {page} holds other tokens than its prefix")
        if self._recurrent is not None and self._states.get(slot) != chain:
            raise Violation(f"slot {slot}: starts at {start} without the state of the tokens before")
        request.new_pages = [(group, index) for group, index in request.new_pages if index * size >= start]
        request.chain = chain
        request.computed = start

    def _clear_page(self, page: int, slot: int, number: int) -> None:
        """Clears a page that this slot will write in a group, and marks it as lost where other slots have it."""
        if page == NO_PAGE:
            raise Violation(f"slot {slot}: group {number} has no page for tokens that are to be computed")
        self._pages[page] = [number]
        for other in self._holders[page]:
            if other != slot:
                for group, table in enumerate(self._slots[other].page_tables):
                    if page in table:
                        lost = len(table) - 1 - table[::-1].index(page)
                        self._slots[other].lost[group, lost] = f"page {page} was given to slot {slot}"

    def _compute(self, slot: int, start: int, count: int) -> list[FakeToken]:
        """Computes a row. Returns its prompt logprobs."""
        request = self._slots[slot]
        size = self.config.page_size
        if request.lost:
            for (group, index), why in request.lost.items():
                if index >= self._groups[group].first_kept(start, size):
                    raise Violation(f"slot {slot} computes, but its {why}")
        if self._recurrent is not None and start and self._states[slot] != request.chain:
            raise Violation(f"slot {slot} computes from {start} on, but its state is another one")
        asked = request.slot
        logprobs_from = asked.prompt_logprobs_from
        prompt_logprobs = []
        chain = request.chain
        for position in range(start, start + count):
            chain = hash((chain, request.ids[position]))
            if logprobs_from and logprobs_from <= position + 1 < asked.prompt_tokens:
                number = hash((chain, PROMPT_KEY)) % (1 << 32)
                prompt_logprobs.append(
                    fake_prompt_logprob(number, request.ids[position + 1], asked.prompt_top_n, self._ids)
                )
            index, place = position // size, 1 + position % size  # the first item is the group
            for table in request.page_tables:
                page = table[index]
                held = self._pages[page]
                if place == len(held):
                    held.append(chain)
                elif held[place] != chain:  # only the last token of a cached prompt is computed again
                    raise Violation(f"slot {slot} writes other tokens into the shared page {page}")
        request.chain = chain
        if self._recurrent is not None:
            self._states[slot] = chain
        request.computed = start + count
        return prompt_logprobs

    def _sample(self, slot: int, drafts: Sequence[int | None]) -> list[FakeToken]:
        """Samples the next token, and one more after each accepted draft."""
        sampled = []
        for draft in drafts:
            token, proposed = self._sample_one(slot)
            sampled.append(token)
            if token[0] != (proposed if draft is None else draft):
                return sampled
            self._compute(slot, len(self._slots[slot].ids) - 1, 1)
        return [*sampled, self._sample_one(slot)[0]]

    def _sample_one(self, slot: int) -> tuple[FakeToken, int]:
        """Samples the next token; also returns what a draft model would have proposed."""
        request = self._slots[slot]
        known = len(request.ids)
        if request.computed != known:
            raise Violation(f"slot {slot} samples at {request.computed} of {known} known ids")
        if known >= self.limits.max_total_tokens:
            raise Violation(f"slot {slot}: token {known} is over the limit of a request")
        number = hash((request.chain, request.noise)) % (1 << 32)
        sampled = fake_token(number, request.top_n, self._ids)
        if request.answer:
            position = min(known - request.slot.prompt_tokens, len(request.answer) - 1)
            sampled = (request.answer[position], *sampled[1:])
        if request.listed:
            sampled = (*sampled[:2], [(token, sampled[1] - rank) for rank, token in enumerate(request.listed)])
        request.ids.append(sampled[0])
        return sampled, fake_draft(number, self._ids)

    def _answer_to(self, prompt: Sequence[int]) -> Sequence[int]:
        for answer in self.config.answers:
            rest = iter(prompt)
            if all(token in rest for token in answer.after):
                return answer.answer
        return ()

    def _request_in(self, slot: int) -> FakeRequest:
        request = self._slots.get(slot)
        if request is None:
            raise Violation(f"slot {slot} is empty")
        return request


def fake_request(new: SlotAssignment, limits: DeploymentLimits, adapters: AdapterRegistry) -> FakeRequest:
    """Checks a new request against limits and adapters. Raises Violation."""
    ids = unpack_int32(new.token_ids)
    sampling = decode(new.sampling)
    require(0 <= new.slot < limits.max_batch_size, f"slot {new.slot} of {limits.max_batch_size}")
    if not isinstance(sampling, SamplingParams):
        raise Violation(f"slot {new.slot}: `sampling` does not hold SamplingParams")
    require(1 <= new.prompt_tokens <= len(ids), f"slot {new.slot}: {new.prompt_tokens} of {len(ids)} ids are prompt")
    require(len(ids) <= limits.max_total_tokens, f"slot {new.slot}: {len(ids)} tokens are over the limit of a request")
    require(min(ids) >= 0 and max(ids) < limits.vocab_size, f"slot {new.slot}: an id is not in the vocabulary")
    require(
        0 <= new.prompt_logprobs_from < len(ids) and 0 <= new.prompt_top_n <= MAX_PROMPT_TOP_TOKENS,
        f"slot {new.slot}: logprobs from position {new.prompt_logprobs_from} of {len(ids)} on, with {new.prompt_top_n}",
    )
    biased = unpack_int32(sampling.bias_ids)
    require(
        len(biased) == len(unpack_float32(sampling.biases)), f"slot {new.slot}: bias_ids and biases differ in length"
    )
    require(
        all(0 <= token < limits.vocab_size for token in biased),
        f"slot {new.slot}: a biased id is not in the vocabulary",
    )
    words, lengths = unpack_int32(sampling.bad_word_ids), unpack_int32(sampling.bad_word_lengths)
    require(
        len(words) == sum(lengths) and min(lengths, default=1) > 0,
        f"slot {new.slot}: bad_word_ids and bad_word_lengths differ",
    )
    require(
        all(0 <= token < limits.vocab_size for token in words),
        f"slot {new.slot}: a token of a bad word is not in the vocabulary",
    )
    listed = unpack_int32(sampling.listed_ids)
    require(
        all(0 <= token < limits.vocab_size for token in listed) and (sampling.top_n > 0 or not listed),
        f"slot {new.slot}: a listed id is not in the vocabulary, or none is to be listed",
    )
    groups = len(paged_groups(limits.groups))
    found = FakeRequest(ids, noise_key(sampling), sampling.top_n, new, [[] for _ in range(groups)], [])
    found.listed = listed
    if sampling.adapter:
        found.adapter = adapters.find_content(sampling.adapter_digest)
        if found.adapter is None:
            found.fault = missing_adapter_fault(sampling.adapter)  # its pages are those of the model without adapters
        else:
            found.chain = int.from_bytes(sampling.adapter_digest)  # pages computed with an adapter match no others
    return found


def require(holds: bool, fault: str) -> None:
    """Raises Violation unless `holds`. The text is always built, so the checks of each row do not use this function."""
    if not holds:
        raise Violation(fault)
