"""The HTTP/1.1 server: uvicorn's protocol and shutdown, with own connections and an own listener.

`HttpConnection` handles what uvicorn overlooks (upgrades, pipelined requests at a disconnect, long or slow heads, other
HTTP versions). `Listener` accepts connections, at most a given number. A connection without a complete request head is
idle; where no further one fits, the longest idle one is closed.
"""

import asyncio
import contextlib
import logging
import resource
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from tgi.api import errors
from tgi.api.asgi import ABORT_KEY, HOLD_KEY, WHOLE_BODY_KEY, AsgiApp
from tgi.api.tls import ServerCertificate
from tgi.microkernel.host.heap import map_large_blocks, release_freed_memory
from tgi.microkernel.settings.table import Settings

log = logging.getLogger(__name__)

# Of request line and headers, and of what a body has besides its content: trailers, extensions of chunks. httptools
# keeps them in memory without a limit.
MAX_HEAD_BYTES = 64 << 10
# Requests of a connection that wait for the response to an earlier one. A request without a body takes 20 bytes of the
# network and 3 KB of memory.
MAX_PIPELINED = 64
# A silent connection stays open this long: longer than load balancers reuse it (nginx 60 s, Traefik 90 s, Caddy 120 s,
# Google Cloud's 600 s), which otherwise send a request at the moment at which it is closed. It costs little: where
# connections are short, the longest idle ones are closed.
KEEP_ALIVE_SECONDS = 620
# While other front ends accept the new connections, idle ones are kept open for this long, and closed after their next
# response: a client that sends one request after another does not meet a connection that is just being closed.
HAND_OVER_SECONDS = 3.0
# Between two ticks: the heartbeat, the Date header, a look at the certificate files, log lines of the listener.
TICK_SECONDS = 1.0
# Open files of a front end that are not connections of clients: links, logs, metrics, refused connections.
RESERVED_FILES = 256
# The default of --max-connections where the limit of open files allows more. An idle connection takes about
# 10 KB, one with TLS 25 KB.
DEFAULT_MAX_CONNECTIONS = 16_384
# Per turn of the event loop, so that requests and tokens have their turns in a flood of connections.
ACCEPTS_PER_TURN = 8
# Until the next attempt when the system has no file or memory left for a connection.
ACCEPT_RETRY_SECONDS = 0.1
# A refused connection stays open this long for its client to read the answer, unless there are many.
REFUSAL_SECONDS, MAX_OPEN_REFUSALS = 1.0, 64
# Between two log lines of the listener.
OVERLOAD_LOG_SECONDS = 10.0
# The kernel buffers this much beyond what the client's window takes: by default it would be megabytes for a client that
# does not read, which would be noticed late (SlowReader).
MAX_UNSENT_BYTES = 64 << 10
# At the end of the server: for the client of an idle TLS connection to confirm the end, which clients do that keep
# connections for later use only with their next request.
TLS_SHUTDOWN_SECONDS = 2.0

# A client that sends no more has left, or only closed its sending side. Interim responses find out which: the system of
# one that has left answers them with a reset, which the next write reports. The first two are this far apart, each
# further pause is longer by the factor.
FIRST_PROBE_SECONDS, PROBE_FACTOR = 0.05, 4
INTERIM_RESPONSE = STATUS_LINE[100] + b"\r\n"

HEAD_BEGIN = b"HTTP/1.1 "
TEXT_HEAD = b"content-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
_REFUSAL_BODY = errors.too_many_connections().native_body()
REFUSAL = (
    STATUS_LINE[503] + b"content-type: application/json\r\nretry-after: 1\r\nx-startup-stage: too many connections\r\n"
    b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(_REFUSAL_BODY), _REFUSAL_BODY)
)


# The answer to a first byte that is a letter, as in the name of a method: a TLS connection begins with byte 22.
_PLAIN_BODY = b"This port speaks HTTPS, and a plain HTTP request was sent. Begin the URL with https://\n"
PLAIN_REQUEST = STATUS_LINE[400] + TEXT_HEAD % len(_PLAIN_BODY) + _PLAIN_BODY


class ConnectionTable(ServerState):
    """The connections of one server."""

    def __init__(self) -> None:
        super().__init__()
        # Accepted, not yet in `connections`: in a handshake, the oldest first.
        self.opening: dict[HttpConnection, asyncio.Task[None]] = {}
        self.idle: dict[HttpConnection, None] = {}  # an ordered set: without a complete head, the longest idle first

    @property
    def count(self) -> int:
        return len(self.connections) + len(self.opening)

    def close_longest_idle(self) -> bool:
        """Closes the connection that has been idle for longest, else that with the oldest handshake. Returns False if
        there is none."""
        for connection in self.idle:
            if not connection.transport.get_write_buffer_size():  # else its client still reads the latest response
                del self.idle[connection]
                connection.transport.abort()
                return True
        for connection, task in self.opening.items():
            del self.opening[connection]
            task.cancel()
            return True
        return False


class ResponseTransport:
    """The transport of a connection, on which the head of a response and the first piece of its body are one packet,
    and so are the last events of a stream and the end of the response: each saves a system call and a wake-up of the
    client, a tenth of a short request's time in this process.

    What is held waits for the next write of the same turn of the event loop at most.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._held = b""
        self._holds_next = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """As asyncio.Transport.write."""
        if self._held:
            data, self._held = self._held + data, b""
            holds = self._holds_next
        elif holds := self._holds_next or data.startswith(HEAD_BEGIN):
            self._loop.call_soon(self._flush)
        if holds:
            self._held, self._holds_next = data, False
        else:
            self._transport.write(data)

    def hold_next(self) -> None:
        """The next piece is the last one before the end of the response, which follows at once."""
        self._holds_next = True

    def close(self) -> None:
        """As asyncio.Transport.close."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        data, self._held = self._held, b""
        if data and not self._transport.is_closing():  # the client may have left meanwhile
            self._transport.write(data)


class HttpConnection(HttpToolsProtocol):
    """One connection.

    A head has to be complete `head_seconds` after its first byte; then the answer is 408. A connection without a
    request, or with the rest of a body whose request has been answered, is closed after KEEP_ALIVE_SECONDS. One whose
    client does not read what was sent is closed after `reader_seconds` without progress.
    """

    def __init__(self, table: ConnectionTable, head_seconds: float, reader_seconds: float, **kwargs: Any) -> None:
        super().__init__(server_state=table, **kwargs)
        self._table = table
        self._head_seconds = head_seconds
        self._reader_seconds = reader_seconds
        self._running: RequestResponseCycle | None = None  # the request that is answered now; later ones: `pipeline`
        self._in_head = False
        self._unparsed_bytes = 0  # received since a head, a piece of a body, or a request was complete
        self._head_timer: asyncio.TimerHandle | None = None  # set once a head has not come in one piece
        self._rejection = b""  # to be sent after the responses to the requests before
        self._unsent_bytes = 0  # when the timer was set
        self._reader_timer: asyncio.TimerHandle | None = None  # while the client has to read
        self._has_sent_all = False  # the client sends no more and waits for the answer
        self._probe_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """asyncio callback."""
        super().connection_made(ResponseTransport(transport, self.loop))  # type: ignore[arg-type]
        self._table.opening.pop(self, None)
        self._table.idle[self] = None
        self.timeout_keep_alive_task = self.loop.call_later(KEEP_ALIVE_SECONDS, self.timeout_keep_alive_handler)

    # --- requests ---

    def data_received(self, data: bytes) -> None:
        """asyncio callback: feeds the parser."""
        if self._rejection:
            return
        self._unparsed_bytes += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self._reject(400, "Invalid HTTP request received.")
            return
        if self._unparsed_bytes > MAX_HEAD_BYTES:
            self._reject(400, f"The headers of this request are over {MAX_HEAD_BYTES} bytes.")
        elif self._in_head and self._head_timer is None:
            text = f"The head of this request was not complete within {self._head_seconds:g} s."
            self._head_timer = self.loop.call_later(self._head_seconds, self._reject, 408, text)

    def _parse(self, data: bytes) -> None:
        """Feeds the parser. An upgrade is ignored (RFC 9110, 7.8): the request is parsed again without it.

        Java's HTTP client offers `Upgrade: h2c` with every first request; its body would be lost otherwise.
        """
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)

    def _reject(self, status: int, text: str) -> None:
        """Answers what cannot be parsed as a request, after the responses to the requests before it, and closes the
        connection. What is received from now on is dropped."""
        self._stop_head_timer()
        if self._rejection:
            return
        self._rejection = STATUS_LINE[status] + TEXT_HEAD % len(text) + text.encode()
        if self.pipeline and self.pipeline[0][0].more_body:
            self.pipeline.popleft()  # the latest request: the fault is in its body
        running = self._running
        if running is None or (running.more_body and not running.response_started):
            self._send_rejection()

    def _send_rejection(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(self._rejection)
            self.transport.close()
            self._watch_reader()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_without_upgrade(self) -> bytes:
        """The head of the current request without the headers of an upgrade."""
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + self.parser.get_http_version().encode()]
        for name, value in self.headers:
            if name == b"connection":
                tokens = [token.strip() for token in value.split(b",")]
                value = b", ".join(t for t in tokens if t.lower() not in (b"upgrade", b"http2-settings"))
            if name not in (b"upgrade", b"http2-settings"):
                lines.append(name + b": " + value)
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def on_message_begin(self) -> None:
        """httptools callback: the head of a request begins."""
        super().on_message_begin()
        self.scope[ABORT_KEY] = self.transport.abort  # type: ignore[literal-required]
        self.scope[HOLD_KEY] = self.transport.hold_next  # type: ignore
        self._in_head = True
        self._unset_keepalive_if_required()

    def on_header(self, name: bytes, value: bytes) -> None:
        """httptools callback, for trailers too, which are dropped."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """httptools callback. Starts the request, unless its head is parsed again without its upgrade.

        Raises HttpParserError, a 400, for HTTP versions that falcon would answer with a 500, for CONNECT, which
        httptools always takes for an upgrade, and for too many pipelined requests.
        """
        if self.parser.get_http_version() not in ("1.0", "1.1") or self.parser.get_method() == b"CONNECT":
            raise httptools.HttpParserError("only HTTP/1.0 and 1.1 are supported, and no CONNECT")
        if len(self.pipeline) >= MAX_PIPELINED:
            self._reject(400, f"More than {MAX_PIPELINED} requests wait for the response to an earlier one.")
            raise httptools.HttpParserError
        self._in_head = False
        self._unparsed_bytes = 0
        self._stop_head_timer()
        self._unset_keepalive_if_required()  # an earlier, pipelined request may have been answered during this head
        self._table.idle.pop(self, None)
        if self.parser.should_upgrade():
            return
        super().on_headers_complete()
        if self._running is None:
            self._running = self.cycle
        else:
            self.flow.resume_reading()  # paused for a pipelined request, which would hide a disconnect

    def on_body(self, body: bytes) -> None:
        """httptools callback: a piece of the body."""
        self._unparsed_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """httptools callback: the body is complete."""
        self._unparsed_bytes = 0
        if not self.parser.should_upgrade():
            super().on_message_complete()
            self.scope[WHOLE_BODY_KEY] = True  # type: ignore[literal-required]

    def eof_received(self) -> bool:  # type: ignore[override]
        """asyncio callback: the client sends no more. Keeps the connection for a request that is complete and not yet
        answered; not with TLS, whose end is that of both directions."""
        running = self._running
        self._has_sent_all = (
            self.scheme == "http"
            and running is not None
            and not (running.more_body or running.response_started)
            and running.scope["http_version"] == "1.1"  # 1.0 has no interim responses
        )
        if self._has_sent_all:
            self._probe_client(FIRST_PROBE_SECONDS)
        return self._has_sent_all

    def _probe_client(self, pause: float) -> None:
        """Writes what the system of a client that has left rejects, until there is a response to write."""
        if self._running is not None and not self._running.response_started:
            self.transport.write(INTERIM_RESPONSE)
            self._probe_timer = self.loop.call_later(pause, self._probe_client, pause * PROBE_FACTOR)

    # --- responses ---

    def on_response_complete(self) -> None:
        """uvicorn's callback: the latest byte of a response is written. Starts the next pipelined request."""
        self._running = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        if self.transport.is_closing():
            self._watch_reader()
        elif self._has_sent_all:
            self.transport.close()
            self._watch_reader()
        elif self._running is None:
            self._table.idle[self] = None
            if self._rejection:
                self._send_rejection()

    def pause_writing(self) -> None:
        """asyncio callback: what is written waits for the client to read."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        """asyncio callback: the client has read."""
        super().resume_writing()
        if not self.transport.is_closing():
            self._stop_reader_timer()

    def timeout_keep_alive_handler(self) -> None:
        """Timer: the connection has been idle for KEEP_ALIVE_SECONDS."""
        super().timeout_keep_alive_handler()
        self._watch_reader()

    def shutdown(self) -> None:
        """uvicorn's callback: the server ends. Closes the connection, or has it closed after its response."""
        super().shutdown()
        if self.transport.is_closing():
            self._watch_reader()
            if self.scheme == "https":
                self.loop.call_later(TLS_SHUTDOWN_SECONDS, self.transport.abort)

    def _watch_reader(self) -> None:
        """Closes the connection unless its client reads. `close` alone would keep it until the client has read all."""
        if self._reader_timer is None:
            self._unsent_bytes = self.transport.get_write_buffer_size()
            self._reader_timer = self.loop.call_later(self._reader_seconds, self._end_slow_reader)

    def _end_slow_reader(self) -> None:
        self._reader_timer = None
        if self.transport.get_write_buffer_size() < self._unsent_bytes:
            self._watch_reader()
        else:
            log.info("Closed a connection whose client has read too little for %g s", self._reader_seconds)
            self.transport.abort()

    def _stop_reader_timer(self) -> None:
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio callback. Notifies the request that runs; uvicorn notifies the latest only, and pipelined ones come
        before it."""
        if self._running is not None:
            self._running.disconnected = True
            self._running.message_event.set()
        self._table.idle.pop(self, None)
        self._stop_head_timer()
        self._stop_reader_timer()
        if self._probe_timer is not None:
            self._probe_timer.cancel()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)


class Listener:
    """Accepts connections from a listening socket, at most `limit` at once.

    Has the interface of asyncio.Server that uvicorn's shutdown uses. Several processes may accept from one socket.
    """

    def __init__(
        self,
        listening: socket.socket,
        table: ConnectionTable,
        limit: int,
        protocol: Callable[[], HttpConnection],
        certificate: ServerCertificate | None,
        handshake_seconds: float,
        reader_seconds: float,
    ) -> None:
        self._socket = listening
        self._table = table
        self._limit = limit
        self._protocol = protocol
        self._certificate = certificate
        self._handshake_seconds = handshake_seconds
        self._reader_seconds = reader_seconds
        self._refused_sockets: deque[tuple[float, socket.socket]] = deque()  # with the time of the refusal
        self._loop = asyncio.get_running_loop()
        self._retry: asyncio.TimerHandle | None = None
        self._closed_idle = self._refused = 0  # since the latest log line
        self._failure = ""
        self._next_log_time = 0.0
        listening.setblocking(False)
        self._resume()

    def stop_accepting(self) -> None:
        """Leaves new connections to other processes. Those that were accepted are opened."""
        self._loop.remove_reader(self._socket)
        if self._retry is not None:
            self._retry.cancel()

    def close(self) -> None:
        """Stops accepting. The caller closes the socket."""
        self.stop_accepting()
        for task in self._table.opening.values():
            task.cancel()
        while self._refused_sockets:
            self._refused_sockets.popleft()[1].close()

    async def wait_closed(self) -> None:
        """Nothing is left to wait for."""

    def tick(self) -> None:
        """To be called once a second. Closes refused connections, and logs what has happened since the latest line, at
        most once in OVERLOAD_LOG_SECONDS."""
        while self._refused_sockets and self._refused_sockets[0][0] < self._loop.time() - REFUSAL_SECONDS:
            self._refused_sockets.popleft()[1].close()
        if not (self._closed_idle or self._refused or self._failure) or self._loop.time() < self._next_log_time:
            return
        self._next_log_time = self._loop.time() + OVERLOAD_LOG_SECONDS
        reason = self._failure or f"all {self._limit} connections of this front end are in use (--max-connections)"
        log.warning("Closed %d idle connections, refused %d: %s", self._closed_idle, self._refused, reason)
        self._closed_idle, self._refused, self._failure = 0, 0, ""

    def _resume(self) -> None:
        self._retry = None
        self._loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                connection, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no file descriptor or memory: the socket stays readable, so it is left alone
                self._failure = f"a connection cannot be accepted ({error.strerror})"
                self._closed_idle += self._table.close_longest_idle()
                self._loop.remove_reader(self._socket)
                self._retry = self._loop.call_later(ACCEPT_RETRY_SECONDS, self._resume)
                return
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)
            if self._table.count >= self._limit:
                if not self._table.close_longest_idle():
                    self._refuse(connection)
                    continue
                self._closed_idle += 1
            protocol = self._protocol()
            self._table.opening[protocol] = self._loop.create_task(self._open(connection, protocol))

    async def _open(self, connection: socket.socket, protocol: HttpConnection) -> None:
        """Performs the handshake of TLS, if there is any, and hands the connection to its protocol."""
        secured: dict[str, Any] = {}
        try:
            if self._certificate is not None:
                first = await self._first_byte(connection)
                if first.isalpha():
                    self._answer_and_close(connection, PLAIN_REQUEST)
                    return
                secured = {
                    "ssl": self._certificate.context,
                    "ssl_handshake_timeout": self._handshake_seconds,
                    "ssl_shutdown_timeout": self._reader_seconds,
                }
            await self._loop.connect_accepted_socket(lambda: protocol, connection, **secured)
        except OSError:  # includes ssl.SSLError: a client that speaks no TLS, or rejects the certificate
            pass
        finally:
            self._table.opening.pop(protocol, None)

    async def _first_byte(self, connection: socket.socket) -> bytes:
        """What the client sends first, left for the handshake: one byte, or b"" if it has closed. Otherwise the
        connection is closed: when the task is cancelled, or with TimeoutError after the time for a handshake."""
        readable = self._loop.create_future()
        self._loop.add_reader(connection, lambda: None if readable.done() else readable.set_result(None))
        try:
            async with asyncio.timeout(self._handshake_seconds):
                await readable
            first = connection.recv(1, socket.MSG_PEEK)
        except BaseException:
            self._loop.remove_reader(connection)
            connection.close()
            raise
        self._loop.remove_reader(connection)
        return first

    def _refuse(self, connection: socket.socket) -> None:
        """Answers 503 without reading, or closes a connection that expects TLS."""
        self._refused += 1
        self._answer_and_close(connection, REFUSAL if self._certificate is None else b"")

    def _answer_and_close(self, connection: socket.socket, answer: bytes) -> None:
        """Sends an answer to what has not been read. Closed at once, bytes that the client still sends would reset the
        connection before it has read the answer."""
        if answer:
            with contextlib.suppress(OSError):
                connection.send(answer)
                connection.shutdown(socket.SHUT_WR)
        self._refused_sockets.append((self._loop.time(), connection))
        if len(self._refused_sockets) > MAX_OPEN_REFUSALS:
            self._refused_sockets.popleft()[1].close()


class HttpServer(uvicorn.Server):
    """Serves an application on a listening socket until `stop`. Calls `on_tick` once a second."""

    def __init__(
        self,
        app: AsgiApp,
        settings: Settings,
        certificate: ServerCertificate | None = None,
        on_tick: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(_uvicorn_config(app, settings))
        self.server_state = ConnectionTable()
        self._settings = settings
        self._certificate = certificate
        self._on_tick = on_tick
        self._stop = asyncio.Event()
        self._hands_over = False

    def stop(self, hand_over: bool = False) -> None:
        """Stops accepting connections; requests in flight are finished. `hand_over`: other front ends have the port."""
        self._hands_over = hand_over
        self.should_exit = True
        self._stop.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Closes idle connections, and others after their response."""
        if self._hands_over:
            table = self.server_state
            assert isinstance(table, ConnectionTable)
            self._listener.stop_accepting()
            table.default_headers = [*table.default_headers, (b"connection", b"close")]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HAND_OVER_SECONDS):
                    while table.count:
                        await asyncio.sleep(0.05)
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Does nothing: main.py registers the handlers."""
        yield

    async def startup(self, sockets: Sequence[socket.socket] | None = None) -> None:
        assert sockets is not None
        assert isinstance(self.server_state, ConnectionTable)
        seconds = self._settings.read_timeout, self._settings.slow_reader_timeout
        protocol = partial(HttpConnection, self.server_state, *seconds, config=self.config, app_state={})
        limit = connection_limit(self._settings.max_connections)
        if self._certificate is not None:
            map_large_blocks()  # for uvloop's buffers
        self._listener = Listener(sockets[0], self.server_state, limit, protocol, self._certificate, *seconds)
        self.servers = [self._listener]  # type: ignore[list-item]
        self.started = True

    async def main_loop(self) -> None:
        """One tick per second instead of uvicorn's ten."""
        while not await self.on_tick(0):
            self._on_tick()
            self._listener.tick()
            if self._certificate is not None:
                self._certificate.reload_if_changed()
                # uvloop has a buffer of 256 KiB for each TLS connection, of which a small part is used. Without this,
                # new buffers would in time have used all of the memory that those of closed connections have left.
                release_freed_memory()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), TICK_SECONDS)


def connection_limit(given: int | None) -> int:
    """How many connections one front end may have open: `given`, or the default; fewer if open files do not suffice."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    possible = max(1, files - min(RESERVED_FILES, files // 2)) if files != resource.RLIM_INFINITY else 1 << 30
    if given is not None and given > possible:
        log.warning(
            "--max-connections %d needs more open files than the limit of %d allows: %d connections are possible. "
            "Raise the hard limit (ulimit -Hn).", given, files, possible,
        )  # fmt: skip
    return min(DEFAULT_MAX_CONNECTIONS if given is None else given, possible)


def _uvicorn_config(app: AsgiApp, settings: Settings) -> uvicorn.Config:
    """uvicorn without its own logs, signal handlers and Server header."""
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    return uvicorn.Config(
        app,
        http=HttpConnection,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=int(settings.graceful_termination_timeout),
    )
