"""OpenAI's agents SDK, over Responses and Chat Completions: tools, a handoff, streams, structured output, sessions."""

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest
from agents import (
    Agent,
    ItemHelpers,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    handoff,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from openai.types.shared import Reasoning
from pydantic import BaseModel

from tests.clients.served import GUARDED_URL, KEY, RESULT, call, script, thought

set_tracing_disabled(True)
MODELS = pytest.mark.parametrize("kind", [OpenAIResponsesModel, OpenAIChatCompletionsModel])


class Report(BaseModel):
    """A structured answer."""

    city: str
    degrees: float
    notes: list[str] | None = None


@function_tool
def get_weather(city: str, days: int = 1) -> str:
    """The weather in a city.

    Args:
        city: its name
        days: how far ahead
    """
    return f"sunny in {city} for {days} days"


@function_tool
def fail(reason: str) -> str:
    """Fails."""
    raise ValueError(reason)


def run(kind: type[Any], use: Any) -> Any:
    """What `use` returns for a model of this kind."""

    async def with_client() -> Any:
        async with AsyncOpenAI(base_url=f"{GUARDED_URL}/v1", api_key=KEY, max_retries=0, timeout=60) as client:
            return await use(kind("local", client))

    return asyncio.run(with_client())


WEATHER = call("get_weather", city="Paris", days=3)
FORECAST = "sunny in Paris for 3 days"


@MODELS
def test_tools(kind: type[Any]) -> None:
    def use(model: Model) -> Awaitable[Any]:
        settings = ModelSettings(temperature=0.5, top_p=0.9, max_tokens=200, parallel_tool_calls=True, store=False)
        agent = Agent("Guide", instructions="Help.", model=model, tools=[get_weather, fail], model_settings=settings)
        calls = thought("I look.") + WEATHER + call("fail", reason="no ticket")
        return Runner.run(agent, script(calls, f"I see: {RESULT}"))

    result = run(kind, use)
    kinds = [item.type for item in result.new_items]
    assert [kind for kind in kinds if kind != "reasoning_item"] == [
        *["tool_call_item"] * 2,
        *["tool_call_output_item"] * 2,
        "message_output_item",
    ]
    outputs = [item.output for item in result.new_items if item.type == "tool_call_output_item"]
    assert outputs[0] == FORECAST
    assert result.final_output == f"I see: {outputs[1]}"
    assert result.context_wrapper.usage.requests == 2
    assert result.context_wrapper.usage.output_tokens > 20


@MODELS
def test_stream(kind: type[Any]) -> None:
    async def use(model: Model) -> Any:
        settings = ModelSettings(include_usage=True, reasoning=Reasoning(effort="low", summary="auto"))
        agent = Agent("Guide", model=model, tools=[get_weather], model_settings=settings)
        result = Runner.run_streamed(agent, script(thought("I look.") + WEATHER, f"It is {RESULT}."))
        return result, [event async for event in result.stream_events()]

    result, events = run(kind, use)
    assert result.final_output == f"It is {FORECAST}."
    raw = [event.data for event in events if event.type == "raw_response_event"]
    assert "".join(event.delta for event in raw if event.type == "response.output_text.delta") == result.final_output
    arguments = [event.delta for event in raw if event.type == "response.function_call_arguments.delta"]
    assert "".join(arguments) == '{"city": "Paris", "days": 3}'
    assert result.context_wrapper.usage.output_tokens > 20
    assert any(event.type.startswith("response.reasoning") for event in raw)


@MODELS
def test_structured_output(kind: type[Any]) -> None:
    """Together with tools: the schema holds for the answer after the calls."""
    written = Report(city="Paris", degrees=21.5, notes=["dry"])

    def use(model: Model) -> Awaitable[Any]:
        agent = Agent("Guide", model=model, output_type=Report, tools=[get_weather])
        return Runner.run(agent, script(WEATHER, written.model_dump_json()))

    assert run(kind, use).final_output == written


@MODELS
def test_handoff(kind: type[Any]) -> None:
    def use(model: Model) -> Awaitable[Any]:
        expert = Agent("Expert", instructions="You know the weather.", model=model, tools=[get_weather])
        first = Agent("Clerk", model=model, handoffs=[handoff(expert)])
        return Runner.run(first, script(call("transfer_to_expert"), WEATHER, f"Expert: {RESULT}"))

    result = run(kind, use)
    assert result.last_agent.name == "Expert"
    assert result.final_output == f"Expert: {FORECAST}"


@MODELS
def test_agent_as_tool_and_required_calls(kind: type[Any]) -> None:
    def use(model: Model) -> Awaitable[Any]:
        inner = Agent("Inner", model=model)
        tool = inner.as_tool("ask_inner", "Asks the other agent.")
        outer = Agent("Outer", model=model, tools=[tool], model_settings=ModelSettings(tool_choice="required"))
        return Runner.run(outer, script(call("ask_inner", input=script("from inside")), f"It says {RESULT}"))

    assert run(kind, use).final_output == "It says from inside"


@MODELS
def test_session(kind: type[Any]) -> None:
    """The items of one run, sent back with the next."""

    async def use(model: Model) -> Any:
        agent, session = Agent("Guide", model=model, tools=[get_weather]), SQLiteSession("one")
        await Runner.run(agent, script(thought("I look.") + WEATHER, "Done.", f"You said: {RESULT}"), session=session)
        return await Runner.run(agent, "And now?", session=session)

    assert run(kind, use).final_output == "You said: And now?"


def test_previous_response() -> None:
    async def use(model: Model) -> Any:
        agent = Agent("Guide", model=model, tools=[get_weather])
        told = script(WEATHER, "Done.", f"You said: {RESULT}")
        first = await Runner.run(agent, told, auto_previous_response_id=True)
        second = await Runner.run(agent, "And now?", previous_response_id=first.last_response_id)
        return first, second

    first, second = run(OpenAIResponsesModel, use)
    assert second.final_output == "You said: And now?"
    assert ItemHelpers.text_message_outputs(first.new_items) == "Done."
