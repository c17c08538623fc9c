"""Adapters behind a real server with a real model: several in one batch, loaded and unloaded under load, and kept."""

import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.live.server import Server
from tests.models import model
from tests.worker.loras import make_adapter

PROMPT = "The capital of France is"
TOKENS = 24
LONG = 150
CHOICES = (None, "poems", "code")
Answer = list[tuple[int, float]]  # id and logprob of each token


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories of adapters: two to begin with, one for later, and some that are no good."""
    base, store = model("llama"), tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("poems", "code", "new")):
        make_adapter(store / name, base, seed=seed)
    make_adapter(store / "foreign", model("llama", hidden=32), seed=3)
    shutil.copytree(store / "new", store / "cut")
    whole = (store / "cut" / "adapter_model.safetensors").read_bytes()
    (store / "cut" / "adapter_model.safetensors").write_bytes(whole[: len(whole) // 2])
    return store


@pytest.fixture(scope="module")
def server(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    named = f"poems={store / 'poems'}, code={store / 'code'}"
    arguments = ("--model-id", str(model("llama")), "--lora-adapters", named, "--allow-adapter-updates")
    with Server(tmp_path_factory.mktemp("lora") / "run", *arguments) as server:
        yield server.start().ready()


def ask(server: Server, adapter: str | None, tokens: int = TOKENS, **parameters: Any) -> Answer:
    answer = server.generate(PROMPT, max_new_tokens=tokens, adapter_id=adapter, **parameters)
    return [(token["id"], token["logprob"]) for token in answer["details"]["tokens"]]


def load(server: Server, name: str, path: Path) -> tuple[int, dict[str, Any]]:
    reply = server.client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)})
    return reply.status_code, reply.json()


def unload(server: Server, name: str) -> int:
    return server.client.post("/v1/unload_lora_adapter", json={"lora_name": name}).status_code


def listed(server: Server) -> list[str]:
    return [entry["id"] for entry in server.client.get("/v1/models").json()["data"][1:]]


def streams(server: Server, adapters: list[str | None], act: Callable[[], object] = int) -> list[Answer]:
    """A stream for each of these, at once; `act` is called when each has shown some tokens."""
    answers: list[Answer] = [[] for _ in adapters]

    def one(at: int) -> None:
        for event in server.stream(PROMPT, max_new_tokens=LONG, adapter_id=adapters[at]):
            answers[at].append((event["token"]["id"], event["token"]["logprob"]))

    with ThreadPoolExecutor(len(adapters)) as pool:
        running = [pool.submit(one, at) for at in range(len(adapters))]
        server.until(lambda: all(map(len, answers)) or any(stream.done() for stream in running), "tokens of each")
        assert not any(stream.done() for stream in running), "too late to act"
        act()
        for stream in running:
            stream.result()
    return answers


def test_several_share_a_batch_with_the_model_and_answer_as_if_alone(server: Server) -> None:
    assert listed(server) == ["poems", "code"]
    assert server.metric("tgi_adapters_loaded") == 2
    alone = {name: ask(server, name) for name in CHOICES}
    assert len({tuple(token for token, _ in answer) for answer in alone.values()}) == len(CHOICES)
    with ThreadPoolExecutor(12) as pool:
        together = [pool.submit(ask, server, name) for name in CHOICES * 4]
        assert [answer.result() for answer in together] == [alone[name] for name in CHOICES * 4]


def test_model_names_one_on_openais_routes(server: Server) -> None:
    texts = {
        name: server.generate(PROMPT, max_new_tokens=TOKENS, adapter_id=name)["generated_text"] for name in CHOICES
    }
    served = server.client.get("/info").json()["model_id"]
    assert server.client.get("/v1/models").json()["data"][0]["id"] == served
    for model_name, expected in (("poems", "poems"), ("code", "code"), ("gpt-4", None)):
        body = {"model": model_name, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
        answer = server.client.post("/v1/completions", json=body).json()
        assert (answer["choices"][0]["text"], answer["model"]) == (texts[expected], expected or served)
    refused = server.client.post("/generate", json={"inputs": PROMPT, "parameters": {"adapter_id": "gpt-4"}})
    assert (refused.status_code, refused.json()["error"]) == (
        422, "Input validation error: `adapter_id` gpt-4 not found",
    )  # fmt: skip


def test_they_come_and_go_and_nobody_else_notices(server: Server, store: Path) -> None:
    alone = {name: ask(server, name) for name in CHOICES}
    over = threading.Event()

    def others(name: str | None) -> int:
        count = 0
        while not over.is_set():
            assert ask(server, name) == alone[name]
            count += 1
        return count

    with ThreadPoolExecutor(3) as pool:
        asking = [pool.submit(others, name) for name in CHOICES]
        try:
            news = []
            for _ in range(3):
                assert load(server, "new", store / "new")[0] == 200
                news.append(ask(server, "new"))
                assert listed(server) == ["poems", "code", "new"]
                assert unload(server, "new") == 200
                assert unload(server, "new") == 404
                assert listed(server) == ["poems", "code"]
        finally:
            over.set()
        assert all(count.result() for count in asking)
    assert news[0] == news[1] == news[2]
    assert news[0] not in alone.values()


def test_a_stream_keeps_what_is_unloaded_or_replaced_meanwhile(server: Server, store: Path) -> None:
    (want,) = streams(server, ["poems"])

    def replace() -> None:
        assert load(server, "poems", store / "new")[0] == 200

    assert streams(server, ["poems"], replace) == [want]
    assert streams(server, ["poems"]) != [want]
    assert load(server, "poems", store / "poems")[0] == 200
    assert streams(server, ["poems"] * 2, lambda: unload(server, "poems")) == [want, want]
    assert load(server, "poems", store / "poems")[0] == 200
    assert ask(server, "poems") == want[:TOKENS]


@pytest.mark.parametrize(
    ("name", "said"), [("foreign", "shape"), ("cut", "adapter_model.safetensors"), ("none", "adapter_config.json")]
)
def test_what_is_no_good_is_refused_with_the_reason(server: Server, store: Path, name: str, said: str) -> None:
    before = ask(server, "poems")
    status, reply = load(server, name, store / name)
    assert (status, reply["error_type"]) == (422, "adapter_error")
    assert said in reply["error"]["message"]
    assert str(store / name) in reply["error"]["message"]
    assert name not in listed(server)
    assert ask(server, "poems") == before


def test_kill_9_forgets_none(server: Server, store: Path) -> None:
    """The scheduler that takes another's place learns from the worker what the next worker is to load."""
    assert load(server, "new", store / "new")[0] == 200
    assert unload(server, "code") == 200
    adapters = [None, "poems", "new", "new"]
    undisturbed = streams(server, adapters)
    for name in ("scheduler-0", "tokenizer-0", "worker-0"):
        victim, before = server.processes()[name], server.metric("tgi_resumed_tokens")
        assert streams(server, adapters, victim.kill) == undisturbed, name
        assert server.metric("tgi_resumed_tokens") > before, "too late to act"
        assert sorted(listed(server)) == ["new", "poems"]
    assert ask(server, "new") == undisturbed[2][:TOKENS]
    refused = server.client.post("/generate", json={"inputs": PROMPT, "parameters": {"adapter_id": "code"}})
    assert refused.status_code == 422
