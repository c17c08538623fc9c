"""The control channel of a supervisor: `tgi restart`, `tgi scale` and `tgi reload` send commands to a Unix socket
in the run directory.

A connection carries one command: a line with a JSON object. The answer is lines of JSON: {"progress": text} while the
command is carried out, then {"done": text} or {"error": text}.
"""

import contextlib
import json
import logging
import socket
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

from tgi.microkernel.errors import UserError

log = logging.getLogger(__name__)

MAX_COMMAND_BYTES = 1 << 20
# A client that does not read its answers for this long is not sent any more.
SEND_SECONDS = 1.0

# A command that is carried out step by step, between the other work of the supervisor: yields what it is doing, or ""
# where it waits, and returns what it has done. Raises UserError if it cannot be carried out.
Operation = Generator[str, None, str]
StartOperation = Callable[[dict[str, Any]], Operation]


class ControlServer:
    """Accepts commands and carries out one at a time. Never blocks: call `advance` when a descriptor is readable, and
    from time to time while it is `busy`."""

    def __init__(self, path: Path, start: StartOperation) -> None:
        self._start = start
        self._incoming: dict[socket.socket, bytes] = {}  # connections with what they have sent of their command
        self._client: socket.socket | None = None  # whose command is carried out
        self._operation: Operation | None = None
        self._progress = ""
        path.unlink(missing_ok=True)  # left by a process that had the same pid
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.setblocking(False)
        self._listener.bind(str(path))
        self._listener.listen()

    @property
    def busy(self) -> bool:
        """Whether a command is being carried out."""
        return self._operation is not None

    @property
    def descriptors(self) -> list[int]:
        """The file descriptors to poll."""
        return [self._listener.fileno(), *(connection.fileno() for connection in self._incoming)]

    def advance(self) -> None:
        """Accepts connections, reads commands, and continues the one that is carried out."""
        with contextlib.suppress(OSError):  # BlockingIOError: there are no more; else no file can be opened now
            while True:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                self._incoming[connection] = b""
        for connection in list(self._incoming):
            self._read(connection)
        if self._operation is not None:
            self._continue(self._operation)

    def close(self, reason: str) -> None:
        """Ends the command that is carried out, and accepts no more."""
        if self._client is not None:
            _answer(self._client, error=reason)
        for connection in self._incoming:
            connection.close()
        self._listener.close()  # the path stays until the next start: the user may be removing the run directory now

    def _read(self, connection: socket.socket) -> None:
        try:
            received = connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        line = self._incoming[connection] + received
        if received and not line.endswith(b"\n") and len(line) <= MAX_COMMAND_BYTES:
            self._incoming[connection] = line
            return
        del self._incoming[connection]
        connection.settimeout(SEND_SECONDS)
        if not received:
            connection.close()
        elif self.busy:
            _answer(connection, error="The server is carrying out another command. Try again when that has ended.")
        else:
            self._begin(connection, line)

    def _begin(self, connection: socket.socket, line: bytes) -> None:
        try:
            command = json.loads(line)
            if not isinstance(command, dict):
                raise ValueError("not an object")
        except (ValueError, RecursionError) as error:
            _answer(connection, error=f"This is no command: {error}")
            return
        self._client, self._progress = connection, ""
        self._operation = self._start(command)

    def _continue(self, operation: Operation) -> None:
        assert self._client is not None
        try:
            progress = next(operation)
        except StopIteration as end:
            answer = {"done": str(end.value)}
        except UserError as error:
            answer = {"error": str(error)}
        except Exception as error:
            log.error("a command has failed", exc_info=error)
            answer = {"error": f"The supervisor failed to carry out the command ({type(error).__name__}: {error})."}
        else:
            if progress and progress != self._progress:
                self._progress = progress
                log.info("%s", progress)
                _send(self._client, {"progress": progress})
            return
        _answer(self._client, **answer)
        self._client = self._operation = None


def carry_out(path: Path, command: dict[str, Any]) -> Iterator[str]:
    """Has the supervisor that listens at `path` carry out a command. Yields its progress, and the result last.

    Raises UserError if the command fails, or if the supervisor ends first.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(path))
            connection.sendall(json.dumps(command).encode() + b"\n")
        except OSError as error:
            raise UserError(
                f"The server does not accept commands at {path} ({error.strerror}): it is still starting, or ending."
            ) from error
        with connection.makefile("r", encoding="utf-8") as answers, contextlib.suppress(ConnectionResetError):
            for line in answers:
                ((kind, text),) = json.loads(line).items()
                if kind == "error":
                    raise UserError(text)
                if text:
                    yield text
                if kind == "done":
                    return
    raise UserError("The supervisor ended before it had carried out the command.")


def _answer(connection: socket.socket, **answer: str) -> None:
    _send(connection, answer)
    connection.close()


def _send(connection: socket.socket, answer: dict[str, str]) -> None:
    """Sends one line. Closes the connection if the client has gone, or does not read."""
    try:
        connection.sendall(json.dumps(answer).encode() + b"\n")
    except OSError:
        connection.close()
