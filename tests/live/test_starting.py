"""`tgi up` from the outside: started in a strange directory or without packages, interrupted while it starts, told what
is wrong, left without its run directory."""

import os
import pty
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.live.server import LOCAL, PATIENCE_SECONDS, Server
from tgi.kernel import rundir
from tgi.kernel.link import Link
from tgi.kernel.messages import Result, Step
from tgi.kernel.presence import PROTOCOL, Hello, Status
from tgi.kernel.settings import Settings
from tgi.worker.main import _script
from tgi.worker.scripted import ScriptedEngine

SCRIPTED = ("--worker", "scripted", "--scripted-step-us", "20000", "--validation-workers", "1")


@pytest.fixture
def server(tiny_llama: Path, tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path / "run", "--model-id", str(tiny_llama), *SCRIPTED) as made:
        yield made


TGI = str(Path(sys.executable).with_name("tgi"))
# Names of modules that the processes import: of packages, and of Python itself.
TRAPS = ("falcon", "uvicorn", "zmq", "msgspec", "click", "tokenizers", "llguidance", "psutil", "asyncio", "json",
         "shlex", "logging", "subprocess", "pathlib")  # fmt: skip


@pytest.mark.parametrize("command", [[TGI], [sys.executable, "-m", "tgi"]], ids=["tgi", "python -m tgi"])
def test_nothing_is_imported_from_the_current_directory(server: Server, tmp_path: Path, command: list[str]) -> None:
    """It is the parent of a clone called tgi, among others."""
    (here := tmp_path / "here").mkdir()
    (here / "tgi" / "tgi").mkdir(parents=True)
    for name in TRAPS:
        (here / f"{name}.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'a').write(__name__ + chr(10))\n")
    arguments = ["up", "--hostname", "127.0.0.1", "--port", str(server.port), *server._common]
    server.launch("up", [*command, *arguments], server._env, cwd=here).ready()
    assert not (tmp_path / "executed").exists(), (tmp_path / "executed").read_text()
    assert server.client.get("/info").json()["max_total_tokens"] > 0
    assert len(list(server.stream("Hello", max_new_tokens=3))) == 3
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
    assert server.client.post("/v1/chat/completions", json=chat).status_code == 200
    assert not (tmp_path / "executed").exists(), (tmp_path / "executed").read_text()


class BrokenWorker:
    """Says that it is ready, as the scripted worker does, and fails every step."""

    def __init__(self, run: Path, model: Path) -> None:
        self._link = Link.connect(f"ipc://{run}/sched-0.back", Hello(PROTOCOL, "worker", 0, os.urandom(8)))
        self._limits = ScriptedEngine(_script(Settings(model_dir=model))).limits
        self.steps = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        self._link.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._link.socket.poll(10)
            for peer, message in self._link.receive():
                if isinstance(message, Hello):
                    self._link.send(peer, Status(True, True, "ready", 100, self._limits))
                elif isinstance(message, Step):
                    self.steps += 1
                    failed = Result(message.number, message.epoch, b"", b"", b"", error="the device is broken")
                    self._link.send(peer, failed)
            self._link.flush()


def test_a_server_with_a_broken_role_is_never_ready(server: Server, tiny_llama: Path) -> None:
    for role in ("api", "tokenizer", "scheduler"):
        server.start(role)
    server.until(lambda: (server.run / "state" / "scheduler-0.json").exists(), "the scheduler is there")
    worker = BrokenWorker(server.run, tiny_llama)
    stages = set()

    def failed() -> bool:
        answer = server.client.get("/health")
        assert answer.status_code == 503
        stages.add(answer.headers["x-startup-stage"])
        return worker.steps > 2

    server.until(server_answers(server), "the port is open")
    server.until(failed, "several requests have failed")
    assert "the first request failed: POST /generate" in stages
    assert "Ready in" not in "".join(server.output["api"])
    said = server.said()
    assert "Not ready: the first request, which this server sends to itself, failed: POST /generate was" in said
    assert "the device is broken" in said
    worker.stop()
    server.start("worker").ready()
    assert len(server.generate("Hello", max_new_tokens=3)["details"]["tokens"]) == 3
    server.until(lambda: "Ready in" in "".join(server.output["api"]), "the front end says that it is ready")


def server_answers(server: Server) -> Any:
    def answers() -> bool:
        try:
            return bool(server.client.get("/health").status_code)
        except httpx.TransportError:
            return False

    return answers


def without(folder: Path, *packages: str) -> dict[str, str]:
    """The environment of a Python that does not have these packages."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        f"""
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {packages!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
"""
    )
    return os.environ | {"PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1"}


@pytest.mark.parametrize("command", ["up", "worker"])
def test_without_the_worker_s_packages_one_sentence_says_what_to_install(
    tiny_llama: Path, tmp_path: Path, command: str
) -> None:
    done = subprocess.run(
        [TGI, command, "--port", "0", "--model-id", str(tiny_llama)],
        env=without(tmp_path / "site", "torch", "safetensors") | {"TGI_RUN": str(tmp_path / "run")},
        capture_output=True, text=True, timeout=PATIENCE_SECONDS,
    )  # fmt: skip
    assert done.returncode == 3
    assert done.stderr == (
        f"Error: The worker needs torch, safetensors, which {sys.executable} cannot import: install what is missing "
        "with `pip install tgi-server` (in a clone: `pip install .`).\n"
    )
    assert not (tmp_path / "run").exists(), "something was started"


def test_without_torch_all_but_the_worker_runs(server: Server, tmp_path: Path) -> None:
    server._env |= without(tmp_path / "site", "torch", "safetensors", "numpy", "transformers", "gguf")
    server._env |= {"TGI_RUN": str(server.run)}
    server.start().ready()
    assert len(list(server.stream("Hello", max_new_tokens=3))) == 3


def test_a_package_that_a_role_lacks_ends_the_tree_with_a_message(tiny_llama: Path, tmp_path: Path) -> None:
    environment = without(tmp_path / "site", "falcon") | {"TGI_RUN": str(tmp_path / "run")}
    command = [TGI, "up", "--hostname", "127.0.0.1", "--port", "0", "--model-id", str(tiny_llama), *SCRIPTED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "Error: api-0 cannot run, since an import fails (No module named 'falcon'): install what is missing with "
        "`pip install tgi-server` (in a clone: `pip install .`)."
    )
    assert "Traceback" not in done.stderr
    assert "starting it again" not in done.stderr


def up(model: Path, run: Path, *arguments: str) -> "subprocess.Popen[str]":
    """`tgi up` as the leader of a process group, as a shell starts it."""
    command = [sys.executable, "-m", "tgi", "up", "--hostname", "127.0.0.1", "--port", "0", "--model-id", str(model)]
    return subprocess.Popen(
        [*command, *SCRIPTED, *arguments],
        env=os.environ | {"TGI_RUN": str(run), "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
@pytest.mark.parametrize("after", ["api-0.beat", "worker-0.beat", "state/api-0.json", "state/worker-0.json"])
def test_it_ends_at_once_when_it_is_interrupted_while_it_starts(
    tiny_llama: Path, tmp_path: Path, number: signal.Signals, after: str
) -> None:
    server = up(tiny_llama, tmp_path / "run", "--graceful-termination-timeout", "1000")
    while not (tmp_path / "run" / after).exists():
        assert server.poll() is None
        time.sleep(0.001)
    if number == signal.SIGINT:
        os.killpg(server.pid, number)
    else:
        server.send_signal(number)
    try:
        said, _ = server.communicate(timeout=PATIENCE_SECONDS)
    finally:
        server.kill()
    assert server.returncode == 0, said
    assert "Traceback" not in said


def test_what_a_child_cannot_mend_is_the_last_thing_on_the_terminal(tiny_llama: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_llama, model)
    (model / "tokenizer.json").write_text('{"version": ')
    server = up(model, tmp_path / "run")
    said, _ = server.communicate(timeout=PATIENCE_SECONDS)
    assert server.returncode == 1
    assert re.fullmatch(r"Error: .*tokenizer\.json is damaged: .*", said.splitlines()[-1])
    assert said.count("is damaged") == 1
    assert "Traceback" not in said


def test_adapters_that_are_not_there_are_told_before_anything_starts(tiny_llama: Path, tmp_path: Path) -> None:
    for item, told in (
        (f"a={tmp_path}", "so it is no LoRA adapter"),
        ("a=b", "There is no directory b"),
        (f"{tiny_llama}=b", "has the base model's name"),
    ):
        server = up(tiny_llama, tmp_path / "run", "--lora-adapters", item)
        said, _ = server.communicate(timeout=PATIENCE_SECONDS)
        assert server.returncode == 1
        assert told in said.splitlines()[-1]
        assert "Traceback" not in said


def test_a_generation_config_that_cannot_be_used_is_told_before_anything_starts(
    tiny_llama: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_llama, tmp_path / "model")
    (model / "generation_config.json").write_text('{"temperature": -1}')
    for given, told in (
        ("auto", "generation_config.json: temperature is -1; a number >= 0 was expected"),
        ("vllm", "vllm has no generation_config.json"),
    ):
        server = up(model, tmp_path / "run", "--generation-config", given)
        said, _ = server.communicate(timeout=PATIENCE_SECONDS)
        assert server.returncode == 1
        assert told in said.splitlines()[-1]
        assert "Traceback" not in said
    server = up(model, tmp_path / "run", "--generation-config", "tgi")
    try:
        assert server.stdout is not None
        assert any(line.startswith("Ready in") for line in server.stdout)
    finally:
        server.terminate()
        server.communicate(timeout=PATIENCE_SECONDS)


def test_the_line_with_the_url_comes_when_all_are_ready_and_has_the_true_port(tiny_llama: Path, tmp_path: Path) -> None:
    server = up(tiny_llama, tmp_path / "run")
    assert server.stdout is not None
    try:
        line = next(line for line in server.stdout if line.startswith("Ready in"))
        states = {path.stem for path in (tmp_path / "run" / "state").glob("*.json")}
        assert states == {"api-0", "tokenizer-0", "scheduler-0", "worker-0"}
        found = re.search(r"http://127\.0\.0\.1:(\d+)$", line.strip())
        assert found
        assert int(found[1]) > 0
    finally:
        server.terminate()
        server.communicate(timeout=PATIENCE_SECONDS)


def test_a_terminal_shows_what_is_served_and_a_command_that_works(tiny_llama: Path, tmp_path: Path) -> None:
    mine, terminal = pty.openpty()
    command = [sys.executable, "-m", "tgi", "up", "--hostname", "127.0.0.1", "--port", "0", "--api-key", "secret"]
    server = subprocess.Popen(
        [*command, "--model-id", str(tiny_llama), *SCRIPTED],
        env=os.environ | {"TGI_RUN": str(tmp_path / "run"), "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.DEVNULL,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    )
    os.close(terminal)
    said = ""
    try:
        while " ask " not in said or not said.endswith("\n"):
            said += os.read(mine, 1 << 16).decode()
        _, _, shown = said.partition("Ready in ")
        assert not re.search(r"INFO|WARNING|ERROR", said)
        assert "secret" not in said
        rows = dict(line.strip().split(maxsplit=1) for line in shown.replace("KV cache", "KV").splitlines()[1:])
        assert list(rows) == ["from", "weights", "kernels", "context", "KV", "docs", "ask"]
        assert rows["from"] == str(tiny_llama)
        assert rows["kernels"] == "none: the worker is scripted"
        assert httpx.get(rows["docs"], **LOCAL).status_code in (200, 307)
        curl, url, *options = shlex.split(rows["ask"])
        assert (curl, options[::2]) == ("curl", ["-H", "-H", "-d"])
        headers = dict(option.replace("YOUR_KEY", "secret").split(": ", 1) for option in options[1:4:2])
        assert httpx.post(url, headers=headers, content=options[-1], **LOCAL).status_code == 200
    finally:
        server.terminate()
        os.close(mine)
        server.wait(PATIENCE_SECONDS)


def test_a_hang_up_of_the_terminal_drains(tiny_llama: Path, tmp_path: Path) -> None:
    with Server(tmp_path / "run", "--model-id", str(tiny_llama), *SCRIPTED) as server:
        server.start().ready()
        stream = server.stream("Hello", max_new_tokens=40)
        events = [next(stream) for _ in range(5)]
        for process in [server.commands["up"], *server.processes().values()]:
            if os.getpgid(process.pid) == os.getpgid(server.commands["up"].pid):
                process.send_signal(signal.SIGHUP)
        assert len(events + list(stream)) == 40
        assert server.commands["up"].wait(PATIENCE_SECONDS) == 0


def test_while_it_drains_new_connections_are_refused(server: Server) -> None:
    server.start().ready()
    stream = server.stream("Hello", max_new_tokens=100)
    events = [next(stream) for _ in range(5)]
    server.commands["up"].terminate()

    def refuses() -> bool:
        try:
            socket.create_connection(("127.0.0.1", server.port)).close()
        except ConnectionRefusedError:
            return True
        return False

    server.until(refuses, "the port is closed")
    events.append(next(stream))
    assert events[-1]["generated_text"] is None, "the stream was over before the port closed"
    assert len(events + list(stream)) == 100


def test_a_second_signal_ends_what_still_drains(server: Server) -> None:
    server.start("up", "--graceful-termination-timeout", "1000").ready()
    stream = server.stream("Hello", max_new_tokens=20000)
    next(stream)
    command = server.commands["up"]
    command.send_signal(signal.SIGINT)
    server.until(lambda: "draining" in {state.state for state in rundir.read_states(server.run)}, "it drains")
    command.send_signal(signal.SIGINT)
    assert command.wait(PATIENCE_SECONDS) == 0
    assert "draining: requests in flight may take up to 1000 s; a second signal" in server.said()
    assert "api-0 has not ended, and is to end at once; killing it" in server.said()
    assert "did not end in time" not in server.said()


@pytest.mark.parametrize("victim", ["worker-0", "scheduler-0", "tokenizer-0"])
def test_who_dies_while_it_drains_is_replaced(server: Server, victim: str) -> None:
    server.start("up", "--graceful-termination-timeout", "100").ready()
    process = server.processes()[victim]
    stream = server.stream("Hello", max_new_tokens=100)
    events = [next(stream) for _ in range(5)]
    server.commands["up"].terminate()
    process.kill()
    assert len(events + list(stream)) == 100
    assert server.commands["up"].wait(PATIENCE_SECONDS) == 0


def test_gauges_of_a_scheduler_whose_supervisor_was_killed_are_gone(server: Server) -> None:
    for role in ("api", "tokenizer", "scheduler", "worker"):
        server.start(role)
    server.ready()
    stream = server.stream("Hello", max_new_tokens=40)
    events = [next(stream) for _ in range(5)]
    server.commands["scheduler"].kill()
    server.commands["scheduler"].wait()
    server.start("scheduler")
    assert len(events + list(stream)) == 40
    server.until(lambda: server.metric("tgi_batch_current_size") == 0, "nothing runs any more")


def test_states_of_a_killed_deployment_do_not_make_the_next_one_ready(server: Server) -> None:
    server.start().ready()
    # A front end writes its state right after /health has become 200.
    server.until(lambda: {state.state for state in rundir.read_states(server.run)} == {"ready"}, "states are ready")
    children = [*server.processes().values()]
    up = server.commands["up"]
    up.kill()
    up.wait()
    _, left = psutil.wait_procs(children, PATIENCE_SECONDS)  # they hold the port until they see that it is gone
    assert left == []
    server.start("up", "--scripted-step-us", "1000000")
    server.until(lambda: "Ready in" in "".join(server.output["up"]), "the server says that it is ready")
    assert {state.name for state in rundir.read_states(server.run) if state.state == "ready"} == {
        "api-0", "tokenizer-0", "scheduler-0", "worker-0",
    }  # fmt: skip
    seconds = re.search(r"Ready in ([\d.]+) s", "".join(server.output["up"]))
    assert seconds is not None
    assert float(seconds[1]) >= 1  # the probe alone takes a step of the worker


def test_a_run_directory_that_is_removed_ends_it_with_a_message(server: Server) -> None:
    server.start().ready()
    shutil.rmtree(server.run)
    assert server.commands["up"].wait(PATIENCE_SECONDS) == 1
    assert "was removed while the server ran" in server.said()
    assert "Traceback" not in server.said()
