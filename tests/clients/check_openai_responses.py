"""The Responses API through OpenAI's SDK: whole, streamed, structured, with tools, stored, in the background."""

import time
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest
from openai import OpenAI

from tests.clients.served import ANSWER, ASKED, GUARDED_URL, KEY, QUESTION, SYSTEM, TOOLS, URL, check_call

ASK: dict[str, Any] = {
    "model": "any", "input": QUESTION, "instructions": SYSTEM, "temperature": 0, "max_output_tokens": 24,
}  # fmt: skip
OFFERED = [{"type": "function", **each["function"]} for each in TOOLS]  # type: ignore[dict-item]
CALL = ASK | {"input": ASKED, "tools": OFFERED, "tool_choice": "required", "max_output_tokens": 60}
BACKGROUND = ASK | {"background": True}


@pytest.fixture(scope="module")
def client() -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def test_response(client: OpenAI) -> None:
    response = client.responses.create(**ASK, metadata={"a": "b"})
    assert response.id.startswith("resp_")
    assert ANSWER in response.output_text
    assert response.status in ("completed", "incomplete")
    assert response.metadata == {"a": "b"}
    assert response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    again = client.responses.retrieve(response.id)
    assert again.output_text == response.output_text
    [item] = client.responses.input_items.list(response.id).data
    assert item.content[0].text == QUESTION  # type: ignore[union-attr]
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_stream(client: OpenAI) -> None:
    whole = client.responses.create(**ASK)
    events = list(client.responses.create(**ASK, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-4:-1] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done",
    ]  # fmt: skip
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert events[-1].response.output_text == whole.output_text  # type: ignore[union-attr]


def test_stream_helper(client: OpenAI) -> None:
    with client.responses.stream(**ASK) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text


def test_structured_output(client: OpenAI) -> None:
    class Place(pydantic.BaseModel):
        capital: bool

    parsed = client.responses.parse(**ASK, text_format=Place)
    assert isinstance(parsed.output_parsed, Place)
    with client.responses.stream(**ASK, text_format=Place) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Place)


def test_tools(client: OpenAI) -> None:
    response = client.responses.create(**CALL)
    calls = [item for item in response.output if item.type == "function_call"]
    assert calls
    for call in calls:
        check_call(call.name, call.arguments)
    with client.responses.stream(**CALL) as stream:
        final = stream.get_final_response()
    assert [item.arguments for item in final.output if item.type == "function_call"] == [
        call.arguments for call in calls
    ]
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "21 °C"} for call in calls]
    for more in (
        {"input": [*ASKED, *response.output, *results]},
        {"input": results, "previous_response_id": response.id},
    ):
        answer = client.responses.create(**CALL | more | {"tool_choice": "none"})
        assert answer.output[0].type == "message"


def test_named_tool(client: OpenAI) -> None:
    response = client.responses.create(**CALL | {"tool_choice": {"type": "function", "name": "get_time"}})
    assert next(item.name for item in response.output if item.type == "function_call") == "get_time"


def test_conversations(client: OpenAI) -> None:
    first = client.responses.create(**ASK)
    next_ = client.responses.create(**ASK | {"input": "And of Spain?", "previous_response_id": first.id})
    assert next_.previous_response_id == first.id
    assert next_.usage is not None
    assert first.usage is not None
    assert next_.usage.input_tokens > first.usage.input_tokens
    conversation = client.conversations.create(items=[{"type": "message", "role": "user", "content": "Hello"}])
    sizes = []
    for _ in range(3):
        usage = client.responses.create(**ASK, conversation=conversation.id).usage
        assert usage is not None
        sizes.append(usage.input_tokens)
    assert sizes == sorted({*sizes})
    client.conversations.delete(conversation.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(**ASK, conversation=conversation.id)


def test_logprobs(client: OpenAI) -> None:
    response = client.responses.create(**ASK, include=["message.output_text.logprobs"], top_logprobs=2)
    [part] = response.output[0].content  # type: ignore[union-attr]
    assert "".join(each.token for each in part.logprobs) == part.text  # type: ignore[union-attr]
    assert all(len(each.top_logprobs) == 2 for each in part.logprobs)  # type: ignore[union-attr]


def test_background(client: OpenAI) -> None:
    response = client.responses.create(**BACKGROUND)
    assert response.status == "queued"
    while response.status in ("queued", "in_progress"):
        time.sleep(0.1)
        response = client.responses.retrieve(response.id)
    assert response.output_text == client.responses.create(**ASK).output_text
    events = list(client.responses.create(**BACKGROUND, stream=True))
    numbers = [event.sequence_number for event in events]
    assert numbers == list(range(len(events)))
    again = list(client.responses.retrieve(events[0].response.id, stream=True, starting_after=3))
    assert [event.sequence_number for event in again] == numbers[4:]
    assert again == events[4:]


def test_cancel(client: OpenAI) -> None:
    story = {"input": "Tell a long story.", "max_output_tokens": 4000}
    response = client.responses.create(**BACKGROUND | story)
    assert client.responses.cancel(response.id).status == "cancelled"
    assert client.responses.retrieve(response.id).status == "cancelled"


def test_errors(client: OpenAI) -> None:
    with pytest.raises(openai.UnprocessableEntityError, match="the tool `web_search` is not served here"):
        client.responses.create(**ASK, tools=[{"type": "web_search"}])
    with pytest.raises(openai.NotFoundError, match="resp_unknown"):
        client.responses.create(**ASK, previous_response_id="resp_unknown")


def test_keys() -> None:
    with OpenAI(base_url=f"{GUARDED_URL}/v1", api_key=KEY, max_retries=0) as client:
        response = client.responses.create(model="any", input="a", max_output_tokens=2)
        assert client.responses.retrieve(response.id).id == response.id
    wrong = OpenAI(base_url=f"{GUARDED_URL}/v1", api_key="wrong", max_retries=0)
    with wrong, pytest.raises(openai.AuthenticationError):
        wrong.responses.retrieve(response.id)
