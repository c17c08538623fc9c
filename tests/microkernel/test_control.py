"""The control channel of a supervisor: commands one at a time, wrong ones, and clients that misbehave."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tgi.microkernel.errors import UserError
from tgi.microkernel.processes.control import MAX_COMMAND_BYTES, ControlServer, Operation, carry_out


def operation(command: dict[str, Any]) -> Operation:
    """Counts down from `steps`, as an operation that waits between its steps."""
    if "error" in command:
        raise UserError(command["error"])
    for step in range(command["steps"], 0, -1):
        yield f"{step} left"
        yield ""
    return "finished"


class Supervisor:
    """Advances a ControlServer in a thread, as the supervisor's loop does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.control = ControlServer(path, operation)
        self.turns = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            self.control.advance()
            self.turns += 1
            time.sleep(0.002)
        self.control.close("The server ends.")

    def end(self) -> None:
        self._stop.set()
        self._thread.join(30)

    def raw(self, data: bytes) -> dict[str, str]:
        """What is answered to these bytes."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(30)
            connection.connect(str(self.path))
            connection.sendall(data)
            return json.loads(connection.makefile().readline())  # type: ignore[no-any-return]


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    supervisor = Supervisor(tmp_path / "control")
    yield supervisor
    supervisor.end()


def test_progress_is_told_and_then_the_result(supervisor: Supervisor) -> None:
    assert [*carry_out(supervisor.path, {"steps": 3})] == ["3 left", "2 left", "1 left", "finished"]
    assert [*carry_out(supervisor.path, {"steps": 0})] == ["finished"]


def test_an_operation_that_fails_is_a_user_error(supervisor: Supervisor) -> None:
    with pytest.raises(UserError, match="the reason"):
        list(carry_out(supervisor.path, {"error": "the reason"}))
    with pytest.raises(UserError, match="failed to carry out the command"):  # a defect: there is no "steps"
        list(carry_out(supervisor.path, {}))
    assert [*carry_out(supervisor.path, {"steps": 0})] == ["finished"]


def test_one_command_is_carried_out_at_a_time(supervisor: Supervisor) -> None:
    first = carry_out(supervisor.path, {"steps": 100_000})
    next(first)
    with pytest.raises(UserError, match="carrying out another command"):
        list(carry_out(supervisor.path, {"steps": 0}))
    supervisor.end()
    with pytest.raises(UserError, match=r"The server ends\."):
        list(first)
    with pytest.raises(UserError, match="does not accept commands"):
        list(carry_out(supervisor.path, {"steps": 0}))


@pytest.mark.parametrize("data", [b"\n", b"restart api\n", b"[1]\n", b"\xff\xfe\n", b"[" * 100_000 + b"\n"])
def test_what_is_no_command_is_rejected(supervisor: Supervisor, data: bytes) -> None:
    assert "This is no command" in supervisor.raw(data)["error"]
    assert [*carry_out(supervisor.path, {"steps": 0})] == ["finished"]


def test_a_command_of_unlimited_length_is_rejected(supervisor: Supervisor) -> None:
    assert "This is no command" in supervisor.raw(b"x" * (MAX_COMMAND_BYTES + 70_000))["error"]


def test_clients_that_stay_silent_or_do_not_read_delay_no_other(supervisor: Supervisor) -> None:
    silent = [socket.socket(socket.AF_UNIX) for _ in range(50)]
    for number, connection in enumerate(silent):
        connection.connect(str(supervisor.path))
        connection.sendall(b'{"steps"'[:number])
    deaf = socket.socket(socket.AF_UNIX)
    deaf.connect(str(supervisor.path))
    deaf.sendall(b'{"steps": 2}\n')
    deaf.close()
    begun, deadline = supervisor.turns, time.monotonic() + 30
    while (
        supervisor.turns < begun + 3 or supervisor.control.busy
    ):  # until the command of the client that has gone is done
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert [*carry_out(supervisor.path, {"steps": 0})] == ["finished"]
    for connection in silent:
        connection.close()
