"""LiteLLM with tools, over Chat Completions, Responses and Messages, which it passes on or translates."""

import asyncio
import json
from typing import Any

import litellm
import pytest

from tests.clients.served import GUARDED_URL, KEY, RESULT, call, script, thought

WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = call("get_weather", city="Paris")
ASKED = script(thought("I look.") + CALL, f"It is {RESULT}.")
# Providers: those that pass Responses and Messages on, and one for which LiteLLM translates them into chats.
V1 = {"api_base": f"{GUARDED_URL}/v1", "api_key": KEY, "num_retries": 0}
ANTHROPIC = {"api_base": GUARDED_URL, "api_key": KEY, "num_retries": 0}
CHATS = pytest.mark.parametrize(
    "to",
    [{"model": "openai/local", **V1}, {"model": "hosted_vllm/local", **V1}, {"model": "anthropic/local", **ANTHROPIC}],
    ids=lambda to: to["model"],
)
RESPONSES = pytest.mark.parametrize(
    "to", [{"model": "openai/local", **V1}, {"model": "hosted_vllm/local", **V1}], ids=lambda to: to["model"]
)
MESSAGES = pytest.mark.parametrize(
    "to",
    [{"model": "anthropic/local", **ANTHROPIC}, {"model": "openai/local", **V1}, {"model": "hosted_vllm/local", **V1}],
    ids=lambda to: to["model"],
)


@CHATS
@pytest.mark.parametrize("stream", [False, True])
def test_chat(to: Any, stream: bool) -> None:
    """A call of a tool, its result, the answer."""
    turns: list[Any] = [{"role": "user", "content": ASKED}]
    options = {**to, "tools": [{"type": "function", "function": WEATHER}], "max_tokens": 100, "stream": stream}
    if stream:
        options["stream_options"] = {"include_usage": True}

    def answer() -> Any:
        got = litellm.completion(messages=turns, **options)
        return litellm.stream_chunk_builder(list(got), messages=turns) if stream else got

    first = answer()
    assert first.choices[0].finish_reason == "tool_calls"
    message = first.choices[0].message
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Paris"}
    assert first.usage.total_tokens > 20
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    turns += [message.model_dump(), result]
    assert answer().choices[0].message.content == "It is sunny."


@CHATS
def test_structured_output(to: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "one", "schema": schema, "strict": True}}
    told = [call("json_tool_call", a=1), '{"a": 1}'][to["model"] != "anthropic/local"]
    asked = [{"role": "user", "content": script(told)}]
    answer = litellm.completion(messages=asked, response_format=wanted, max_tokens=50, **to)
    assert json.loads(answer.choices[0].message.content) == {"a": 1}


@RESPONSES
@pytest.mark.parametrize("stream", [False, True])
def test_responses(to: Any, stream: bool) -> None:
    items: list[Any] = [{"role": "user", "content": ASKED}]
    options = {**to, "tools": [{"type": "function", **WEATHER}], "max_output_tokens": 100, "stream": stream}

    def answer() -> Any:
        got = litellm.responses(input=items, **options)
        return list(got)[-1].response if stream else got

    first = answer()
    [wanted] = [item for item in first.output if item.type == "function_call"]
    assert json.loads(wanted.arguments) == {"city": "Paris"}
    items += [
        {"type": "function_call", "call_id": wanted.call_id, "name": wanted.name, "arguments": wanted.arguments},
        {"type": "function_call_output", "call_id": wanted.call_id, "output": "sunny"},
    ]
    assert answer().output[-1].content[0].text == "It is sunny."


def test_kept_responses() -> None:
    """The id is LiteLLM's own, which contains ours."""
    to = {**V1, "custom_llm_provider": "openai"}
    first = litellm.responses(model="openai/local", input=script("One.", f"You said: {RESULT}"), **V1)
    second = litellm.responses(model="openai/local", input="Two.", previous_response_id=first.id, **V1)
    assert second.output[-1].content[0].text == "You said: Two."
    assert litellm.get_responses(second.id, **to).output[-1].content[0].text == "You said: Two."
    assert len(litellm.list_input_items(second.id, **to)["data"]) >= 1
    assert litellm.delete_responses(second.id, **to).deleted


@MESSAGES
@pytest.mark.parametrize("stream", [False, True])
def test_messages(to: Any, stream: bool) -> None:
    if stream and to["model"] == "anthropic/local":
        pytest.skip("LiteLLM needs the packages of its proxy for this")
    tool = {"name": "get_weather", "description": "", "input_schema": WEATHER["parameters"]}
    asked = [{"role": "user", "content": ASKED}]
    options = {**to, "messages": asked, "tools": [tool], "max_tokens": 100, "stream": stream}

    async def use() -> Any:
        got = await litellm.anthropic.messages.acreate(**options)
        return [piece async for piece in got] if stream else got

    got = asyncio.run(use())
    if stream:
        text = b"".join(
            piece if isinstance(piece, bytes) else json.dumps(piece, default=str).encode() for piece in got
        ).decode()
        assert "tool_use" in text
        assert "message_stop" in text
        return
    blocks = [block for block in got["content"] if block["type"] == "tool_use"]
    assert [(block["name"], block["input"]) for block in blocks] == [("get_weather", {"city": "Paris"})]
    assert got["stop_reason"] == "tool_use"
