"""Plays answers of a model through a pool: their grammar, and the parts that the parser finds."""

from functools import cache, lru_cache
from typing import Any, NamedTuple

from llguidance import LLMatcher, LLTokenizer

from tests.tokenizer.harness import API, EOS, PoolHarness, end_messages, ids_of
from tgi.hub.llguidance_tables import new_matcher, token_table
from tgi.microkernel.messages.protocol import (
    Add,
    AnswerPart,
    Cancel,
    End,
    FinishReason,
    Generate,
    Prompted,
    Texts,
    decode,
)
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.tokenizer.answers.formats import FormatTokens
from tgi.tokenizer.vocabulary import Vocabulary

Parts = list[tuple[str, str]]


class ParsedAnswer(NamedTuple):
    """What an api received."""

    parts: Parts  # adjacent parts of one kind are merged, except calls
    end: End | None


@cache
def table(vocabulary: Vocabulary) -> LLTokenizer:
    return token_table(vocabulary.tokenizer, [EOS], 0)


@cache
def format_tokens(vocabulary: Vocabulary) -> FormatTokens:
    return FormatTokens(vocabulary)


@cache
def harness_of(vocabulary: Vocabulary, template: str) -> PoolHarness:
    """A harness that tests may share, since each test ends its requests."""
    return PoolHarness(vocabulary, template=template)


def submit_chat(harness: PoolHarness, rid: int, chat: bytes, **fields: Any) -> Add | End:
    """Sends a Generate and runs its jobs. Returns the Add, or the End if the request is rejected.

    Ends an earlier request of the same rid.
    """
    harness.received_by(harness.scheduler)
    harness.pool.handle(API, Cancel(rid))
    for cancel in harness.received_by(harness.scheduler):
        harness.send_end(cancel.rid, FinishReason.CANCELLED)
    harness.received_by(API)  # drops messages of earlier requests
    harness.pool.handle(API, Generate(rid, "", SamplingParams(5), chat=chat, **fields))
    harness.run_jobs()
    below = harness.received_by(harness.scheduler)
    if below:
        (add,) = below
        assert isinstance(add, Add)
        return add
    (end,) = end_messages(harness.received_by(API))
    return end


def submit_valid_chat(harness: PoolHarness, rid: int, chat: bytes, **fields: Any) -> Add:
    add = submit_chat(harness, rid, chat, **fields)
    assert isinstance(add, Add)
    return add


def rejection(harness: PoolHarness, chat: bytes, **fields: Any) -> str:
    end = submit_chat(harness, 1, chat, **fields)
    assert isinstance(end, End)
    assert end.reason == FinishReason.INVALID
    return end.message


def grammar_of(add: Add) -> str:
    sampling = decode(add.sampling)
    assert isinstance(sampling, SamplingParams)
    return sampling.grammar


def start_matcher(add: Add, vocabulary: Vocabulary) -> LLMatcher:
    """A matcher at the beginning of an answer with the request's grammar."""
    found = matcher(vocabulary, grammar_of(add)).deep_copy()
    assert not found.is_error(), found.get_error()
    return found


@lru_cache(maxsize=32)
def matcher(vocabulary: Vocabulary, grammar: str) -> LLMatcher:
    return new_matcher(table(vocabulary), grammar)


def accepts(add: Add, answer: str, vocabulary: Vocabulary) -> bool:
    """Whether the grammar accepts this answer, token by token and all at once (as after a restart)."""
    found = start_matcher(add, vocabulary)
    again = found.deep_copy()
    ids = ids_of(answer, vocabulary)
    taken = all(found.consume_token(number) for number in ids) and found.is_accepting()
    assert (again.consume_tokens(ids) and again.is_accepting()) == taken
    return taken


def play_answer(
    harness: PoolHarness, add: Add, ids: list[int], reason: FinishReason = FinishReason.EOS, at_once: int = 1
) -> list[Any]:
    """Sends these ids, `at_once` per step. Returns all messages that the api receives."""
    messages = []
    ids = [*ids, EOS] if reason is FinishReason.EOS else ids
    for at in range(0, len(ids), at_once):
        harness.send_tokens((add.rid, ids[at : at + at_once]))
        messages += harness.received_by(API)
    harness.send_end(add.rid, reason)
    return messages + harness.received_by(API)


def parsed_answer(messages: list[Any]) -> ParsedAnswer:
    """The parts of the only request in these messages."""
    parts: list[AnswerPart] = []
    end = None
    for message in messages:
        if isinstance(message, Texts):
            assert all(part.token_index < len(message.texts) for part in message.parts)
            parts += message.parts
        elif isinstance(message, End):
            end = message
            parts += message.parts
    return ParsedAnswer(merge_parts([(part.kind, part.text) for part in parts]), end)


def merge_parts(parts: list[tuple[Any, str]]) -> Parts:
    together: Parts = []
    for kind, text in parts:
        assert text
        if together and together[-1][0] == kind != "call":
            together[-1] = (str(kind), together[-1][1] + text)
        else:
            together.append((str(kind), text))
    return together


def is_sent_in_parts(messages: list[Any]) -> bool:
    (prompted,) = [message for message in messages if isinstance(message, Prompted)]
    return prompted.in_parts
