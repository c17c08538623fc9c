"""Calls of tools through OpenAI's SDK: whole, streamed, and with its stream and parse helpers."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage

from tests.clients.served import ASKED, TOOLS, URL, check_call

ASK: dict[str, Any] = {"model": "tgi", "messages": ASKED, "tools": TOOLS, "temperature": 0, "max_tokens": 60}
MUST = ASK | {"tool_choice": "required", "parallel_tool_calls": False}
NAMED = {"type": "function", "function": {"name": "get_time"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}


@pytest.fixture(scope="module")
def client() -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture(scope="module")
def whole(client: OpenAI) -> ChatCompletion:
    """The answer to MUST, which is deterministic."""
    return client.chat.completions.create(**MUST)


def called(message: ChatCompletionMessage) -> tuple[str, str]:
    """The one call of a message."""
    [call] = message.tool_calls or []
    assert call.id.startswith("call_")
    assert call.type == "function"
    check_call(call.function.name, call.function.arguments)
    return call.function.name, call.function.arguments


def check(answer: ChatCompletion) -> tuple[str, str]:
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    return called(choice.message)


def joined(chunks: list[ChatCompletionChunk]) -> tuple[str, str]:
    """The only call of a stream, with exactly one name and id."""
    pieces = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert {piece.index for piece in pieces} == {0}
    assert pieces[0].id.startswith("call_")
    assert (
        [piece.id for piece in pieces[1:]]
        == [piece.function.name for piece in pieces[1:]]
        == [None] * (len(pieces) - 1)
    )
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["tool_calls"]
    return pieces[0].function.name, "".join(piece.function.arguments for piece in pieces)


def test_a_call_whole_and_streamed(client: OpenAI, whole: ChatCompletion) -> None:
    chunks = list(client.chat.completions.create(stream=True, **MUST))
    assert joined(chunks) == check(whole)
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant"] + [None] * (len(chunks) - 1)


@pytest.mark.parametrize("choice", [NAMED, "get_time", ALLOWED, [NAMED]], ids=["object", "string", "allowed", "list"])
def test_a_named_tool_is_called(client: OpenAI, choice: Any) -> None:
    answer = client.chat.completions.create(**MUST | {"tool_choice": choice})
    assert check(answer)[0] == "get_time"


def test_tool_choice_auto(client: OpenAI) -> None:
    """The answer, a text or a call, is the same in a stream."""
    answer = client.chat.completions.create(**ASK | {"max_tokens": 30}).choices[0]
    chunks = list(client.chat.completions.create(stream=True, **ASK | {"max_tokens": 30}))
    if answer.finish_reason == "tool_calls":
        assert joined(chunks) == called(answer.message)
    else:
        assert answer.message.tool_calls is None
        assert answer.message.content == "".join(chunk.choices[0].delta.content or "" for chunk in chunks) != ""
        assert chunks[-1].choices[0].finish_reason == answer.finish_reason


def test_no_tool_is_called(client: OpenAI) -> None:
    answer = client.chat.completions.create(**ASK | {"tool_choice": "none", "max_tokens": 5}).choices[0]
    assert answer.message.tool_calls is None
    assert answer.message.content


def test_the_stream_helper(client: OpenAI, whole: ChatCompletion) -> None:
    kinds = []
    with client.chat.completions.stream(**MUST) as stream:
        for event in stream:
            kinds.append(event.type)
            if event.type == "tool_calls.function.arguments.done":
                done = event
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    assert "content.delta" not in kinds
    call = final.choices[0].message.tool_calls[0]
    assert (done.name, done.arguments) == check(final) == check(whole)
    assert call.function.parsed_arguments == done.parsed_arguments == json.loads(done.arguments)


def test_the_parse_helper(client: OpenAI) -> None:
    call = client.chat.completions.parse(**MUST).choices[0].message.tool_calls[0]
    assert call.function.parsed_arguments == json.loads(call.function.arguments)


def test_choices_and_logprobs(client: OpenAI) -> None:
    """Each choice has its own call; the logprobs of each token occur once."""
    asked = MUST | {"temperature": 1.5, "seed": 3, "n": 2, "logprobs": True}
    answer = client.chat.completions.create(**asked)
    with client.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion()
    for whole, other in zip(answer.choices, streamed.choices, strict=True):
        assert called(whole.message) == called(other.message)
        assert [token.token for token in whole.logprobs.content] == [token.token for token in other.logprobs.content]
    ids = [choice.message.tool_calls[0].id for choice in answer.choices + streamed.choices]
    assert len(set(ids)) == 4


def test_the_result_of_a_call_is_part_of_the_next_prompt(client: OpenAI, whole: ChatCompletion) -> None:
    """The first answer and the result of the tool form the second prompt, which the model answers with text."""
    message = whole.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "18 degrees, sunny"}
    turns = [*ASKED, message, result, {"role": "user", "content": "Say it in a sentence."}]
    answer = client.chat.completions.create(**ASK | {"messages": turns, "tool_choice": "none", "max_tokens": 9})
    assert answer.choices[0].message.content
    again = client.chat.completions.create(**MUST | {"messages": turns})
    assert again.choices[0].message.tool_calls[0].id != message.tool_calls[0].id


def test_async(whole: ChatCompletion) -> None:
    async def use() -> Any:
        async with AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=60) as client:
            answer = await client.chat.completions.create(**MUST)
            chunks = [chunk async for chunk in await client.chat.completions.create(stream=True, **MUST)]
            async with client.chat.completions.stream(**MUST) as stream:
                return answer, chunks, await stream.get_final_completion()

    answer, chunks, final = asyncio.run(use())
    assert check(whole) == check(answer) == joined(chunks) == check(final)


def test_a_call_that_is_cut_off(client: OpenAI, whole: ChatCompletion) -> None:
    cut = MUST | {"max_tokens": whole.usage.completion_tokens - 4}
    with pytest.raises(openai.UnprocessableEntityError) as rejection:
        client.chat.completions.create(**cut)
    assert "Tool error: Failed to parse generated text" in str(rejection.value)
    chunks = list(client.chat.completions.create(stream=True, **cut))
    assert chunks[-1].choices[0].finish_reason == "length"


class Capital(pydantic.BaseModel):
    """What an answer without calls is parsed as."""

    city: Literal["Paris", "Rome"]


def test_tools_together_with_a_response_format(client: OpenAI) -> None:
    for seed in range(4):
        answer = client.chat.completions.parse(**ASK | {"temperature": 1}, seed=seed, response_format=Capital)
        message = answer.choices[0].message
        assert (message.parsed is None) == bool(message.tool_calls)
        if message.tool_calls:
            called(message)


def test_invalid_tools_are_rejected(client: OpenAI) -> None:
    no_tools: dict[str, Any] = {"tools": [], "tool_choice": "required"}
    for wrong in ({"tool_choice": "fly"}, {"tools": [*TOOLS, TOOLS[0]]}, no_tools):
        with pytest.raises(openai.UnprocessableEntityError) as rejection:
            client.chat.completions.create(**ASK | wrong)
        assert "Tool error: " in str(rejection.value)
