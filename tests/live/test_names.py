"""Names of other hosts that resolve to several addresses, which come and go while processes run. The resolver is that
of the system, with a hosts file of the test's own."""

import os
import subprocess
from functools import partial
from pathlib import Path

import pytest

from tests.live import commands
from tests.live.server import Server, free_port
from tests.live.test_hosts import SCRIPTED, tokens_of
from tgi.microkernel.processes.process import read_progress

pytestmark = pytest.mark.live

SLOTS = ("--max-batch-size", "64")
# Enough that the bound of the load gives some to each scheduler.
REQUESTS = [(f"Prompt {number}", {"max_new_tokens": 80}) for number in range(30)]
WITH_HOSTS = 'mount --bind "$1" /etc/hosts && shift && exec "$@"'


def missing_here() -> str:
    """Why this machine cannot give a process a hosts file of its own, or ""."""
    command = ["unshare", "--mount", "sh", "-c", WITH_HOSTS, "-", "/dev/null", "true"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        return "there is no unshare"
    return done.stderr.strip()


class NamedHosts:
    """The hosts file that the front ends and tokenizers of one run directory read, and the hosts of schedulers at
    127.0.0.1, 127.0.0.2 and so on."""

    def __init__(self, directory: Path, model_id: str) -> None:
        self.directory = directory
        self.keys = str(directory / "keys")
        self._model = ("--model-id", model_id, "--keys", self.keys)
        self._hosts = directory / "hosts"
        self._hosts.write_text("127.0.0.1 localhost\n")
        self.port, self.front_port = free_port(), free_port()
        commands.run("keys", "new", self.keys, check=True)
        self.front = ServerWithNames(directory / "front", self._hosts, *self._model)

    def name(self, **names: list[int]) -> None:
        """Gives each name these addresses, 1 for 127.0.0.1. The file stays the same one: it is mounted."""
        lines = [f"127.0.0.{host} {name}.test" for name, hosts in names.items() for host in hosts]
        self._hosts.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))

    def scheduler(self, host: int) -> Server:
        """A host with a scheduler and its worker."""
        return Server(self.directory / f"scheduler-{host}", *self._model)

    def start_scheduler(self, server: Server, host: int) -> None:
        server.start("scheduler", "--listen", f"tcp://127.0.0.{host}:{self.port}").start("worker", *SCRIPTED, *SLOTS)


class ServerWithNames(Server):
    """Its commands run with another hosts file."""

    def __init__(self, run_directory: Path, hosts: Path, *arguments: str) -> None:
        super().__init__(run_directory, *arguments, forked=False)
        self._prefix = ["unshare", "--mount", "sh", "-c", WITH_HOSTS, "-", str(hosts)]

    def launch(self, name: str, command: list[str], env: dict[str, str], cwd: Path | None = None) -> Server:
        return super().launch(name, [*self._prefix, *command], env, cwd)


@pytest.fixture
def hosts(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> NamedHosts:
    if reason := "it needs root" if os.geteuid() else missing_here():
        pytest.skip(f"cannot change the names of hosts here: {reason}")
    # A short name, for the paths of sockets: tmp_path, which has that of the test, is too long in a process of xdist.
    return NamedHosts(tmp_path_factory.mktemp("names"), str(tiny_llama))


def runs(server: Server) -> bool:
    return {"scheduler-0", "worker-0"} <= server.processes().keys()


def works(server: Server) -> bool:
    report = read_progress(server.run_directory, "scheduler-0")
    return report is not None and report.progress_age is not None


def test_addresses_of_a_name_come_and_go(hosts: NamedHosts) -> None:
    schedulers = first, second, third = [hosts.scheduler(host) for host in (1, 2, 3)]
    listen = ("--tokenizer-listen", f"tcp://0.0.0.0:{hosts.front_port}", "--validation-workers", "1")
    with hosts.front as front, first, second, third:
        front.start("tokenizer", "--connect", f"tcp://schedulers.test:{hosts.port}", *listen)
        front.start("api", "--connect", f"tcp://tokenizers.test:{hosts.front_port}")
        front.wait_until(lambda: front.output_text().count("cannot be resolved") == 2, "both names are missed")
        for number, scheduler in enumerate(schedulers, 1):
            hosts.start_scheduler(scheduler, number)
        for scheduler in schedulers:  # fails at once if one has ended, for which the front end would wait
            scheduler.wait_until(partial(runs, scheduler), "a scheduler and its worker run")
        hosts.name(schedulers=[1], tokenizers=[1, 2])  # two addresses of the same tokenizer
        front.wait_until_ready()
        expected = tokens_of(front.stream_all(REQUESTS))

        def working() -> list[bool]:
            """Which schedulers compute while all requests run."""
            found: list[bool] = []
            events = front.stream_all(REQUESTS, lambda: found.extend(map(works, schedulers)), 40)
            assert tokens_of(events) == expected
            return found

        def wait_until_working(which: list[bool], description: str) -> None:
            """Asks once in a while: each time all requests run, and names are looked up every few seconds."""
            front.wait_until(lambda: working() == which, description, poll_seconds=1)

        assert working() == [True, False, False]
        hosts.name(schedulers=[1, 2], tokenizers=[2])
        wait_until_working([True, True, False], "the second one is used")
        hosts.name(schedulers=[2, 3], tokenizers=[2])  # the first one is still connected
        wait_until_working([True, True, True], "the third one is used")
        assert tokens_of(front.stream_all(REQUESTS, lambda: first.kill("scheduler-0"), 20)) == expected
        first.wait_until(lambda: "worker-0" in first.processes(), "its worker waits")
        wait_until_working([False, True, True], "the first one is used no more")
        hosts.name(schedulers=[1, 2, 3], tokenizers=[2])
        wait_until_working([True, True, True], "the first one has returned")
        assert front.output_text().count("cannot be resolved") == 2
