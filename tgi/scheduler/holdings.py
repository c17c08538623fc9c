"""The pages that requests hold: found and taken on admission, more when these are full, made known, given back.

The worker is kept busy first, the books are kept after: that pages can be found, and that those of ended requests are
free, is noted by `settle`, between two plans. So whatever is found was computed by steps that were sent before.
"""

from itertools import compress
from operator import eq

from tgi.kernel.presence import Limits
from tgi.scheduler.pages import PagePool
from tgi.scheduler.request import Request

# Share of the pages that are evicted ahead, so that a step need not wait for it.
FREE_PAGES = 0.02


class Holdings:
    """Owns the pool."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._size = limits.page_size
        self._free = int(limits.pages * FREE_PAGES)
        self._filled: list[Request] = []  # with pages that may be found and cannot be yet
        self.ended: list[Request] = []  # they need their pages no more, which are still held
        # Further pages of which the worker has yet to hear: to whom they were given, and `since` of then.
        self.given: list[Request] = []
        self._given_since: list[int] = []
        self._given_pages: list[int] = []
        self.pool = PagePool(limits.pages, limits.page_size)
        self.settled = True  # since the last plan

    def lacks(self, pages: int) -> bool:
        """Whether fewer are available, though everything is settled."""
        if pages <= self.pool.available:
            return False
        self.settle()
        return pages > self.pool.available

    def admit(self, request: Request, column: bytes, most: int, spare: int) -> bool:
        """Gives pages to a request that has none, for all its ids, which are `column`: at most so many that are found,
        and new ones as long as that leaves some to spare. False: too few are available."""
        pool = self.pool
        size = self._size
        found, prefix = pool.find(request.salt, column, most)
        known = len(found)
        pages = (len(request.ids) - 1) // size + 1
        missing = pages - known
        if missing + spare > len(pool.free) and self.lacks(missing + spare):
            available = pool.available
            pool.release(found)
            request.wanted = missing + spare + pool.available - available
            return False
        request.pages = found + pool.take(missing) if known else pool.take(missing)
        request.room = pages * size
        request.planned = known * size
        request.published = known
        request.prefix = prefix
        return True

    def give(self, requests: list[Request]) -> bool:
        """Gives a further page to each of these. False: there are too few for all, and nobody has got one."""
        if self.lacks(len(requests)):
            return False
        pages, size = self.pool.take(len(requests)), self._size
        for request, page in zip(requests, pages, strict=True):
            request.grow(page, size)
        self.given += requests
        self._given_since += [request.since for request in requests]
        self._given_pages += pages
        self.filled(requests)
        return True

    def take_given(self) -> tuple[list[int], list[int]]:
        """Slots and further pages, for the step that tells the worker of them: of those that are still there."""
        requests, pages = self.given, self._given_pages
        if (now := [request.since for request in requests]) != self._given_since:
            there = [*map(eq, now, self._given_since)]
            requests, pages = [*compress(requests, there)], [*compress(pages, there)]
        self._forget_given()
        return [request.slot for request in requests], pages

    def _forget_given(self) -> None:
        self.given, self._given_since, self._given_pages = [], [], []

    def filled(self, requests: list[Request]) -> None:
        """The steps that are planned compute a page of each of these to its end: others may find it."""
        self._filled += requests

    def give_up(self, request: Request) -> None:
        """It is to be computed again. What is computed already, it may find then. Steps under way may still write to
        its pages: they run before any step that is planned from now on."""
        self._give_back(request)

    def settle(self) -> None:
        """Keeps the books of what the steps sent and the results taken have brought about."""
        for request in self._filled:
            if request.shares:
                self._publish(request)
        for request in self.ended:
            self._give_back(request)
        self._filled.clear()
        self.ended.clear()
        self.pool.keep_free(self._free)
        self.settled = True

    def _give_back(self, request: Request) -> None:
        if request.shares:
            self._publish(request)
        self.pool.release(request.pages)

    def _publish(self, request: Request) -> None:
        """Makes the pages known that are full of what the steps sent so far compute, and of no id yet to be drawn."""
        first, last, size = request.published, request.planned, self._size
        if (known := len(request.ids)) < last:
            last = known
        if (last := last // size) > first:
            column = request.ids[first * size : last * size].tobytes()
            request.prefix = self.pool.publish(request.prefix, request.pages[first:last], column)
            request.published = last

    def forget(self) -> None:
        """The worker's tensors are gone: no page holds anything."""
        self.settle()
        self._forget_given()
        self.pool = PagePool(self._limits.pages, self._size)

    def check(self, batch: list[Request]) -> None:
        """Raises AssertionError if pages and requests contradict each other. For tests."""
        self.pool.check(request.pages for request in (*batch, *self.ended))
