"""Several hosts: processes with run directories of their own that only an encrypted TCP connection joins."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.live.server import TIMEOUT_SECONDS, Server, free_port
from tests.live.test_operating import succeed
from tgi.microkernel import rundir
from tgi.microkernel.discovery import nth_address

SCRIPTED = ("--worker", "scripted", "--scripted-step-us", "20000")


class Hosts:
    """The host of the front ends and the scheduler, and others that connect to it."""

    def __init__(self, directory: Path, model_id: str) -> None:
        self.directory = directory
        self.address = f"tcp://127.0.0.1:{free_port()}"
        self.keys = directory / "keys"
        command = [sys.executable, "-m", "tgi", "keys", "new", str(self.keys)]
        made = subprocess.run(command, capture_output=True, text=True, check=True)
        assert "host.key" in made.stdout
        self._model = ("--model-id", model_id)
        self.first = Server(directory / "first", *self._model)

    def start_first(self, *arguments: str) -> Server:
        keys = str(self.keys / "scheduler.key")
        return self.first.start("up", "--worker", "remote", "--listen", self.address, "--keys", keys, *arguments)

    def other(self, name: str, address: str | None = None) -> Server:
        """A host that has been given a copy of the hosts' file."""
        link = ("--connect", address or self.address, "--keys", str(self.keys / "host.key"))
        return Server(self.directory / name, *self._model, *link)

    def port(self, number: int) -> str:
        """The address at which the scheduler with this number listens."""
        return nth_address(self.address, number)


@pytest.fixture
def hosts(tiny_llama: Path, tmp_path: Path) -> Hosts:
    return Hosts(tmp_path, str(tiny_llama))


def states(server: Server) -> list[str]:
    """The roles of the processes that are ready."""
    return [state.role for state in rundir.read_states(server.run_directory) if state.state == "ready"]


def tokens_of(streams: list[list[dict[str, Any]]]) -> list[list[int]]:
    return [[event["token"]["id"] for event in events] for events in streams]


def streamed(server: Server, prompt: str, tokens: int) -> list[int]:
    return [event["token"]["id"] for event in server.stream(prompt, max_new_tokens=tokens)]


def test_worker_on_another_host(hosts: Hosts) -> None:
    with hosts.start_first() as first, hosts.other("second").start("worker", *SCRIPTED) as second:
        first.wait_until_ready()
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
        requests = [(f"Prompt {number}", {"max_new_tokens": 60}) for number in range(8)]
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


def test_a_worker_serves_one_scheduler(hosts: Hosts) -> None:
    server = hosts.other("second", f"{hosts.address},{hosts.port(1)}")
    server.start("worker", *SCRIPTED)
    server.commands["worker"].wait(TIMEOUT_SECONDS)
    assert "a worker serves one scheduler" in server.output_text()


def test_host_without_the_right_keys_is_told(hosts: Hosts) -> None:
    keys = hosts.directory / "foreign"
    subprocess.run([sys.executable, "-m", "tgi", "keys", "new", str(keys)], capture_output=True, check=True)
    stranger = Server(hosts.directory / "second", "--model-id", hosts._model[1], "--connect", hosts.address)
    with hosts.start_first() as first, stranger:
        stranger.start("worker", *SCRIPTED, "--keys", str(keys / "host.key"))
        stranger.wait_until(lambda: "keys are those of another deployment" in stranger.output_text(), "it is told")
        assert not first.is_healthy()
