"""LangChain over Responses (`use_responses_api`) and Anthropic's Messages: tools, streams, structured output."""

from typing import Any, Literal

import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from tests.clients.served import GUARDED_URL, KEY, RESULT, call, script, thought


@tool
def get_weather(city: str, unit: Literal["celsius", "fahrenheit"] = "celsius") -> str:
    """The weather in a city."""
    return f"21 {unit} in {city}"


class Place(BaseModel):
    """A place."""

    city: str
    visited: bool


def responses(**options: Any) -> ChatOpenAI:
    common: dict[str, Any] = {"base_url": f"{GUARDED_URL}/v1", "api_key": KEY, "max_retries": 0, "max_tokens": 200}
    return ChatOpenAI(model="local", use_responses_api=True, **common | options)


def messages(**options: Any) -> ChatAnthropic:
    common: dict[str, Any] = {"base_url": GUARDED_URL, "api_key": KEY, "max_retries": 0, "max_tokens": 2000}
    return ChatAnthropic(model="claude-sonnet-4-5", **common | options)


CHATS = pytest.mark.parametrize("make", [responses, messages])
WEATHER = call("get_weather", city="Paris", unit="celsius")


@CHATS
def test_tools(make: Any) -> None:
    """A call, its result and the answer, whole and streamed."""
    model = make(temperature=0.5).bind_tools([get_weather])
    asked = [HumanMessage(script(thought("I look.") + WEATHER * 2, f"It is {RESULT}."))]
    called = model.invoke(asked)
    assert isinstance(called, AIMessage)
    assert [each["args"] for each in called.tool_calls] == [{"city": "Paris", "unit": "celsius"}] * 2
    streamed = sum_of(model.stream(asked))
    assert [(each["name"], each["args"]) for each in streamed.tool_calls] == [
        (each["name"], each["args"]) for each in called.tool_calls
    ]
    for answer in (called, streamed):
        results = [get_weather.invoke(each) for each in answer.tool_calls]
        assert all(isinstance(result, ToolMessage) for result in results)
        final = model.invoke([*asked, answer, *results])
        assert final.text == "It is 21 celsius in Paris."
        assert sum_of(model.stream([*asked, answer, *results])).text == final.text
        assert final.usage_metadata["output_tokens"] > 0
        assert final.usage_metadata["total_tokens"] > final.usage_metadata["output_tokens"]


def sum_of(chunks: Any) -> Any:
    first, *others = chunks
    for chunk in others:
        first += chunk
    return first


@CHATS
@pytest.mark.parametrize("choice", ["any", "get_weather"])
def test_tool_choice(make: Any, choice: str) -> None:
    model = make().bind_tools([get_weather], tool_choice=choice, parallel_tool_calls=False)
    assert model.invoke(script(WEATHER)).tool_calls[0]["name"] == "get_weather"


@CHATS
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(make: Any, method: str) -> None:
    place = Place(city="Paris", visited=True)
    told = place.model_dump_json() if method == "json_schema" else call("Place", **place.model_dump())
    assert make().with_structured_output(Place, method=method).invoke(script(told)) == place


REASONING = [
    responses(reasoning={"effort": "low", "summary": "auto"}, output_version="v1"),
    responses(reasoning={"effort": "low", "summary": "auto"}, include=["reasoning.encrypted_content"], store=False),
    messages(thinking={"type": "enabled", "budget_tokens": 1024}),
]


@pytest.mark.parametrize("model", REASONING, ids=["summary", "encrypted", "messages"])
@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_goes_back(model: Any, stream: bool) -> None:
    bound = model.bind_tools([get_weather])
    asked = [HumanMessage(script(thought("I look.") + WEATHER, f"It is {RESULT}."))]
    answer = sum_of(bound.stream(asked)) if stream else bound.invoke(asked)
    blocks = [block for block in answer.content_blocks if block["type"] == "reasoning"]
    assert [block["reasoning"] for block in blocks] == ["I look."]
    final = bound.invoke([*asked, answer, get_weather.invoke(answer.tool_calls[0])])
    assert final.text == "It is 21 celsius in Paris."


@pytest.mark.parametrize("stream", [False, True])
def test_previous_response(stream: bool) -> None:
    model = responses(use_previous_response_id=True, streaming=stream)
    asked = [HumanMessage(script("First.", f"You said: {RESULT}"))]
    first = model.invoke(asked)
    assert first.response_metadata["id"].startswith("resp_")
    assert model.invoke([*asked, first, HumanMessage("Second?")]).text == "You said: Second?"
    by_id = responses().invoke("Third?", previous_response_id=first.response_metadata["id"])
    assert by_id.text == "You said: Third?"


def test_tokens_are_counted() -> None:
    model, asked = messages(), [HumanMessage("How many tokens?")]
    assert (
        5 < model.get_num_tokens_from_messages(asked) < model.get_num_tokens_from_messages(asked, tools=[get_weather])
    )
