"""Silent peers and progress, by ticks and times that the test chooses; and beats over real links."""

import os
from pathlib import Path

from tests.microkernel.test_link import until
from tgi.microkernel.link import Link, PeerResponds, PeerSilent
from tgi.microkernel.liveness import SILENT_TICKS, ProgressClock, SilenceDetector
from tgi.microkernel.process import Heartbeat
from tgi.microkernel.protocol import PROTOCOL, Beat, Hello

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
        assert list(low.receive()) == []  # beats travel up only
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
