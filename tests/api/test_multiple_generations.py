"""Requests with several generations: failures, slow ones, disconnects, permits."""

import json
from typing import Any

import pytest

from tests.api.conftest import Front, Stream, openai_error, silent, texts
from tgi.api import sse
from tgi.microkernel.messages.protocol import Cancel, End, FinishReason, Generate

TWO = '{"prompt":["a","b"],"seed":1%s}'


def asked(front: Front, count: int) -> list[int]:
    return [front.tokenizers[0].next(Generate).rid for _ in range(count)]


def done(rid: int, text: str) -> list[Any]:
    return [texts(rid, (1, text, -0.5, False)), End(rid, FinishReason.LENGTH, "", text, 1, 1)]


def test_choices_of_a_prompt_share_its_seed(serve: Any) -> None:
    front = serve(silent)
    stream = Stream(front, "/v1/completions", '{"prompt":["a","b"],"n":2,"stream":true}')
    orders = [front.tokenizers[0].next(Generate) for _ in range(4)]
    assert [order.inputs for order in orders] == ["a", "a", "b", "b"]
    assert [order.sampling.choice for order in orders] == [0, 1, 0, 1]
    seeds = [order.sampling.seed for order in orders]
    assert seeds[0] == seeds[1]
    assert seeds[2] == seeds[3]
    assert all(order.hide_stop for order in orders)
    stream.disconnect()


def test_best_of_uses_different_seeds(serve: Any) -> None:
    front = serve(silent, max_best_of=3)
    stream = Stream(front, "/generate", '{"inputs":"a","parameters":{"best_of":3,"do_sample":true,"details":true}}')
    orders = [front.tokenizers[0].next(Generate) for _ in range(3)]
    assert len({order.sampling.seed for order in orders}) == 3
    for order, logprob in zip(orders, (-2.0, -0.5, -1.0), strict=True):
        rid = order.rid
        front.tokenizers[0].send(
            texts(rid, (1, f"{logprob}", logprob, False)), End(rid, FinishReason.LENGTH, "", f"{logprob}", 1, 1)
        )
    answer = json.loads(stream.read_rest().body)
    assert answer["generated_text"] == "-0.5"
    assert answer["details"]["seed"] == orders[1].sampling.seed
    assert [other["generated_text"] for other in answer["details"]["best_of_sequences"]] == ["-1.0", "-2.0"]
    assert front.router.in_flight == 0


def test_choices_of_a_streamed_chat_open_in_order(serve: Any) -> None:
    """Regardless of which has its first token first."""
    front = serve(silent)
    stream = Stream(front, "/v1/chat/completions", '{"messages":[],"n":3,"stream":true}')
    rids = asked(front, 3)
    front.tokenizers[0].send(*done(rids[2], "c"))
    stream.read_until(b'"c"')
    front.tokenizers[0].send(*done(rids[0], "a"), *done(rids[1], "b"))
    body = stream.read_rest().body
    events = [json.loads(part.removeprefix(b"data: ")) for part in body.split(b"\n\n")[:-2]]
    choices = [event["choices"][0] for event in events]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 2, 0, 1]
    assert [choice["delta"].get("role") for choice in choices] == ["assistant"] * 3 + [None] * 3
    assert [choice["delta"]["content"] for choice in choices] == ["", "", "", "c", "a", "b"]
    assert [choice["finish_reason"] for choice in choices] == [None] * 3 + ["length"] * 3
    assert body.endswith(b"data: [DONE]\n\n")


def test_a_failed_prompt_cancels_the_others(serve: Any) -> None:
    front = serve(silent)
    stream = Stream(front, "/v1/completions", TWO % "")
    first, second = asked(front, 2)
    front.tokenizers[0].send(End(second, FinishReason.INVALID, "too long"))
    reply = stream.read_rest()
    assert reply.status == 422
    assert json.loads(reply.body) == openai_error(422, "validation", "Input validation error: too long")
    assert front.tokenizers[0].next(Cancel).rid == first
    assert front.router.in_flight == 0


def test_a_failed_prompt_ends_the_stream(serve: Any) -> None:
    front = serve(silent)
    stream = Stream(front, "/v1/completions", TWO % ',"stream":true')
    first, second = asked(front, 2)
    front.tokenizers[0].send(texts(first, (1, "x", -0.5, False)))
    stream.read_until(b'"x"')
    front.tokenizers[0].send(End(second, FinishReason.FAILED, "broken"))
    body = stream.read_rest().body
    *_, event, done, _ = body.split(b"\n\n")
    expected = openai_error(424, "generation", "Request failed during generation: broken")
    expected["error"]["http_status_code"] = 424
    assert (json.loads(event.removeprefix(b"data: ")), done) == (expected, b"data: [DONE]")
    assert front.tokenizers[0].next(Cancel).rid == first
    assert front.router.in_flight == 0


def test_disconnect_cancels_all_generations(serve: Any) -> None:
    for more in ("", ',"stream":true'):
        front = serve(silent)
        stream = Stream(front, "/v1/completions", TWO % more)
        rids = asked(front, 2)
        stream.disconnect()
        assert [front.tokenizers[0].next(Cancel).rid for _ in rids] == rids
        front.until_ready()
        assert front.router.in_flight == 0
        front.stop()


def test_a_request_acquires_all_permits_or_none(serve: Any) -> None:
    front = serve(silent, max_concurrent_requests=3)
    stream = Stream(front, "/v1/completions", TWO % "")
    asked(front, 2)
    refused = front.post("/v1/completions", '{"prompt":["a","b"]}')
    assert refused.status == 429
    assert refused.headers["retry-after"].isdecimal()
    one = Stream(front, "/generate")
    asked(front, 1)
    stream.disconnect()
    one.disconnect()


def test_more_generations_than_permits_exist_is_a_422(serve: Any) -> None:
    front = serve(max_concurrent_requests=3)
    refused = front.post("/v1/completions", '{"prompt":["a","b"],"n":2}')
    assert refused.status == 422
    text = "Input validation error: at most 3 texts can be generated at once. Given: 4"
    assert json.loads(refused.body) == openai_error(422, "validation", text)


def test_choices_times_the_length_of_the_prompt_are_bounded(serve: Any) -> None:
    """Each choice has the prompt in a message of its own."""
    front = serve(payload_limit=1000)
    for body in (
        {"prompt": "x" * 900},
        {"prompt": [7] * 225},
        {"prompt": "x", "response_format": {"type": "regex", "value": "x" * 887}},
    ):
        assert front.post("/v1/completions", json.dumps(body | {"n": 17})).status == 200
        refused = front.post("/v1/completions", json.dumps(body | {"n": 18}))
        text = "Input validation error: the texts of all choices together must have <= 16000 bytes. Given: 16200. "
        assert json.loads(refused.body) == openai_error(422, "validation", f"{text}Ask for fewer at once", "n")


def test_a_slow_choice_does_not_delay_the_others(serve: Any) -> None:
    front = serve(silent)
    stream = Stream(front, "/v1/completions", TWO % ',"stream":true,"stream_options":{"include_usage":true}')
    first, second = asked(front, 2)
    front.tokenizers[0].send(*done(second, "y"))
    stream.read_until(b'"y"')
    front.tokenizers[0].send(*done(first, "x"))
    events = [json.loads(part.removeprefix(b"data: ")) for part in stream.read_rest().body.split(b"\n\n")[:-2]]
    assert [[choice["index"] for choice in event["choices"]] for event in events] == [[1], [0], []]
    counts = {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}
    assert events[-1]["usage"] == counts | {"prompt_tokens_details": {"cached_tokens": 0}}


@pytest.mark.parametrize("counts", [(768, 768), (128, 768)])
def test_a_backlog_is_written_in_bounded_chunks(serve: Any, counts: tuple[int, int]) -> None:
    """Thousands of unread tokens for one client are written in chunks, between which other tasks run. One may end in a
    chunk that has more of the other."""
    front = serve(silent)
    stream = Stream(front, "/v1/completions", TWO % ',"stream":true')
    rids = asked(front, 2)
    for rid, count in zip(rids, counts, strict=True):
        tokens = [(k, "x", -0.5, False) for k in range(count)]
        front.tokenizers[0].send(texts(rid, *tokens), End(rid, FinishReason.LENGTH, "", "x" * count, 1, count))
    reply = stream.read_rest()
    events = [json.loads(part.removeprefix(b"data: ")) for part in reply.body.split(b"\n\n")[:-2]]
    for index, count in enumerate(counts):
        choices = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in choices) == "x" * count
        assert [choice["finish_reason"] for choice in choices[-2:]] == [None, "length"]
    assert max(chunk.count(b"data: ") for chunk in reply.chunks) <= sse.MAX_EVENTS_PER_WRITE + 1  # and [DONE]
