"""The tokens of a prompt go up to whoever asks: all, in order and once, each with its text and its place."""

from itertools import pairwise
from typing import Any

import pytest

from tests.tokenizer.house import API, LIMITS, OTHER, House, ends, ids_of
from tests.tokenizer.vocabularies import KINDS, byte_level, sentencepiece
from tgi.kernel.answer import Prompted, PromptTokens, Texts
from tgi.kernel.messages import Cancel, End, Generate, PromptLogprobs, Reason, Sampling
from tgi.kernel.pack import FLOAT32, INT32, floats, ints, pack
from tgi.tokenizer import encode, prompts

TEXT = "Hello, world of many tokens 👍🏽 and é"


def told(rid: int, logprobs: list[float], tops: int = 0) -> PromptLogprobs:
    """What the scheduler says of so many tokens."""
    ids = [40 + at for at in range(tops * len(logprobs))]
    return PromptLogprobs(
        rid, pack(FLOAT32, logprobs), pack(INT32, ids), pack(FLOAT32, [-float(number) for number in ids])
    )


def pieces(messages: list[Any]) -> list[PromptTokens]:
    return [message for message in messages if isinstance(message, PromptTokens)]


def test_the_first_token_comes_at_once_and_the_others_as_they_are_told() -> None:
    house, vocabulary = House(), byte_level()
    ids = ids_of(TEXT)
    add = house.ask(7, TEXT, prompt_from=0, prompt_top_n=2, add_special_tokens=False)
    assert (add.prompt_from, add.prompt_top_n) == (1, 2)
    (first,) = pieces(house.said(API))
    assert (first.rid, ints(first.ids), first.texts) == (7, ids[:1], [vocabulary.text(ids[0])])
    assert str(floats(first.logprobs)) == "[nan]"
    assert not first.top_ids
    for begin, end in ((1, 4), (4, len(ids))):
        house.pool.handle(house.scheduler, told(add.rid, [-at / 4 for at in range(begin, end)], 2))
        (piece,) = pieces(house.said(API))
        assert ints(piece.ids) == ids[begin:end]
        assert floats(piece.logprobs) == [-at / 4 for at in range(begin, end)]
        assert piece.texts == [vocabulary.text(number) for number in ids[begin:end]]
        assert piece.top_texts == [vocabulary.text(number) for number in ints(piece.top_ids)]
        assert len(piece.top_texts) == 2 * (end - begin) == len(floats(piece.top_logprobs))
        assert len(ints(piece.starts)) == end - begin


def test_the_prompt_goes_before_the_first_token_and_the_end() -> None:
    house = House()
    add = house.ask(7, TEXT, prompt_from=0)
    other = house.ask(1, "Hello", api=OTHER)
    house.said(API)
    house.tokens((other.rid, [60]))
    house.pool.handle(house.scheduler, told(add.rid, [-1.0] * (len(ints(add.prompt)) - 1)))
    house.tokens((add.rid, [60]), (other.rid, [61]))
    house.end(add.rid)
    assert [type(message) for message in house.said(API)] == [PromptTokens, Texts, End]
    assert not pieces(house.said(OTHER))


def test_after_losses_only_what_is_missing_is_asked_for() -> None:
    house = House()
    add = house.ask(7, TEXT, prompt_from=0)
    house.pool.handle(house.scheduler, told(add.rid, [-1.0, -2.0]))
    assert sum(len(piece.texts) for piece in pieces(house.said(API))) == 3
    house.scheduler_gone()
    house.scheduler_up()
    (again,) = house.said(house.scheduler)
    assert again.prompt_from == 3
    # An api that has seen three tokens turns to another tokenizer.
    third = House().ask(9, TEXT, prompt_from=3)
    assert third.prompt_from == 3
    whole = House()
    everything = whole.ask(9, TEXT, prompt_from=len(ints(add.prompt)))
    assert everything.prompt_from == len(ints(add.prompt))
    assert not pieces(whole.said(API))


def test_whoever_does_not_ask_gets_nothing_and_whoever_left_neither() -> None:
    house = House()
    assert house.ask(7, TEXT).prompt_from == 0
    asking = house.ask(8, TEXT, prompt_from=0)
    house.said(API)
    house.pool.handle(API, Cancel(8))
    house.pool.handle(house.scheduler, told(asking.rid, [-1.0]))
    assert not pieces(house.said(API))


def test_long_prompts_go_in_messages_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "MOST_TOKENS", 4)
    house = House()
    add = house.ask(7, TEXT, prompt_from=0, prompt_top_n=1)
    house.said(API)
    rest = len(ints(add.prompt)) - 1
    house.pool.handle(house.scheduler, told(add.rid, [-1.0] * rest, 1))
    found = pieces(house.said(API))
    assert [len(piece.texts) for piece in found[:-1]] == [4] * (len(found) - 1)
    assert sum(len(piece.top_texts) for piece in found) == rest
    assert [number for piece in found for number in ints(piece.top_ids)] == [40 + at for at in range(rest)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["Hello world", "a  b\n\n c ", "é👍🏽 今天 x", "", " x"])
def test_tokens_start_where_the_one_before_ends(kind: str, text: str) -> None:
    vocabulary = KINDS[kind]()
    found = encode.prompt(vocabulary, text, True, None, True)
    starts, ids = ints(found.starts), ints(found.ids)
    assert len(starts) == len(ids) == found.tokens
    assert found._replace(starts=b"") == encode.prompt(vocabulary, text, True, None)
    assert all(0 <= one <= next_one <= len(text) for one, next_one in pairwise(starts))
    assert starts[:1] in ([], [0])
    for at, (begin, end) in enumerate(pairwise([*starts, len(text)])):
        if kind == "byte_level" and end > begin and "\ufffd" not in (piece := vocabulary.text(ids[at])):
            assert piece == text[begin:end]


def test_what_a_template_adds_takes_no_room() -> None:
    plain = encode.prompt(sentencepiece(), "Hello world", False, None, True)
    added = encode.prompt(sentencepiece(), "Hello world", True, None, True)
    assert ints(added.starts) == [0, *ints(plain.starts)]
    cut = encode.prompt(sentencepiece(), "Hello world", True, 2, True)
    assert (ints(cut.starts), ints(cut.ids)) == (ints(added.starts)[-2:], ints(added.ids)[-2:])


def test_a_chat_has_tokens_too() -> None:
    house = House(template="{% for message in messages %}{{ message.content }}{% endfor %}")
    chat = b'{"messages":[{"role":"user","content":"Hello"}]}'
    house.pool.handle(API, Generate(3, "", Sampling(1), chat=chat, prompt_from=0))
    (first,) = pieces(house.said(API))
    assert ints(first.ids) == ids_of("Hello")[:1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["Hello world", "a  b\n\n c ", "é👍🏽 今天 x", " x"])
def test_ids_are_the_prompt_and_have_a_text(kind: str, text: str) -> None:
    """Special tokens are neither added nor left out, and unknown ones say nothing."""
    vocabulary = KINDS[kind]()
    plain, unknown = [number for number in ids_of(text, vocabulary) if number not in vocabulary.special], 1000
    ids = [*plain, *sorted(vocabulary.special)[:1], unknown]
    house = House(vocabulary)
    add = house.ask(7, "", input_ids=pack(INT32, ids))
    assert ints(add.prompt) == ids
    (told,) = house.said(API)
    special = [vocabulary.text(number) for number in ids[len(plain) : -1]]
    assert told.text == vocabulary.tokenizer.decode(plain) + "".join(special)
    assert told == Prompted(7, len(ids), len(told.text), False, told.text)
    assert ints(house.ask(8, "", input_ids=pack(INT32, ids), truncate=2).prompt) == ids[-2:]

    starts = ints(encode.prompt_of_ids(vocabulary, pack(INT32, ids), None).starts)
    assert len(starts) == len(ids)
    for at, (begin, end) in enumerate(pairwise([*starts, len(told.text)])):
        assert 0 <= begin <= end
        if kind == "byte_level" and end > begin and "\ufffd" not in (piece := vocabulary.text(ids[at])):
            assert piece == told.text[begin:end]


def test_a_prompt_is_scored_without_a_token() -> None:
    """The end comes with the last logprob, even where the scheduler dies before it can say so."""
    house = House()
    add = house.ask(7, TEXT, prompt_from=0, max_new_tokens=0)
    rest = len(ints(add.prompt)) - 1
    assert (add.max_new_tokens, add.prompt_from) == (0, 1)
    house.pool.handle(house.scheduler, told(add.rid, [-1.0]))
    house.scheduler_gone()
    house.scheduler_up()
    (again,) = house.said(house.scheduler)
    assert (again.max_new_tokens, again.prompt_from) == (0, 2)
    house.pool.handle(house.scheduler, told(add.rid, [-1.0] * (rest - 1)))
    house.scheduler_gone()
    heard = house.said(API)
    (end,) = ends(heard)
    assert sum(len(piece.texts) for piece in pieces(heard)) == rest + 1
    assert (end.reason, end.text, end.prompt_tokens, end.generated_tokens) == (Reason.LENGTH, "", rest + 1, 0)


@pytest.mark.parametrize(
    ("ids", "fields"), [(TEXT, {}), ("H", {"prompt_from": 0}), (TEXT, {"prompt_from": len(ids_of(TEXT))})], ids=str
)
def test_what_needs_no_scheduler_ends_at_once(ids: str, fields: dict[str, int]) -> None:
    """No token is wanted, and no logprob, or none is missing."""
    house = House()
    house.pool.handle(
        API,
        Generate(7, ids, Sampling(5), max_new_tokens=0, add_special_tokens=False, **fields),  # type: ignore[arg-type]
    )
    assert house.said(house.scheduler) == []
    (end,) = ends(house.said(API))
    assert end.reason == Reason.LENGTH
    assert house.pool.idle


@pytest.mark.parametrize(("new", "refused"), [(0, False), (1, True)])
def test_a_scored_prompt_may_have_one_token_more(new: int, refused: bool) -> None:
    """The limit on inputs leaves room for a token."""
    house = House()
    ids = pack(INT32, [40] * (LIMITS.max_input_tokens + 1))
    house.pool.handle(API, Generate(7, "", Sampling(5), new, input_ids=ids, prompt_from=0))
    while house.pool.jobs:
        job = house.pool.jobs.popleft()
        house.pool.finished(job.key, job.result())
    assert bool(house.said(house.scheduler)) == (not refused)
    assert bool(ends(house.said(API))) == refused
