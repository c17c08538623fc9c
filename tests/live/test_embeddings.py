"""Models that end in a vector, served: with real weights, and while processes are killed."""

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.live.server import Server, SharedServers
from tests.models import minilm, pooling_model

pytestmark = pytest.mark.live
TEXTS = [f"Sentence number {index} is about {'rivers ' * (index % 30)}and cities." for index in range(200)]


@pytest.fixture
def server(shared_server: SharedServers) -> Server:
    return shared_server("--model-id", str(pooling_model("bert")))


def embeddings(server: Server, texts: list[str], **fields: Any) -> np.ndarray[Any, Any]:
    reply = server.client.post("/v1/embeddings", json={"input": texts, **fields})
    assert reply.status_code == 200, reply.text
    return np.array([one["embedding"] for one in reply.json()["data"]], np.float32)


def test_embeddings_of_real_weights_are_those_of_sentence_transformers(shared_server: SharedServers) -> None:
    """Mean of the last hidden states, divided by its length: what sentence-transformers computes with this model."""
    import torch
    import transformers

    directory = minilm()
    model = transformers.AutoModel.from_pretrained(directory).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    texts = [*TEXTS[:20], "Короткий текст", "今天天气很好", "x " * 400]
    found = embeddings(shared_server("--model-id", str(directory)), texts, truncate_prompt_tokens=-1)
    for text, vector in zip(texts, found, strict=True):
        ids = tokenizer(text, truncation=True, max_length=256, return_tensors="pt")
        with torch.no_grad():
            mean = model(**ids).last_hidden_state[0].mean(0)
        assert np.abs((mean / mean.norm()).numpy() - vector).max() < 1e-5


@pytest.mark.parametrize("name", ["worker-0", "scheduler-0", "tokenizer-0"])
def test_embeddings_are_exact_although_a_process_is_killed(server: Server, name: str) -> None:
    expected = embeddings(server, TEXTS)
    found: list[np.ndarray[Any, Any]] = []
    started = server.metric("tgi_request_input_length_count")
    asking = [threading.Thread(target=lambda: found.append(embeddings(server, TEXTS))) for _ in range(4)]
    for thread in asking:
        thread.start()
    server.wait_until(lambda: server.metric("tgi_request_input_length_count") > started + 20, "some texts are done")
    server.kill(name)
    for thread in asking:
        thread.join()
    assert len(found) == len(asking)
    for one in found:
        assert np.array_equal(one, expected)


def test_a_batch_of_embeddings(server: Server) -> None:
    """Each vector is that of the route, and the batch counts the tokens."""
    lines = [
        {"custom_id": text, "method": "POST", "url": "/v1/embeddings", "body": {"input": text}} for text in TEXTS[:20]
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    client = server.client
    file = client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", content)}).json()
    asked = {"input_file_id": file["id"], "completion_window": "24h"}
    refused = client.post("/v1/batches", json=asked | {"endpoint": "/v1/completions"})
    assert refused.status_code == 404
    assert "error" in refused.json()
    name = client.post("/v1/batches", json=asked | {"endpoint": "/v1/embeddings"}).json()["id"]
    server.wait_until(lambda: client.get(f"/v1/batches/{name}").json()["status"] == "completed", "the batch has ended")
    batch = client.get(f"/v1/batches/{name}").json()
    output = client.get(f"/v1/files/{batch['output_file_id']}/content").text
    results = [json.loads(line) for line in output.splitlines()]
    assert [one["custom_id"] for one in results] == TEXTS[:20]
    bodies = [one["response"]["body"] for one in results]
    found = np.array([body["data"][0]["embedding"] for body in bodies], np.float32)
    assert np.array_equal(found, embeddings(server, TEXTS[:20]))
    counted = sum(body["usage"]["prompt_tokens"] for body in bodies)
    usage = batch["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (counted, 0, counted)


def test_health_info_and_errors(server: Server) -> None:
    assert server.client.get("/health").status_code == 200
    assert server.client.get("/info").json()["max_input_tokens"] == 512
    reply = server.client.post("/v1/embeddings", json={"input": "word " * 3000})
    assert reply.status_code == 422
    assert "`inputs` must have at most 512 tokens. Given: " in reply.json()["error"]["message"]
    reply = server.client.post("/generate", json={"inputs": "a"})
    assert (reply.status_code, reply.json()["error_type"]) == (404, "not_found")


def test_settings_of_generation_are_refused(tmp_path: Path) -> None:
    with Server(tmp_path / "run", "--model-id", str(pooling_model("bert")), "--speculate", "2") as server:
        server.start()
        server.commands["up"].wait(60)
        server.wait_until(lambda: "is for models that generate text" in server.output_text(), "the refusal")
