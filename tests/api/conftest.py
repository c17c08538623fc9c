"""A front end for tests: a real HTTP server on a loopback port, with real links to fake tokenizers."""

import asyncio
import json
import os
import queue
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
import zmq

from tests.api.conformance import conforms
from tgi.api.app import build
from tgi.api.asgi import AsgiApp
from tgi.api.batches import BatchRunner
from tgi.api.http_server import HttpServer
from tgi.api.readiness import run_readiness_probe
from tgi.api.router import Router
from tgi.api.service import Service
from tgi.api.tls import ServerCertificate
from tgi.microkernel.admission.permits import Permits
from tgi.microkernel.admission.token_rates import TokenRates
from tgi.microkernel.links.link import Link, PeerDisconnected
from tgi.microkernel.links.liveness import BEAT_SECONDS
from tgi.microkernel.messages.codec import FLOAT32, INT32, UINT32, pack_column
from tgi.microkernel.messages.protocol import (
    PROTOCOL,
    AdapterUpdated,
    Cancel,
    DeploymentLimits,
    End,
    FinishReason,
    Generate,
    Hello,
    LastExit,
    ModelSource,
    Status,
    Texts,
    Tokenize,
    Tokenized,
    UpdateAdapter,
)
from tgi.microkernel.messages.sampling_params import SamplingDefaults
from tgi.microkernel.observability import metrics
from tgi.microkernel.recovery.quarantine import Quarantine
from tgi.microkernel.settings.table import Settings

LIMITS = DeploymentLimits(2048, 2047, 32768, 4096, 64, 2048, 16, 512, "float32", "cpu")
READY = Status(True, True, "", 100, LIMITS)


def texts(rid: int, *tokens: tuple[int, str, float, bool]) -> Texts:
    """A Texts message with the tokens (id, text, logprob, special) of one request."""
    ids, words, logprobs, special = zip(*tokens, strict=True)
    return Texts(
        pack_column(UINT32, [rid]),
        pack_column(UINT32, [len(ids)]),
        pack_column(INT32, ids),
        pack_column(FLOAT32, logprobs),
        bytes(special),
        [*words],
    )


def two_tokens(message: Generate) -> list[Any]:
    """Answers as in the examples of the contract: " a", then EOS."""
    return [
        texts(message.rid, (5, " a", -0.34, False)),
        texts(message.rid, (2, "</s>", -0.01, True)),
        End(message.rid, FinishReason.EOS, "", " a", 3, 2, 0, 1_000, 2_000, 30_000),
    ]


def standard(message: Any) -> list[Any]:
    """Answers every request successfully."""
    if isinstance(message, Tokenize):
        ids, starts, stops = (pack_column(INT32, column) for column in ([1, 7, 9], [0, 0, 2], [0, 2, 4]))
        return [Tokenized(message.rid, ids, starts, stops, b"\1\0\0")]
    if isinstance(message, UpdateAdapter):
        return [AdapterUpdated(message.rid)]
    return one_listed(message) if message.listed_texts else two_tokens(message)


def one_listed(message: Generate) -> list[Any]:
    """One token, with those of the listed texts."""
    listed = message.listed_texts
    tops = {
        "top_counts": pack_column(UINT32, [len(listed)]),
        "top_ids": pack_column(INT32, range(len(listed))),
        "top_logprobs": pack_column(FLOAT32, [-0.5 - at for at in range(len(listed))]),
        "top_texts": listed,
        "top_special": bytes(len(listed)),
    }
    token = texts(message.rid, (5, listed[0], -0.34, False))._replace(**tops)
    return [token, End(message.rid, FinishReason.LENGTH, "", listed[0], 3, 1, 0, 1_000, 2_000, 30_000)]


class FakeTokenizer:
    """A tokenizer process as the front end sees it, in a thread. `answer` returns the messages that answer a request,
    or None if the test sends them itself, with `send`."""

    def __init__(self, address: str, replica: int, answer: Callable[[Any], list[Any] | None]) -> None:
        self.address = address
        self.replica = replica
        self.answer = answer
        self.defaults = SamplingDefaults()  # sent by the next start
        self.last_exit: LastExit | None = None  # the same
        self.site = ""  # the same
        self.source: ModelSource | None = None  # the same
        self.boot = b""
        self.received: queue.Queue[Any] = queue.Queue()
        self._todo: queue.Queue[list[Any] | None] = queue.Queue()
        self._woken, self._wake = socket.socketpair()  # when there is something to do
        self._thread: threading.Thread | None = None

    def start(self, status: Status | None = READY) -> None:
        """Starts the process, or its replacement after a stop."""
        self._thread = threading.Thread(target=self._run, args=(status,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the process: the front end sees a loss."""
        if self._thread is not None:
            self._do(None)
            self._thread.join()
            self._thread = None

    def send(self, *messages: Any) -> None:
        """Sends messages to the only front end, in one flush."""
        self._do([*messages])

    def next(self, kind: type, timeout: float = 10) -> Any:
        """Waits for the next message of this class and drops the others."""
        while True:
            message = self.received.get(timeout=timeout)
            if isinstance(message, kind):
                return message

    def _do(self, todo: list[Any] | None) -> None:
        self._todo.put(todo)
        self._wake.send(b"\0")

    def _run(self, status: Status | None) -> None:
        self.boot = os.urandom(8)
        hello = Hello(
            PROTOCOL,
            "tokenizer",
            self.replica,
            self.boot,
            sampling_defaults=self.defaults,
            last_exit=self.last_exit,
            site=self.site,
            source=self.source,
        )
        link = Link.bind(self.address, hello)
        poller = zmq.Poller()
        for source in (link.socket, self._woken):
            poller.register(source, zmq.POLLIN)
        try:
            while True:
                # Not more often: the fronts of a module, or of all golden files, wait in threads of one process.
                if self._woken.fileno() in dict(poller.poll(0 if link.has_pending_work else int(1000 * BEAT_SECONDS))):
                    self._woken.recv(4096)
                for peer, message in link.receive():
                    self.received.put(message)
                    if isinstance(message, Hello) and status is not None:
                        link.send(peer, status)
                    elif isinstance(message, (Generate, Tokenize, UpdateAdapter)):
                        for answer in self.answer(message) or ():
                            link.send(peer, answer)
                    elif isinstance(message, Cancel):
                        link.send(peer, End(message.rid, FinishReason.CANCELLED))
                    elif isinstance(message, PeerDisconnected):
                        pass
                while not self._todo.empty():
                    todo = self._todo.get()
                    if todo is None:
                        return
                    for answer in todo:
                        link.broadcast(answer)
                link.flush()
        finally:
            link.close()


class Reply:
    """A whole HTTP response, parsed."""

    def __init__(self, raw: bytes) -> None:
        head, _, body = raw.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        self.status = int(lines[0].split()[1])
        self.headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines[1:])}
        self.chunks = list(_chunks(body)) if self.headers.get("transfer-encoding") == "chunked" else [body]
        self.body = b"".join(self.chunks)


def openai_error(status: int, kind: str, message: str, param: str | None = None) -> dict[str, Any]:
    """The body of an error in OpenAI's format."""
    error = {"message": message, "type": kind, "param": param, "code": status}
    return {"error": error, "error_type": kind}


def _chunks(body: bytes) -> Iterator[bytes]:
    while body:
        size, _, body = body.partition(b"\r\n")
        count = int(size, 16)
        if count:
            yield body[:count]
        body = body[count + 2 :]


class Front:
    """A running front end, in a thread."""

    def __init__(
        self, settings: Settings, folder: Path, answer: Callable[[Any], list[Any] | None], proves: bool = False
    ) -> None:
        self.settings = settings
        self.proves = proves  # runs the readiness probe, which the tokenizers receive first
        self.stages: list[str] = []  # reported by the readiness probe
        self.tokenizers = [
            FakeTokenizer(f"ipc://{folder}/tok-{replica}.front", replica, answer)
            for replica in range(settings.validation_workers)
        ]
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.permits = folder / f"permits-{id(self)}"  # not shared: this process has several front ends
        self.port = self.socket.getsockname()[1]
        self.router: Router
        self.service: Service
        self._server: HttpServer
        self._loop: asyncio.AbstractEventLoop
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()
        assert self._up.wait(10)

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._server.stop)
        self._thread.join(10)
        for tokenizer in self.tokenizers:
            tokenizer.stop()

    @property
    def thread_id(self) -> int:
        """The thread of the front end."""
        assert self._thread.ident is not None
        return self._thread.ident

    @property
    def connections(self) -> int:
        """Open connections of clients."""
        return len(self._server.server_state.connections)

    def until_ready(self) -> None:
        """Waits until every tokenizer has reported ready and clients are admitted."""
        end = time.monotonic() + 30
        while not (
            self.router.health.probe_passed and all(t.status and t.status.ready for t in self.router.tokenizers)
        ):
            assert time.monotonic() < end, "never ready"
            time.sleep(0.002)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        hello = Hello(PROTOCOL, "api", 0, os.urandom(8))
        links = [Link.connect(tokenizer.address, hello) for tokenizer in self.tokenizers]
        permits = Permits(self.permits, self.settings.max_concurrent_requests)
        quarantine = Quarantine(self.permits.parent)
        rates = TokenRates(self.permits.with_suffix(".rates"))
        stall_limit = self.settings.stall_limit
        self.router = Router(links, permits, quarantine, stall_limit=stall_limit, token_rates=rates)
        model = self.settings.model_id or "m"
        self.service = Service(self.settings, self.router, model, "gpu+optimized", self.permits.parent)
        self.router.attach(asyncio.get_running_loop())
        app = build(self.service)
        self._loop = asyncio.get_running_loop()
        files = self.settings.ssl_certfile, self.settings.ssl_keyfile
        self._server = HttpServer(app, self.settings, ServerCertificate(files[0], files[1]) if files[0] else None)
        admitting = asyncio.create_task(self._admit(app))
        self.batches = BatchRunner(app, self.service, os.urandom(8).hex())
        running = asyncio.create_task(self.batches.run())
        self._up.set()
        try:
            await self._server.serve([self.socket])
        finally:
            admitting.cancel()
            running.cancel()
            self.router.close()

    async def _admit(self, app: AsgiApp) -> None:
        if self.proves:
            await run_readiness_probe(app, self.service, self.stages.append)
        else:
            await self.router.health.wait_until_computing()
            self.router.health.end_probe("")

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def raw(self, request: bytes) -> Reply:
        """Sends these bytes and reads until the server closes. The response must conform to the OpenAPI document."""
        with self.connect() as connection:
            connection.sendall(request)
            parts = []
            while part := connection.recv(65536):
                parts.append(part)
        reply = Reply(b"".join(parts))
        conforms(request, reply, self.settings.kserve)
        return reply

    def get(self, path: str, method: str = "GET", **headers: str) -> Reply:
        return self.raw(request(method, path, b"", headers))

    def post(
        self, path: str, body: bytes | str, content_type: str | None = "application/json", **headers: str
    ) -> Reply:
        body = body if isinstance(body, bytes) else body.encode()
        fields = headers | ({"content-type": content_type} if content_type else {})
        return self.raw(request("POST", path, body, fields | {"content-length": str(len(body))}))


def request(method: str, path: str, body: bytes, headers: dict[str, str]) -> bytes:
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return f"{method} {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n{lines}\r\n".encode() + body


def silent(message: Any) -> None:
    """Does not answer: the test sends the messages."""


class Stream:
    """A request whose response is read piece by piece."""

    def __init__(
        self, front: Front, path: str = "/generate_stream", body: str = '{"inputs":"x"}', **headers: str
    ) -> None:
        self.connection = front.connect()
        head = headers | {"content-type": "application/json", "content-length": str(len(body))}
        self.connection.sendall(request("POST", path, body.encode(), head))
        self.raw = b""

    def read_until(self, part: bytes) -> None:
        while part not in self.raw:
            more = self.connection.recv(65536)
            assert more, f"closed before {part!r}: {self.raw!r}"
            self.raw += more

    def read_rest(self) -> Reply:
        while more := self.connection.recv(65536):
            self.raw += more
        return Reply(self.raw)

    def disconnect(self) -> None:
        self.connection.close()


def events(reply: Reply) -> list[dict[str, Any]]:
    return [json.loads(part.removeprefix(b"data: ")) for part in reply.body.split(b"\n\n") if part]


def word(rid: int, n: int) -> Any:
    return texts(rid, (n, f" {n}", -0.5, False))


@pytest.fixture(scope="session", autouse=True)
def _samples(tmp_path_factory: pytest.TempPathFactory) -> None:
    metrics.use_directory(tmp_path_factory.mktemp("metrics"))


@pytest.fixture
def serve() -> Iterator[Callable[..., Front]]:
    """Starts a front end: serve(answer=..., up=..., and any settings)."""
    fronts: list[Front] = []
    with tempfile.TemporaryDirectory(prefix="tgi") as folder:

        def start(
            answer: Callable[[Any], list[Any] | None] = standard, up: bool = True, proves: bool = False, **settings: Any
        ) -> Front:
            values = {"validation_workers": 1, "hostname": "127.0.0.1"} | settings
            front = Front(Settings(**values), Path(folder), answer, proves)
            fronts.append(front)
            front.start()
            if up:
                for tokenizer in front.tokenizers:
                    tokenizer.start()
                front.until_ready()
            return front

        yield start
        for front in fronts:
            front.stop()


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    """A front end that a module shares, with the usual answers."""
    with tempfile.TemporaryDirectory(prefix="tgi") as folder:
        front = Front(Settings(validation_workers=1, hostname="127.0.0.1"), Path(folder), standard)
        front.start()
        front.tokenizers[0].start()
        front.until_ready()
        yield front
        front.stop()
