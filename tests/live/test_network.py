"""A host for each role on an emulated network. Delay, loss, and cuts of each link that heal or stay: streams continue
exactly, or end as documented."""

import contextlib
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from scripts.reliability.network import Network
from tests.live import commands
from tests.live.server import Server, event_lines, still_running
from tests.network import network
from tgi.microkernel.processes.process import read_progress

pytestmark = pytest.mark.live

PORT, TOKENIZER_PORT = 3100, 3200
TOKENS = 40
PROMPTS = ("A prompt", "Another prompt", "One more")
# A connection without answers to heartbeats is closed after 3 to 4 s.
SHORT_CUT_SECONDS = 1.0
# Between the moment when a cut is noticed at one end and the repair: more than the other end may be later.
LATER_SECONDS = 1.5
LINKS = (("front", "tokenizer"), ("tokenizer", "scheduler"), ("scheduler", "worker"))
HOSTS = ("front", "tokenizer", "scheduler", "worker", "spare")
DIRECTIONS = [direction for one, other in LINKS for direction in ((one, other), (other, one))]


class Deployment:
    """The servers of the hosts of a network, one for each role. `spare` has no process: a worker or tokenizers can be
    started there instead of those of another host."""

    def __init__(self, net: Network, directory: Path, model_id: str) -> None:
        self.network = net
        self._directory = directory
        self._keys = directory / "keys"
        commands.run("keys", "new", str(self._keys), check=True)
        self._model = ("--model-id", model_id)
        self.front, self.tokenizer, self.scheduler, self.worker, self.spare = map(self._server, HOSTS)

    def _server(self, name: str) -> Server:
        arguments = (*self._model, "--keys", str(self._keys))
        return Server(self._directory / name, *arguments, host=self.network[name])

    def _address(self, name: str, port: int) -> str:
        return f"tcp://{self.network[name].address}:{port}"

    def start(self) -> "Deployment":
        self.scheduler.start("scheduler", "--listen", self._address("scheduler", PORT))
        self.start_front()
        self.start_tokenizers(self.tokenizer)
        self.start_worker(self.worker)
        return self

    def start_front(self) -> None:
        tokenizers = [f"{self._address(name, TOKENIZER_PORT)}-{TOKENIZER_PORT + 1}" for name in ("tokenizer", "spare")]
        self.front.start("api", "--connect", ",".join(tokenizers))

    def start_tokenizers(self, server: Server) -> None:
        name = "spare" if server is self.spare else "tokenizer"
        listen = ("--tokenizer-listen", self._address(name, TOKENIZER_PORT))
        server.start("tokenizer", "--connect", self._address("scheduler", PORT), *listen)

    def start_worker(self, server: Server) -> None:
        connect = ("--connect", self._address("scheduler", PORT))
        server.start("worker", *connect, "--worker", "scripted", "--scripted-step-us", "20000")

    @contextlib.contextmanager
    def running(self) -> Iterator["Deployment"]:
        with self.front, self.tokenizer, self.scheduler, self.worker, self.spare:
            yield self.start()

    def scheduler_works(self) -> bool:
        report = read_progress(self.scheduler.run_directory, "scheduler-0")
        return report is not None and report.progress_age is not None

    def streams(self, act: Callable[[], object] | None = None) -> list[list[int]]:
        """The token ids of concurrent streams; `act` is called when each has had 5."""
        requests = [(prompt, {"max_new_tokens": TOKENS}) for prompt in PROMPTS]
        return [ids_of(events) for events in self.front.stream_all(requests, act, 5)]


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
    with network(*HOSTS) as net:
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


def test_streams_survive_cuts_of_any_length(deployment: Deployment, expected: list[list[int]]) -> None:
    """Around the 2 s after which a silent peer is given up, and the 3 to 4 s after which the connection is."""

    def cut() -> None:
        for seconds, link in zip((2.2, 3.2, 4.5), LINKS, strict=True):
            deployment.network.change_between(*link, cut=True)
            time.sleep(seconds)
            deployment.network.change_between(*link, cut=False)
            time.sleep(0.2)

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
        lines = (json.loads(line[5:]) for line in event_lines(answer) if line.startswith("data:"))
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


@pytest.mark.parametrize("role", ["worker", "tokenizer"])
def test_streams_continue_elsewhere_when_a_host_vanishes(
    deployment: Deployment, expected: list[list[int]], role: str
) -> None:
    """All its processes are killed, and no packet tells."""
    lost: Server = getattr(deployment, role)
    start = deployment.start_worker if role == "worker" else deployment.start_tokenizers

    def vanish() -> None:
        for link in LINKS:
            if role in link:
                deployment.network.change_between(*link, cut=True)
        kill_host(lost)
        start(deployment.spare)

    try:
        assert deployment.streams(vanish) == expected
    finally:
        kill_host(deployment.spare)
        deployment.network.reset()
        start(lost)


def test_requests_of_a_front_end_whose_host_vanishes_are_cancelled(
    deployment: Deployment, expected: list[list[int]]
) -> None:
    body = {"inputs": "A prompt", "parameters": {"max_new_tokens": 1000}}
    front = deployment.front
    with front.client.stream("POST", "/generate_stream", json=body) as answer:
        lines = event_lines(answer)
        next(lines)
        deployment.network.change_between("front", "tokenizer", cut=True)
        kill_host(front)
        with pytest.raises(httpx.RemoteProtocolError):
            list(lines)
    deployment.scheduler.wait_until(lambda: not deployment.scheduler_works(), "the scheduler has cancelled all")
    deployment.network.reset()
    deployment.start_front()
    front.wait_until_ready()
    assert deployment.streams() == expected


def test_hosts_start_on_a_network_that_comes_and_goes(
    tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Connections are cut in all stages of the handshakes, then the network stays. One link has long round trips."""
    with network(*HOSTS) as net:
        deployment = Deployment(net, tmp_path_factory.mktemp("start"), str(tiny_llama))
        for link in LINKS:
            net.change_between(*link, delay=0.05, cut=True)
        net.change_between("front", "tokenizer", delay=0.5)
        with deployment.running():
            deployment.worker.wait_until(lambda: "worker-0" in deployment.worker.processes(), "the worker starts")
            chances = random.Random(0)
            end = time.monotonic() + 6
            while time.monotonic() < end:
                for source, target in DIRECTIONS:
                    net.change(source, target, cut=chances.random() < 0.5)
                time.sleep(chances.uniform(0.02, 0.6))
            net.reset()
            net.change_between("front", "tokenizer", delay=0.5)
            deployment.front.wait_until_ready()
            net.reset()
            assert {len(ids) for ids in deployment.streams()} == {TOKENS}
