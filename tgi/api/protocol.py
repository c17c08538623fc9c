"""uvicorn's HTTP/1.1 connection, made to see what it overlooks: upgrades, lost pipelines, long heads, other HTTP."""

from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

# Request line and headers. httptools keeps them in memory however long they are.
MAX_HEAD_BYTES = 64 << 10


class Protocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._cycles: list[RequestResponseCycle] = []  # requests of this connection whose answer is not complete
        self._in_head = True
        self._head_bytes = 0

    def data_received(self, data: bytes) -> None:
        """Feeds the parser. An upgrade is not taken up (RFC 9110, 7.8): what follows is an ordinary request.

        Java's HTTP client offers `Upgrade: h2c` with every first request; its body would be lost otherwise.
        """
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            rest = data[upgrade.args[0] :]
            head = self._plain_head()
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

    def _plain_head(self) -> bytes:
        """The head of the current request without what asks for an upgrade."""
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + self.parser.get_http_version().encode()]
        for name, value in self.headers:
            if name == b"connection":
                tokens = [token.strip() for token in value.split(b",")]
                value = b", ".join(t for t in tokens if t.lower() not in (b"upgrade", b"http2-settings"))
            if name not in (b"upgrade", b"http2-settings"):
                lines.append(name + b": " + value)
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def on_message_begin(self) -> None:
        """A new request: its head comes now."""
        super().on_message_begin()
        self._in_head = True

    def on_headers_complete(self) -> None:
        """The request begins, unless its head is to be read again without its upgrade.

        Raises HttpParserError, a 400, for what falcon takes for a defect of the server and for what is never without
        an upgrade.
        """
        if self.parser.get_http_version() not in ("1.0", "1.1") or self.parser.get_method() == b"CONNECT":
            raise httptools.HttpParserError("only HTTP/1.0 and 1.1 are spoken here, and this is no proxy")
        self._in_head = False
        self._head_bytes = 0
        if not self.parser.should_upgrade():
            super().on_headers_complete()
            self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete] + [self.cycle]

    def on_message_complete(self) -> None:
        """The body is complete."""
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tells every request of the connection, not the latest alone: pipelined ones come before it."""
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)
