"""`tgi restart`, `tgi scale`, SIGHUP and joining supervisors: streams that run meanwhile stay exact, and none fails."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.live import commands
from tests.live.server import CLIENT_OPTIONS, TIMEOUT_SECONDS, Server, free_port
from tests.models import model, write_adapter
from tgi.microkernel.host import rundir

pytestmark = pytest.mark.live

SCRIPTED = ("--worker", "scripted", "--scripted-step-us", "20000")
PROMPTS = [f"Prompt number {n}, " + "and some more of it " * n for n in range(6)]
TOKENS = 120


@pytest.fixture(scope="module")
def standing(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server after whose tests the whole tree still runs, with the processes that it was started with or others. So
    no other file can share it: a restarted tokenizer has another name."""
    with Server(tmp_path_factory.mktemp("operating") / "run", "--model-id", str(tiny_llama), *SCRIPTED) as server:
        server.start().wait_until_ready()
        server.wait_until(lambda: len(server.processes("ready")) == 5, "both tokenizers are ready, too")
        yield server


def tgi(server: Server, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Runs a command of `tgi` for this server."""
    variables = {"TGI_RUN": str(server.run_directory)} | environment
    return commands.run(*arguments, timeout=TIMEOUT_SECONDS, **variables)


def begin(server: Server, *arguments: str) -> "subprocess.Popen[str]":
    """Starts a command of `tgi` for this server."""
    return subprocess.Popen(
        [sys.executable, "-m", "tgi", *arguments],
        env=os.environ | {"TGI_RUN": str(server.run_directory)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def succeed(server: Server, *arguments: str) -> str:
    """Runs a command that must succeed. Returns what it prints."""
    done = tgi(server, *arguments)
    assert (done.returncode, done.stderr) == (0, ""), (done.stdout, done.stderr, server.output_text())
    return done.stdout


def ready(server: Server, role: str) -> dict[str, int]:
    """The pids of the processes of a role that are ready, by name."""
    return {name: one.pid for name, one in server.processes("ready").items() if rundir.role_of(name) == role}


def streams(
    server: Server, act: Callable[[], object] | None = None, tokens: int = TOKENS
) -> list[list[dict[str, Any]]]:
    """Streams all prompts at once, every second one with a seed; `act` is called once each has shown five tokens."""
    sampling = ({}, {"do_sample": True, "seed": 7})
    requests = [(prompt, {"max_new_tokens": tokens, **sampling[n % 2]}) for n, prompt in enumerate(PROMPTS)]
    return server.stream_all(requests, act, after=5)


@pytest.fixture(scope="module")
def undisturbed(standing: Server) -> list[list[dict[str, Any]]]:
    """The streams of a server on which no command runs."""
    return streams(standing)


class Requests:
    """Clients that send short requests, each over a kept connection and over new ones in turn. Their pauses leave the
    processor to the server."""

    def __init__(self, server: Server, clients: int = 3) -> None:
        self._url = f"{server.url}/generate"
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(clients)]
        self.sent = 0
        self.failures: list[str] = []

    def _run(self) -> None:
        body = {"inputs": "Hello", "parameters": {"max_new_tokens": 2}}
        with httpx.Client(**CLIENT_OPTIONS) as kept:
            while not self._stop.wait(0.1):
                for send in (kept.post, lambda *a, **k: httpx.post(*a, **k, **CLIENT_OPTIONS)):
                    try:
                        answer = send(self._url, json=body)
                        if answer.status_code != 200:
                            self.failures.append(f"{answer.status_code} {answer.text}")
                    except httpx.TransportError as error:
                        self.failures.append(repr(error))
                    self.sent += 1

    def __enter__(self) -> "Requests":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(TIMEOUT_SECONDS)


@pytest.mark.parametrize("target", ["api", "tokenizer", "scheduler", "worker"])
def test_streams_and_requests_continue_while_a_role_is_restarted(
    standing: Server, undisturbed: list[Any], target: str
) -> None:
    before = ready(standing, target)
    losses = standing.metric("tgi_process_restarts")
    with Requests(standing) as requests:
        observed = streams(standing, act=lambda: succeed(standing, "restart", target))
    assert [[event["token"]["id"] for event in events] for events in observed] == [
        [event["token"]["id"] for event in events] for events in undisturbed
    ]
    assert [events[-1]["generated_text"] for events in observed] == [e[-1]["generated_text"] for e in undisturbed]
    assert requests.failures == []
    assert requests.sent > 10
    after = ready(standing, target)
    assert len(after) == len(before)
    assert not set(after.values()) & set(before.values())
    assert standing.metric("tgi_process_restarts") == losses


def test_streams_and_requests_continue_while_roles_are_scaled(standing: Server) -> None:
    def scale() -> None:
        for role, count in (("tokenizer", 4), ("tokenizer", 1), ("tokenizer", 2), ("api", 3), ("api", 1)):
            succeed(standing, "scale", role, str(count))
            standing.wait_until(lambda: len(ready(standing, role)) == count, f"{role} is scaled")  # noqa: B023
            sockets = rundir.tokenizer_sockets(standing.run_directory)
            assert sockets == {f"tok-{name.rpartition('-')[2]}.front" for name in ready(standing, "tokenizer")}

    expected = streams(standing, tokens=5 * TOKENS)
    with Requests(standing) as requests:
        observed = streams(standing, scale, tokens=5 * TOKENS)
    assert [events[-1]["generated_text"] for events in observed] == [e[-1]["generated_text"] for e in expected]
    assert requests.failures == []


def test_one_process_is_restarted_by_its_name(standing: Server) -> None:
    before = ready(standing, "tokenizer")
    restarted = min(before)
    assert f"has replaced {restarted}" in succeed(standing, "restart", restarted)
    after = ready(standing, "tokenizer")
    kept = {name: pid for name, pid in before.items() if name != restarted}
    assert len(after) == len(before)
    assert kept.items() <= after.items()
    assert before[restarted] not in after.values()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["restart"], 2, "Missing argument"),
        (["restart", "wroker"], 1, "There is no process wroker in"),
        (["restart", "api-7"], 1, "There is no process api-7 in"),
        (["restart", "worker-7"], 1, "This server has no process worker-7"),
        (["restart", "api", "--port", "1"], 1, "You have no running tgi server on port 1."),
        (["scale", "tokenizer"], 2, "Missing argument"),
        (["scale", "tokenizer", "0"], 2, "0 is not in the range x>=1"),
        (["scale", "tokenizer", "many"], 2, "'many' is not a valid integer"),
        (["scale", "tokenizer", "1000"], 1, "1000 processes of the role tokenizer are not possible"),
        (["scale", "worker", "2"], 2, "'worker' is not one of 'api', 'tokenizer'"),
        (["scale", "api", "2", "--supervisor", "1"], 1, "The process 1 is no supervisor of the role api"),
    ],
)
def test_wrong_arguments_are_rejected(standing: Server, arguments: list[str], code: int, message: str) -> None:
    before = standing.processes()
    environment = {"TGI_RUN": ""} if "--port" in arguments else {}
    done = tgi(standing, *arguments, **environment)
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert standing.processes() == before


def test_a_server_that_does_not_run_cannot_be_scaled(tmp_path: Path) -> None:
    with Server(tmp_path / "run") as server:
        done = tgi(server, "scale", "api", "2")
        assert (done.returncode, done.stderr) == (1, "Error: You have no running tgi server.\n")


@pytest.fixture
def server(tiny_llama: Path, tmp_path: Path) -> Iterator[Server]:
    """Not started, for tests that start it with their own flags, or end it."""
    with Server(tmp_path / "run", "--model-id", str(tiny_llama), *SCRIPTED) as server:
        yield server


def test_a_process_that_cannot_start_leaves_the_others_as_they_were(
    server: Server, tiny_llama: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_llama, tmp_path / "model")
    server.start("up", "--model-id", str(model)).wait_until_ready()
    states = partial(rundir.read_states, server.run_directory)
    server.wait_until(lambda: {state.state for state in states()} == {"ready"}, "both tokenizers are ready, too")
    before = server.processes()
    (model / "tokenizer.json").write_text('{"version": ')
    for command in (("restart", "tokenizer"), ("scale", "tokenizer", "3")):
        done = tgi(server, *command)
        assert done.returncode == 1
        assert re.search(r"Error: tokenizer-\d could not be started: ", done.stderr)
        assert "tokenizer.json is damaged" in done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert server.processes() == before
    assert len(server.generate("Hello", max_new_tokens=3)["details"]["tokens"]) == 3


def test_a_killed_supervisor_ends_the_command_with_an_error(server: Server) -> None:
    server.start().wait_until_ready()
    stream = server.stream("Hello", max_new_tokens=5000)
    next(stream)
    command = begin(server, "restart", "api")
    assert command.stdout is not None
    assert any("draining: api-0" in line for line in command.stdout)
    another = tgi(server, "scale", "tokenizer", "3")
    assert another.returncode == 1
    assert "The server is carrying out another command" in another.stderr
    server.commands["up"].kill()
    _, error = command.communicate(timeout=TIMEOUT_SECONDS)
    assert command.returncode == 1
    assert error == "Error: The supervisor ended before it had carried out the command.\n"


def test_a_command_ends_with_the_server(server: Server) -> None:
    server.start().wait_until_ready()
    stream = server.stream("Hello", max_new_tokens=500)  # ten seconds: the command may take some until it drains
    events = [next(stream) for _ in range(5)]
    command = begin(server, "restart", "api")
    assert command.stdout is not None
    assert any("draining: api-0" in line for line in command.stdout)
    server.commands["up"].terminate()
    assert len(events + list(stream)) == 500
    assert server.commands["up"].wait(TIMEOUT_SECONDS) == 0
    _, error = command.communicate(timeout=TIMEOUT_SECONDS)
    assert (command.returncode, error) == (1, "Error: The server ends.\n")


def test_a_new_process_that_is_killed_ends_the_command_only(server: Server) -> None:
    """The worker is stopped, so that the new front end does not get ready before it is killed."""
    server.start().wait_until_ready()
    before = server.processes()
    stream = server.stream("Hello", max_new_tokens=100)
    events = [next(stream) for _ in range(5)]
    with server.suspended("worker-0"):
        command = begin(server, "restart", "api")
        server.wait_until(lambda: "api-1" in server.processes(), "the new front end starts")
        server.processes()["api-1"].kill()
        _, error = command.communicate(timeout=TIMEOUT_SECONDS)
    assert command.returncode == 1
    assert error == "Error: api-1 could not be started: api-1 was killed by SIGKILL\n"
    assert len(events + list(stream)) == 100
    after = server.processes()
    assert {name: after[name] for name in before if name != "worker-0"} == {
        name: process for name, process in before.items() if name != "worker-0"
    }


def test_a_second_supervisor_of_tokenizers_joins_and_leaves(server: Server) -> None:
    server.start("up", "--validation-workers", "1").wait_until_ready()
    expected = streams(server)
    server.start("tokenizer", "--validation-workers", "2")
    names = {"tokenizer-0", "tokenizer-1", "tokenizer-2"}
    server.wait_until(lambda: ready(server, "tokenizer").keys() == names, "two tokenizers have joined")
    server.commands["up"].send_signal(signal.SIGSTOP)
    try:  # without the first one, the others have all requests
        server.processes()["tokenizer-0"].kill()
        assert len(server.generate("Hello", max_new_tokens=3)["details"]["tokens"]) == 3
    finally:
        server.commands["up"].send_signal(signal.SIGCONT)
    server.wait_until(lambda: ready(server, "tokenizer").keys() == names, "the first one runs again")
    done = tgi(server, "scale", "tokenizer", "4")
    assert done.returncode == 1
    assert "Several supervisors run the role tokenizer" in done.stderr
    succeed(server, "scale", "tokenizer", "3", "--supervisor", str(server.commands["tokenizer"].pid))
    succeed(server, "restart", "tokenizer")
    joined = server.commands.pop("tokenizer")

    def leave() -> None:
        joined.terminate()
        assert joined.wait(TIMEOUT_SECONDS) == 0

    observed = streams(server, act=leave)
    assert [events[-1]["generated_text"] for events in observed] == [e[-1]["generated_text"] for e in expected]
    assert len(ready(server, "tokenizer")) == 1
    assert len(rundir.tokenizer_sockets(server.run_directory)) == 1


def test_a_front_end_joins_on_another_port(server: Server) -> None:
    server.start().wait_until_ready()
    port = free_port()
    server.start("api", "--port", str(port))
    url = f"http://127.0.0.1:{port}/generate"
    body = {"inputs": "Hello", "parameters": {"max_new_tokens": 3}}

    def answers() -> bool:
        try:
            return httpx.post(url, json=body, **CLIENT_OPTIONS).status_code == 200
        except httpx.TransportError:
            return False

    server.wait_until(answers, "the second front end answers")
    assert set(ready(server, "api")) == {"api-0", "api-1"}
    listed = json.loads(succeed(server, "ps", "--json"))
    assert sorted(row["stage"] for row in listed if row["name"] == "supervisor") == [
        "api", "api+scheduler+tokenizer+worker",
    ]  # fmt: skip
    stream = server.stream("A prompt", max_new_tokens=10_000)  # runs until it is closed
    next(stream)

    def load() -> dict[str, float]:
        (shown,) = json.loads(succeed(server, "top", "--json"))
        return shown["load"]  # type: ignore[no-any-return]

    server.wait_until(lambda: load()["running"] == 1 and load()["tokens_per_second"] > 0, "the load is shown")
    _, load_line, heading, *lines = succeed(server, "top", "--once").splitlines()
    assert load_line.startswith("1 running, 0 queued | ")
    assert heading.split() == [
        "name", "pid", "state", "stage", "cpu", "memory_mb", "beat_age", "progress_age", "work",
    ]  # fmt: skip
    assert len(lines) == len(listed)
    stream.close()  # type: ignore[attr-defined]
    server.stop()


def status(server: Server, key: str) -> int:
    body = {"inputs": "Hello", "parameters": {"max_new_tokens": 1}}
    return server.client.post("/generate", json=body, headers={"authorization": f"Bearer {key}"}).status_code


def test_sighup_reloads_the_keys_of_the_file(server: Server, tmp_path: Path) -> None:
    (keys := tmp_path / "keys").write_text("old\n")
    given = ("--api-key-file", str(keys), "--api-key", "given", "--api-workers", "2")
    server.start("up", *given).wait_until_ready()
    server.wait_until(lambda: len(ready(server, "api")) == 2, "both front ends are ready")
    assert [status(server, key) for key in ("old", "given", "new")] == [200, 200, 401]
    keys.write_text("new\n")
    server.commands["up"].send_signal(signal.SIGHUP)
    server.wait_until(lambda: server.output_text().count("reloaded the keys") == 2, "the keys are reloaded")
    for _ in range(2):
        assert [status(server, key) for key in ("old", "given", "new")] == [401, 200, 200]
        server.kill("api-0")  # the one that replaces it has the new keys, too
        server.kill("api-1")
        server.wait_until(lambda: len(ready(server, "api")) == 2, "both front ends are ready")
        server.client.close()
        server.client = httpx.Client(base_url=server.url, **CLIENT_OPTIONS)
    keys.write_text("")
    server.commands["up"].send_signal(signal.SIGHUP)
    server.wait_until(lambda: "holds no key" in server.output_text(), "the mistake is reported")
    assert [status(server, key) for key in ("old", "given", "new")] == [401, 200, 200]


def test_sighup_reloads_adapters_whose_files_have_changed(tmp_path: Path) -> None:
    base, adapter = model("llama"), tmp_path / "poems"
    write_adapter(adapter, base, seed=1)
    write_adapter(tmp_path / "other", base, seed=2)
    with Server(tmp_path / "run", "--model-id", str(base), "--lora-adapters", f"poems={adapter}") as server:
        server.start().wait_until_ready()
        before = answer(server)
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            shutil.copyfile(tmp_path / "other" / name, adapter / name)
        assert answer(server) == before
        server.commands["up"].send_signal(signal.SIGHUP)
        server.wait_until(lambda: "reloaded the adapter" in server.output_text(), "the adapter is reloaded")
        assert answer(server) != before
        server.kill("worker-0")
        assert answer(server) != before


def answer(server: Server) -> list[tuple[int, float]]:
    """The tokens and logprobs that the adapter generates."""
    details = server.generate("The capital of France is", max_new_tokens=8, adapter_id="poems")["details"]
    return [(token["id"], token["logprob"]) for token in details["tokens"]]


def token_ids(events: list[dict[str, Any]]) -> list[int]:
    return [event["token"]["id"] for event in events]


def names(server: Server) -> set[str]:
    """The processes that are ready."""
    return {name for role in ("api", "tokenizer", "scheduler", "worker") for name in ready(server, role)}


def served_model(server: Server) -> str:
    """What a front end that accepts a new connection serves."""
    return str(httpx.get(f"{server.url}/info", **CLIENT_OPTIONS).json()["model_id"])


def renew_client(server: Server) -> None:
    """Connects again: a front end that hands over closes its connections."""
    server.client.close()
    server.client = httpx.Client(base_url=server.url, **CLIENT_OPTIONS)


def test_a_reload_serves_the_new_model_while_the_old_one_finishes(server: Server) -> None:
    old, new = server.arguments[1], str(model("qwen2"))
    server.start("up", "--api-workers", "2").wait_until_ready()
    server.wait_until(lambda: len(ready(server, "api")) == 2, "both front ends are ready")
    expected = streams(server)
    counts: list[int] = []
    long = threading.Thread(target=lambda: counts.append(len(list(server.stream("Hello", max_new_tokens=300)))))
    long.start()
    with Requests(server) as requests:
        observed = streams(server, act=lambda: succeed(server, "reload", "--model-id", new))
        long.join(TIMEOUT_SECONDS)
    assert requests.failures == []
    assert [token_ids(events) for events in observed] == [token_ids(events) for events in expected]
    assert counts == [300]
    assert served_model(server) == new
    assert succeed(server, "ps").startswith(f"{new} on {server.url}, tgi ")
    assert {"scheduler-1", "worker-1"} <= names(server)
    assert len(names(server)) == 6
    assert not {"scheduler-0", "worker-0"} & server.processes().keys()
    renew_client(server)
    now = streams(server)
    server.kill("worker-1")  # crashes, commands and joining supervisors meet the new pipeline
    server.kill("scheduler-1")
    assert [token_ids(events) for events in streams(server)] == [token_ids(events) for events in now]
    succeed(server, "restart", "worker")
    succeed(server, "scale", "tokenizer", "1")
    server.start("tokenizer", "--model-id", new, "--validation-workers", "1")
    server.wait_until(lambda: len(ready(server, "tokenizer")) == 2, "a tokenizer has joined")
    refused = tgi(server, "reload", "--model-id", old)
    assert refused.returncode == 1
    assert "Other supervisors run processes of this server" in refused.stderr
    joined = server.commands.pop("tokenizer")
    joined.terminate()
    assert joined.wait(TIMEOUT_SECONDS) == 0
    succeed(server, "reload", "--model-id", old, "--max-total-tokens", "300")
    info = httpx.get(f"{server.url}/info", **CLIENT_OPTIONS).json()
    assert (info["model_id"], info["max_total_tokens"]) == (old, 300)
    assert not list(server.run_directory.glob("p[0-9]*"))  # the third model uses the directory of the first one


def test_a_model_that_cannot_be_served_leaves_the_old_one(server: Server, tmp_path: Path) -> None:
    """A damaged one, and one for which the memory does not suffice unless the old one ends first."""
    damaged = shutil.copytree(model("qwen2"), tmp_path / "damaged")
    server.start().wait_until_ready()
    expected = streams(server)
    for flags in ([], ["--drain-first"]):
        (damaged / "tokenizer.json").write_text('{"version": ')
        done = tgi(server, "reload", "--model-id", str(damaged), *flags)
        assert done.returncode == 1
        assert "tokenizer.json is damaged" in done.stderr
        assert "The previous model goes on." in done.stderr
        (damaged / "tokenizer.json").write_text('{"version": "1.0", "added_tokens": [], "model": {"type": "Unknown"}}')
        done = tgi(server, "reload", "--model-id", str(damaged), *flags)  # found by the new tokenizers
        assert done.returncode == 1
        assert "tokenizer.json" in done.stderr
        assert ("The previous model serves again." if flags else "The previous model goes on.") in done.stderr
        assert len(done.stderr.splitlines()) == 1
        renew_client(server)
        assert served_model(server) == server.arguments[1]
        assert [token_ids(events) for events in streams(server)] == [token_ids(events) for events in expected]
        assert len(names(server)) == 5
    huge = shutil.copytree(model("qwen2"), tmp_path / "huge")
    (weights,) = huge.glob("*.safetensors")
    size = 1 << 41
    header = json.dumps({"a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    weights.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(weights, 8 + len(header) + size)  # a sparse file
    before = names(server)
    refused = tgi(server, "reload", "--model-id", str(huge))
    assert refused.returncode == 1
    assert "needs about 2199" in refused.stderr
    assert "Give --drain-first" in refused.stderr
    assert names(server) == before
    stream = server.stream("Hello", max_new_tokens=100)
    events = [next(stream) for _ in range(5)]
    printed: list[str] = []
    command = threading.Thread(
        target=lambda: printed.append(succeed(server, "reload", "--model-id", str(huge), "--drain-first"))
    )
    command.start()
    assert len(events + list(stream)) == 100
    command.join(TIMEOUT_SECONDS)
    assert "serving" in printed[0]
    assert served_model(server) == str(huge)
    assert len(names(server)) == 5


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["reload"], 2, "`tgi reload` needs --model-id"),
        (["reload", "--model-id", "/nowhere"], 1, "/nowhere"),
        (["reload", "--model-id", "MODEL", "--port", "1"], 1, "You have no running tgi server on port 1."),
        (["reload", "--model-id", "MODEL", "--hostname", "::"], 2, "No such option"),
        (["reload", "--model-id", "MODEL", "--quantize", "exl2"], 1, "not supported"),
        (["reload", "--model-id", "MODEL", "--max-total-tokens", "1"], 1, "`max_total_tokens` must be >= 2"),
    ],
)
def test_a_wrong_reload_is_rejected(standing: Server, arguments: list[str], code: int, message: str) -> None:
    before = standing.processes()
    arguments = [standing.arguments[1] if argument == "MODEL" else argument for argument in arguments]
    done = tgi(standing, *arguments, **({"TGI_RUN": ""} if "--port" in arguments else {}))
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert standing.processes() == before
