"""The fake worker's tokens, logprobs and alternatives, as functions of a hash of the earlier tokens."""

from collections.abc import Sequence
from zlib import crc32

from tgi.microkernel.messages.codec import FLOAT32, INT32, UINT8, UINT32, pack_column
from tgi.microkernel.messages.protocol import StepResult
from tgi.microkernel.messages.sampling_params import SamplingParams

# Ids that are single ASCII characters in the vocabularies of GPT-2, SmolLM2 and Llama: text without special tokens.
FIRST_ID, ID_COUNT = 40, 50
# The noise key of greedy requests: no seed is negative. (The hash of None would differ between processes.)
GREEDY_KEY = -1
# The noise key of prompt logprobs. (-2 has the hash of -1.)
PROMPT_KEY = -3

FakeAlternatives = Sequence[tuple[int, float]]  # (id, logprob), likeliest first
FakeToken = tuple[int, float, FakeAlternatives]  # id, logprob, alternatives


def noise_key(sampling: SamplingParams) -> int:
    """What a request's tokens depend on besides the earlier ids: its grammar, and its seed and choice if it samples.

    The first choice has the tokens of a request for one answer.
    """
    key = GREEDY_KEY
    if sampling.samples:
        key = hash((sampling.seed, sampling.choice)) if sampling.choice else sampling.seed
    return hash((key, crc32(sampling.grammar.encode()))) if sampling.grammar else key


def fake_vocabulary(vocab_size: int) -> range:
    """The ids that are sampled from a vocabulary of this size."""
    return range(FIRST_ID, FIRST_ID + ID_COUNT) if vocab_size >= FIRST_ID + ID_COUNT else range(vocab_size)


def fake_token(number: int, top_n: int, ids: range) -> FakeToken:
    """A token, its logprob and its alternatives, for a random 32-bit number.

    The sampled token is the likeliest. Half of the lists are longer than requested by one that ties with the last.
    """
    count = len(ids)
    token, logprob = ids[number % count], -((number >> 16) % 1024) / 256.0
    if top_n <= 0:
        return token, logprob, ()
    wanted = min(top_n, count)
    length = min(wanted + (number >> 8) % 2, count)
    tops = [(ids[(number + rank) % count], logprob - min(rank, wanted - 1)) for rank in range(length)]
    return token, logprob, sorted(tops, key=lambda top: (-top[1], top[0]))


def fake_draft(number: int, ids: range) -> int:
    """The draft that a draft model proposes for this number: right three times out of four."""
    return ids[(number + ((number >> 20) % 4 == 0)) % len(ids)]


def fake_prompt_logprob(number: int, token: int, top_n: int, ids: range) -> FakeToken:
    """The logprob of this prompt token and `top_n` alternatives, for a random 32-bit number."""
    _, logprob, tops = fake_token(number, top_n, ids)
    return token, logprob, tops[: min(top_n, len(ids))]


def fake_vector(number: int) -> tuple[float, float]:
    """The vector of a prompt with this hash."""
    return float(number % 251), float(number % 65521)


def fake_result(
    number: int,
    epoch: int,
    sampled: Sequence[Sequence[FakeToken]],
    prompt_logprobs: Sequence[FakeToken] = (),
    vectors: bytes = b"",
) -> StepResult:
    """The result of a step in which each sampling row sampled these tokens, with these prompt logprobs and vectors."""
    each = [one for row in sampled for one in row]
    ids, logprobs, lists = zip(*each, strict=True) if each else ((), (), ())
    result = StepResult(
        number,
        epoch,
        pack_column(UINT8, map(len, sampled)),
        pack_column(INT32, ids),
        pack_column(FLOAT32, logprobs),
        vectors=vectors,
    )
    if prompt_logprobs:
        result = result._replace(
            prompt_logprobs=pack_column(FLOAT32, [logprob for _, logprob, _ in prompt_logprobs]),
            prompt_top_ids=pack_column(INT32, [token for _, _, tops in prompt_logprobs for token, _ in tops]),
            prompt_top_logprobs=pack_column(FLOAT32, [value for _, _, tops in prompt_logprobs for _, value in tops]),
        )
    if not any(lists):
        return result
    return result._replace(
        top_counts=pack_column(UINT32, [len(tops) for tops in lists]),
        top_ids=pack_column(INT32, [token for tops in lists for token, _ in tops]),
        top_logprobs=pack_column(FLOAT32, [logprob for tops in lists for _, logprob in tops]),
    )
