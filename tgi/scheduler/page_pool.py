"""The pages of the KV cache and the prefix cache, without requests: `PagePool` counts references, finds prefixes and
evicts. See kv_cache.py, which explains block hashes and keys.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import pairwise
from struct import Struct

from tgi.microkernel.messages.codec import INT32
from tgi.microkernel.messages.kv_groups import MAX_GROUPS
from tgi.microkernel.messages.protocol import PageExtra

# In a page table: the page of a group with a sliding window was given back, or was never needed.
NO_PAGE = -1
ID_BYTES = array(INT32).itemsize
EXTRA_HEAD = Struct("<IH")  # before each extra in a key: its position in the page, and its length
# Block hashes and keys are bytes. Tuples would be tracked by the garbage collector and make its passes slow. All hashes
# have the same length and begin with 0, and all keys of the first group end with the same number of ids: so keys of
# different prefixes differ. Keys of the other groups begin with the number of the group, which is neither 0 nor 255.
HASH_BYTES = 8
ROOT_HASH = b"\xff"
NO_HASH = b""  # of a page that cannot be found
GROUP_TAGS = [bytes([number]) for number in range(MAX_GROUPS + 1)]


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
        self._hash_of = [NO_HASH] * pages
        self._hashes = 0  # given so far

    @property
    def available(self) -> int:
        """Pages that can be allocated now."""
        return len(self.free) + len(self._idle)

    @property
    def used(self) -> int:
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

    def take(self, pages: list[int]) -> None:
        """Takes these pages, which are free, with one reference each."""
        taken = set(pages)
        self.free = [page for page in self.free if page not in taken]

    def evict_ahead(self, count: int) -> None:
        """Evicts idle pages until this many pages are free or none is idle."""
        if (missing := min(count - len(self.free), len(self._idle))) > 0:
            self.free += reversed(self._evict(missing))

    def _evict(self, count: int) -> list[int]:
        """Removes the least recently used idle pages from the prefix cache."""
        by_key, key_of, hash_of, references = self._by_key, self._key_of, self._hash_of, self._references
        evicted = [self._idle.popitem(last=False)[0] for _ in range(count)]
        for page in evicted:
            del by_key[key_of[page]]
            key_of[page], hash_of[page], references[page] = b"", NO_HASH, 1
        return evicted

    def find_prefix(self, parent: bytes, column: bytes, max_pages: int) -> tuple[list[int], bytes]:
        """Finds the longest cached continuation of a prefix by the ids in `column` (int32), of at most `max_pages`
        pages. `parent` is ROOT_HASH or a page's block hash, and the extra key of the next page. Returns the pages, each
        with one more reference, and the block hash of the last of them; of none, `parent`."""
        size, by_key = self._page_bytes, self._by_key
        if not max_pages or parent + column[:size] not in by_key:  # the usual case of a new prompt
            return [], parent
        found: list[int] = []
        hash_of, append, get = self._hash_of, found.append, by_key.get
        for begin in range(0, max_pages * size, size):
            page = get(parent + column[begin : begin + size])
            if page is None:
                break
            append(page)
            parent = hash_of[page]
        self.hold(found)
        return found, parent

    def hold(self, pages: list[int]) -> None:
        references, idle = self._references, self._idle
        for page in pages:
            references[page] += 1
            if references[page] == 1:
                del idle[page]

    def publish(self, parent: bytes, pages: list[int], column: bytes) -> bytes:
        """Adds held pages without block hashes, full of the ids in `column` that follow `parent`, to the prefix cache.
        Where another page is cached under the same key, that one stays, and the next pages follow it. Returns the block
        hash of the last page."""
        size, by_key, key_of, hash_of = self._page_bytes, self._by_key, self._key_of, self._hash_of
        begin = 0
        hashes = self._hashes
        for page in pages:
            key = parent + column[begin : begin + size]
            begin += size
            parent = hash_of[by_key.setdefault(key, page)]
            if not parent:  # this page is new under its key, and has no block hash yet
                hashes += 1
                hash_of[page] = parent = hashes.to_bytes(HASH_BYTES)
                key_of[page] = key
        self._hashes = hashes
        return parent

    def adopt(self, parent: bytes, pages: list[int], column: bytes, free: set[int]) -> tuple[list[int], list[bytes]]:
        """Publishes pages with known content, the ids of `column` (int32) after `parent`, that are in `free`, which is
        what `self.free` will be. Returns those that it has taken from there, which are held, and the block hashes of
        all that are cached now."""
        size = self._page_bytes
        taken, hashes = [], []
        for index, page in enumerate(pages):
            ids = column[index * size : (index + 1) * size]
            if parent + ids not in self._by_key:
                if page not in free:
                    break  # by an earlier prefix it has other content
                free.remove(page)
                taken.append(page)
            parent = self.publish(parent, [page], ids)
            hashes.append(parent)
        return taken, hashes

    # --- the groups after the first ---

    def block_hashes(self, pages: list[int]) -> list[bytes]:
        """The block hashes of cached pages of the first group."""
        return [self._hash_of[page] for page in pages]

    def find_hashes(self, parent: bytes, column: bytes, count: int) -> list[bytes]:
        """The block hashes of the cached pages with the ids in `column` that follow `parent`."""
        hashes, size = [], self._page_bytes
        for begin in range(0, count * size, size):
            parent = self._hash_of[self._by_key[parent + column[begin : begin + size]]]
            hashes.append(parent)
        return hashes

    def has_follower(self, group: int, block_hash: bytes) -> bool:
        """Whether this group has a cached page next to the first group's page of this block hash."""
        return GROUP_TAGS[group] + block_hash in self._by_key

    def take_followers(self, group: int, hashes: list[bytes]) -> list[int]:
        """The group's cached pages next to those of these hashes, each with one more reference."""
        pages = [self._by_key[GROUP_TAGS[group] + block_hash] for block_hash in hashes]
        self.hold(pages)
        return pages

    def publish_followers(self, group: int, pages: list[int], hashes: list[bytes]) -> None:
        """Adds held pages of this group to the prefix cache, next to those of these hashes, unless others are there."""
        for page, block_hash in zip(pages, hashes, strict=True):
            if page != NO_PAGE and self._by_key.setdefault(key := GROUP_TAGS[group] + block_hash, page) == page:
                self._key_of[page] = key

    def adopt_followers(self, group: int, pages: list[int], hashes: list[bytes], free: set[int]) -> list[int]:
        """As `adopt`, of the pages next to those of these hashes. Returns those taken from `free`."""
        taken = []
        for page, block_hash in zip(pages, hashes, strict=True):
            if page in free and not self.has_follower(group, block_hash):
                free.remove(page)
                taken.append(page)
                self.publish_followers(group, [page], [block_hash])
        return taken

    def release(self, pages: list[int]) -> None:
        """Removes a reference from each page. The end of a prefix becomes idle before its beginning, since it cannot be
        found without that."""
        references, key_of, idle, free = self._references, self._key_of, self._idle, self.free
        for page in reversed(pages):
            if (left := references[page] - 1) > 0:
                references[page] = left
            elif key_of[page]:
                references[page] = 0
                idle[page] = None
            else:
                free.append(page)

    def forget(self, pages: Iterable[int]) -> None:
        """Removes idle pages from the prefix cache. Those that follow one in its prefix cannot be found any more."""
        for page in pages:
            if not self._key_of[page]:
                continue
            del self._idle[page]
            del self._by_key[self._key_of[page]]
            self._key_of[page], self._hash_of[page], self._references[page] = b"", NO_HASH, 1
            self.free.append(page)


def page_runs(extras: list[PageExtra], first: int, last: int, page_size: int) -> Iterator[tuple[int, int, bytes]]:
    """Divides the pages `first` to `last` - 1 before each page with an extra key: first and last of each part, and the
    extra key of its first page."""
    if not extras:
        if last > first:
            yield first, last, b""
        return
    by_page: dict[int, bytes] = {}
    for position, digest in extras:
        page, offset = divmod(position, page_size)
        by_page[page] = by_page.get(page, b"") + EXTRA_HEAD.pack(offset, len(digest)) + digest
    borders = [first, *(page for page in by_page if first < page < last), last]
    for begin, end in pairwise(borders):
        if end > begin:
            yield begin, end, by_page.get(begin, b"")
