"""Whole process trees with the scripted worker: start in any order, SIGKILL of any process, drain, and stop without
processes left behind."""

import itertools
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.live import commands
from tests.live.server import CLIENT_OPTIONS, TIMEOUT_SECONDS, Server, SharedServers, still_running
from tests.models import model
from tgi.microkernel.host import rundir

pytestmark = pytest.mark.live

ROOT = Path(__file__).parent.parent.parent
SCRIPTED = ("--worker", "scripted", "--scripted-step-us", "20000")
ROLES_OF_ALL = {"api-0", "tokenizer-0", "tokenizer-1", "scheduler-0", "worker-0"}
PROMPTS = [f"Prompt number {n}, " + "and some more of it " * n for n in range(8)]


@pytest.fixture
def server(tiny_llama: Path, tmp_path: Path) -> Iterator[Server]:
    """Not started, for tests that start it with their own flags, or end it."""
    with Server(tmp_path / "run", "--model-id", str(tiny_llama), *SCRIPTED) as server:
        yield server


@pytest.fixture
def standing(tiny_llama: Path, shared_server: SharedServers) -> Server:
    """The shared server of all tests after which the whole tree still runs."""
    return shared_server("--model-id", str(tiny_llama), *SCRIPTED)


def token_ids(events: list[dict[str, Any]]) -> list[int]:
    return [event["token"]["id"] for event in events]


def all_streams(
    server: Server, tokens: int, act: Callable[[], object] | None = None, after: int = 20
) -> list[list[dict[str, Any]]]:
    """Streams all prompts at once, every second one with a seed; calls `act` once each has shown `after` tokens."""
    sampling = ({}, {"do_sample": True, "seed": 7})
    requests = [(prompt, {"max_new_tokens": tokens, **sampling[number % 2]}) for number, prompt in enumerate(PROMPTS)]
    return server.stream_all(requests, act, after)


def test_stream_and_generate_return_the_same_tokens(standing: Server) -> None:
    events = list(standing.stream("Hello", max_new_tokens=5))
    assert [event["index"] for event in events] == [1, 2, 3, 4, 5]
    assert events[-1]["details"]["finish_reason"] == "length"
    assert events[-1]["generated_text"] == "".join(event["token"]["text"] for event in events)
    whole = standing.generate("Hello", max_new_tokens=5)
    assert [token["id"] for token in whole["details"]["tokens"]] == token_ids(events)


@pytest.fixture(scope="module")
def undisturbed(tiny_llama: Path, shared_server: SharedServers) -> list[Any]:
    return all_streams(shared_server("--model-id", str(tiny_llama), *SCRIPTED), 100)


@pytest.mark.parametrize("target", ["worker-0", "scheduler-0", "tokenizer-0", "tokenizer-1"])
def test_streams_continue_after_a_process_is_killed(standing: Server, undisturbed: list[Any], target: str) -> None:
    """Half of the streams are greedy, half have a seed."""
    killed = standing.processes()[target].pid
    recomputed_before = standing.metric("tgi_recomputed_tokens")
    disturbed = all_streams(standing, 100, act=lambda: standing.kill(target))
    assert [token_ids(events) for events in disturbed] == [token_ids(events) for events in undisturbed]
    assert [events[-1]["generated_text"] for events in disturbed] == [
        events[-1]["generated_text"] for events in undisturbed
    ]
    if target == "worker-0":
        assert standing.metric("tgi_recomputed_tokens") - recomputed_before >= 8 * 20

    def all_ready() -> bool:
        states = rundir.read_states(standing.run_directory)
        return len(states) == 5 and all(state.state == "ready" and state.pid != killed for state in states)

    standing.wait_until(all_ready, "all processes are ready again")


def test_six_kills_in_a_row_lose_no_token_and_no_count(standing: Server) -> None:
    undisturbed = all_streams(standing, 150)
    targets = itertools.cycle(["worker-0", "tokenizer-0", "scheduler-0", "tokenizer-1"])
    restarts_before = standing.metric("tgi_process_restarts")
    scrapes: list[dict[str, float]] = []

    def kill_six() -> None:
        for _ in range(6):
            standing.kill(next(targets))
            scrapes.append(growing_samples(standing))
            time.sleep(0.4)
            scrapes.append(growing_samples(standing))

    disturbed = all_streams(standing, 150, act=kill_six)
    assert [token_ids(events) for events in disturbed] == [token_ids(events) for events in undisturbed]
    scrapes.append(growing_samples(standing))
    assert {"tgi_request_count", 'tgi_batch_inference_duration_sum{method="decode"}'} <= set(scrapes[-1])
    for earlier, later in itertools.pairwise(scrapes):
        assert {name: value for name, value in earlier.items() if later.get(name, 0) < value} == {}
    assert standing.metric("tgi_process_restarts") - restarts_before == 6
    standing.wait_until(lambda: metric_files_of_ended(standing) == set(), "the files of ended processes are gone")


def growing_samples(server: Server) -> dict[str, float]:
    """The samples of counters and histograms of /metrics: values that never decrease."""
    lines = [line.rpartition(" ") for line in server.client.get("/metrics").text.splitlines()]
    kinds = {words[2]: words[3] for name, _, kind in lines if (words := f"{name} {kind}".split())[:2] == ["#", "TYPE"]}
    found = {}
    for name, _, value in lines:
        series = re.sub(r"(_bucket|_sum|_count)?(\{.*)?$", "", name)
        if kinds.get(series) == "histogram" or kinds.get(name.partition("{")[0]) == "counter":
            found[name] = float(value)
    return found


def metric_files_of_ended(server: Server) -> set[str]:
    """The files of metrics of processes that have ended, except the sums that replace them."""
    pids = {str(process.pid) for process in (*server.processes().values(), server.commands["up"])}
    names = {path.stem for path in (server.run_directory / "metrics").iterdir()}
    return {name for name in names if name.rpartition("_")[2] not in {*pids, "ended"}}


def test_roles_start_bottom_up(server: Server) -> None:
    """And are no server that `tgi reload` can replace; a new supervisor takes the place of one that was killed."""
    for role in ("worker", "scheduler", "tokenizer", "api"):
        server.start(role)
        time.sleep(0.5)
    server.wait_until_ready()
    assert len(list(server.stream("Hello", max_new_tokens=3))) == 3
    server.wait_until(lambda: set(server.processes()) == ROLES_OF_ALL, "both tokenizers run")
    reload = commands.run("reload", "--model-id", server.arguments[1], TGI_RUN=str(server.run_directory))
    assert reload.returncode == 1
    assert "Other supervisors run processes of this server" in reload.stderr
    stream = server.stream("Hello", max_new_tokens=40)
    events = [next(stream) for _ in range(5)]
    server.commands["scheduler"].kill()
    server.commands["scheduler"].wait()
    server.start("scheduler")
    assert len(events + list(stream)) == 40
    server.wait_until(lambda: server.metric("tgi_batch_current_size") == 0, "the gauges of the killed one are gone")
    server.stop()


def test_honcho_runs_the_procfile(tiny_llama: Path, tmp_path: Path) -> None:
    with Server(tmp_path / "run") as server:
        # Runs this clone's code, which need not be the installed package.
        (tgi := tmp_path / "tgi").write_text(f'#!/bin/sh\nexec {sys.executable} -m tgi "$@"\n')
        tgi.chmod(0o700)
        env = os.environ | {
            "TGI_RUN": str(tmp_path / "run"), "TGI_HOSTNAME": "127.0.0.1", "MODEL_ID": str(tiny_llama),
            "TGI_WORKER": "scripted", "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        # honcho sets PORT itself; the flag in the command line takes precedence.
        procfile = tmp_path / "Procfile"
        procfile.write_text((ROOT / "Procfile").read_text().replace("tgi api", f"tgi api --port {server.port}"))
        server.launch(
            "honcho", [sys.executable, "-m", "honcho", "-f", str(procfile), "start"], env, tmp_path
        ).wait_until_ready()
        assert len(list(server.stream("Hello", max_new_tokens=3))) == 3
        # A signal while honcho prints a line would end it without its children.
        server.wait_until(lambda: "POST /generate_stream 200 " in server.output_text(), "the last line is printed")
        server.stop()


def status_of_new_connection(server: Server) -> int:
    """The status of a small request over a new connection, which any front end may accept."""
    body = {"inputs": "a", "parameters": {"max_new_tokens": 1}}
    return httpx.post(f"{server.url}/generate", json=body, **CLIENT_OPTIONS).status_code


def test_two_front_ends_share_the_port(tiny_llama: Path, shared_server: SharedServers) -> None:
    server = shared_server("--model-id", str(tiny_llama), *SCRIPTED, "--api-workers", "2")
    before = server.metric("tgi_request_count")
    for name in ("api-0", "api-1"):
        server.kill(name)  # the port stays open: the other front end, or the new one, answers
        assert status_of_new_connection(server) == 200
    server.wait_until(lambda: len(server.processes()) == 6, "all six processes run again")
    for _ in range(20):
        assert status_of_new_connection(server) == 200
    server.client.close()  # its connection was lost with its front end
    server.client = httpx.Client(base_url=server.url, **CLIENT_OPTIONS)
    assert server.metric("tgi_request_count") - before == 22


def test_a_disconnect_frees_the_request(standing: Server) -> None:
    failures_before = standing.metric("tgi_request_failure")
    stream = standing.stream("Hello", max_new_tokens=5000)
    for _ in range(5):
        next(stream)
    assert standing.metric("tgi_batch_current_size") == 1
    stream.close()  # type: ignore[attr-defined]
    standing.wait_until(lambda: standing.metric("tgi_batch_current_size") == 0, "the request has left the batch")
    standing.wait_until(lambda: standing.metric("tgi_kv_cache_pages_used") == 0, "its pages are free")
    assert standing.metric("tgi_request_failure") - failures_before >= 1


def test_sigterm_drains_streams_refuses_connections_and_leaves_no_process(server: Server) -> None:
    server.start().wait_until_ready()
    processes = server.processes()

    def port_is_closed() -> bool:
        try:
            socket.create_connection(("127.0.0.1", server.port)).close()
        except ConnectionRefusedError:
            return True
        return False

    def drain() -> None:
        server.commands["up"].send_signal(signal.SIGTERM)
        server.wait_until(port_is_closed, "the port is closed")
        assert server.processes().keys() == processes.keys(), "the streams were over before the port closed"

    streams = all_streams(server, 200, act=drain, after=5)
    assert [len(events) for events in streams] == [200] * 8
    assert server.commands["up"].wait(TIMEOUT_SECONDS) == 0
    assert not still_running(processes.values(), timeout=5)


def test_tgi_down_ends_the_tree(server: Server) -> None:
    server.start().wait_until_ready()
    done = commands.run("down", check=True, TGI_RUN=str(server.run_directory))
    assert done.stdout == f"The server in {server.run_directory} has ended.\n"
    assert server.commands["up"].wait(TIMEOUT_SECONDS) == 0


def test_all_processes_end_with_a_killed_supervisor(server: Server) -> None:
    server.start().wait_until_ready()
    processes = server.processes()
    assert len(processes) == 5
    server.commands["up"].kill()
    assert not still_running(processes.values())


def test_process_titles_show_roles(standing: Server) -> None:
    titles = {name: " ".join(process.cmdline()).strip() for name, process in standing.processes().items()}
    assert titles["worker-0"] == "tgi worker 0"
    assert titles["tokenizer-1"] == "tgi tokenizer 1"


def test_tgi_ps_shows_states_and_memory(standing: Server) -> None:
    listed = json.loads(commands.run("ps", "--json", check=True, TGI_RUN=str(standing.run_directory)).stdout)
    supervisor, *rows = [row for row in listed if row["run"] == str(standing.run_directory)]
    assert supervisor["pid"] == standing.commands["up"].pid
    assert {row["name"]: row["pid"] for row in rows} == {
        name: process.pid for name, process in standing.processes().items()
    }
    assert {row["state"] for row in rows} == {"ready"}
    assert min(row["memory_mb"] for row in rows) > 1


def test_a_second_server_in_the_same_run_directory_is_rejected(standing: Server) -> None:
    again = commands.run("up", "--hostname", "127.0.0.1", TGI_RUN=str(standing.run_directory))
    assert again.returncode == 1
    assert "Another tgi (pid" in again.stderr
    assert "Traceback" not in again.stderr


def test_a_port_in_use_is_reported(standing: Server, tmp_path: Path) -> None:
    address = ("--hostname", "127.0.0.1", "--port", str(standing.port))
    again = commands.run("up", *address, TGI_RUN=str(tmp_path / "other"))
    assert again.returncode == 1
    assert f"Cannot listen on 127.0.0.1:{standing.port}" in again.stderr
    assert "Traceback" not in again.stderr


def test_health_and_requests_give_503_until_all_roles_run(server: Server) -> None:
    """Roles that start top down."""
    for role in ("api", "tokenizer"):
        server.start(role)

    def answers() -> bool:
        try:
            return bool(server.client.get("/info").status_code)
        except httpx.TransportError:
            return False

    server.wait_until(answers, "the port is open")
    health = server.client.get("/health")
    assert health.status_code == 503
    assert health.json() == {"error": "unhealthy", "error_type": "healthcheck"}
    assert server.client.post("/generate", json={"inputs": "a"}).status_code == 503
    for role in ("scheduler", "worker"):
        server.start(role)
    server.wait_until_ready()
    assert len(list(server.stream("Hello", max_new_tokens=3))) == 3


def test_a_role_with_another_model_is_rejected(tiny_llama: Path, tmp_path: Path) -> None:
    with Server(tmp_path / "run", *SCRIPTED) as server:
        for role, kind in (("scheduler", "llama"), ("worker", "llama"), ("tokenizer", "qwen2"), ("api", "llama")):
            server.start(role, "--model-id", str(model(kind)))
        server.wait_until(lambda: "it serves another model" in server.output_text(), "the tokenizer is rejected")
        assert not server.is_healthy()


def test_health_fails_at_once_when_a_process_ends(server: Server) -> None:
    """No request is sent and the supervisor is stopped, so that only the closed connection shows the end."""
    server.start("up", "--validation-workers", "1").wait_until_ready()
    for target in ("worker-0", "scheduler-0", "tokenizer-0"):
        process = server.processes()[target]
        server.commands["up"].send_signal(signal.SIGSTOP)
        try:
            process.kill()
            server.wait_until(lambda: not server.is_healthy(), f"/health reports the end of {target}")
            assert server.client.get("/health").headers["x-startup-stage"]
        finally:
            server.commands["up"].send_signal(signal.SIGCONT)
        server.wait_until_ready()
        assert len(list(server.stream("Hello", max_new_tokens=3))) == 3


def test_every_503_has_the_startup_stage(server: Server) -> None:
    """While the worker hangs, while no worker runs, and from a front end that was started meanwhile."""
    for role in ("api", "tokenizer", "scheduler", "worker"):
        server.start(role, "--stall-limit", "0.5")
    server.wait_until_ready()

    def stage(path: str = "/health", body: Any = None) -> str | None:
        """The stage of a 503; "" for other statuses, None while no front end listens."""
        try:
            answer = httpx.request("GET" if body is None else "POST", server.url + path, json=body, **CLIENT_OPTIONS)
        except httpx.TransportError:
            return None
        return answer.headers["x-startup-stage"] if answer.status_code == 503 else ""

    supervisor = server.commands["worker"]
    supervisor.send_signal(signal.SIGSTOP)
    try:
        worker = server.processes()["worker-0"]
        stream = server.stream("Hello", max_new_tokens=5000)
        next(stream)
        worker.suspend()
        server.wait_until(lambda: stage() == "the worker finishes no step", "the stall is reported")
        worker.kill()
        server.wait_until(lambda: stage() == "waiting for the worker 0%", "the end of the worker is reported")
        stream.close()  # type: ignore[attr-defined]
        server.kill("api-0")
        server.wait_until(lambda: stage() == "waiting for the worker 0%", "the new front end reports it")
        chat = {"messages": [{"role": "user", "content": "Hello"}]}
        for path, body in {
            "/ping": None, "/": None, "/generate": {"inputs": "Hello"}, "/generate_stream": {"inputs": "Hello"},
            "/v1/chat/completions": chat, "/v1/completions": {"prompt": "Hello", "stream": True},
            "/invocations": chat, "/vertex": {"instances": [chat]}, "/tokenize": {"inputs": "Hello"},
            "/chat_tokenize": chat,
        }.items():  # fmt: skip
            assert stage(path, body) == "waiting for the worker 0%", path
    finally:
        supervisor.send_signal(signal.SIGCONT)
    server.wait_until(lambda: stage() == "", "the server is ready again")
    assert len(list(server.stream("Hello", max_new_tokens=3))) == 3
