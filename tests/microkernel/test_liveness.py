"""Silent peers and progress, by ticks and times that the test chooses; and beats over real links."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.microkernel.test_link import until
from tgi.microkernel.links.link import Link, PeerDisconnected, PeerId, PeerResponds, PeerSilent
from tgi.microkernel.links.liveness import SILENT_TICKS, ProgressClock, SilenceDetector
from tgi.microkernel.messages.protocol import PROTOCOL, Beat, Cancel, Hello, Status
from tgi.microkernel.processes.process import Heartbeat

NOTHING: tuple[list[str], list[str]] = ([], [])


def test_a_peer_is_silent_after_some_ticks_and_responds_with_its_next_message() -> None:
    detector: SilenceDetector[str] = SilenceDetector()
    detector.watch("a")
    detector.watch("b")
    for _ in range(10):
        assert detector.tick({"a", "b"}) == NOTHING
    for _ in range(SILENT_TICKS - 1):
        assert detector.tick({"b"}) == NOTHING
    assert detector.tick({"b"}) == (["a"], [])
    assert detector.tick({"b"}) == NOTHING  # it is reported once
    assert detector.tick({"a", "b"}) == ([], ["a"])
    assert detector.tick({"b"}) == NOTHING


def test_a_peer_that_has_gone_is_not_expected_to_send() -> None:
    detector: SilenceDetector[str] = SilenceDetector()
    detector.watch("a")
    detector.forget("a")
    assert [detector.tick(()) for _ in range(10)] == [NOTHING] * 10


def test_progress_has_an_age_while_there_is_work() -> None:
    clock = ProgressClock()
    assert clock.tick(100.0, busy=False) is None
    assert clock.tick(100.5, busy=True) == 0.5  # work has arrived since the tick before
    assert clock.tick(101.0, busy=True) == 1.0
    clock.record()
    assert clock.tick(101.5, busy=True) == 0.0
    assert clock.tick(102.0, busy=True) == 0.5
    clock.record_at(101.9)  # in a process below
    assert clock.tick(102.5, busy=True) == 102.5 - 101.9
    assert clock.tick(103.0, busy=False) is None


def test_work_that_comes_before_the_first_tick_is_as_old_as_that() -> None:
    clock = ProgressClock()
    assert clock.tick(100.0, busy=True) == 0.0
    assert clock.tick(100.5, busy=True) == 0.5


def test_time_in_which_the_process_did_not_run_does_not_count() -> None:
    clock = ProgressClock()
    clock.tick(100.0, busy=False)
    clock.tick(100.5, busy=True)
    age = clock.tick(160.5, busy=True)
    assert age == 0.5
    assert clock.tick(161.0, busy=True) == 1.0


def test_a_link_reports_a_downstream_peer_that_sends_no_beats(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/link"
    low = Link.bind(address, Hello(PROTOCOL, "scheduler", 0, os.urandom(8)))
    up = Link.connect(address, Hello(PROTOCOL, "tokenizer", 0, os.urandom(8)))
    try:
        until([low, up], lambda received: all(received))
        low.exchange_beats(Beat(None))
        ((_, beat),) = until([low, up], lambda received: bool(received[1]))[1]
        assert beat == Beat(None)
        for _ in range(SILENT_TICKS + 1):
            up.exchange_beats(Beat(1000, 5000, "1 request"))
        assert [event for _, event in up.receive()] == [PeerSilent()]
        low.exchange_beats(Beat(20, 4000, "step 1"))
        assert until([low, up], lambda received: bool(received[1]))[1][0][1] == Beat(20, 4000, "step 1")
        up.exchange_beats(Beat(None))
        assert [event for _, event in up.receive()] == [PeerResponds()]
        low.socket.poll(1000)
        assert list(low.receive()) == []  # what an upstream peer works on is of no interest
    finally:
        up.close()
        low.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Link, Link]]:
    """The links of a tokenizer and of a front end that is silent for the tokenizer, after it had a session."""
    address = f"ipc://{tmp_path}/link"
    low = Link.bind(address, Hello(PROTOCOL, "tokenizer", 0, os.urandom(8)))
    up = Link.connect(address, Hello(PROTOCOL, "api", 0, os.urandom(8)))
    until([low, up], lambda received: all(received))
    up.exchange_beats(Beat(None))
    assert low.socket.poll(30_000)
    assert list(low.receive()) == []
    low.broadcast(Status(True, True, "", 100))  # before it is found to be silent
    for _ in range(SILENT_TICKS + 1):
        low.exchange_beats(Beat(None))
    yield low, up
    up.close()
    low.close()


def kinds(received: list[tuple[PeerId, Any]]) -> list[type]:
    return [type(message) for _, message in received]


def test_the_session_with_a_silent_upstream_peer_ends_and_begins_again(pair: tuple[Link, Link]) -> None:
    low, up = pair
    assert kinds(list(low.receive())) == [PeerDisconnected]
    assert not low.peers
    low.exchange_beats(Beat(None))
    assert list(low.receive()) == []  # reported once
    (tokenizer,) = up.peers
    for rid in (1, 2):  # the front end continues: it has sent both before it knows
        up.send(tokenizer, Cancel(rid))
        up.flush()
    at_low, at_up = until([low, up], lambda received: bool(received[0]))
    assert at_low[0][1] == up.own_hello
    at_up += up.receive()
    assert [kind for kind in kinds(at_up) if kind is not Beat] == [Status, PeerDisconnected, Hello]
    assert [*up.peers] == [tokenizer]
    up.send(tokenizer, Cancel(3))
    up.flush()
    assert kinds(until([low, up], lambda received: bool(received[0]))[0]) == [Cancel]
    assert list(up.receive()) == []


def test_a_silent_upstream_peer_that_ends_is_forgotten(pair: tuple[Link, Link]) -> None:
    low, up = pair
    assert kinds(list(low.receive())) == [PeerDisconnected]
    up.close()
    assert low.monitor.poll(30_000)
    low.detect_disconnects()
    assert list(low.receive()) == []  # it was reported before
    assert not low._routes
    assert not low._peer_of_route


def test_a_silent_upstream_peer_with_a_new_connection_has_one_session(pair: tuple[Link, Link]) -> None:
    """As after a break that this side has not noticed."""
    low, up = pair
    assert kinds(list(low.receive())) == [PeerDisconnected]
    again = Link.connect(low.address, up.own_hello)
    try:
        assert kinds(until([low, again], lambda received: all(received))[0]) == [Hello]
        assert len(low._routes) == len(low._peer_of_route) == 1
        (peer,) = low.peers
        low.send(peer, Status(True, True, "", 100))
        low.flush()
        assert kinds(until([low, again], lambda received: bool(received[1]))[1]) == [Status]
    finally:
        again.close()


def test_a_worker_gets_no_beats(tmp_path: Path) -> None:
    """It serves the scheduler that is connected, however long that is silent."""
    address = f"ipc://{tmp_path}/link"
    low = Link.connect(address, Hello(PROTOCOL, "worker", 0, os.urandom(8)))
    up = Link.bind(address, Hello(PROTOCOL, "scheduler", 0, os.urandom(8)))
    try:
        until([low, up], lambda received: all(received))
        up.exchange_beats(Beat(None))
        up.broadcast(Status(True, True, "", 100))
        up.flush()
        assert kinds(until([low, up], lambda received: bool(received[0]))[0]) == [Status]
    finally:
        up.close()
        low.close()


def test_heartbeat_shows_progress_to_other_processes(tmp_path: Path) -> None:
    child, reader = Heartbeat(tmp_path / "beat"), Heartbeat(tmp_path / "beat")
    reader.begin(5.0)
    assert reader.read_progress() is None
    child.record_progress(Beat(2000, 0, "step 7: 3 rows"))
    report = reader.read_progress()
    assert report is not None
    assert report.work == "step 7: 3 rows"
    assert report.progress_age is not None
    assert report.progress_age >= 2.0
    assert 0 <= report.silent_seconds < 60
    child.set_work("step 8: 1 row", report.silent_seconds)
    report = reader.read_progress()
    assert report is not None
    assert report.work == "step 8: 1 row"
    child.record_progress(Beat(None, 0, "é" * 200))
    report = reader.read_progress()
    assert report is not None
    assert report.progress_age is None
    assert report.work.startswith("éé")
    assert reader.read_deadline() == 5.0
