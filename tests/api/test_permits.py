"""Permits: which requests are admitted, and Retry-After for the others."""

import json
import time
from typing import Any

import pytest

from tests.api.conftest import READY, Front, Stream, silent, word
from tgi.microkernel.messages.protocol import End, FinishReason, Generate


def until_status(front: Front, wait_ms: int) -> None:
    end = time.monotonic() + 20
    while not all(t.status is not None and t.status.predicted_wait_ms == wait_ms for t in front.router.tokenizers):
        assert time.monotonic() < end
        time.sleep(0.002)


@pytest.mark.parametrize(
    ("wait_ms", "end_ms", "seconds"),
    [(0, 0, 1), (100, 20, 1), (900, 101, 2), (2500, 400, 3), (8000, 1000, 9), (10**9, 10**6, 60)],
)
def test_retry_after_is_the_predicted_wait(serve: Any, wait_ms: int, end_ms: int, seconds: int) -> None:
    front = serve(silent, max_concurrent_requests=1)
    front.tokenizers[0].send(
        READY._replace(queued=3, running=4, predicted_wait_ms=wait_ms, mean_end_interval_ms=end_ms)
    )
    until_status(front, wait_ms)
    stream = Stream(front)
    front.tokenizers[0].next(Generate)
    reply = front.post("/generate", '{"inputs":"x"}')
    assert (reply.status, reply.headers["retry-after"]) == (429, str(seconds))
    stream.disconnect()


def test_several_choices_acquire_all_permits_or_none(serve: Any) -> None:
    front = serve(silent, max_concurrent_requests=4)
    tokenizer = front.tokenizers[0]

    def choices(n: int) -> str:
        return json.dumps({"model": "m", "prompt": "x", "n": n, "max_tokens": 2})

    first = Stream(front, "/v1/completions", choices(3))
    rids = [tokenizer.next(Generate).rid for _ in range(3)]
    assert front.post("/v1/completions", choices(2)).status == 429
    last = Stream(front)  # the failed attempt has not used up the last permit
    rid = tokenizer.next(Generate).rid
    assert front.post("/generate", '{"inputs":"x"}').status == 429
    tokenizer.send(word(rid, 1), End(rid, FinishReason.EOS, "", " 1", 1, 1))
    assert last.read_rest().status == 200
    for one in rids:
        tokenizer.send(word(one, 1), End(one, FinishReason.EOS, "", " 1", 1, 1))
    assert first.read_rest().status == 200
    Stream(front, "/v1/completions", choices(4))
    assert len({tokenizer.next(Generate).rid for _ in range(4)}) == 4


def test_a_broken_rule_returns_the_permit(serve: Any) -> None:
    front = serve(silent, max_concurrent_requests=2)
    for _ in range(5):
        assert front.post("/generate", '{"inputs":""}').status == 422
    streams = [Stream(front), Stream(front)]
    for _ in streams:
        front.tokenizers[0].next(Generate)
    assert front.post("/generate", '{"inputs":"x"}').status == 429


def test_tokenization_needs_no_permit(serve: Any) -> None:
    front = serve(silent, max_concurrent_requests=1)
    stream = Stream(front)
    front.tokenizers[0].next(Generate)
    for _ in range(2):
        Stream(front, "/tokenize").disconnect()
    assert front.post("/generate", '{"inputs":"x"}').status == 429
    stream.disconnect()
    end = time.monotonic() + 20
    while front.router.in_flight:
        assert time.monotonic() < end
        time.sleep(0.002)
    Stream(front)
    front.tokenizers[0].next(Generate)
