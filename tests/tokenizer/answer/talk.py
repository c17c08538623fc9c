"""Answers of a model, played through a pool: what grammar they are held to, and which parts come of them."""

from functools import cache
from typing import Any, NamedTuple

from llguidance import LLMatcher, LLTokenizer

from tests.tokenizer.house import API, EOS, House, ends, ids_of
from tgi.hub.grammar import matcher, token_table
from tgi.kernel.answer import Part, Prompted, Texts
from tgi.kernel.messages import Add, End, Generate, Reason, Sampling, decode
from tgi.tokenizer.vocabulary import Vocabulary

Merged = list[tuple[str, str]]


class Said(NamedTuple):
    """What an api was told."""

    parts: Merged  # neighbours of one kind as one, but a call stands alone
    end: End | None


@cache
def table(vocabulary: Vocabulary) -> LLTokenizer:
    return token_table(vocabulary.tokenizer, [EOS], 0)


@cache
def house_of(vocabulary: Vocabulary, template: str) -> House:
    """A house that many tests may share: what they ask for is over when they are."""
    return House(vocabulary, template=template)


def start(house: House, rid: int, chat: bytes, **fields: Any) -> Add | End:
    """Asks, does the jobs that come of it, and gives what came down, or the refusal."""
    house.said(API)  # of no interest to whoever asks now
    house.pool.handle(API, Generate(rid, "", Sampling(5), chat=chat, **fields))
    while house.pool.jobs:
        job = house.pool.jobs.popleft()
        house.pool.finished(job.key, job.result())
    below = house.said(house.scheduler)
    if below:
        (add,) = below
        assert isinstance(add, Add)
        return add
    (end,) = ends(house.said(API))
    return end


def begin(house: House, rid: int, chat: bytes, **fields: Any) -> Add:
    add = start(house, rid, chat, **fields)
    assert isinstance(add, Add)
    return add


def refusal(house: House, chat: bytes, **fields: Any) -> str:
    end = start(house, 1, chat, **fields)
    assert isinstance(end, End)
    assert end.reason == Reason.INVALID
    return end.message


def grammar(add: Add) -> str:
    sampling = decode(add.sampling)
    assert isinstance(sampling, Sampling)
    return sampling.grammar


def held(add: Add, vocabulary: Vocabulary) -> LLMatcher:
    """At the beginning of an answer under the request's grammar."""
    found = matcher(table(vocabulary), grammar(add))
    assert not found.is_error(), found.get_error()
    return found


def accepts(add: Add, answer: str, vocabulary: Vocabulary) -> bool:
    """Whether the grammar takes this answer, token by token and all at once as after a loss, and lets it end there."""
    found, again = held(add, vocabulary), held(add, vocabulary)
    ids = ids_of(answer, vocabulary)
    taken = all(found.consume_token(number) for number in ids) and found.is_accepting()
    assert (again.consume_tokens(ids) and again.is_accepting()) == taken
    return taken


def play(house: House, add: Add, ids: list[int], reason: Reason = Reason.EOS, at_once: int = 1) -> list[Any]:
    """The model writes these ids, so many per step; all that the api is told."""
    told = []
    ids = [*ids, EOS] if reason is Reason.EOS else ids
    for at in range(0, len(ids), at_once):
        house.tokens((add.rid, ids[at : at + at_once]))
        told += house.said(API)
    house.end(add.rid, reason)
    return told + house.said(API)


def said(messages: list[Any]) -> Said:
    """The parts that these messages give to their one request."""
    parts: list[Part] = []
    end = None
    for message in messages:
        if isinstance(message, Texts):
            assert all(part.token < len(message.texts) for part in message.parts)
            parts += message.parts
        elif isinstance(message, End):
            end = message
            parts += message.parts
    return Said(merged([(part.kind, part.text) for part in parts]), end)


def merged(parts: list[tuple[Any, str]]) -> Merged:
    together: Merged = []
    for kind, text in parts:
        assert text
        if together and together[-1][0] == kind != "call":
            together[-1] = (str(kind), together[-1][1] + text)
        else:
            together.append((str(kind), text))
    return together


def divided(messages: list[Any]) -> bool:
    (prompted,) = [message for message in messages if isinstance(message, Prompted)]
    return prompted.divided
