"""Three hosts on an emulated network: front ends with tokenizers, scheduler, worker. Delay, loss, and cuts of each
link that heal or stay: streams continue exactly, or end as documented."""

import contextlib
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from scripts.reliability.network import Network
from tests.live.server import Server, still_running
from tests.network import network
from tgi.microkernel.process import read_progress

PORT = 3100
TOKENS = 40
PROMPTS = ("A prompt", "Another prompt", "One more")
# A connection without answers to heartbeats is closed after 3 to 4 s.
SHORT_CUT_SECONDS = 1.0
# Between the moment when a cut is noticed at one end and the repair: more than the other end may be later.
LATER_SECONDS = 1.5
LINKS = (("front", "scheduler"), ("scheduler", "worker"))
DIRECTIONS = [direction for one, other in LINKS for direction in ((one, other), (other, one))]


class Deployment:
    """The servers of the hosts `front`, `scheduler`, `worker` and `spare` of a network. The last one has no process."""

    def __init__(self, net: Network, directory: Path, model_id: str) -> None:
        self.network = net
        self.directory = directory
        subprocess.run(
            [sys.executable, "-m", "tgi", "keys", "new", str(directory / "keys")], capture_output=True, check=True
        )
        self._address = f"tcp://{net['scheduler'].address}:{PORT}"
        self._model = ("--model-id", model_id)
        self._connect = ("--connect", self._address, "--keys", str(directory / "keys" / "host.key"))
        self.front, self.scheduler = self._server("front"), self._server("scheduler")
        self.worker, self.spare = self._server("worker", *self._connect), self._server("spare", *self._connect)

    def _server(self, name: str, *arguments: str) -> Server:
        return Server(self.directory / name, *self._model, *arguments, host=self.network[name])

    def start(self) -> "Deployment":
        keys = str(self.directory / "keys" / "scheduler.key")
        self.scheduler.start("scheduler", "--listen", self._address, "--keys", keys)
        self.start_front()
        start_worker(self.worker)
        return self

    def start_front(self) -> None:
        self.front.start("tokenizer", *self._connect).start("api")

    @contextlib.contextmanager
    def running(self) -> Iterator["Deployment"]:
        with self.front, self.scheduler, self.worker, self.spare:
            yield self.start()

    def scheduler_works(self) -> bool:
        report = read_progress(self.scheduler.run_directory, "scheduler-0")
        return report is not None and report.progress_age is not None

    def streams(self, act: Callable[[], object] | None = None) -> list[list[int]]:
        """The token ids of concurrent streams; `act` is called when each has had 5."""
        requests = [(prompt, {"max_new_tokens": TOKENS}) for prompt in PROMPTS]
        return [ids_of(events) for events in self.front.stream_all(requests, act, 5)]


def start_worker(server: Server) -> None:
    server.start("worker", "--worker", "scripted", "--scripted-step-us", "20000")


def kill_host(server: Server) -> None:
    """Kills all processes of a host, supervisors first, and forgets them: they can be started again."""
    commands = [psutil.Process(process.pid) for process in server.commands.values()]
    everything = commands + [child for command in commands for child in command.children(recursive=True)]
    for process in everything:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    for command in server.commands.values():
        command.wait()
    assert not still_running(everything)
    server.commands.clear()


def ids_of(events: list[dict[str, Any]]) -> list[int]:
    assert not any("error" in event for event in events), events[-1]
    return [event["token"]["id"] for event in events]


@pytest.fixture(scope="module")
def running(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with network("front", "scheduler", "worker", "spare") as net:
        made = Deployment(net, tmp_path_factory.mktemp("network"), str(tiny_llama))
        with made.running():
            yield made


@pytest.fixture
def deployment(running: Deployment) -> Iterator[Deployment]:
    """The running deployment, ready, on a perfect network."""
    running.front.wait_until_ready()
    yield running
    running.network.reset()


@pytest.fixture(scope="module")
def expected(running: Deployment) -> list[list[int]]:
    """The streams on a perfect network."""
    running.front.wait_until_ready()
    ids = running.streams()
    assert [len(stream) for stream in ids] == [TOKENS] * len(PROMPTS)
    return ids


@pytest.mark.parametrize(
    "conditions",
    [{"delay": 0.05}, {"loss": 0.05}, {"delay": 0.05, "jitter": 0.02, "loss": 0.05}],
    ids=["delay", "loss", "delay and loss"],
)
def test_streams_on_a_bad_network(
    deployment: Deployment, expected: list[list[int]], conditions: dict[str, Any]
) -> None:
    dropped = deployment.network.dropped
    for link in LINKS:
        deployment.network.change_between(*link, **conditions)
    assert deployment.streams() == expected
    if "loss" in conditions:
        assert deployment.network.dropped > dropped
    assert deployment.front.is_healthy()


@pytest.mark.parametrize("link", LINKS, ids="-".join)
def test_a_short_cut_breaks_no_connection(
    deployment: Deployment, expected: list[list[int]], link: tuple[str, str]
) -> None:
    def cut() -> None:
        deployment.network.change_between(*link, cut=True)
        time.sleep(SHORT_CUT_SECONDS)
        deployment.network.change_between(*link, cut=False)

    assert deployment.streams(cut) == expected


@pytest.mark.parametrize("link", LINKS, ids="-".join)
def test_streams_survive_a_cut_that_heals(
    deployment: Deployment, expected: list[list[int]], link: tuple[str, str]
) -> None:
    def cut() -> None:
        deployment.network.change_between(*link, cut=True)
        deployment.front.wait_until(lambda: not deployment.front.is_healthy(), "the cut is noticed")
        time.sleep(LATER_SECONDS)
        deployment.network.change_between(*link, cut=False)

    assert deployment.streams(cut) == expected


@pytest.mark.parametrize("direction", DIRECTIONS, ids=" to ".join)
def test_streams_survive_a_cut_of_one_direction(
    deployment: Deployment, expected: list[list[int]], direction: tuple[str, str]
) -> None:
    def cut() -> None:
        deployment.network.change(*direction, cut=True)
        deployment.front.wait_until(lambda: not deployment.front.is_healthy(), "the cut is noticed")
        time.sleep(LATER_SECONDS)
        deployment.network.change(*direction, cut=False)

    assert deployment.streams(cut) == expected


@pytest.mark.parametrize("link", LINKS, ids="-".join)
def test_requests_end_at_their_timeout_behind_a_cut_that_stays(
    deployment: Deployment, expected: list[list[int]], link: tuple[str, str]
) -> None:
    """A stream that runs, a request that arrives behind the cut, and one whose client leaves."""
    front, timeout = deployment.front, {"x-request-timeout": "6"}
    body = {"inputs": "A prompt", "parameters": {"max_new_tokens": 1000}}
    deployment.front.wait_until(lambda: not deployment.scheduler_works(), "earlier requests are gone")
    with front.client.stream("POST", "/generate_stream", json=body, headers=timeout) as answer:
        lines = (json.loads(line[5:]) for line in answer.iter_lines() if line.startswith("data:"))
        assert "token" in next(lines)
        deployment.network.change_between(*link, cut=True)
        with pytest.raises(httpx.ReadTimeout):
            front.client.post("/generate", json=body, timeout=1)
        late = front.client.post("/generate", json=body, headers=timeout)
        assert list(lines)[-1]["error_type"] == "timeout"
    assert (late.status_code, late.json()["error_type"]) == (504, "timeout")
    front.wait_until(lambda: not front.is_healthy(), "the cut is noticed")
    deployment.scheduler.wait_until(lambda: not deployment.scheduler_works(), "the scheduler has cancelled all")
    deployment.network.reset()
    front.wait_until_ready()
    assert deployment.streams() == expected


def test_streams_continue_at_another_worker_when_a_host_vanishes(
    deployment: Deployment, expected: list[list[int]]
) -> None:
    """All its processes are killed, and no packet tells."""

    def vanish() -> None:
        deployment.network.change_between("scheduler", "worker", cut=True)
        kill_host(deployment.worker)
        start_worker(deployment.spare)

    try:
        assert deployment.streams(vanish) == expected
    finally:
        kill_host(deployment.spare)
        deployment.network.reset()
        start_worker(deployment.worker)


def test_requests_of_front_ends_whose_host_vanishes_are_cancelled(
    deployment: Deployment, expected: list[list[int]]
) -> None:
    body = {"inputs": "A prompt", "parameters": {"max_new_tokens": 1000}}
    front = deployment.front
    with front.client.stream("POST", "/generate_stream", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        deployment.network.change_between("front", "scheduler", cut=True)
        kill_host(front)
        with pytest.raises(httpx.RemoteProtocolError):
            list(lines)
    deployment.scheduler.wait_until(lambda: not deployment.scheduler_works(), "the scheduler has cancelled all")
    deployment.network.reset()
    deployment.start_front()
    front.wait_until_ready()
    assert deployment.streams() == expected


def test_hosts_start_on_a_network_that_comes_and_goes(tiny_llama: Path, tmp_path: Path) -> None:
    """Connections are cut in all stages of the handshakes, then the network stays."""
    with network("front", "scheduler", "worker", "spare") as net:
        deployment = Deployment(net, tmp_path, str(tiny_llama))
        for link in LINKS:
            net.change_between(*link, delay=0.05, cut=True)
        with deployment.running():
            deployment.worker.wait_until(lambda: "worker-0" in deployment.worker.processes(), "the worker starts")
            chances = random.Random(0)
            end = time.monotonic() + 6
            while time.monotonic() < end:
                for source, target in DIRECTIONS:
                    net.change(source, target, cut=chances.random() < 0.5)
                time.sleep(chances.uniform(0.02, 0.6))
            net.reset()
            deployment.front.wait_until_ready()
            assert {len(ids) for ids in deployment.streams()} == {TOKENS}
