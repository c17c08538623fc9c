"""Which of several schedulers gets a request: one that has much of its prompt in the prefix cache, and no more than a
fair share of the load. Sans-IO.

The rule weighs cache against load, as cache-aware routers do (SGLang's router, vLLM's prefix-aware one), in one figure:
each prompt token that a replica has computed counts for it, and each request above the bound of its load counts
REQUEST_TOKENS against it. So a prefix that many requests have in common is computed at as many replicas as it takes to
share the load. The bound is little above the mean, as in consistent hashing with bounded loads (Mirrokni, Thorup,
Zadimoghaddam 2016). One without a free slot is chosen only if those that were looked at have none.

That alone would let a replica with popular prefixes stay above the bound by what they are worth. So it also has a
price, which rises as long as its load is above the mean, until some of its prefixes are computed elsewhere, and which
falls while the load is below. Prices are the multipliers of the constraint that all have the mean load over time; to
move them by its violation is dual ascent (Arrow, Hurwicz, Uzawa 1958; for requests that arrive one by one: Balseiro,
Lu, Mirrokni 2020).

Candidates are the next replicas on a hash ring, from the first block of the prompt on, and some of those that were sent
the longest known beginning of it. So all tokenizers send a new prefix to the same replica without asking each other,
the caches hold different prefixes, and few of them move when replicas come and go. However many replicas there are, a
few are looked at.

A tokenizer knows the prompts that it has sent itself. The reported load is that of all tokenizers.
"""

from array import array
from bisect import bisect, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from itertools import islice
from math import sqrt
from typing import NamedTuple

from tgi.microkernel.codec import ITEM_BYTES

# Prompts are compared in blocks of this many tokens, the size of a page.
BLOCK_TOKENS = 16
# The beginnings of a prompt that are compared, in blocks: each is at most a quarter longer than the one before, from 4
# on. So an index has few keys of a long prompt.
LENGTHS = (1, 2, 3, *(length << octave for octave in range(9) for length in (4, 5, 6, 7)))
# The prompt tokens that are computed again to avoid a request above the bound; and the most that counts for a replica,
# which limits the excess that a long prompt is worth.
REQUEST_TOKENS, MAX_MATCHED_TOKENS = 64, 512
# A price rises by this many tokens if the load is a request above the mean for as long as a request takes. What is left
# of a price after the division by PRICE_GRAIN does not count, so that chance does not decide where the ring would.
PRICE_STEP, PRICE_GRAIN, MAX_PRICE = 4, 32, 512
# A load differs from the mean by chance by about its root. The bound allows that where it is few requests, otherwise
# this share of the mean.
FEW_REQUESTS, BALANCE = 1, 0.02
# Among replicas that know nothing of a prompt, one with more than this multiple of the mean load comes after others; if
# it would have to wait for a slot, one with more than the mean load.
NEW_PROMPT_BALANCE = 1.25
# What it counts that a replica has computed with the adapter of the request.
ADAPTER_TOKENS = 32
# The replicas that are looked at: on the ring, until this many within the bound do not know the prompt; and of those
# that know it. Less than two blocks are not worth it.
MOST_ON_RING, ENOUGH_ON_RING, MOST_HOLDERS, MIN_MATCHED_TOKENS = 32, 2, 16, 2 * BLOCK_TOKENS
# Points of a replica on the ring.
POINTS = 32
# Bounds of an index: its keys, and the replicas of each.
MAX_KEYS, MAX_HOLDERS = 1 << 18, 256


class PromptKeys(NamedTuple):
    """A prompt as the index knows it."""

    keys: "array[int]"  # one per compared beginning: depends on all its tokens and on the adapter
    tokens: tuple[int, ...]  # what it counts to have computed each of them, or more of these
    beginning: bytes  # equal for prompts that begin alike, in all processes


TOKENS = tuple(BLOCK_TOKENS * length for length in LENGTHS)
TOKENS_WITH_ADAPTER = (ADAPTER_TOKENS, *(ADAPTER_TOKENS + tokens for tokens in TOKENS))


def prompt_keys(ids: bytes, adapter_digest: bytes) -> PromptKeys:
    """The keys of a prompt; `ids` are int32. A block that is not full has no key."""
    key = hash(adapter_digest)
    keys = array("q", [key] if adapter_digest else ())
    begin, most = 0, len(ids)
    for tokens in TOKENS:
        end = ITEM_BYTES * tokens
        if end > most:
            break
        key = hash((key, ids[begin:end]))
        keys.append(key)
        begin = end
    if adapter_digest:
        return PromptKeys(keys, TOKENS_WITH_ADAPTER, adapter_digest)
    return PromptKeys(keys, TOKENS, ids[: ITEM_BYTES * BLOCK_TOKENS])


class PrefixIndex:
    """Which replicas were sent which beginnings of prompts, as far as their caches should still have them.

    A cache that evicts what was used least recently keeps a prefix until as many tokens as it can have came after it.
    So each use of a prefix is stamped with the number of tokens that the replica was sent before.
    """

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        # By key, the least recently used first: the stamps by replica, the latest last. To find the first key of a dict
        # takes longer with each key that was removed before it.
        self._stamps: OrderedDict[int, dict[int, int]] = OrderedDict()
        self._sent: dict[int, int] = {}  # tokens by replica
        self._capacity: dict[int, int] = {}  # tokens by replica

    def __len__(self) -> int:
        return len(self._stamps)

    def set_capacity(self, number: int, tokens: int) -> None:
        """What the cache of a replica keeps of the prompts that are recorded here."""
        self._capacity[number] = tokens

    def matches(self, prompt: PromptKeys) -> Iterator[tuple[int, list[int]]]:
        """The known beginnings of the prompt, the longest first: what it counts to have computed one, and up to
        MOST_HOLDERS replicas that should have, the least recently used first."""
        found: list[dict[int, int]] = []
        for key in prompt.keys:
            if (stamps := self._stamps.get(key)) is None:
                break
            found.append(stamps)
        for level in range(len(found) - 1, -1, -1):
            holders = (number for number, stamp in found[level].items() if self._keeps(number, stamp))
            yield prompt.tokens[level], [*islice(holders, MOST_HOLDERS)]

    def record(self, prompt: PromptKeys, number: int) -> None:
        """The prompt is sent to a replica."""
        keys, tokens, all_stamps = prompt.keys, prompt.tokens, self._stamps
        sent = self._sent.get(number, 0)
        matched = 0
        # A beginning is used whenever its continuation is, so it is the one to forget last.
        for level in range(len(keys) - 1, -1, -1):
            stamps = all_stamps.pop(keys[level], None)
            if stamps is None:
                stamps = {}
            stamp = stamps.pop(number, None)
            if not matched and stamp is not None and self._keeps(number, stamp):
                matched = tokens[level]
            if len(stamps) >= MAX_HOLDERS:
                del stamps[next(iter(stamps))]
            stamps[number] = sent
            all_stamps[keys[level]] = stamps
        self._sent[number] = sent + (tokens[len(keys) - 1] if keys else 0) - matched
        while len(all_stamps) > self._max_keys:
            all_stamps.popitem(last=False)

    def forget(self, number: int) -> None:
        """A replica has lost its cache."""
        self._sent[number] = self._sent.get(number, 0) + self._capacity.get(number, 0) + 1

    def _keeps(self, number: int, stamp: int) -> bool:
        return self._sent.get(number, 0) - stamp <= self._capacity.get(number, 0)


class HashRing:
    """Consistent hashing (Karger et al. 1997): replicas in an order that depends on a key, in which few keys move when
    replicas come and go."""

    def __init__(self) -> None:
        self._points: list[tuple[int, int]] = []  # position, number of the replica; sorted
        self.numbers: set[int] = set()

    def add(self, number: int) -> None:
        """A replica has come."""
        if number not in self.numbers:
            self.numbers.add(number)
            for point in range(POINTS):
                insort(self._points, (_position(number.to_bytes(4, "little"), point), number))

    def remove(self, number: int) -> None:
        """A replica has gone."""
        self.numbers.discard(number)
        self._points = [point for point in self._points if point[1] != number]

    def walk(self, key: bytes) -> Iterator[int]:
        """The replicas, those that are next to the key first."""
        points, seen = self._points, set()
        begin = bisect(points, (_position(key, POINTS), 0))
        for at in range(begin, begin + len(points)):
            number = points[at % len(points)][1]
            if number not in seen:
                seen.add(number)
                yield number


def _position(key: bytes, point: int) -> int:
    """Equal in all processes, which `hash` is not."""
    return int.from_bytes(blake2b(key, digest_size=8, key=point.to_bytes(4, "little")).digest(), "little")


class Candidate(NamedTuple):
    """A replica that may get a request."""

    load: int  # requests that it has
    slots: int  # requests that it computes at once


def load_bound(mean: float) -> float:
    """The load up to which nothing counts against a replica."""
    return 1 + mean + min(sqrt(mean), max(FEW_REQUESTS, BALANCE * mean))


class Prices:
    """What counts against replicas whose load has been above the mean, in prompt tokens; negative if it was below."""

    def __init__(self) -> None:
        self._prices: dict[int, float] = {}

    def __getitem__(self, number: int) -> int:
        return int(self._prices.get(number, 0.0) / PRICE_GRAIN) * PRICE_GRAIN

    def observe(self, loads: Mapping[int, int], sent: int) -> None:
        """Takes the loads of all replicas. `sent`: the requests that were sent to them since the last call.

        Time counts in requests: while one is computed, about as many are sent as all replicas have (Little's law). One
        more per replica keeps prices still where there are few, which share the load by chance.
        """
        count, total = len(loads), sum(loads.values())
        if not total:
            return
        mean, step = total / count, PRICE_STEP * sent / (total + count)
        self._prices = {
            number: max(-MAX_PRICE, min(MAX_PRICE, self._prices.get(number, 0.0) + step * (load - mean)))
            for number, load in loads.items()
        }


class ReplicaChoice:
    """Chooses among the replicas on the ring."""

    def __init__(self) -> None:
        self.ring = HashRing()
        self.index = PrefixIndex()
        self.prices = Prices()
        self._elsewhere = 0  # searches further along the ring

    def choose(self, prompt: PromptKeys, mean_load: float, candidate: Callable[[int], Candidate | None]) -> int | None:
        """The number of the best replica for a prompt, which counts as sent to it. `candidate` returns None for a
        replica that must not get it. None: none of those that were looked at may."""
        bound = load_bound(mean_load)
        known = self._holders(prompt)
        best: tuple[bool, float, float, int] | None = None
        chosen: int | None = None
        enough, found = ENOUGH_ON_RING, False
        for order, (number, is_elsewhere) in enumerate(self._candidates(prompt, known)):
            if found and is_elsewhere:
                break
            if not enough and number not in known:
                continue
            if (one := candidate(number)) is None:
                continue
            matched, excess, price = known.get(number, 0), max(0.0, one.load - bound), self.prices[number]
            has_slot = one.load < one.slots
            if has_slot and not excess and price <= 0:
                found = True
                enough -= not matched
            merit = (
                has_slot,
                min(matched, MAX_MATCHED_TOKENS) - REQUEST_TOKENS * excess - price,
                0.0 if matched else -max(0.0, one.load - (NEW_PROMPT_BALANCE if has_slot else 1.0) * mean_load),
                -order,  # those that know as much of a prompt in the order of the ring, so that few compute it
            )
            if best is None or merit > best:
                best, chosen = merit, number
        if chosen is not None:
            self.index.record(prompt, chosen)
        return chosen

    def _holders(self, prompt: PromptKeys) -> dict[int, int]:
        """What counts for replicas that have computed some of the prompt, the most first."""
        known: dict[int, int] = {}
        for matched, holders in self.index.matches(prompt):
            if len(known) >= MOST_HOLDERS or matched < MIN_MATCHED_TOKENS:
                break
            for number in holders:
                known.setdefault(number, matched)
        return known

    def _candidates(self, prompt: PromptKeys, known: dict[int, int]) -> Iterator[tuple[int, bool]]:
        """The replicas to look at: the next ones on the ring, those that know the prompt, and then (True) others
        elsewhere on the ring, for a prompt that more requests have in common than the first ones can share."""
        seen = set()
        for number in islice(self.ring.walk(prompt.beginning), MOST_ON_RING):
            seen.add(number)
            yield number, False
        for number in known:
            if number not in seen:
                yield number, False
        self._elsewhere += 1
        for number in islice(self.ring.walk(self._elsewhere.to_bytes(8, "little")), MOST_ON_RING):
            yield number, True
