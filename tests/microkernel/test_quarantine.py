"""The quarantine that the front ends of a run directory share."""

import json
import os
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from tgi.microkernel.recovery.quarantine import MAX_ENTRIES, QUARANTINE_SECONDS, Quarantine, QuarantinedRequest


def test_all_front_ends_refuse_what_one_has_added(tmp_path: Path) -> None:
    one, two = Quarantine(tmp_path), Quarantine(tmp_path)
    assert two.find(b"12345678") is None
    assert one.add(b"12345678", "it crashes")
    for front_end in (one, two):
        entry = front_end.find(b"12345678")
        assert entry is not None
        assert entry.reason == "it crashes"
        assert front_end.find(b"87654321") is None
    assert not two.add(b"12345678", "again")
    assert [entry.reason for entry in two.entries().values()] == ["it crashes"]
    (tmp_path / "quarantine.json").unlink()
    assert one.find(b"12345678") is None


def test_an_entry_ends_after_an_hour(tmp_path: Path) -> None:
    now = 1000.0
    entries = Quarantine(tmp_path, lambda: now)
    entries.add(b"12345678", "")
    entry = entries.find(b"12345678")
    assert entry is not None
    assert entries.minutes_left(entry) == 60
    now += QUARANTINE_SECONDS
    assert entries.find(b"12345678") is None
    assert entries.entries() == {}
    assert entries.add(b"12345678", "")


def test_the_time_of_day_has_no_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = Quarantine(tmp_path)
    entries.add(b"12345678", "")
    later = time.time() + 1e6
    monkeypatch.setattr("time.time", lambda: later)
    assert entries.find(b"12345678") is not None


def test_the_list_is_bounded_and_a_damaged_file_is_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    entries = Quarantine(tmp_path)
    full = [QuarantinedRequest(number.to_bytes(8, "big").hex(), 1e9, "") for number in range(MAX_ENTRIES)]
    (tmp_path / "quarantine.json").write_text(json.dumps([asdict(entry) for entry in full]))
    assert entries.find(bytes(8)) is not None
    assert entries.add(MAX_ENTRIES.to_bytes(8, "big"), "")
    assert len(entries.entries()) == MAX_ENTRIES
    assert entries.find(bytes(8)) is None
    (tmp_path / "quarantine.json").write_text("[{")
    assert entries.entries() == {}
    assert "damaged" in caplog.text


@pytest.mark.parametrize(
    "content",
    [
        "5", "[5]", "{}x", "[" * 100_000, "\0", '[{"fingerprint": [], "until": 1, "reason": ""}]',
        '[{"fingerprint": "3132333435363738", "until": "soon", "reason": ""}]',
        '[{"fingerprint": "3132333435363738", "until": null, "reason": ""}]',
    ],
)  # fmt: skip
def test_any_content_of_the_file_is_read_without_an_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "quarantine.json").write_text(content)
    entries = Quarantine(tmp_path)
    assert entries.find(b"12345678") is None
    assert entries.add(b"12345678", "it crashes")
    assert Quarantine(tmp_path).find(b"12345678") is not None


def test_a_front_end_that_cannot_write_the_file_refuses_the_request_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / f"quarantine.{os.getpid()}").mkdir()  # where the new file would be written first
    entries = Quarantine(tmp_path)
    assert entries.add(b"12345678", "it crashes")
    assert entries.find(b"12345678") is not None
    assert not entries.add(b"12345678", "it crashes")
    assert "other front ends accept this request" in caplog.text
