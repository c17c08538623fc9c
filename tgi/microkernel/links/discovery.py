"""Which processes of the role downstream there are: sockets of the run directory, or addresses of other hosts, whose
names are resolved again and again."""

import logging
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from ipaddress import ip_address
from urllib.parse import urlsplit

from tgi.microkernel.links.link import Link, PeerId

log = logging.getLogger(__name__)

# Between two resolutions of a name.
RESOLVE_SECONDS = 3.0
# Until an address is tried again that was a second one of a connected process: it may be that of another one by then.
RETRY_SECONDS = 10.0
# Answers of a resolver that mean: this name has no address now. Any other failure says nothing about the addresses.
NO_ADDRESS = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}
MAX_PORT = 65535


def nth_address(address: str, number: int) -> str:
    """The address at which the process with this place among several listens: the ports follow one another."""
    head, _, port = address.rpartition(":")
    return f"{head}:{int(port) + number}"


class Discovery:
    """The numeric addresses that tcp:// addresses mean now. Names are resolved by a thread of its own, so that a slow
    resolver delays nothing; a name that cannot be resolved is tried again."""

    def __init__(self, addresses: Iterable[str], seconds: float = RESOLVE_SECONDS) -> None:
        self._seconds = seconds
        self._ports: dict[str, list[int]] = defaultdict(list)  # of each name
        self._of_name: dict[str, frozenset[str]] = {}  # the latest answer for each name
        fixed = set()
        for address in addresses:
            url = urlsplit(address)
            assert url.hostname is not None
            assert url.port is not None
            if _is_numeric(url.hostname):
                fixed.add(_address(url.hostname, url.port))
            else:
                self._ports[url.hostname].append(url.port)
        self._fixed = frozenset(fixed)
        self._failing: set[str] = set()  # names
        self._closed = threading.Event()
        if self._ports:
            threading.Thread(target=self._resolve_forever, name="names", daemon=True).start()

    def addresses(self) -> frozenset[str]:
        return self._fixed.union(*self._of_name.copy().values())

    def close(self) -> None:
        """Ends the thread, without waiting for a resolution that it is at."""
        self._closed.set()

    def _resolve_forever(self) -> None:
        while not self._closed.is_set():
            for name, ports in self._ports.items():
                self._resolve(name, ports)
            self._closed.wait(self._seconds)

    def _resolve(self, name: str, ports: list[int]) -> None:
        try:
            hosts = resolve_name(name)
        except OSError as error:
            if name not in self._failing:
                log.warning("the name %s cannot be resolved: %s. Trying again.", name, error.strerror or error)
            self._failing.add(name)
            if error.errno in NO_ADDRESS:
                self._of_name[name] = frozenset()
            return
        self._failing.discard(name)
        found = frozenset(_address(host, port) for host in hosts for port in ports)
        if found != self._of_name.get(name):
            log.debug("%s is %s", name, ", ".join(sorted(hosts)))
        self._of_name[name] = found


def resolve_name(name: str) -> list[str]:
    """The addresses of a name: those of IPv4, or those of IPv6 if it has no other, since the two kinds usually belong
    to the same machines. Raises OSError."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # the name has an empty or too long part
        raise socket.gaierror(socket.EAI_NONAME, f"no name of a host ({error})") from error
    families = {family for family, *_ in found}
    chosen = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
    return sorted({str(place[0]) for family, _, _, _, place in found if family == chosen})


def _is_numeric(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _address(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


class DownstreamLinks:
    """The links to all processes of the role downstream, by address, kept equal to what is found.

    A process that ends may come back: its link is kept until its address is found no more. A process that is found at
    several addresses is connected once.
    """

    def __init__(
        self, find: Callable[[], Iterable[str]], connect: Callable[[str], Link], expected: Iterable[str] = ()
    ) -> None:
        """`expected`: addresses that are connected to before they are found for the first time."""
        self.links: dict[str, Link] = {}
        self._find = find
        self._connect = connect
        self._expected = set(expected)
        self._redundant: dict[str, PeerId] = {}  # addresses of processes that are connected at another one
        self._retry_at: dict[str, float] = {}  # of these addresses: when they are looked at again

    def follow(self) -> tuple[list[Link], list[Link]]:
        """Connects to what has been found. Returns the links that are new, and those to be closed: their processes are
        gone, or connected at another address."""
        found = set(self._find())
        self._expected -= found
        found |= self._expected
        removed = []
        for address, link in list(self.links.items()):
            # At an address that is found no more a process stays until its connection ends, and no other follows.
            link.has_other_link = self._has_other_link if address in found else _accept_none
            if link.peers:
                self._redundant.pop(address, None)
            if link.redundant_peer is not None:
                if address in found and self._redundant.get(address) != link.redundant_peer:
                    log.info("%s is the address of %s, which is connected at another one", address, link.redundant_peer)
                self._redundant[address] = link.redundant_peer
                self._retry_at[address] = time.monotonic() + RETRY_SECONDS
            if link.redundant_peer is not None or (address not in found and not link.peers):
                link.has_other_link = _accept_none  # what connects until it is closed
                removed.append(self.links.pop(address))
        connected = {peer for link in self.links.values() for peer in link.peers}
        self._redundant = {at: peer for at, peer in self._redundant.items() if at in found and peer in connected}
        known = {at for at in self._redundant if time.monotonic() < self._retry_at[at]}
        added = []
        for address in sorted(found - self.links.keys() - known):
            link = self.links[address] = self._connect(address)
            link.has_other_link = self._has_other_link
            added.append(link)
        return added, removed

    def _has_other_link(self, peer: PeerId, this: Link) -> bool:
        """Whether a process that has sent its Hello over this link is connected over another one."""
        return any(peer in link.peers for link in self.links.values() if link is not this)


def _accept_none(peer: PeerId, link: Link) -> bool:
    return True
