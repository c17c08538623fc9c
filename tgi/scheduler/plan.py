"""Decides what the next step computes: decode rows first, then prompts in the order of arrival."""

from tgi.kernel.messages import Slot
from tgi.kernel.pack import INT32, pack, pack_ints
from tgi.kernel.presence import Limits
from tgi.kernel.states import CHUNK, LAST_CHUNK, PREEMPT, PREFILL, QUEUED, WORKER_LOST, Event
from tgi.scheduler.adapters import Adapters
from tgi.scheduler.batch import Batch
from tgi.scheduler.counters import Counters
from tgi.scheduler.flight import Flight, Outline
from tgi.scheduler.holdings import Holdings
from tgi.scheduler.lookup import Lookup
from tgi.scheduler.pace import Pace
from tgi.scheduler.prompts import telling
from tgi.scheduler.queue import Queue
from tgi.scheduler.request import NO_SLOT, Request
from tgi.scheduler.speculation import Speculation

# Share of the pages that admission leaves to the requests that run, so that they need not preempt at once.
SPARE_PAGES = 0.01


class Planner:
    """Owns what a plan is made of: the queue, the batch and the pages.

    A plan may be made while earlier steps are still under way: the worker runs steps in order, so whatever is free
    when a step is planned may be used by it, and a decode row needs no id, only a position.
    """

    def __init__(
        self,
        limits: Limits,
        caching: bool,
        pace: Pace,
        queue: Queue,
        counters: Counters,
        adapters: Adapters,
        speculation: Speculation | None = None,
    ) -> None:
        self.limits = limits
        self.queue = queue
        self.batch = Batch(limits.max_batch_size)
        self.holdings = Holdings(limits)
        self._page_size = limits.page_size
        self._caching = caching
        self._pace = pace
        self._counters = counters
        self._adapters = adapters
        self._speculation = speculation
        self._spare = int(limits.pages * SPARE_PAGES)
        self._slots = [pack(INT32, [slot]) for slot in range(limits.max_batch_size)]  # as columns

    def plan(self, number: int, epoch: int, alone: Request | None, ahead: bool, now: float) -> Flight | None:
        """The next step, or None if there is nothing to compute. `alone`: only this request may have a row. `ahead`:
        other steps are still under way, so the latest ids are not known."""
        holdings = self.holdings
        if not holdings.settled:
            self.settle()
        outline = Outline()
        running = len(self.batch)
        self._decode(outline, alone)
        decode_rows = len(outline.drawing)
        if self._speculation is not None and not ahead:
            self._speculate(outline, self._speculation)
        self._prefill(outline, number, alone, now)
        holdings.settled = False
        if not outline.rows and not outline.chunks:
            return None
        # From the next step on others may find the pages of prompts; this step has yet to write them.
        holdings.filled(outline.drawing[decode_rows:] + outline.prefilling)
        if holdings.given:
            slots, pages = holdings.take_given()
            outline.page_slots.insert(0, pack_ints(slots))  # before any other page of the same request
            outline.page_ids[:0] = pages
        return outline.flight(number, epoch, running > 0, self.batch.left, now)

    # --- decode -------------------------------------------------------------------------------------------------------

    def _decode(self, outline: Outline, alone: Request | None) -> None:
        """One row for each request whose prompt is computed. Those that find no page wait."""
        needy, last = self.batch.due()
        if alone is not None:
            needy, last = ([one for one in due if one is alone] for due in (needy, last))
        short: set[Request] = set()
        if needy and not self.holdings.give(needy):
            short = self._next_pages(outline, needy, alone)
            last = [request for request in last if request.lane is not None and request not in short]
        if alone is None and not short:
            for client, lane in self.batch.lanes.items():
                outline.decode_lane(client, lane)
        else:
            for request in self.batch.decoding:
                if request not in short and alone in (None, request):
                    outline.decode(request)
        outline.last += last
        self.batch.last = last

    def _next_pages(self, outline: Outline, needy: list[Request], alone: Request | None) -> set[Request]:
        """Gives a page to each of these, in which its next row goes on, though there are too few. Returns those that
        have got none."""
        short = set()
        for request in sorted(needy, key=_order):
            if request.slot == NO_SLOT:
                continue  # it has just given way itself
            if self._make_room(request, anyone=request is alone):
                self._append_page(outline, request, *self.holdings.pool.take(1))
                self.holdings.filled([request])
            else:
                short.add(request)
        return short

    def _speculate(self, outline: Outline, speculation: Speculation) -> None:
        """Adds drafts to the decode rows, as far as pages are there that nobody else wants. Prompts that wait are left
        half of what the step may compute."""
        rows = outline.drawing
        most = self.limits.max_batch_prefill_tokens - len(rows)
        shares = speculation.share(rows, most // 2 if self.batch.prefilling or self.queue else most)
        for request, start, share in zip(rows, outline.starts, shares, strict=False):
            missing = -(-(start + 1 + share - request.room) // self._page_size)
            if missing > 0 and not self.holdings.lacks(missing + self._spare):
                for page in self.holdings.pool.take(missing):
                    self._append_page(outline, request, page)
            count = min(share, request.room - start - 1)
            outline.drafts.append(count)
            if isinstance(request.guesser, Lookup):
                outline.guesses.append(request.guesser.guess(count).tobytes())
        if not any(outline.drafts):
            del outline.drafts[:]

    def _make_room(self, request: Request, anyone: bool) -> bool:
        """Sees to it that a page is available; takes it from requests that arrived later if need be."""
        while self.holdings.lacks(1):
            victim = self.batch.youngest(besides=request)
            if victim is None or not (anyone or victim.order > request.order):
                return False
            self._preempt(victim)
        return True

    def _append_page(self, outline: Outline, request: Request, page: int) -> None:
        request.grow(page, self._page_size)
        outline.page_slots.append(self._slots[request.slot])
        outline.page_ids.append(page)

    def _preempt(self, request: Request) -> None:
        self._counters.preemptions += 1
        self.send_back(request, PREEMPT)

    # --- prefill ------------------------------------------------------------------------------------------------------

    def _prefill(self, outline: Outline, number: int, alone: Request | None, now: float) -> None:
        """Chunks of the prompts under way, then of new ones, in the order of arrival.

        The first gets all that the step may compute. Another joins only while the step has not enough to be worth it:
        from there on a prompt takes as long wherever it is computed, so those that come together better finish one
        after the other than all with the last.
        """
        budget = self.limits.max_batch_prefill_tokens - len(outline.drawing) - sum(outline.drafts)
        if outline.drawing:
            budget = self._pace.prefill_tokens(min(self.limits.page_size, budget), budget)
        if alone is not None:
            if alone.slot == NO_SLOT:
                self._admit_alone(outline, alone, number, now)
            if alone.slot != NO_SLOT and alone.state in (QUEUED, PREFILL):
                self._chunk(outline, alone, budget)
            return
        if not self.batch.prefilling and not self.queue:
            return
        full = max(0, budget - self._pace.enough_tokens(budget))
        for request in list(self.batch.prefilling):
            if budget <= full:
                return
            budget -= self._chunk(outline, request, budget)
        free, busy = self.batch.free, self.batch.busy
        while budget > full and free and (head := self.queue.head()) is not None:
            if not self._admit(outline, head, busy, number, now):
                return
            budget -= self._chunk(outline, head, budget)
            busy = True

    def _chunk(self, outline: Outline, request: Request, budget: int) -> int:
        """A row of at most `budget` tokens. Returns how many it has."""
        start, known = request.planned, len(request.ids)
        tokens = known - start
        draws = tokens <= budget
        if not draws:
            tokens = budget
        request.planned = end = start + tokens
        if request.prompt_from < request.prompt_tokens and (told := telling(request, start, end)):
            outline.telling.append(told)
        if draws:
            if request.state is PREFILL:
                del self.batch.prefilling[request]
            request.state = LAST_CHUNK[request.state]
            if end <= request.last_start:
                outline.drawing.append(request)
                self.batch.prompted.append(request)
            elif request.scored:
                draws = False
                outline.prefilling.append(request)
            else:
                outline.drawing.append(request)
                outline.last.append(request)
        else:
            request.state = CHUNK[request.state]
            outline.prefilling.append(request)
            self.batch.prefilling[request] = None
        outline.chunks.append((request.slot, start, tokens, draws))
        return tokens

    def _admit(self, outline: Outline, request: Request, busy: bool, number: int, now: float) -> bool:
        """Moves the head of the queue into a slot, with pages for all its ids. False: too few are available.

        Nobody is preempted for it, and nothing is reserved for what it may generate. `busy`: others hold slots.
        """
        holdings = self.holdings
        if request.wanted and busy and holdings.lacks(request.wanted):
            return False  # nothing has changed since the last try
        # The last id is always computed, since its row draws the next; what tells a logprob is computed, too.
        tells = request.prompt_from < request.prompt_tokens
        computed = request.prompt_from if tells else len(request.ids)
        # Without its adapter the worker would fill them with something else.
        request.shares = shares = self._caching and (not request.salt or self._adapters.has(request.salt))
        column = request.ids.tobytes()
        most = (computed - 1) // self._page_size if shares else 0
        if not holdings.admit(request, column, most, self._spare if busy else 0):
            return False
        self.queue.pop()
        place = self.batch.enter(request)
        request.since = number
        if found := request.planned:
            self._counters.cache_hit_tokens += found
            if request.first_planned is None:
                request.cached_tokens = min(found, request.prompt_tokens)
        if request.first_planned is None:
            request.first_planned = now
        if self._speculation is not None:
            self._speculation.enter(request)
        slot = Slot(place, column, request.prompt_tokens, request.sampling)
        if tells:
            slot = slot._replace(prompt_from=request.prompt_from, prompt_top_n=request.prompt_top_n)
        outline.slots.append(slot)
        outline.page_slots.append(self._slots[place] * len(request.pages))
        outline.page_ids += request.pages
        return True

    def _admit_alone(self, outline: Outline, request: Request, number: int, now: float) -> None:
        """Admits a suspect, whoever has to give up slot and pages for it."""
        while True:
            request.wanted = 0
            if not self.batch.full and self._admit(outline, request, self.batch.busy, number, now):
                return
            victim = self.batch.youngest(besides=request)
            if victim is None:
                return
            self._preempt(victim)

    # --- between steps ------------------------------------------------------------------------------------------------

    def end(self, requests: list[Request]) -> None:
        """Takes the slots from these, and their pages when it is settled."""
        self.batch.leave(requests)
        self.holdings.ended += requests

    def settle(self) -> None:
        """Keeps the books that no step waits for, and gives the pages that the next rows need if all can have one."""
        self.batch.settle()
        self.holdings.settle()
        needy, _ = self.batch.due()
        if needy:
            self.holdings.give(needy)
        if self._speculation is not None:
            self._speculation.read()

    def send_back(self, request: Request, event: Event) -> None:
        """Back to the queue, with all ids it has: those that were generated come back as prefill."""
        self.batch.settle()
        self.holdings.settle()
        self.batch.leave([request])
        self.holdings.give_up(request)
        request.state = event[request.state]
        request.wanted = 0
        self._counters.resumed_tokens += request.generated
        self.queue.come_back(request)

    def forget_worker(self) -> None:
        """The worker's tensors are gone: everybody back to the queue, no page holds anything."""
        for request in list(self.batch):
            self.send_back(request, WORKER_LOST)
        self.holdings.forget()

    def check(self) -> None:
        """Raises AssertionError if pages and requests contradict each other. For tests."""
        self.holdings.check(list(self.batch))


def _order(request: Request) -> int:
    return request.order
