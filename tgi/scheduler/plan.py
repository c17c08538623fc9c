"""Decides what the next step computes: decode rows first, then prompts in the order of arrival."""

from array import array

from tgi.kernel.messages import Limits, Slot
from tgi.kernel.pack import INT32
from tgi.scheduler.adapters import Adapters
from tgi.scheduler.batch import Batch
from tgi.scheduler.counters import Counters
from tgi.scheduler.flight import Flight, Outline
from tgi.scheduler.lookup import Lookup
from tgi.scheduler.pace import Pace
from tgi.scheduler.pages import PagePool
from tgi.scheduler.prompts import telling
from tgi.scheduler.queue import Queue
from tgi.scheduler.request import NEVER, NO_SLOT, Request
from tgi.scheduler.speculation import Speculation

# Share of the pages that admission leaves to the requests that run, so that they need not preempt at once.
SPARE_PAGES = 0.01
# Share of the pages that are evicted ahead, so that a step need not wait for it.
FREE_PAGES = 0.02
# The counts of one decode row.
ONE = array(INT32, [1])


class Planner:
    """Owns what a plan is made of: the queue, the batch and the pages.

    A plan may be made while earlier steps are still under way: the worker runs steps in order, so whatever is free
    when a step is planned may be used by it, and a decode row needs no id, only a position.

    The worker is kept busy first, the books are kept after: that pages can be found, and that those of ended requests
    are free, is noted by `settle`, between two plans.
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
        self.pool = PagePool(limits.pages, limits.page_size)
        self._filled: list[Request] = []  # with pages that may be found and cannot be yet
        self._ended: list[Request] = []  # whose pages are still held
        self._settled = True  # since the last plan
        self._page_size = limits.page_size
        self._caching = caching
        self._pace = pace
        self._counters = counters
        self._adapters = adapters
        self._speculation = speculation
        self._spare = int(limits.pages * SPARE_PAGES)
        self._free = int(limits.pages * FREE_PAGES)

    def plan(self, number: int, epoch: int, alone: Request | None, ahead: bool, now: float) -> Flight | None:
        """The next step, or None if there is nothing to compute. `alone`: only this request may have a row. `ahead`:
        other steps are still under way, so the latest ids are not known."""
        if not self._settled:
            self.settle()
        outline = Outline()
        running = len(self.batch)
        self._decode(outline, alone)
        decode_rows = len(outline.drawing)
        if self._speculation is not None and not ahead:
            self._speculate(outline, self._speculation)
        self._prefill(outline, number, alone, now)
        self._settled = False
        if not outline.rows:
            return None
        # From the next step on others may find these pages; this step has yet to write them.
        self._filled += outline.filling
        return outline.flight(number, epoch, decode_rows, running > 0, now)

    # --- decode -------------------------------------------------------------------------------------------------------

    def _decode(self, outline: Outline, alone: Request | None) -> None:
        """One row for each request whose prompt is computed. Those that find no page wait."""
        due = self.batch.due() if alone is None else [one for one in self.batch.due() if one is alone]
        short = self._next_pages(outline, [request for request in due if request.planned == request.room], alone)
        last = [
            request
            for request in due
            if request.planned == request.last_start and request.lane is not None and request not in short
        ]
        if alone is None and not short:
            for client, lane in self.batch.lanes.items():
                outline.decode_lane(client, lane)
        else:
            for request in self.batch.decoding:
                if request not in short and alone in (None, request):
                    outline.decode(request)
        rows = len(outline.drawing)
        outline.counts.extend(ONE * rows)
        outline.draws += b"\1" * rows
        outline.last += last
        for request in last:
            self.batch.leave_lane(request)

    def _next_pages(self, outline: Outline, needy: list[Request], alone: Request | None) -> list[Request]:
        """Gives a page to each of these, in which its next row goes on. Returns those that have got none."""
        if not self._lacks(len(needy)):
            for request, page in zip(needy, self.pool.take(len(needy)), strict=True):
                self._append_page(outline, request, page)
                self.filled(request)
            return []
        short = []
        for request in sorted(needy, key=_order):
            if request.slot == NO_SLOT:
                continue  # it has just given way itself
            if self._make_room(request, anyone=request is alone):
                self._append_page(outline, request, *self.pool.take(1))
                self.filled(request)
            else:
                short.append(request)
        return short

    def _speculate(self, outline: Outline, speculation: Speculation) -> None:
        """Adds drafts to the decode rows, as far as pages are there that nobody else wants. Prompts that wait are left
        half of what the step may compute."""
        rows = outline.drawing
        most = self.limits.max_batch_prefill_tokens - len(rows)
        shares = speculation.share(rows, most // 2 if self.batch.prefilling or self.queue else most)
        for request, start, share in zip(rows, outline.starts, shares, strict=False):
            missing = -(-(start + 1 + share - request.room) // self._page_size)
            if missing > 0 and not self._lacks(missing + self._spare):
                for page in self.pool.take(missing):
                    self._append_page(outline, request, page)
            count = min(share, request.room - start - 1)
            outline.drafts.append(count)
            if isinstance(request.guesser, Lookup):
                outline.guesses.append(request.guesser.guess(count).tobytes())
        if not any(outline.drafts):
            del outline.drafts[:]

    def _make_room(self, request: Request, anyone: bool) -> bool:
        """Sees to it that a page is available; takes it from requests that arrived later if need be."""
        while self._lacks(1):
            victim = self.batch.youngest(besides=request)
            if victim is None or not (anyone or victim.order > request.order):
                return False
            self._preempt(victim)
        return True

    def _append_page(self, outline: Outline, request: Request, page: int) -> None:
        request.pages.append(page)
        request.room += self._page_size
        if request.lane is not None:
            request.lane.has_room(request)
        outline.page_slots.append(request.slot)
        outline.page_ids.append(page)

    def _preempt(self, request: Request) -> None:
        self._counters.preemptions += 1
        self.send_back(request, "preempt")

    # --- prefill ------------------------------------------------------------------------------------------------------

    def _prefill(self, outline: Outline, number: int, alone: Request | None, now: float) -> None:
        """Chunks of the prompts under way, then of new ones, as many tokens as the step may compute."""
        budget = self.limits.max_batch_prefill_tokens - len(outline.drawing) - sum(outline.drafts)
        if outline.drawing:
            budget = self._pace.prefill_tokens(min(self.limits.page_size, budget), budget)
        if alone is not None:
            if alone.slot == NO_SLOT:
                self._admit_alone(outline, alone, number, now)
            if alone in self.batch.prefilling:
                self._chunk(outline, alone, budget)
            return
        for request in list(self.batch.prefilling):
            if budget <= 0:
                return
            budget -= self._chunk(outline, request, budget)
        while budget > 0 and not self.batch.full and (head := self.queue.head()) is not None:
            if not self._admit(outline, head, number, now):
                return
            budget -= self._chunk(outline, head, budget)

    def _chunk(self, outline: Outline, request: Request, budget: int) -> int:
        """A row of at most `budget` tokens. Returns how many it has."""
        start, known = request.planned, len(request.ids)
        count = min(budget, known - start)
        request.planned = end = start + count
        if request.shares:
            outline.filling.append(request)
        if request.tells and (told := telling(request, start, end)):
            outline.telling.append(told)
        outline.rows.append(request.slot)
        outline.starts.append(start)
        outline.counts.append(count)
        if end < known:
            request.become("chunk")
            outline.draws.append(0)
            outline.prefilling.append(request)
            return count
        request.become("last chunk")
        outline.draws.append(1)
        outline.drawing.append(request)
        del self.batch.prefilling[request]
        if end <= request.last_start:
            self.batch.decode(request, end)
        else:
            outline.last.append(request)
        return count

    def _admit(self, outline: Outline, request: Request, number: int, now: float) -> bool:
        """Moves the head of the queue into a slot, with pages for all its ids. False: too few are available.

        Nobody is preempted for it, and nothing is reserved for what it may generate.
        """
        spare = self._spare if self.batch.busy else 0
        if request.wanted and self.batch.busy and self._lacks(request.wanted):
            return False  # nothing has changed since the last try
        # The last id is always computed, since its row draws the next: where it is alone in a page, that one is new.
        column, full = request.ids.tobytes(), (len(request.ids) - 1) // self._page_size
        # A position that tells a logprob is computed, too.
        most = min(full, (request.prompt_from - 1) // self._page_size) if request.tells else full
        # Without its adapter the worker would fill them with something else.
        request.shares = self._caching and (not request.salt or self._adapters.has(request.salt))
        found, prefix = self.pool.find(request.salt, column, most if request.shares else 0)
        missing = full + 1 - len(found)
        if self._lacks(missing + spare):
            available = self.pool.available
            self.pool.release(found)
            request.wanted = missing + spare + self.pool.available - available
            return False
        self.queue.pop()
        request.pages = found + self.pool.take(missing)
        request.published = len(found)
        request.prefix = prefix
        self._enter(outline, request, column, number, now)
        return True

    def _admit_alone(self, outline: Outline, request: Request, number: int, now: float) -> None:
        """Admits a suspect, whoever has to give up slot and pages for it."""
        while True:
            request.wanted = 0
            if not self.batch.full and self._admit(outline, request, number, now):
                return
            victim = self.batch.youngest(besides=request)
            if victim is None:
                return
            self._preempt(victim)

    def _enter(self, outline: Outline, request: Request, column: bytes, number: int, now: float) -> None:
        """Gives a slot to a request that has its pages; `column` are its ids."""
        size, pages = self._page_size, request.pages
        request.become("admit")
        self.batch.enter(request)
        request.since = number
        request.room = len(pages) * size
        request.planned = planned = request.published * size
        if request.first_planned is None:
            request.first_planned = now
            request.cached_tokens = min(planned, request.prompt_tokens)
        self._counters.cache_hit_tokens += planned
        if self._speculation is not None:
            self._speculation.enter(request)
        asks = (request.prompt_from, request.prompt_top_n) if request.tells else ()
        outline.slots.append(Slot(request.slot, column, request.prompt_tokens, request.sampling, *asks))
        outline.page_slots += array(INT32, (request.slot,)) * len(pages)
        outline.page_ids.fromlist(pages)

    def _lacks(self, pages: int) -> bool:
        """Whether fewer are available, though everything is settled."""
        if pages <= self.pool.available:
            return False
        self.settle()
        return pages > self.pool.available

    # --- between steps ------------------------------------------------------------------------------------------------

    def filled(self, request: Request) -> None:
        """Its rows have come to the end of a page: others may find it."""
        if request.shares:
            self._filled.append(request)

    def end(self, request: Request) -> None:
        """Takes the slot from a request that has one, and its pages when it is settled."""
        self.batch.leave(request)
        request.since = NEVER
        self._ended.append(request)

    def settle(self) -> None:
        """Keeps the books of what the steps sent and the results taken have brought about."""
        for request in self._filled:
            self._publish(request)
        for request in self._ended:
            if request.shares:
                self._publish(request)
            self.pool.release(request.pages)
        self._filled.clear()
        self._ended.clear()
        self.pool.keep_free(self._free)
        if self._speculation is not None:
            self._speculation.read()
        self._settled = True

    def _publish(self, request: Request) -> None:
        """Makes the pages known that are full of what the steps sent so far compute, and of no id yet to be drawn."""
        first, size = request.published, self._page_size
        last = min(request.planned, len(request.ids)) // size
        if last <= first:
            return
        column = request.ids[first * size : last * size].tobytes()
        request.prefix = self.pool.publish(request.prefix, request.pages[first:last], column)
        request.published = last

    def send_back(self, request: Request, event: str) -> None:
        """Back to the queue, with all ids it has: those that were generated come back as prefill. Steps under way may
        still write to its pages: they run before any step that is planned from now on."""
        self.settle()
        self.batch.leave(request)
        if request.shares:
            self._publish(request)  # what it finds again when it comes back
        self.pool.release(request.pages)
        request.leave_slot()
        request.become(event)
        request.wanted = 0
        self._counters.resumed_tokens += request.generated
        self.queue.push(request)

    def forget_worker(self) -> None:
        """The worker's tensors are gone: everybody back to the queue, no page holds anything."""
        for request in list(self.batch):
            self.send_back(request, "worker lost")
        self.settle()
        self.pool = PagePool(self.limits.pages, self.limits.page_size)

    def check(self) -> None:
        """Raises AssertionError if pages and requests contradict each other. For tests."""
        self.pool.check(request.pages for request in (*self.batch, *self._ended))


def _order(request: Request) -> int:
    return request.order
