"""The flight recorder: `tgi why` tells where the time of a request went, also after the processes that knew it died."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live.server import Server
from tgi.microkernel.flight_recorder import (
    RING_STAMPS,
    Event,
    RingRecorder,
    explain,
    read_stamps,
    request_key,
    ring_path,
)

STEP_MS = 10


@pytest.fixture(scope="module")
def server(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ("--worker", "scripted", "--scripted-step-us", str(1000 * STEP_MS), "--max-batch-size", "2")
    with Server(tmp_path_factory.mktemp("why") / "run", "--model-id", str(tiny_llama), *options) as server:
        yield server.start().wait_until_ready()


def ask(server: Server, request_id: str, tokens: int) -> str:
    body = {"inputs": "Hello", "parameters": {"max_new_tokens": tokens}}
    answer = server.client.post("/generate", json=body, headers={"x-request-id": request_id} if request_id else {})
    assert answer.status_code == 200, answer.text
    return str(answer.headers["x-request-id"])


def why(server: Server, request_id: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tgi", "why", request_id]
    environment = os.environ | {"TGI_RUN": str(server.run_directory)}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def phases(printed: str) -> dict[str, float]:
    """Milliseconds by phase."""
    lines = printed.split("\n\n")[0].splitlines()
    return {line[:24].strip(): float(line[24:].split()[0]) for line in lines}


def test_the_client_names_the_request_or_gets_a_name(server: Server) -> None:
    assert ask(server, "my-request", 2) == "my-request"
    assert len(ask(server, "", 2)) == 32
    assert len(ask(server, "with a space", 2)) == 32  # replaced: a space is not allowed
    assert server.client.post("/generate", json={"inputs": ""}).headers["x-request-id"]


def test_decode_takes_its_steps(server: Server) -> None:
    ask(server, "decode", 30)
    found = phases(why(server, "decode").stdout)
    assert found["decode"] >= 29 * STEP_MS
    assert found["total"] == pytest.approx(sum(ms for name, ms in found.items() if name != "total"), abs=1)


def test_a_request_that_waits_for_others_has_its_time_in_the_queue(server: Server) -> None:
    threads = [threading.Thread(target=ask, args=(server, f"long-{number}", 200)) for number in range(2)]
    for thread in threads:
        thread.start()
    server.wait_until(lambda: server.metric("tgi_batch_current_size") == 2, "both run")
    ask(server, "waits", 2)
    for thread in threads:
        thread.join()
    printed = why(server, "waits").stdout
    found = phases(printed)
    assert found["queue"] > found["total"] / 2, printed
    assert "queued: 0 requests waited before it, 2 ran" in printed


def test_losses_are_told_although_the_processes_are_gone(server: Server) -> None:
    thread = threading.Thread(target=ask, args=(server, "unlucky", 600))
    thread.start()
    server.wait_until(lambda: server.metric("tgi_batch_current_size") == 1, "it runs")
    server.kill("worker-0")
    key = request_key("unlucky")

    def stamped(event: Event) -> list[str]:
        return [stamp.process for stamp in read_stamps(server.run_directory, key) if stamp.event is event]

    server.wait_until(lambda: stamped(Event.WORKER_LOST), "the loss is stamped")
    (tokenizer,) = stamped(Event.TOKENIZED)
    server.kill(tokenizer)
    thread.join()
    printed = why(server, "unlucky").stdout
    assert "the tokenizer was lost: sent to tokenizer-" in printed
    assert "recovery of the worker" in phases(printed)
    assert "ended with 600 tokens" in printed


def test_an_unknown_request_is_one_sentence(server: Server) -> None:
    printed = why(server, "never")
    assert printed.returncode != 0
    assert "No process remembers" in printed.stderr
    assert "Traceback" not in printed.stderr


def test_without_a_file_nothing_is_recorded_and_the_process_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "flight").write_text("in the way of the directory")
    recorder = RingRecorder(ring_path(tmp_path, "api-0"))
    recorder.stamp(Event.RECEIVED, key=1, index=0)
    assert "`tgi why` will not know" in caplog.text


def test_a_ring_keeps_the_latest_stamps_and_continues_after_a_restart(tmp_path: Path) -> None:
    path = ring_path(tmp_path, "api-0")
    first = RingRecorder(path)
    for number in range(RING_STAMPS + 10):
        first.stamp(Event.RECEIVED, key=1 + number, index=0)
    first.close()
    second = RingRecorder(path)
    second.stamp(Event.ANSWERED, key=RING_STAMPS + 10, index=0, b=7)
    assert not read_stamps(tmp_path, 5)
    stamps = read_stamps(tmp_path, RING_STAMPS + 10)
    assert [stamp.event for stamp in stamps] == [Event.RECEIVED, Event.ANSWERED]
    assert explain(stamps)[-1].endswith("ended with 7 tokens")
