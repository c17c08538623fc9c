"""Two clients at one server: the requests of one do not wait for those of the other."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.live.server import CLIENT_OPTIONS, Server

pytestmark = pytest.mark.live

SCRIPTED = (
    "--worker",
    "scripted",
    "--scripted-step-us",
    "10000",
    "--max-total-tokens",
    "8192",
    "--validation-workers",
    "1",
)


class Flood:
    """A client with many requests at once, which run until the block is left."""

    def __init__(self, server: Server, key: str, requests: int, body: dict[str, Any]) -> None:
        self.statuses: list[int] = []  # of the responses that have begun
        self.ended = 0  # streams that have come to their end
        self._server = server
        self._headers = {"authorization": f"Bearer {key}"}
        self._body = body
        self._leaving = threading.Event()
        self._pool = ThreadPoolExecutor(requests)
        for number in range(requests):
            self._pool.submit(self._send, number)

    def _send(self, number: int) -> None:
        options = CLIENT_OPTIONS | {"headers": self._headers, "base_url": self._server.url}
        body = self._body | {"inputs": f"{number} {self._body['inputs']}"}
        with (
            httpx.Client(**options) as client,
            client.stream("POST", "/generate_stream", json=body) as answer,
        ):
            self.statuses.append(answer.status_code)
            for _ in answer.iter_raw():
                if self._leaving.is_set():
                    return
        self.ended += answer.status_code == 200

    def __enter__(self) -> "Flood":
        return self

    def __exit__(self, *_: object) -> None:
        self._leaving.set()
        self._pool.shutdown()


@pytest.fixture
def keys(tmp_path: Path) -> str:
    file = tmp_path / "keys"
    file.write_text("heavy\nlight\nlimited requests=1\n")
    return str(file)


def short_request(server: Server, key: str = "light") -> int:
    body = {"inputs": "short", "parameters": {"max_new_tokens": 3}}
    return server.client.post("/generate", json=body, headers={"authorization": f"Bearer {key}"}).status_code


def test_short_requests_pass_long_generations_of_another_client(tiny_llama: Path, tmp_path: Path, keys: str) -> None:
    flags = ("--model-id", str(tiny_llama), *SCRIPTED, "--max-batch-size", "4", "--api-key-file", keys)
    with Server(tmp_path / "run", *flags) as server:
        server.start().wait_until_ready()
        with Flood(server, "heavy", 12, {"inputs": "long", "parameters": {"max_new_tokens": 8000}}) as flood:
            server.wait_until(lambda: server.metric("tgi_batch_current_size") == 4, "all slots are held")
            server.wait_until(lambda: server.metric("tgi_queue_size") == 8, "the others wait")
            assert [short_request(server) for _ in range(5)] == [200] * 5
            assert flood.ended == 0, "each takes 80 s"
            assert server.metric("tgi_preemptions") >= 1


def test_a_client_that_holds_all_permits_leaves_some_to_others(tiny_llama: Path, tmp_path: Path, keys: str) -> None:
    flags = ("--model-id", str(tiny_llama), *SCRIPTED, "--max-concurrent-requests", "16", "--api-key-file", keys)
    with Server(tmp_path / "run", *flags, "--api-workers", "2") as server:
        server.start().wait_until_ready()
        with Flood(server, "heavy", 40, {"inputs": "long", "parameters": {"max_new_tokens": 8000}}) as flood:
            server.wait_until(lambda: len(flood.statuses) == 40, "all are answered or refused")
            assert flood.statuses.count(200) == 16, "alone it gets all of them, over all front ends"
            assert [short_request(server) for _ in range(20)] == [200] * 20
            assert flood.ended == 0


def test_requests_at_once_of_a_key_are_counted_over_all_front_ends(tiny_llama: Path, tmp_path: Path, keys: str) -> None:
    flags = ("--model-id", str(tiny_llama), *SCRIPTED, "--api-key-file", keys, "--api-workers", "2")
    with Server(tmp_path / "run", *flags) as server:
        server.start().wait_until_ready()
        with Flood(server, "limited", 1, {"inputs": "long", "parameters": {"max_new_tokens": 8000}}) as flood:
            server.wait_until(lambda: flood.statuses == [200], "the first request runs")
            assert [short_request(server, "limited") for _ in range(8)] == [429] * 8
            assert short_request(server) == 200


def test_a_timeout_ends_the_work_everywhere(tiny_llama: Path, tmp_path: Path) -> None:
    with Server(tmp_path / "run", "--model-id", str(tiny_llama), *SCRIPTED, "--max-batch-size", "2") as server:
        server.start().wait_until_ready()
        body = {"inputs": "long", "parameters": {"max_new_tokens": 8000}}
        with ThreadPoolExecutor(4) as pool:
            headers = {"x-request-timeout": "0.5"}
            running = [pool.submit(server.client.post, "/generate", json=body, headers=headers) for _ in range(4)]
            answers = [one.result() for one in running]
        assert {answer.status_code for answer in answers} <= {429, 504}
        assert sum(answer.status_code == 504 for answer in answers) >= 2
        for metric in ("tgi_batch_current_size", "tgi_queue_size"):
            server.wait_until(lambda metric=metric: server.metric(metric) == 0, f"{metric} is 0")
        server.generate("next", max_new_tokens=3)
