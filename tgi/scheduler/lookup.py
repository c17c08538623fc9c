"""Guesses what a request says next: what followed when its ids, those of the prompt included, last read the same."""

from array import array

from tgi.kernel.pack import INT32

# Runs of equal ids that are told apart: from a pair up to this many.
LONGEST = 16
# So many earlier places of a pair are compared, the latest first.
PLACES = 8
# Weight of the newest guess in the share of right ones.
NEWEST = 0.1
# How often a guess is right before anything is known: after runs of 2 or 3, 4 to 7, and 8 equal ids or more.
CHANCES = (0.3, 0.5, 0.8)
# Of the smallest table.
LEAST_BITS = 12
# The odd number of multiplicative hashing, 2^32 over the golden ratio.
GOLDEN = 2654435761


class Lookup:
    """The places of each pair of ids form a chain, the latest first, as in an LZ77 compressor: 8 bytes per id, and
    O(1) for each new one.

    Whether the guess was right is noted for every id, drafted or not. So `chance` costs no computing, and tells of a
    text that begins to repeat itself, too.
    """

    __slots__ = ("_before", "_chances", "_heads", "_ids", "_mask", "_run", "_source")

    def __init__(self, ids: "array[int]", limit: int) -> None:
        """`ids` grows elsewhere, to at most `limit`."""
        self._ids = ids
        self._mask = (1 << max(limit.bit_length(), LEAST_BITS)) - 1
        self._heads: array[int] = array(INT32)  # by the hash of a pair: the latest place where one ended; 0 is none
        self._before = array(INT32, [0])  # for each id that was read: the place before it of the same hash
        self._source = 0  # where the id stands that is guessed to come next; 0: there is no guess
        self._run = 0  # so many ids before it are equal to the last ones
        self._chances = list(CHANCES)

    @property
    def unread(self) -> int:
        """Ids that `read` or `catch_up` has not seen."""
        return len(self._ids) - len(self._before)

    @property
    def chance(self) -> float:
        """How likely the next id is the guess; 0 if there is none."""
        return self._chances[min(self._run, 8).bit_length() - 2] if self._source else 0.0

    def _begin(self) -> "array[int]":
        """The table takes memory from the first id on that is read: many requests may wait."""
        self._heads = array(INT32, bytes(4 * (self._mask + 1)))
        return self._heads

    def read(self, most: int) -> int:
        """Takes so many ids into the chains, without guessing what comes next. Returns how many that were."""
        ids, heads, before, mask = self._ids, self._heads or self._begin(), self._before, self._mask
        begin = len(before)
        end = min(len(ids), begin + most)
        place = begin
        for first, second in zip(ids[begin - 1 : end - 1], ids[begin:end], strict=True):
            key = (first * GOLDEN + second) & mask
            before.append(heads[key])
            heads[key] = place
            place += 1
        self._source = self._run = 0
        return end - begin

    def catch_up(self) -> None:
        """Takes the new ids, each against what was guessed."""
        ids, heads, before, mask = self._ids, self._heads or self._begin(), self._before, self._mask
        chances = self._chances
        for place in range(len(before), len(ids)):
            token = ids[place]
            key = (ids[place - 1] * GOLDEN + token) & mask
            other = heads[key]
            before.append(other)
            heads[key] = place
            if self._source:
                right = ids[self._source] == token
                kind = min(self._run, 8).bit_length() - 2
                chances[kind] += NEWEST * (right - chances[kind])
                if right:
                    self._source += 1
                    self._run += 1
                    continue
                self._source = self._run = 0
            if other:
                self._find(place, other)

    def guess(self, most: int) -> "array[int]":
        """The ids that may come next; what reaches beyond the end goes on as the stretch that it repeats."""
        found = self._ids[self._source : self._source + most]
        return (found * (most // len(found) + 1))[:most] if len(found) < most else found

    def _find(self, place: int, other: int) -> None:
        """Looks for the longest run of equal ids that ends like the one at `place`, the latest of these; `other` is
        the first place to look at."""
        ids, before = self._ids, self._before
        for _ in range(PLACES):
            if ids[other - 1] == ids[place - 1] and ids[other] == ids[place]:
                run, most = 2, min(LONGEST, other + 1)
                while run < most and ids[other - run] == ids[place - run]:
                    run += 1
                if run > self._run:
                    self._source, self._run = other + 1, run
                    if run == LONGEST:
                        return
            other = before[other]
            if not other:
                return
