"""Which of several schedulers gets a request: one that has much of its prompt in the prefix cache, and no more than a
fair share of the load. Sans-IO.

All replicas are scored, as cache-aware routers do (SGLang's router, vLLM's prefix-aware one): each prompt token that a
replica has computed counts for it, and each request above the bound of its load counts REQUEST_TOKENS against it. So a
prefix that many requests have in common is computed at as many replicas as it takes to share the load. The bound is
little above the mean, as in consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam 2016). An excess
that lasts counts more and more, or a replica with popular prefixes would stay above the bound by what they are worth.
Where the scores are equal, the highest hash of prompt and replica decides (rendezvous hashing): all tokenizers send a
new prefix to the same replica without asking each other, and few prefixes move when replicas come and go.

A tokenizer knows the prompts that it has sent itself. The reported load is that of all tokenizers.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple
from zlib import crc32

from tgi.microkernel.messages.codec import ITEM_BYTES

# Prompts are compared in blocks of this many tokens, the size of a page.
BLOCK_TOKENS = 16
# The beginnings of a prompt that are compared, in blocks: each is at most a quarter longer than the one before, from 4
# on. So few keys of a long prompt are kept.
LENGTHS = (1, 2, 3, *(length << octave for octave in range(9) for length in (4, 5, 6, 7)))
# The prompt tokens that are computed again to avoid a request above the bound; and the most that counts for a replica,
# which limits the excess that a long prompt is worth. Less than two blocks are not worth it.
REQUEST_TOKENS, MAX_MATCHED_TOKENS, MIN_MATCHED_TOKENS = 64, 512, 2 * BLOCK_TOKENS
# What counts against a replica grows by this many tokens if its load is a request above the mean for as long as a
# request takes. What is left after the division by the grain does not count, so that chance does not decide.
LASTING_TOKENS, LASTING_GRAIN = 8, 64
# A load differs from the mean by chance by about its root. The bound allows that where it is few requests, otherwise
# this share of the mean.
FEW_REQUESTS, BALANCE = 1, 0.02
# What it counts that a replica has computed with the adapter of the request.
ADAPTER_TOKENS = 32
# Of each replica: beginnings of prompts that are remembered.
MAX_KEYS = 1 << 14


class PromptKeys(NamedTuple):
    """A prompt as it is compared."""

    keys: "array[int]"  # one per compared beginning: depends on all its tokens and on the adapter
    tokens: tuple[int, ...]  # what it counts to have computed each of them, or more of these
    beginning: int  # equal for prompts that begin alike, in all processes


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
    tokens_of_keys = TOKENS_WITH_ADAPTER if adapter_digest else TOKENS
    return PromptKeys(keys, tokens_of_keys, crc32(adapter_digest or ids[: ITEM_BYTES * BLOCK_TOKENS]))


class SentPrefixes:
    """The beginnings of prompts that a replica was sent and its cache should still have.

    A cache that evicts what was used least recently keeps a prefix until as many tokens as it can have came after it.
    So each use of a prefix is stamped with the number of tokens that were sent before.
    """

    def __init__(self) -> None:
        self.capacity = 0  # tokens that the cache keeps of the prompts that are recorded here
        self._stamps: OrderedDict[int, int] = OrderedDict()  # by key, the least recently used first
        self._sent = 0  # tokens

    def __len__(self) -> int:
        return len(self._stamps)

    def matched(self, prompt: PromptKeys) -> int:
        """What it counts to have the longest known beginning of the prompt."""
        matched, stamps, oldest = 0, self._stamps, self._sent - self.capacity
        for key, tokens in zip(prompt.keys, prompt.tokens, strict=False):
            if (stamp := stamps.get(key)) is None or stamp < oldest:
                break
            matched = tokens
        return matched

    def record(self, prompt: PromptKeys) -> None:
        stamps, keys = self._stamps, prompt.keys
        matched = self.matched(prompt)
        # A beginning is used whenever its continuation is, so it is the one to forget last.
        for key in reversed(keys):
            stamps[key] = self._sent
            stamps.move_to_end(key)
        self._sent += (prompt.tokens[len(keys) - 1] if keys else 0) - matched
        oldest = self._sent - self.capacity
        while stamps and (len(stamps) > MAX_KEYS or stamps[next(iter(stamps))] < oldest):
            stamps.popitem(last=False)

    def clear(self) -> None:
        """The replica has lost its cache."""
        self._stamps.clear()


class Candidate(NamedTuple):
    """A replica that may get a request."""

    number: int  # the same in all tokenizers
    load: int  # requests that it has
    slots: int  # requests that it computes at once
    sent: SentPrefixes
    lasting: float = 0.0  # tokens, see `lasting_excess`


def lasting_excess(before: float, excess: float, lifetimes: float) -> float:
    """The tokens that count against a replica whose load was `excess` requests above the mean of all, and more or less
    than that before. `lifetimes`: how long, in the time that a request takes."""
    return max(-MAX_MATCHED_TOKENS, min(MAX_MATCHED_TOKENS, before + LASTING_TOKENS * lifetimes * excess))


def load_bound(mean: float) -> float:
    """The load up to which nothing counts against a replica."""
    return 1 + mean + min(sqrt(mean), max(FEW_REQUESTS, BALANCE * mean))


def best_candidate(prompt: PromptKeys, candidates: Sequence[Candidate]) -> int:
    """The index of the best replica for a prompt; there must be one. One without a free slot is chosen only if none has
    one."""
    mean = sum(one.load for one in candidates) / len(candidates)
    bound = load_bound(mean)

    def merit(index: int) -> tuple[bool, float, int]:
        number, load, slots, sent, lasting = candidates[index]
        matched, lasting = min(sent.matched(prompt), MAX_MATCHED_TOKENS), LASTING_GRAIN * int(lasting / LASTING_GRAIN)
        if matched < MIN_MATCHED_TOKENS:
            matched, lasting = 0, max(0, lasting)  # else tokenizers would not agree on a new prefix
        has_slot = load < slots
        excess = max(0.0, load - (bound if has_slot else mean))  # each makes a request wait longer
        return has_slot, matched - lasting - REQUEST_TOKENS * excess, hash((prompt.beginning, number))

    return max(range(len(candidates)), key=merit)
