"""PromptTokens messages: all prompt tokens once and in order, with text, logprob and start."""

from itertools import pairwise
from typing import Any

import pytest

from tests.tokenizer.harness import API, LIMITS, OTHER, PoolHarness, end_messages, ids_of
from tests.tokenizer.vocabularies import KINDS, byte_level, sentencepiece
from tgi.microkernel.messages.codec import FLOAT32, INT32, pack_column, unpack_float32, unpack_int32
from tgi.microkernel.messages.protocol import (
    Cancel,
    End,
    FinishReason,
    Generate,
    Prompted,
    PromptLogprobs,
    PromptTokens,
    Texts,
)
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.tokenizer import encoder, prompt_logprobs

TEXT = "Hello, world of many tokens 👍🏽 and é"


def scheduler_logprobs(rid: int, logprobs: list[float], tops: int = 0) -> PromptLogprobs:
    """The scheduler's PromptLogprobs."""
    ids = [40 + at for at in range(tops * len(logprobs))]
    return PromptLogprobs(
        rid,
        pack_column(FLOAT32, logprobs),
        pack_column(INT32, ids),
        pack_column(FLOAT32, [-float(number) for number in ids]),
    )


def pieces(messages: list[Any]) -> list[PromptTokens]:
    return [message for message in messages if isinstance(message, PromptTokens)]


def test_first_prompt_token_at_admission_others_with_their_logprobs() -> None:
    harness, vocabulary = PoolHarness(), byte_level()
    ids = ids_of(TEXT)
    add = harness.submit(7, TEXT, prompt_logprobs_from=0, prompt_top_n=2, add_special_tokens=False)
    assert (add.prompt_logprobs_from, add.prompt_top_n) == (1, 2)
    (first,) = pieces(harness.received_by(API))
    assert (first.rid, unpack_int32(first.token_ids), first.texts) == (7, ids[:1], [vocabulary.token_text(ids[0])])
    assert str(unpack_float32(first.logprobs)) == "[nan]"
    assert not first.top_ids
    for begin, end in ((1, 4), (4, len(ids))):
        harness.pool.handle(harness.scheduler, scheduler_logprobs(add.rid, [-at / 4 for at in range(begin, end)], 2))
        (piece,) = pieces(harness.received_by(API))
        assert unpack_int32(piece.token_ids) == ids[begin:end]
        assert unpack_float32(piece.logprobs) == [-at / 4 for at in range(begin, end)]
        assert piece.texts == [vocabulary.token_text(number) for number in ids[begin:end]]
        assert piece.top_texts == [vocabulary.token_text(number) for number in unpack_int32(piece.top_ids)]
        assert len(piece.top_texts) == 2 * (end - begin) == len(unpack_float32(piece.top_logprobs))
        assert len(unpack_int32(piece.char_starts)) == end - begin


def test_prompt_tokens_precede_texts_and_end() -> None:
    harness = PoolHarness()
    add = harness.submit(7, TEXT, prompt_logprobs_from=0)
    other = harness.submit(1, "Hello", api=OTHER)
    harness.received_by(API)
    harness.send_tokens((other.rid, [60]))
    harness.pool.handle(
        harness.scheduler, scheduler_logprobs(add.rid, [-1.0] * (len(unpack_int32(add.prompt_ids)) - 1))
    )
    harness.send_tokens((add.rid, [60]), (other.rid, [61]))
    harness.send_end(add.rid)
    assert [type(message) for message in harness.received_by(API)] == [PromptTokens, Texts, End]
    assert not pieces(harness.received_by(OTHER))


def test_after_reconnect_only_missing_prompt_logprobs_are_requested() -> None:
    harness = PoolHarness()
    add = harness.submit(7, TEXT, prompt_logprobs_from=0)
    harness.pool.handle(harness.scheduler, scheduler_logprobs(add.rid, [-1.0, -2.0]))
    assert sum(len(piece.texts) for piece in pieces(harness.received_by(API))) == 3
    harness.disconnect_scheduler()
    harness.connect_scheduler()
    (again,) = harness.received_by(harness.scheduler)
    assert again.prompt_logprobs_from == 3
    # An api that has received three tokens resumes with another tokenizer.
    third = PoolHarness().submit(9, TEXT, prompt_logprobs_from=3)
    assert third.prompt_logprobs_from == 3
    whole = PoolHarness()
    everything = whole.submit(9, TEXT, prompt_logprobs_from=len(unpack_int32(add.prompt_ids)))
    assert everything.prompt_logprobs_from == len(unpack_int32(add.prompt_ids))
    assert not pieces(whole.received_by(API))


def test_no_prompt_tokens_without_request_or_after_disconnect() -> None:
    harness = PoolHarness()
    assert harness.submit(7, TEXT).prompt_logprobs_from == 0
    asking = harness.submit(8, TEXT, prompt_logprobs_from=0)
    harness.received_by(API)
    harness.pool.handle(API, Cancel(8))
    harness.pool.handle(harness.scheduler, scheduler_logprobs(asking.rid, [-1.0]))
    assert not pieces(harness.received_by(API))


def test_long_prompts_are_split_into_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_logprobs, "MAX_TOKENS_PER_MESSAGE", 4)
    harness = PoolHarness()
    add = harness.submit(7, TEXT, prompt_logprobs_from=0, prompt_top_n=1)
    harness.received_by(API)
    rest = len(unpack_int32(add.prompt_ids)) - 1
    harness.pool.handle(harness.scheduler, scheduler_logprobs(add.rid, [-1.0] * rest, 1))
    found = pieces(harness.received_by(API))
    assert [len(piece.texts) for piece in found[:-1]] == [4] * (len(found) - 1)
    assert sum(len(piece.top_texts) for piece in found) == rest
    assert [number for piece in found for number in unpack_int32(piece.top_ids)] == [40 + at for at in range(rest)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["Hello world", "a  b\n\n c ", "é👍🏽 今天 x", "", " x"])
def test_token_starts(kind: str, text: str) -> None:
    vocabulary = KINDS[kind]()
    found = encoder.encode_prompt(vocabulary, text, True, None, True)
    starts, ids = unpack_int32(found.token_starts), unpack_int32(found.ids)
    assert len(starts) == len(ids) == found.token_count
    assert found._replace(token_starts=b"") == encoder.encode_prompt(vocabulary, text, True, None)
    assert all(0 <= one <= next_one <= len(text) for one, next_one in pairwise(starts))
    assert starts[:1] in ([], [0])
    for at, (begin, end) in enumerate(pairwise([*starts, len(text)])):
        if kind == "byte_level" and end > begin and "\ufffd" not in (piece := vocabulary.token_text(ids[at])):
            assert piece == text[begin:end]


def test_added_special_tokens_have_no_width() -> None:
    plain = encoder.encode_prompt(sentencepiece(), "Hello world", False, None, True)
    added = encoder.encode_prompt(sentencepiece(), "Hello world", True, None, True)
    assert unpack_int32(added.token_starts) == [0, *unpack_int32(plain.token_starts)]
    cut = encoder.encode_prompt(sentencepiece(), "Hello world", True, 2, True)
    assert (unpack_int32(cut.token_starts), unpack_int32(cut.ids)) == (
        unpack_int32(added.token_starts)[-2:],
        unpack_int32(added.ids)[-2:],
    )


def test_prompt_tokens_of_a_chat() -> None:
    harness = PoolHarness(template="{% for message in messages %}{{ message.content }}{% endfor %}")
    chat = b'{"messages":[{"role":"user","content":"Hello"}]}'
    harness.pool.handle(API, Generate(3, "", SamplingParams(1), chat=chat, prompt_logprobs_from=0))
    (first,) = pieces(harness.received_by(API))
    assert unpack_int32(first.token_ids) == ids_of("Hello")[:1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["Hello world", "a  b\n\n c ", "é👍🏽 今天 x", " x"])
def test_prompt_from_ids_has_its_decoded_text(kind: str, text: str) -> None:
    """Special tokens are neither added nor left out; unknown ids have no text."""
    vocabulary = KINDS[kind]()
    plain, unknown = [number for number in ids_of(text, vocabulary) if number not in vocabulary.special_ids], 1000
    ids = [*plain, *sorted(vocabulary.special_ids)[:1], unknown]
    harness = PoolHarness(vocabulary)
    add = harness.submit(7, "", input_ids=pack_column(INT32, ids))
    assert unpack_int32(add.prompt_ids) == ids
    (prompted,) = harness.received_by(API)
    special = [vocabulary.token_text(number) for number in ids[len(plain) : -1]]
    assert prompted.text == vocabulary.tokenizer.decode(plain) + "".join(special)
    assert prompted == Prompted(7, len(ids), len(prompted.text), False, prompted.text)
    assert unpack_int32(harness.submit(8, "", input_ids=pack_column(INT32, ids), truncate=2).prompt_ids) == ids[-2:]

    starts = unpack_int32(encoder.prompt_from_ids(vocabulary, pack_column(INT32, ids), None).token_starts)
    assert len(starts) == len(ids)
    for at, (begin, end) in enumerate(pairwise([*starts, len(prompted.text)])):
        assert 0 <= begin <= end
        if kind == "byte_level" and end > begin and "\ufffd" not in (piece := vocabulary.token_text(ids[at])):
            assert piece == prompted.text[begin:end]


def test_prompt_scoring_without_generation() -> None:
    """The request ends with the last logprob, even if the scheduler disconnects before its End."""
    harness = PoolHarness()
    add = harness.submit(7, TEXT, prompt_logprobs_from=0, max_new_tokens=0)
    rest = len(unpack_int32(add.prompt_ids)) - 1
    assert (add.max_new_tokens, add.prompt_logprobs_from) == (0, 1)
    harness.pool.handle(harness.scheduler, scheduler_logprobs(add.rid, [-1.0]))
    harness.disconnect_scheduler()
    harness.connect_scheduler()
    (again,) = harness.received_by(harness.scheduler)
    assert (again.max_new_tokens, again.prompt_logprobs_from) == (0, 2)
    harness.pool.handle(harness.scheduler, scheduler_logprobs(add.rid, [-1.0] * (rest - 1)))
    harness.disconnect_scheduler()
    received = harness.received_by(API)
    (end,) = end_messages(received)
    assert sum(len(piece.texts) for piece in pieces(received)) == rest + 1
    assert (end.reason, end.text, end.prompt_tokens, end.generated_tokens) == (FinishReason.LENGTH, "", rest + 1, 0)


@pytest.mark.parametrize(
    ("ids", "fields"),
    [(TEXT, {}), ("H", {"prompt_logprobs_from": 0}), (TEXT, {"prompt_logprobs_from": len(ids_of(TEXT))})],
    ids=str,
)
def test_scoring_without_missing_logprobs_ends_at_once(ids: str, fields: dict[str, int]) -> None:
    """With max_new_tokens 0 and no missing logprobs, no Add is sent."""
    harness = PoolHarness()
    harness.pool.handle(
        API,
        Generate(7, ids, SamplingParams(5), max_new_tokens=0, add_special_tokens=False, **fields),  # type: ignore[arg-type]
    )
    assert harness.received_by(harness.scheduler) == []
    (end,) = end_messages(harness.received_by(API))
    assert end.reason == FinishReason.LENGTH
    assert harness.pool.idle


@pytest.mark.parametrize(("new", "refused"), [(0, False), (1, True)])
def test_scored_prompt_may_have_one_more_token(new: int, refused: bool) -> None:
    """max_input_tokens leaves room for one generated token."""
    harness = PoolHarness()
    ids = pack_column(INT32, [40] * (LIMITS.max_input_tokens + 1))
    harness.pool.handle(API, Generate(7, "", SamplingParams(5), new, input_ids=ids, prompt_logprobs_from=0))
    harness.run_jobs()
    assert bool(harness.received_by(harness.scheduler)) == (not refused)
    assert bool(end_messages(harness.received_by(API))) == refused
