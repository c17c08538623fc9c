"""The paged KV cache: which request holds which pages, and the prefix cache.

A page is a fixed number of token positions (vLLM: block). `KVCacheManager` gives pages to requests, `PagePool`
(page_pool.py) counts references, finds prefixes and evicts.

A request has a page table for each KV group of the model (messages/kv_groups.py), nearly always one. All groups take
their pages from one pool. A group with a sliding window gives the pages behind it back while the request runs.

The prefix cache. A full page of the first group that may be found has a block hash, as in vLLM. Here it is a number
that is never reused, so that two prefixes never have the same one. The key of a page is its parent's block hash, its
extra key (what its content depends on besides ids: an adapter, an image), and its own token ids. So a key stands for
all ids up to the end of its page, compared exactly, and a prefix is found page by page. In the other groups the key of
a page is the number of its group and the block hash of the first group's page of the same positions. A prefix is found
if all groups hold what they need after it: a group with a sliding window needs the last pages only. Recurrent layers
need a snapshot of their state at its end (state_snapshots.py).
"""

from collections.abc import Iterable
from itertools import compress
from operator import eq

from tgi.microkernel.messages.codec import unpack_int32
from tgi.microkernel.messages.kv_groups import paged_groups, recurrent_group
from tgi.microkernel.messages.protocol import DeploymentLimits, HeldPages, PagesTransferred
from tgi.scheduler.page_index import PageIndex
from tgi.scheduler.page_pool import ID_BYTES, NO_PAGE, ROOT_HASH, PagePool, page_runs
from tgi.scheduler.request import NO_SNAPSHOTS, Request, extras_out_of_range
from tgi.scheduler.state_snapshots import StateSnapshots

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
        self._groups = paged_groups(limits.groups)
        self._tables = len(self._groups)  # page tables of a request
        self.slides = any(group.slides for group in self._groups)
        recurrent = recurrent_group(limits.groups)
        self.snapshots = None if recurrent is None else StateSnapshots(recurrent, limits.page_size)
        # Whether a request needs more of its prefix than the pages of the first group.
        self._needs_more = self._tables > 1 or self.slides or recurrent is not None
        self._free_target = int(limits.pages * FREE_PAGES_SHARE)
        self._filled: list[Request] = []  # may have full pages that are not published yet
        self._ended: list[Request] = []  # have left their slots; their pages are released by `commit`
        # Appended pages that no step has sent to the worker yet: the request, its `valid_from_step` then, the number of
        # the group, the page.
        self.appended: list[Request] = []
        self._appended_valid_from: list[int] = []
        self._appended_groups: list[int] = []
        self._appended_pages: list[int] = []
        self.pool = PagePool(limits.pages, limits.page_size)
        self.index: PageIndex | None = None  # None: the worker keeps no pages in files
        self.committed = True  # whether `commit` was called since the last plan

    def ensure_available(self, pages: int) -> bool:
        """Whether this many pages are available. Commits first if that can make them available."""
        if pages <= self.pool.available:
            return True
        self.commit()
        return pages <= self.pool.available

    def read_prefix(self, request: Request, column: bytes, max_cached: int) -> bool:
        """Has the pages read that follow a request's cached ones in files, once. False: it is to wait for them."""
        index, pool = self.index, self.pool
        if index is None or request.read_from is index:
            return index is None or not index.is_read(request)
        found, _ = self._find_prefix(request, column, max_cached)
        if index.read_prefix(request, found, max_cached, pool):
            request.read_from = index
            return False
        pool.release(found)
        return True

    def record_transferred(self, answer: PagesTransferred) -> None:
        """The worker has written or read pages."""
        if self.index is not None:
            self.index.finish(answer, self.pool)

    def allocate(self, request: Request, column: bytes, max_cached: int, spare: int) -> bool:
        """Gives pages for all its tokens, which are `column`, to a request that has none: at most `max_cached` found in
        the prefix cache, the rest new. A group with a sliding window gets the pages of the first steps, and by `slide`
        the others in exchange for these. False if then fewer than `spare` pages would be available."""
        pool, size = self.pool, self._page_size
        lead, block_hash = self._find_prefix(request, column, max_cached)
        tables, found = [lead], len(lead)
        if self._needs_more:
            tables, block_hash = self._common_prefix(lead)
        cached = len(tables[0])
        request.planned = cached * size
        pages = (len(request.token_ids) - 1) // size + 1
        wanted = self._wanted_pages(pages, request.planned) if self.slides else [pages] * self._tables
        missing = sum(wanted) - cached * self._tables
        if missing + spare > len(pool.free) and not self.ensure_available(missing + spare):
            available = pool.available
            self._release(tables)
            # The pages just released count as available but are part of the request's prefix.
            request.missing_pages = missing + spare + pool.available - available
            return False
        for table, count in zip(tables, wanted, strict=True):
            table += pool.allocate(count - cached)
        request.tables = tables
        request.capacity = min(wanted) * size
        request.published_pages = cached
        request.block_hash = block_hash
        if self.snapshots is not None:
            positions = self.snapshots.positions(request.planned, found * size, len(request.token_ids))
            request.snapshot_at = positions if request.shares_pages else NO_SNAPSHOTS
        return True

    def restore_state(self, snapshots: StateSnapshots, request: Request) -> None:
        """A request with recurrent state has got its slot: the state goes on from the end of its cached prefix."""
        if request.planned:
            snapshots.restore(request.block_hash, request.slot)

    def snapshot_prompt(self, request: Request, budget: int) -> int:
        """Takes the snapshot that is due where the next chunk of a prompt begins. Returns how many tokens the chunk may
        have, at most `budget`: it ends at the next snapshot."""
        due = request.snapshot_at
        if due[0] == request.planned:
            del due[0]
            self._snapshot(request)
        return min(budget, due[0] - request.planned) if due else budget

    def _snapshot_decoding(self, snapshots: StateSnapshots, grown: list[Request]) -> None:
        """Takes the snapshots that are due of requests that have got pages. The row of a decoding request that has got
        a page begins at the border before it, unless that row was planned one by one."""
        for request in grown:
            start = request.capacity - self._page_size
            if request.partition is not None and request.planned == start and snapshots.due(start):
                self._snapshot(request)

    def _snapshot(self, request: Request) -> None:
        """Takes a snapshot of a request whose steps so far end at a page border, if all ids of that page are known."""
        if request.shares_pages:
            self._publish(request)
            if self.snapshots is not None and request.published_pages * self._page_size == request.planned:
                self.snapshots.take(request.block_hash, request.slot)

    def _wanted_pages(self, pages: int, start: int) -> list[int]:
        """The length of each page table of a request with this many pages of tokens whose positions from `start` on are
        to be computed."""
        step, size = self._limits.max_batch_prefill_tokens, self._page_size
        return [
            min(pages, group.first_kept(start, size) + group.most_pages(pages * size, step, size))
            for group in self._groups
        ]

    def begin_step(self) -> None:
        """Notes that a step was planned, after which `commit` is due."""
        self.committed = False

    def release_later(self, requests: list[Request]) -> None:
        """Releases the pages of these requests at the next commit."""
        self._ended += requests

    def append_pages(self, requests: list[Request], pages_each: int = 1) -> bool:
        """Appends pages to each table of each of these requests. False: too few are available, and no request has got
        one."""
        if self.slides:
            for request in requests:
                self.give_back(request, request.planned)
        groups = self._tables
        each = groups * pages_each
        if not self.ensure_available(len(requests) * each):
            return False
        pages, size = self.pool.allocate(len(requests) * each), self._page_size
        owners = requests if each == 1 else [request for request in requests for _ in range(each)]
        for at in range(0, len(pages), groups):
            owners[at].add_page(pages[at : at + groups], size)
        self._note_appended(owners, [*range(groups)] * (len(pages) // groups), pages)
        self.mark_filled(requests)
        return True

    def _note_appended(self, owners: list[Request], groups: list[int], pages: list[int]) -> None:
        self.appended += owners
        self._appended_valid_from += [request.valid_from_step for request in owners]
        self._appended_groups += groups
        self._appended_pages += pages

    def give_back(self, request: Request, start: int) -> None:
        """Releases the pages that no row from position `start` on needs. Steps in flight may still read them: those run
        before any step that gets them."""
        if request.shares_pages:
            self._publish(request)
        for group, table in zip(self._groups, request.tables, strict=True):
            first = group.first_kept(start, self._page_size)
            if request.shares_pages and first > request.published_pages:
                first = request.published_pages  # the ids of the page after it are not known yet
            given = first
            while given > 0 and table[given - 1] != NO_PAGE:
                given -= 1
            if given < first:
                self.pool.release(table[given:first])
                table[given:first] = [NO_PAGE] * (first - given)

    def pages_to_slide(self, request: Request) -> list[int]:
        """Of a prompt that is partly computed, and has pages for a part only: how many pages each of its tables lacks
        for the next steps, when it has given back what it no longer needs."""
        self.give_back(request, request.planned)
        wanted = self._wanted_pages((len(request.token_ids) - 1) // self._page_size + 1, request.planned)
        return [pages - len(table) for pages, table in zip(wanted, request.tables, strict=True)]

    def slide(self, request: Request, missing: list[int]) -> None:
        """Appends this many pages to each table of a request, which must be available."""
        for number, (table, count) in enumerate(zip(request.tables, missing, strict=True)):
            pages = self.pool.allocate(count)
            table += pages
            self._note_appended([request] * count, [number] * count, pages)
        request.capacity = min(map(len, request.tables)) * self._page_size

    def take_appended(self) -> tuple[list[int], list[int]]:
        """Numbers of page tables (see Step) and appended pages, for the step that sends them to the worker; requests
        that have left are omitted."""
        requests, groups, pages = self.appended, self._appended_groups, self._appended_pages
        if (valid_from := [request.valid_from_step for request in requests]) != self._appended_valid_from:
            valid = [*map(eq, valid_from, self._appended_valid_from)]
            requests, groups, pages = (
                [*compress(requests, valid)],
                [*compress(groups, valid)],
                [*compress(pages, valid)],
            )
        self._clear_appended()
        if self.snapshots is not None:
            self._snapshot_decoding(self.snapshots, requests)
        tables = self._tables
        return [request.slot * tables + group for request, group in zip(requests, groups, strict=True)], pages

    def _clear_appended(self) -> None:
        self.appended, self._appended_valid_from, self._appended_groups, self._appended_pages = [], [], [], []

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
            if self.index is not None:
                self.index.record_use(request.page_keys)
        self._release(request.tables)

    def _release(self, tables: list[list[int]]) -> None:
        for table in reversed(tables):
            self.pool.release([page for page in table if page != NO_PAGE] if self.slides else table)

    def _publish(self, request: Request) -> None:
        """Publishes the pages that the steps sent so far fill with known tokens."""
        first, last, size = request.published_pages, request.planned, self._page_size
        if (known := len(request.token_ids)) < last:
            last = known
        if (last := last // size) > first:
            lead, *followers = request.tables
            for begin, end, extra_key in page_runs(request.extras, first, last, size):
                column = request.token_ids[begin * size : end * size].tobytes()
                parent = request.block_hash + extra_key
                request.block_hash = self.pool.publish(parent, lead[begin:end], column)
                if followers:
                    hashes = self.pool.find_hashes(parent, column, end - begin)
                    for number, table in enumerate(followers, 1):
                        self.pool.publish_followers(number, table[begin:end], hashes)
            if self.index is not None:
                self.index.publish(request, request.published_pages, last, self.pool)
            request.published_pages = last

    def _find_prefix(self, request: Request, column: bytes, max_cached: int) -> tuple[list[int], bytes]:
        """The pages of the longest cached prefix in the first group, at most `max_cached`, each with one more
        reference, and the block hash of the last one."""
        pool, size = self.pool, self._page_size
        if not request.extras:
            return pool.find_prefix(ROOT_HASH, column, max_cached)
        lead: list[int] = []
        block_hash = ROOT_HASH
        for begin, end, extra_key in page_runs(request.extras, 0, max_cached, size):
            found, last = pool.find_prefix(block_hash + extra_key, column[begin * size * ID_BYTES :], end - begin)
            if found:
                lead, block_hash = lead + found, last
            if len(lead) < end:
                break
        return lead, block_hash

    def _common_prefix(self, lead: list[int]) -> tuple[list[list[int]], bytes]:
        """Of the cached prefix with these pages in the first group: the part after which every group has what it needs,
        as the pages of each group and the block hash of its last page."""
        pool, size, hashes = self.pool, self._page_size, self.pool.block_hashes(lead)
        pages = page = len(lead)
        # From the end: where a group lacks a page that it needs, the prefix ends before that page.
        needed = self._followers_need(pages)
        while page > min(needed, default=page):
            page -= 1
            for number, first in enumerate(needed, 1):
                if page >= first and not self._has_follower(number, hashes[page]):
                    pages, needed = page, self._followers_need(page)
                    break
        tables = []
        for number, group in enumerate(self._groups):
            first = group.first_kept(pages * size, size)
            kept = lead[first:pages] if number == 0 else pool.take_followers(number, hashes[first:pages])
            tables.append([NO_PAGE] * first + kept)
        pool.release(lead[pages:])
        pool.release(lead[: self._groups[0].first_kept(pages * size, size)])
        return tables, hashes[pages - 1] if pages else ROOT_HASH

    def _followers_need(self, pages: int) -> list[int]:
        """For each group but the first one, the first page that it needs after a prefix of this many pages. Recurrent
        layers, which are the last group, need a snapshot at the end of the last one."""
        needed = [group.first_kept(pages * self._page_size, self._page_size) for group in self._groups[1:]]
        return needed if self.snapshots is None else [*needed, max(0, pages - 1)]

    def _has_follower(self, group: int, block_hash: bytes) -> bool:
        if group == self._tables:
            return self.snapshots is not None and block_hash in self.snapshots
        return self.pool.has_follower(group, block_hash)

    def worker_state_lost(self) -> None:
        """The worker's tensors are gone: all pages are empty, and no prefix is cached."""
        self.commit()
        self._clear_appended()
        self.pool = PagePool(self._limits.pages, self._page_size)
        if self.index is not None:
            self.index.hold_in(self.pool)
            self.index.begin_epoch(self.pool)
        if self.snapshots is not None:
            self.snapshots.clear()

    def forget(self, pages: Iterable[int], snapshots: Iterable[int]) -> None:
        """The steps that were to fill these pages, and to copy states to these snapshots, have failed: no prefix is
        found there. To be called when no request holds a page."""
        self.commit()
        self._clear_appended()
        self.pool.forget(pages)
        if self.index is not None:
            self.index.begin_epoch(self.pool)
        if self.snapshots is not None:
            self.snapshots.forget(snapshots)

    def adopt(self, held: Iterable[HeldPages]) -> int:
        """Publishes pages that the worker has computed for an earlier scheduler. To be called before any page is
        allocated. Returns the number of pages that can be found now."""
        size, tables = self._page_size, len(self._limits.groups)
        adopted = 0
        free = set(self.pool.free)
        for one in held:
            if len(one.page_ids) % ID_BYTES:
                continue
            pages = unpack_int32(one.page_ids)
            count = len(pages) // tables
            whole = len(one.token_ids) == count * size * ID_BYTES and len(pages) == count * tables
            if not whole or extras_out_of_range(one.extras, count * size):
                continue
            columns = [pages[number * count : (number + 1) * count] for number in range(tables)]
            parent = ROOT_HASH
            own: list[int] = []
            for begin, end, extra_key in page_runs(one.extras, 0, count, size):
                column = one.token_ids[begin * size * ID_BYTES : end * size * ID_BYTES]
                taken, hashes = self.pool.adopt(parent + extra_key, columns[0][begin:end], column, free)
                own += taken
                for number in range(1, self._tables):
                    own += self.pool.adopt_followers(number, columns[number][begin : begin + len(hashes)], hashes, free)
                if self.snapshots is not None:
                    self.snapshots.adopt(hashes, columns[-1][begin : begin + len(hashes)])
                if len(hashes) < end - begin:
                    break
                parent = hashes[-1]
            self.pool.release(own)
            adopted += len(own)
        self.pool.free = [page for page in self.pool.free if page in free]
        return adopted
