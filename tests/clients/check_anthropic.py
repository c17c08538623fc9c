"""Anthropic's SDK, against the demo model: messages, streams with its helpers, tools, structured output, counts."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pydantic
import pytest
from anthropic import Anthropic, AsyncAnthropic

from tests.clients.served import ANSWER, ASKED, CITIES, GUARDED_URL, KEY, QUESTION, SYSTEM, TOOLS, URL, check_call

ASK: dict[str, Any] = {
    "model": "claude-any",
    "max_tokens": 24,
    "system": [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}],
    "messages": [{"role": "user", "content": QUESTION}],
    "extra_body": {"temperature": 0},
}
OFFERED = [
    {
        "name": each["function"]["name"],
        "description": each["function"]["description"],
        "input_schema": each["function"]["parameters"],
    }
    for each in TOOLS
]
CALL: dict[str, Any] = ASK | {"max_tokens": 60, "messages": ASKED, "tools": OFFERED, "tool_choice": {"type": "any"}}


@pytest.fixture(scope="module")
def client() -> Iterator[Anthropic]:
    with Anthropic(base_url=URL, api_key="none", max_retries=0, timeout=60) as made:
        yield made


def test_message(client: Anthropic) -> None:
    message = client.messages.create(**ASK)
    assert message.id.startswith("msg_")
    assert (message.type, message.role) == ("message", "assistant")
    assert ANSWER in message.content[0].text
    assert message.stop_reason in ("end_turn", "max_tokens")
    assert message.usage.output_tokens > 0
    prompt = client.messages.count_tokens(model="any", system=ASK["system"], messages=ASK["messages"])
    again = client.messages.create(**ASK).usage
    assert again.input_tokens + again.cache_read_input_tokens == prompt.input_tokens


def test_stream_helper(client: Anthropic) -> None:
    whole = client.messages.create(**ASK)
    with client.messages.stream(**ASK) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_events_of_a_stream(client: Anthropic) -> None:
    kinds = [event.type for event in client.messages.create(**ASK, stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert {*kinds[2:-3]} <= {"content_block_delta", "ping"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_async_stream() -> None:
    async def run() -> str:
        async with (
            AsyncAnthropic(base_url=URL, api_key="none", max_retries=0) as made,
            made.messages.stream(**ASK) as stream,
        ):
            return await stream.get_final_text()

    assert ANSWER in asyncio.run(run())


def test_stop_sequence(client: Anthropic) -> None:
    message = client.messages.create(**ASK, stop_sequences=[ANSWER])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", ANSWER)
    assert all(ANSWER not in block.text for block in message.content)


def test_prefilled_answer(client: Anthropic) -> None:
    begun = [*ASK["messages"], {"role": "assistant", "content": "The capital of France is"}]
    message = client.messages.create(**ASK | {"messages": begun})
    assert message.content[0].text.lstrip(" *").startswith(ANSWER)


def test_tools(client: Anthropic) -> None:
    message = client.messages.create(**CALL)
    assert message.stop_reason == "tool_use"
    uses = [block for block in message.content if block.type == "tool_use"]
    assert uses
    for use in uses:
        assert use.id.startswith("toolu_")
        check_call(use.name, json.dumps(use.input))
    with client.messages.stream(**CALL) as stream:
        partial = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert "".join(partial)
    assert [block.input for block in final.content if block.type == "tool_use"] == [use.input for use in uses]
    results = [{"type": "tool_result", "tool_use_id": use.id, "content": "21 °C"} for use in uses]
    history = [*ASKED, {"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
    answer = client.messages.create(**CALL | {"messages": history, "tool_choice": {"type": "none"}})
    assert answer.stop_reason in ("end_turn", "max_tokens")
    assert answer.content[0].type == "text"


def test_named_tool(client: Anthropic) -> None:
    choice = {"type": "tool", "name": "get_time", "disable_parallel_tool_use": True}
    [use] = client.messages.create(**CALL | {"tool_choice": choice}).content
    assert use.name == "get_time"
    assert use.input["city"] in CITIES


def test_structured_output(client: Anthropic) -> None:
    class Place(pydantic.BaseModel):
        capital: bool

    schema = Place.model_json_schema() | {"additionalProperties": False}
    config = {"format": {"type": "json_schema", "schema": schema}}
    message = client.messages.create(**ASK, output_config=config)
    Place.model_validate_json(message.content[0].text)
    parsed = client.messages.parse(**ASK, output_format=Place)
    assert isinstance(parsed.parsed_output, Place)


def test_errors(client: Anthropic) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    with pytest.raises(anthropic.BadRequestError, match="`image` blocks are not supported"):
        client.messages.create(**ASK | {"messages": [{"role": "user", "content": [image]}]})
    with pytest.raises(anthropic.BadRequestError, match="max_new_tokens"):
        client.messages.create(**ASK | {"max_tokens": 0})


def test_keys() -> None:
    ask = {"model": "any", "max_tokens": 2, "messages": [{"role": "user", "content": "a"}]}
    for given in ({"api_key": KEY}, {"auth_token": KEY, "api_key": None}):
        with Anthropic(base_url=GUARDED_URL, max_retries=0, **given) as client:
            assert client.messages.create(**ask).content
            assert client.messages.count_tokens(model="any", messages=ask["messages"]).input_tokens
    wrong = Anthropic(base_url=GUARDED_URL, api_key="wrong", max_retries=0)
    with wrong, pytest.raises(anthropic.AuthenticationError):
        wrong.messages.create(**ask)
