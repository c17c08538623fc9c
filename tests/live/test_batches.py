"""/v1/files and /v1/batches on a real server with two front ends: what survives which loss, and who comes first."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
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
    count = 300
    batch = create(server, [line(number) for number in range(count)])
    assert batch["status"] == "validating"
    targets = ("worker-0", "scheduler-0", "tokenizer-0", "api-0", "api-1")
    for index, target in enumerate(targets):
        answered(server, batch, 20 + 40 * index)
        server.kill(target)
    server.wait_until_ready()
    done = ended(server, batch)
    assert (done["status"], done["error_file_id"]) == ("completed", None)
    assert done["request_counts"] == {"total": count, "completed": count, "failed": 0}
    found = results(server, done)
    assert [one["custom_id"] for one in found] == [f"request {number}" for number in range(count)]
    assert {one["response"]["body"]["usage"]["completion_tokens"] for one in found} == {20}
    assert len({one["id"] for one in found}) == count


def test_interactive_requests_come_before_those_of_a_batch(server: Server) -> None:
    """A batch that has all slots gives one up: a request that arrives later is answered before any of the batch."""
    server.wait_until_ready()
    batch = create(server, [line(number, max_tokens=4000, ignore_eos=True) for number in range(30)])
    server.wait_until(lambda: running(server) == 8, "the batch has all slots")
    assert server.generate("Hello", max_new_tokens=20)["details"]["generated_tokens"] == 20
    assert get(server, batch)["request_counts"]["completed"] == 0
    cancelled = server.client.post(f"/v1/batches/{batch['id']}/cancel")
    assert cancelled.json()["status"] == "cancelling"
    done = ended(server, batch)
    found = results(server, done) + results(server, done, "error")
    assert done["status"] == "cancelled"
    assert sorted(one["custom_id"] for one in found) == sorted(f"request {number}" for number in range(30))


def running(server: Server) -> int:
    """Requests that have a slot."""
    lines = server.client.get("/metrics").text.splitlines()
    return int(sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("tgi_batch_current_size ")))


def batch_command(server: Server, source: Path, output: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "tgi", "batch", str(source), str(output), *arguments]


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGKILL])
def test_the_command_goes_on_where_it_was_ended(server: Server, tmp_path: Path, signal_number: int) -> None:
    server.wait_until_ready()
    lines = [line(number, max_tokens=30) for number in range(100)]
    lines[3:3] = ["", "{no JSON", line(900, url="/metrics"), line(901, max_tokens=0)]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(lines))
    part = tmp_path / "out.jsonl.part"
    command = batch_command(server, source, output, "--url", f"{server.url}/v1", "--concurrency", "16")
    # Where the tests run in the background, they ignore SIGINT, which a child inherits.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    first = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=server.environment, preexec_fn=heed)
    server.wait_until(lambda: part.exists() and part.read_bytes().count(b"\n") > 20, "some are answered")
    first.send_signal(signal_number)
    first.communicate(timeout=60)
    assert not output.exists()
    before = part.read_bytes().count(b"\n") - 1
    with part.open("ab") as file:
        file.write(b'{"number": 7, "res')  # as if it was killed while it wrote
    second = subprocess.run(command, capture_output=True, text=True, env=server.environment)
    assert second.returncode == 0, second.stderr
    assert "100 of 103 requests are answered, 3 have failed" in second.stderr
    assert 20 <= before < 103
    found = [json.loads(text) for text in output.read_text().splitlines()]
    names = [f"request {number}" for number in range(100)]
    names[3:3] = ["", "request 900", "request 901"]
    assert [one["custom_id"] for one in found] == names
    assert [one["error"] and one["error"]["code"] for one in found[3:5]] == ["invalid_request", "invalid_url"]
    assert found[5]["response"]["status_code"] == 422
    assert not part.exists()
    third = subprocess.run(command, capture_output=True, text=True, env=server.environment)
    assert (third.returncode, "exists" in third.stderr) == (1, True)


def test_the_command_starts_a_server_itself(tiny_llama: Path, server: Server, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(line(0))
    command = batch_command(server, source, output, str(tiny_llama))
    wrong = subprocess.run([*command, "--worker", "none"], capture_output=True, text=True, env=server.environment)
    assert (wrong.returncode, "Invalid value for '--worker'" in wrong.stderr) == (1, True), wrong.stderr
    done = subprocess.run([*command, "--worker", "scripted"], capture_output=True, text=True, env=server.environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(output.read_text())["response"]["body"]["usage"]["completion_tokens"] == 20
