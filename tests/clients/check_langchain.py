"""LangChain against this server, through its OpenAI package and its Hugging Face package."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from huggingface_hub.errors import HfHubHTTPError
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable
from langchain_huggingface import ChatHuggingFace, HuggingFaceEndpoint
from langchain_openai import ChatOpenAI, OpenAI

from tests.clients.served import ANSWER, MESSAGES, PROMPT, QUESTION, SYSTEM, URL

LOOP = asyncio.Runner()  # one event loop for all tests: langchain-openai shares its connections between models
OPENAI: dict[str, Any] = {"base_url": f"{URL}/v1", "api_key": "none", "temperature": 0, "max_tokens": 12}


def chat_openai(**options: Any) -> ChatOpenAI:
    return ChatOpenAI(**OPENAI, model="tgi", max_retries=0, **options)


def completions() -> OpenAI:
    return OpenAI(**OPENAI, model="tgi", max_retries=0)


def endpoint(**options: Any) -> HuggingFaceEndpoint:
    """Greedy, since its defaults sample."""
    greedy = {"temperature": None, "top_p": None, "typical_p": None, "max_new_tokens": 12}
    return HuggingFaceEndpoint(endpoint_url=URL, **greedy | options)


def chat_hugging_face() -> ChatHuggingFace:
    return ChatHuggingFace(llm=endpoint(), temperature=0, max_tokens=12)


def joined(chunks: list[Any]) -> Any:
    """The sum of chunks, as LangChain adds them."""
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    return total


async def gathered(chunks: AsyncIterator[Any]) -> list[Any]:
    return [chunk async for chunk in chunks]


# Chat models

CHATS = pytest.mark.parametrize("make", [chat_openai, chat_hugging_face])


@CHATS
def test_invoke(make: Any) -> None:
    answer = make().invoke(MESSAGES)
    assert isinstance(answer, AIMessage)
    assert ANSWER in answer.content
    assert answer.response_metadata["finish_reason"] == "stop"
    usage = answer.usage_metadata
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] > 10


@CHATS
def test_stream(make: Any) -> None:
    model = make()
    total = joined(list(model.stream(MESSAGES)))
    assert total.content == model.invoke(MESSAGES).content
    assert ANSWER in total.content
    assert total.response_metadata["finish_reason"] == "stop"


@CHATS
def test_batch(make: Any) -> None:
    answers = make().batch([MESSAGES, MESSAGES])
    assert [ANSWER in answer.content for answer in answers] == [True, True]


@CHATS
def test_ainvoke(make: Any) -> None:
    assert ANSWER in LOOP.run(make().ainvoke(MESSAGES)).content


@CHATS
def test_astream(make: Any) -> None:
    total = joined(LOOP.run(gathered(make().astream(MESSAGES))))
    assert ANSWER in total.content
    assert total.response_metadata["finish_reason"] == "stop"


@CHATS
def test_stop(make: Any) -> None:
    assert make().invoke(MESSAGES, stop=["France"]).content == "The capital of "


@CHATS
def test_conversation(make: Any) -> None:
    turns: list[BaseMessage] = [
        SystemMessage(SYSTEM),
        HumanMessage("Hello"),
        AIMessage("Hello."),
        HumanMessage(QUESTION),
    ]
    assert ANSWER in make().invoke(turns).content


@CHATS
def test_chain(make: Any) -> None:
    prompt = ChatPromptTemplate.from_messages([("system", SYSTEM), ("user", "What is the capital of {country}?")])
    chain: Runnable[Any, str] = prompt | make() | StrOutputParser()
    assert ANSWER in chain.invoke({"country": "France"})


@CHATS
def test_usage_of_a_stream(make: Any) -> None:
    model = make()
    total = joined(list(model.stream(MESSAGES, stream_usage=True)))
    expected = model.invoke(MESSAGES).usage_metadata
    assert {name: total.usage_metadata[name] for name in ("input_tokens", "output_tokens", "total_tokens")} == {
        name: expected[name] for name in ("input_tokens", "output_tokens", "total_tokens")
    }


def test_choices_and_logprobs() -> None:
    result = chat_openai(n=2, logprobs=True, top_logprobs=2).generate([[SystemMessage(SYSTEM), HumanMessage(QUESTION)]])
    assert [ANSWER in choice.text for choice in result.generations[0]] == [True, True]
    tokens = chat_openai(logprobs=True, top_logprobs=2).invoke(MESSAGES).response_metadata["logprobs"]["content"]
    assert all(len(token["top_logprobs"]) == 2 for token in tokens)


def test_rejections_keep_their_exception_class() -> None:
    text = "Input validation error: `top_p` must be > 0.0 and < 1.0"
    with pytest.raises(openai.UnprocessableEntityError, match=text):
        chat_openai(top_p=1.5).invoke(MESSAGES)
    with pytest.raises(openai.UnprocessableEntityError, match=text):
        list(chat_openai(top_p=1.5).stream(MESSAGES))
    with pytest.raises(HfHubHTTPError, match="`temperature` must be strictly positive"):
        ChatHuggingFace(llm=endpoint(), temperature=-1, max_tokens=12).invoke(MESSAGES)


# Text models

TEXTS = pytest.mark.parametrize("make", [completions, endpoint])


@TEXTS
def test_text_invoke(make: Any) -> None:
    assert ANSWER in make().invoke(PROMPT)


@TEXTS
def test_text_stream(make: Any) -> None:
    model = make()
    chunks = list(model.stream(PROMPT))
    assert len(chunks) > 3
    assert "".join(chunks).removesuffix("<|im_end|>") == model.invoke(PROMPT)


@TEXTS
def test_text_batch(make: Any) -> None:
    assert [ANSWER in text for text in make().batch([PROMPT, PROMPT])] == [True, True]


@TEXTS
def test_text_ainvoke_and_astream(make: Any) -> None:
    text = LOOP.run(make().ainvoke(PROMPT))
    assert ANSWER in text
    assert "".join(LOOP.run(gathered(make().astream(PROMPT)))).removesuffix("<|im_end|>") == text


@TEXTS
def test_text_stop(make: Any) -> None:
    assert make().invoke(PROMPT, stop=["France"]) == "The capital of "


def test_streaming_endpoint() -> None:
    assert ANSWER in endpoint(streaming=True).invoke(PROMPT)


def test_sampling_endpoint() -> None:
    model = endpoint(do_sample=True, temperature=1.5, top_k=50, top_p=0.95, seed=7, max_new_tokens=8)
    assert model.invoke(PROMPT) == model.invoke(PROMPT)


def test_the_endpoint_s_own_defaults() -> None:
    """It sends top_k 10, top_p and typical_p 0.95 and temperature 0.8 by default."""
    model = HuggingFaceEndpoint(endpoint_url=URL, seed=7, max_new_tokens=8)
    assert model.typical_p == 0.95
    assert model.invoke(PROMPT) == model.invoke(PROMPT) != ""


def test_penalties_and_biases() -> None:
    model = ChatOpenAI(**OPENAI, model="tgi", max_retries=0, frequency_penalty=0.5, presence_penalty=0.5)
    assert model.invoke(MESSAGES).content
    assert model.bind(logit_bias={"9": -100}).invoke(MESSAGES).content
