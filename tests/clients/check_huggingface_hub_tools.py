"""Calls of tools through huggingface_hub's clients, whole and streamed."""

import asyncio
from typing import Any

import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient

from tests.clients.served import ASKED, TOOLS, URL, check_call

MUST: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "temperature": 0, "max_tokens": 60}
NAMED = {"type": "function", "function": {"name": "get_time"}}


def check(answer: Any) -> tuple[str, str]:
    """The one call of an answer."""
    [choice] = answer.choices
    assert (choice.finish_reason, choice.message.role, choice.message.content) == ("tool_calls", "assistant", None)
    [call] = choice.message.tool_calls
    assert call.id.startswith("call_")
    assert call.type == "function"
    check_call(call.function.name, call.function.arguments)
    return call.function.name, call.function.arguments


def joined(chunks: list[Any]) -> tuple[str, str]:
    """The one call of a stream."""
    pieces = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert {piece.index for piece in pieces} == {0}
    assert [piece.id for piece in pieces if piece.id] == [pieces[0].id]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    name = "".join(piece.function.name or "" for piece in pieces)
    return name, "".join(piece.function.arguments for piece in pieces)


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_call_whole_and_streamed(choice: Any) -> None:
    with InferenceClient(URL, timeout=60) as client:
        whole = check(client.chat_completion(ASKED, **MUST | {"tool_choice": choice}))
        assert choice == "required" or whole[0] == "get_time"
        assert joined(list(client.chat_completion(ASKED, stream=True, **MUST | {"tool_choice": choice}))) == whole


def test_tool_choice_auto() -> None:
    with InferenceClient(URL, timeout=60) as client:
        [choice] = client.chat_completion(ASKED, **MUST | {"tool_choice": "auto"}).choices
        assert bool(choice.message.tool_calls) == (choice.finish_reason == "tool_calls")
        assert choice.message.content or choice.message.tool_calls


def test_the_result_of_a_call_is_part_of_the_next_prompt() -> None:
    with InferenceClient(URL, timeout=60) as client:
        message = client.chat_completion(ASKED, **MUST).choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "18 degrees, sunny"}
        turns = [*ASKED, message, result, {"role": "user", "content": "Say it in a sentence."}]
        answer = client.chat_completion(turns, tools=TOOLS, tool_choice="none", max_tokens=9)
        assert answer.choices[0].message.content


def test_async() -> None:
    async def use() -> Any:
        async with AsyncInferenceClient(URL, timeout=60) as client:
            whole = await client.chat_completion(ASKED, **MUST)
            return whole, [chunk async for chunk in await client.chat_completion(ASKED, stream=True, **MUST)]

    whole, chunks = asyncio.run(use())
    assert check(whole) == joined(chunks)
