"""Several hosts: processes with run directories of their own that only an encrypted TCP connection joins."""

import json
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.live import commands
from tests.live.server import TIMEOUT_SECONDS, Server, event_lines, free_port, python_path
from tests.live.test_operating import succeed
from tests.microkernel.tcp import cable
from tgi.microkernel.host import rundir
from tgi.microkernel.links.discovery import nth_address

pytestmark = pytest.mark.live

KEY_FILES = {"tokenizer": "tokenizer.key", "worker": "host.key"}
# What a host with front ends alone need not have: the imports of the packages fail there.
WITHOUT_MODELS = python_path(Path(__file__).parent / "no_models")
SCRIPTED = ("--worker", "scripted", "--scripted-step-us", "20000")


class Hosts:
    """The host of the front ends and the scheduler, and others that connect to it."""

    def __init__(self, directory: Path, model_id: str) -> None:
        self.directory = directory
        self.address = f"tcp://127.0.0.1:{free_port()}"
        self.keys = directory / "keys"
        made = commands.run("keys", "new", str(self.keys), check=True)
        assert "host.key" in made.stdout
        self._model = ("--model-id", model_id)
        self.first = Server(directory / "first", *self._model)

    def start_first(self, *arguments: str) -> Server:
        keys = str(self.keys / "scheduler.key")
        return self.first.start("up", "--worker", "remote", "--listen", self.address, "--keys", keys, *arguments)

    def other(self, name: str, address: str | None = None) -> "Host":
        """A host with processes that connect to schedulers."""
        return Host(self, name, address or self.address)

    def front_end(self, name: str, address: str, **env: str) -> Server:
        """A host with a front end alone, which connects to tokenizers at this address."""
        link = ("--connect", address, "--keys", str(self.keys / "api.key"))
        return Server(self.directory / name, *self._model, *link, env=env)

    def port(self, number: int) -> str:
        """The address at which the scheduler with this number listens."""
        return nth_address(self.address, number)


class Host(Server):
    """A host that connects to schedulers, with the key file of its processes. It may have front ends, too."""

    def __init__(self, hosts: Hosts, name: str, address: str) -> None:
        super().__init__(hosts.directory / name, *hosts._model)
        self._address, self._keys = address, hosts.keys

    def start(self, command: str = "up", *arguments: str) -> "Host":
        link = ("--connect", self._address, "--keys", str(self._keys / KEY_FILES.get(command, "")))
        super().start(command, *(link if command in KEY_FILES else ()), *arguments)
        return self


@pytest.fixture
def hosts(tiny_llama: Path, tmp_path: Path) -> Hosts:
    return Hosts(tmp_path, str(tiny_llama))


def answers(server: Server) -> bool:
    try:
        return server.client.get("/health").status_code == 503
    except httpx.TransportError:
        return False


def states(server: Server) -> list[str]:
    """The roles of the processes that are ready."""
    return [state.role for state in rundir.read_states(server.run_directory) if state.state == "ready"]


def tokens_of(streams: list[list[dict[str, Any]]]) -> list[list[int]]:
    return [[event["token"]["id"] for event in events] for events in streams]


def streamed(server: Server, prompt: str, tokens: int) -> list[int]:
    return [event["token"]["id"] for event in server.stream(prompt, max_new_tokens=tokens)]


def test_worker_on_another_host(hosts: Hosts) -> None:
    metrics = ("--prometheus-port", str(free_port()))
    with hosts.start_first() as first, hosts.other("second").start("worker", *SCRIPTED, *metrics) as second:
        first.wait_until_ready()
        assert 'process="worker-0"' in httpx.get(f"http://127.0.0.1:{metrics[1]}/metrics").text
        expected = streamed(first, "A prompt", 60)
        events = first.stream_all([("A prompt", {"max_new_tokens": 60})] * 3, lambda: second.kill("worker-0"), 5)
        assert [[event["token"]["id"] for event in stream] for stream in events] == [expected] * 3
        second.stop(signal.SIGTERM)
        first.wait_until(lambda: not first.is_healthy(), "the first host misses its worker")
        assert first.client.get("/health").headers["x-startup-stage"].startswith("waiting for the worker")


def test_front_ends_on_another_host(hosts: Hosts) -> None:
    """Their tokenizers have the same replica numbers as those of the first host, and of a third one."""
    with (
        hosts.start_first() as first,
        hosts.other("second") as second,
        hosts.other("third") as third,
        hosts.other("fourth") as fourth,
    ):
        fourth.start("worker", *SCRIPTED)
        for host in (second, third):
            host.start("tokenizer").start("api")
        for host in (first, second, third):
            host.wait_until_ready()
        answers = [streamed(host, "A prompt", 20) for host in (first, second, third)]
        assert answers == [answers[0]] * 3
        events = second.stream_all([("A prompt", {"max_new_tokens": 20})] * 2, lambda: second.kill("tokenizer-0"), 2)
        assert [[event["token"]["id"] for event in stream] for stream in events] == [answers[0]] * 2


def test_replicas_with_workers_and_front_ends_on_other_hosts(hosts: Hosts) -> None:
    """The first host has two schedulers, then three, with one worker each on hosts of their own."""
    with (
        hosts.start_first("--replicas", "2", "--max-batch-size", "4") as first,
        hosts.other("second", hosts.port(0)).start("worker", *SCRIPTED, "--max-batch-size", "4"),
        hosts.other("third", hosts.port(1)).start("worker", *SCRIPTED, "--max-batch-size", "4") as third,
        hosts.other("fourth", f"{hosts.address}-{hosts.port(2).rpartition(':')[2]}") as fourth,
    ):
        fourth.start("tokenizer").start("api")
        fourth.wait_until_ready()
        first.wait_until(lambda: len([one for one in states(first) if one == "scheduler"]) == 2, "both compute")
        requests = [(f"Prompt {number}", {"max_new_tokens": 120}) for number in range(8)]
        running: list[float] = []
        undisturbed = fourth.stream_all(requests, lambda: running.append(first.metric("tgi_batch_current_size")), 20)
        assert running == [8]  # of two schedulers with four slots each
        disturbed = fourth.stream_all(requests, lambda: first.kill("scheduler-1"), 20)
        assert tokens_of(disturbed) == tokens_of(undisturbed)
        disturbed = fourth.stream_all(requests, lambda: third.kill("worker-0"), 20)
        assert tokens_of(disturbed) == tokens_of(undisturbed)
        assert succeed(first, "scale", "replica", "3").endswith("running: scheduler-0, scheduler-1, scheduler-2\n")
        with hosts.other("fifth", hosts.port(2)).start("worker", *SCRIPTED, "--max-batch-size", "4"):
            first.wait_until(lambda: len([one for one in states(first) if one == "scheduler"]) == 3, "all compute")
            disturbed = fourth.stream_all(requests, lambda: running.append(first.metric("tgi_batch_current_size")), 20)
            assert tokens_of(disturbed) == tokens_of(undisturbed)
            assert running == [8, 8]


def test_every_role_on_a_host_of_its_own(hosts: Hosts) -> None:
    """Two front ends share the tokenizers of another host, which use the scheduler of a third one. A stream is resumed
    at the other front end."""
    keys = str(hosts.keys)  # the directory with all files: each process takes its own
    port = free_port()
    tokenizers = f"tcp://127.0.0.1:{port}"
    room = f"{tokenizers}-{port + 3}"
    scheduler = Server(hosts.directory / "first", *hosts._model)
    with (
        cable(port) as line,
        scheduler.start("scheduler", "--listen", hosts.address, "--keys", keys),
        hosts.other("second").start("worker", *SCRIPTED),
        hosts.other("third") as middle,
        hosts.front_end("fourth", room, **WITHOUT_MODELS).start("api", "--resume-window", "60") as front,
        hosts.front_end("fifth", f"tcp://127.0.0.1:{line.port},tcp://127.0.0.1:{port + 1}-{port + 3}") as other,
    ):
        other.start("api", "--resume-window", "60")
        front.wait_until(lambda: answers(front), "it answers before there are tokenizers")
        assert front.client.get("/health").headers["x-startup-stage"] == "starting tokenizers"
        middle.start("tokenizer", "--tokenizer-listen", tokenizers, "--validation-workers", "2")
        for one in (front, other):
            one.wait_until_ready()
        expected = streamed(front, "A prompt", 60)

        def cut() -> None:
            line.is_cut = True

        assert tokens_of(other.stream_all([("A prompt", {"max_new_tokens": 60})] * 2, cut, 5)) == [expected] * 2
        line.is_cut = False
        for act in (lambda: middle.kill("tokenizer-0"), lambda: succeed(middle, "restart", "tokenizer")):
            events = front.stream_all([("A prompt", {"max_new_tokens": 60})] * 3, act, 5)
            assert tokens_of(events) == [expected] * 3
        assert front.client.get("/info").json()["max_total_tokens"] > 0
        assert succeed(middle, "scale", "tokenizer", "3").endswith("running: tokenizer-0, tokenizer-1, tokenizer-2\n")
        assert resumed_elsewhere(front, other, 60) == expected
        middle.stop(signal.SIGTERM)
        front.wait_until(lambda: not front.is_healthy(), "it misses the tokenizers")
        assert front.client.get("/health").headers["x-startup-stage"] == "starting tokenizers"


def resumed_elsewhere(server: Server, other: Server, tokens: int) -> list[int]:
    """The ids of a stream that breaks off at one front end and is resumed at the other one."""
    body = {"inputs": "A prompt", "parameters": {"max_new_tokens": tokens}}
    ids, last = [], ""
    headers: dict[str, str] = {}
    for one, count in ((server, 10), (other, tokens)):
        with one.client.stream("POST", "/generate_stream", json=body, headers=headers) as response:
            assert response.status_code == 200
            for line in event_lines(response):
                if line.startswith("id: "):
                    last = line.removeprefix("id: ")
                elif line.startswith("data: "):
                    ids.append(json.loads(line.removeprefix("data: "))["token"]["id"])
                    if len(ids) == count:
                        break
        headers = {"Last-Event-ID": last}
    return ids


def test_a_worker_serves_one_scheduler(hosts: Hosts) -> None:
    server = hosts.other("second", f"{hosts.address},{hosts.port(1)}")
    server.start("worker", *SCRIPTED)
    server.commands["worker"].wait(TIMEOUT_SECONDS)
    assert "a worker serves one scheduler" in server.output_text()


def test_host_without_the_right_keys_is_told(hosts: Hosts) -> None:
    keys = hosts.directory / "foreign"
    commands.run("keys", "new", str(keys), check=True)
    stranger = hosts.other("second")
    with hosts.start_first() as first, stranger:
        stranger.start("worker", *SCRIPTED, "--keys", str(keys / "host.key"))
        stranger.wait_until(lambda: "keys are those of another deployment" in stranger.output_text(), "it is told")
        assert not first.is_healthy()
