"""LlamaIndex's OpenAILike: chats, streams, structured output, and agents with tools."""

import asyncio
from typing import Any

import pytest
from llama_index.core.agent.workflow import AgentStream, AgentWorkflow, FunctionAgent, ReActAgent, ToolCallResult
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

from tests.clients.served import GUARDED_URL, KEY, RESULT, call, script


def get_weather(city: str, days: int = 1) -> str:
    """The weather in a city."""
    return f"sunny in {city} for {days} days"


def llm(**options: Any) -> OpenAILike:
    common: dict[str, Any] = {
        "model": "local",
        "api_base": f"{GUARDED_URL}/v1",
        "api_key": KEY,
        "is_chat_model": True,
        "is_function_calling_model": True,
        "context_window": 8192,
        "max_tokens": 200,
        "max_retries": 0,
    }
    return OpenAILike(**common | options)


class Place(BaseModel):
    """A place."""

    city: str
    visited: bool


PARIS = Place(city="Paris", visited=True)
WEATHER = call("get_weather", city="Paris", days=2)


def test_chat_and_completion() -> None:
    asked = [
        ChatMessage(role="system", content="Be brief."),
        ChatMessage(role="user", content=script("One two three.")),
    ]
    assert llm().chat(asked).message.content == "One two three."
    pieces = [piece.delta for piece in llm().stream_chat(asked)]
    assert "".join(piece or "" for piece in pieces) == "One two three."
    assert str(llm().complete(script("Four."))) == "Four."
    assert len(str(llm(is_chat_model=False, max_tokens=4).complete("Any text"))) > 0


@pytest.mark.parametrize("streaming", [False, True])
def test_function_agent(streaming: bool) -> None:
    async def use() -> Any:
        agent = FunctionAgent(tools=[get_weather], llm=llm(), system_prompt="Help.", streaming=streaming)
        handler = agent.run(script(WEATHER * 2, f"It is {RESULT}."))
        return [event async for event in handler.stream_events()], await handler

    events, answer = asyncio.run(use())
    assert str(answer) == "It is sunny in Paris for 2 days."
    results = [str(event.tool_output) for event in events if isinstance(event, ToolCallResult)]
    assert results == ["sunny in Paris for 2 days"] * 2
    assert any(isinstance(event, AgentStream) and event.delta for event in events) == streaming


def test_react_agent() -> None:
    """Calls as text: its form is the framework's, and the prompt describes it."""

    async def use() -> Any:
        agent = ReActAgent(tools=[get_weather], llm=llm())
        act = 'Thought: I look.\nAction: get_weather\nAction Input: {"city": "Paris", "days": 3}'
        return await agent.run(script(act, f"Thought: I can answer.\nAnswer: {RESULT}"))

    assert "sunny in Paris for 3 days" in str(asyncio.run(use()))


def test_workflow_of_agents() -> None:
    async def use() -> Any:
        clerk = FunctionAgent(name="clerk", description="Asks.", llm=llm(), can_handoff_to=["expert"])
        expert = FunctionAgent(name="expert", description="Knows.", llm=llm(), tools=[get_weather])
        workflow = AgentWorkflow(agents=[clerk, expert], root_agent="clerk")
        return await workflow.run(script(call("handoff", to_agent="expert", reason="weather"), WEATHER, "Sunny."))

    assert str(asyncio.run(use())) == "Sunny."


@pytest.mark.parametrize("should_use_structured_outputs", [False, True])
def test_structured_output(should_use_structured_outputs: bool) -> None:
    model = llm(should_use_structured_outputs=should_use_structured_outputs)
    told = PARIS.model_dump_json() if should_use_structured_outputs else call("Place", **PARIS.model_dump())
    assert model.as_structured_llm(Place).complete(script(told)).raw == PARIS
