"""What the scripted worker keeps of a request, and what it checks of one that comes to a slot."""

from dataclasses import dataclass, field

from tgi.kernel.messages import MOST_PROMPT_TOPS, Sampling, Slot, decode
from tgi.kernel.pack import floats, ints
from tgi.kernel.presence import Limits
from tgi.worker.lora.shelf import Shelf, Unread, missing
from tgi.worker.sayings import noise_of


class Violation(Exception):
    """A step that breaks the protocol; the text says how."""


@dataclass(slots=True)
class Occupant:
    """One slot's request. `chain` is the running hash of the ids computed so far: equal chains, equal KV."""

    ids: list[int]
    noise: int
    top_n: int
    slot: Slot
    table: list[int] = field(default_factory=list)
    claimed: int = 0  # pages of `table` looked at so far
    computed: int = 0
    chain: int = 0
    lost: str = ""  # who took a page of this slot
    adapter: Unread | None = None
    fault: str = ""  # why it cannot draw


def occupant_of(new: Slot, limits: Limits, adapters: Shelf) -> Occupant:
    """The request that comes to a slot of a worker with these limits and adapters. Raises Violation."""
    ids = ints(new.tokens)
    sampling = decode(new.sampling)
    need(0 <= new.slot < limits.max_batch_size, f"slot {new.slot} of {limits.max_batch_size}")
    if not isinstance(sampling, Sampling):
        raise Violation(f"slot {new.slot}: sampling is not a Sampling")
    need(1 <= new.prompt_tokens <= len(ids), f"slot {new.slot}: {new.prompt_tokens} of {len(ids)} ids are prompt")
    need(len(ids) <= limits.max_total_tokens, f"slot {new.slot}: {len(ids)} tokens are over the limit of a request")
    need(min(ids) >= 0 and max(ids) < limits.vocab_size, f"slot {new.slot}: an id is not in the vocabulary")
    need(
        0 <= new.prompt_from < len(ids) and 0 <= new.prompt_top_n <= MOST_PROMPT_TOPS,
        f"slot {new.slot}: logprobs from position {new.prompt_from} of {len(ids)} on, with {new.prompt_top_n}",
    )
    biased = ints(sampling.bias_ids)
    need(len(biased) == len(floats(sampling.biases)), f"slot {new.slot}: bias_ids and biases differ in length")
    need(
        all(0 <= token < limits.vocab_size for token in biased),
        f"slot {new.slot}: a biased id is not in the vocabulary",
    )
    words, lengths = ints(sampling.bad_word_ids), ints(sampling.bad_word_lengths)
    need(
        len(words) == sum(lengths) and min(lengths, default=1) > 0,
        f"slot {new.slot}: bad_word_ids and bad_word_lengths differ",
    )
    need(
        all(0 <= token < limits.vocab_size for token in words),
        f"slot {new.slot}: a token of a bad word is not in the vocabulary",
    )
    found = Occupant(ids, noise_of(sampling), sampling.top_n, new)
    if sampling.adapter:
        found.adapter = adapters.find(sampling.adapter_digest)
        if found.adapter is None:
            found.fault = missing(sampling.adapter)  # its pages are the bare model's
        else:
            found.chain = int.from_bytes(sampling.adapter_digest)  # pages that an adapter computed are no other's
    return found


def need(holds: bool, fault: str) -> None:
    """For checks made once a step or once a request: the text is built even where nothing is wrong."""
    if not holds:
        raise Violation(fault)
