"""`tgi up` as a command: starts in directories with conflicting modules or without packages, interrupted starts, error
messages, signals, and a removed run directory."""

import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.live.server import CLIENT_OPTIONS, TIMEOUT_SECONDS, Server, python_path
from tgi.microkernel.host import rundir
from tgi.microkernel.links.link import Link
from tgi.microkernel.messages.protocol import PROTOCOL, Hello, Status, Step, StepResult
from tgi.microkernel.settings.table import Settings
from tgi.worker.fake_worker.fake_worker import FakeEngine
from tgi.worker.main import _fake_worker_config

pytestmark = pytest.mark.live

SCRIPTED = ("--worker", "scripted", "--scripted-step-us", "20000", "--validation-workers", "1")


@pytest.fixture
def server(tiny_llama: Path, tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path / "run", "--model-id", str(tiny_llama), *SCRIPTED) as server:
        yield server


TGI = str(Path(sys.executable).with_name("tgi"))
# Names of modules that the processes import, of packages and of the standard library.
SHADOWED_MODULES = (
    "falcon", "uvicorn", "zmq", "msgspec", "click", "tokenizers", "llguidance", "psutil", "asyncio", "json", "shlex",
    "logging", "subprocess", "pathlib",
)  # fmt: skip


@pytest.mark.parametrize("command", [[TGI], [sys.executable, "-m", "tgi"]], ids=["tgi", "python -m tgi"])
def test_nothing_is_imported_from_the_current_directory(server: Server, tmp_path: Path, command: list[str]) -> None:
    """Such a directory may be the parent of a clone called tgi, among others."""
    (here := tmp_path / "here").mkdir()
    (here / "tgi" / "tgi").mkdir(parents=True)
    for name in SHADOWED_MODULES:
        (here / f"{name}.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'a').write(__name__ + chr(10))\n")
    arguments = ["up", "--hostname", "127.0.0.1", "--port", str(server.port), *server.arguments]
    server.launch("up", [*command, *arguments], server.environment, cwd=here).wait_until_ready()
    assert not (tmp_path / "executed").exists(), (tmp_path / "executed").read_text()
    assert server.client.get("/info").json()["max_total_tokens"] > 0
    assert len(list(server.stream("Hello", max_new_tokens=3))) == 3
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
    assert server.client.post("/v1/chat/completions", json=chat).status_code == 200
    assert not (tmp_path / "executed").exists(), (tmp_path / "executed").read_text()


class BrokenWorker:
    """Reports that it is ready, like the scripted worker, and fails every step."""

    def __init__(self, run: Path, model: Path) -> None:
        self._link = Link.connect(f"ipc://{run}/sched-0.back", Hello(PROTOCOL, "worker", 0, os.urandom(8)))
        self._limits = FakeEngine(_fake_worker_config(Settings(model_dir=model))).limits
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
                    failed = StepResult(message.number, message.epoch, b"", b"", b"", error="the device is broken")
                    self._link.send(peer, failed)
            self._link.flush()


def test_a_server_whose_worker_fails_every_step_is_never_ready(server: Server, tiny_llama: Path) -> None:
    for role in ("api", "tokenizer", "scheduler"):
        server.start(role)
    server.wait_until(
        lambda: (server.run_directory / "state" / "scheduler-0.json").exists(), "the scheduler has started"
    )
    worker = BrokenWorker(server.run_directory, tiny_llama)
    stages = set()

    def several_steps_failed() -> bool:
        answer = server.client.get("/health")
        assert answer.status_code == 503
        stages.add(answer.headers["x-startup-stage"])
        return worker.steps > 2

    server.wait_until(port_is_open(server), "the port is open")
    server.wait_until(several_steps_failed, "several requests have failed")
    assert "the first request failed: POST /generate" in stages
    assert "Ready in" not in "".join(server.output["api"])
    output = server.output_text()
    assert "Not ready: the first request, which this server sends to itself, failed: POST /generate was" in output
    assert "the device is broken" in output
    worker.stop()
    server.start("worker").wait_until_ready()
    assert len(server.generate("Hello", max_new_tokens=3)["details"]["tokens"]) == 3
    server.wait_until(lambda: "Ready in" in "".join(server.output["api"]), "the front end reports that it is ready")


def port_is_open(server: Server) -> Callable[[], bool]:
    def is_open() -> bool:
        try:
            return bool(server.client.get("/health").status_code)
        except httpx.TransportError:
            return False

    return is_open


def environment_without(folder: Path, *packages: str) -> dict[str, str]:
    """An environment in which Python cannot import these packages."""
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
    return os.environ | python_path(folder) | {"HF_HUB_OFFLINE": "1"}


@pytest.mark.parametrize("command", ["up", "worker"])
def test_missing_worker_packages_are_reported_with_an_install_command(
    tiny_llama: Path, tmp_path: Path, command: str
) -> None:
    done = subprocess.run(
        [TGI, command, "--port", "0", "--model-id", str(tiny_llama)],
        env=environment_without(tmp_path / "site", "torch", "safetensors") | {"TGI_RUN": str(tmp_path / "run")},
        capture_output=True, text=True, timeout=TIMEOUT_SECONDS,
    )  # fmt: skip
    assert done.returncode == 3
    assert done.stderr == (
        f"Error: The worker needs torch, safetensors, which {sys.executable} cannot import: install what is missing "
        "with `pip install tgi-server` (in a clone: `pip install .`).\n"
    )
    assert not (tmp_path / "run").exists(), "something was started"


def test_a_server_with_the_scripted_worker_runs_without_torch(server: Server, tmp_path: Path) -> None:
    server.environment |= environment_without(tmp_path / "site", "torch", "safetensors", "transformers", "gguf")
    server.environment |= {"TGI_RUN": str(server.run_directory)}
    server.start().wait_until_ready()
    assert len(list(server.stream("Hello", max_new_tokens=3))) == 3


def test_a_missing_package_of_a_role_ends_the_tree_with_a_message(tiny_llama: Path, tmp_path: Path) -> None:
    environment = environment_without(tmp_path / "site", "falcon") | {"TGI_RUN": str(tmp_path / "run")}
    command = [TGI, "up", "--hostname", "127.0.0.1", "--port", "0", "--model-id", str(tiny_llama), *SCRIPTED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "Error: api-0 cannot run, since an import fails (No module named 'falcon'): install what is missing with "
        "`pip install tgi-server` (in a clone: `pip install .`)."
    )
    assert "Traceback" not in done.stderr
    assert "restarting it" not in done.stderr


def start_up(model: Path, run: Path, *arguments: str) -> "subprocess.Popen[str]":
    """Starts `tgi up` as the leader of a process group, as a shell does."""
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


@pytest.mark.parametrize(
    ("number", "after"),
    [
        (signal.SIGTERM, "api-0.beat"),
        (signal.SIGINT, "worker-0.beat"),  # Ctrl-C
        (signal.SIGINT, "state/api-0.json"),
        (signal.SIGTERM, "state/worker-0.json"),
    ],
)
def test_an_interrupted_start_ends_at_once(
    tiny_llama: Path, tmp_path: Path, number: signal.Signals, after: str
) -> None:
    server = start_up(tiny_llama, tmp_path / "run", "--graceful-termination-timeout", "1000")
    while not (tmp_path / "run" / after).exists():
        assert server.poll() is None
        time.sleep(0.001)
    if number == signal.SIGINT:
        os.killpg(server.pid, number)
    else:
        server.send_signal(number)
    try:
        output, _ = server.communicate(timeout=TIMEOUT_SECONDS)
    finally:
        server.kill()
    assert server.returncode == 0, output
    assert "Traceback" not in output


def test_a_permanent_error_of_a_child_is_the_last_line_of_output(tiny_llama: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_llama, model)
    (model / "tokenizer.json").write_text('{"version": ')
    server = start_up(model, tmp_path / "run")
    output, _ = server.communicate(timeout=TIMEOUT_SECONDS)
    assert server.returncode == 1
    assert re.fullmatch(r"Error: .*tokenizer\.json is damaged: .*", output.splitlines()[-1])
    assert output.count("is damaged") == 1
    assert "Traceback" not in output


def test_invalid_adapters_are_reported_before_any_process_starts(tiny_llama: Path, tmp_path: Path) -> None:
    for item, message in (
        (f"a={tmp_path}", "so it is no LoRA adapter"),
        ("a=b", "There is no directory b"),
        (f"{tiny_llama}=b", "has the base model's name"),
    ):
        server = start_up(tiny_llama, tmp_path / "run", "--lora-adapters", item)
        output, _ = server.communicate(timeout=TIMEOUT_SECONDS)
        assert server.returncode == 1
        assert message in output.splitlines()[-1]
        assert "Traceback" not in output


def test_an_invalid_generation_config_is_reported_before_any_process_starts(tiny_llama: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_llama, tmp_path / "model")
    (model / "generation_config.json").write_text('{"temperature": -1}')
    for given, message in (
        ("auto", "generation_config.json: temperature is -1; a number >= 0 was expected"),
        ("vllm", "vllm has no generation_config.json"),
    ):
        server = start_up(model, tmp_path / "run", "--generation-config", given)
        output, _ = server.communicate(timeout=TIMEOUT_SECONDS)
        assert server.returncode == 1
        assert message in output.splitlines()[-1]
        assert "Traceback" not in output


def test_the_ready_line_is_printed_when_all_roles_are_ready_and_has_the_bound_port(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """With a file that --generation-config leaves out, although it is invalid."""
    model = shutil.copytree(tiny_llama, tmp_path / "model")
    (model / "generation_config.json").write_text('{"temperature": -1}')
    server = start_up(model, tmp_path / "run", "--generation-config", "tgi")
    assert server.stdout is not None
    try:
        line = next(line for line in server.stdout if "Ready in" in line)
        states = {path.stem for path in (tmp_path / "run" / "state").glob("*.json")}
        assert states == {"api-0", "tokenizer-0", "scheduler-0", "worker-0"}
        found = re.search(r" on http://127\.0\.0\.1:(\d+) ", line)
        assert found
        assert int(found[1]) > 0
    finally:
        server.terminate()
        server.communicate(timeout=TIMEOUT_SECONDS)


def test_the_terminal_summary_shows_the_model_and_a_working_curl_command(tiny_llama: Path, tmp_path: Path) -> None:
    master, terminal = pty.openpty()
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
    output = ""
    try:
        while " ask " not in output or not output.endswith("\n"):
            output += os.read(master, 1 << 16).decode()
        _, _, shown = output.partition("Ready in ")
        assert not re.search(r"INFO|WARNING|ERROR", output)
        assert "secret" not in output
        rows = dict(line.strip().split(maxsplit=1) for line in shown.replace("KV cache", "KV").splitlines()[1:])
        assert list(rows) == ["from", "weights", "kernels", "context", "KV", "page", "docs", "ask"]
        assert rows["from"] == str(tiny_llama)
        assert rows["kernels"] == "none: the worker is scripted"
        assert "<html" in httpx.get(rows["page"], **CLIENT_OPTIONS).text
        assert httpx.get(rows["docs"], **CLIENT_OPTIONS).status_code in (200, 307)
        curl, url, *options = shlex.split(rows["ask"])
        assert (curl, options[::2]) == ("curl", ["-H", "-H", "-d"])
        headers = dict(option.replace("YOUR_KEY", "secret").split(": ", 1) for option in options[1:4:2])
        assert httpx.post(url, headers=headers, content=options[-1], **CLIENT_OPTIONS).status_code == 200
    finally:
        server.terminate()
        os.close(master)
        server.wait(TIMEOUT_SECONDS)


# Starts a command as a shell in a terminal does: as the leader of a session that the terminal controls, and with the
# default action of SIGHUP, which is ignored here if the tests run under nohup.
IN_TERMINAL = """
import fcntl, os, signal, sys, termios
signal.signal(signal.SIGHUP, signal.SIG_DFL)
os.setsid()
fcntl.ioctl(int(sys.argv[1]), termios.TIOCSCTTY, 0)
os.execvp(sys.argv[2], sys.argv[2:])
"""


@pytest.mark.parametrize("wrapper", [[], ["nohup"]], ids=["", "nohup"])
def test_a_hang_up_of_the_terminal_drains_except_under_nohup(server: Server, wrapper: list[str]) -> None:
    master, terminal = pty.openpty()
    os.set_inheritable(terminal, True)
    command = [*wrapper, TGI, "up", "--hostname", "127.0.0.1", "--port", str(server.port), *server.arguments]
    up = subprocess.Popen(
        [sys.executable, "-c", IN_TERMINAL, str(terminal), *command],
        env=server.environment,
        close_fds=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        os.close(terminal)
        server.wait_until_ready()
        stream = server.stream("Hello", max_new_tokens=60)
        events = [next(stream) for _ in range(5)]
        up.send_signal(signal.SIGHUP)  # with the terminal still there it only reloads files
        events += [next(stream) for _ in range(10)]
        assert server.is_healthy()
        os.close(master)
        up.send_signal(signal.SIGHUP)  # a shell repeats the signal
        assert len(events + list(stream)) == 60
        if wrapper:
            assert server.is_healthy()
            up.terminate()
        assert up.wait(TIMEOUT_SECONDS) == 0
    finally:
        up.kill()
        up.wait()


def test_a_second_signal_ends_the_drain(server: Server) -> None:
    server.start("up", "--graceful-termination-timeout", "1000").wait_until_ready()
    stream = server.stream("Hello", max_new_tokens=20000)
    next(stream)
    command = server.commands["up"]
    command.send_signal(signal.SIGINT)
    server.wait_until(
        lambda: "draining" in {state.state for state in rundir.read_states(server.run_directory)}, "the server drains"
    )
    command.send_signal(signal.SIGINT)
    assert command.wait(TIMEOUT_SECONDS) == 0
    assert "draining: requests in flight may take up to 1000 s; a second signal" in server.output_text()
    assert "did not end in time" not in server.output_text()
    assert server.output_text().count("killed, since a second signal came: api-0") == 1
    assert len([line for line in server.output_text().splitlines() if " WARNING " in line]) == 1


def test_processes_killed_during_the_drain_are_replaced(server: Server) -> None:
    server.start("up", "--graceful-termination-timeout", "100").wait_until_ready()
    stream = server.stream("Hello", max_new_tokens=300)
    events = [next(stream) for _ in range(5)]
    processes = server.processes()
    server.commands["up"].terminate()
    for target in ("worker-0", "scheduler-0", "tokenizer-0"):
        processes[target].kill()
        events += [next(stream) for _ in range(30)]  # it goes on before the next one is killed
    assert len(events + list(stream)) == 300
    assert server.commands["up"].wait(TIMEOUT_SECONDS) == 0


def test_a_process_that_is_stopped_during_the_drain_is_replaced(server: Server) -> None:
    flags = ("--graceful-termination-timeout", "100", "--hang-timeout", "2")
    server.start("up", *flags).wait_until_ready()
    process = server.processes()["worker-0"]
    stream = server.stream("Hello", max_new_tokens=200)
    events = [next(stream) for _ in range(5)]
    server.commands["up"].terminate()
    server.wait_until(
        lambda: "draining" in {one.state for one in rundir.read_states(server.run_directory)}, "it drains"
    )
    process.suspend()
    assert len(events + list(stream)) == 200
    assert server.commands["up"].wait(TIMEOUT_SECONDS) == 0
    assert "missed its heartbeat deadline" in server.output_text()


def test_an_error_that_keeps_a_process_from_starting_again_does_not_end_the_others(
    server: Server, tmp_path: Path
) -> None:
    (journals := tmp_path / "journals").mkdir()
    server.start("up", "--journal", str(journals)).wait_until_ready()
    shutil.rmtree(journals)
    journals.write_text("not a directory")
    stream = server.stream("Hello", max_new_tokens=100)
    events = [next(stream) for _ in range(5)]
    server.kill("scheduler-0")
    server.wait_until(lambda: "Cannot write a journal" in server.output_text(), "the error is logged")
    journals.unlink()
    assert len(events + list(stream)) == 100
    server.wait_until_ready()


def test_state_files_of_a_killed_server_do_not_make_the_next_one_ready(server: Server) -> None:
    server.start().wait_until_ready()
    # A front end writes its state right after /health has become 200.
    server.wait_until(
        lambda: {state.state for state in rundir.read_states(server.run_directory)} == {"ready"}, "states are ready"
    )
    children = [*server.processes().values()]
    up = server.commands["up"]
    up.kill()
    up.wait()
    # They hold the port until they notice that the supervisor has ended.
    _, left = psutil.wait_procs(children, TIMEOUT_SECONDS)
    assert left == []
    server.start("up", "--scripted-step-us", "1000000")
    server.wait_until(lambda: "Ready in" in "".join(server.output["up"]), "the server reports that it is ready")
    assert {state.name for state in rundir.read_states(server.run_directory) if state.state == "ready"} == {
        "api-0", "tokenizer-0", "scheduler-0", "worker-0",
    }  # fmt: skip
    seconds = re.search(r"Ready in ([\d.]+) s", "".join(server.output["up"]))
    assert seconds is not None
    assert float(seconds[1]) >= 1  # the readiness probe alone takes one worker step


def test_a_removed_run_directory_ends_the_server_with_a_message(server: Server) -> None:
    server.start().wait_until_ready()
    shutil.rmtree(server.run_directory)
    assert server.commands["up"].wait(TIMEOUT_SECONDS) == 1
    assert "was removed while the server ran" in server.output_text()
    assert "Traceback" not in server.output_text()
