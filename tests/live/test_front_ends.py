"""Two front ends of one server: they share its permits, tell how long to wait, and count together."""

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

from tests.live.server import LOCAL, PATIENCE_SECONDS, Server

LIMIT = 5
SCRIPTED = ("--worker", "scripted", "--scripted-step-us", "20000", "--api-workers", "2")


@pytest.fixture
def server(tiny_llama: Path, tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path / "run", "--model-id", str(tiny_llama), *SCRIPTED) as made:
        yield made


class Held:
    """A stream of its own connection that is read up to its status, and goes on."""

    def __init__(self, server: Server) -> None:
        self.socket = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_SECONDS)
        self.port = self.socket.getsockname()[1]
        body = json.dumps({"inputs": "Hello", "parameters": {"max_new_tokens": 1500}}).encode()
        head = "POST /generate_stream HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        self.socket.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)

    def status(self) -> int:
        raw = b""
        while b"\r\n\r\n" not in raw:
            raw += self.socket.recv(4096)
        return int(raw.split()[1])

    def broken(self) -> None:
        """Waits until the connection is gone."""
        try:
            while self.socket.recv(65536):
                pass
        except ConnectionResetError:
            pass


def statuses(server: Server, count: int) -> dict[Held, int]:
    """Of so many new streams at once, all of which stay open."""
    streams = [Held(server) for _ in range(count)]
    return {stream: stream.status() for stream in streams}


def test_the_limit_is_that_of_both_together(server: Server) -> None:
    server.start("up", "--max-concurrent-requests", str(LIMIT)).ready()
    asked = statuses(server, 9)
    assert Counter(asked.values()) == {200: LIMIT, 429: 9 - LIMIT}
    running = {stream.port: stream for stream, status in asked.items() if status == 200}
    fronts = {name: process for name, process in server.processes().items() if name.startswith("api")}
    mine = {
        name: [c.raddr.port for c in process.net_connections("tcp") if c.raddr and c.raddr.port in running]
        for name, process in fronts.items()
    }
    victim = max(mine, key=lambda name: len(mine[name]))
    server.kill(victim)
    for port in mine[victim]:
        running[port].broken()
    again = statuses(server, 9)
    assert Counter(again.values()) == {200: len(mine[victim]), 429: 9 - len(mine[victim])}
    for stream in [*asked, *again]:
        stream.socket.close()
    server.until(lambda: server.metric("tgi_batch_current_size") == 0, "those who left are forgotten")
    last = statuses(server, LIMIT + 1)
    assert Counter(last.values()) == {200: LIMIT, 429: 1}


def test_retry_after_grows_with_what_has_to_be_waited_for(server: Server) -> None:
    server.start("up", "--max-concurrent-requests", "12", "--max-batch-size", "2").ready()
    tokens = 5  # 0.1 s
    waits: list[int] = []

    def client() -> None:
        while True:
            body = {"inputs": "Hello", "parameters": {"max_new_tokens": tokens}}
            try:
                answer = httpx.post(f"{server.url}/generate", json=body, **LOCAL)
            except httpx.TransportError:
                return  # the test is over, and the server gone
            if answer.status_code == 429:
                waits.append(int(answer.headers["retry-after"]))
                time.sleep(0.05)

    for _ in range(15):
        threading.Thread(target=client, daemon=True).start()
    server.until(lambda: len(waits) > 15, "some are refused")
    assert 1 <= min(waits) <= max(waits) <= 60
    short = waits[-1]
    tokens = 500  # 10 s: nobody gets in for a while
    server.until(lambda: waits[-1] >= min(short + 2, 60), "the wait is longer")
    assert waits[-1] <= 60


def counts(text: str) -> dict[str, float]:
    """All samples of an answer of /metrics."""
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#")]
    assert len({name for name, _ in lines}) == len(lines)
    return {name: float(value) for name, value in lines}


def test_two_front_ends_count_together(server: Server) -> None:
    server.start().ready()
    sent = 0
    probes = 2  # steps of requests with which front ends have tried themselves: no other series has these

    def scrape() -> dict[str, float]:
        answer = httpx.get(f"{server.url}/metrics", **LOCAL)
        assert answer.status_code == 200
        return counts(answer.text)

    def both_have_answered() -> bool:
        nonlocal sent
        body = {"inputs": "Hello", "parameters": {"max_new_tokens": 3}}
        for path in ("/generate", "/generate_stream"):
            answer = httpx.post(f"{server.url}{path}", json=body, **LOCAL)
            assert answer.status_code == 200, answer.text + server.said()
            sent += 1
        return all(
            (server.run / "metrics" / f"sums_{process.pid}.db").exists()
            for name, process in server.processes().items()
            if name.startswith("api")
        )

    def check() -> None:
        """Soon: a client has its last token a moment before the books are kept."""
        end = time.monotonic() + 20
        while True:
            try:
                return check_now()
            except (AssertionError, KeyError):
                if time.monotonic() > end:
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
        assert steps["prefill"] == found["tgi_batch_next_size_sum"] == sent + probes
        for what in ("inference", "forward", "filter"):
            assert {m: found[f'tgi_batch_{what}_duration_count{{method="{m}"}}'] for m in steps} == steps
        assert found['tgi_batch_decode_duration_count{method="prefill"}'] == sent + probes
        total = found["tgi_batch_max_total_tokens"]
        assert found["tgi_pages_used"] + found["tgi_pages_free"] == total / 16
        for name in ("tgi_queue_size", "tgi_batch_current_size", "tgi_batch_current_max_tokens", "tgi_pages_used"):
            assert found[name] == 0, name

    server.until(both_have_answered, "both front ends have answered")
    check()
    server.kill("api-0")
    probes += 1
    check()  # by the other one, or by its successor
    server.until(lambda: len(server.processes()) == 6, "all processes run again")
    server.until(both_have_answered, "both front ends have answered")
    check()
    assert scrape()['tgi_process_restarts{role="api"}'] == 1


def test_metrics_are_answered_while_processes_are_replaced(server: Server) -> None:
    server.start().ready()
    over = threading.Event()
    answers: list[str] = []

    def watch() -> None:
        while not over.is_set():
            try:
                answer = httpx.get(f"{server.url}/metrics", **LOCAL)
            except httpx.TransportError:
                continue  # its front end was killed
            assert answer.status_code == 200, answer.text + server.said()
            answers.append(answer.text)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for name in ("api-0", "scheduler-0", "api-1"):
        server.kill(name)
        seen = len(answers)
        server.until(lambda seen=seen: len(answers) > seen + 3, "metrics are answered")
    server.until(lambda: len(server.processes()) == 6, "all processes run again")
    over.set()
    watcher.join(PATIENCE_SECONDS)
    totals = [counts(text).get("tgi_batch_max_total_tokens", 0.0) for text in answers]
    assert len(set(totals)) <= 2  # one scheduler's, or none while it is replaced
    assert not re.search("_created|_total ", answers[-1])
