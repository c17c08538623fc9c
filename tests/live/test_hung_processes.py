"""Processes that hang (SIGSTOP) with default flags: /health says so, they are replaced, and streams continue. Slow ones
are left alone."""

import threading
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.live.server import CLIENT_OPTIONS, Server, SharedServers, python_path
from tests.live.test_tree import SCRIPTED, all_streams, token_ids

pytestmark = pytest.mark.live

FAULTS = Path(__file__).parent / "faults"
# Enough that streams still run when a process is stopped, on a busy machine, too.
TOKENS = 120


@pytest.fixture
def standing(tiny_llama: Path, shared_server: SharedServers) -> Server:
    return shared_server("--model-id", str(tiny_llama), *SCRIPTED)


@pytest.fixture(scope="module")
def undisturbed(tiny_llama: Path, shared_server: SharedServers) -> list[Any]:
    return all_streams(shared_server("--model-id", str(tiny_llama), *SCRIPTED), TOKENS)


def suspend_until_replaced(server: Server, name: str, reports: bool = True) -> None:
    """Stops a process until another has its place. Prints how long that took, and, with `reports`, how long /health
    took to fail."""
    hung = server.processes()[name]
    began = time.monotonic()
    hung.suspend()
    if reports:
        server.wait_until(lambda: not server.is_healthy(), f"/health reports that {name} hangs")
        print(f"{name}: 503 after {time.monotonic() - began:.1f} s", end=", ")
    server.wait_until(lambda: server.processes().get(name, hung).pid != hung.pid, f"{name} is replaced")
    print(f"{name}: replaced after {time.monotonic() - began:.1f} s")


@pytest.mark.parametrize("name", ["worker-0", "scheduler-0"])
def test_a_hung_process_is_reported_and_replaced(standing: Server, undisturbed: list[Any], name: str) -> None:
    disturbed = all_streams(standing, TOKENS, act=lambda: suspend_until_replaced(standing, name))
    assert [token_ids(events) for events in disturbed] == [token_ids(events) for events in undisturbed]
    standing.wait_until_ready()


def test_requests_of_a_hung_tokenizer_move_to_another(standing: Server, undisturbed: list[Any]) -> None:
    """They end before it is replaced. When it continues, its late messages change nothing, and it is used again."""
    hung = standing.processes()["tokenizer-0"]
    began = []

    def hang() -> None:
        began.append(time.monotonic())
        hung.suspend()

    try:
        disturbed = all_streams(standing, TOKENS, act=hang)
        print(f"tokenizer-0: all streams ended {time.monotonic() - began[0]:.1f} s after it was stopped")
        assert standing.processes()["tokenizer-0"].pid == hung.pid
        assert standing.is_healthy()
    finally:
        hung.resume()
    assert [token_ids(events) for events in disturbed] == [token_ids(events) for events in undisturbed]
    standing.wait_until(lambda: "responds again" in standing.output_text(), "the tokenizer is used again")
    again = all_streams(standing, TOKENS)
    assert [token_ids(events) for events in again] == [token_ids(events) for events in undisturbed]
    standing.wait_until(lambda: standing.metric("tgi_batch_current_size") == 0, "no request is left behind")


def test_a_suspended_server_continues_without_a_restart(tiny_llama: Path, tmp_path: Path) -> None:
    """As in a suspended laptop or a frozen container: all processes, the supervisor last. None is taken for hung."""
    with Server(tmp_path / "run", "--model-id", str(tiny_llama), *SCRIPTED, "--validation-workers", "1") as server:
        server.start().wait_until_ready()
        processes = [psutil.Process(server.commands["up"].pid), *server.processes().values()]
        stream = server.stream("Hello", max_new_tokens=40)
        events = [next(stream) for _ in range(5)]
        for process in processes:
            process.suspend()
        time.sleep(15)
        for process in reversed(processes):
            process.resume()
        events += list(stream)
        assert len(events) == 40
        server.wait_until_ready()
        time.sleep(2)
        assert [process.pid for process in server.processes().values()] == [one.pid for one in processes[1:]]
        assert "does not respond" not in server.output_text()


@pytest.mark.parametrize("name", ["worker-0", "scheduler-0", "tokenizer-1", "api-0"])
def test_a_process_that_hangs_while_it_is_idle_is_replaced(standing: Server, name: str) -> None:
    suspend_until_replaced(standing, name, reports=False)
    standing.client.close()  # its connection may have been lost
    standing.client = httpx.Client(base_url=standing.url, **CLIENT_OPTIONS)
    standing.wait_until_ready()
    assert len(list(standing.stream("Hello", max_new_tokens=3))) == 3


def test_a_slow_worker_is_neither_replaced_nor_unhealthy(tiny_llama: Path, tmp_path: Path) -> None:
    """Its first long prompt takes longer than any limit for short steps."""
    flags = ("--model-id", str(tiny_llama), *SCRIPTED, "--validation-workers", "1")
    with Server(tmp_path / "run", *flags, env=python_path(FAULTS / "slow_worker")) as server:
        server.start().wait_until_ready()
        worker = server.processes()["worker-0"].pid
        unhealthy: list[float] = []
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(0.2):
                if not server.is_healthy():
                    unhealthy.append(time.monotonic())

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            began = time.monotonic()
            prompt = "A prompt " * 250
            answer = server.generate(prompt, max_new_tokens=6)
            seconds = time.monotonic() - began
        finally:
            ended.set()
            watcher.join()
        assert len(answer["details"]["tokens"]) == 6
        assert seconds > 12, "the prompt is too short for this test"
        assert not unhealthy
        assert server.processes()["worker-0"].pid == worker
