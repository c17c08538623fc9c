"""bind_tools of LangChain's OpenAI package and of its Hugging Face package."""

from typing import Any, Literal

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_huggingface import ChatHuggingFace, HuggingFaceEndpoint
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from tests.clients.served import ASKED, URL

QUESTION = HumanMessage(ASKED[0]["content"])


@tool
def get_weather(city: Literal["Paris", "London"], unit: Literal["celsius", "fahrenheit"]) -> str:
    """The weather in a city now."""
    return f"18 degrees {unit} in {city}"


class Place(BaseModel):
    """A city in a country."""

    city: Literal["Paris", "London"]
    country: Literal["France", "England"]


def chat_openai() -> Any:
    options = {"api_key": "none", "temperature": 0, "max_tokens": 60, "max_retries": 0}
    return ChatOpenAI(base_url=f"{URL}/v1", model="tgi", **options)


def chat_hugging_face() -> Any:
    return ChatHuggingFace(llm=HuggingFaceEndpoint(endpoint_url=URL), temperature=0, max_tokens=60)


CHATS = pytest.mark.parametrize("make", [chat_openai, chat_hugging_face])
CHOICES = pytest.mark.parametrize("choice", ["required", "get_weather"])


def check(answer: AIMessage) -> dict[str, Any]:
    """The only call of an answer, with arguments that the tool accepts."""
    [call] = answer.tool_calls
    assert answer.invalid_tool_calls == []
    assert answer.response_metadata["finish_reason"] == "tool_calls"
    assert call["id"].startswith("call_")
    assert call["name"] == "get_weather"
    assert "18 degrees" in get_weather.invoke(call["args"])
    return call["args"]


@CHATS
@CHOICES
def test_a_call_whole_and_streamed(make: Any, choice: str) -> None:
    model = make().bind_tools([get_weather], tool_choice=choice)
    whole = check(model.invoke([QUESTION]))
    first, *others = model.stream([QUESTION])
    streamed = check(sum(others, first))
    assert streamed == whole or make is chat_hugging_face  # which samples its streams


@CHATS
def test_tool_choice_auto(make: Any) -> None:
    answer = make().bind_tools([get_weather], tool_choice="auto").invoke([QUESTION])
    assert answer.tool_calls or answer.content
    assert bool(answer.tool_calls) == (answer.response_metadata["finish_reason"] == "tool_calls")


@CHATS
def test_the_result_of_a_call_is_part_of_the_next_prompt(make: Any) -> None:
    model = make().bind_tools([get_weather], tool_choice="required")
    answer = model.invoke([QUESTION])
    result = get_weather.invoke(answer.tool_calls[0])
    assert isinstance(result, ToolMessage)
    turns = [QUESTION, answer, result, HumanMessage("Say it in a sentence.")]
    assert make().bind(max_tokens=9).invoke(turns).content
    assert model.invoke(turns).tool_calls


@CHATS
def test_structured_output(make: Any) -> None:
    """With a tool that must be called. The Hugging Face package accepts no pydantic class here."""
    model = make().with_structured_output(Place.model_json_schema(), method="function_calling")
    assert Place.model_validate(model.invoke("Where is the Louvre?"))
