"""Tokenizers that are connected but do not respond: their requests move to another one, without a token twice."""

import re
import time
from typing import Any

from tests.api.conftest import READY, Stream, events, silent, texts, word
from tgi.microkernel.links.liveness import BEAT_SECONDS
from tgi.microkernel.messages.codec import unpack_int32
from tgi.microkernel.messages.protocol import Beat, Cancel, End, FinishReason, Generate, LastExit


def until(condition: Any) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_request_moves_from_a_silent_tokenizer_to_another(serve: Any) -> None:
    front = serve(silent, validation_workers=2)
    connections = front.router.tokenizers
    stream = Stream(front)
    until(lambda: any(one.requests for one in connections))
    hung = next(index for index, one in enumerate(connections) if one.requests)
    stopped, living = front.tokenizers[hung], front.tokenizers[1 - hung]
    first = stopped.next(Generate)
    stopped.send(Beat(None), word(first.rid, 1))
    stream.read_until(b'"index":1')
    again = living.next(Generate, timeout=30)  # after four ticks without a beat
    assert unpack_int32(again.resume_ids) == [1]
    assert stopped.next(Cancel).rid == first.rid
    assert front.get("/health").status == 200
    stopped.send(Beat(None), word(first.rid, 99), End(first.rid, FinishReason.CANCELLED))  # it continues
    until(lambda: not connections[hung].silent)
    assert not connections[hung].requests
    living.send(
        word(again.rid, 2), texts(again.rid, (3, " 3", -0.5, False)), End(again.rid, FinishReason.LENGTH, "", " 1 2 3")
    )
    assert [event["token"]["id"] for event in events(stream.read_rest())] == [1, 2, 3]


def test_a_superseded_request_is_submitted_again(serve: Any) -> None:
    """The request has resumed a stream whose first front end had submitted it through another tokenizer as well."""
    front = serve(silent, resume_window=30)
    stream = Stream(front)
    first = front.tokenizers[0].next(Generate)
    front.tokenizers[0].send(word(first.rid, 1), End(first.rid, FinishReason.CANCELLED))
    again = front.tokenizers[0].next(Generate)
    assert (again.context.attempt, unpack_int32(again.resume_ids)) == (2, [1])
    front.tokenizers[0].send(word(again.rid, 2), End(again.rid, FinishReason.LENGTH, "", " 1 2"))
    assert re.findall(rb'"token":{"id":(\d+)', stream.read_rest().body) == [b"1", b"2"]


def test_health_fails_if_all_tokenizers_are_silent_and_requests_wait(serve: Any) -> None:
    front = serve(silent)
    tokenizer = front.tokenizers[0]
    tokenizer.send(Beat(None))
    until(lambda: front.get("/health").status == 503)
    assert front.get("/health").headers["x-startup-stage"] == "the tokenizers do not respond"
    stream = Stream(front)
    time.sleep(2 * BEAT_SECONDS)
    assert front.router.in_flight == 1
    tokenizer.send(Beat(None))
    tokenizer.next(Generate, timeout=30)
    stream.disconnect()
    assert front.get("/health").status == 200


def test_health_fails_while_no_request_makes_progress(serve: Any) -> None:
    """A tokenizer that turns its loop, but has lost the request."""
    front = serve(silent, stall_limit=1.0)
    stream = Stream(front)
    rid = front.tokenizers[0].next(Generate).rid
    until(lambda: front.get("/health").status == 503)
    assert front.get("/health").headers["x-startup-stage"] == "no request makes progress"
    front.tokenizers[0].send(READY, word(rid, 1))
    until(lambda: front.get("/health").status == 200)
    front.tokenizers[0].send(End(rid, FinishReason.LENGTH, "", " 1"))
    stream.read_rest()


def test_what_a_silent_tokenizer_has_in_progress_waits_for_its_end(serve: Any) -> None:
    """It may be what the tokenizer hangs in, and must not hang another one before that is known."""
    front = serve(silent, validation_workers=2)
    connections = front.router.tokenizers
    streams = [Stream(front, "/generate", f'{{"inputs":"{name}"}}') for name in "abcd"]
    until(lambda: all(len(one.requests) == 2 for one in connections))
    hung, living = front.tokenizers
    suspect, moved = hung.next(Generate), hung.next(Generate)
    living.next(Generate), living.next(Generate)
    boot = hung.boot
    front.router.assignments.work_in_progress = lambda peer: suspect.context.fingerprint if peer.boot == boot else b""
    hung.send(Beat(None))
    assert living.next(Generate, timeout=30).inputs == moved.inputs
    until(lambda: connections[0].silent)
    assert [one.context.fingerprint for one in connections[0].requests.values()] == [suspect.context.fingerprint]
    hung.stop()
    hung.last_exit = LastExit(boot, "made no progress and was killed", False, suspect.context.fingerprint)
    hung.start()
    again = living.next(Generate)
    assert (again.inputs, again.alone) == (suspect.inputs, True)
    for stream in streams:
        stream.disconnect()
