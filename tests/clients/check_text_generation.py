"""The `text-generation` client against this server. Its streamed chat is omitted: it parses `[DONE]` as JSON, which
fails with every server that ends its streams like OpenAI and TGI."""

import asyncio

import pytest
from text_generation import AsyncClient, Client
from text_generation.errors import ValidationError
from text_generation.types import FinishReason, Message, Response, StreamResponse, Tool

from tests.clients.served import ANSWER, ASKED, MESSAGES, PROMPT, TOOLS, URL, check_call

TOO_MANY_STOPS = ["a", "b", "c", "d", "e"]
CHAT = [Message(**message) for message in MESSAGES]


@pytest.fixture
def client() -> Client:
    return Client(URL, timeout=60)


def stream(client: Client, **parameters: object) -> list[StreamResponse]:
    return list(client.generate_stream(PROMPT, max_new_tokens=12, **parameters))


async def generate_async(**parameters: object) -> Response:
    return await AsyncClient(URL, timeout=60).generate(PROMPT, max_new_tokens=12, **parameters)


async def stream_async(**parameters: object) -> list[StreamResponse]:
    events = AsyncClient(URL, timeout=60).generate_stream(PROMPT, max_new_tokens=12, **parameters)
    return [event async for event in events]


def test_generate(client: Client) -> None:
    answer = client.generate(PROMPT, max_new_tokens=12)
    assert ANSWER in answer.generated_text
    details = answer.details
    assert details.finish_reason == FinishReason.EndOfSequenceToken
    assert details.generated_tokens == len(details.tokens) > 3
    assert "".join(token.text for token in details.tokens if not token.special) == answer.generated_text
    assert all(token.logprob <= 0 for token in details.tokens)
    assert details.seed is None
    assert details.prefill == []


def test_prefill(client: Client) -> None:
    answer = client.generate(PROMPT, max_new_tokens=1, decoder_input_details=True)
    first, *others = answer.details.prefill
    assert first.logprob is None
    assert "".join(token.text for token in answer.details.prefill).endswith(PROMPT)
    assert all(token.logprob <= 0 for token in others)


def test_generate_stream(client: Client) -> None:
    events = stream(client)
    text = "".join(event.token.text for event in events if not event.token.special)
    assert ANSWER in text
    assert [event.details for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1].generated_text == text
    assert events[-1].details.finish_reason == FinishReason.EndOfSequenceToken
    assert events[-1].details.generated_tokens == len(events)


def test_async_generate_is_the_same(client: Client) -> None:
    assert asyncio.run(generate_async()) == client.generate(PROMPT, max_new_tokens=12)


def test_async_generate_stream_is_the_same(client: Client) -> None:
    assert asyncio.run(stream_async()) == stream(client)


def test_stop_sequence_ends_the_text(client: Client) -> None:
    answer = client.generate(PROMPT, max_new_tokens=12, stop_sequences=["France"])
    assert answer.generated_text.endswith("France")
    assert answer.details.finish_reason == FinishReason.StopSequence
    assert stream(client, stop_sequences=["France"])[-1].generated_text == answer.generated_text


def test_sampling_with_a_seed_repeats(client: Client) -> None:
    parameters = {"do_sample": True, "temperature": 1.5, "top_k": 50, "top_p": 0.95, "seed": 7}
    answer = client.generate(PROMPT, max_new_tokens=8, **parameters)
    assert answer.details.seed == 7
    assert answer == client.generate(PROMPT, max_new_tokens=8, **parameters)


def test_length_and_full_text(client: Client) -> None:
    answer = client.generate(PROMPT, max_new_tokens=2, return_full_text=True)
    assert answer.generated_text.startswith(PROMPT)
    assert answer.details.finish_reason == FinishReason.Length
    assert answer.details.generated_tokens == 2


def test_rejections_are_validation_errors(client: Client) -> None:
    with pytest.raises(ValidationError, match="`stop` supports up to 4 stop sequences"):
        client.generate(PROMPT, stop_sequences=TOO_MANY_STOPS)
    with pytest.raises(ValidationError, match="stop sequences"):
        stream(client, stop_sequences=TOO_MANY_STOPS)
    with pytest.raises(ValidationError, match="stop sequences"):
        asyncio.run(generate_async(stop_sequences=TOO_MANY_STOPS))
    with pytest.raises(ValidationError, match="stop sequences"):
        asyncio.run(stream_async(stop_sequences=TOO_MANY_STOPS))


def test_chat(client: Client) -> None:
    answer = client.chat(CHAT, max_tokens=12, temperature=0)
    assert answer.object == "chat.completion"
    [choice] = answer.choices
    assert choice.message.role == "assistant"
    assert ANSWER in choice.message.content
    assert choice.finish_reason == "stop"
    assert answer.usage["total_tokens"] == answer.usage["prompt_tokens"] + answer.usage["completion_tokens"]


def test_chat_with_logprobs_and_choices(client: Client) -> None:
    answer = client.chat(CHAT, max_tokens=4, temperature=0.7, seed=3, n=2, logprobs=True, top_logprobs=2)
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert len(choice.logprobs["content"]) == 4
        assert all(len(token["top_logprobs"]) == 2 for token in choice.logprobs["content"])


@pytest.mark.parametrize("choice", ["required", "get_time"])
def test_chat_with_tools(client: Client, choice: str) -> None:
    asked = [Message(**message) for message in ASKED]
    answer = client.chat(asked, tools=[Tool(**tool) for tool in TOOLS], tool_choice=choice, max_tokens=60, seed=1)
    [call] = answer.choices[0].message.tool_calls
    check_call(call["function"]["name"], call["function"]["arguments"])
    assert choice in ("required", call["function"]["name"])
    assert answer.choices[0].finish_reason == "tool_calls"


def test_async_chat() -> None:
    answer = asyncio.run(AsyncClient(URL, timeout=60).chat(CHAT, max_tokens=12, temperature=0))
    assert ANSWER in answer.choices[0].message.content


def test_chat_rejections_are_validation_errors(client: Client) -> None:
    with pytest.raises(ValidationError, match="`temperature` must be strictly positive"):
        client.chat(CHAT, temperature=-1)
    with pytest.raises(ValidationError, match="`temperature` must be strictly positive"):
        asyncio.run(AsyncClient(URL).chat(CHAT, temperature=-1))
