"""scripts/load against real servers and a broken one: its figures, its exit code, what it says of failures."""

import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from tests.live.server import PATIENCE_SECONDS, Server, free_port

LOAD = Path(__file__).parent.parent.parent / "scripts" / "load"
PLAIN = {"/generate", "/", "/v1/chat/completions", "/v1/completions"}
STREAMS = {f"{path} [stream]" for path in ("/generate_stream", "/", "/v1/chat/completions", "/v1/completions")}
SHORT = ("--prompt-words", "4", "40", "--output-tokens", "4", "12", "--only-summary")


def load(host: str, *arguments: str) -> subprocess.Popen[str]:
    """scripts/load, started; both of its outputs are one."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LOCUST_")}
    return subprocess.Popen(
        [LOAD, "--host", host, *SHORT, *arguments],
        env=environment | {"API_KEY": ""},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def summary(run: subprocess.Popen[str]) -> str:
    """All that a run has printed by its end."""
    return run.communicate(timeout=PATIENCE_SECONDS)[0]


def tokens(printed: str) -> dict[str, list[float]]:
    """The rows of the table of tokens: tokens, tokens/s, and for streams four figures of TTFT and four of ITL."""
    table = printed[printed.index("Tokens (durations in ms)") :]
    rows = re.findall(r"^(/\S*(?: \[stream\])?|Aggregated) +([\d. ]+)$", table, re.MULTILINE)
    return {name: [float(cell) for cell in cells.split()] for name, cells in rows}


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    """The environment of scripts/load, made once and kept between runs."""
    subprocess.run([LOAD, "--version"], check=True)


@pytest.fixture(scope="module")
def server(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    scripted = ("--worker", "scripted", "--scripted-step-us", "2000")
    with Server(tmp_path_factory.mktemp("run"), "--model-id", str(tiny_llama), *scripted) as made:
        yield made.start().ready()


def test_every_kind_of_request_has_its_figures(server: Server) -> None:
    run = load(server.url, "--run-time", "3s", "--users", "16", "--spawn-rate", "16")
    printed = summary(run)
    assert run.returncode == 0, printed
    rows = tokens(printed)
    assert set(rows) == PLAIN | STREAMS | {"Aggregated"}, printed
    for name, figures in rows.items():
        assert len(figures) == (2 if name in PLAIN else 10), printed
        assert min(figures) > 0, printed
    assert rows["Aggregated"][0] == sum(figures[0] for name, figures in rows.items() if name != "Aggregated")


def test_the_web_page_shows_the_figures(server: Server) -> None:
    port = free_port()
    run = load(server.url, "--autostart", "--web-port", str(port))
    page = httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False)

    def figures() -> dict[str, float]:
        try:
            shown = {more["key"]: more["data"] for more in page.get("/stats/requests").json()["extended_stats"]}
        except httpx.TransportError:
            assert run.poll() is None, summary(run)
            return {}
        return next(row for row in shown["tokens"] if row["name"] == "Aggregated")

    try:
        server.until(lambda: figures().get("itl_avg"), "the web page shows inter-token latencies")
        shown = figures()
        assert min(shown["tokens"], shown["rate"], shown["ttft_median"], shown["itl_highest"]) > 0
        made = json.loads(re.search(r"templateArgs = (.*)", page.get("/").text)[1])  # type: ignore[index]
        assert {"key": "tokens", "title": "Tokens"} in made["extended_tabs"]
        (table,) = made["extended_tables"]
        assert {column["key"] for column in table["structure"]} == set(shown)
    finally:
        run.send_signal(signal.SIGTERM)
        summary(run)


def test_a_full_server_is_no_failure_but_counted(tiny_llama: Path, tmp_path: Path) -> None:
    few = ("--max-concurrent-requests", "1", "--worker", "scripted", "--scripted-step-us", "2000")
    with Server(tmp_path / "run", "--model-id", str(tiny_llama), *few) as server:
        server.start().ready()
        run = load(server.url, "--tags", "native", "--run-time", "2s")
        printed = summary(run)
    assert run.returncode == 0, printed
    assert re.search(r"^POST +/generate_stream \[stream\] \[429\] +\d+ +0\(0\.00%\)", printed, re.MULTILINE), printed
    assert "Error report" not in printed


def test_a_server_that_dies_is_a_failure(tiny_llama: Path, tmp_path: Path) -> None:
    scripted = ("--worker", "scripted", "--scripted-step-us", "2000")
    with Server(tmp_path / "run", "--model-id", str(tiny_llama), *scripted) as server:
        server.start().ready()
        run = load(server.url, "--tags", "native", "--run-time", "4s")
        server.until(lambda: server.metric("tgi_request_success") > 0, "the load has begun")
        server.stop(signal.SIGKILL)
        printed = summary(run)
    assert run.returncode == 1, printed
    assert re.search(r"no answer: .*Connection refused", printed), printed


def test_without_a_server_one_message_says_so() -> None:
    host = f"127.0.0.1:{free_port()}"
    run = load(host)
    printed = summary(run)
    assert run.returncode == 1
    assert f"No server answers at http://{host} (" in printed
    assert "Traceback" not in printed


EVENT = b'data: {"index":1,"token":{"id":5,"text":"a"},"generated_text":null,"details":null}\n\n'
ERROR = b'data: {"error":"Request failed during generation: x","error_type":"generation"}\n\n'
CHUNK = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":"a"},"finish_reason":null}]}\n\n'
COMPLETION = b'data: {"choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n'
# Path and stream -> status, the length that the head promises (None: until the connection closes), the body.
BROKEN = {
    ("/generate", False): (503, None, b'{"error":"unhealthy","error_type":"healthcheck"}'),
    ("/generate_stream", True): (200, None, EVENT),
    ("/", False): (200, 100, b'[{"generated_text":"'),
    ("/", True): (200, None, EVENT + ERROR),
    ("/v1/chat/completions", False): (200, None, b'{"choices":[]}'),
    ("/v1/chat/completions", True): (200, None, CHUNK),
    ("/v1/completions", False): (401, None, b""),
    ("/v1/completions", True): (200, 1000, COMPLETION),
}
REASONS = {
    "/generate": "503: unhealthy",
    "/generate_stream [stream]": "truncated: the stream ended without its last event",
    "/": "broken off: Incomplete response.",
    "/ [stream]": "error in the stream: Request failed during generation: x",
    "/v1/chat/completions": "not an answer of this route: KeyError('usage')",
    "/v1/chat/completions [stream]": "truncated: the stream ended without its last event",
    "/v1/completions": "401: without a reason",
    "/v1/completions [stream]": "broken off: Incomplete response.",
}


class Breaker(BaseHTTPRequestHandler):
    """Healthy, and answers nothing as it should."""

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


def test_every_broken_answer_is_a_failure_with_its_reason() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Breaker) as broken:
        threading.Thread(target=broken.serve_forever, daemon=True).start()
        run = load(f"127.0.0.1:{broken.server_port}", "--run-time", "2s", "--users", "32", "--spawn-rate", "32")
        printed = summary(run)
        broken.shutdown()
    assert run.returncode == 1, printed
    for name, reason in REASONS.items():
        assert f"POST {name}: {reason}" in printed, printed
