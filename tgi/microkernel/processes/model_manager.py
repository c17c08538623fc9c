"""Loads and unloads the models of a server with several: the side of the supervisor.

Front ends connect to a Unix socket in the run directory and exchange lines of JSON. They send [COMMAND, NAME] or
[COMMAND, NAME, EPOCH] with a FrontEndCommand, and get a list of ModelView as often as one changes. `model_table.py`
decides, and the processes of a model are a pipeline, as those that `tgi reload` starts.
"""

import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Generator, Sequence
from itertools import count
from pathlib import Path

from tgi.microkernel.errors import UserError
from tgi.microkernel.processes import rollout
from tgi.microkernel.processes.model_table import (
    FrontEndCommand,
    ModelState,
    ModelTable,
    ModelView,
    Operation,
    Started,
)
from tgi.microkernel.processes.supervisor import Supervisor
from tgi.microkernel.settings.lora_adapters import named_adapters
from tgi.microkernel.settings.served_models import ServedModel
from tgi.microkernel.settings.table import Settings

log = logging.getLogger(__name__)

MAX_LINE_BYTES = 1 << 16
FITTING_SECONDS = 1.0
MAX_ERROR = 2000  # characters of a reason

# Finds the files of a model, downloads them if necessary, and tells the stage: see `server.py`. Raises UserError.
Resolve = Callable[[Settings, Callable[[str], None]], Settings]


class ModelManager:
    """Carries out what the table decides. Never blocks: call `advance` when a descriptor is readable, and from time to
    time while it is `busy`."""

    def __init__(
        self,
        path: Path,
        models: Sequence[ServedModel],
        max_loaded: int | None,
        supervisor: Supervisor,
        resolve: Resolve,
        fits: Callable[[Settings], bool],
    ) -> None:
        """`path`: of the socket. `fits`: whether a model with these settings should fit into memory now."""
        self._resolve = resolve
        self._fits = fits
        self._fitting: dict[str, tuple[bool, float]] = {}  # what was measured, and until when it counts
        self._settings = {one.name: one.settings for one in models}  # of resolved ones with their files
        self._pipelines = {one.name: number for number, one in enumerate(models, 1)}
        self._table = ModelTable([(one.name, one.ttl) for one in models], max_loaded, self._fits_now)
        self._operations: dict[str, rollout.Waiting] = {}
        self._connections: dict[int, socket.socket] = {}
        self._received: dict[int, bytes] = {}  # the begin of a line
        self._numbers = count(1)
        self._sent = b""
        self._supervisor = supervisor
        for one in models:
            if one.at_start:
                self._table.load(one.name, time.monotonic())
        path.unlink(missing_ok=True)  # of an earlier server
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.setblocking(False)
        self._listener.bind(str(path))
        self._listener.listen()

    @property
    def failed(self) -> list[str]:
        """The names of the models that could not be loaded."""
        return [model.name for model in self._table.models.values() if model.state is ModelState.FAILED]

    @property
    def busy(self) -> bool:
        """Whether an operation is carried out, or a model waits for something."""
        states = (model.state for model in self._table.models.values())
        return bool(self._operations) or any(one in (ModelState.LOADING, ModelState.DRAINING) for one in states)

    @property
    def descriptors(self) -> list[int]:
        """The file descriptors to poll."""
        return [self._listener.fileno(), *(connection.fileno() for connection in self._connections.values())]

    def advance(self) -> None:
        """Handles commands of front ends, continues operations, begins others, and publishes the states of models."""
        with contextlib.suppress(OSError):  # BlockingIOError: there are no more; else no file can be opened now
            while True:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                number = next(self._numbers)
                self._connections[number], self._received[number] = connection, b""
                self._table.connect(number)
                self._send(number, self._sent)
        for number in list(self._connections):
            self._read(number)
        for name, operation in list(self._operations.items()):
            self._continue(name, operation)
        for started in self._table.decide(time.monotonic()):
            self._operations[started.model] = self._begin(started)
        self._publish_states()

    def close(self, reason: str) -> None:
        """Begins no more operations. The supervisor ends the processes."""
        for operation in self._operations.values():
            operation.close()
        for connection in self._connections.values():
            connection.close()
        self._listener.close()

    # --- front ends ---

    def _read(self, number: int) -> None:
        try:
            received = self._connections[number].recv(MAX_LINE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        *lines, rest = (self._received[number] + received).split(b"\n")
        if not received or len(rest) > MAX_LINE_BYTES:
            self._drop(number)
            return
        self._received[number] = rest
        for line in lines:
            command, name, *more = json.loads(line)
            self._handle(number, FrontEndCommand(command), name, *more)

    def _handle(self, number: int, command: FrontEndCommand, name: str, epoch: int = 0) -> None:
        table, now = self._table, time.monotonic()
        match command:
            case FrontEndCommand.WANT:
                table.want(number, name, now)
            case FrontEndCommand.LOAD:
                table.want(number, name, now, again=True)
            case FrontEndCommand.GIVE_UP:
                table.give_up(number, name)
            case FrontEndCommand.BEGIN:
                table.begin(number, name, now)
            case FrontEndCommand.END:
                table.end(number, name, now)
            case FrontEndCommand.CONFIRM:
                table.confirm(number, name, epoch)
            case FrontEndCommand.UNLOAD:
                table.unload(name)
            case FrontEndCommand.SLEEP:
                table.unload(name, ModelState.SLEEPING)

    def _publish_states(self) -> None:
        models = self._table.models.values()
        views = [
            ModelView(
                *(one.name, one.state, one.stage, one.error[:MAX_ERROR], one.retry_at, one.epoch, one.life),
                [adapter.name for adapter in named_adapters(self._settings[one.name].lora_adapters)],
            )
            for one in models
        ]
        line = json.dumps(views).encode() + b"\n"
        if line != self._sent:
            self._sent = line
            for number in list(self._connections):
                self._send(number, line)

    def _send(self, number: int, line: bytes) -> None:
        """A front end that does not read is dropped; it connects again."""
        try:
            if line and self._connections[number].send(line) != len(line):
                raise BlockingIOError
        except OSError as error:
            log.warning("front end %d does not read the states of models: %s", number, error)
            self._drop(number)

    def _drop(self, number: int) -> None:
        self._connections.pop(number).close()
        del self._received[number]
        self._table.disconnect(number, time.monotonic())

    def _fits_now(self, name: str) -> bool:
        """Whether a model should fit into memory. Measuring a GPU takes a process, so a result counts for a while."""
        found, until = self._fitting.get(name, (False, 0.0))
        if time.monotonic() >= until:
            found = self._fits(self._settings[name])
            self._fitting[name] = found, time.monotonic() + FITTING_SECONDS
        return found

    # --- operations ---

    def _begin(self, started: Started) -> rollout.Waiting:
        name, operation = started
        log.debug("%s: %s", name, operation)
        pipeline, settings = self._pipelines[name], self._settings[name]
        match operation:
            case Operation.RESOLVE:
                return self._resolving(name)
            case Operation.LOAD:
                return rollout.load(self._supervisor, settings, pipeline)
            case Operation.UNLOAD:
                return rollout.unload(self._supervisor, pipeline)
            case Operation.SLEEP:
                return rollout.sleep(self._supervisor, pipeline)
            case Operation.WAKE:
                return rollout.wake(self._supervisor, pipeline)

    def _continue(self, name: str, operation: rollout.Waiting) -> None:
        error = ""
        try:
            self._table.models[name].stage = next(operation)
            return
        except StopIteration:
            pass
        except UserError as failure:
            error = str(failure)
            log.error("%s cannot be served: %s", name, error)
        except Exception as failure:
            log.error("%s: an operation has failed", name, exc_info=failure)
            error = f"The supervisor failed ({type(failure).__name__}: {failure})"
        operation_kind = self._table.models[name].operation
        del self._operations[name]
        self._fitting.clear()
        self._table.operation_ended(name, time.monotonic(), error)
        if operation_kind is not Operation.RESOLVE:
            log.info("%s is %s", name, self._table.models[name].state)

    def _resolving(self, name: str) -> Generator[str, None, None]:
        """Finds the files of a model in a thread, since it may download them."""
        stages, failures = [""], list[Exception]()

        def resolve() -> None:
            try:
                self._settings[name] = self._resolve(self._settings[name], lambda stage: stages.append(stage))
            except Exception as error:
                failures.append(error)

        thread = threading.Thread(target=resolve, daemon=True)
        thread.start()
        while thread.is_alive():
            del stages[:-1]
            yield stages[-1]
        if failures:
            raise failures[0]
