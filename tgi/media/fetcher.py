"""Fetches images from URLs of clients: public hosts alone, within limits of time, size and redirects.

The address is checked that is connected to, at each redirect again, so a name that resolves to another address the
second time leads nowhere else. Proxies of the environment are not used: they would connect to unchecked addresses.
"""

import base64
import contextlib
import http.client
import socket
import ssl
import threading
import time
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from urllib.parse import SplitResult, urljoin, urlsplit

from tgi import __version__

MAX_REDIRECTS = 5
CHUNK_BYTES = 64 << 10
# Prefixes of IPv6 addresses that lead to the IPv4 address in their last 32 bits.
EMBEDDED_IPV4 = (ip_network("64:ff9b::/96"), ip_network("64:ff9b:1::/48"), ip_network("::/96"))
SIX_TO_FOUR = ip_network("2002::/16")


class ImageError(Exception):
    """An image that cannot be loaded. The text is for the client."""


@dataclass(frozen=True)
class FetchRules:
    """What may be fetched."""

    urls: bool = True
    allowed_hosts: tuple[str, ...] = ()  # empty: all; *.NAME stands for all below a name
    private_hosts: tuple[str, ...] = ()  # whose addresses need not be public
    max_bytes: int = 32 << 20
    seconds: float = 10.0  # for all redirects together


def fetch(url: str, rules: FetchRules) -> bytes:
    """The body that a URL leads to. Raises ImageError."""
    if not rules.urls:
        raise ImageError("this server fetches no images from URLs. Send the image as a data URL")
    deadline = time.monotonic() + rules.seconds
    for _ in range(MAX_REDIRECTS + 1):
        parts = _checked(url, rules)
        try:
            found = _get(parts, rules, deadline)
        except (OSError, http.client.HTTPException, ValueError) as error:
            if time.monotonic() >= deadline:
                raise ImageError(f"{_shown(parts)} has not sent the image within {rules.seconds:g} s") from error
            reason = getattr(error, "strerror", None) or type(error).__name__
            raise ImageError(f"the image cannot be fetched from {_shown(parts)}: {reason}") from error
        if isinstance(found, bytes):
            return found
        url = urljoin(url, found)
    raise ImageError(f"the URL leads to more than {MAX_REDIRECTS} redirects")


def is_data_url(url: str) -> bool:
    """Whether a URL has the image itself."""
    return url[:5].lower() == "data:"


def from_data_url(url: str) -> bytes:
    """The bytes in a data URL. Its media type is not read: the bytes tell the format. Raises ImageError."""
    kind, comma, text = url.partition(",")
    if not comma or not kind.lower().endswith(";base64"):
        raise ImageError("a data URL in base64 was expected: data:image/png;base64,…")
    try:
        data = base64.b64decode("".join(text.split()), validate=True)
    except ValueError as error:
        raise ImageError(f"the data URL is not valid base64: {error}") from error
    if not data:
        raise ImageError("the data URL is empty")
    return data


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Whether this is an address of the internet: not private, loopback, link-local, multicast, reserved, or one that
    leads to such an IPv4 address."""
    if isinstance(address, IPv6Address):
        inner = address.ipv4_mapped
        if any(address in network for network in EMBEDDED_IPV4):
            inner = IPv4Address(int(address) & 0xFFFFFFFF)
        elif address in SIX_TO_FOUR:
            inner = IPv4Address(int(address) >> 80 & 0xFFFFFFFF)
        elif address.teredo is not None:
            return False
        if inner is not None:
            return is_public(inner)
    return address.is_global and not address.is_multicast and not address.is_reserved


def _checked(url: str, rules: FetchRules) -> SplitResult:
    """The parts of a URL that may be fetched. Raises ImageError."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ImageError(f"the URL is not valid: {error}") from error
    if parts.scheme not in ("http", "https") or not host or port == 0:
        raise ImageError("a URL that begins with https://HOST or http://HOST was expected, or a data URL")
    if parts.username is not None or parts.password is not None:
        raise ImageError("the URL has a user name or password, which are not sent")
    if any(not 0x20 < ord(character) < 0x7F for character in url):
        raise ImageError("the URL has a space, a control character or one outside ASCII: these must be encoded")
    if rules.allowed_hosts and not any(_matches(host, pattern) for pattern in rules.allowed_hosts):
        raise ImageError(f"this server fetches no images from {host[:255]}")
    return parts


def _matches(host: str, pattern: str) -> bool:
    pattern, host = pattern.lower(), host.rstrip(".")
    return host.endswith(pattern[1:]) if pattern.startswith("*.") else host == pattern


def _shown(parts: SplitResult) -> str:
    return (parts.hostname or "")[:255]


def _get(parts: SplitResult, rules: FetchRules, deadline: float) -> bytes | str:
    """The body of one response, or where it redirects to."""
    host = parts.hostname or ""
    secure = parts.scheme == "https"
    sock = _connect(host, parts.port or (443 if secure else 80), rules, deadline)
    # A server that sends a byte now and then never reaches the socket's timeout.
    watchdog = threading.Timer(max(0.0, deadline - time.monotonic()), _shut_down, [sock])
    watchdog.daemon = True
    watchdog.start()
    try:
        if secure:
            sock = ssl.create_default_context().wrap_socket(sock, server_hostname=host)
            watchdog.args = [sock]
        connection = http.client.HTTPConnection(parts.netloc)
        connection.sock = sock
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.putrequest("GET", target, skip_accept_encoding=True)
        connection.putheader("User-Agent", f"tgi/{__version__}")
        connection.putheader("Accept", "image/*")
        connection.putheader("Accept-Encoding", "identity")
        connection.endheaders()
        found = _read(connection.getresponse(), parts, rules)
        if time.monotonic() >= deadline:  # a body of unknown length has ended with the connection
            raise TimeoutError
        return found
    finally:
        watchdog.cancel()
        sock.close()


def _read(response: http.client.HTTPResponse, parts: SplitResult, rules: FetchRules) -> bytes | str:
    location = response.getheader("location")
    if response.status in (301, 302, 303, 307, 308) and location:
        return location
    if response.status != 200:
        raise ImageError(f"{_shown(parts)} has answered with status {response.status}")
    if response.getheader("content-encoding", "identity").lower() != "identity":
        raise ImageError(f"{_shown(parts)} has sent a compressed body, which was not asked for")
    too_large = ImageError(f"the image is larger than {rules.max_bytes} bytes")
    length = response.length
    if (length or 0) > rules.max_bytes:
        raise too_large
    body = bytearray()
    while chunk := response.read(CHUNK_BYTES):
        body += chunk
        if len(body) > rules.max_bytes:
            raise too_large
    if length is not None and len(body) < length:
        raise http.client.IncompleteRead(b"", length - len(body))
    return bytes(body)


def _connect(host: str, port: int, rules: FetchRules, deadline: float) -> socket.socket:
    """Connects to an address of the host that may be used. Raises ImageError if it has none, and OSError."""
    allows_private = any(_matches(host, pattern) for pattern in rules.private_hosts)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ImageError(f"the name {host[:255]} cannot be resolved") from error
    usable = [one for one in found if allows_private or is_public(ip_address(str(one[4][0]).partition("%")[0]))]
    if not usable:
        raise ImageError(f"{host[:255]} has no public address: this server fetches images from public hosts alone")
    failure: OSError = TimeoutError("timed out")
    for family, kind, protocol, _, address in usable:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            break
        sock = socket.socket(family, kind, protocol)
        sock.settimeout(remaining)
        try:
            sock.connect(address)
        except OSError as error:
            sock.close()
            failure = error
            continue
        return sock
    raise failure


def _shut_down(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended by itself
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
