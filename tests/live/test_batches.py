"""/v1/files and /v1/batches on a real server with two front ends: what survives which loss, and who comes first."""

import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.live.server import Server

pytestmark = pytest.mark.live

CHAT = "/v1/chat/completions"
SCRIPTED = ("--worker", "scripted", "--scripted-step-us", "10000", "--max-batch-size", "8", "--api-workers", "2")


@pytest.fixture(scope="module")
def server(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("batches") / "run", "--model-id", str(tiny_llama), *SCRIPTED) as server:
        yield server.start().wait_until_ready()


def line(number: int, url: str = CHAT, **body: Any) -> str:
    asked = {"max_tokens": 20, "messages": [{"role": "user", "content": f"Hello {number}"}]} | body
    return json.dumps({"custom_id": f"request {number}", "method": "POST", "url": url, "body": asked})


def upload(server: Server, lines: Sequence[str], **form: str) -> httpx.Response:
    files = {"file": ("in.jsonl", "\n".join(lines).encode())}
    return server.client.post("/v1/files", data={"purpose": "batch"} | form, files=files)


def create(server: Server, lines: Sequence[str], endpoint: str = CHAT, **body: Any) -> dict[str, Any]:
    file = upload(server, lines)
    assert file.status_code == 200, file.text
    asked = {"input_file_id": file.json()["id"], "endpoint": endpoint, "completion_window": "24h"} | body
    answer = server.client.post("/v1/batches", json=asked)
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


def get(server: Server, batch: dict[str, Any]) -> dict[str, Any]:
    """The batch as it is now, from whichever front end accepts connections."""
    while True:
        try:
            answer = server.client.get(f"/v1/batches/{batch['id']}")
        except httpx.TransportError:  # the front end was killed
            continue
        assert answer.status_code == 200, answer.text
        return answer.json()  # type: ignore[no-any-return]


def ended(server: Server, batch: dict[str, Any]) -> dict[str, Any]:
    """The batch once it has ended."""
    live = ("validating", "in_progress", "finalizing", "cancelling")
    server.wait_until(lambda: get(server, batch)["status"] not in live, "the batch has ended", poll_seconds=0.1)
    return get(server, batch)


def results(server: Server, batch: dict[str, Any], kind: str = "output") -> list[dict[str, Any]]:
    if batch[f"{kind}_file_id"] is None:
        return []
    content = server.client.get(f"/v1/files/{batch[f'{kind}_file_id']}/content")
    assert content.status_code == 200, content.text
    return [json.loads(line) for line in content.text.splitlines()]


def answered(server: Server, batch: dict[str, Any], count: int) -> None:
    server.wait_until(lambda: get(server, batch)["request_counts"]["completed"] >= count, f"{count} are answered")


def test_each_request_is_answered_once_while_processes_are_killed(server: Server) -> None:
    count = 400
    batch = create(server, [line(number) for number in range(count)])
    assert batch["status"] == "validating"
    victims = ("worker-0", "scheduler-0", "tokenizer-0", "api-0", "api-1")
    for index, victim in enumerate(victims):
        answered(server, batch, 20 + 40 * index)
        server.kill(victim)
    server.wait_until_ready()
    done = ended(server, batch)
    assert (done["status"], done["error_file_id"]) == ("completed", None)
    assert done["request_counts"] == {"total": count, "completed": count, "failed": 0}
    found = results(server, done)
    assert [one["custom_id"] for one in found] == [f"request {number}" for number in range(count)]
    assert {one["response"]["body"]["usage"]["completion_tokens"] for one in found} == {20}
    assert len({one["id"] for one in found}) == count
