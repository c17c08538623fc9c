"""A real tokenizer process. The test plays its front end and its scheduler over real sockets."""

import json
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
from tokenizers import Tokenizer

from tests.tokenizer.harness import READY, end_messages, streamed_output
from tgi.microkernel.host.rundir import create_run_dir
from tgi.microkernel.links.link import Link
from tgi.microkernel.messages.codec import FLOAT32, INT32, UINT32, pack_column, unpack_int32
from tgi.microkernel.messages.protocol import (
    PROTOCOL,
    Add,
    Beat,
    Cancel,
    End,
    FinishReason,
    Generate,
    Hello,
    Status,
    Stop,
    Texts,
    Tokenize,
    Tokenized,
    Tokens,
)
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.microkernel.processes.child import ChildProcess, ProcessSpec
from tgi.microkernel.settings.table import Settings

pytestmark = pytest.mark.slow

TIMEOUT = 60.0
MEGABYTE = 1 << 20


class LinkPeer:
    """One end of a link, and the messages received over it. While one of `neighbours` waits, all of them send beats:
    the process takes a silent neighbour for one that is stopped."""

    def __init__(self, link: Link, neighbours: "list[LinkPeer]") -> None:
        self.link = link
        self.received: list[Any] = []
        self._neighbours = neighbours

    def wait_for(self, wanted: Callable[[Any], bool]) -> Any:
        """Waits for the first wanted message; `received` keeps all received messages."""
        end = time.monotonic() + TIMEOUT
        seen = 0
        while time.monotonic() < end:
            self.receive()
            for neighbour in self._neighbours:
                neighbour.send(Beat(None))
            for message in self.received[seen:]:
                if wanted(message):
                    return message
            seen = len(self.received)
            self.link.socket.poll(50, zmq.POLLIN)
        raise AssertionError(f"expected message did not arrive: {self.received}")

    def receive(self) -> None:
        for peer, message in self.link.receive():
            self.peer = peer
            self.received.append(message)
            if self not in self._neighbours:
                self._neighbours.append(self)

    def wait_for_type(self, kind: type) -> Any:
        message = self.wait_for(lambda message: isinstance(message, kind))
        self.received.remove(message)
        return message

    def send(self, message: Any) -> None:
        self.link.send(self.peer, message)
        self.link.flush()

    def close(self) -> None:
        self._neighbours.remove(self)
        self.link.close()


class ProcessHarness:
    """The process and its peers."""

    def __init__(self, run: Path, model: Path) -> None:
        self.run = run
        self.neighbours: list[LinkPeer] = []
        self.settings = replace(Settings(), run_dir=run, model_dir=model)
        self.start()
        self.scheduler = self.new_scheduler(b"one")
        hello = Hello(PROTOCOL, "api", 0, b"front")
        self.api = LinkPeer(Link.connect(f"ipc://{run}/tok-0.front", hello), self.neighbours)
        self.api.wait_for(lambda message: isinstance(message, Status) and message.ready)
        self.api.received.clear()

    def start(self) -> None:
        self.child = ChildProcess(ProcessSpec("tokenizer", 0), self.settings)

    def new_scheduler(self, boot: bytes) -> LinkPeer:
        link = Link.bind(f"ipc://{self.run}/sched-0.front", Hello(PROTOCOL, "scheduler", 0, boot))
        scheduler = LinkPeer(link, self.neighbours)
        scheduler.wait_for_type(Hello)
        scheduler.send(READY)
        return scheduler

    def send_tokens(self, rid: int, ids: list[int]) -> None:
        logprobs = [-number / 4 for number in ids]
        columns = (
            pack_column(UINT32, [rid]),
            pack_column(UINT32, [len(ids)]),
            pack_column(INT32, ids),
            pack_column(FLOAT32, logprobs),
        )
        self.scheduler.send(Tokens(*columns))

    def exit_code(self) -> int:
        end = time.monotonic() + TIMEOUT
        while time.monotonic() < end:
            code = self.child.poll()
            if code is not None:
                return code
            time.sleep(0.02)
        raise AssertionError("the tokenizer did not exit")

    def close(self) -> None:
        self.child.signal(signal.SIGKILL)
        self.exit_code()
        self.child.close()
        self.scheduler.close()
        self.api.close()


@pytest.fixture
def harness(tmp_path: Path, tiny_llama: Path) -> Iterator[ProcessHarness]:
    create_run_dir(tmp_path)
    harness = ProcessHarness(tmp_path, tiny_llama)
    yield harness
    harness.close()


@pytest.fixture(scope="session")
def tokenizer(tiny_llama: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_llama / "tokenizer.json"))


def test_stream_survives_scheduler_restart_then_process_drains(harness: ProcessHarness, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Größe 👍🏽 end").ids
    harness.api.send(Generate(1, "Hello", SamplingParams(7), 50, stop_strings=["nd"]))
    add = harness.scheduler.wait_for_type(Add)
    assert unpack_int32(add.prompt_ids) == tokenizer.encode("Hello").ids
    harness.send_tokens(add.rid, ids[:4])
    harness.api.wait_for(lambda message: isinstance(message, Texts))

    harness.scheduler.close()
    harness.scheduler = harness.new_scheduler(b"two")
    assert not harness.api.wait_for_type(Status).ready
    assert harness.api.wait_for_type(Status) == READY
    again = harness.scheduler.wait_for_type(Add)
    assert again == add._replace(resume_ids=pack_column(INT32, ids[:4]), context=again.context)

    harness.api.send(Generate(2, "Hello", SamplingParams(7), 50))
    other = harness.scheduler.wait_for_type(
        Add
    )  # keeps the process alive: its last messages before an exit may be lost
    harness.child.signal(signal.SIGTERM)
    harness.send_tokens(again.rid, ids[4:])
    assert harness.scheduler.wait_for_type(Stop) == Stop(again.rid)
    harness.scheduler.send(End(again.rid, FinishReason.STOP, queue_us=5))
    end = harness.api.wait_for(lambda message: isinstance(message, End))
    assert (end.reason, end.text, end.queue_us) == (FinishReason.STOP, "Größe 👍🏽 end", 5)
    assert streamed_output(harness.api.received, 1) == (ids, "Größe 👍🏽 end")
    harness.scheduler.send(End(other.rid, FinishReason.LENGTH))
    assert harness.exit_code() == 0


def test_restarted_tokenizer_resumes_a_stream(harness: ProcessHarness, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Größe 👍🏽 end").ids
    asked = Generate(1, "Hello", SamplingParams(7), 50)
    harness.api.send(asked)
    add = harness.scheduler.wait_for_type(Add)
    harness.send_tokens(add.rid, ids[:5])
    before = harness.api.wait_for_type(Texts)
    harness.child.signal(signal.SIGKILL)
    harness.exit_code()
    harness.child.close()
    harness.start()
    old = harness.api.peer
    harness.api.wait_for(lambda message: isinstance(message, Hello) and harness.api.peer != old)
    harness.api.send(asked._replace(resume_ids=before.token_ids))
    harness.scheduler.wait_for_type(Hello)
    harness.scheduler.send(READY)
    again = harness.scheduler.wait_for_type(Add)
    assert (again.prompt_ids, again.resume_ids) == (add.prompt_ids, before.token_ids)
    harness.send_tokens(again.rid, ids[5:])
    harness.scheduler.send(End(again.rid, FinishReason.LENGTH))
    end = harness.api.wait_for(lambda message: isinstance(message, End))
    assert end.text == "Größe 👍🏽 end"
    assert "".join(before.texts) + streamed_output(harness.api.received, 1)[1] == end.text


def test_streams_continue_while_a_huge_text_is_encoded(harness: ProcessHarness, tokenizer: Tokenizer) -> None:
    harness.api.send(Generate(1, "Hello", SamplingParams(7)))
    add = harness.scheduler.wait_for_type(Add)
    harness.api.send(Generate(2, "The capital of France is Paris. " * 30_000, SamplingParams(7), truncate=20))
    (word,) = tokenizer.encode("a").ids
    for _ in range(5):
        harness.send_tokens(add.rid, [word])
        assert harness.api.wait_for_type(Texts).texts == ["a"]
    harness.scheduler.receive()
    assert not [message for message in harness.scheduler.received if isinstance(message, Add)]
    assert len(unpack_int32(harness.scheduler.wait_for_type(Add).prompt_ids)) == 20
    assert end_messages(harness.api.received) == []


def test_disconnected_front_end_cancels_its_requests(harness: ProcessHarness) -> None:
    other = LinkPeer(
        Link.connect(f"ipc://{harness.run}/tok-0.front", Hello(PROTOCOL, "api", 1, b"other")), harness.neighbours
    )
    other.wait_for_type(Hello)
    other.send(Generate(1, "Hello", SamplingParams(7)))
    add = harness.scheduler.wait_for_type(Add)
    other.send(Tokenize(2, "é"))
    assert unpack_int32(other.wait_for_type(Tokenized).byte_stops)[-1] == 2
    other.close()
    reconnected = LinkPeer(
        Link.connect(f"ipc://{harness.run}/tok-0.front", Hello(PROTOCOL, "api", 1, b"again")), harness.neighbours
    )
    reconnected.wait_for_type(Hello)
    assert harness.scheduler.wait_for_type(Cancel) == Cancel(add.rid)
    harness.scheduler.send(End(add.rid, FinishReason.CANCELLED))
    reconnected.send(Tokenize(1, "x"))
    assert reconnected.wait_for_type(Tokenized).rid == 1
    assert end_messages(reconnected.received) == []
    reconnected.close()


def wide(directory: Path, base: Path) -> Path:
    """Copies a model, with as many tokens as the demo model has: 49,152, of two byte characters each."""
    shutil.copytree(base, directory)
    spec = json.loads((directory / "tokenizer.json").read_text())
    vocab = {token: number for token, number in spec["model"]["vocab"].items() if len(token) == 1}
    names = [token["content"] for token in spec["added_tokens"]]
    letters = sorted(vocab)
    pairs = [(a, b) for a in letters for b in letters][: 49_152 - len(names) - len(letters)]
    tokens = [*names, *letters, *(a + b for a, b in pairs)]
    spec["model"] |= {"vocab": {token: number for number, token in enumerate(tokens)}, "merges": pairs}
    (directory / "tokenizer.json").write_text(json.dumps(spec))
    return directory


def test_memory_limit_and_no_torch_import(tmp_path: Path, tiny_llama: Path) -> None:
    create_run_dir(tmp_path / "run")
    harness = ProcessHarness(tmp_path / "run", wide(tmp_path / "model", tiny_llama))
    try:
        harness.api.send(Generate(1, "The capital of France is Paris. " * 1000, SamplingParams(7), truncate=100))
        harness.scheduler.wait_for_type(Add)
        process = psutil.Process(harness.child.pid)
        assert process.memory_info().rss < 150 * MEGABYTE
        loaded = {Path(region.path).name for region in process.memory_maps()}
        assert any("tokenizers" in name for name in loaded)
        assert not [name for name in loaded if "torch" in name]
    finally:
        harness.close()
