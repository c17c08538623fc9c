"""scripts/load against real servers and a broken one: figures, exit code, and reasons of failures."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients.environments import ENVIRONMENTS
from tests.live.server import CLIENT_OPTIONS, TIMEOUT_SECONDS, Server, free_port

pytestmark = pytest.mark.live

LOAD = Path(__file__).parent.parent.parent / "scripts" / "load"
ENVIRONMENT = ENVIRONMENTS.parent / f"load-python{sys.version_info.major}.{sys.version_info.minor}"
PLAIN = {"/generate", "/", "/v1/chat/completions", "/v1/completions"}
STREAMS = {f"{path} [stream]" for path in ("/generate_stream", "/", "/v1/chat/completions", "/v1/completions")}
SCRIPTED = ("--worker", "scripted", "--scripted-step-us", "2000", "--validation-workers", "1")
SHORT = ("--prompt-words", "4", "40", "--output-tokens", "4", "12", "--only-summary")


class Load:
    """A running scripts/load. `printed` is its output (stdout and stderr) once it has ended."""

    def __init__(self, host: str, *arguments: str) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("LOCUST_")}
        self.printed = ""
        self._process = subprocess.Popen(
            [LOAD, "--host", host, *SHORT, *arguments],
            env=environment | {"API_KEY": "", "TGI_LOAD_VENV": str(ENVIRONMENT)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def wait(self) -> int:
        """Waits until it has ended and returns the exit code."""
        self.printed = self._process.communicate(timeout=TIMEOUT_SECONDS)[0]
        return self._process.returncode

    def terminate_when(self, page: httpx.Client, condition: Callable[[dict[str, Any]], bool]) -> int:
        """Sends SIGTERM when the figures of its web page meet the condition. Returns the exit code."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        try:
            while not (shown := figures(page)) or not condition(shown):
                assert self._process.poll() is None, "it has ended"
                assert time.monotonic() < deadline, f"timed out: {shown}"
                time.sleep(0.1)
        finally:
            self._process.send_signal(signal.SIGTERM)
            code = self.wait()
            print(self.printed)
        return code


def figures(page: httpx.Client) -> dict[str, Any]:
    """The figures that the web page polls; empty before it is served."""
    try:
        return page.get("/stats/requests").json()  # type: ignore[no-any-return]
    except httpx.TransportError:
        return {}


def token_rows(shown: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The rows of the tab "Tokens" by name."""
    (tab,) = shown["extended_stats"]
    return {row["name"]: row for row in tab["data"]}


@pytest.fixture
def page() -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://127.0.0.1:{free_port()}", **CLIENT_OPTIONS) as client:
        yield client


def web(page: httpx.Client) -> tuple[str, ...]:
    """The arguments for a load that starts by itself and serves this page."""
    return ("--autostart", "--web-port", str(page.base_url.port), "--users", "2", "--spawn-rate", "2")


def tokens(printed: str) -> dict[str, list[float]]:
    """The printed rows of tokens by name: tokens, tokens/s, and for streams four figures of TTFT and four of ITL."""
    table = printed[printed.index("Tokens (durations in ms)") :]
    rows = re.findall(r"^(/\S*(?: \[stream\])?|Aggregated) +([\d. ]+)$", table, re.MULTILINE)
    return {name: [float(cell) for cell in cells.split()] for name, cells in rows}


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    """Creates the environment of scripts/load, which all checkouts share."""
    ENVIRONMENT.parent.mkdir(parents=True, exist_ok=True)
    with ENVIRONMENT.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run([LOAD, "--version"], env=os.environ | {"TGI_LOAD_VENV": str(ENVIRONMENT)}, check=True)


def test_summary_and_page_have_figures_of_every_kind_of_request(
    tiny_llama: Path, tmp_path: Path, page: httpx.Client
) -> None:
    def all_have_figures(shown: dict[str, Any]) -> bool:
        rows = token_rows(shown)
        return rows.keys() >= PLAIN | STREAMS and all(rows[name]["itl_avg"] for name in STREAMS)

    with Server(tmp_path / "run", "--model-id", str(tiny_llama), *SCRIPTED) as server:
        server.start().wait_until_ready()
        run = Load(server.url, *web(page))
        server.wait_until(lambda: figures(page), "the page is served")
        template_arguments = json.loads(re.search(r"templateArgs = (.*)", page.get("/").text)[1])  # type: ignore[index]
        (row, *_) = token_rows(figures(page)).values()
        code = run.terminate_when(page, all_have_figures)
    assert code == 0
    rows = tokens(run.printed)
    assert set(rows) == PLAIN | STREAMS | {"Aggregated"}
    for name, cells in rows.items():
        assert len(cells) == (2 if name in PLAIN else 10)
        assert min(cells) > 0
    assert rows["Aggregated"][0] == sum(cells[0] for name, cells in rows.items() if name != "Aggregated")
    assert {"key": "tokens", "title": "Tokens"} in template_arguments["extended_tabs"]
    (table,) = template_arguments["extended_tables"]
    assert {column["key"] for column in table["structure"]} == set(row)


def test_429_is_counted_but_not_as_a_failure(tiny_llama: Path, tmp_path: Path) -> None:
    with Server(tmp_path / "run", "--model-id", str(tiny_llama), "--max-concurrent-requests", "1", *SCRIPTED) as server:
        server.start().wait_until_ready()
        run = Load(server.url, "--tags", "native", "--run-time", "3s")
        code = run.wait()
    assert code == 0, run.printed
    assert re.search(r"^POST +/.* \[429\] +\d+ +0\(0\.00%\)", run.printed, re.MULTILINE), run.printed
    assert "Error report" not in run.printed
    assert min(tokens(run.printed)["Aggregated"]) > 0, run.printed


def test_a_killed_server_is_a_failure(tiny_llama: Path, tmp_path: Path, page: httpx.Client) -> None:
    with Server(tmp_path / "run", "--model-id", str(tiny_llama), *SCRIPTED) as server:
        server.start().wait_until_ready()
        run = Load(server.url, *web(page), "--tags", "native")
        server.wait_until(lambda: server.metric("tgi_request_success") > 0, "the load has begun")
        server.stop(signal.SIGKILL)
        code = run.terminate_when(page, lambda shown: "Connection refused" in str(shown["errors"]))
    assert code == 1
    assert re.search(r"no answer: .*Connection refused", run.printed)


def test_a_missing_server_is_reported_with_one_message() -> None:
    host = f"127.0.0.1:{free_port()}"
    run = Load(host)
    assert run.wait() == 1
    assert f"No server answers at http://{host} (" in run.printed
    assert "Traceback" not in run.printed


EVENT = b'data: {"index":1,"token":{"id":5,"text":"a"},"generated_text":null,"details":null}\n\n'
ERROR = b'data: {"error":"Request failed during generation: x","error_type":"generation"}\n\n'
CHUNK = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":"a"},"finish_reason":null}]}\n\n'
# (path, whether streamed) -> status, content-length (None: until the connection closes), body.
BROKEN = {
    ("/generate", False): (503, None, b'{"error":"unhealthy","error_type":"healthcheck"}'),
    ("/generate_stream", True): (200, None, EVENT),
    ("/", False): (200, 100, b'[{"generated_text":"'),
    ("/", True): (200, None, EVENT + ERROR),
    ("/v1/chat/completions", False): (200, None, b'{"choices":[]}'),
    ("/v1/chat/completions", True): (200, None, CHUNK),
    ("/v1/completions", False): (401, None, b""),
    ("/v1/completions", True): (503, None, b'{"error":{"message":"unhealthy"},"error_type":"healthcheck"}'),
}
REASONS = {
    "/generate": "503: unhealthy",
    "/generate_stream [stream]": "truncated: the stream ended without its last event",
    "/": "broken off: Incomplete response.",
    "/ [stream]": "error in the stream: Request failed during generation: x",
    "/v1/chat/completions": "not an answer of this route: KeyError('usage')",
    "/v1/chat/completions [stream]": "truncated: the stream ended without its last event",
    "/v1/completions": "401: without a reason",
    "/v1/completions [stream]": "503: unhealthy",
}


class BrokenServer(BaseHTTPRequestHandler):
    """A server that is healthy and answers every request wrongly."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        stream = self.path == "/generate_stream" or body["stream"]
        status, length, answer = BROKEN[self.path, stream]
        self.send_response(status)
        if length is not None:
            self.send_header("content-length", str(length))
        self.send_header("connection", "close")
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass


def test_every_broken_answer_is_a_failure_with_its_reason(page: httpx.Client) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), BrokenServer) as broken:
        threading.Thread(target=broken.serve_forever, daemon=True).start()
        run = Load(f"127.0.0.1:{broken.server_port}", *web(page))
        code = run.terminate_when(page, lambda shown: {error["name"] for error in shown["errors"]} >= set(REASONS))
        broken.shutdown()
    assert code == 1
    for name, reason in REASONS.items():
        assert f"POST {name}: {reason}" in run.printed
