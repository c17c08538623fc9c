"""A server of several models: choice by name, loading and unloading, and what one model's faults do to another."""

import gzip
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.live.server import CLIENT_OPTIONS, Server, SharedServers, event_lines
from tests.models import model

pytestmark = pytest.mark.live

LONG = 600  # tokens of a stream in the middle of which something happens


@pytest.fixture(scope="module")
def server(shared_server: SharedServers, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Server:
    """Two of four models may be loaded at once, and two are at start."""
    file = tmp_path_factory.mktemp("models") / "models.toml"
    file.write_text(f"""
        [a]
        model-id = "{tiny_llama}"
        [b]
        model-id = "{model("llama", seed=3)}"
        max-total-tokens = 2000
        [c]
        model-id = "{model("llama", seed=5)}"
        load = "first-use"
        ttl = 1
        ["organization/broken"]
        model-id = "{file.parent}/missing"
        load = "first-use"
    """)
    return shared_server("--models", str(file), "--max-loaded-models", "2", "--validation-workers", "1")


@pytest.fixture(autouse=True)
def loaded(server: Server) -> None:
    """Each test begins with the same models."""
    for name in ("a", "b"):
        assert server.client.post(f"/v1/models/{name}/load").status_code == 200


def ask(server: Server, name: str | None, tokens: int = 8, **more: Any) -> httpx.Response:
    body = {"prompt": "Once", "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}
    return server.client.post("/v1/completions", json=body if name is None else body | {"model": name})


def text(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def states(server: Server) -> dict[str, str]:
    return {one["id"]: one["status"]["value"] for one in server.client.get("/v1/models").json()["data"]}


class Stream:
    """A stream of LONG tokens of a model, which another thread reads."""

    def __init__(self, server: Server, name: str) -> None:
        self.text = ""
        self._url = f"{server.url}/v1/completions"
        self._body = {
            "model": name, "prompt": "Once", "max_tokens": LONG, "temperature": 0, "stream": True, "ignore_eos": True
        }  # fmt: skip
        self._begun = threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self._result = self._pool.submit(self._read)
        self._begun.wait()

    def _read(self) -> None:
        try:
            with httpx.Client(**CLIENT_OPTIONS).stream("POST", self._url, json=self._body) as answer:
                assert answer.status_code == 200, answer.read()
                for line in event_lines(answer):
                    if line.startswith("data: {"):
                        event = json.loads(line[6:])
                        assert "error" not in event, event
                        self.text += event["choices"][0]["text"] if event["choices"] else ""
                        self._begun.set()
        finally:
            self._begun.set()

    @property
    def has_ended(self) -> bool:
        return self._result.done()

    def whole(self) -> str:
        self._result.result()
        self._pool.shutdown()
        return self.text


def test_the_named_model_answers(server: Server) -> None:
    answers = {name: ask(server, name) for name in ("a", "b")}
    assert {name: answer.json()["model"] for name, answer in answers.items()} == {"a": "a", "b": "b"}
    assert text(answers["a"]) != text(answers["b"])
    for name in (None, "tgi", ""):
        assert text(ask(server, name)) == text(answers["a"])
    native = server.client.post(
        "/generate", json={"model": "b", "inputs": "Once", "parameters": {"max_new_tokens": 8, "ignore_eos": True}}
    )
    assert native.json()["generated_text"] == text(answers["b"])
    limits = {name: server.client.get("/info", params={"model": name}).json() for name in ("a", "b")}
    assert (limits["b"]["model_id"], limits["b"]["max_total_tokens"]) == ("b", 2000)
    assert limits["a"]["max_total_tokens"] != 2000


def test_what_cannot_be_served_is_said_in_words(server: Server) -> None:
    unknown = ask(server, "gpt-4")
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "model")
    assert "Served here: a, b, c, organization/broken" in unknown.json()["error"]["message"]
    broken = ask(server, "organization/broken")
    assert broken.status_code == 503
    assert "missing" in broken.json()["error"]["message"]
    (listed,) = (one for one in server.client.get("/v1/models").json()["data"] if one["id"] == "organization/broken")
    assert listed["status"]["value"] == "failed"
    assert "missing" in listed["status"]["error"]
    assert server.client.post("/v1/models/organization/broken/load").status_code == 503
    assert server.client.post("/v1/models/gpt-4/load").status_code == 404
    assert server.client.post("/v1/models/a/burn").status_code == 404
    assert server.client.get("/health").status_code == 200
    assert text(ask(server, "b"))


def test_a_request_waits_for_its_model(server: Server) -> None:
    before = text(ask(server, "b"))
    for act, state in (("/v1/models/b/unload", "unloaded"), ("/sleep?model=b", "sleeping")):
        assert server.client.post(act).status_code == 200
        assert states(server)["b"] == state
        assert server.client.get("/is_sleeping?model=b").json() == {"is_sleeping": state == "sleeping"}
        assert not [name for name in server.processes() if name.startswith("worker")][1:]
        answer = ask(server, "b")
        assert text(answer) == before
        assert answer.headers["x-model-state"] == state
        assert int(answer.headers["x-model-wait"]) > 0
        assert "x-model-wait" not in ask(server, "b").headers
    server.client.post("/sleep")
    assert {states(server)[name] for name in ("a", "b")} == {"sleeping"}
    assert server.client.post("/wake_up").status_code == 200
    assert {states(server)[name] for name in ("a", "b")} == {"loaded"}


def test_a_model_is_not_unloaded_in_the_middle_of_a_request(server: Server) -> None:
    expected = text(ask(server, "b", LONG))
    stream = Stream(server, "b")
    with ThreadPoolExecutor(2) as pool:
        unloaded = pool.submit(server.client.post, "/v1/models/b/unload")
        server.wait_until(lambda: states(server)["b"] != "loaded", "b drains")
        late = pool.submit(ask, server, "b")  # waits until b is loaded again
        assert stream.whole() == expected
        assert unloaded.result().status_code == 200
        assert text(late.result())


def test_the_least_recently_used_makes_room_and_an_idle_one_leaves(server: Server) -> None:
    text(ask(server, "a"))
    text(ask(server, "b"))
    text(ask(server, "c"))
    assert (states(server)["a"], states(server)["b"]) == ("unloaded", "loaded")
    server.wait_until(lambda: states(server)["c"] == "unloaded", "c is unloaded after a second without a request")
    assert text(ask(server, "a"))


def model_processes(server: Server, name: str) -> list[str]:
    """The processes of a model, by what they tell of themselves."""
    files = (server.run_directory / "state").glob("*.json")
    found = (json.loads(file.read_text()) for file in files)
    return [f"{one['role']}-{one['replica']}" for one in found if one["facts"].get("model") == name]


@pytest.mark.parametrize("role", ["worker", "scheduler", "tokenizer"])
def test_the_loss_of_a_process_is_not_seen_by_another_model(server: Server, role: str) -> None:
    expected = {name: text(ask(server, name, LONG)) for name in ("a", "b")}
    before = {name: server.processes()[name].pid for name in model_processes(server, "b")}
    streams = {name: Stream(server, name) for name in ("a", "b")}
    (target,) = (name for name in model_processes(server, "a") if name.startswith(role))
    server.kill(target)
    assert {name: stream.whole() for name, stream in streams.items()} == expected
    assert {name: server.processes()[name].pid for name in model_processes(server, "b")} == before
    assert states(server)["a"] == "loaded"


def test_a_flood_of_one_model_leaves_another_one_alone(server: Server) -> None:
    text(ask(server, "b"))
    flood = [Stream(server, "a") for _ in range(12)]
    text(ask(server, "b"))
    assert not all(stream.has_ended for stream in flood)
    for stream in flood:
        stream.whole()


def test_ps_names_the_model_of_each_process(server: Server) -> None:
    assert {name.split("-")[0] for name in model_processes(server, "b")} == {"tokenizer", "scheduler", "worker"}


def test_bodies_of_any_form_reach_their_model(server: Server) -> None:
    """What names no model, or cannot be read, is answered as by a server of one model."""
    expected = text(ask(server, "b"))
    body = {"model": "b", "prompt": "Once", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    content = json.dumps(body).encode()
    json_type = {"content-type": "application/json"}
    zipped = json_type | {"content-encoding": "gzip"}

    def post(data: Any, headers: dict[str, str] = json_type) -> httpx.Response:
        return server.client.post("/v1/completions", content=data, headers=headers)

    assert text(post(gzip.compress(content), zipped)) == expected
    assert text(post(b"\xef\xbb\xbf" + content)) == expected
    assert text(post(iter([content[:9], content[9:]]))) == expected  # in chunks
    assert text(post(json.dumps(body | {"suffix": None, "user": "x" * 100_000}).encode())) == expected
    assert post(content, {"content-type": "text/plain"}).status_code == 415
    assert post(content[:-1]).status_code == 400
    assert post(gzip.compress(content)[:-9], zipped).status_code == 400
    assert post(b"").status_code == 400
    assert post(b'{"model": 7, "prompt": "a"}').status_code == 422
    assert post(b"[" * 100_000).status_code == 400
    assert post(b" " * 3_000_000).status_code == 413
    assert server.client.get("/v1/completions").status_code == 405
    waits = json_type | {"x-model-wait": "soon"}
    server.client.post("/v1/models/b/unload")
    assert post(content, waits).status_code == 422


def test_a_client_that_leaves_while_its_model_is_loaded(server: Server) -> None:
    server.client.post("/v1/models/b/unload")
    with server.suspended("api-0"), socket.create_connection(("127.0.0.1", server.port)) as client:
        body = b'{"model": "b", "prompt": "Once", "max_tokens": 2000}'
        head = (
            b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        )
        client.sendall(head % len(body) + body)
    assert text(ask(server, "b"))
    server.wait_until(lambda: server.metric("tgi_batch_current_size") == 0, "nothing is computed for it")
    server.client.post("/v1/models/b/unload")  # would wait for a request that used it
    assert states(server)["b"] == "unloaded"


def test_a_batch_of_requests_to_several_models(server: Server) -> None:
    lines: Iterator[str] = (
        json.dumps({"custom_id": name, "method": "POST", "url": "/v1/completions",
                    "body": {"model": name, "prompt": "Once", "max_tokens": 4}})
        for name in ("a", "b", "gpt-4")
    )  # fmt: skip
    file = {"file": ("x.jsonl", "\n".join(lines))}
    kept = server.client.post("/v1/files", files=file, data={"purpose": "batch"}).json()
    order = {"input_file_id": kept["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = server.client.post("/v1/batches", json=order).json()["id"]

    def ended() -> dict[str, Any]:
        found: dict[str, Any] = server.client.get(f"/v1/batches/{batch}").json()
        return found if found["status"] in ("completed", "failed") else {}

    server.wait_until(ended, "the batch has ended")
    assert ended()["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
