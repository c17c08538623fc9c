"""`tgi up --ray`: workers on a real Ray cluster of several nodes on this host; some are killed under streams."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.live.server import TIMEOUT_SECONDS, Server, still_running
from tests.live.test_tree import all_streams, token_ids

pytestmark = pytest.mark.live

TOKENS = 100


class Cluster:
    """See tests/live/ray_cluster.py."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.live.ray_cluster"],
            env=os.environ | {"RAY_TMPDIR": str(directory), "TMPDIR": str(directory)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.address = self._answer()
        self.raylets: list[int] = []

    def add(self) -> None:
        """Starts a node with one core."""
        self.raylets.append(self._ask("add 1"))

    def kill_node_of(self, rank: psutil.Process) -> None:
        """Kills the raylet of the node on which a rank runs: as if its host had ended."""
        (raylet,) = {parent.pid for parent in rank.parents()} & {*self.raylets}
        self.raylets.remove(raylet)
        assert self._ask(f"kill {raylet}") == 0

    def kill_actor(self) -> None:
        """Kills the actor that runs the rank which has started last. A rank of an actor that Ray has removed may still
        be ending, without one."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not (actors := self._actors()):
            assert time.monotonic() < deadline, "no rank has an actor"
            time.sleep(0.05)
        actors[-1].kill()
        actors[-1].wait(60)

    def _actors(self) -> list[psutil.Process]:
        """Those that run ranks, the latest last."""
        found = []
        for rank in self.ranks():
            with contextlib.suppress(psutil.NoSuchProcess):
                found += [one for one in rank.parents() if "RankActor" in " ".join(one.cmdline())]
        return sorted(found, key=lambda one: one.create_time())

    def files_with(self, text: str) -> list[str]:
        """The files of the nodes and of their actors that contain this text."""
        command = ["grep", "-rlsF", "-D", "skip", "-e", text, str(self.directory)]
        return subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout.splitlines()

    def ranks(self) -> list[psutil.Process]:
        """The worker processes that run on the nodes, by number of the rank."""
        found = []
        for one in psutil.Process(self._process.pid).children(recursive=True):
            try:
                if " ".join(one.cmdline()).startswith("tgi worker"):
                    found.append((int(one.environ().get("TGI_RANK", 0)), one))
            except psutil.NoSuchProcess:
                continue
        return [one for _, one in sorted(found, key=lambda each: each[0])]

    def left(self) -> int:
        """How many actors and placement groups there are."""
        return self._ask("left")

    def close(self) -> None:
        children = psutil.Process(self._process.pid).children(recursive=True)
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        finally:
            self._process.kill()
            for child in children:
                if child.is_running():
                    child.kill()

    def _ask(self, line: str) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return int(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes with a core each."""
    with tempfile.TemporaryDirectory(
        dir="/tmp", prefix="ray-", ignore_cleanup_errors=True
    ) as directory:  # short: Ray's sockets lie in it
        made = Cluster(Path(directory))
        try:
            made.add()
            made.add()
            yield made
        finally:
            made.close()


def check_streams(server: Server, expected: list[list[int]], act: Callable[[], object]) -> None:
    assert [token_ids(events) for events in all_streams(server, TOKENS, act)] == expected


def test_ranks_of_a_worker_on_two_nodes(cluster: Cluster, tiny_llama: Path, tmp_path: Path) -> None:
    flags = "--model-id", str(tiny_llama), "--ray", cluster.address, "--num-shard", "2"
    with Server(tmp_path / "run", *flags) as server:
        server.start().wait_until_ready()
        expected = [token_ids(events) for events in all_streams(server, TOKENS)]
        ranks = cluster.ranks()
        assert len(ranks) == 2
        # The nodes of this cluster are on one host, and its ranks find that out.
        combined = "the 2 ranks combine their results in shared memory"
        server.wait_until(lambda: combined in server.output_text(), "Ray has passed the line on")

        def lose_a_node() -> None:
            cluster.kill_node_of(ranks[1])
            server.wait_until(
                lambda: "waiting for Ray to place rank 1, which needs 1 CPU" in server.output_text(), "it waits"
            )
            cluster.add()

        check_streams(server, expected, lose_a_node)
        assert not still_running(ranks)  # both have ended, and meet anew
        ranks = cluster.ranks()
        server.stop()
        assert not still_running(ranks)
        assert cluster.ranks() == []
        assert cluster.left() == 0


def test_replicas(cluster: Cluster, tiny_llama: Path, tmp_path: Path) -> None:
    scripted = "--worker", "scripted", "--scripted-step-us", "30000"
    flags = "--model-id", str(tiny_llama), "--ray", cluster.address, "--replicas", "2", *scripted
    with Server(tmp_path / "run", *flags) as server:
        server.start().wait_until_ready()
        server.wait_until(lambda: len(cluster.ranks()) == 2, "both replicas are placed")
        expected = [token_ids(events) for events in all_streams(server, TOKENS)]

        def lose_a_node() -> None:
            cluster.add()
            cluster.kill_node_of(cluster.ranks()[0])

        check_streams(server, expected, lose_a_node)
        server.wait_until(lambda: len(cluster.ranks()) == 2, "Ray has placed both again")
        command = [sys.executable, "-m", "tgi", "scale", "replica", "1"]
        subprocess.run(command, env=server.environment, check=True)
        assert len(cluster.ranks()) == 1
        check_streams(server, expected, lambda: None)
        check_loss_of_the_only_actor(server, cluster)
        server.stop()
        assert cluster.ranks() == []
        assert cluster.left() == 0


def check_loss_of_the_only_actor(server: Server, cluster: Cluster) -> None:
    """A stream that loses it again and again: no request is to blame for that, however often it happens."""
    expected = token_ids(list(server.stream("A prompt", max_new_tokens=60)))
    secret = json.loads((server.run_directory / "keys" / "host.key").read_text())["secret"]
    found = []

    def deaths() -> int:
        return server.output_text().count("was killed by SIGKILL")

    before = deaths()
    (worker,) = (name for name in server.processes() if name.startswith("worker"))
    for number, event in enumerate(server.stream("A prompt", max_new_tokens=60), 1):
        found.append(event["token"]["id"])
        if number in (10, 30, 50):
            server.kill(worker)  # whose actors Ray then removes
        if number == 20:
            assert cluster.files_with(secret) == []  # so a killed actor leaves none
            cluster.kill_actor()
            assert cluster.files_with(secret) == []
    assert found == expected
    server.wait_until(lambda: deaths() == before + 3, "the supervisor has logged the last kill, too")


def test_an_error_of_a_rank_ends_the_server(cluster: Cluster, tiny_llama: Path, tmp_path: Path) -> None:
    flags = "--model-id", str(tiny_llama), "--ray", cluster.address, "--cpu", "neon"
    with Server(tmp_path / "run", *flags) as server:
        server.start()
        assert server.commands["up"].wait(120) != 0
        assert "cannot run: TGI_CPU is neon, but this processor has no asimd" in server.output_text()
    assert cluster.left() == 0


def test_a_cluster_that_is_not_there_is_named(tiny_llama: Path, tmp_path: Path) -> None:
    with Server(tmp_path / "run", "--model-id", str(tiny_llama), "--ray", "127.0.0.1:1") as server:
        server.start()
        assert server.commands["up"].wait(120) != 0
        assert "Cannot connect to the Ray cluster at 127.0.0.1:1" in server.output_text()
