"""LoRA adapters through a whole server: several in one batch, loaded and unloaded under load, restored after kills."""

import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.live.server import MAX_ATTEMPTS, Server
from tests.models import model, write_adapter

pytestmark = pytest.mark.live

PROMPT = "The capital of France is"
TOKENS = 24
LONG = 150
CHOICES = (None, "poems", "code")
Answer = list[tuple[int, float]]  # id and logprob of each token


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories of adapters: two that are preloaded, one that is loaded later, and two that cannot be loaded."""
    base, store = model("llama"), tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("poems", "code", "new")):
        write_adapter(store / name, base, seed=seed)
    write_adapter(store / "foreign", model("llama", hidden=32), seed=3)
    shutil.copytree(store / "new", store / "cut")
    whole = (store / "cut" / "adapter_model.safetensors").read_bytes()
    (store / "cut" / "adapter_model.safetensors").write_bytes(whole[: len(whole) // 2])
    return store


@pytest.fixture(scope="module")
def server(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    named = f"poems={store / 'poems'}, code={store / 'code'}"
    arguments = ("--model-id", str(model("llama")), "--lora-adapters", named, "--allow-adapter-updates")
    with Server(tmp_path_factory.mktemp("lora") / "run", *arguments) as server:
        yield server.start().wait_until_ready()


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


def streams(server: Server, adapters: list[str | None], act: Callable[[], object] | None = None) -> list[Answer]:
    """The answers of concurrent streams, one per adapter; `act` is called when each has shown a token."""
    requests = [(PROMPT, {"max_new_tokens": LONG, "adapter_id": adapter}) for adapter in adapters]
    streamed = server.stream_all(requests, act)
    return [[(event["token"]["id"], event["token"]["logprob"]) for event in events] for events in streamed]


def test_adapters_in_one_batch_answer_as_alone(server: Server) -> None:
    assert listed(server) == ["poems", "code"]
    assert server.metric("tgi_adapters_loaded") == 2
    alone = {name: ask(server, name) for name in CHOICES}
    assert len({tuple(token for token, _ in answer) for answer in alone.values()}) == len(CHOICES)
    with ThreadPoolExecutor(12) as pool:
        together = [pool.submit(ask, server, name) for name in CHOICES * 4]
        assert [answer.result() for answer in together] == [alone[name] for name in CHOICES * 4]


def test_model_selects_the_adapter_on_v1_routes(server: Server) -> None:
    texts = {
        name: server.generate(PROMPT, max_new_tokens=TOKENS, adapter_id=name)["generated_text"] for name in CHOICES
    }
    served = server.client.get("/info").json()["model_id"]
    assert server.client.get("/v1/models").json()["data"][0]["id"] == served
    for model_name, expected in (("poems", "poems"), ("code", "code"), ("gpt-4", None)):
        body = {"model": model_name, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
        answer = server.client.post("/v1/completions", json=body).json()
        assert (answer["choices"][0]["text"], answer["model"]) == (texts[expected], expected or served)
    rejected = server.client.post("/generate", json={"inputs": PROMPT, "parameters": {"adapter_id": "gpt-4"}})
    assert (rejected.status_code, rejected.json()["error"]) == (
        422, "Input validation error: `adapter_id` gpt-4 not found",
    )  # fmt: skip


def test_loading_and_unloading_does_not_change_other_answers(server: Server, store: Path) -> None:
    alone = {name: ask(server, name) for name in CHOICES}
    finished = threading.Event()

    def ask_repeatedly(name: str | None) -> int:
        count = 0
        while not finished.is_set():
            assert ask(server, name) == alone[name]
            count += 1
        return count

    with ThreadPoolExecutor(3) as pool:
        asking = [pool.submit(ask_repeatedly, name) for name in CHOICES]
        try:
            answers = []
            for _ in range(3):
                assert load(server, "new", store / "new")[0] == 200
                answers.append(ask(server, "new"))
                assert listed(server) == ["poems", "code", "new"]
                assert unload(server, "new") == 200
                assert unload(server, "new") == 404
                assert listed(server) == ["poems", "code"]
        finally:
            finished.set()
        assert all(count.result() for count in asking)
    assert answers[0] == answers[1] == answers[2]
    assert answers[0] not in alone.values()


def test_a_stream_keeps_its_adapter_while_that_is_replaced_or_unloaded(server: Server, store: Path) -> None:
    (expected,) = streams(server, ["poems"])

    def replace() -> None:
        assert load(server, "poems", store / "new")[0] == 200

    assert streams(server, ["poems"], replace) == [expected]
    assert streams(server, ["poems"]) != [expected]
    assert load(server, "poems", store / "poems")[0] == 200
    assert streams(server, ["poems"] * 2, lambda: unload(server, "poems")) == [expected, expected]
    assert load(server, "poems", store / "poems")[0] == 200
    assert ask(server, "poems") == expected[:TOKENS]


@pytest.mark.parametrize(
    ("name", "reason"), [("foreign", "shape"), ("cut", "adapter_model.safetensors"), ("none", "adapter_config.json")]
)
def test_adapters_that_cannot_be_loaded_are_rejected_with_the_reason(
    server: Server, store: Path, name: str, reason: str
) -> None:
    before = ask(server, "poems")
    status, reply = load(server, name, store / name)
    assert (status, reply["error_type"]) == (422, "adapter_error")
    assert reason in reply["error"]["message"]
    assert str(store / name) in reply["error"]["message"]
    assert name not in listed(server)
    assert ask(server, "poems") == before


def test_adapters_are_restored_after_kills(server: Server, store: Path) -> None:
    """Also if all processes below the front end are killed at once: the scheduler keeps the changes in a file."""
    assert load(server, "new", store / "new")[0] == 200
    assert unload(server, "code") == 200
    adapters = [None, "poems", "new", "new"]
    undisturbed = streams(server, adapters)
    each = ("scheduler-0", "tokenizer-0", "worker-0")
    for names in (*((name,) for name in each), each):
        before = server.metric("tgi_recomputed_tokens")
        for _ in range(MAX_ATTEMPTS):  # on a busy machine all tokens may have been computed before the kill
            assert streams(server, adapters, lambda names=names: [*map(server.kill, names)]) == undisturbed, names
            if server.metric("tgi_recomputed_tokens") > before:
                break
        assert server.metric("tgi_recomputed_tokens") > before, names
        assert sorted(listed(server)) == ["new", "poems"]
    assert ask(server, "new") == undisturbed[2][:TOKENS]
    rejected = server.client.post("/generate", json={"inputs": PROMPT, "parameters": {"adapter_id": "code"}})
    assert rejected.status_code == 422
