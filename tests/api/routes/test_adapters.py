"""Adapters on all routes: in requests, in the list of models, loading and unloading."""

import json
from typing import Any

import pytest

from tests.api.conftest import READY, Front, Stream, openai_error, standard, two_tokens
from tgi.microkernel.messages.protocol import AdapterUpdated, Generate, LoadedAdapter, UpdateAdapter

pytestmark = pytest.mark.slow

POEMS, CODE = LoadedAdapter("poems", "/lora/poems", b"\1" * 16), LoadedAdapter("org/code", "/lora/code", b"\2" * 16)
CHAT = {"messages": [{"role": "user", "content": "x"}]}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture
def serve_adapters(serve: Any) -> Any:
    """Starts a front end with two adapters loaded."""

    def start(*answer: Any, **settings: Any) -> Front:
        front: Front = serve(*answer, up=False, **settings)
        front.tokenizers[0].start(READY._replace(adapters=[POEMS, CODE]))
        front.until_ready()
        return front

    return start


def asked(front: Front) -> tuple[str, bytes]:
    """The adapter of the latest generation."""
    sampling = front.tokenizers[0].next(Generate).sampling
    return sampling.adapter, sampling.adapter_digest


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"inputs": "x", "parameters": {"adapter_id": "poems"}}),
        ("/generate_stream", {"inputs": "x", "parameters": {"adapter_id": "poems"}}),
        ("/", {"inputs": "x", "parameters": {"adapter_id": "poems"}, "stream": True}),
        ("/invocations", {"inputs": "x", "parameters": {"adapter_id": "poems"}}),
        ("/invocations", CHAT | {"model": "poems"}),
        ("/vertex", {"instances": [{"inputs": "x", "parameters": {"adapter_id": "poems"}}]}),
        ("/vertex", {"instances": [CHAT | {"model": "poems"}]}),
        ("/v1/chat/completions", CHAT | {"model": "poems"}),
        ("/v1/completions", {"prompt": "x", "model": "poems", "stream": True}),
        (
            "/v2/models/m/versions/1/infer",
            {
                "id": "1",
                "inputs": [{"name": "a", "shape": [1], "datatype": "BYTES", "data": [120]}],
                "outputs": [{"name": "b"}],
                "parameters": {"adapter_id": "poems"},
            },
        ),
    ],
)
def test_every_generation_route_accepts_an_adapter(serve_adapters: Any, path: str, body: dict[str, Any]) -> None:
    front = serve_adapters(kserve=True)
    assert front.post(path, json.dumps(body)).status == 200
    assert asked(front) == ("poems", POEMS.digest)


@pytest.mark.parametrize("name", ["Poems", "poems ", "", "m", "{ask}"])
def test_an_unknown_adapter_is_rejected_on_native_routes_and_means_the_model_on_openais(
    serve_adapters: Any, name: str
) -> None:
    front = serve_adapters()
    for path in ("/generate", "/generate_stream"):
        reply = front.post(path, json.dumps({"inputs": "x", "parameters": {"adapter_id": name}}))
        text = f"Input validation error: `adapter_id` {name} not found"
        assert (reply.status, json.loads(reply.body)) == (422, {"error": text, "error_type": "validation"})
    assert front.post("/v1/completions", json.dumps({"prompt": "x", "model": name})).status == 200
    assert asked(front) == ("", b"")


def test_responses_name_the_adapter(serve_adapters: Any) -> None:
    front = serve_adapters()
    for name, echoed in (("poems", "poems"), ("org/code", "org/code"), ("tgi", "m"), ("gpt-4o", "m"), (None, "m")):
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "x"})):
            whole = front.post(path, json.dumps(body | {"model": name}))
            assert json.loads(whole.body)["model"] == echoed
            streamed = front.post(path, json.dumps(body | {"model": name, "stream": True}))
            events = [json.loads(event.removeprefix(b"data: ")) for event in streamed.body.split(b"\n\n")[:-2]]
            assert {event["model"] for event in events} == {echoed}


def test_adapters_are_listed_after_the_model(serve_adapters: Any) -> None:
    front = serve_adapters()
    models = [{"id": name, "object": "model", "created": 0, "owned_by": "m"} for name in ("m", "poems", "org/code")]
    assert json.loads(front.get("/v1/models").body) == {"object": "list", "data": models}
    for model in models:
        assert json.loads(front.get(f"/v1/models/{model['id']}").body) == model
    front.tokenizers[0].send(READY._replace(limits=None))  # without limits the adapters are ignored
    front.tokenizers[0].send(READY._replace(adapters=[CODE]))
    while len(front.router.adapters) == 2:
        assert front.get("/v1/models/org/code").status == 200
    assert front.get("/v1/models/poems").status == 404


def test_a_resumed_stream_keeps_its_adapter(serve_adapters: Any) -> None:
    front = serve_adapters(lambda message: None)
    tokenizer = front.tokenizers[0]
    stream = Stream(front, body='{"inputs":"x","parameters":{"adapter_id":"poems"}}')
    first = tokenizer.next(Generate)
    tokenizer.send(two_tokens(first)[0])
    stream.read_until(b'"index":1')
    tokenizer.stop()
    tokenizer.start(READY._replace(adapters=[POEMS._replace(digest=b"\3" * 16)]))
    again = tokenizer.next(Generate)
    assert again.sampling == first.sampling
    tokenizer.send(*two_tokens(again)[1:])
    assert stream.read_rest().status == 200


# Loading and unloading


def load(name: Any = "new", path: Any = "/lora/new") -> str:
    return json.dumps({"lora_name": name, "lora_path": path})


def test_adapters_are_loaded_and_unloaded(serve_adapters: Any) -> None:
    new = LoadedAdapter("new", "/lora/new", b"\4" * 16)

    def answer(message: Any) -> list[Any]:
        if not isinstance(message, UpdateAdapter):
            return standard(message)
        return [READY._replace(adapters=[POEMS, new] if message.path else [POEMS]), AdapterUpdated(message.rid)]

    front = serve_adapters(answer, allow_adapter_updates=True)
    reply = front.post(LOAD, load())
    assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
    assert reply.body == b'{"id":"new","object":"model","created":0,"owned_by":"m"}'
    assert front.tokenizers[0].next(UpdateAdapter)[1:3] == ("new", "/lora/new")
    assert front.post("/generate", '{"inputs":"x","parameters":{"adapter_id":"new"}}').status == 200
    assert asked(front) == ("new", new.digest)
    reply = front.post(UNLOAD, '{"lora_name":"new"}')
    assert (reply.status, reply.body) == (200, b'{"id":"new","object":"model","deleted":true}')
    assert front.tokenizers[0].next(UpdateAdapter)[1:3] == ("new", "")
    assert front.post("/generate", '{"inputs":"x","parameters":{"adapter_id":"new"}}').status == 422
    again = front.post(UNLOAD, '{"lora_name":"new"}')
    assert (again.status, json.loads(again.body)["error_type"]) == (404, "not_found")
    assert front.router.in_flight == 0


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (load(""), "`lora_name` must have 1 to 256 printable characters"),
        (load("x" * 257), "`lora_name` must have 1 to 256 printable characters"),
        (load("a\nb"), "`lora_name` must have 1 to 256 printable characters"),
        (load("tgi"), "`lora_name` tgi is what the base model is called"),
        (load("m"), "`lora_name` m is what the base model is called"),
        (load(path="lora/new"), "`lora_path` must be the absolute path of a directory on the server's host. "),
        (load(path="owner/name"), "Adapters of the Hub are loaded at start, with --lora-adapters"),
        (load(path="/a\0b"), "`lora_path` must be the absolute path"),
        (load(path=""), "`lora_path` must be the absolute path"),
    ],
)
def test_invalid_names_and_paths_are_rejected(serve_adapters: Any, body: str, text: str) -> None:
    front = serve_adapters(allow_adapter_updates=True)
    reply = front.post(LOAD, body)
    assert (reply.status, json.loads(reply.body)["error_type"]) == (422, "validation")
    error = json.loads(reply.body)["error"]
    assert text in error["message"]
    assert error["param"] in error["message"]


def test_the_error_has_the_workers_reason(serve_adapters: Any) -> None:
    front = serve_adapters(lambda message: [AdapterUpdated(message.rid, "its rank is 0")], allow_adapter_updates=True)
    for path, body in ((LOAD, load()), (UNLOAD, '{"lora_name":"poems"}')):
        reply = front.post(path, body)
        assert reply.status == 422
        assert json.loads(reply.body) == openai_error(422, "adapter_error", "Adapter error: its rank is 0")


@pytest.mark.parametrize(
    ("settings", "status"),
    [({}, 403), ({"allow_adapter_updates": True, "api_key": ("k",)}, 401), ({"allow_adapter_updates": True}, 503)],
)
def test_updates_need_the_flag_the_key_and_a_ready_server(serve: Any, settings: dict[str, Any], status: int) -> None:
    front = serve(up=status != 503, **settings)
    for path in (LOAD, UNLOAD):
        reply = front.post(path, load("poems"))
        assert reply.status == status
        if status == 403:
            assert json.loads(reply.body)["error_type"] == "forbidden"
            assert "--allow-adapter-updates" in json.loads(reply.body)["error"]["message"]
    if status == 401:
        assert front.post(LOAD, load(), authorization="Bearer k").status == 200


def test_an_update_is_resubmitted_after_each_tokenizer_loss(serve_adapters: Any) -> None:
    front = serve_adapters(lambda message: None, allow_adapter_updates=True)
    tokenizer = front.tokenizers[0]
    stream = Stream(front, LOAD, load())
    for _ in range(5):
        assert tokenizer.next(UpdateAdapter)[1:3] == ("new", "/lora/new")
        tokenizer.stop()
        tokenizer.start()
    tokenizer.send(AdapterUpdated(tokenizer.next(UpdateAdapter).rid))
    assert stream.read_rest().status == 200


# Tokenizers of several hosts


def test_adapters_of_all_hosts_are_listed_and_requests_go_where_they_are(serve: Any) -> None:
    front = serve(standard, up=False, validation_workers=2)
    for tokenizer, adapter in zip(front.tokenizers, (POEMS, CODE), strict=True):
        tokenizer.site = f"host of {adapter.name}"
        tokenizer.start(READY._replace(adapters=[adapter]))
    front.until_ready()
    assert {model["id"] for model in json.loads(front.get("/v1/models").body)["data"]} == {"m", "poems", "org/code"}
    for _ in range(3):
        for tokenizer, name in zip(front.tokenizers, ("poems", "org/code"), strict=True):
            body = json.dumps({"inputs": "x", "parameters": {"adapter_id": name}})
            assert front.post("/generate", body).status == 200
            assert tokenizer.next(Generate).sampling.adapter == name
