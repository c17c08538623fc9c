"""The paged KV cache: which request holds which pages, and the prefix cache.

A page is a fixed number of token positions (vLLM: block). `KVCacheManager` gives pages to requests, `PagePool` counts
references, finds prefixes and evicts.

The prefix cache. A full page that may be found has a name, a number that is never reused. Its key is the name of the
page before it followed by its own token ids; a first page has the salt in place of a name. So a key stands for all ids
up to the end of its page, compared exactly and not by hash, and a prefix is found page by page.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from itertools import compress
from operator import eq

from tgi.microkernel.messages.codec import INT32, ITEM_BYTES, unpack_int32
from tgi.microkernel.messages.protocol import DeploymentLimits, HeldPages
from tgi.scheduler.request import Request

# Share of the pages that is evicted ahead of time, so that planning a step does not wait for eviction.
FREE_PAGES_SHARE = 0.02


class KVCacheManager:
    """Allocates pages to requests and publishes their full pages to the prefix cache. Owns the pool.

    Publishing pages and releasing those of ended requests is deferred to `commit`, between two step plans, so that the
    worker does not wait for it. So every page that a plan finds was computed by steps that were sent before.
    """

    def __init__(self, limits: DeploymentLimits) -> None:
        self._limits = limits
        self._page_size = limits.page_size
        self._free_target = int(limits.pages * FREE_PAGES_SHARE)
        self._filled: list[Request] = []  # may have full pages that are not published yet
        self._ended: list[Request] = []  # have left their slots; their pages are released by `commit`
        # Appended pages that no step has sent to the worker yet: the request, its `valid_from_step` then, the page.
        self.appended: list[Request] = []
        self._appended_valid_from: list[int] = []
        self._appended_pages: list[int] = []
        self.pool = PagePool(limits.pages, limits.page_size)
        self.committed = True  # whether `commit` was called since the last plan

    def ensure_available(self, pages: int) -> bool:
        """Whether this many pages are available. Commits first if that can make them available."""
        if pages <= self.pool.available:
            return True
        self.commit()
        return pages <= self.pool.available

    def allocate(self, request: Request, column: bytes, max_cached: int, spare: int) -> bool:
        """Gives pages for all its tokens, which are `column`, to a request that has none: at most `max_cached` found in
        the prefix cache, the rest new. False if then fewer than `spare` pages would be available."""
        pool = self.pool
        size = self._page_size
        found, prefix = pool.find_prefix(request.cache_salt, column, max_cached)
        cached = len(found)
        pages = (len(request.token_ids) - 1) // size + 1
        missing = pages - cached
        if missing + spare > len(pool.free) and not self.ensure_available(missing + spare):
            available = pool.available
            pool.release(found)
            # The pages just released count as available but are part of the request's prefix.
            request.missing_pages = missing + spare + pool.available - available
            return False
        request.pages = found + pool.allocate(missing) if cached else pool.allocate(missing)
        request.capacity = pages * size
        request.planned = cached * size
        request.published_pages = cached
        request.prefix = prefix
        return True

    def begin_step(self) -> None:
        """Notes that a step was planned, after which `commit` is due."""
        self.committed = False

    def release_later(self, requests: list[Request]) -> None:
        """Releases the pages of these requests at the next commit."""
        self._ended += requests

    def append_pages(self, requests: list[Request]) -> bool:
        """Appends a page to each of these requests. False: too few are available, and no request has got one."""
        if not self.ensure_available(len(requests)):
            return False
        pages, size = self.pool.allocate(len(requests)), self._page_size
        for request, page in zip(requests, pages, strict=True):
            request.add_page(page, size)
        self.appended += requests
        self._appended_valid_from += [request.valid_from_step for request in requests]
        self._appended_pages += pages
        self.mark_filled(requests)
        return True

    def take_appended(self) -> tuple[list[int], list[int]]:
        """Slots and appended pages, for the step that sends them to the worker; requests that have left are omitted."""
        requests, pages = self.appended, self._appended_pages
        if (valid_from := [request.valid_from_step for request in requests]) != self._appended_valid_from:
            valid = [*map(eq, valid_from, self._appended_valid_from)]
            requests, pages = [*compress(requests, valid)], [*compress(pages, valid)]
        self._clear_appended()
        return [request.slot for request in requests], pages

    def _clear_appended(self) -> None:
        self.appended, self._appended_valid_from, self._appended_pages = [], [], []

    def mark_filled(self, requests: list[Request]) -> None:
        """The planned steps fill a page of each of these requests: the next commit publishes it."""
        self._filled += requests

    def commit(self) -> None:
        """Publishes full pages, releases those of ended requests, and evicts ahead of time. To be called between two
        plans."""
        for request in self._filled:
            if request.shares_pages:
                self._publish(request)
        for request in self._ended:
            self.free(request)
        self._filled.clear()
        self._ended.clear()
        self.pool.evict_ahead(self._free_target)
        self.committed = True

    def free(self, request: Request) -> None:
        """Publishes the request's full pages and releases all. Steps in flight may still write to them: those run
        before any step that is planned from now on."""
        if request.shares_pages:
            self._publish(request)
        self.pool.release(request.pages)

    def _publish(self, request: Request) -> None:
        """Publishes the pages that the steps sent so far fill with known tokens."""
        first, last, size = request.published_pages, request.planned, self._page_size
        if (known := len(request.token_ids)) < last:
            last = known
        if (last := last // size) > first:
            column = request.token_ids[first * size : last * size].tobytes()
            request.prefix = self.pool.publish(request.prefix, request.pages[first:last], column)
            request.published_pages = last

    def worker_state_lost(self) -> None:
        """The worker's tensors are gone: all pages are empty, and no prefix is cached."""
        self.commit()
        self._clear_appended()
        self.pool = PagePool(self._limits.pages, self._page_size)

    def forget(self, pages: Iterable[int]) -> None:
        """The steps that were to fill these pages have failed: no prefix is found there. To be called when no request
        holds a page."""
        self.commit()
        self._clear_appended()
        self.pool.forget(pages)

    def adopt(self, held: Iterable[HeldPages]) -> int:
        """Publishes pages that the worker has computed for an earlier scheduler. To be called before any page is
        allocated. Returns the number of pages that can be found now."""
        whole = [
            one
            for one in held
            if len(one.token_ids) == len(one.page_ids) * self._page_size and len(one.page_ids) % ITEM_BYTES == 0
        ]
        return self.pool.adopt((one.cache_salt, one.token_ids, unpack_int32(one.page_ids)) for one in whole)

    def check(self, batch: list[Request]) -> None:
        """Raises AssertionError if pages and requests contradict each other. For tests."""
        self.pool.check(request.pages for request in (*batch, *self._ended))


ID_BYTES = array(INT32).itemsize
# Names and keys are bytes. Tuples would be tracked by the garbage collector and make its passes slow. All names have
# the same length and begin with 0, and all keys end with the same number of ids: so keys of different prefixes differ.
NAME_BYTES = 8
ROOT_PREFIX = b"\xff"
NO_NAME = b""  # of a page that cannot be found


class PagePool:
    """Each page is in one of three states: free; held by one or more requests; or idle, held by no request but cached
    under its prefix. Free pages are allocated first, then idle ones are evicted, the least recently used first.

    When a page is evicted, the pages after it in its prefix cannot be found any more; they stay idle until they are
    evicted, too. That is rare, since the end of a prefix becomes idle before its beginning.

    All operations take O(1) per page.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        self._page_bytes = page_size * ID_BYTES
        self._references = [1] * pages  # a free page has the reference of its next holder
        self.free = list(range(pages - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # the least recently used first
        self._by_key: dict[bytes, int] = {}
        self._key_of = [b""] * pages
        self._name_of = [NO_NAME] * pages
        self._names = 0  # names given so far

    @property
    def available(self) -> int:
        """Pages that can be allocated now."""
        return len(self.free) + len(self._idle)

    @property
    def used(self) -> int:
        """Pages that are held by requests."""
        return len(self._references) - self.available

    def allocate(self, count: int) -> list[int]:
        """Takes this many pages with undefined content, with one reference each. Raises IndexError if fewer are
        available."""
        free = self.free
        left = len(free) - count
        if left >= 0:
            pages = free[left:]
            del free[left:]
            return pages
        if -left > len(self._idle):
            raise IndexError(f"{count} pages wanted, {self.available} available")
        self.free = []
        return free + self._evict(-left)

    def evict_ahead(self, count: int) -> None:
        """Evicts idle pages until this many pages are free or none is idle."""
        if (missing := min(count - len(self.free), len(self._idle))) > 0:
            self.free += reversed(self._evict(missing))

    def _evict(self, count: int) -> list[int]:
        """Removes the least recently used idle pages from the prefix cache."""
        evicted = [self._idle.popitem(last=False)[0] for _ in range(count)]
        for page in evicted:
            del self._by_key[self._key_of[page]]
            self._key_of[page] = b""
            self._name_of[page] = NO_NAME
            self._references[page] = 1
        return evicted

    def find_prefix(self, salt: bytes, column: bytes, max_pages: int) -> tuple[list[int], bytes]:
        """Finds the longest cached prefix of the ids in `column` (int32), of at most `max_pages` pages. Returns its
        pages, each with one more reference, and the name of the prefix: that of its last page, or the salt."""
        prefix, size, by_key = ROOT_PREFIX + salt, self._page_bytes, self._by_key
        if not max_pages or prefix + column[:size] not in by_key:  # the usual case of a new prompt
            return [], prefix
        found: list[int] = []
        name_of, append, get = self._name_of, found.append, by_key.get
        for begin in range(0, max_pages * size, size):
            page = get(prefix + column[begin : begin + size])
            if page is None:
                break
            append(page)
            prefix = name_of[page]
        self._retain(found)
        return found, prefix

    def _retain(self, pages: list[int]) -> None:
        """Adds a reference to each page."""
        references, idle = self._references, self._idle
        for page in pages:
            references[page] += 1
            if references[page] == 1:
                del idle[page]

    def publish(self, prefix: bytes, pages: list[int], column: bytes) -> bytes:
        """Adds held pages without names, full of the ids in `column` that follow `prefix`, to the prefix cache. Where
        another page is cached under the same key, that one stays, and the next pages follow it. Returns the name of
        the prolonged prefix."""
        size, by_key, key_of, name_of = self._page_bytes, self._by_key, self._key_of, self._name_of
        begin = 0
        names = self._names
        for page in pages:
            key = prefix + column[begin : begin + size]
            begin += size
            prefix = name_of[by_key.setdefault(key, page)]
            if not prefix:  # this page is new under its key, and has no name yet
                names += 1
                name_of[page] = prefix = names.to_bytes(NAME_BYTES)
                key_of[page] = key
        self._names = names
        return prefix

    def adopt(self, prefixes: Iterable[tuple[bytes, bytes, list[int]]]) -> int:
        """Publishes free pages with known content, which become idle. Each prefix is a salt, the ids of full pages
        (int32), and these pages. Returns how many pages were published."""
        free, size, adopted = set(self.free), self._page_bytes, 0
        for salt, column, pages in prefixes:
            prefix, own = ROOT_PREFIX + salt, []
            for index, page in enumerate(pages):
                ids = column[index * size : (index + 1) * size]
                if prefix + ids not in self._by_key:
                    if page not in free:
                        break  # by an earlier prefix it has other content
                    free.remove(page)
                    own.append(page)
                prefix = self.publish(prefix, [page], ids)
            self.release(own)
            adopted += len(own)
        self.free = [page for page in self.free if page in free]
        return adopted

    def release(self, pages: list[int]) -> None:
        """Removes a reference from each page. The end of a prefix becomes idle before its beginning, since it cannot be
        found without that."""
        references, name_of, idle, free = self._references, self._name_of, self._idle, self.free
        for page in reversed(pages):
            if (left := references[page] - 1) > 0:
                references[page] = left
            elif name_of[page]:
                references[page] = 0
                idle[page] = None
            else:
                free.append(page)

    def forget(self, pages: Iterable[int]) -> None:
        """Removes idle pages from the prefix cache. Those that follow one in its prefix cannot be found any more."""
        for page in pages:
            if not self._name_of[page]:
                continue
            del self._idle[page]
            del self._by_key[self._key_of[page]]
            self._key_of[page], self._name_of[page], self._references[page] = b"", NO_NAME, 1
            self.free.append(page)

    def check(self, tables: Iterable[list[int]] = ()) -> None:
        """Raises AssertionError unless the page tables `tables` hold all references, and every page is in one state."""
        references = [0] * len(self._references)
        free, idle = set(self.free), set(self._idle)
        for table in tables:
            assert len(set(table)) == len(table), f"a page is twice in the table {table}"
            for page in table:
                references[page] += 1
        counted = [0 if page in free else count for page, count in enumerate(self._references)]
        assert references == counted, "the reference counts do not match the page tables"
        assert all(self._references[page] == 1 for page in free), "a free page has not one reference"
        assert len(free) == len(self.free), "a page is free twice"
        assert not free & idle, "a page is free and idle"
        assert free | idle == {page for page, count in enumerate(references) if count == 0}, "a page is lost"
        keys = {page: key for page, key in enumerate(self._key_of) if key}
        assert {page: key for key, page in self._by_key.items()} == keys, "keys and pages disagree"
        names = [name for name in self._name_of if name]
        assert len(set(names)) == len(names), "a name is given twice"
        assert {page for page, name in enumerate(self._name_of) if name} == set(keys), "a page has a name and no key"
        assert idle <= set(keys), "an idle page is not cached"
        assert not free & set(keys), "a free page is cached"
