"""Who sends a request: the client whose share of the server it uses, by API key, else by address."""

import hashlib
import logging
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import NamedTuple

from falcon.asgi import Request

from tgi.api import errors
from tgi.microkernel.admission.api_keys import MAX_PRIORITY, ApiKey, parse_api_key
from tgi.microkernel.errors import UserError
from tgi.microkernel.messages.protocol import RequestContext
from tgi.microkernel.settings.loading import reread_api_keys
from tgi.microkernel.settings.table import Settings

log = logging.getLogger(__name__)

# The provider of an IPv6 client gives it a network of this size: it may send from any address there.
IPV6_CLIENT_BITS = 64
KEY_PREFIX = "key "  # of the names of clients with a key


class Client(NamedTuple):
    """A client of the server. None means no limit."""

    name: str  # digest of its API key, or its address
    permit_id: int  # its number in `Permits`
    weight: float = 1.0
    priority: int = 0
    requests: int | None = None  # at once
    tokens_per_minute: int | None = None
    batch: bool = False  # the requests of its batches: they wait for all others, and need no permits

    @property
    def share(self) -> str:
        """Whose share of the server it uses: batches have one of their own, as clients have one priority each."""
        return f"{self.name} batch" if self.batch else self.name

    def context(self, fingerprint: bytes, request_key: int = 0, request_index: int = 0) -> RequestContext:
        """The context of a request of this client to a tokenizer."""
        return RequestContext(fingerprint, request_key, request_index, self.share, self.weight, self.priority)

    @property
    def for_batches(self) -> "Client":
        """The same client with the priority of its batches, which is below that of any client."""
        return self._replace(priority=self.priority - 2 * MAX_PRIORITY - 1, batch=True)


class Clients:
    """Identifies the client of each request. `reload` replaces the keys while requests run."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._proxies = [ip_network(text) for text in settings.trusted_proxies]
        self._by_digest: dict[bytes, Client] = {}
        self.first_key = ""  # that the readiness probe sends
        self._set_keys(settings.api_key)

    def reload(self) -> int:
        """Reads the key file again; requests that run are not affected. Returns the number of keys.

        Raises UserError if the file is invalid; the keys then stay.
        """
        self._set_keys(reread_api_keys(self._settings))
        return len(self._by_digest)

    def reload_if_readable(self) -> bool:
        """As `reload`, but logs an invalid file. Returns whether it was valid."""
        try:
            self.reload()
        except UserError as error:
            log.error("The keys are not reloaded, the previous ones stay: %s", error)
            return False
        return True

    def identify(self, req: Request, *, needs_key: bool) -> Client:
        """The client of a request. Raises Rejection, a 401, if a key is needed and the request has no valid one."""
        if self._by_digest:
            scheme, _, bearer = (req.get_header("authorization") or "").partition(" ")
            for given in (bearer if scheme.lower() == "bearer" else "", req.get_header("x-api-key") or ""):
                # Digests are compared, so the time tells nothing about a key.
                if (found := self._by_digest.get(_digest(given.encode("latin-1", "replace")))) is not None:
                    return found
            if needs_key:
                raise errors.unauthorized()
        return client_at(self.address_of(req))

    def named(self, name: str) -> Client | None:
        """The client with this name, if requests of it are accepted now."""
        if not self._by_digest:
            return None if name.startswith(KEY_PREFIX) else client_at(name)
        return next((client for client in self._by_digest.values() if client.name == name), None)

    def _set_keys(self, lines: tuple[str, ...]) -> None:
        keys = [parse_api_key(line) for line in lines]
        self._by_digest = {_digest(key.key.encode()): _client_with(key) for key in keys}
        self.first_key = keys[0].key if keys else ""

    def address_of(self, req: Request) -> str:
        """The address that the request comes from: the last one in X-Forwarded-For that is no trusted proxy's, if a
        trusted proxy has sent it."""
        peer = req.scope.get("client")
        address = str(peer[0]) if peer else ""
        if not self._proxies or not self._is_trusted(address):
            return address
        for item in reversed((req.get_header("x-forwarded-for") or "").split(",")):
            forwarded = _without_port(item.strip())
            if _parse_address(forwarded) is None:
                break  # not written by a proxy
            address = forwarded
            if not self._is_trusted(forwarded):
                break
        return address

    def _is_trusted(self, address: str) -> bool:
        found = _parse_address(address)
        return found is not None and any(found in network for network in self._proxies)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _client_with(key: ApiKey) -> Client:
    digest = _digest(key.key.encode())
    limits = key.requests, key.tokens_per_minute
    return Client(f"{KEY_PREFIX}{digest[:8].hex()}", _permit_id(digest), key.weight, key.priority, *limits)


@lru_cache(maxsize=4096)
def client_at(address: str) -> Client:
    """The client at an address; with IPv6 a network is one client."""
    match _parse_address(address):
        case IPv4Address() as found:
            address = str(found)
        case IPv6Address() as found:
            address = str(ip_network((int(found), IPV6_CLIENT_BITS), strict=False))
    return Client(address, _permit_id(_digest(address.encode())))


def _permit_id(digest: bytes) -> int:
    return int.from_bytes(digest[:6]) or 1


def _parse_address(text: str) -> IPv4Address | IPv6Address | None:
    """The address, or None. A socket for both versions of IP has IPv4 addresses in IPv6's form."""
    try:
        found = ip_address(text)
    except ValueError:
        return None
    return (isinstance(found, IPv6Address) and found.ipv4_mapped) or found


def _without_port(text: str) -> str:
    """The address in an item of X-Forwarded-For, to which some proxies append a port: `1.2.3.4:5`, `[::1]:5`."""
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0] if text.count(":") == 1 else text


ANONYMOUS = client_at("")
