"""`tgi batch`: answers the requests of a file, by a server that runs or by one of its own.

A result is appended to OUTPUT.part as soon as it is there. The output is written at the end, in the order of the input,
and takes its name when it is complete. A second start reads OUTPUT.part and goes on with what it lacks.
"""

import contextlib
import fcntl
import hashlib
import http.client
import json
import os
import queue
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import click
import msgspec
from msgspec import Raw

from tgi.api.shapes.batches import BatchLine, BatchLineError, BatchLineResponse, BatchResult
from tgi.microkernel.errors import UserError
from tgi.microkernel.processes.process import die_with_parent
from tgi.server_address import ServerAddress

# A request that gets no answer, as while a server restarts, is sent again for so long.
LOST_SECONDS = 120.0
FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.5, 30.0
RETRIED = (429, 503)
SHOWN_LOG_LINES = 20
DIRECTORY_PREFIX = "tgi-batch-"  # of own servers

_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class _PartLine(NamedTuple):
    """Where a result is in OUTPUT.part."""

    start: int
    failed: bool


class PartialOutput:
    """OUTPUT.part: the results so far, in the order in which they came. One process may use it at a time."""

    def __init__(self, path: Path, digest: str) -> None:
        """`digest`: of the input. Raises UserError if the file belongs to another input, or is in use."""
        self.found: dict[int, _PartLine] = {}  # by the number of the line
        self._path = path
        self._file: IO[bytes] = open(path, "a+b")  # noqa: SIM115  # until `close`
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"Another `tgi batch` writes {path}.") from None
        self._read(digest)

    def _read(self, digest: str) -> None:
        self._file.seek(0)
        end = 0
        for line in iter(self._file.readline, b""):
            if not line.endswith(b"\n"):
                break  # the process was killed while it wrote this one
            read = json.loads(line)
            if end == 0 and read != {"input": digest}:
                raise UserError(
                    f"{self._path} has the results of another input. Name another output, or remove that file."
                )
            if end:
                self.found[read["number"]] = _PartLine(end, read["failed"])
            end += len(line)
        self._file.truncate(end)
        if end == 0:
            self._append({"input": digest})

    def add(self, number: int, result: BatchResult, failed: bool) -> None:
        """Keeps the result of a line."""
        start = self._file.seek(0, os.SEEK_END)
        self._append({"number": number, "failed": failed, "result": Raw(msgspec.json.encode(result))})
        self.found[number] = _PartLine(start, failed)

    def _append(self, line: dict[str, Any]) -> None:
        self._file.write(msgspec.json.encode(line) + b"\n")
        self._file.flush()

    def finish(self, output: Path) -> None:
        """Writes the output in the order of the input, and removes this file."""
        temporary = output.with_name(f"{output.name}.tmp")
        with open(temporary, "wb") as file:
            for number in sorted(self.found):
                self._file.seek(self.found[number].start)
                line = msgspec.json.decode(self._file.readline(), type=dict[str, Raw])
                file.write(bytes(line["result"]) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, output)
        self._path.unlink()

    def close(self) -> None:
        """Releases the file."""
        self._file.close()


def run_batch(
    source: Path, output: Path, url: str | None, key: str | None, concurrency: int, arguments: Sequence[str]
) -> None:
    """Answers the requests of `source`: at `url`, or by a server of its own with these arguments of `tgi up`. Raises
    UserError."""
    if output.exists():
        raise UserError(f"{output} exists. Name another output, or remove that file to begin anew.")
    digest, total = _digest(source)
    with contextlib.closing(PartialOutput(output.with_name(f"{output.name}.part"), digest)) as part:
        if len(part.found) < total:
            with contextlib.nullcontext(url) if url is not None else own_server(arguments) as base:
                _answer(source, part, total, Server(base, key), concurrency)
        part.finish(output)
    failed = sum(one.failed for one in part.found.values())
    click.echo(f"{total - failed} of {total} requests are answered, {failed} have failed: {output}", err=True)


def _digest(source: Path) -> tuple[str, int]:
    """The digest of the input, and the number of its requests."""
    digest, total = hashlib.sha256(), 0
    try:
        with open(source, "rb") as file:
            for line in file:
                digest.update(line)
                total += bool(line.strip())
    except OSError as error:
        raise UserError(f"{source} cannot be read: {error.strerror}.") from error
    return digest.hexdigest(), total


# --- requests ---------------------------------------------------------------------------------------------------------


class Unreachable(Exception):
    """No server answers, or it refuses the key."""


class Server:
    """A server, as one of the threads uses it."""

    def __init__(self, url: str, key: str | None) -> None:
        """Raises UserError for what is not the URL of a server."""
        self._address = ServerAddress.parse(url)
        self._headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        self._local = threading.local()

    def post(self, path: str, body: bytes) -> tuple[int, str, bytes]:
        """Sends a request until there is an answer. Returns status, request id and body. Raises Unreachable."""
        pause, began = FIRST_RETRY_SECONDS, time.monotonic()
        while True:
            try:
                response = self._send(path, body)
                answer = response.read()
            except (OSError, http.client.HTTPException) as error:
                self._local.connection = None
                if time.monotonic() - began > LOST_SECONDS:
                    raise Unreachable(
                        f"{self._address.url} does not answer: {error or type(error).__name__}."
                    ) from error
                time.sleep(pause)
            else:
                if response.status == 401:
                    raise Unreachable(f"{self._address.url} refuses the API key. Give another one with --api-key.")
                if response.status not in RETRIED:
                    return response.status, response.headers.get("x-request-id") or "", answer
                began = time.monotonic()
                given = response.headers.get("retry-after") or ""
                time.sleep(min(float(given), MAX_RETRY_SECONDS) if given.isdigit() else pause)
            pause = min(2 * pause, MAX_RETRY_SECONDS)

    def _send(self, path: str, body: bytes) -> http.client.HTTPResponse:
        connection: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = self._address.connection()
        connection.request("POST", self._address.prefix + path, body, self._headers)
        return connection.getresponse()


def _answer(source: Path, part: PartialOutput, total: int, server: Server, concurrency: int) -> None:
    """Sends the lines that have no result, and keeps the results."""
    asked: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[int, BatchResult, bool] | Exception] = queue.SimpleQueue()

    def work() -> None:
        while True:
            number, line = asked.get()
            try:
                done.put((number, *_result(number, line, server)))
            except Exception as error:  # for the main thread
                done.put(error)

    for _ in range(min(concurrency, total)):
        threading.Thread(target=work, daemon=True).start()  # ends with the process, also after Ctrl-C
    in_flight = 0
    with click.progressbar(length=total, label="Requests", show_pos=True, file=sys.stderr) as bar:
        bar.update(len(part.found))

        def keep_one() -> None:
            nonlocal in_flight
            found = done.get()
            if isinstance(found, Unreachable):
                raise UserError(f"{found} The results so far are kept: the same command goes on with them.") from found
            if isinstance(found, Exception):
                raise found
            part.add(*found)
            in_flight -= 1
            bar.update(1)

        with open(source, "rb") as file:
            for number, line in enumerate(file):
                if number in part.found or not line.strip():
                    continue
                if in_flight == concurrency:
                    keep_one()
                asked.put((number, line))
                in_flight += 1
        while in_flight:
            keep_one()


def _result(number: int, line: bytes, server: Server) -> tuple[BatchResult, bool]:
    """The result of a line, and whether it is an error."""
    name = f"batch_req_{number + 1}"
    try:
        request = msgspec.json.decode(line, type=BatchLine)
        msgspec.json.decode(request.body, type=dict[str, Raw])
    except _UNREADABLE as error:
        problem = BatchLineError("invalid_request", f"Line {number + 1} is not a request of a batch: {error}")
        return BatchResult(name, _custom_id(line), None, problem), True
    if not request.url.startswith("/v1/"):
        problem = BatchLineError("invalid_url", "The url is not that of a route below /v1/")
        return BatchResult(name, request.custom_id, None, problem), True
    status, request_id, body = server.post(request.url, bytes(request.body))
    try:
        msgspec.json.decode(body)
    except _UNREADABLE:  # a stream of events, or the answer of a proxy
        body = msgspec.json.encode(body.decode(errors="replace"))
    response = BatchLineResponse(status, request_id, Raw(body))
    return BatchResult(name, request.custom_id, response, None), status != 200


def _custom_id(line: bytes) -> str:
    """The custom_id of a line that is no request, if it has one."""
    try:
        found = msgspec.json.decode(line, type=dict[str, Any]).get("custom_id")
    except _UNREADABLE:
        found = None
    return found if isinstance(found, str) else ""


# --- the own server ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def own_server(arguments: Sequence[str]) -> Iterator[str]:
    """A server with these arguments of `tgi up` for the time of the block. Yields its URL. Raises UserError if it does
    not start."""
    with _own_directory() as run:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        address = ["--hostname", "127.0.0.1", "--port", str(port)]
        command = [sys.executable, "-P", "-m", "tgi", "up", *arguments, *address]
        log = run / "log"
        with open(log, "wb") as file:
            process = subprocess.Popen(
                command,
                env=os.environ | {"TGI_RUN": str(run / "run")},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
        try:
            click.echo("Starting a server …", err=True)
            while not _is_healthy(port):
                if process.poll() is not None:
                    text = "".join(log.read_text(errors="replace").splitlines(keepends=True)[-SHOWN_LOG_LINES:])
                    raise UserError(f"The server has ended with code {process.returncode}:\n{text}")
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()


@contextlib.contextmanager
def _own_directory() -> Iterator[Path]:
    """A temporary directory, locked for the time of the block. Removes those that commands which were killed left."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=DIRECTORY_PREFIX))
        lock = os.open(path, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            break
        os.close(lock)  # another command took it for one that was left, before it was locked
    try:
        for left in path.parent.glob(f"{DIRECTORY_PREFIX}*"):
            _remove_if_left(left)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _remove_if_left(path: Path) -> None:
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # another user's, or removed meanwhile
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    except BlockingIOError:
        pass  # of a command that runs
    finally:
        os.close(lock)


def _is_healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
