"""The address of the server that a command asks: `tgi bench URL`, `tgi chat URL`, `tgi batch --url URL`."""

import http.client
from typing import NamedTuple
from urllib.parse import urlsplit

from tgi.microkernel.errors import UserError


class ServerAddress(NamedTuple):
    """Where requests to a server go. `prefix` stands before the path of each, without a slash at its end."""

    url: str
    host: str
    port: int
    tls: bool
    prefix: str

    @classmethod
    def parse(cls, url: str) -> "ServerAddress":
        """Of HOST:PORT or an http:// or https:// URL, also one that ends in /v1, as base URLs of OpenAI's clients do.
        Raises UserError for anything else."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if host is None or parts.scheme not in ("http", "https"):
            raise UserError(f"{url!r} is not the URL of a server. Give one such as http://127.0.0.1:3000.")
        tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
        return cls(url, host, port or (443 if tls else 80), tls, prefix)

    @property
    def host_header(self) -> str:
        name = f"[{self.host}]" if ":" in self.host else self.host
        return name if self.port == (443 if self.tls else 80) else f"{name}:{self.port}"

    def connection(self, timeout: float | None = None) -> http.client.HTTPConnection:
        """A connection that connects with its first request. `timeout`: seconds of each operation, None: no limit."""
        kind = http.client.HTTPSConnection if self.tls else http.client.HTTPConnection
        return kind(self.host, self.port, timeout=timeout)
