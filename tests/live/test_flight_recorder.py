"""The flight recorder: `tgi why` tells where the time of a request went, also after the processes that knew it died."""

import json
import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.live import commands
from tests.live.server import Server, event_lines
from tgi.microkernel.messages.protocol import RequestContext
from tgi.microkernel.observability.flight_recorder import (
    RING_STAMPS,
    Event,
    RingRecorder,
    find_requests,
    read_stamps,
    ring_path,
)
from tgi.microkernel.observability.request_timeline import explain

pytestmark = pytest.mark.live

STEP_MS = 10


@pytest.fixture(scope="module")
def server(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ("--worker", "scripted", "--scripted-step-us", str(1000 * STEP_MS), "--max-batch-size", "2")
    options += ("--trusted-proxies", "127.0.0.1", "--resume-window", "20")
    with Server(tmp_path_factory.mktemp("why") / "run", "--model-id", str(tiny_llama), *options) as server:
        yield server.start().wait_until_ready()


def ask(server: Server, request_id: str, tokens: int, address: str = "192.0.2.1") -> str:
    body = {"inputs": "Hello", "parameters": {"max_new_tokens": tokens}}
    headers = {"x-forwarded-for": address} | ({"x-request-id": request_id} if request_id else {})
    answer = server.client.post("/generate", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return str(answer.headers["x-request-id"])


def why(server: Server, request_id: str) -> subprocess.CompletedProcess[str]:
    return commands.run("why", request_id, TGI_RUN=str(server.run_directory))


def phases(printed: str) -> dict[str, float]:
    """Milliseconds by phase."""
    lines = printed.split("\n\n")[0].splitlines()
    return {line[:26].strip(): float(line[26:].split()[0]) for line in lines}


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
    addresses = ("192.0.2.1", "198.51.100.7")
    threads = [threading.Thread(target=ask, args=(server, f"long-{one}", 200, one)) for one in addresses]
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
    assert "2 ran when it began to wait" in printed
    own = re.search(r"1 of 192.0.2.1, its own client: (\w{16})", printed)
    other = re.search(r"1 of 198.51.100.7: (\w{16})", printed)
    assert own is not None, printed
    assert other is not None, printed
    assert "received from 198.51.100.7" in why(server, other[1]).stdout  # an id that it prints is one that it takes


CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
COMPLETION = {"prompt": "Hello", "max_tokens": 3}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", COMPLETION),
        ("/v1/completions", COMPLETION | {"n": 2}),
        ("/invocations", CHAT),
        ("/invocations", COMPLETION),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_the_id_of_a_body_is_an_id(server: Server, path: str, body: dict[str, Any], stream: bool) -> None:
    answer = server.client.post(path, json=body | {"stream": stream}, headers={"x-request-id": "the same for all"})
    assert answer.status_code == 200, answer.text
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    (identity,) = {event["id"] for event in (events if stream else [answer.json()])}
    printed = why(server, identity).stdout
    assert printed.count("received from 127.0.0.1") == body.get("n", 1), printed
    assert "ended with 3 tokens" in printed


def test_each_instance_of_a_request_is_told(server: Server) -> None:
    body = {"instances": [{"inputs": "Hello", "parameters": {"max_new_tokens": 2}}, CHAT]}
    answer = server.client.post("/vertex", json=body, headers={"x-request-id": "instances"})
    assert answer.status_code == 200, answer.text
    first, second = why(server, "instances").stdout.split("\nGeneration 1\n")
    assert "ended with 2 tokens" in first
    assert "ended with 3 tokens" in second


def test_a_resumed_stream_keeps_its_id(server: Server) -> None:
    body, events = CHAT | {"max_tokens": 60, "stream": True}, []
    with server.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        for line in event_lines(answer):
            events.append(line)
            if len([one for one in events if one.startswith("data:")]) == 10:
                break
    (last, *_) = [one.removeprefix("id: ") for one in reversed(events) if one.startswith("id:")]
    (identity,) = {json.loads(one[6:])["id"] for one in events if one.startswith("data:")}
    headers = {"last-event-id": last, "x-request-id": "resumed"}
    rest = server.client.post("/v1/chat/completions", json=body, headers=headers)
    assert identity in rest.text
    printed = why(server, identity).stdout
    assert printed == why(server, "resumed").stdout
    assert printed.count("received from 127.0.0.1") == 2, printed
    assert "the client has disconnected" in printed
    assert "ended with 60 tokens" in printed
    found = phases(printed)
    assert found["total"] == pytest.approx(sum(ms for name, ms in found.items() if name != "total"), abs=1), printed


def test_losses_are_told_although_the_processes_are_gone(server: Server) -> None:
    thread = threading.Thread(target=ask, args=(server, "unlucky", 600))
    thread.start()
    server.wait_until(lambda: server.metric("tgi_batch_current_size") == 1, "it runs")
    server.kill("worker-0")

    def stamped(event: Event) -> list[str]:
        stamps = read_stamps(server.run_directory)
        (key,) = find_requests(stamps, "unlucky")
        return [stamp.process for stamp in stamps if stamp.key == key and stamp.event is event]

    server.wait_until(lambda: stamped(Event.WORKER_LOST), "the loss is stamped")
    (tokenizer,) = stamped(Event.TOKENIZED)
    server.kill(tokenizer)
    thread.join()
    printed = why(server, "unlucky").stdout
    assert f"{tokenizer} was lost" in printed
    assert f"recovery of {tokenizer}" in phases(printed)
    assert "recovery of worker-0" in phases(printed)
    assert "ended with 600 tokens" in printed


def test_the_loss_of_the_scheduler_is_told(server: Server) -> None:
    thread = threading.Thread(target=ask, args=(server, "moved", 200))
    thread.start()
    server.wait_until(lambda: server.metric("tgi_batch_current_size") == 1, "it runs")
    server.kill("scheduler-0")
    thread.join()
    printed = why(server, "moved").stdout
    found = phases(printed)
    assert "recovery of scheduler-0" in found, printed
    assert found["total"] == pytest.approx(sum(ms for name, ms in found.items() if name != "total"), abs=1)


def test_requests_with_the_same_header_are_told_one_by_one(server: Server) -> None:
    for _ in range(2):
        ask(server, "twice", 2)
    printed = why(server, "twice").stdout
    assert printed.count("of 2 with this id") == printed.count("ended with 2 tokens") == 2, printed


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
    recorder.stamp(Event.RECEIVED, RequestContext(request_key=7))
    assert "`tgi why` will not know" in caplog.text


def test_a_ring_keeps_the_latest_stamps_and_continues_after_a_restart(tmp_path: Path) -> None:
    path = ring_path(tmp_path, "api-0")
    first = RingRecorder(path)
    for number in range(RING_STAMPS + 10):
        first.stamp(Event.RECEIVED, RequestContext(request_key=1 + number))
    first.close()
    second = RingRecorder(path)
    second.stamp(Event.ANSWERED, RequestContext(request_key=RING_STAMPS + 10), b=7)
    stamps = read_stamps(tmp_path)
    assert len(stamps) == RING_STAMPS
    assert [stamp.event for stamp in stamps if stamp.key == RING_STAMPS + 10] == [Event.RECEIVED, Event.ANSWERED]
    assert [*explain(stamps, RING_STAMPS + 10)][-1].endswith("ended with 7 tokens")
