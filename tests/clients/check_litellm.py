"""LiteLLM against this server, under the names of its providers for servers with OpenAI's routes."""

import asyncio
from typing import Any

import litellm
import pytest
from litellm.exceptions import AuthenticationError, BadRequestError

from tests.clients.served import ANSWER, GUARDED_URL, KEY, MESSAGES, PROMPT, URL

PROVIDERS = pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
REFUSED = "Input validation error: `temperature` must be strictly positive"


def options(provider: str, **more: Any) -> dict[str, Any]:
    common = {"api_base": f"{URL}/v1", "api_key": "none", "temperature": 0, "max_tokens": 12, "num_retries": 0}
    return {"model": f"{provider}/tgi"} | common | more


def text(chunks: list[Any]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


@PROVIDERS
def test_completion(provider: str) -> None:
    answer = litellm.completion(**options(provider), messages=MESSAGES)
    assert ANSWER in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@PROVIDERS
def test_stream(provider: str) -> None:
    asked = options(provider, stream=True, stream_options={"include_usage": True})
    chunks = list(litellm.completion(**asked, messages=MESSAGES))
    assert ANSWER in text(chunks)
    assert chunks[-1].usage.completion_tokens > 0


def test_async_stream() -> None:
    async def asked() -> list[Any]:
        return [chunk async for chunk in await litellm.acompletion(**options("openai", stream=True), messages=MESSAGES)]

    assert ANSWER in text(asyncio.run(asked()))


def test_text_completion() -> None:
    assert ANSWER in litellm.text_completion(**options("text-completion-openai"), prompt=PROMPT).choices[0].text


@PROVIDERS
@pytest.mark.parametrize("stream", [False, True])
def test_an_error_says_why(provider: str, stream: bool) -> None:
    asked = options(provider, stream=stream, temperature=-1)
    with pytest.raises(BadRequestError, match=REFUSED) as caught:
        list(litellm.completion(**asked, messages=MESSAGES))
    assert caught.value.status_code in (400, 422)


def test_an_error_of_a_text_completion_says_why() -> None:
    with pytest.raises(BadRequestError, match=REFUSED):
        litellm.text_completion(**options("text-completion-openai", temperature=-1), prompt=PROMPT)


def test_key() -> None:
    asked = options("openai", api_base=f"{GUARDED_URL}/v1")
    with pytest.raises(AuthenticationError, match="The API key is missing or wrong"):
        litellm.completion(**asked, messages=MESSAGES)
    assert litellm.completion(**asked | {"api_key": KEY}, messages=MESSAGES).choices[0].message.content
