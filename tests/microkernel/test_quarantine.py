"""The quarantine that the front ends of a run directory share."""

from pathlib import Path

import pytest

from tgi.microkernel import quarantine
from tgi.microkernel.quarantine import MAX_ENTRIES, QUARANTINE_SECONDS, Quarantine


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
    assert [entry.reason for entry in two.entries()] == ["it crashes"]
    (tmp_path / "quarantine.json").unlink()
    assert one.find(b"12345678") is None


def test_an_entry_ends_after_an_hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = Quarantine(tmp_path)
    monkeypatch.setattr(quarantine.time, "time", lambda: 1000.0)
    entries.add(b"12345678", "")
    monkeypatch.setattr(quarantine.time, "time", lambda: 1000.0 + QUARANTINE_SECONDS)
    assert entries.find(b"12345678") is None
    assert entries.entries() == []
    assert entries.add(b"12345678", "")


def test_the_list_is_bounded_and_a_damaged_file_is_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    entries = Quarantine(tmp_path)
    for number in range(MAX_ENTRIES + 1):
        entries.add(number.to_bytes(8, "big"), "")
    assert len(entries.entries()) == MAX_ENTRIES
    assert entries.find(bytes(8)) is None
    (tmp_path / "quarantine.json").write_text("[{")
    assert entries.entries() == []
    assert "damaged" in caplog.text
