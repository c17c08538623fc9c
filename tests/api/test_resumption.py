"""Resumable streams in one front end, with a tokenizer that the test plays."""

from typing import Any

from tests.api.conftest import Stream, request, silent, word
from tgi.microkernel.messages.protocol import DETACHED, Cancel, End, FinishReason, Generate

CHOICES = '{"prompt":"x","n":2,"stream":true}'


def test_a_disconnect_lets_the_tokenizer_continue(serve: Any) -> None:
    front = serve(silent, resume_window=30)
    stream = Stream(front, "/v1/completions", CHOICES)
    asked = [front.tokenizers[0].next(Generate) for _ in range(2)]
    assert len({one.resume_key for one in asked}) == 2
    assert {(one.resume_window_ms, one.resume_limit) for one in asked} == {(30_000, 128)}
    stream.disconnect()
    cancels = [front.tokenizers[0].next(Cancel) for _ in range(2)]
    assert cancels == [Cancel(one.rid, client_lost=True) for one in asked]


def test_the_limit_of_a_key_holds_for_its_abandoned_streams(serve: Any) -> None:
    front = serve(silent, resume_window=30, api_key=("secret requests=3",))
    body = b'{"inputs":"x"}'
    head = {"content-type": "application/json", "content-length": str(len(body)), "authorization": "Bearer secret"}
    with front.connect() as connection:
        connection.sendall(request("POST", "/generate_stream", body, head))
        assert front.tokenizers[0].next(Generate).resume_limit == 3


def test_what_is_not_streamed_cannot_be_resumed(serve: Any) -> None:
    front = serve(silent, resume_window=30)
    stream = Stream(front, "/generate")
    assert front.tokenizers[0].next(Generate).resume_key == b""
    stream.disconnect()


def test_a_stream_that_is_taken_over_leaves_its_other_choices_running(serve: Any) -> None:
    """The later request takes them over too, maybe a moment later, since another tokenizer may have them."""
    front = serve(silent, resume_window=30)
    stream = Stream(front, "/v1/completions", CHOICES)
    first, second = (front.tokenizers[0].next(Generate).rid for _ in range(2))
    front.tokenizers[0].send(word(first, 1), word(second, 1))
    stream.read_until(b'"index":1')
    front.tokenizers[0].send(End(first, FinishReason.CANCELLED, DETACHED))
    assert front.tokenizers[0].next(Cancel) == Cancel(second, client_lost=True)
    assert b'"error_type":"taken_over"' in stream.read_rest().body


def test_a_stream_that_is_taken_over_before_its_first_token_is_not_a_fault_of_the_server(serve: Any) -> None:
    front = serve(silent, resume_window=30)
    stream = Stream(front, "/generate_stream")
    front.tokenizers[0].send(End(front.tokenizers[0].next(Generate).rid, FinishReason.CANCELLED, DETACHED))
    reply = stream.read_rest()
    assert (reply.status, b'"error_type":"taken_over"' in reply.body) == (410, True)


def test_a_failed_choice_ends_the_others(serve: Any) -> None:
    front = serve(silent, resume_window=30)
    stream = Stream(front, "/v1/completions", CHOICES)
    first, second = (front.tokenizers[0].next(Generate).rid for _ in range(2))
    front.tokenizers[0].send(End(first, FinishReason.FAILED, "x"))
    assert front.tokenizers[0].next(Cancel) == Cancel(second)
    assert stream.read_rest().status == 424


def test_the_same_seeds_and_keys_follow_from_an_event_id(serve: Any) -> None:
    front = serve(silent, resume_window=30)
    stream = Stream(front, "/v1/completions", CHOICES)
    first = [front.tokenizers[0].next(Generate) for _ in range(2)]
    front.tokenizers[0].send(word(first[0].rid, 1))
    stream.read_until(b"\n\n")
    event_id = stream.raw.split(b"\nid: ")[1].split(b"\n")[0].decode()
    stream.disconnect()
    head = {"content-type": "application/json", "content-length": str(len(CHOICES)), "last-event-id": event_id}
    with front.connect() as connection:
        connection.sendall(request("POST", "/v1/completions", CHOICES.encode(), head))
        again = [front.tokenizers[0].next(Generate) for _ in range(2)]
    for one, other in zip(first, again, strict=True):
        assert (one.resume_key, one.sampling, other.resume_ids) == (other.resume_key, other.sampling, b"")
