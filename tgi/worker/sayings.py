"""What the scripted worker says: tokens, logprobs and likeliest tokens that follow from a hash of what came before."""

from collections.abc import Sequence

from tgi.kernel.messages import Result, Sampling
from tgi.kernel.pack import FLOAT32, INT32, UINT8, UINT32, pack

# Ids of single ASCII characters in GPT-2's, SmolLM2's and Llama's vocabularies alike: text without special tokens.
FIRST_ID, IDS = 40, 50
# No seed is negative. (None would not do: its hash differs between processes.)
GREEDY = -1
# In its place where the logprob of a prompt's own token is told. (-2 has the hash of -1.)
PROMPT = -3

Tops = Sequence[tuple[int, float]]  # (id, logprob), likeliest first
Said = tuple[int, float, Tops]  # id, logprob, and what stands beside them


def noise_of(sampling: Sampling) -> int:
    """What a request's tokens depend on beside the ids before them: its seed and choice, where these count.

    The first of several answers is that of a request for one.
    """
    if not sampling.samples:
        return GREEDY
    return hash((sampling.seed, sampling.choice)) if sampling.choice else sampling.seed


def ids_of(vocab_size: int) -> range:
    """The ids that are drawn from a vocabulary of this size."""
    return range(FIRST_ID, FIRST_ID + IDS) if vocab_size >= FIRST_ID + IDS else range(vocab_size)


def say(number: int, top_n: int, ids: range) -> Said:
    """One of these ids, its logprob and the likeliest tokens, for a random number of 32 bits.

    The id drawn is the likeliest. Half of the lists are longer than asked for, by one that equals the last.
    """
    count = len(ids)
    token, logprob = ids[number % count], -((number >> 16) % 1024) / 256.0
    if top_n <= 0:
        return token, logprob, ()
    wanted = min(top_n, count)
    length = min(wanted + (number >> 8) % 2, count)
    tops = [(ids[(number + place) % count], logprob - min(place, wanted - 1)) for place in range(length)]
    return token, logprob, sorted(tops, key=lambda top: (-top[1], top[0]))


def guess(number: int, ids: range) -> int:
    """What a draft model thinks that is said for this number: right three times out of four."""
    return ids[(number + ((number >> 20) % 4 == 0)) % len(ids)]


def tell(number: int, token: int, top_n: int, ids: range) -> Said:
    """The logprob of this token of a prompt and so many likeliest ones, for a random number of 32 bits."""
    _, logprob, tops = say(number, top_n, ids)
    return token, logprob, tops[: min(top_n, len(ids))]


def result_of(number: int, epoch: int, said: Sequence[Sequence[Said]], told: Sequence[Said] = ()) -> Result:
    """The result of a step whose drawing rows got the one each, and whose prompts' tokens the other."""
    each = [one for row in said for one in row]
    ids, logprobs, lists = zip(*each, strict=True) if each else ((), (), ())
    plain = Result(number, epoch, pack(UINT8, map(len, said)), pack(INT32, ids), pack(FLOAT32, logprobs))
    if told:
        plain = plain._replace(
            prompt_logprobs=pack(FLOAT32, [logprob for _, logprob, _ in told]),
            prompt_top_ids=pack(INT32, [token for _, _, tops in told for token, _ in tops]),
            prompt_top_logprobs=pack(FLOAT32, [logprob for _, _, tops in told for _, logprob in tops]),
        )
    if not any(lists):
        return plain
    return plain._replace(
        top_counts=pack(UINT32, [len(tops) for tops in lists]),
        top_ids=pack(INT32, [token for tops in lists for token, _ in tops]),
        top_logprobs=pack(FLOAT32, [logprob for tops in lists for _, logprob in tops]),
    )
