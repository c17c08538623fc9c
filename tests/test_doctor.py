"""`tgi doctor`: what it finds here, and what it advises where something is missing."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.live.server import free_port
from tgi.worker.host_cpu import kernel_set

pytestmark = pytest.mark.fast


def doctor(*arguments: str, **environment: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """The exit status, and the findings by subject."""
    command = [sys.executable, "-m", "tgi", "doctor", "--hostname", "127.0.0.1", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    assert not done.stderr
    return done.returncode, {one["subject"]: one for one in json.loads(done.stdout)}


def test_a_machine_on_which_a_server_can_start() -> None:
    port = free_port()
    status, found = doctor("--port", str(port))
    assert status == 0
    chosen = kernel_set()
    assert chosen is not None
    assert chosen.name in found["processor"]["found"]
    assert "torch" in found["packages"]["found"]
    assert found["port"]["found"] == f"{port} is free"
    assert [name for name, one in found.items() if one["prevents"]] == []


def test_what_is_missing_is_named_with_advice(tmp_path: Path) -> None:
    exposed = tmp_path / "run"
    exposed.mkdir(mode=0o777)
    exposed.chmod(0o777)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        environment = {"CXX": "/no/compiler", "TGI_CACHE": str(tmp_path), "TGI_RUN": str(exposed)}
        environment |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": str(tmp_path)}
        status, found = doctor("--port", str(port), **environment)
    assert status == 1
    assert "/no/compiler" in found["CPU kernels"]["advice"]
    assert "--port" in found["port"]["advice"]
    assert "compileall" in found["bytecode"]["advice"]
    assert {name for name, one in found.items() if one["prevents"]} == {"port", "run directory"}


def test_the_report_has_a_line_for_each_finding() -> None:
    command = [sys.executable, "-m", "tgi", "doctor", "--hostname", "127.0.0.1", "--port", str(free_port())]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.split("  ")[0].strip() for line in lines if not line.lstrip().startswith("->")] == [
        *(
            "tgi",
            "packages",
            "bytecode",
            "processor",
            "CPU kernels",
            "packed weights",
            "memory",
            "GPU",
            "models",
            "open files",
            "run directory",
        ),
        "port",
    ]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str) -> None:
    made = subprocess.run([sys.executable, "-m", "tgi", "completion", shell], capture_output=True, text=True)
    assert made.returncode == 0
    assert "_TGI_COMPLETE" in made.stdout
    asked = {
        "_TGI_COMPLETE": f"{shell}_complete",
        "COMP_WORDS": "tgi sca",
        "COMP_CWORD": "1" if shell != "fish" else "sca",
    }
    program = Path(sys.executable).parent / "tgi"
    found = subprocess.run([str(program)], capture_output=True, text=True, env=os.environ | asked)
    assert "scale" in found.stdout
