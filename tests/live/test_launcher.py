"""`text-generation-launcher` as start scripts for TGI call it: with environment variables only, and with flags."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from tests.live.server import CLIENT_OPTIONS, TIMEOUT_SECONDS, free_port
from tgi.microkernel.host import rundir
from tgi.microkernel.observability.progress import WorkerFacts

pytestmark = pytest.mark.live


class Launched:
    """A running launcher. `lines` is its output up to the line with "Ready in"."""

    def __init__(self, process: "subprocess.Popen[str]", port: int, lines: list[str]) -> None:
        self.process = process
        self.lines = lines
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", **CLIENT_OPTIONS)

    def generate(self, key: str = "") -> int:
        """The status of POST /generate."""
        body = {"inputs": "Hello", "parameters": {"max_new_tokens": 3}}
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return self.client.post("/generate", json=body, headers=headers).status_code


@contextmanager
def launched(run: Path, port: int, *arguments: str, **variables: str) -> Iterator[Launched]:
    """Starts the launcher, waits until it is ready, and ends it with SIGTERM, as container runtimes do."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("PORT", "HOSTNAME")}
    own = {"TGI_RUN": str(run), "HF_HUB_OFFLINE": "1", "TGI_HOSTNAME": "127.0.0.1", "TGI_WORKER": "scripted"}
    process = subprocess.Popen(
        [sys.executable, "-m", "tgi.launcher", *arguments],
        env=inherited | own | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    watchdog = threading.Timer(TIMEOUT_SECONDS, process.kill)
    watchdog.start()
    lines = []
    server = Launched(process, port, lines)
    try:
        for line in process.stdout:
            lines.append(line)
            if "Ready in" in line:  # a plain line, or a field of a JSON line
                break
        assert "Ready in" in lines[-1], "".join(lines)
        while server.client.get("/health").status_code != 200:  # the tokenizer's status may not have arrived yet
            time.sleep(0.02)
        yield server
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_SECONDS) == 0
    finally:
        watchdog.cancel()
        process.kill()
        process.communicate()
        server.client.close()


def test_environment_variables_configure_the_server(tiny_llama: Path, tmp_path: Path) -> None:
    (keys := tmp_path / "keys").write_text("two\nthree\n")
    port, metrics_port = free_port(), free_port()
    variables = {
        "MODEL_ID": str(tiny_llama), "PORT": str(port), "HOSTNAME": "3f2a9c", "MAX_STOP_SEQUENCES": "0",
        "MAX_TOTAL_TOKENS": "200", "PROMETHEUS_PORT": str(metrics_port), "API_KEY": "one", "JSON_OUTPUT": "true",
        "TGI_API_KEY_FILE": str(keys), "USAGE_STATS": "on", "ROPE_FACTOR": "2", "LOG_LEVEL": "info,tgi.server=debug",
    }  # fmt: skip
    with launched(tmp_path / "run", port, **variables) as server:
        statuses = {key: server.generate(key) for key in ("one", "two", "three", "four", "one,two", "")}
        assert statuses == {"one": 200, "two": 200, "three": 200, "four": 401, "one,two": 401, "": 401}
        assert server.client.get("/info").json()["max_total_tokens"] == 200
        for name in ("tgi_request_count", "tgi_request_success"):
            assert f"{name} 3\n" in httpx.get(f"http://127.0.0.1:{metrics_port}/metrics", **CLIENT_OPTIONS).text
        answer = httpx.get(f"http://127.0.0.1:{metrics_port}/generate", **CLIENT_OPTIONS)
        assert answer.status_code == 404
    logged = [json.loads(line) for line in server.lines if line.startswith("{")]
    (arguments,) = [entry for entry in logged if entry["message"] == "Arguments other than the defaults"]
    assert arguments["level"] == "DEBUG"
    assert (arguments["port"], arguments["api_key"], arguments["rope_factor"]) == (port, "(hidden)", 2)
    assert "max_best_of" not in arguments
    (warning,) = [entry["message"] for entry in logged if "without effect" in entry["message"]]
    assert "--usage-stats (nothing is ever sent)" in warning
    assert not [line for line in server.lines if "three" in line]
    ready = logged[-1]
    assert ready["level"] == "INFO"
    assert ready["message"].endswith(f" s: {tiny_llama} on http://127.0.0.1:{port}")
    facts = {name: ready[name] for name in ("model", "max_total_tokens", "url", "docs", "kernels")}
    assert facts == {
        "model": str(tiny_llama), "max_total_tokens": 200, "url": f"http://127.0.0.1:{port}",
        "docs": f"http://127.0.0.1:{port}/docs", "kernels": "none: the worker is scripted",
    }  # fmt: skip
    assert set(WorkerFacts._fields) <= ready.keys()
    stages = {entry["message"] for entry in logged if entry["target"] == "tgi.microkernel.observability.progress"}
    expected = {*stages, warning, arguments["message"], "Sampling defaults of /v1: {}"}
    assert [entry for entry in logged if entry["message"] not in expected] == []


def test_the_flags_of_a_tgi_start_script_are_accepted(tiny_llama: Path, tmp_path: Path) -> None:
    port = free_port()
    script = f"""--model-id {tiny_llama} --num-shard 1 --sharded false -p {port} --max-input-tokens 100 -g 5 -e
        --max-total-tokens=200 --max-batch-prefill-tokens 128 --cuda-graphs 1,2,4 --trust-remote-code
        --max-concurrent-requests 8 --shard-uds-path /tmp/shard --disable-custom-kernels --dtype float16"""
    with launched(tmp_path / "run", port, *script.split(), PORT="1") as server:
        assert server.generate() == 200
    output = "".join(server.lines)
    assert "Runtime environment:\nTarget: " in output
    assert "--shard-uds-path (sockets are in the run directory" in output


def test_a_metrics_port_in_use_is_reported(tiny_llama: Path, tmp_path: Path) -> None:
    with (
        launched(tmp_path / "run", port := free_port(), "--model-id", str(tiny_llama), "--port", str(port)),
        pytest.raises(AssertionError, match=f"Cannot listen on 127.0.0.1:{port} for --prometheus-port"),
        launched(tmp_path / "other", 0, "--model-id", str(tiny_llama), "--port", "0", "--prometheus-port", str(port)),
    ):
        pass


SECRET = "key-that-stays-hidden"


@pytest.mark.parametrize("given", [["--api-key", SECRET], [f"--api-key={SECRET}", "--api-key", "another"]], ids=str)
@pytest.mark.parametrize("command", ["tgi.launcher", "tgi up", "tgi api"])
def test_api_keys_are_hidden_from_process_listings(
    command: str, given: list[str], tiny_llama: Path, tmp_path: Path
) -> None:
    """In the arguments and the environment of each process of the tree, as the operating system shows them."""
    module, *role = command.split()
    process = subprocess.Popen(
        [sys.executable, "-m", module, *role, *given, "--model-id", str(tiny_llama), "--port", "0"],
        env=os.environ | {"TGI_RUN": str(tmp_path), "TGI_HOSTNAME": "127.0.0.1", "TGI_WORKER": "scripted"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    expected = {"api-0"} if role == ["api"] else {"api-0", "tokenizer-0", "tokenizer-1", "scheduler-0", "worker-0"}
    deadline = time.monotonic() + TIMEOUT_SECONDS
    try:
        supervisor = psutil.Process(process.pid)
        while {state.name for state in rundir.read_states(tmp_path)} != expected:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        for one in (supervisor, *supervisor.children(recursive=True)):
            assert SECRET not in " ".join(one.cmdline())
            assert SECRET not in str(one.environ())
        title = " ".join(supervisor.cmdline())
        assert title.startswith("text-generation-launcher" if not role else command)
        assert "(hidden)" in title
        assert str(tiny_llama) in title
    finally:
        process.kill()
        process.wait()
