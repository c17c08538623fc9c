"""TokenizerPool: prompts to Add, Tokens to Texts, and one End for each Generate."""

import json
from typing import Any

import pytest

from tests.tokenizer.harness import (
    API,
    EOS,
    LIMITS,
    OTHER,
    READY,
    PoolHarness,
    end_messages,
    hello,
    ids_of,
    streamed_output,
)
from tgi.microkernel.links.link import PeerDisconnected, PeerId
from tgi.microkernel.messages.codec import unpack_int32
from tgi.microkernel.messages.protocol import (
    Cancel,
    End,
    FinishReason,
    Generate,
    RequestContext,
    Status,
    Texts,
    Tokenize,
    Tokenized,
    decode,
)
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.tokenizer.encoding_jobs import MAX_INLINE_SIZE

TOGETHER = "`inputs` tokens + `max_new_tokens` must be <= 2048. Given: "


def test_request_from_prompt_to_end() -> None:
    harness = PoolHarness()
    add = harness.submit(70, "Hello", context=RequestContext(traceparent="t"))
    assert unpack_int32(add.prompt_ids) == ids_of("Hello")
    assert unpack_int32(add.stop_ids) == [EOS]
    assert (add.max_new_tokens, add.resume_ids, add.context.traceparent) == (2048 - len(ids_of("Hello")), b"", "t")
    assert decode(add.sampling) == SamplingParams(5, temperature=0.5)
    answer = ids_of("Größe 👍🏽!")
    for number in answer:
        harness.send_tokens((add.rid, [number]))
    harness.send_tokens((add.rid, [EOS]))
    harness.send_end(add.rid, FinishReason.EOS)
    received = harness.received_by(API)
    assert [type(message) for message in received] == [Texts, Texts, End]  # the last token with its End
    assert streamed_output(received, 70) == ([*answer, EOS], "Größe 👍🏽!<|eos|>")
    assert [*received[0].special, *received[1].special] == [0] * len(answer) + [1]
    assert received[2] == End(70, FinishReason.EOS, "", "Größe 👍🏽!", 5, len(answer) + 1, 16, 1000, 30, 70)
    assert harness.pool.idle


def test_several_apis_and_requests_in_one_step() -> None:
    harness = PoolHarness()
    one, two = harness.submit(1), harness.submit(1, api=OTHER)
    three = harness.submit(2)
    assert len({one.rid, two.rid, three.rid}) == 3
    harness.send_tokens((one.rid, ids_of("a")), (two.rid, ids_of("b")), (three.rid, ids_of("c d")))
    harness.send_end(three.rid)
    at_api, at_other = harness.received_by(API), harness.received_by(OTHER)
    assert [type(message) for message in at_api] == [Texts, End]
    assert (streamed_output(at_api, 1)[1], streamed_output(at_api, 2)[1], streamed_output(at_other, 1)[1]) == (
        "a",
        "c d",
        "b",
    )
    assert [type(message) for message in at_other] == [Texts]


@pytest.mark.parametrize(
    ("n_in", "asked", "expected"),
    [
        (10, 5, 5),
        (10, None, 2038),
        (10, 5000, 2038),
        (1024, 1024, 1024),
        (2000, None, 48),
        (1025, 1024, TOGETHER + "1025 `inputs` tokens and 1024 `max_new_tokens`"),
        (1025, 9999, TOGETHER + "1025 `inputs` tokens and 1024 `max_new_tokens`"),
        (2001, 100, TOGETHER + "2001 `inputs` tokens and 100 `max_new_tokens`"),
        (2001, 10, "`inputs` must have less than 2000 tokens. Given: 2001"),
        (2048, None, "`inputs` must have less than 2000 tokens. Given: 2048"),
        (2049, None, TOGETHER + "2049 `inputs` tokens and 0 `max_new_tokens`"),
    ],
)  # fmt: skip
def test_limits(n_in: int, asked: int | None, expected: int | str) -> None:
    harness = PoolHarness()
    text = "\n" * n_in
    if len(ids_of(text)) != n_in:
        text = "<|pad|>" * n_in
    harness.pool.handle(API, Generate(1, text, SamplingParams(1), asked))
    adds, received = harness.received_by(harness.scheduler), harness.received_by(API)
    if isinstance(expected, int):
        assert [add.max_new_tokens for add in adds] == [expected]
        assert received == []
    else:
        assert adds == []
        assert [(end.rid, end.reason, end.message) for end in received] == [(1, FinishReason.INVALID, expected)]
        assert harness.pool.idle


def test_truncate_counts_before_the_limits() -> None:
    add = PoolHarness().submit(1, "<|pad|>" * 1000 + "x", truncate=3)
    assert unpack_int32(add.prompt_ids) == [0, 0, *ids_of("x")]


def test_empty_and_undecodable_prompts_are_rejected() -> None:
    harness = PoolHarness()
    for inputs, text in (("", "cannot be empty"), ("\ud800", "tokenizer error")):
        harness.pool.handle(API, Generate(1, inputs, SamplingParams(1)))
        (end,) = harness.received_by(API)
        assert end.reason == FinishReason.INVALID
        assert text in end.message


def test_requests_wait_for_the_limits_and_for_the_scheduler() -> None:
    harness = PoolHarness(scheduler=False)
    harness.pool.handle(API, Generate(1, "a", SamplingParams(1)))
    harness.pool.handle(API, Generate(2, "b", SamplingParams(1)))
    harness.pool.handle(API, Cancel(2))
    assert [(end.rid, end.reason) for end in harness.received_by(API)] == [(2, FinishReason.CANCELLED)]
    harness.connect_scheduler()
    assert harness.received_by(harness.scheduler) == []
    harness.pool.handle(harness.scheduler, Status(False, True, "loading weights", 40))
    assert harness.received_by(harness.scheduler) == []
    harness.pool.handle(harness.scheduler, READY)
    (add,) = harness.received_by(harness.scheduler)
    assert unpack_int32(add.prompt_ids) == ids_of("a")


def test_status_is_forwarded_and_reports_a_lost_scheduler() -> None:
    harness = PoolHarness(scheduler=False)
    harness.connect_scheduler()
    harness.pool.handle(harness.scheduler, READY)
    assert harness.received_by(API) == harness.received_by(OTHER) == [READY]
    harness.disconnect_scheduler()
    (status,) = harness.received_by(API)
    assert (status.ready, status.stage, status.limits) == (False, "waiting for the scheduler", LIMITS)
    late = PeerId("api", 2, b"c")
    harness.pool.handle(late, hello(late))
    assert harness.received_by(late) == [status]


# Encoding


def test_long_texts_become_jobs_without_blocking_others() -> None:
    harness = PoolHarness()
    long = "a b é " * MAX_INLINE_SIZE  # of which no lower bound on the tokens is known
    harness.pool.handle(API, Generate(1, long, SamplingParams(1), truncate=9))
    harness.pool.handle(API, Tokenize(2, long))
    harness.pool.handle(API, Generate(3, long, SamplingParams(1)))
    harness.pool.handle(API, Generate(4, long, SamplingParams(1)))
    harness.pool.handle(API, Cancel(3))
    harness.pool.handle(OTHER, Generate(1, long, SamplingParams(1)))
    harness.pool.handle(OTHER, Tokenize(2, long))
    harness.pool.handle(OTHER, PeerDisconnected())
    assert harness.submit(5)
    assert [end.rid for end in end_messages(harness.received_by(API))] == [3]
    assert len(harness.run_jobs()) == 3
    (add,) = harness.received_by(harness.scheduler)
    assert len(unpack_int32(add.prompt_ids)) == 9
    tokenized, refused = harness.received_by(API)
    assert isinstance(tokenized, Tokenized)
    assert unpack_int32(tokenized.byte_stops)[-1] == len(long.encode())
    assert (refused.rid, refused.reason) == (4, FinishReason.INVALID)


def test_tokenize() -> None:
    harness = PoolHarness()
    harness.pool.handle(API, Tokenize(8, "é<|eos|>"))
    harness.pool.handle(API, Tokenize(9, "\ud800"))
    good, bad = harness.received_by(API)
    assert (good.rid, unpack_int32(good.token_ids)[-1], unpack_int32(good.byte_stops)[-1], good.special[-1]) == (
        8,
        EOS,
        9,
        1,
    )
    assert bad.error.startswith("tokenizer error")


def test_unexpected_messages_are_ignored(caplog: pytest.LogCaptureFixture) -> None:
    harness = PoolHarness()
    harness.pool.handle(API, READY)
    harness.pool.handle(harness.scheduler, Generate(1, "x", SamplingParams(1)))
    harness.send_end(99)
    harness.send_tokens((99, [1]))
    assert harness.received_by(API) == harness.received_by(harness.scheduler) == []
    # An End may cross a Cancel. The second complaint follows too soon to be logged.
    assert [record.getMessage() for record in caplog.records] == [f"ignored a Status from {API}"]


THINKS = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n"


@pytest.mark.parametrize(
    ("template", "fields", "expected"),
    [
        (THINKS, {"thinking_budget": 7}, (7, "", "</think>")),
        (THINKS, {"reasoning_effort": "medium"}, (20, "", "</think>")),
        (THINKS + "{# reasoning_effort #}{% if reasoning_effort %}{% endif %}", {"reasoning_effort": "low"}, None),
        (THINKS, {"reasoning_effort": "max"}, None),
        (THINKS, {}, None),
        (THINKS.replace("<think>\n", "{# </think> #}"), {"thinking_budget": 7}, (7, "<think>", "</think>")),
        (THINKS.replace("<think>\n", ""), {"thinking_budget": 7}, None),
        (
            THINKS.replace("<think>\n", "{# <|start|><|channel|><|message|> #}"),
            {"thinking_budget": 0},
            (0, "<|channel|>analysis<|message|>", "<|end|>"),
        ),
    ],
)
def test_budgets_of_reasoning_reach_the_worker(
    template: str, fields: dict[str, Any], expected: tuple[int, str, str] | None
) -> None:
    harness = PoolHarness(template=template)
    chat = json.dumps({"messages": [{"role": "user", "content": "Hi"}], **fields}).encode()
    sampling = decode(harness.submit(1, "", chat=chat, max_new_tokens=40).sampling)
    if expected is None:
        assert not sampling.reasoning_close_ids
        return
    budget, opening, close = expected
    assert sampling.reasoning_budget == budget
    assert unpack_int32(sampling.reasoning_open_ids) == ids_of(opening)
    assert unpack_int32(sampling.reasoning_close_ids) == ids_of(close)
    assert sampling.reasoning_repeats == opening.startswith("<|channel|>")
