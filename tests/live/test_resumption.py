"""Streams whose clients come back with Last-Event-ID, with real processes: no event is lost, repeated or different."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.certificates import make_certificate
from tests.live.server import CLIENT_OPTIONS, TIMEOUT_SECONDS, Server, SharedServers, event_lines
from tests.live.test_tools import REQUEST as TOOL_REQUEST
from tests.live.test_tools import TEMPLATE
from tests.models import model

pytestmark = pytest.mark.live

SCRIPTED = ("--worker", "scripted", "--scripted-step-us", "20000", "--api-workers", "2", "--resume-window")
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 40, "min_tokens": 12, "stream": True}

# Route and body of each kind of stream. Seeds are drawn by the server where the body has none. Whatever the seed, there
# are at least twelve tokens: the tests choose events by number.
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "native": (
        "/generate_stream",
        {
            "inputs": "Hi",
            "parameters": {
                "max_new_tokens": 60, "min_new_tokens": 12, "do_sample": True, "details": True, "top_n_tokens": 3,
            },
        },
    ),
    "completion": (
        "/v1/completions",
        {"prompt": "Hello", "max_tokens": 40, "min_tokens": 12, "stop": ["qqq"], "stream": True},
    ),
    "completions": (
        "/v1/completions",
        {
            "prompt": ["Hello", "Good morning"], "n": 2, "max_tokens": 40, "min_tokens": 12, "logprobs": 2,
            "echo": True, "stream": True, "stream_options": {"include_usage": True},
        },
    ),
    "chat": ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2}),
    "chat with choices": ("/v1/chat/completions", CHAT | {"n": 3, "stream_options": {"include_usage": True}}),
    "tools": ("/v1/chat/completions", TOOL_REQUEST | {"stream": True}),
    "tools with choices": ("/v1/chat/completions", TOOL_REQUEST | {"stream": True, "n": 2, "logprobs": True}),
}  # fmt: skip


class Event(NamedTuple):
    """One server-sent event."""

    id: str
    data: str

    @property
    def choice(self) -> int | None:
        """The index of its choice; None: an event of the whole response."""
        found = json.loads(self.data) if self.data != "[DONE]" else {"choices": []}
        return next((each["index"] for each in found.get("choices", [{"index": 0}])), None)


def stream(server: Server, kind: str, last_event: str | None = None, **changes: Any) -> Iterator[Event]:
    """The events of a request over a connection of its own."""
    path, body = REQUESTS[kind]
    headers = {} if last_event is None else {"last-event-id": last_event}
    with httpx.stream("POST", f"{server.url}{path}", json=body | changes, headers=headers, **CLIENT_OPTIONS) as answer:
        assert answer.status_code == 200, answer.read()
        event_id = ""
        for line in event_lines(answer):
            if line.startswith("id: "):
                event_id = line[4:]
            elif line.startswith("data: "):
                yield Event(event_id, line[6:])


def until_served(begin: Callable[[], list[Event]]) -> list[Event]:
    """Retries while no front end accepts connections."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while True:
        try:
            return begin()
        except (httpx.TransportError, AssertionError):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def by_choice(events: list[Event]) -> dict[int | None, list[str]]:
    """The data of the events of each choice. The order between choices is not defined: it depends on time."""
    return {choice: [e.data for e in events if e.choice == choice] for choice in {e.choice for e in events}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a random model, which generates logprobs, top tokens and tool calls."""
    directory = tmp_path_factory.mktemp("resumption")
    template = directory / "hermes.jinja"
    template.write_text(TEMPLATE)
    options = ("--dtype", "float32", "--tokenizer-config-path", str(template), "--api-workers", "2")
    options += ("--log-level", "info,tgi.tokenizer.resumable_streams=debug")
    with Server(directory / "run", "--model-id", str(model("llama")), *options, "--resume-window", "60") as server:
        yield server.start().wait_until_ready()


@pytest.mark.parametrize("kind", REQUESTS)
def test_a_stream_continues_after_any_event(server: Server, kind: str) -> None:
    whole = list(stream(server, kind))
    assert len({event.id for event in whole}) == len(whole)
    assert "" not in {event.id for event in whole}
    for at in {0, 1, 2, len(whole) // 2, len(whole) - 3, len(whole) - 2, len(whole) - 1}:
        rest = list(stream(server, kind, whole[at].id))
        assert by_choice(whole[: at + 1] + rest) == by_choice(whole)
        if None not in by_choice(whole) and len(by_choice(whole)) == 1:
            assert rest == whole[at + 1 :]


@pytest.mark.parametrize("kind", REQUESTS)
def test_a_client_that_leaves_continues_where_it_was(server: Server, kind: str) -> None:
    received: list[Event] = []
    while True:
        last_event = received[-1].id if received else None
        attempt = stream(server, kind, last_event)
        before = len(received)
        for event in attempt:
            received.append(event)
            if len(received) == before + 7:
                break
        else:
            break
        attempt.close()
    again = list(stream(server, kind, received[0].id))
    assert '"cannot_resume"' not in again[0].data, (received[0], server.output_text())
    assert by_choice(received[:1] + again) == by_choice(received)


@pytest.mark.parametrize("kind", ["native", "completions", "chat with choices", "tools with choices"])
def test_without_the_kept_stream_it_is_generated_again(server: Server, kind: str) -> None:
    whole = list(stream(server, kind))
    for name in ("tokenizer-0", "tokenizer-1"):
        server.kill(name)
    server.wait_until_ready()
    rest = list(stream(server, kind, whole[5].id))
    assert by_choice(whole[:6] + rest) == by_choice(whole)


def test_events_that_cannot_be_repeated(server: Server) -> None:
    whole = list(stream(server, "completion", seed=1))
    answer = list(stream(server, "completion", whole[9].id, seed=1, logprobs=0))
    assert json.loads(answer[0].data)["error"]["code"] == 410
    with pytest.raises(AssertionError, match="cannot be resumed"):
        list(stream(server, "completions", whole[9].id))
    for invalid in ("17", f"{whole[0].id}x", whole[0].id.upper(), "0" * 40):
        with pytest.raises(AssertionError, match="is not the id of an event of this server"):
            list(stream(server, "completion", invalid))


@pytest.mark.parametrize("kind", ["native", "completions", "chat with choices"])
def test_streams_survive_the_death_of_their_front_end(
    tiny_llama: Path, shared_server: SharedServers, kind: str
) -> None:
    """Both front ends die: the one that the stream is on, and the one that the client turns to next."""
    server = shared_server("--model-id", str(tiny_llama), *SCRIPTED, "60")
    received: list[Event] = []
    for _ in range(3):

        def attempt(count: int = len(received) + 10) -> list[Event]:
            for event in stream(server, kind, received[-1].id if received else None):
                received.append(event)
                if len(received) == count:
                    break
            return received

        until_served(attempt)
        for name in ("api-0", "api-1"):
            server.kill(name)
    rest = until_served(lambda: list(stream(server, kind, received[-1].id)))
    whole = received + rest
    again = until_served(lambda: list(stream(server, kind, whole[0].id)))
    assert by_choice(whole[:1] + again) == by_choice(whole)
    assert whole[-1].data == "[DONE]" or json.loads(whole[-1].data)["generated_text"]


def test_streams_over_tls_continue_at_another_front_end(tiny_llama: Path, tmp_path: Path) -> None:
    used = make_certificate(tmp_path, "used")
    tls = ("--ssl-certfile", str(used.certfile), "--ssl-keyfile", str(used.keyfile))
    with Server(tmp_path / "run", "--model-id", str(tiny_llama), *SCRIPTED, "60", *tls) as server:
        assert server.start().wait_until_ready().url.startswith("https:")
        received: list[Event] = []
        with contextlib.suppress(httpx.TransportError):
            for event in stream(server, "completions"):
                received.append(event)
                if len(received) == 30:
                    for name in ("api-0", "api-1"):
                        server.kill(name)

        def attempt() -> list[Event]:
            for event in stream(server, "completions", received[-1].id):
                received.append(event)
                if len(received) >= 80:
                    break  # the client closes the connection
            return received

        until_served(attempt)
        whole = received + list(stream(server, "completions", received[-1].id))
        again = list(stream(server, "completions", whole[0].id))
        assert by_choice(whole[:1] + again) == by_choice(whole)
        assert whole[-1].data == "[DONE]"
        assert 80 <= len(received) < len(whole)


def test_an_abandoned_stream_ends_after_its_window(tiny_llama: Path, tmp_path: Path) -> None:
    with Server(tmp_path / "run", "--model-id", str(tiny_llama), *SCRIPTED, "3") as server:
        server.start().wait_until_ready()
        begun = stream(server, "completion", max_tokens=1900)
        next(begun)
        begun.close()
        server.wait_until(lambda: server.metric("tgi_request_failure"), "the front end has seen the disconnect")
        assert server.metric("tgi_batch_current_size") >= 1  # with the readiness probe of the other front end
        server.wait_until(lambda: server.metric("tgi_batch_current_size") == 0, "the stream has ended")


def test_events_have_no_ids_by_default(tiny_llama: Path, shared_server: SharedServers) -> None:
    server = shared_server("--model-id", str(tiny_llama), *SCRIPTED[:4])
    assert {event.id for event in stream(server, "completion", last_event="17")} == {""}
