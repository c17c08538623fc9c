"""The HTTP/1.1 server: uvicorn, with a connection class for what its own overlooks (upgrades, pipelined requests at a
disconnect, long heads, other HTTP versions), and under the supervisor's watchdog."""

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from tgi.api.asgi import AsgiApp
from tgi.microkernel.process import Process
from tgi.microkernel.settings import Settings

# Of request line and headers. httptools keeps them in memory without a limit.
MAX_HEAD_BYTES = 64 << 10
# A silent connection stays open this long: longer than usual load balancers reuse it (60 s).
KEEP_ALIVE_SECONDS = 75
# Between two heartbeats to the watchdog.
BEAT_SECONDS = 1.0


class HttpConnection(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._cycles: list[RequestResponseCycle] = []  # requests whose response is not complete
        self._in_head = True
        self._head_bytes = 0

    def data_received(self, data: bytes) -> None:
        """Feeds the parser. An upgrade is ignored (RFC 9110, 7.8): the request is parsed again without it.

        Java's HTTP client offers `Upgrade: h2c` with every first request; its body would be lost otherwise.
        """
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            rest = data[upgrade.args[0] :]
            head = self._head_without_upgrade()
            self.parser = httptools.HttpRequestParser(self)
            self.data_received(head + rest)
            return
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
            return
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.send_400_response(f"The headers of this request are over {MAX_HEAD_BYTES} bytes.")

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
        self._in_head = True

    def on_headers_complete(self) -> None:
        """httptools callback. Starts the request, unless its head is parsed again without its upgrade.

        Raises HttpParserError, a 400, for HTTP versions that falcon would answer with a 500, and for CONNECT, which
        httptools always takes for an upgrade.
        """
        if self.parser.get_http_version() not in ("1.0", "1.1") or self.parser.get_method() == b"CONNECT":
            raise httptools.HttpParserError("only HTTP/1.0 and 1.1 are supported, and no CONNECT")
        self._in_head = False
        self._head_bytes = 0
        if not self.parser.should_upgrade():
            super().on_headers_complete()
            self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete] + [self.cycle]

    def on_message_complete(self) -> None:
        """httptools callback: the body is complete."""
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio callback. Notifies every request of the connection; uvicorn notifies the latest only, and pipelined
        ones come before it."""
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)


class HttpServer(uvicorn.Server):
    """uvicorn's server. The process handles signals, and a heartbeat per second replaces ten wake-ups per second."""

    def __init__(self, config: uvicorn.Config, process: Process) -> None:
        super().__init__(config)
        self._process = process
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """Stops accepting connections; requests in flight are finished."""
        self._process.stop()
        self._process.publish_state("draining")
        self.should_exit = True
        self._stop.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Does nothing: main.py registers the handlers."""
        yield

    async def main_loop(self) -> None:
        """Once a second: the Date header, and the heartbeat."""
        while not await self.on_tick(0):
            self._process.heartbeat(BEAT_SECONDS)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), BEAT_SECONDS)
        self._process.extend_deadline(self._process.settings.graceful_termination_timeout + 10)


def uvicorn_config(app: AsgiApp, settings: Settings) -> uvicorn.Config:
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
