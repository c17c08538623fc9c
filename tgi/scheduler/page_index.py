"""Which KV pages the worker keeps in files (--prefix-cache-dir), and which it is writing or reading.

A page in a file has a key: a digest of the key of the page before it, its extra key and its ids, so that it means the
same in every life of a scheduler. A page that a request publishes in the prefix cache is written when the steps that
fill it are answered. A request whose prefix goes on in files waits until its pages are read; it finds them in the
prefix cache then, like any other. Pages that are being transferred are held, so that no step gets them.

The worker owns files and their bytes; this says what they hold. It forgets all when the worker is lost.
"""

from collections import OrderedDict
from hashlib import blake2b
from typing import NamedTuple

from tgi.microkernel.messages.codec import INT32, pack_column
from tgi.microkernel.messages.kv_groups import GroupKind, KVGroup
from tgi.microkernel.messages.protocol import (
    MAX_STORED_PAGES,
    PAGE_KEY_BYTES,
    PagesTransferred,
    StoredPages,
    TransferPages,
)
from tgi.scheduler.page_pool import ROOT_HASH, PagePool, page_runs
from tgi.scheduler.request import Request

# Share of the pages that are being written at most: requests cannot get these meanwhile.
WRITTEN_SHARE = 1 / 32


class Transfer(NamedTuple):
    """Pages that the worker is writing or reading."""

    pages: list[int]
    keys: list[bytes]
    pool: PagePool  # in which it holds the pages
    request: Request | None = None  # that waits for them; None: they are written
    prefix: list[int] = []  # the cached pages before those that are read, held as well
    used: list[list[bytes]] = []  # the prefixes to which pages that are written belong


class PublishedPage(NamedTuple):
    """A page in the prefix cache that is to be written."""

    step: int  # the latest step when it was published: one of those up to it fills the page
    page: int
    block_hash: bytes  # of the page then: it holds the same for as long as it has this hash
    prefix: list[bytes]  # the keys of its request's pages


class PageIndex:
    """The pages of one worker. Methods get the pool of the time, since that is replaced when all pages are lost."""

    def __init__(self, reported: StoredPages, pages: int, page_size: int) -> None:
        """`reported` by a worker that has this many pages in memory. Raises ValueError if no worker reports that."""
        columns, size = reported.keys, PAGE_KEY_BYTES
        if len(columns) % size or not len(columns) // size <= reported.most <= MAX_STORED_PAGES:
            raise ValueError(f"{len(columns)} bytes of keys for at most {reported.most} pages")
        keys = (columns[begin : begin + size] for begin in range(0, len(columns), size))
        self.stored: OrderedDict[bytes, None] = OrderedDict.fromkeys(keys)  # the least recently used first
        self.most = reported.most
        self.step = 0  # the latest that is planned
        self._answered = 0  # the latest step
        self._page_size = page_size
        self._most_written = max(1, int(pages * WRITTEN_SHARE))
        self._published: OrderedDict[bytes, PublishedPage] = OrderedDict()  # by key, in the order of their steps
        self._most_published = pages
        self._transfers: dict[int, Transfer] = {}  # by number
        self._writing: set[bytes] = set()
        self._transfer_number = 0
        self._messages: list[TransferPages] = []

    # --- writing ------------------------------------------------------------------------------------------------------

    def publish(self, request: Request, first: int, last: int, pool: PagePool) -> None:
        """Notes pages of a request that were published in the prefix cache, to be written."""
        keys = self._keys(request, last)[first:last]
        pages = request.tables[0][first:last]
        for key, page, block_hash in zip(keys, pages, pool.block_hashes(pages), strict=True):
            # Without a block hash it is a copy of the page that is cached.
            if block_hash and key not in self.stored and key not in self._writing:
                self._published[key] = PublishedPage(self.step, page, block_hash, request.page_keys)
        while len(self._published) > self._most_published:
            self._published.popitem(last=False)

    def record_use(self, prefix: list[bytes]) -> None:
        """Pages were used, given as the keys of all from the first on. The end of a prefix is the first to be removed,
        as in PagePool."""
        for key in reversed(prefix):
            if key in self.stored:
                self.stored.move_to_end(key)

    def record_answered(self, step: int) -> None:
        """The steps up to this one have computed what they were to compute."""
        self._answered = step

    def begin_epoch(self, pool: PagePool) -> None:
        """Steps have failed, and their pages are not cached any more, or none is; the others can be written."""
        self.step = self._answered = 0
        kept = {
            key: one._replace(step=0)
            for key, one in self._published.items()
            if pool.block_hashes([one.page]) == [one.block_hash]
        }
        self._published = OrderedDict(kept)

    def _write_published(self, pool: PagePool) -> None:
        """Sends the pages that can be written now."""
        room = self._most_written - len(self._writing)
        found: list[tuple[bytes, PublishedPage]] = []
        while self._published and len(found) < room:
            key, one = next(iter(self._published.items()))
            if one.step > self._answered:
                break
            del self._published[key]
            if pool.block_hashes([one.page]) == [one.block_hash]:
                found.append((key, one))
        if not found:
            return
        found.reverse()  # the end of a prefix first: its files are older then, for the worker's next life
        keys, pages = [key for key, _ in found], [one.page for _, one in found]
        removed: list[bytes] = []
        while self.stored and len(self.stored) + len(self._writing) + len(found) > self.most:
            removed.append(self.stored.popitem(last=False)[0])
        pool.hold(pages)
        self._writing.update(keys)
        used = {id(one.prefix): one.prefix for _, one in found}
        self._send(Transfer(pages, keys, pool, used=[*used.values()]), removed)

    # --- reading ------------------------------------------------------------------------------------------------------

    def read_prefix(self, request: Request, prefix: list[int], most: int, pool: PagePool) -> bool:
        """Starts to read the pages that follow the cached ones of a prefix, which are held; at most `most` in all.
        False: there are none, or no memory for the request, and the held ones are to be released."""
        keys = self._keys(request, most)
        first = last = len(prefix)
        while last < most and keys[last] in self.stored:
            last += 1
        if last == first or (len(request.token_ids) - 1) // self._page_size + 1 - first > pool.available:
            return False
        self._send(Transfer(pool.allocate(last - first), keys[first:last], pool, request, prefix))
        return True

    def is_read(self, request: Request) -> bool:
        """Whether a request waits for pages."""
        return any(transfer.request is request for transfer in self._transfers.values())

    # --- transfers ----------------------------------------------------------------------------------------------------

    def finish(self, answer: PagesTransferred, pool: PagePool) -> None:
        """Pages were transferred: those that were read are published in the prefix cache."""
        if (transfer := self._transfers.pop(answer.number, None)) is None:
            return
        done = min(max(0, answer.done), len(transfer.keys))
        if (request := transfer.request) is None:
            self._writing.difference_update(transfer.keys)
            self.stored.update(dict.fromkeys(transfer.keys[:done]))
            for prefix in transfer.used:
                self.record_use(prefix)
        else:
            if done < len(transfer.keys):
                self.stored.pop(transfer.keys[done], None)
            if transfer.pool is pool:
                self._publish_read(request, transfer, done, pool)
            self.record_use(request.page_keys)
        self._release(transfer, pool)

    def abandon(self, pool: PagePool) -> None:
        """The worker is lost, and this index with it. Its memory may be kept: pages that it was writing are cached, and
        those that it was reading are not."""
        for transfer in self._transfers.values():
            self._release(transfer, pool)
        self._transfers.clear()

    def _release(self, transfer: Transfer, pool: PagePool) -> None:
        pool.release(transfer.pages)
        if transfer.pool is pool:
            pool.release(transfer.prefix)

    def _publish_read(self, request: Request, transfer: Transfer, done: int, pool: PagePool) -> None:
        first, size = len(transfer.prefix), self._page_size
        (block_hash,) = pool.block_hashes(transfer.prefix[-1:]) or [ROOT_HASH]
        for begin, end, extra_key in page_runs(request.extras, first, first + done, size):
            column = request.token_ids[begin * size : end * size].tobytes()
            block_hash = pool.publish(block_hash + extra_key, transfer.pages[begin - first : end - first], column)

    def hold_in(self, pool: PagePool) -> None:
        """All cached pages are lost: the pages that are being transferred are held in the new pool, too."""
        for transfer in self._transfers.values():
            pool.take(transfer.pages)

    @property
    def busy(self) -> bool:
        """Whether it waits for answers."""
        return bool(self._transfers)

    @property
    def due(self) -> bool:
        """Whether `take_messages` would return any."""
        first = next(iter(self._published.values()), None)
        writes = first is not None and first.step <= self._answered and len(self._writing) < self._most_written
        return writes or bool(self._messages)

    def take_messages(self, pool: PagePool) -> list[TransferPages]:
        """The messages for the worker since the last call. They follow the steps that were planned until then."""
        self._write_published(pool)
        messages, self._messages = self._messages, []
        return messages

    def _send(self, transfer: Transfer, removed: list[bytes] | None = None) -> None:
        self._transfer_number += 1
        self._transfers[self._transfer_number] = transfer
        pages, keys = pack_column(INT32, transfer.pages), b"".join(transfer.keys)
        load = transfer.request is not None
        self._messages.append(TransferPages(self._transfer_number, load, pages, keys, b"".join(removed or ())))

    def _keys(self, request: Request, count: int) -> list[bytes]:
        """The keys of the first `count` pages of a request, at least, which are computed once."""
        keys, size = request.page_keys, self._page_size
        for begin, end, extra_key in page_runs(request.extras, len(keys), count, size):
            for page in range(begin, end):
                parent = keys[-1] if keys else bytes(PAGE_KEY_BYTES)
                ids = request.token_ids[page * size : (page + 1) * size].tobytes()
                extra, extra_key = extra_key, b""
                keys.append(blake2b(parent + extra + ids, digest_size=PAGE_KEY_BYTES).digest())
        return keys


def can_be_stored(groups: list[KVGroup]) -> bool:
    """Whether the pages of these groups can be kept in files: those of a single one that keeps all positions."""
    return len(groups) == 1 and groups[0].kind == GroupKind.FULL
