"""huggingface_hub's InferenceClient and AsyncInferenceClient against this server."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import HfHubHTTPError, ValidationError

from tests.clients.served import ANSWER, GUARDED_URL, KEY, MESSAGES, PROMPT, URL

# By default the client omits `return_full_text`; POST / then includes the prompt in the answer, as in TGI.
TEXT = {"max_new_tokens": 12, "return_full_text": False}


@pytest.fixture
def client() -> Iterator[InferenceClient]:
    with InferenceClient(URL, timeout=60) as made:
        yield made


async def call(method: str, *arguments: Any, **parameters: Any) -> Any:
    """Calls the asynchronous client. Returns a stream as a list."""
    async with AsyncInferenceClient(URL, timeout=60) as client:
        answer = await getattr(client, method)(*arguments, **parameters)
        return [part async for part in answer] if isinstance(answer, AsyncIterator) else answer


def test_text_generation(client: InferenceClient) -> None:
    assert ANSWER in client.text_generation(PROMPT, **TEXT)


def test_text_generation_streamed(client: InferenceClient) -> None:
    pieces = list(client.text_generation(PROMPT, stream=True, **TEXT))
    assert len(pieces) > 3
    assert "".join(pieces).removesuffix("<|im_end|>") == client.text_generation(PROMPT, **TEXT)


def test_text_generation_with_details(client: InferenceClient) -> None:
    answer = client.text_generation(PROMPT, details=True, **TEXT)
    assert ANSWER in answer.generated_text
    assert answer.details.finish_reason == "eos_token"
    assert answer.details.generated_tokens == len(answer.details.tokens)
    assert "".join(token.text for token in answer.details.tokens if not token.special) == answer.generated_text


def test_text_generation_with_prefill(client: InferenceClient) -> None:
    answer = client.text_generation(PROMPT, details=True, decoder_input_details=True, **TEXT)
    first, *others = answer.details.prefill
    assert first.logprob is None
    assert "".join(token.text for token in answer.details.prefill).endswith(PROMPT)
    assert all(token.logprob <= 0 for token in others)


def test_text_generation_streamed_with_details(client: InferenceClient) -> None:
    events = list(client.text_generation(PROMPT, details=True, stream=True, **TEXT))
    assert [event.index for event in events] == list(range(1, len(events) + 1))
    assert ANSWER in events[-1].generated_text
    assert events[-1].details.finish_reason == "eos_token"
    assert events[-1].details.generated_tokens == len(events)
    assert events[-1].details.input_length > 5
    assert all(event.details is None for event in events[:-1])


def test_text_generation_stops(client: InferenceClient) -> None:
    answer = client.text_generation(PROMPT, details=True, stop=["France"], **TEXT)
    assert answer.generated_text.endswith("France")
    assert answer.details.finish_reason == "stop_sequence"


def test_text_generation_repeats_with_a_seed(client: InferenceClient) -> None:
    parameters = {"do_sample": True, "temperature": 1.5, "top_k": 50, "top_p": 0.95, "seed": 7, "max_new_tokens": 8}
    answer = client.text_generation(PROMPT, details=True, **parameters)
    assert answer.details.seed == 7
    assert answer == client.text_generation(PROMPT, details=True, **parameters)


@pytest.mark.parametrize(
    "options", [{}, {"details": True}, {"stream": True}, {"details": True, "stream": True}], ids=str
)
def test_async_text_generation_is_the_same(client: InferenceClient, options: dict[str, bool]) -> None:
    answer = client.text_generation(PROMPT, **TEXT, **options)
    expected = list(answer) if "stream" in options else answer
    assert asyncio.run(call("text_generation", PROMPT, **TEXT, **options)) == expected


@pytest.mark.parametrize("options", [{}, {"stream": True}], ids=str)
def test_invalid_text_generation_is_rejected(client: InferenceClient, options: dict[str, bool]) -> None:
    with pytest.raises(ValidationError, match="`temperature` must be strictly positive"):
        list(client.text_generation(PROMPT, temperature=-1.0, **options))
    with pytest.raises(ValidationError, match="`temperature` must be strictly positive"):
        asyncio.run(call("text_generation", PROMPT, temperature=-1.0, **options))


def test_chat_completion(client: InferenceClient) -> None:
    answer = client.chat_completion(MESSAGES, max_tokens=12, temperature=0)
    [choice] = answer.choices
    assert choice.message.role == "assistant"
    assert ANSWER in choice.message.content
    assert choice.finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_chat_completion_streamed(client: InferenceClient) -> None:
    whole = client.chat_completion(MESSAGES, max_tokens=12, temperature=0)
    options = {"include_usage": True}
    *chunks, last = client.chat_completion(MESSAGES, max_tokens=12, temperature=0, stream=True, stream_options=options)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert ANSWER in text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert last.choices == []
    for usage in (last.usage, whole.usage):  # what the cache has depends on earlier requests
        usage.prompt_tokens_details = None
    assert dict(last.usage) == dict(whole.usage)
    assert len({chunk.id for chunk in [*chunks, last]}) == 1


def test_chat_completion_with_logprobs(client: InferenceClient) -> None:
    options = {"max_tokens": 4, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    tokens = client.chat_completion(MESSAGES, **options).choices[0].logprobs.content
    assert len(tokens) == 4
    for token in tokens:
        assert [token.token, token.logprob] == [token.top_logprobs[0].token, token.top_logprobs[0].logprob]
        assert token.top_logprobs[1].logprob <= token.logprob <= 0
    chunks = list(client.chat_completion(MESSAGES, stream=True, **options))
    pieces = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    assert [dict(token) for piece in pieces for token in piece.content] == [dict(token) for token in tokens]


def test_chat_completion_stops_before_the_stop_string(client: InferenceClient) -> None:
    answer = client.chat_completion(MESSAGES, max_tokens=12, temperature=0, stop=["France"])
    assert answer.choices[0].message.content == "The capital of "
    assert answer.choices[0].finish_reason == "stop"


def test_chat_by_its_openai_names(client: InferenceClient) -> None:
    chunks = client.chat.completions.create(model="tgi", messages=MESSAGES, max_tokens=12, temperature=0, stream=True)
    assert ANSWER in "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def test_async_chat_completion(client: InferenceClient) -> None:
    answer = asyncio.run(call("chat_completion", MESSAGES, max_tokens=12, temperature=0))
    assert ANSWER in answer.choices[0].message.content
    chunks = asyncio.run(call("chat_completion", MESSAGES, max_tokens=12, temperature=0, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == answer.choices[0].message.content


@pytest.mark.parametrize("options", [{}, {"stream": True}], ids=str)
def test_invalid_chat_completion_is_rejected(client: InferenceClient, options: dict[str, bool]) -> None:
    with pytest.raises(HfHubHTTPError, match=r"422(.|\n)*`temperature` must be strictly positive") as rejection:
        list(client.chat_completion(MESSAGES, temperature=-1.0, **options))
    assert rejection.value.response.status_code == 422


def test_endpoint() -> None:
    client = InferenceClient(URL, provider="hf-inference")  # the client supports this call for no other provider
    information = client.get_endpoint_info()
    assert information["router"] == "text-generation-router"
    assert information["max_total_tokens"] > 100
    assert client.health_check() is True

    async def use() -> Any:
        async with AsyncInferenceClient(URL, provider="hf-inference") as client:
            return await client.get_endpoint_info(), await client.health_check()

    assert asyncio.run(use()) == (information, True)


def test_a_missing_key_is_rejected() -> None:
    assert InferenceClient(GUARDED_URL, token=KEY).text_generation("Hi", max_new_tokens=1)
    with pytest.raises(HfHubHTTPError) as rejection:
        InferenceClient(GUARDED_URL, token="wrong").text_generation("Hi", max_new_tokens=1)
    assert rejection.value.response.status_code == 401
