"""Files and batches, and the counts of input tokens, through OpenAI's SDK."""

import io
import json
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.clients.served import ANSWER, MESSAGES, QUESTION, SYSTEM, URL

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def client() -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def upload(client: OpenAI, *bodies: dict[str, Any]) -> Any:
    lines = [
        json.dumps({"custom_id": f"request {number}", "method": "POST", "url": CHAT, "body": body})
        for number, body in enumerate(bodies)
    ]
    return client.files.create(file=io.BytesIO("\n".join(lines).encode()), purpose="batch")


def test_files(client: OpenAI) -> None:
    expiry: Any = {"anchor": "created_at", "seconds": 3600}
    file = client.files.create(file=("a.jsonl", b"{}\n"), purpose="batch", expires_after=expiry)
    assert (file.filename, file.bytes, file.purpose) == ("a.jsonl", 3, "batch")
    assert file.expires_at == file.created_at + 3600
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).read() == b"{}\n"
    others = [upload(client) for _ in range(3)]
    assert {one.id for one in client.files.list(limit=2)} >= {file.id, *(other.id for other in others)}  # all pages
    for one in (file, *others):
        assert client.files.delete(one.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)
    with pytest.raises(openai.UnprocessableEntityError, match="`purpose` must be `batch`"):
        client.files.create(file=b"{}", purpose="fine-tune")


def test_batches(client: OpenAI) -> None:
    body = {"model": "any", "messages": MESSAGES, "temperature": 0, "max_tokens": 24}
    file = upload(client, body, body | {"max_tokens": 0}, body)
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"a": "b"})
    while batch.status in ("validating", "in_progress", "finalizing"):
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    assert (batch.status, batch.metadata) == ("completed", {"a": "b"})
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (3, 2, 1)
    assert batch.output_file_id is not None
    assert batch.error_file_id is not None
    results = [json.loads(line) for line in client.files.content(batch.output_file_id).iter_lines()]
    assert [one["custom_id"] for one in results] == ["request 0", "request 2"]
    assert batch.usage is not None
    answers = [one["response"]["body"] for one in results]
    assert (batch.model, batch.usage.total_tokens) == (
        answers[0]["model"],
        sum(one["usage"]["total_tokens"] for one in answers),
    )
    assert all(ANSWER in one["response"]["body"]["choices"][0]["message"]["content"] for one in results)
    [error] = [json.loads(line) for line in client.files.content(batch.error_file_id).iter_lines()]
    assert (error["custom_id"], error["response"]["status_code"]) == ("request 1", 422)
    assert batch.id in {one.id for one in client.batches.list(limit=1)}
    assert client.batches.cancel(batch.id).status == "completed"


def test_a_batch_that_fails_and_one_that_is_cancelled(client: OpenAI) -> None:
    asked: Any = {"endpoint": CHAT, "completion_window": "24h"}
    batch = client.batches.create(input_file_id=upload(client).id, **asked)
    while batch.status == "validating":
        batch = client.batches.retrieve(batch.id)
    assert batch.status == "failed"
    assert batch.errors is not None
    assert [error.code for error in batch.errors.data or []] == ["empty_file"]
    long = {"messages": MESSAGES, "max_tokens": 2000}
    batch = client.batches.create(input_file_id=upload(client, *[long] * 20).id, **asked)
    assert client.batches.cancel(batch.id).status == "cancelling"
    while batch.status != "cancelled":
        batch = client.batches.retrieve(batch.id)
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve("batch_unknown")


def test_input_tokens(client: OpenAI) -> None:
    counted = client.responses.input_tokens.count(model="any", input=QUESTION, instructions=SYSTEM)
    response = client.responses.create(model="any", input=QUESTION, instructions=SYSTEM, max_output_tokens=1)
    assert response.usage is not None
    assert counted.input_tokens == response.usage.input_tokens
    assert counted.object == "response.input_tokens"
