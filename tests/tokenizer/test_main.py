"""A real tokenizer process between a front end and a scheduler that the test plays over real sockets."""

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

from tests.tokenizer.house import READY, ends, shown
from tgi.kernel.answer import Texts
from tgi.kernel.link import Link
from tgi.kernel.messages import Add, Cancel, End, Generate, Reason, Sampling, Stop, Tokenize, Tokenized, Tokens
from tgi.kernel.pack import FLOAT32, INT32, UINT32, ints, pack
from tgi.kernel.presence import PROTOCOL, Hello, Status
from tgi.kernel.rundir import create
from tgi.kernel.settings import Settings
from tgi.kernel.spawn import Child, Spec

TIMEOUT = 60.0
MEGABYTE = 1 << 20


class Neighbour:
    """One end of a link, and what has come over it."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.heard: list[Any] = []

    def until(self, wanted: Callable[[Any], bool]) -> Any:
        """The first message that is wanted; `heard` keeps all, this one too."""
        end = time.monotonic() + TIMEOUT
        seen = 0
        while time.monotonic() < end:
            self.receive()
            for message in self.heard[seen:]:
                if wanted(message):
                    return message
            seen = len(self.heard)
            self.link.socket.poll(50, zmq.POLLIN)
        raise AssertionError(f"not what was expected: {self.heard}")

    def receive(self) -> None:
        for peer, message in self.link.receive():
            self.peer = peer
            self.heard.append(message)

    def of(self, kind: type) -> Any:
        message = self.until(lambda message: isinstance(message, kind))
        self.heard.remove(message)
        return message

    def send(self, message: Any) -> None:
        self.link.send(self.peer, message)
        self.link.flush()


class World:
    """The process, and its neighbours."""

    def __init__(self, run: Path, model: Path) -> None:
        self.run = run
        self.settings = replace(Settings(), run_dir=run, model_dir=model)
        self.start()
        self.scheduler = self.new_scheduler(b"one")
        hello = Hello(PROTOCOL, "api", 0, b"front")
        self.api = Neighbour(Link.connect(f"ipc://{run}/tok-0.front", hello))
        self.api.until(lambda message: isinstance(message, Status) and message.ready)
        self.api.heard.clear()

    def start(self) -> None:
        self.child = Child(Spec("tokenizer", 0), self.settings)

    def new_scheduler(self, boot: bytes) -> Neighbour:
        link = Link.bind(f"ipc://{self.run}/sched-0.front", Hello(PROTOCOL, "scheduler", 0, boot))
        scheduler = Neighbour(link)
        scheduler.of(Hello)
        scheduler.send(READY)
        return scheduler

    def tokens(self, rid: int, ids: list[int]) -> None:
        logprobs = [-number / 4 for number in ids]
        columns = (pack(UINT32, [rid]), pack(UINT32, [len(ids)]), pack(INT32, ids), pack(FLOAT32, logprobs))
        self.scheduler.send(Tokens(*columns))

    def exit_code(self) -> int:
        end = time.monotonic() + TIMEOUT
        while time.monotonic() < end:
            code = self.child.poll()
            if code is not None:
                return code
            time.sleep(0.02)
        raise AssertionError("the tokenizer did not end")

    def close(self) -> None:
        self.child.signal(signal.SIGKILL)
        self.exit_code()
        self.child.close()
        self.scheduler.link.close()
        self.api.link.close()


@pytest.fixture
def world(tmp_path: Path, tiny_llama: Path) -> Iterator[World]:
    create(tmp_path)
    made = World(tmp_path, tiny_llama)
    yield made
    made.close()


@pytest.fixture(scope="session")
def tokenizer(tiny_llama: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_llama / "tokenizer.json"))


def test_a_stream_a_new_scheduler_and_a_drain(world: World, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Größe 👍🏽 end").ids
    world.api.send(Generate(1, "Hello", Sampling(7), 50, stop=["nd"]))
    add = world.scheduler.of(Add)
    assert ints(add.prompt) == tokenizer.encode("Hello").ids
    world.tokens(add.rid, ids[:4])
    world.api.until(lambda message: isinstance(message, Texts))

    world.scheduler.link.close()
    world.scheduler = world.new_scheduler(b"two")
    assert not world.api.of(Status).ready
    assert world.api.of(Status) == READY
    again = world.scheduler.of(Add)
    assert again == add._replace(resume=pack(INT32, ids[:4]))

    world.api.send(Generate(2, "Hello", Sampling(7), 50))
    other = world.scheduler.of(Add)  # what a process says just before it exits may be lost, so something is left
    world.child.signal(signal.SIGTERM)
    world.tokens(again.rid, ids[4:])
    assert world.scheduler.of(Stop) == Stop(again.rid)
    world.scheduler.send(End(again.rid, Reason.STOP, queue_us=5))
    end = world.api.until(lambda message: isinstance(message, End))
    assert (end.reason, end.text, end.queue_us) == (Reason.STOP, "Größe 👍🏽 end", 5)
    assert shown(world.api.heard, 1) == (ids, "Größe 👍🏽 end")
    world.scheduler.send(End(other.rid, Reason.LENGTH))
    assert world.exit_code() == 0


def test_a_new_tokenizer_goes_on_where_a_killed_one_was(world: World, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Größe 👍🏽 end").ids
    asked = Generate(1, "Hello", Sampling(7), 50)
    world.api.send(asked)
    add = world.scheduler.of(Add)
    world.tokens(add.rid, ids[:5])
    before = world.api.of(Texts)
    world.child.signal(signal.SIGKILL)
    world.exit_code()
    world.child.close()
    world.start()
    old = world.api.peer
    world.api.until(lambda message: isinstance(message, Hello) and world.api.peer != old)
    world.api.send(asked._replace(resume=before.ids))
    world.scheduler.of(Hello)
    world.scheduler.send(READY)
    again = world.scheduler.of(Add)
    assert (again.prompt, again.resume) == (add.prompt, before.ids)
    world.tokens(again.rid, ids[5:])
    world.scheduler.send(End(again.rid, Reason.LENGTH))
    end = world.api.until(lambda message: isinstance(message, End))
    assert end.text == "Größe 👍🏽 end"
    assert "".join(before.texts) + shown(world.api.heard, 1)[1] == end.text


def test_streams_go_on_while_a_huge_text_is_encoded(world: World, tokenizer: Tokenizer) -> None:
    world.api.send(Generate(1, "Hello", Sampling(7)))
    add = world.scheduler.of(Add)
    world.api.send(Generate(2, "The capital of France is Paris. " * 30_000, Sampling(7), truncate=20))
    (word,) = tokenizer.encode("a").ids
    for _ in range(5):
        world.tokens(add.rid, [word])
        assert world.api.of(Texts).texts == ["a"]
    world.scheduler.receive()
    assert not [message for message in world.scheduler.heard if isinstance(message, Add)]
    assert len(ints(world.scheduler.of(Add).prompt)) == 20
    assert ends(world.api.heard) == []


def test_a_front_end_that_leaves_cancels(world: World) -> None:
    other = Neighbour(Link.connect(f"ipc://{world.run}/tok-0.front", Hello(PROTOCOL, "api", 1, b"other")))
    other.of(Hello)
    other.send(Generate(1, "Hello", Sampling(7)))
    add = world.scheduler.of(Add)
    other.send(Tokenize(2, "é"))
    assert ints(other.of(Tokenized).stops)[-1] == 2
    other.link.close()
    reborn = Neighbour(Link.connect(f"ipc://{world.run}/tok-0.front", Hello(PROTOCOL, "api", 1, b"again")))
    reborn.of(Hello)
    assert world.scheduler.of(Cancel) == Cancel(add.rid)
    world.scheduler.send(End(add.rid, Reason.CANCELLED))
    reborn.send(Tokenize(1, "x"))
    assert reborn.of(Tokenized).rid == 1
    assert ends(reborn.heard) == []
    reborn.link.close()


def wide(directory: Path, base: Path) -> Path:
    """A copy of a model with as many tokens as the demo model has: 49,152, two byte characters each."""
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


def test_memory_and_no_torch(tmp_path: Path, tiny_llama: Path) -> None:
    create(tmp_path / "run")
    world = World(tmp_path / "run", wide(tmp_path / "model", tiny_llama))
    try:
        world.api.send(Generate(1, "The capital of France is Paris. " * 1000, Sampling(7), truncate=100))
        world.scheduler.of(Add)
        process = psutil.Process(world.child.pid)
        assert process.memory_info().rss < 150 * MEGABYTE
        loaded = {Path(region.path).name for region in process.memory_maps()}
        assert any("tokenizers" in name for name in loaded)
        assert not [name for name in loaded if "torch" in name]
    finally:
        world.close()
