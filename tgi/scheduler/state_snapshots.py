"""Snapshots of recurrent state, from which requests with a cached prefix go on.

A model with recurrent layers overwrites a request's state in each step, so the state at the end of a prefix is there
only if it was copied when it was computed. `StateSnapshots` decides when that is done, finds snapshots and evicts them.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from tgi.microkernel.messages.codec import INT32, pack_column
from tgi.microkernel.messages.kv_groups import KVGroup

# A chunk ends at each snapshot, which is a step of its own where the rest of the prompt would fit the same one. So
# snapshots that would save less than this share of an interval are left out.
LEAST_SHARE = 1 / 8


class StateSnapshots:
    """A snapshot is found by the block hash of the page at whose end it was taken, so under the same key as that page.

    No request holds one: the worker makes all copies in the order in which they are planned, and those of a step before
    its rows. So a snapshot may be overwritten as soon as its copy is planned. The least recently used goes first.
    """

    def __init__(self, group: KVGroup, page_size: int) -> None:
        self._count = group.snapshots
        self.drafts = group.drafts  # the most of a step
        self._page_size = page_size
        self._interval = max(1, group.interval // page_size) * page_size
        self.clear()

    def clear(self) -> None:
        """Drops all snapshots, and the copies that no step has."""
        self._free = [*range(self._count - 1, -1, -1)]
        self._number_of = OrderedDict[bytes, int]()  # by the block hash of the page; the least recently used first
        self._copies: list[int] = []  # each a source and a target

    def forget(self, numbers: Iterable[int]) -> None:
        """Drops these snapshots, which hold nothing of use, and those of which no step has the copy."""
        void = {*numbers, *(-1 - target for target in self._copies[1::2] if target < 0)}
        self._copies = []
        self._free += void.intersection(self._number_of.values())
        self._number_of = OrderedDict((key, number) for key, number in self._number_of.items() if number not in void)

    def __len__(self) -> int:
        return len(self._number_of)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._number_of

    def positions(self, start: int, shared: int, tokens: int) -> list[int]:
        """Where snapshots of a prompt of this many tokens are taken that is computed from `start` on: after each
        interval, at its last page border, and at `shared`, to which other requests have the same pages."""
        grid = range(start - start % self._interval + self._interval, tokens, self._interval)
        last = (tokens - 1) // self._page_size * self._page_size
        chosen: list[int] = []
        for position in sorted({*grid, shared, last}):
            if position - start >= self._interval * LEAST_SHARE:
                chosen.append(position)
                start = position
        return chosen

    def tokens_before_next(self, position: int) -> int:
        """The tokens of a request that generates tokens from this position to that where its next snapshot is taken."""
        return self._interval - position % self._interval

    def due(self, position: int) -> bool:
        """Whether a snapshot is taken of a request that generates tokens, at this page border."""
        return position % self._interval == 0

    def take(self, block_hash: bytes, slot: int) -> None:
        """Has the next step copy the state of this slot, at the end of the page of this hash, before its rows."""
        if block_hash in self._number_of:
            self._number_of.move_to_end(block_hash)
        elif self._count:
            number = self._free.pop() if self._free else self._number_of.popitem(last=False)[1]
            self._number_of[block_hash] = number
            self._copies += slot, -1 - number

    def restore(self, block_hash: bytes, slot: int) -> None:
        """Has the next step copy the snapshot to this slot, before its rows."""
        self._number_of.move_to_end(block_hash)
        self._copies += -1 - self._number_of[block_hash], slot

    def take_copies(self) -> bytes:
        """The copies of the step that is planned (Step.state_copies)."""
        copies, self._copies = self._copies, []
        return pack_column(INT32, copies)

    def adopt(self, hashes: Sequence[bytes], numbers: Sequence[int]) -> None:
        """The worker holds these snapshots, at the ends of the pages of these block hashes; -1: none."""
        free = set(self._free)
        for block_hash, number in zip(hashes, numbers, strict=True):
            if number in free and block_hash not in self._number_of:
                free.remove(number)
                self._number_of[block_hash] = number
        self._free = [number for number in self._free if number in free]
