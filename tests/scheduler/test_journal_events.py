"""What a journal records of the events of links."""

from pathlib import Path
from typing import Any

import pytest

from tgi.microkernel.links.link import PeerDisconnected, PeerId, PeerResponds, PeerSilent
from tgi.microkernel.messages.protocol import Cancel
from tgi.scheduler.journal import JournalWriter, read_journal
from tgi.scheduler.scheduler import SchedulerConfig

TOKENIZER = PeerId("tokenizer", 0, b"12345678")


@pytest.mark.parametrize(
    "message",
    [PeerDisconnected(), PeerDisconnected(planned=True), PeerSilent(), PeerResponds(), Cancel(7)],
)
def test_messages_and_events_are_read_as_they_were_written(tmp_path: Path, message: Any) -> None:
    journal = JournalWriter(tmp_path, b"bootboot", SchedulerConfig(), 1 << 20)
    journal.write_message(message, TOKENIZER, 1.0)
    journal.close()
    (path,) = tmp_path.iterdir()
    (call,) = read_journal(path).calls
    assert (type(call.message), call.message, call.source) == (type(message), message, TOKENIZER)
