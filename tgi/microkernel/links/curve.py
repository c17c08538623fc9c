"""Links between hosts: the key files, and the guard of a socket that listens on TCP. CURVE encrypts and authenticates.

A deployment has four key pairs, made by `tgi keys new`, each in a file of its own: that of the schedulers, which accept
those of the hosts with workers and of the tokenizers; and that of the front ends, which the tokenizers accept. Who
connects knows the public key of whom it connects to. So no file lets its holder pretend to be a process downstream.
"""

import contextlib
import fcntl
import json
import logging
import os
import socket as sockets
import stat
import struct
import sys
import termios
import time
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import zmq
from zmq.utils import z85

from tgi.microkernel.errors import UserError
from tgi.microkernel.links.liveness import BEAT_SECONDS
from tgi.microkernel.observability.log import ComplaintLimit

log = logging.getLogger(__name__)

# The kinds of key files: whose they are, in words.
SCHEDULER, HOST, TOKENIZER, API = "scheduler", "host", "tokenizer", "api"
OWNERS = {SCHEDULER: "scheduler", HOST: "host", TOKENIZER: "tokenizer", API: "front end"}
KEY_CHARACTERS = 40  # of a Curve25519 key in Z85

# libzmq asks at this address who may connect, for all sockets of a context.
ZAP_ADDRESS = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"tgi"
# A connection that has not proved its key by then is closed. A handshake takes four and a half round trips.
HANDSHAKE_MILLISECONDS = 10_000
MAX_ROUND_TRIP_SECONDS = 2.0
# Connections whose peer has not sent a Hello. Of more the oldest are closed, so that strangers cannot take all file
# descriptors; a peer of this deployment needs only milliseconds to prove its key.
MAX_STRANGERS = 64
# A peer whose host or network is gone closes no connection. So the side that connects sends heartbeats, which libzmq
# answers, and a connection over which nothing has arrived for the second time is closed, by either side.
HEARTBEAT_MILLISECONDS, HEARTBEAT_TIMEOUT_MILLISECONDS = 1000, 3000
# Whether the system tells when something has arrived; elsewhere both sides send heartbeats.
MEASURES_SILENCE = sys.platform == "linux"
LAST_DATA_RECEIVED = slice(52, 56)  # of Linux's struct tcp_info: tcpi_last_data_recv, in milliseconds
# First interval between log records that strangers can cause, and between those of failed attempts to connect.
COMPLAINT_SECONDS, ATTEMPT_COMPLAINT_SECONDS = 10.0, 1.0
# Before an attempt to connect after one that has failed; doubled with each.
RETRY_SECONDS, MAX_RETRY_SECONDS = 0.5, 8.0


# --- key files --------------------------------------------------------------------------------------------------------


class ListeningKeys(NamedTuple):
    """The keys of a socket that others connect to."""

    secret: bytes
    accepted: frozenset[bytes]  # public keys of those who may connect


class ConnectingKeys(NamedTuple):
    """The keys of a socket that connects."""

    secret: bytes
    server: bytes  # the public key of the process to which it connects


def create_keys(directory: Path) -> list[Path]:
    """Creates the files of a new deployment, in the order of OWNERS. Raises UserError if one exists."""
    _require_curve()
    pairs = {kind: zmq.curve_keypair() for kind in OWNERS}
    public = {kind: pair[0].decode() for kind, pair in pairs.items()}
    contents: dict[str, dict[str, Any]] = {
        SCHEDULER: {"accepted": [public[HOST], public[TOKENIZER]]},
        HOST: {SCHEDULER: public[SCHEDULER]},
        TOKENIZER: {SCHEDULER: public[SCHEDULER], "accepted": [public[API]]},
        API: {TOKENIZER: public[TOKENIZER]},
    }
    files = [directory / _file_name(kind) for kind in contents]
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if exists := next((file for file in files if os.path.lexists(file)), None):
            raise UserError(f"{exists} exists, and keys are never overwritten. Name another directory, or remove it.")
        for file, (kind, content) in zip(files, contents.items(), strict=True):
            with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
                out.write(json.dumps({"for": kind, "secret": pairs[kind][1].decode(), **content}, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"Cannot write keys to {directory}: {error.strerror}. Name another directory.") from error
    return files


def load_scheduler_keys(keys: str | Path) -> ListeningKeys:
    """The keys of --listen. `keys` is the file, or the directory that contains it. Raises UserError if the file cannot
    be used or other users can read it."""
    return _listening_keys(*_read(keys, "--listen", SCHEDULER))


def load_tokenizer_keys(keys: str | Path) -> ListeningKeys:
    """The keys of --tokenizer-listen, as `load_scheduler_keys`."""
    return _listening_keys(*_read(keys, "--tokenizer-listen", TOKENIZER))


def load_host_keys(keys: str | Path) -> ConnectingKeys:
    """The keys of --connect for workers and tokenizers, as `load_scheduler_keys`."""
    return _connecting_keys(*_read(keys, "--connect", HOST, TOKENIZER), SCHEDULER)


def load_api_keys(keys: str | Path) -> ConnectingKeys:
    """The keys of --connect for front ends, as `load_scheduler_keys`."""
    return _connecting_keys(*_read(keys, "--connect of front ends", API), TOKENIZER)


def load_group_keys(keys: str | Path) -> tuple[ListeningKeys, ConnectingKeys]:
    """The keys of --group, for the first rank and for those that connect to it. Each host may run any rank, so the key
    of the hosts, which all of them have, is at both ends. Raises UserError as `load_host_keys`."""
    file, content = _read(keys, "--group", HOST)
    secret = _key(content.get("secret"), file)
    public = zmq.curve_public(secret)
    return ListeningKeys(secret, frozenset((public,))), ConnectingKeys(secret, public)


def host_file(keys: str | Path) -> Path:
    """The hosts' file, in the directory `keys` or next to the file `keys`. Raises UserError if it cannot be used."""
    path = Path(keys).expanduser()
    file = (path if path.is_dir() else path.parent) / _file_name(HOST)
    _read(file, "--ray", HOST)
    return file


def _listening_keys(file: Path, content: dict[str, Any]) -> ListeningKeys:
    accepted = content.get("accepted")
    if not isinstance(accepted, list) or not accepted:
        raise _damaged(file)
    return ListeningKeys(_key(content.get("secret"), file), frozenset(_key(one, file) for one in accepted))


def _connecting_keys(file: Path, content: dict[str, Any], server: str) -> ConnectingKeys:
    return ConnectingKeys(_key(content.get("secret"), file), _key(content.get(server), file))


def _file_name(kind: str) -> str:
    return f"{kind}.key"


def _read(keys: str | Path, flag: str, *kinds: str) -> tuple[Path, dict[str, Any]]:
    """A file of one of these kinds, and its content; in a directory that of the first kind that is there."""
    file = Path(keys).expanduser()
    if file.is_dir():
        found = (file / _file_name(kind) for kind in kinds)
        file = next((one for one in found if os.path.lexists(one)), file / _file_name(kinds[0]))
    _require_curve()
    try:
        with file.open("rb") as opened:
            status = os.fstat(opened.fileno())
            if status.st_uid not in (os.getuid(), 0) or status.st_mode & 0o077:
                raise UserError(
                    f"The key file {file} belongs to user {status.st_uid} with mode "
                    f"{stat.S_IMODE(status.st_mode):04o}, so other users may know the keys. Make new ones with "
                    "`tgi keys new`, or, if only this user has ever had access: `chmod 600` it."
                )
            content = json.loads(opened.read(1 << 20))
    except OSError as error:
        raise UserError(
            f"The key file {file} cannot be read: {error.strerror}. `tgi keys new` makes one; give it with --keys."
        ) from error
    except ValueError as error:
        raise _damaged(file) from error
    if not isinstance(content, dict) or content.get("for") not in OWNERS:
        raise _damaged(file)
    if content["for"] not in kinds:
        raise UserError(
            f"The key file {file} is that of a {OWNERS[content['for']]}; {flag} needs that of a {OWNERS[kinds[0]]}, "
            f"which `tgi keys new` has named {_file_name(kinds[0])}."
        )
    return file, content


def _key(value: object, file: str | Path) -> bytes:
    if not isinstance(value, str) or len(value) != KEY_CHARACTERS:
        raise _damaged(file)
    try:
        zmq.curve_public(value.encode())
    except (ValueError, zmq.ZMQError) as error:
        raise _damaged(file) from error
    return value.encode()


def _damaged(file: str | Path) -> UserError:
    return UserError(f"The key file {file} is not one that `tgi keys new` has made. Copy it again, or make new keys.")


def _require_curve() -> None:
    if not zmq.has("curve"):
        raise UserError(
            "Links between hosts need libzmq with CURVE, which this pyzmq lacks. Install pyzmq from a wheel: "
            "`pip install --force-reinstall --only-binary :all: pyzmq`."
        )


# --- sockets ----------------------------------------------------------------------------------------------------------


def use_connecting_keys(socket: "zmq.Socket[bytes]", keys: ConnectingKeys) -> None:
    """Makes a socket that will connect accept only a process that has the secret key."""
    socket.curve_serverkey = keys.server
    socket.curve_secretkey = keys.secret
    socket.curve_publickey = zmq.curve_public(keys.secret)


class ConnectionGuard:
    """Decides who may connect to a socket that listens on TCP, and knows which connections are open.

    The socket has a context of its own, which must not be shared: ZAP requests come from all sockets of a context, and
    the context's I/O thread does all work that strangers cause.
    """

    def __init__(self, socket: "zmq.Socket[bytes]", address: str, keys: ListeningKeys) -> None:
        """To be called before the socket is bound to `address`."""
        self.connections: dict[int, None] = {}  # the open ones, by file descriptor, the oldest first
        self._address = address
        self._port = urlsplit(address).port
        self._accepted_keys = keys.accepted
        self._complaints = ComplaintLimit(COMPLAINT_SECONDS)
        self._look_at = 0.0  # when close_silent_if_due is due, by time.monotonic
        socket.curve_server = True
        socket.curve_secretkey = keys.secret
        socket.zap_domain = ZAP_DOMAIN
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an answer to its ZAP request, no connection is admitted
        self.zap: zmq.Socket[bytes] = socket.context.socket(zmq.REP)
        self.zap.bind(ZAP_ADDRESS)

    def authenticate(self) -> None:
        """Answers all ZAP requests. To be called when `zap` is readable."""
        while self.zap.poll(0):
            version, request, domain, address, _, mechanism, *credentials = self.zap.recv_multipart()
            known = mechanism == b"CURVE" and domain == ZAP_DOMAIN and len(credentials) == 1
            known = known and z85.encode(credentials[0]) in self._accepted_keys
            status = (b"200", b"OK") if known else (b"400", b"unknown key")
            if not known:
                self._complain(f"rejected a connection from {address.decode(errors='replace')}: its key is unknown")
            self.zap.send_multipart([version, request, *status, b"", b""])

    def closed_connections(self, monitor: "zmq.Socket[bytes]") -> list[int]:
        """Reads all events of the socket's monitor. Returns the connections that have been closed."""
        closed = []
        while monitor.poll(0):
            event, value = struct.unpack("=HI", monitor.recv_multipart()[0])
            if event == zmq.EVENT_ACCEPTED:
                self.connections[value] = None
            elif event == zmq.EVENT_DISCONNECTED:
                self.connections.pop(value, None)
                closed.append(value)
        return closed

    def shed_strangers(self, peers: Container[int]) -> None:
        """Closes the oldest connections besides those of `peers` if there are too many."""
        strangers = [connection for connection in self.connections if connection not in peers]
        if len(strangers) <= MAX_STRANGERS:
            return
        self._complain(f"closes connections to {self._address}: {len(strangers)} are open without a valid key")
        for connection in strangers[:-MAX_STRANGERS]:
            self._shut_down(connection)

    def close_silent_if_due(self, peers: Iterable[int]) -> None:
        """Closes those connections of peers over which nothing has arrived for HEARTBEAT_TIMEOUT_MILLISECONDS."""
        if MEASURES_SILENCE and (now := time.monotonic()) >= self._look_at:
            self._look_at = now + BEAT_SECONDS
            for connection in peers:
                for one in self._open(connection):
                    unread = int.from_bytes(fcntl.ioctl(one, termios.FIONREAD, bytes(4)), sys.byteorder)
                    info = one.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, LAST_DATA_RECEIVED.stop)
                    silent = int.from_bytes(info[LAST_DATA_RECEIVED], sys.byteorder)
                    if not unread and silent > HEARTBEAT_TIMEOUT_MILLISECONDS:
                        _shut_down(one)

    def local_address(self, connection: int) -> str:
        """The address of this host to which a peer has connected; "" if it is closed."""
        for one in self._open(connection):
            return str(one.getsockname()[0]).removeprefix("::ffff:")
        return ""

    def _shut_down(self, connection: int) -> None:
        """Makes libzmq close a connection."""
        for one in self._open(connection):
            _shut_down(one)

    def _open(self, connection: int) -> Iterator[sockets.socket]:
        """Yields the socket of a connection if it is open. libzmq may have closed it meanwhile, and the descriptor may
        be another's."""
        with contextlib.suppress(OSError), sockets.socket(fileno=os.dup(connection)) as duplicate:
            if duplicate.getsockname()[1] == self._port:
                yield duplicate

    def _complain(self, message: str) -> None:
        if self._complaints.allows_one():
            log.warning("%s", message)


def _shut_down(one: sockets.socket) -> None:
    """Shuts a connection down, unless the peer has just done so."""
    with contextlib.suppress(OSError):
        one.shutdown(sockets.SHUT_RDWR)


class Connector:
    """Connects a socket to a TCP address again when the connection is lost, or an attempt has failed.

    libzmq alone would try 50 times a second where the handshake fails, and never again after what is no handshake, or
    a damaged message. So this object begins anew after each connection: at once if that had a session, else later with
    each failure.
    """

    EVENTS = (
        zmq.EVENT_CONNECTED
        | zmq.EVENT_DISCONNECTED
        | zmq.EVENT_HANDSHAKE_SUCCEEDED
        | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    )

    def __init__(self, socket: "zmq.Socket[bytes]", address: str, keys: ConnectingKeys) -> None:
        """Has the socket accept only a process that has the secret key."""
        use_connecting_keys(socket, keys)
        self.has_session = False  # set by the link: the peer has been accepted
        self._socket = socket
        self._address = address
        self._connected = False  # by the latest event
        self._began_at = 0.0  # the connection
        self._fault = ""  # why it has ended, if that is not what connections do
        self._failures = 0  # since the latest session
        self._retry_at: float | None = None
        self._complaints = ComplaintLimit(ATTEMPT_COMPLAINT_SECONDS)

    def read_events(self, monitor: "zmq.Socket[bytes]") -> bool:
        """Reads all events of the socket's monitor. Returns whether a connection was lost."""
        lost = False
        while monitor.poll(0):
            event, _ = struct.unpack("=HI", monitor.recv_multipart()[0])
            if event == zmq.EVENT_CONNECTED:
                self._connected, self._began_at, self._fault = True, time.monotonic(), _NO_LINK
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._fault = ""
            elif event == zmq.EVENT_DISCONNECTED:
                self._connected, lost = False, True
            else:
                self._fault = self._describe_failure(event)
        if lost and not self._connected:  # else libzmq has connected again
            self._begin_anew()
        return lost

    def retry_if_due(self) -> None:
        """Begins to connect when it is time to try again. libzmq repeats what is refused, after 200 to 500 ms."""
        if self._retry_at is not None and time.monotonic() >= self._retry_at:
            self._retry_at = None
            self._socket.connect(self._address)

    def _begin_anew(self) -> None:
        if self._fault and self._complaints.allows_one():
            log.error("%s %s. Trying again.", self._address, self._fault)
        with contextlib.suppress(zmq.ZMQError):  # libzmq has given it up
            self._socket.disconnect(self._address)
        if self.has_session:
            self.has_session, self._failures, self._retry_at = False, 0, None
            self._socket.connect(self._address)
        else:
            self._retry_at = time.monotonic() + min(RETRY_SECONDS * 2**self._failures, MAX_RETRY_SECONDS)
            self._failures = min(1 + self._failures, 10)

    def _describe_failure(self, event: int) -> str:
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return f"does not know the key of this process: {_OTHER_KEYS}"
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and not self._fault:
            return "has sent damaged data"
        if 1000 * (time.monotonic() - self._began_at) > 0.9 * HANDSHAKE_MILLISECONDS:
            return (
                f"has not completed the handshake within {HANDSHAKE_MILLISECONDS // 1000} s: it hangs, it is no link, "
                f"or the network loses much or has round trips of more than {MAX_ROUND_TRIP_SECONDS:.0f} s"
            )
        return f"has ended the handshake: it is busy, it is a process of another role, or {_OTHER_KEYS}"


_NO_LINK = "is no link of tgi: another service listens there"
_OTHER_KEYS = (
    "its keys are those of another deployment. Give --keys a file that the same `tgi keys new` has made as its own"
)
