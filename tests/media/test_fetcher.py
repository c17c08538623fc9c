"""Fetching from hostile servers, and only from public ones."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from ipaddress import ip_address

import pytest

from tgi.media.fetcher import FetchRules, ImageError, fetch, from_data_url, is_public

PRIVATE = (
    "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
    "255.255.255.255", "198.18.0.1", "192.0.2.1", "::1", "::", "fe80::1", "fd00::1", "ff02::1", "::ffff:127.0.0.1",
    "::ffff:169.254.169.254", "64:ff9b::7f00:1", "64:ff9b:1::a00:1", "2002:7f00:1::1", "2001:db8::1", "::127.0.0.1",
    "2001:0:53aa:64c:0:0:80ff:fffe", "240.0.0.1",
)  # fmt: skip


def test_addresses() -> None:
    assert [one for one in PRIVATE if is_public(ip_address(one))] == []
    public = ("8.8.8.8", "2001:4860:4860::8888", "::ffff:8.8.8.8", "64:ff9b::808:808")
    assert all(is_public(ip_address(one)) for one in public)


class HostileServer:
    """Answers each connection with what `answer` makes of the request line; the answer may come in pieces."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.requests: list[bytes] = []
        self.answer: Callable[[socket.socket], None] = lambda connection: None
        self.ended = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def url(self, path: str = "/a.png", host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with closing(connection):
            head = b""
            while b"\r\n\r\n" not in head and (more := connection.recv(4096)):
                head += more
            self.requests.append(head)
            with suppress(OSError):  # the client has given up
                self.answer(connection)


@pytest.fixture
def server() -> Iterator[HostileServer]:
    server = HostileServer()
    yield server
    server.ended.set()
    server.listener.close()


def respond(body: bytes = b"picture", status: str = "200 OK", *headers: str) -> Callable[[socket.socket], None]:
    lines = [f"HTTP/1.1 {status}", *(headers or (f"Content-Length: {len(body)}",)), "", ""]
    return lambda connection: connection.sendall("\r\n".join(lines).encode() + body)


LOCAL = FetchRules(private_hosts=("127.0.0.1", "localhost"), max_bytes=1000, seconds=5.0)


def test_a_body_is_fetched(server: HostileServer) -> None:
    server.answer = respond()
    assert fetch(server.url("/a b".replace(" ", "%20") + "?x=1"), LOCAL) == b"picture"
    (head,) = server.requests
    assert head.startswith(b"GET /a%20b?x=1 HTTP/1.1\r\n")
    assert b"Accept-Encoding: identity" in head
    assert b"Authorization" not in head
    assert b"Cookie" not in head


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "2130706433", "0x7f.1", "0"])
def test_no_connection_is_made_to_a_private_address(server: HostileServer, host: str) -> None:
    with pytest.raises(ImageError, match=r"has no public address|cannot be resolved"):
        fetch(server.url(host=host), FetchRules(seconds=5.0))
    assert not server.requests


def test_a_redirect_is_checked_again(server: HostileServer) -> None:
    server.answer = respond(b"", "302 Found", f"Location: {server.url('/b', 'localhost')}", "Content-Length: 0")
    with pytest.raises(ImageError, match="localhost has no public address"):
        fetch(server.url(), FetchRules(private_hosts=("127.0.0.1",)))
    assert len(server.requests) == 1
    for location, reason in (("file:///etc/passwd", "https://HOST"), ("/c", "more than 5 redirects")):
        server.answer = respond(b"", "302 Found", f"Location: {location}", "Content-Length: 0")
        with pytest.raises(ImageError, match=reason):
            fetch(server.url(), LOCAL)


def test_a_name_with_a_second_address_is_checked_where_it_is_connected(
    server: HostileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that resolves to a public address first and to a private one later (DNS rebinding) is resolved once."""
    looked_up = []

    def resolve(host: str, port: int, **kwargs: object) -> list[object]:
        looked_up.append(host)
        address = "192.0.2.1" if len(looked_up) == 1 else "127.0.0.1"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(ImageError, match="no public address"):
        fetch(server.url(host="rebinding.example"), FetchRules(seconds=2.0))
    assert looked_up == ["rebinding.example"]
    assert not server.requests


def flood(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        connection.sendall(bytes(4096))


def endless_headers(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n")
    while True:
        connection.sendall(b"X: " + b"y" * 1000 + b"\r\n")


REFUSED: dict[str, tuple[Callable[[socket.socket], None], str]] = {
    "not found": (respond(b"secret", "404 Not Found"), "^127.0.0.1 has answered with status 404$"),
    "too large by its header": (respond(b"", "200 OK", "Content-Length: 99999999"), "larger than 1000 bytes"),
    "too large without one": (flood, "larger than 1000 bytes"),
    "compressed": (respond(b"x", "200 OK", "Content-Encoding: gzip", "Content-Length: 1"), "compressed"),
    "cut off": (respond(b"x", "200 OK", "Content-Length: 9"), "cannot be fetched"),
    "endless headers": (endless_headers, "cannot be fetched"),
    "no http": (lambda connection: connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n"), "cannot be fetched"),
    "closed": (lambda connection: None, "cannot be fetched"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(server: HostileServer, name: str) -> None:
    server.answer, reason = REFUSED[name]
    with pytest.raises(ImageError, match=reason) as raised:
        fetch(server.url(), LOCAL)
    assert "secret" not in str(raised.value)


def test_a_slow_server_ends_in_time(server: HostileServer) -> None:
    """Each byte comes long before a socket's timeout."""

    def drip(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n")
        while not server.ended.wait(0.05):
            connection.sendall(b"x")

    server.answer = drip
    with pytest.raises(ImageError, match=r"has not sent the image within 0\.5 s"):
        fetch(server.url(), FetchRules(private_hosts=("127.0.0.1",), seconds=0.5))


URLS = {
    "ftp://example.com/a.png": "https://HOST",
    "http:///a.png": "https://HOST",
    "http://[::1": "not valid",
    "http://host:99999/": "not valid",
    "http://user:word@example.com/": "user name or password",
    "http://example.com/a b": "must be encoded",
    "http://example.com/\r\nX: y": "must be encoded",
    "http://elsewhere.example/": "no images from elsewhere.example",
    "http://allowed.example.evil.com/": "no images from",
    "http://name.invalid.allowed.example/": "cannot be resolved",
}


@pytest.mark.parametrize("url", URLS)
def test_urls(url: str) -> None:
    with pytest.raises(ImageError, match=URLS[url]):
        fetch(url, FetchRules(allowed_hosts=("example.com", "*.allowed.example"), seconds=5.0))


def test_urls_may_be_switched_off() -> None:
    with pytest.raises(ImageError, match="data URL"):
        fetch("https://example.com/a.png", FetchRules(urls=False))


def test_data_urls() -> None:
    assert from_data_url("data:image/png;base64,aGk=") == b"hi"
    assert from_data_url("DATA:;BASE64,aG\nk=") == b"hi"
    for url in ("data:image/png,hi", "data:image/png;base64", "data:image/png;base64,a", "data:;base64,"):
        with pytest.raises(ImageError, match="data URL"):
            from_data_url(url)
