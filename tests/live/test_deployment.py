"""The containers of deploy/kubernetes/front-ends as processes of this host, with their commands, variables and keys."""

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.dockerfile import read_stages
from tests.deploy.shapes import DEPLOY, command_of, environment_of, pod_specs
from tests.live import commands
from tests.live.server import Server, free_port

pytestmark = pytest.mark.live

KEY = "a-key"
EVENTS = 60


class Pod:
    """The containers of one pod template, on this host: with other paths, ports and addresses."""

    def __init__(self, spec: dict[str, Any], directory: Path, changes: dict[str, str]) -> None:
        self.containers = {one["name"]: one for one in (*spec.get("initContainers", ()), *spec["containers"])}
        self.directory = directory
        self.server = Server(directory / "run")
        self.server.client.headers["authorization"] = f"Bearer {KEY}"
        self._changes = changes | {"PORT": str(self.server.port), "TGI_RUN": str(self.server.run_directory)}

    def copy_key(self, keys: Path) -> None:
        """Runs the container that copies the key from its Secret."""
        program, *mode, source, target = command_of(self.containers["key"])
        copy = self.directory / Path(target).name
        subprocess.run([program, *mode, keys / Path(source).name, copy], check=True)
        self._changes["TGI_KEYS"] = str(copy)

    def start(self, name: str) -> None:
        """Starts a container. Only variables that it has are changed."""
        container = self.containers[name]
        program, *arguments = command_of(container)
        given = environment_of(container)
        changed = {variable: self._changes[variable] for variable in given if variable in self._changes}
        more = {"PATH": os.environ["PATH"], "TGI_HOSTNAME": "127.0.0.1", "HF_HUB_OFFLINE": "1"}
        if name == "server":
            more |= {"TGI_WORKER": "scripted", "TGI_SCRIPTED_STEP_US": "20000"}
        command = [str(Path(sys.executable).parent / program), *arguments]
        self.server.launch(name, command, given | changed | more)

    def end(self, name: str) -> None:
        """Ends a container as Kubernetes does."""
        self.server.commands[name].send_signal(signal.SIGTERM)

    def passes_liveness(self) -> bool:
        with socket.create_connection(("127.0.0.1", self.server.port), timeout=5):
            return True


def healthcheck(port: int) -> int:
    """The exit status of the images' HEALTHCHECK."""
    (instruction,) = read_stages(DEPLOY / "docker" / "Dockerfile")["runtime"].all("HEALTHCHECK")
    command = instruction._replace(arguments=instruction.arguments.partition("CMD ")[2]).words
    return subprocess.run(
        [sys.executable, *command[1:]], env={"PORT": str(port), "PATH": ""}, capture_output=True
    ).returncode


@pytest.fixture
def pods(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Pod, Pod]:
    """The pod with scheduler and worker, and one with a front end, with keys; nothing is started."""
    directory = tmp_path_factory.mktemp("pods")  # a short name, for the paths of sockets
    keys = directory / "keys"
    commands.run("keys", "new", str(keys), check=True)
    (directory / "api-keys").write_text(f"{KEY}\n")
    address = f"tcp://127.0.0.1:{free_port()}"
    changes = {
        "MODEL_ID": str(tiny_llama),
        "TGI_LISTEN": address,
        "TGI_CONNECT": address,
        "TGI_API_KEY_FILE": str(directory / "api-keys"),
        "HF_HOME": str(directory),
        "XDG_CACHE_HOME": str(directory),
    }
    made = []
    for name, spec in zip(("server", "front-end"), pod_specs("front-ends"), strict=True):
        (directory / name).mkdir()
        pod = Pod(spec, directory / name, changes)
        pod.copy_key(keys)
        made.append(pod)
    server, front_end = made
    return server, front_end


def test_front_ends_apart_serve_wait_and_drain(pods: tuple[Pod, Pod]) -> None:
    server, front_end = pods
    with server.server, front_end.server:
        front_end.start("tokenizer")
        front_end.start("api")
        front_end.server.wait_until(lambda: healthcheck(front_end.server.port) != 0, "it waits for the scheduler")
        server.start("server")
        front_end.server.wait_until_ready()
        assert healthcheck(front_end.server.port) == 0
        refused = front_end.server.client.post("/generate", json={"inputs": "a"}, headers={"authorization": ""})
        assert refused.status_code == 401
        expected = [event["token"]["id"] for event in front_end.server.stream("A prompt", max_new_tokens=EVENTS)]
        assert len(expected) == EVENTS

        # The node of the scheduler and the worker is lost in the middle of a stream.
        received: list[int] = []

        def receive() -> None:
            stream = front_end.server.stream("A prompt", max_new_tokens=EVENTS)
            received.extend(event["token"]["id"] for event in stream)

        reader = threading.Thread(target=receive)
        reader.start()
        server.server.wait_until(lambda: server.server.metric("tgi_batch_current_size") == 1, "the stream runs")
        lost = server.server.commands.pop("server")
        lost.kill()
        lost.wait(60)
        front_end.server.wait_until(lambda: not front_end.server.is_healthy(), "it is not ready")
        assert front_end.passes_liveness()
        assert healthcheck(front_end.server.port) != 0
        server.start("server")
        reader.join(60)
        assert received == expected
        server.server.wait_until_ready()
        front_end.server.wait_until_ready()

        # The front end's pod ends in the middle of a stream: first the front end, then its sidecar.
        received.clear()
        reader = threading.Thread(target=receive)
        reader.start()
        server.server.wait_until(lambda: server.server.metric("tgi_batch_current_size") == 1, "the stream runs")
        front_end.end("api")
        assert front_end.server.commands["api"].wait(60) == 0
        reader.join(60)
        assert received == expected
        front_end.end("tokenizer")
        assert front_end.server.commands["tokenizer"].wait(60) == 0
