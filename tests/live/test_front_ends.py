"""Two front ends of one server: they share its permits, report when to retry, and add their metrics."""

import json
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.live.server import CLIENT_OPTIONS, TIMEOUT_SECONDS, Server, SharedServers

pytestmark = pytest.mark.live

LIMIT = 5
SCRIPTED = ("--worker", "scripted", "--scripted-step-us", "20000", "--api-workers", "2")


@pytest.fixture
def server(tiny_llama: Path, tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path / "run", "--model-id", str(tiny_llama), *SCRIPTED) as server:
        yield server


class OpenStream:
    """A stream over a connection of its own, of which only the head is read."""

    def __init__(self, server: Server) -> None:
        self.socket = socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT_SECONDS)
        self.port = self.socket.getsockname()[1]
        body = json.dumps({"inputs": "Hello", "parameters": {"max_new_tokens": 1500}}).encode()
        head = "POST /generate_stream HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        self.socket.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)

    def status(self) -> int:
        raw = b""
        while b"\r\n\r\n" not in raw:
            raw += self.socket.recv(4096)
        return int(raw.split()[1])

    def wait_until_closed(self) -> None:
        """Waits until the server has closed the connection."""
        try:
            while self.socket.recv(65536):
                pass
        except ConnectionResetError:
            pass


def open_streams(server: Server, count: int) -> dict[OpenStream, int]:
    """Starts streams at once, all of which stay open. Returns their statuses."""
    streams = [OpenStream(server) for _ in range(count)]
    return {stream: stream.status() for stream in streams}


def test_two_front_ends_share_the_concurrency_limit(server: Server) -> None:
    server.start("up", "--max-concurrent-requests", str(LIMIT)).wait_until_ready()
    first = open_streams(server, 9)
    assert Counter(first.values()) == {200: LIMIT, 429: 9 - LIMIT}
    running = {stream.port: stream for stream, status in first.items() if status == 200}
    front_ends = {name: process for name, process in server.processes().items() if name.startswith("api")}
    ports = {
        name: [c.raddr.port for c in process.net_connections("tcp") if c.raddr and c.raddr.port in running]
        for name, process in front_ends.items()
    }
    target = max(ports, key=lambda name: len(ports[name]))
    server.kill(target)
    for port in ports[target]:
        running[port].wait_until_closed()
    second = open_streams(server, 9)
    assert Counter(second.values()) == {200: len(ports[target]), 429: 9 - len(ports[target])}
    for stream in [*first, *second]:
        stream.socket.close()
    server.wait_until(lambda: server.metric("tgi_batch_current_size") == 0, "the closed streams are cancelled")
    last = open_streams(server, LIMIT + 1)
    assert Counter(last.values()) == {200: LIMIT, 429: 1}


def test_retry_after_grows_with_the_length_of_running_requests(server: Server) -> None:
    server.start("up", "--max-concurrent-requests", "12", "--max-batch-size", "2").wait_until_ready()
    tokens = 5  # 0.1 s
    waits: list[int] = []

    def client() -> None:
        while True:
            body = {"inputs": "Hello", "parameters": {"max_new_tokens": tokens}}
            try:
                answer = httpx.post(f"{server.url}/generate", json=body, **CLIENT_OPTIONS)
            except httpx.TransportError:
                return  # the test has ended the server
            if answer.status_code == 429:
                waits.append(int(answer.headers["retry-after"]))
                time.sleep(0.05)

    for _ in range(15):
        threading.Thread(target=client, daemon=True).start()
    server.wait_until(lambda: len(waits) > 15, "some requests are rejected")
    assert 1 <= min(waits) <= max(waits) <= 60
    short = waits[-1]
    tokens = 500  # 10 s, in which no further request is admitted
    server.wait_until(lambda: waits[-1] >= min(short + 2, 60), "Retry-After is longer")
    assert waits[-1] <= 60


def samples(text: str) -> dict[str, float]:
    """All samples of an answer of /metrics."""
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#")]
    assert len({name for name, _ in lines}) == len(lines)
    return {name: float(value) for name, value in lines}


def test_metrics_are_the_sums_of_two_front_ends(server: Server) -> None:
    server.start().wait_until_ready()
    sent = 0
    probes = 2  # readiness probes of the front ends, one prefill each; only the series of steps contain them

    def scrape() -> dict[str, float]:
        answer = httpx.get(f"{server.url}/metrics", **CLIENT_OPTIONS)
        assert answer.status_code == 200
        return samples(answer.text)

    def both_have_answered() -> bool:
        nonlocal sent
        body = {"inputs": "Hello", "parameters": {"max_new_tokens": 3}}
        for path in ("/generate", "/generate_stream"):
            answer = httpx.post(f"{server.url}{path}", json=body, **CLIENT_OPTIONS)
            if answer.status_code == 503:
                return False  # the other front end, which shares the port, is not ready yet
            assert answer.status_code == 200, answer.text + server.output_text()
            sent += 1
        return all(
            (server.run_directory / "metrics" / f"sums_{process.pid}.db").exists()
            for name, process in server.processes().items()
            if name.startswith("api")
        )

    def check() -> None:
        """Retries, since a client has its last token before the metrics are updated."""
        deadline = time.monotonic() + 60
        while True:
            try:
                return check_now()
            except (AssertionError, KeyError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def check_now() -> None:
        found = scrape()
        for name in (
            "tgi_request_count", "tgi_request_success", "tgi_generation_count", "tgi_generation_success",
            "tgi_request_duration_count", 'tgi_request_duration_bucket{le="+Inf"}', "tgi_request_queue_duration_count",
            "tgi_request_generated_tokens_count", "tgi_time_to_first_token_duration_count",
            "tgi_request_input_length_count", "tgi_request_max_new_tokens_count",
        ):  # fmt: skip
            assert found[name] == sent, name
        assert found["tgi_request_generated_tokens_sum"] == found["tgi_request_max_new_tokens_sum"] == 3 * sent
        assert found["tgi_inter_token_duration_count"] == 2 * sent
        assert found["tgi_request_skipped_tokens_count"] == 3 * sent
        assert found['tgi_request_skipped_tokens{quantile="1"}'] == 0
        steps = {m: found[f'tgi_batch_inference_success{{method="{m}"}}'] for m in ("prefill", "decode")}
        # Probes of two front ends may share a step, and one that is not answered with 200 is repeated.
        prefills = found["tgi_batch_next_size_sum"]
        assert prefills >= sent + probes
        assert sent < steps["prefill"] <= prefills
        for what in ("inference", "forward", "filter"):
            assert {m: found[f'tgi_batch_{what}_duration_count{{method="{m}"}}'] for m in steps} == steps
        # Each of the tokenizers that a step has tokens for turns its own into text.
        assert steps["prefill"] <= found['tgi_batch_decode_duration_count{method="prefill"}'] <= prefills
        total = found["tgi_batch_max_total_tokens"]
        assert found["tgi_kv_cache_pages_used"] + found["tgi_kv_cache_pages_free"] == total / 16
        for name in (
            "tgi_queue_size",
            "tgi_batch_current_size",
            "tgi_batch_current_max_tokens",
            "tgi_kv_cache_pages_used",
        ):
            assert found[name] == 0, name

    def prefills() -> dict[str, float]:
        found, method = scrape(), '{method="prefill"}'
        steps = {name: found[f"tgi_batch_{name}{method}"] for name in ("inference_success", "decode_duration_count")}
        return steps | {"next_size_sum": found["tgi_batch_next_size_sum"]}

    server.wait_until(lambda: {"api-0", "api-1"} <= server.processes("ready").keys(), "both front ends are ready")
    server.wait_until(both_have_answered, "both front ends have answered")
    check()
    before = prefills()
    assert both_have_answered()
    check()
    # The probes are over: from here on each request is a prefill step of its own, with text of one tokenizer.
    assert prefills() == {name: count + 2 for name, count in before.items()}
    server.kill("api-0")
    probes += 1
    check()  # answered by the other front end, or by the new one
    server.wait_until(lambda: len(server.processes()) == 6, "all processes run again")
    server.wait_until(both_have_answered, "both front ends have answered")
    check()
    assert scrape()['tgi_process_restarts{role="api"}'] == 1


def test_metrics_are_answered_while_processes_are_replaced(tiny_llama: Path, shared_server: SharedServers) -> None:
    server = shared_server("--model-id", str(tiny_llama), *SCRIPTED)
    finished = threading.Event()
    answers: list[str] = []

    def watch() -> None:
        while not finished.is_set():
            try:
                answer = httpx.get(f"{server.url}/metrics", **CLIENT_OPTIONS)
            except httpx.TransportError:
                continue  # the front end was killed
            assert answer.status_code == 200, answer.text + server.output_text()
            answers.append(answer.text)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for name in ("api-0", "scheduler-0", "api-1"):
        server.kill(name)
        seen = len(answers)
        server.wait_until(lambda seen=seen: len(answers) > seen + 3, "metrics are answered")
    server.wait_until(lambda: len(server.processes()) == 6, "all processes run again")
    finished.set()
    watcher.join(TIMEOUT_SECONDS)
    totals = [samples(text).get("tgi_batch_max_total_tokens", 0.0) for text in answers]
    assert len(set(totals)) <= 2  # the scheduler's, or no sample while it is replaced
    assert not re.search("_created|_total ", answers[-1])
