"""Pydantic AI with its three models for this server: Chat Completions, Responses and Anthropic's Messages."""

import asyncio
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent, ModelRetry, NativeOutput, PromptedOutput, ToolOutput, UsageLimits
from pydantic_ai.messages import ThinkingPart, ToolCallPart
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel, OpenAIResponsesModelSettings
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients.served import GUARDED_URL, KEY, RESULT, call, script, thought

SUMMARY: Any = {"openai_reasoning_summary": "detailed"}  # else the reasoning is in provider_details
LOOP = asyncio.Runner()  # one event loop for all tests: the providers share their connections
MODELS = {
    "chat": OpenAIChatModel("local", provider=OpenAIProvider(base_url=f"{GUARDED_URL}/v1", api_key=KEY)),
    "responses": OpenAIResponsesModel("local", provider=OpenAIProvider(base_url=f"{GUARDED_URL}/v1", api_key=KEY)),
    "messages": AnthropicModel("claude-sonnet-4-5", provider=AnthropicProvider(base_url=GUARDED_URL, api_key=KEY)),
}
EACH = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)


class Place(BaseModel):
    """A place."""

    city: str
    visited: bool
    tags: list[str] = []


PARIS = Place(city="Paris", visited=True, tags=["big"])


def guide(model: Any, **options: Any) -> Agent[None, Any]:
    """An agent with two tools; `find` fails on its first call."""
    agent: Agent[None, Any] = Agent(model, instructions="Help.", retries=2, **options)
    seen: list[str] = []

    @agent.tool_plain
    def find(city: str, exact: bool = False) -> dict[str, Any]:
        """Finds a city."""
        seen.append(city)
        if len(seen) == 1:
            raise ModelRetry("not yet")
        return {"found": city, "exact": exact}

    @agent.tool_plain
    def now() -> str:
        """The time."""
        return "noon"

    return agent


FIND = call("find", city="Paris", exact=True)


@EACH
def test_tools(model: Any) -> None:
    """Reasoning, two calls at once, one that is tried again, and the answer."""
    told = script(thought("I look.") + call("now") + FIND, FIND, f"So: {RESULT}")
    settings: Any = {"max_tokens": 300, "temperature": 0.2, "seed": 1, **SUMMARY}
    result = LOOP.run(guide(model).run(told, model_settings=settings))
    assert result.output.startswith("So: ")
    assert '"found":"Paris"' in result.output.replace(" ", "")
    first = result.all_messages()[1].parts
    assert [part.tool_name for part in first if isinstance(part, ToolCallPart)] == ["now", "find"]
    assert [part.content for part in first if isinstance(part, ThinkingPart)] == (
        [] if model is MODELS["messages"] else ["I look."]
    )
    usage = result.usage
    assert (usage.requests, usage.tool_calls) == (3, 2)
    assert usage.input_tokens > usage.output_tokens > 20
    again = LOOP.run(guide(model).run(script("Bye."), message_history=result.all_messages()))
    assert again.output == "Bye."


@EACH
@pytest.mark.parametrize("output", [ToolOutput, NativeOutput, PromptedOutput])
def test_structured_output(model: Any, output: Any) -> None:
    written = PARIS.model_dump_json()
    told = call("final_result", **PARIS.model_dump()) if output is ToolOutput else written
    agent = guide(model, output_type=output(Place))
    assert LOOP.run(agent.run(script(call("now"), told))).output == PARIS


@EACH
def test_stream(model: Any) -> None:
    async def use() -> Any:
        async with guide(model).run_stream(
            script(thought("I look.") + call("now"), f"It is {RESULT}, all day.")
        ) as run:
            pieces = [piece async for piece in run.stream_text(delta=True, debounce_by=None)]
        return pieces, run.usage

    pieces, usage = LOOP.run(use())
    assert "".join(pieces) == "It is noon, all day."
    assert len(pieces) > 2
    assert usage.output_tokens > 10


@EACH
def test_stream_of_structured_output(model: Any) -> None:
    """A call's arguments in pieces, validated as they come."""

    async def use() -> Any:
        agent = guide(model, output_type=Place)
        async with agent.run_stream(script(call("final_result", **PARIS.model_dump()))) as run:
            return [place async for place in run.stream_output(debounce_by=None)]

    places = LOOP.run(use())
    assert places[-1] == PARIS
    assert len(places) > 1


@EACH
def test_events(model: Any) -> None:
    """Every event of a run, with the reasoning in pieces."""

    async def use() -> list[Any]:
        agent = guide(model, model_settings={"thinking": "low", **SUMMARY})
        async with agent.run_stream_events(script(thought("I look.") + call("now"), "Done.")) as events:
            return [event async for event in events]

    events = LOOP.run(use())
    kinds = {event.event_kind for event in events}
    assert {"part_start", "part_delta", "function_tool_call", "function_tool_result", "agent_run_result"} <= kinds
    [thinking] = [
        event.part for event in events if event.event_kind == "part_end" and isinstance(event.part, ThinkingPart)
    ]
    assert thinking.content == "I look."


def test_tokens_are_counted_before_the_request() -> None:
    limits = UsageLimits(input_tokens_limit=5, count_tokens_before_request=True)
    with pytest.raises(Exception, match="input_tokens_limit of 5"):
        LOOP.run(guide(MODELS["messages"]).run(script("Hello."), usage_limits=limits))


def test_previous_response() -> None:
    settings = OpenAIResponsesModelSettings(openai_previous_response_id="auto", openai_reasoning_summary="detailed")
    agent = guide(MODELS["responses"], model_settings=settings)
    first = LOOP.run(agent.run(script(call("now"), "Noon.", f"Yes: {RESULT}")))
    second = LOOP.run(agent.run("Sure?", message_history=first.all_messages()))
    assert second.output == "Yes: Sure?"
