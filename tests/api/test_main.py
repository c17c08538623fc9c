"""The api process, as the supervisor starts it."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import uvloop

from tests.api.conftest import FakeTokenizer, Reply, request, texts, two_tokens
from tests.live.server import free_port
from tests.microkernel.tcp import LoopedLink, hello
from tgi.api.router import Router
from tgi.microkernel.admission.permits import Permits
from tgi.microkernel.host import rundir
from tgi.microkernel.links import curve
from tgi.microkernel.links.link import Link
from tgi.microkernel.messages.protocol import End, FinishReason, Generate
from tgi.microkernel.processes.child import ChildProcess, ProcessSpec
from tgi.microkernel.processes.supervisor import listening_socket
from tgi.microkernel.recovery.quarantine import Quarantine
from tgi.microkernel.settings.table import Settings


class Api:
    """The process, its port and its only tokenizer."""

    def __init__(self, run: Path) -> None:
        self.run = run
        settings = Settings(validation_workers=1, hostname="127.0.0.1", model_id="m")
        settings = replace(settings, run_dir=run)
        rundir.create_run_dir(run)
        with listening_socket("127.0.0.1", 0) as listener:
            self.port = listener.getsockname()[1]
            self.child = ChildProcess(ProcessSpec("api", 0, listener.fileno()), settings)
        answers = [two_tokens]  # to the readiness probe; the test answers the other requests
        self.tokenizer = FakeTokenizer(
            f"ipc://{run}/tok-0.front", 0, lambda message: answers.pop()(message) if answers else None
        )
        self.tokenizer.start()

    def get(self, path: str) -> Reply:
        return self.send(request("GET", path, b"", {}))

    def send(self, data: bytes) -> Reply:
        with self.connect(data) as connection:
            return rest(connection)

    def open(self) -> bool:
        try:
            self.connect(b"").close()
        except ConnectionRefusedError:
            return False
        return True

    def connect(self, data: bytes) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        connection.sendall(data)
        return connection

    def until_ready(self) -> None:
        while self.get("/health").status != 200:
            assert self.child.poll() is None
            time.sleep(0.02)
        assert self.tokenizer.next(Generate).max_new_tokens == 1  # the readiness probe

    def until_ended(self) -> int:
        while (code := self.child.poll()) is None:
            time.sleep(0.01)
        return code


def rest(connection: socket.socket) -> Reply:
    raw = b""
    while more := connection.recv(65536):
        raw += more
    return Reply(raw)


@pytest.fixture
def api() -> Iterator[Api]:
    with tempfile.TemporaryDirectory(prefix="tgi") as folder:
        api = Api(Path(folder))
        yield api
        api.child.signal(signal.SIGKILL)
        api.until_ended()
        api.tokenizer.stop()


def test_sigterm_finishes_requests_in_flight(api: Api) -> None:
    api.until_ready()
    body = b'{"inputs":"x"}'
    head = {"content-type": "application/json", "content-length": str(len(body))}
    stream = api.connect(request("POST", "/generate_stream", body, head))
    rid = api.tokenizer.next(Generate).rid
    api.tokenizer.send(texts(rid, (1, "a", -1.0, False)))
    assert stream.recv(1)
    os.kill(api.child.pid, signal.SIGINT)  # ignored: the supervisor handles Ctrl-C
    os.kill(api.child.pid, signal.SIGTERM)
    while api.open():  # until it accepts no more connections
        time.sleep(0.01)
    assert api.child.poll() is None
    api.tokenizer.send(texts(rid, (2, "b", -1.0, False)), End(rid, FinishReason.LENGTH, "", "ab", 1, 2))
    end = b""
    while more := stream.recv(65536):
        end += more
    assert b'"generated_text":"ab"' in end
    assert api.until_ended() == 0


def test_sigterm_finishes_background_responses(api: Api) -> None:
    api.until_ready()
    body = b'{"input":"x","background":true}'
    head = {"content-type": "application/json", "content-length": str(len(body))}
    response = json.loads(api.send(request("POST", "/v1/responses", body, head)).body)
    rid = api.tokenizer.next(Generate).rid
    os.kill(api.child.pid, signal.SIGTERM)
    while api.open():  # until it accepts no more connections
        time.sleep(0.01)
    assert api.child.poll() is None
    api.tokenizer.send(texts(rid, (1, "a", -1.0, False)), End(rid, FinishReason.LENGTH, "", "a", 1, 1))
    assert api.until_ended() == 0
    (file,) = Path(api.run).glob("responses*.sqlite")
    with contextlib.closing(sqlite3.connect(file)) as db:
        [(kept,)] = db.execute("SELECT body FROM responses WHERE id=?", (response["id"],))
    assert json.loads(kept)["output"][0]["content"][0]["text"] == "a"


def test_memory_and_heartbeats_of_an_idle_process(api: Api) -> None:
    api.until_ready()
    process = psutil.Process(api.child.pid)
    assert process.memory_info().rss < 150e6
    before = api.child.heartbeat.read_deadline()
    while api.child.heartbeat.read_deadline() == before:  # until the next heartbeat
        time.sleep(0.01)


def test_it_exits_when_its_supervisor_has_died(api: Api) -> None:
    """Only the pipe is closed: the process that started it, this one, lives on."""
    api.until_ready()
    api.child.close()
    assert api.until_ended() == 1


def test_a_front_end_with_other_keys_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    for directory in ("tokenizers", "front-ends"):
        curve.create_keys(tmp_path / directory)
    keys = curve.load_tokenizer_keys(tmp_path / "tokenizers")
    low = LoopedLink(Link.bind(address, hello("tokenizer"), keys))
    link = Link.connect(address, hello("api"), curve.load_api_keys(tmp_path / "front-ends"))
    router = Router([link], Permits(tmp_path / "permits", 1), Quarantine(tmp_path))

    async def until_logged() -> bool:
        router.attach(asyncio.get_running_loop())
        end = time.monotonic() + 10
        while "has ended the handshake" not in caplog.text and time.monotonic() < end:
            low.turn()
            await asyncio.sleep(0.002)
        router.close()
        low.link.close()
        return "has ended the handshake" in caplog.text

    assert uvloop.run(until_logged())


def test_a_front_end_rejects_a_tokenizer_with_another_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    addresses = [f"ipc://{tmp_path / name}" for name in ("first", "second")]
    first = LoopedLink(Link.bind(addresses[0], hello("tokenizer", model="a", site="x")))
    second = LoopedLink(Link.bind(addresses[1], hello("tokenizer", model="b", site="y")))
    router = Router([Link.connect(addresses[0], hello("api"))], Permits(tmp_path / "permits", 1), Quarantine(tmp_path))

    async def connect(*links: LoopedLink) -> None:
        router.attach(asyncio.get_running_loop())
        while not first.link.peers:
            first.turn()
            await asyncio.sleep(0.002)
        other = router.add_tokenizer(Link.connect(addresses[1], hello("api")))
        while "LinkRejected" not in second.kinds() and "rejected this process" not in caplog.text:
            second.turn()
            await asyncio.sleep(0.002)
            assert other.peer is None
        assert [tokenizer.responds for tokenizer in router.tokenizers] == [True, False]
        router.close()
        for link in links:
            link.link.close()

    uvloop.run(connect(first, second))
    assert "it serves another model (b against a)" in caplog.text
