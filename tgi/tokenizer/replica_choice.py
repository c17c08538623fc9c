"""Which of several schedulers gets a request: the one that has most of its prompt in the prefix cache, unless it has
more than its share of the load. Sans-IO.

The rule weighs cache against load, as cache-aware routers do (SGLang's router, vLLM's prefix-aware one), in one figure:
each prompt token that a replica has computed already counts for it, and each request above its fair load (BALANCE times
the mean, and one) counts REQUEST_TOKENS against it. One without a free slot is chosen only if no replica has one; then
each request above the mean counts. So a prefix that many requests have in common is computed at as many replicas as it
takes to share the load. Where the figures are equal, a hash of the beginning of the prompt decides (rendezvous hashing,
Thaler and Ravishankar 1998): all tokenizers send a new prefix to the same replica without asking each other, and the
caches hold different prefixes.

A tokenizer knows the prompts that it has sent itself. The reported load is that of all tokenizers.
"""

from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

from tgi.microkernel.codec import ITEM_BYTES

# Prompts are compared in blocks of this many tokens, the size of a page, up to so many blocks.
BLOCK_TOKENS, MAX_BLOCKS = 16, 1024
# A load up to this multiple of the mean is no excess (consistent hashing with bounded loads, Mirrokni et al. 2016).
BALANCE = 1.25
# The prompt tokens that are computed again to avoid an excess of one request; and the most that counts for a replica,
# which limits the excess that a long prompt is worth.
REQUEST_TOKENS, MAX_MATCHED_TOKENS = 32, 512
# What it counts that a replica has computed with the adapter of the request.
ADAPTER_TOKENS = 32


class PromptKeys(NamedTuple):
    """A prompt as the histories of the replicas know it."""

    adapter: int | None  # key of its adapter
    blocks: "array[int]"  # one key per block, each of which depends on all blocks before it and on the adapter
    beginning: bytes  # equal for prompts that begin alike, in all processes


def prompt_keys(ids: bytes, adapter_digest: bytes) -> PromptKeys:
    """The keys of a prompt; `ids` are int32. A block that is not full has no key."""
    size = ITEM_BYTES * BLOCK_TOKENS
    key = hash(adapter_digest)
    blocks = array("q")
    for start in range(0, min(len(ids) - size + 1, MAX_BLOCKS * size), size):
        key = hash((key, ids[start : start + size]))
        blocks.append(key)
    return PromptKeys(hash(adapter_digest) if adapter_digest else None, blocks, adapter_digest or ids[:size])


class PrefixHistory:
    """The prefixes and adapters of the requests that were sent to one replica: as many blocks as its cache can have."""

    def __init__(self, capacity: int = 1 << 16) -> None:
        self.capacity = capacity  # in blocks
        self._keys: dict[int, None] = {}  # the least recently used first

    def matched_tokens(self, prompt: PromptKeys) -> int:
        """How many tokens of the prompt the replica should have computed; its adapter counts as ADAPTER_TOKENS."""
        matched = ADAPTER_TOKENS if prompt.adapter is not None and prompt.adapter in self._keys else 0
        for key in prompt.blocks:
            if key not in self._keys:
                break
            matched += BLOCK_TOKENS
        return matched

    def record(self, prompt: PromptKeys) -> None:
        """The prompt is sent to the replica."""
        keys: Iterable[int] = prompt.blocks if prompt.adapter is None else (*prompt.blocks, prompt.adapter)
        for key in keys:
            self._keys.pop(key, None)
            self._keys[key] = None
        while len(self._keys) > self.capacity:
            del self._keys[next(iter(self._keys))]

    def clear(self) -> None:
        """The replica has lost its cache."""
        self._keys.clear()


class Candidate(NamedTuple):
    """A replica that may get a request."""

    number: int
    load: int  # requests that it has
    matched_tokens: int
    slots: int  # requests that it computes at once


def choose_replica(candidates: Sequence[Candidate], beginning: bytes) -> int:
    """The number of the best replica for a prompt that begins so."""
    fair = sum(one.load for one in candidates) / len(candidates)
    if any(one.load < one.slots for one in candidates):  # else each request in excess waits for a slot
        fair = 1 + BALANCE * fair

    def merit(one: Candidate) -> tuple[bool, float, int, bytes]:
        excess = max(0.0, one.load - fair)
        rank = blake2b(beginning, digest_size=8, key=one.number.to_bytes(4, "little")).digest()
        weight = min(one.matched_tokens, MAX_MATCHED_TOKENS) - REQUEST_TOKENS * excess
        return one.load < one.slots, weight, one.matched_tokens, rank

    return max(candidates, key=merit).number
