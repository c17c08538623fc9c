"""ResumableStreams between a pool and two apis that the test plays."""

from typing import Any

import pytest

from tests.tokenizer.harness import API, OTHER, PoolHarness, hello, ids_of, streamed_output
from tgi.microkernel.links.link import PeerDisconnected, PeerId
from tgi.microkernel.messages.codec import INT32, pack_column
from tgi.microkernel.messages.protocol import (
    DETACHED,
    Add,
    Cancel,
    End,
    FetchImage,
    FinishReason,
    Generate,
    ImageChunk,
    PromptLogprobs,
    PromptTokens,
    RequestContext,
    Status,
    Texts,
)
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.tokenizer import resumable_streams
from tgi.tokenizer.resumable_streams import ResumableStreams

WORDS = ids_of("one two three four")
KEY = b"k" * 16


class StreamsHarness(PoolHarness):
    """As PoolHarness, with the streams in between."""

    def __init__(self) -> None:
        super().__init__()
        self.time = 0.0
        self.streams = ResumableStreams(self.pool.handle, lambda: self.time)

    def collect_outgoing(self) -> None:
        for peer, message in self.streams.forward(self.pool.drain_outgoing()):
            self.sent.setdefault(peer, []).append(message)

    def generate(self, api: PeerId, rid: int, key: bytes = KEY, **fields: Any) -> None:
        message = Generate(rid, "one two three", SamplingParams(5), resume_key=key, resume_window_ms=10_000, **fields)
        self.streams.receive(api, message)

    def start(self, api: PeerId, rid: int, key: bytes = KEY, **fields: Any) -> Add:
        """A new request. Returns what the scheduler receives."""
        self.generate(api, rid, key, **fields)
        (add,) = self.received_by(self.scheduler)
        assert isinstance(add, Add)
        return add

    def wait(self, seconds: float) -> None:
        self.time += seconds
        self.streams.drop_expired()


@pytest.fixture
def harness() -> StreamsHarness:
    return StreamsHarness()


def cancelled(rid: int) -> End:
    return End(rid, FinishReason.CANCELLED, DETACHED)


@pytest.mark.parametrize("loss", ["client", "api", "unnoticed"])
def test_another_api_takes_a_stream_over(harness: StreamsHarness, loss: str) -> None:
    add = harness.start(API, 7)
    for word in WORDS[:2]:
        harness.send_tokens((add.rid, [word]))
    assert streamed_output(harness.received_by(API), 7)[0] == WORDS[:2]
    if loss == "client":
        harness.streams.receive(API, Cancel(7, client_lost=True))
        assert harness.received_by(API) == [cancelled(7)]
    elif loss == "api":
        harness.streams.receive(API, PeerDisconnected())
    harness.send_tokens((add.rid, WORDS[2:3]))
    if loss != "unnoticed":
        assert harness.received_by(API) == []
    harness.wait(9)
    harness.generate(OTHER, 3)
    harness.send_tokens((add.rid, WORDS[3:4]))  # in the same turn of the loop
    harness.send_end(add.rid)
    received = harness.received_by(OTHER)
    assert streamed_output(received, 3)[0] == WORDS[:4]
    assert isinstance(received[-1], End)
    assert (received[-1].rid, received[-1].generated_tokens) == (3, 4)
    assert harness.received_by(harness.scheduler) == []
    if loss == "unnoticed":
        assert harness.received_by(API)[-1] == cancelled(7)


def test_an_api_that_was_silent_does_not_take_a_stream_back(harness: StreamsHarness) -> None:
    """The client has resumed it at another api. The silent one continues, and submits its requests again."""
    add = harness.start(API, 7)
    harness.send_tokens((add.rid, WORDS[:1]))
    harness.received_by(API)
    harness.streams.receive(API, PeerDisconnected())
    harness.generate(OTHER, 3)
    harness.streams.receive(API, hello(API))
    harness.generate(API, 8, context=RequestContext(attempt=2), resume_ids=pack_column(INT32, WORDS[:1]))
    assert cancelled(8) in harness.received_by(API)
    harness.send_tokens((add.rid, WORDS[1:]))
    harness.send_end(add.rid)
    assert streamed_output(harness.received_by(OTHER), 3)[0] == WORDS
    assert harness.received_by(harness.scheduler) == []


def test_a_finished_stream_is_kept_for_its_window(harness: StreamsHarness) -> None:
    add = harness.start(API, 7)
    harness.send_tokens((add.rid, WORDS))
    harness.send_end(add.rid)
    whole = harness.received_by(API)
    for _ in range(3):
        harness.wait(9)
        harness.generate(OTHER, 8)
        again = harness.received_by(OTHER)
        assert again == [m._replace(rid=8) if isinstance(m, End) else m._replace(rids=b"\x08\0\0\0") for m in whole]
    harness.wait(11)
    assert harness.start(OTHER, 9).rid != add.rid  # forgotten: generated again


def test_a_stream_that_went_on_elsewhere_is_not_kept(harness: StreamsHarness) -> None:
    """The api has lost the connection, and submitted the request again through another tokenizer. The scheduler ends
    the submission that came through this one."""
    add = harness.start(API, 7)
    harness.streams.receive(API, PeerDisconnected())
    harness.pool.handle(harness.scheduler, End(add.rid, FinishReason.CANCELLED))
    harness.collect_outgoing()
    harness.streams.receive(API, hello(API))
    assert harness.start(API, 8).rid != add.rid
    assert not [one for one in harness.received_by(API) if isinstance(one, End)]


def test_an_abandoned_request_is_cancelled(harness: StreamsHarness) -> None:
    add = harness.start(API, 7)
    harness.streams.receive(API, PeerDisconnected())
    harness.wait(9.9)
    assert harness.received_by(harness.scheduler) == []
    assert not harness.pool.idle
    harness.wait(0.2)
    assert harness.received_by(harness.scheduler) == [Cancel(add.rid)]
    harness.send_end(add.rid, FinishReason.CANCELLED)
    assert harness.pool.idle


def test_a_cancel_for_another_reason_ends_the_request(harness: StreamsHarness) -> None:
    add = harness.start(API, 7)
    harness.streams.receive(API, Cancel(7))
    assert harness.received_by(API) == [cancelled(7)]
    assert harness.received_by(harness.scheduler) == [Cancel(add.rid)]


def test_an_api_that_has_a_part_gets_no_part_twice(harness: StreamsHarness) -> None:
    """It resubmits with the ids that it has, so what was kept would repeat them."""
    add = harness.start(API, 7)
    harness.send_tokens((add.rid, WORDS[:2]))
    ids = harness.received_by(API)[0].token_ids
    harness.streams.receive(API, PeerDisconnected())
    harness.pool.handle(API, hello(API))
    harness.generate(API, 8, resume_ids=ids)
    cancel, again = harness.received_by(harness.scheduler)
    assert (cancel, again.resume_ids) == (Cancel(add.rid), ids)
    harness.send_tokens((again.rid, WORDS[2:3]))
    assert streamed_output(harness.received_by(API), 8)[0] == WORDS[2:3]
    # This tokenizer has no first messages any more, so a client that comes back gets the answer generated anew.
    harness.streams.receive(API, PeerDisconnected())
    harness.generate(OTHER, 3)
    cancel, anew = harness.received_by(harness.scheduler)
    assert (cancel, anew.resume_ids) == (Cancel(again.rid), b"")


def test_messages_about_an_earlier_stream_do_not_reach_the_next_one(harness: StreamsHarness) -> None:
    """Of the same key, with tokens that arrive in the turn of the loop in which the stream is replaced."""
    add = harness.start(API, 7, prompt_logprobs_from=0)
    harness.received_by(API)
    count = len(add.prompt_ids) // 4 - 1
    harness.pool.handle(harness.scheduler, PromptLogprobs(add.rid, bytes(4 * count)))
    harness.streams.receive(API, Cancel(7))
    harness.generate(OTHER, 3, prompt_logprobs_from=0)
    again = harness.received_by(harness.scheduler)[-1]
    harness.pool.handle(harness.scheduler, PromptLogprobs(again.rid, bytes(4 * count)))
    received = [message for message in harness.received_by(OTHER) if isinstance(message, PromptTokens)]
    assert sum(len(message.texts) for message in received) == count + 1


def test_other_requests_pass_unchanged(harness: StreamsHarness) -> None:
    harness.streams.receive(API, Generate(7, "Hello", SamplingParams(5)))
    (add,) = harness.received_by(harness.scheduler)
    harness.send_tokens((add.rid, WORDS[:1]))
    (texts,) = harness.received_by(API)
    assert isinstance(texts, Texts)
    harness.streams.receive(API, PeerDisconnected())
    assert harness.received_by(harness.scheduler) == [Cancel(add.rid)]


def test_a_cancelled_stream_that_takes_too_much_memory_is_forgotten_once(
    harness: StreamsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resumable_streams, "MAX_DETACHED_BYTES", 0)
    add = harness.start(API, 7)
    harness.send_tokens((add.rid, WORDS))
    harness.pool.handle(harness.scheduler, End(add.rid, FinishReason.CANCELLED))
    assert isinstance(harness.received_by(API)[-1], End)
    assert harness.start(OTHER, 8).rid != add.rid


def test_abandoned_streams_are_bounded(harness: StreamsHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable_streams, "MAX_DETACHED", 3)
    rids = [harness.start(API, number, b"%016d" % number).rid for number in range(1, 6)]
    harness.streams.receive(API, PeerDisconnected())
    assert harness.received_by(harness.scheduler) == [Cancel(rid) for rid in rids[:2]]
    monkeypatch.setattr(resumable_streams, "MAX_DETACHED_BYTES", 1000)
    harness.generate(OTHER, 1, b"%016d" % 5)
    harness.send_tokens((rids[4], WORDS * 200))
    assert harness.received_by(OTHER)
    harness.streams.receive(OTHER, Cancel(1, client_lost=True))
    assert harness.received_by(harness.scheduler) == [Cancel(rid) for rid in rids[2:]]


@pytest.mark.parametrize(("limit", "value"), [("MAX_DETACHED", 3), ("MAX_DETACHED_BYTES", 60_000)])
def test_a_client_with_many_abandoned_streams_evicts_its_own(
    harness: StreamsHarness, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    monkeypatch.setattr(resumable_streams, limit, value)
    rids, cancels = [], []
    for number, client in enumerate(("light", *["heavy"] * 5), 1):
        harness.generate(API, number, b"%016d" % number, context=RequestContext(client=client))
        (*earlier, add) = harness.received_by(harness.scheduler)
        cancels += earlier
        rids.append(add.rid)
        harness.send_tokens((add.rid, WORDS * 200))
        harness.streams.receive(API, Cancel(number, client_lost=True))
    cancels += harness.received_by(harness.scheduler)
    assert cancels == [Cancel(rid) for rid in rids[1:4]]


def test_a_client_has_no_more_streams_that_run_without_it_than_its_limit(harness: StreamsHarness) -> None:
    rids = []
    for number, client in enumerate(("a", "b", "a", "a", "a"), 1):
        rids.append(
            harness.start(API, number, b"%016d" % number, context=RequestContext(client=client), resume_limit=2).rid
        )
    harness.streams.receive(API, Cancel(1, client_lost=True))
    harness.send_end(rids[0])  # what has ended does not count
    for number in (2, 3, 4):
        harness.streams.receive(API, Cancel(number, client_lost=True))
    assert harness.received_by(harness.scheduler) == []
    harness.streams.receive(API, Cancel(5, client_lost=True))
    assert harness.received_by(harness.scheduler) == [Cancel(rids[2])]


def test_a_status_reaches_each_api_once(harness: StreamsHarness) -> None:
    harness.start(API, 7)
    harness.received_by(API)
    harness.pool.handle(harness.scheduler, Status(True, True, "", 100))
    assert len(harness.received_by(API)) == 1


@pytest.mark.parametrize("key", [KEY, b""])
def test_chunks_of_images_between_front_end_and_scheduler(harness: StreamsHarness, key: bytes) -> None:
    """With the rid of each link. Nothing of them is kept for an api that takes the stream over."""
    add = harness.start(API, 7, key)
    harness.pool.handle(harness.scheduler, FetchImage(add.rid, b"digest", 4))
    assert [one for one in harness.received_by(API) if isinstance(one, FetchImage)] == [FetchImage(7, b"digest", 4)]
    harness.streams.receive(API, ImageChunk(7, b"digest", 4, b"data"))
    assert harness.received_by(harness.scheduler) == [ImageChunk(add.rid, b"digest", 4, b"data")]
    if key:
        harness.generate(OTHER, 9, key)
        assert not [one for one in harness.received_by(OTHER) if isinstance(one, FetchImage | ImageChunk)]
        harness.streams.receive(OTHER, Cancel(9, client_lost=True))
        harness.pool.handle(harness.scheduler, FetchImage(add.rid, b"digest", 4))
        harness.collect_outgoing()
        (answer,) = harness.received_by(harness.scheduler)
        assert answer == ImageChunk(add.rid, b"digest", 4, b"", resumable_streams.NO_FRONT_END)
