"""Whole process trees with the scripted worker: started in any order, killed anywhere, drained, nothing left behind."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.live.server import LOCAL, PATIENCE_SECONDS, Server, left_of
from tests.models import model
from tgi.kernel import rundir

ROOT = Path(__file__).parent.parent.parent
SCRIPTED = ("--worker", "scripted", "--scripted-step-us", "20000")
PROMPTS = [f"Prompt number {n}, " + "and some more of it " * n for n in range(8)]


@pytest.fixture
def server(tiny_llama: Path, tmp_path: Path) -> Iterator[Server]:
    """For tests that start it their own way, or end it."""
    with Server(tmp_path / "run", "--model-id", str(tiny_llama), *SCRIPTED) as made:
        yield made


@pytest.fixture(scope="module")
def standing(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests that leave a whole one behind."""
    with Server(tmp_path_factory.mktemp("standing") / "run", "--model-id", str(tiny_llama), *SCRIPTED) as made:
        yield made.start().ready()


def ids(events: list[dict[str, Any]]) -> list[int]:
    return [event["token"]["id"] for event in events]


def all_streams(server: Server, tokens: int, act: Any = None, after: int = 20) -> list[Any]:
    """Streams all prompts at once, every second one with a seed; calls `act` once each has shown `after` tokens."""
    seen = [0] * len(PROMPTS)

    def one(k: int) -> list[dict[str, Any]]:
        events = []
        sampling = {"do_sample": True, "seed": 7} if k % 2 else {}
        for event in server.stream(PROMPTS[k], max_new_tokens=tokens, **sampling):
            events.append(event)
            seen[k] += 1
        return events

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        streams = [pool.submit(one, k) for k in range(len(PROMPTS))]
        if act:
            end = time.monotonic() + PATIENCE_SECONDS
            while min(seen) < after:
                assert time.monotonic() < end, f"{seen}\n{server.said()}"
                time.sleep(0.005)
            assert max(seen) < tokens, "too late to act"
            act()
        return [stream.result(PATIENCE_SECONDS) for stream in streams]


def test_streams_tokens_over_http(standing: Server) -> None:
    events = list(standing.stream("Hello", max_new_tokens=5))
    assert [event["index"] for event in events] == [1, 2, 3, 4, 5]
    assert events[-1]["details"]["finish_reason"] == "length"
    assert events[-1]["generated_text"] == "".join(event["token"]["text"] for event in events)
    whole = standing.generate("Hello", max_new_tokens=5)
    assert [token["id"] for token in whole["details"]["tokens"]] == ids(events)


@pytest.fixture(scope="module")
def undisturbed(standing: Server) -> list[Any]:
    return all_streams(standing, 60)


@pytest.mark.parametrize("victim", ["worker-0", "scheduler-0", "tokenizer-0", "tokenizer-1"])
def test_kill_9_in_the_middle_and_every_stream_goes_on(standing: Server, undisturbed: list[Any], victim: str) -> None:
    """Half of the streams are greedy, half have a seed."""
    killed = standing.processes()[victim].pid
    resumed_before = standing.metric("tgi_resumed_tokens")
    disturbed = all_streams(standing, 60, act=lambda: standing.kill(victim))
    assert [ids(events) for events in disturbed] == [ids(events) for events in undisturbed]
    assert [events[-1]["generated_text"] for events in disturbed] == [
        events[-1]["generated_text"] for events in undisturbed
    ]
    if victim == "worker-0":
        assert standing.metric("tgi_resumed_tokens") - resumed_before >= 8 * 20

    def whole() -> bool:
        states = rundir.read_states(standing.run)
        return len(states) == 5 and all(state.state == "ready" and state.pid != killed for state in states)

    standing.until(whole, "it is whole again")


def test_killed_again_and_again(server: Server) -> None:
    server.start().ready()
    undisturbed = all_streams(server, 150)
    victims = itertools.cycle(["worker-0", "tokenizer-0", "scheduler-0", "tokenizer-1"])
    read: list[dict[str, float]] = []

    def kill_six() -> None:
        for _ in range(6):
            server.kill(next(victims))
            read.append(counted(server))
            time.sleep(0.4)
            read.append(counted(server))

    assert [ids(e) for e in all_streams(server, 150, act=kill_six)] == [ids(e) for e in undisturbed]
    read.append(counted(server))
    assert {"tgi_request_count", 'tgi_batch_inference_duration_sum{method="decode"}'} <= set(read[-1])
    for earlier, later in itertools.pairwise(read):
        assert {name: value for name, value in earlier.items() if later.get(name, 0) < value} == {}
    assert server.metric("tgi_process_restarts") == 6
    server.until(lambda: unfolded(server) == set(), "files of ended processes are gone")


def counted(server: Server) -> dict[str, float]:
    """Every sample of /metrics that may only grow."""
    lines = [line.rpartition(" ") for line in server.client.get("/metrics").text.splitlines()]
    kinds = {words[2]: words[3] for name, _, kind in lines if (words := f"{name} {kind}".split())[:2] == ["#", "TYPE"]}
    found = {}
    for name, _, value in lines:
        series = re.sub(r"(_bucket|_sum|_count)?(\{.*)?$", "", name)
        if kinds.get(series) == "histogram" or kinds.get(name.partition("{")[0]) == "counter":
            found[name] = float(value)
    return found


def unfolded(server: Server) -> set[str]:
    """The files of metrics that belong to no process that runs."""
    pids = {str(process.pid) for process in (*server.processes().values(), server.commands["up"])}
    names = {path.stem for path in (server.run / "metrics").iterdir()}
    return {name for name in names if name.rpartition("_")[2] not in {*pids, "ended"}}


@pytest.mark.parametrize(
    "order",
    [("api", "tokenizer", "scheduler", "worker"), ("worker", "scheduler", "tokenizer", "api")],
    ids=["top down", "bottom up"],
)
def test_roles_start_in_any_order(server: Server, order: tuple[str, ...]) -> None:
    for role in order:
        server.start(role)
        time.sleep(0.5)
    server.ready()
    assert len(list(server.stream("Hello", max_new_tokens=3))) == 3
    assert set(server.processes()) == {"api-0", "tokenizer-0", "tokenizer-1", "scheduler-0", "worker-0"}
    server.stop()


def test_honcho_runs_the_procfile(tiny_llama: Path, tmp_path: Path) -> None:
    with Server(tmp_path / "run") as server:
        # What is tested is this clone, which need not be the one that is installed.
        (tgi := tmp_path / "tgi").write_text(f'#!/bin/sh\nexec {sys.executable} -m tgi "$@"\n')
        tgi.chmod(0o700)
        env = os.environ | {
            "TGI_RUN": str(tmp_path / "run"), "TGI_HOSTNAME": "127.0.0.1", "MODEL_ID": str(tiny_llama),
            "TGI_WORKER": "scripted", "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        # Under honcho, PORT is honcho's own; the flag in the command line is what counts.
        procfile = tmp_path / "Procfile"
        procfile.write_text((ROOT / "Procfile").read_text().replace("tgi api", f"tgi api --port {server.port}"))
        server.launch("honcho", [sys.executable, "-m", "honcho", "-f", str(procfile), "start"], env, tmp_path).ready()
        assert len(list(server.stream("Hello", max_new_tokens=3))) == 3
        # A signal that finds honcho printing a line ends it, and leaves all that it started.
        server.until(lambda: "Success" in server.said(), "the last line is printed")
        server.stop()


def new_connection(server: Server) -> int:
    """The status of a small request over a connection of its own, which any front end may take."""
    body = {"inputs": "a", "parameters": {"max_new_tokens": 1}}
    return httpx.post(f"{server.url}/generate", json=body, **LOCAL).status_code


def test_two_front_ends_share_the_port(server: Server) -> None:
    server.start("up", "--api-workers", "2").ready()
    for name in ("api-0", "api-1"):
        server.kill(name)  # the other, or its successor, answers: the port stays open
        assert new_connection(server) == 200
    server.until(lambda: len(server.processes()) == 6, "all six processes run again")
    for _ in range(20):
        assert new_connection(server) == 200
    server.client = httpx.Client(base_url=server.url, **LOCAL)  # the old one's connection died with its front end
    assert server.metric("tgi_request_count") == 22


def test_a_stop_string_of_two_megabytes_makes_no_long_line(standing: Server) -> None:
    standing.generate("Hello", max_new_tokens=1, stop=["s" * 1_900_000])
    standing.until(lambda: "characters cut]" in standing.said(), "the request is logged")
    assert max(map(len, standing.said().splitlines())) < 10_000


def test_a_disconnect_frees_the_request(standing: Server) -> None:
    stream = standing.stream("Hello", max_new_tokens=5000)
    for _ in range(5):
        next(stream)
    assert standing.metric("tgi_batch_current_size") == 1
    stream.close()  # type: ignore[attr-defined]
    standing.until(lambda: standing.metric("tgi_batch_current_size") == 0, "the request is gone from the batch")
    standing.until(lambda: standing.metric("tgi_pages_used") == 0, "its pages are free")
    assert standing.metric("tgi_request_failure") >= 1


def test_sigterm_drains(server: Server) -> None:
    server.start().ready()
    processes = server.processes()
    streams = all_streams(server, 80, act=lambda: server.commands["up"].send_signal(signal.SIGTERM), after=5)
    assert [len(events) for events in streams] == [80] * 8
    assert server.commands["up"].wait(PATIENCE_SECONDS) == 0
    assert not left_of(processes.values(), timeout=5)


def test_down_ends_it(server: Server) -> None:
    server.start().ready()
    env = os.environ | {"TGI_RUN": str(server.run)}
    subprocess.run([sys.executable, "-m", "tgi", "down"], env=env, check=True, timeout=PATIENCE_SECONDS)
    assert server.commands["up"].wait(PATIENCE_SECONDS) == 0


def test_no_process_outlives_a_killed_supervisor(server: Server) -> None:
    server.start().ready()
    processes = server.processes()
    assert len(processes) == 5
    server.commands["up"].kill()
    assert not left_of(processes.values())


def test_a_hung_worker_is_replaced(server: Server) -> None:
    server.start("up", "--hang-timeout", "2").ready()
    hung = server.processes()["worker-0"]
    expected = ids(list(server.stream("Hello", max_new_tokens=40)))
    stream = server.stream("Hello", max_new_tokens=40)
    events = [next(stream) for _ in range(5)]
    hung.suspend()
    events += list(stream)
    assert ids(events) == expected
    assert server.processes()["worker-0"].pid != hung.pid


def test_the_system_s_ps_shows_roles(standing: Server) -> None:
    titles = {name: " ".join(process.cmdline()).strip() for name, process in standing.processes().items()}
    assert titles["worker-0"] == "tgi worker 0"
    assert titles["tokenizer-1"] == "tgi tokenizer 1"


def test_tgi_ps_shows_states_and_memory(standing: Server) -> None:
    command, env = [sys.executable, "-m", "tgi", "ps"], os.environ | {"TGI_RUN": str(standing.run)}
    listed = json.loads(subprocess.run([*command, "--json"], env=env, capture_output=True, check=True).stdout)
    supervisor, *rows = [row for row in listed if row["run"] == str(standing.run)]
    assert supervisor["pid"] == standing.commands["up"].pid
    assert {row["name"]: row["pid"] for row in rows} == {
        name: process.pid for name, process in standing.processes().items()
    }
    assert {row["state"] for row in rows} == {"ready"}
    assert min(row["memory_mb"] for row in rows) > 1


def test_a_second_server_in_the_same_run_directory_is_refused(standing: Server) -> None:
    env = os.environ | {"TGI_RUN": str(standing.run)}
    again = subprocess.run(
        [sys.executable, "-m", "tgi", "up", "--hostname", "127.0.0.1"], env=env, capture_output=True, text=True
    )
    assert again.returncode == 1
    assert "Another tgi (pid" in again.stderr
    assert "Traceback" not in again.stderr


def test_a_port_in_use_is_told(standing: Server, tmp_path: Path) -> None:
    env = os.environ | {"TGI_RUN": str(tmp_path / "other")}
    command = [sys.executable, "-m", "tgi", "up", "--hostname", "127.0.0.1", "--port", str(standing.port)]
    again = subprocess.run(command, env=env, capture_output=True, text=True)
    assert again.returncode == 1
    assert f"Cannot listen on 127.0.0.1:{standing.port}" in again.stderr
    assert "Traceback" not in again.stderr


def test_not_ready_is_told_with_a_stage(server: Server) -> None:
    for role in ("api", "tokenizer"):
        server.start(role)

    def answers() -> bool:
        try:
            return bool(server.client.get("/info").status_code)
        except httpx.TransportError:
            return False

    server.until(answers, "the port is open")
    health = server.client.get("/health")
    assert health.status_code == 503
    assert health.json() == {"error": "unhealthy", "error_type": "healthcheck"}
    assert server.client.post("/generate", json={"inputs": "a"}).status_code == 503
    for role in ("scheduler", "worker"):
        server.start(role)
    server.ready()


def test_a_floor_with_another_model_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    with Server(tmp_path / "run", *SCRIPTED) as server:
        for role, kind in (("scheduler", "llama"), ("worker", "llama"), ("tokenizer", "qwen2"), ("api", "llama")):
            server.start(role, "--model-id", str(model(kind)))
        server.until(lambda: "it serves another model" in server.said(), "the tokenizer is refused in words")
        assert not server.healthy()


def test_health_tells_of_a_death_before_there_is_a_successor(server: Server) -> None:
    """Nobody sends anything, and the supervisor is held, so that only the broken connection can tell."""
    server.start("up", "--validation-workers", "1").ready()
    for victim in ("worker-0", "scheduler-0", "tokenizer-0"):
        process = server.processes()[victim]
        server.commands["up"].send_signal(signal.SIGSTOP)
        try:
            process.kill()
            server.until(lambda: not server.healthy(), f"the death of {victim} is told")
            assert server.client.get("/health").headers["x-startup-stage"]
        finally:
            server.commands["up"].send_signal(signal.SIGCONT)
        server.ready()
        assert len(list(server.stream("Hello", max_new_tokens=3))) == 3


def test_every_503_says_what_the_server_waits_for(server: Server) -> None:
    """While the worker hangs, while there is none, and of a front end that has started meanwhile."""
    for role in ("api", "tokenizer", "scheduler", "worker"):
        server.start(role, "--stall-limit", "0.5")
    server.ready()

    def stage(path: str = "/health", body: Any = None) -> str | None:
        """That of a 503; "" for other answers, None while no front end listens."""
        try:
            answer = httpx.request("GET" if body is None else "POST", server.url + path, json=body, **LOCAL)
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
        server.until(lambda: stage() == "the worker finishes no step", "the stall is told")
        worker.kill()
        server.until(lambda: stage() == "waiting for the worker 0%", "the death is told")
        stream.close()  # type: ignore[attr-defined]
        server.kill("api-0")
        server.until(lambda: stage() == "waiting for the worker 0%", "the new front end knows of it")
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
    server.until(lambda: stage() == "", "the server is ready again")
    assert len(list(server.stream("Hello", max_new_tokens=3))) == 3
