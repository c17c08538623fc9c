"""smolagents: agents with tools, through OpenAI's SDK and through huggingface_hub."""

import json
from typing import Any

import pytest
from smolagents import CodeAgent, InferenceClientModel, LogLevel, OpenAIServerModel, ToolCallingAgent, tool

from tests.clients.served import GUARDED_URL, KEY, call, script


@tool
def get_weather(city: str, days: int = 1) -> str:
    """The weather in a city.

    Args:
        city: its name
        days: how far ahead
    """
    return f"sunny in {city} for {days} days"


@tool
def now() -> str:
    """The time of day."""
    return "noon"


MODELS = {
    "openai": OpenAIServerModel("local", api_base=f"{GUARDED_URL}/v1", api_key=KEY, temperature=0.5),
    "hub": InferenceClientModel(GUARDED_URL, token=KEY, max_tokens=300),
}
EACH = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)


@EACH
@pytest.mark.parametrize("stream", [False, True])
def test_tool_calling_agent(model: Any, stream: bool) -> None:
    agent = ToolCallingAgent([get_weather, now], model, stream_outputs=stream, verbosity_level=LogLevel.OFF)
    told = script(
        call("now") + call("get_weather", city="Paris", days=2), call("final_answer", answer="sunny"), "Never said."
    )
    answer = agent.run(told, return_full_result=True)
    assert (answer.state, answer.output) == ("success", "sunny")
    observed = agent.memory.steps[1].observations
    assert "noon" in observed
    assert "sunny in Paris for 2 days" in observed
    assert answer.token_usage.output_tokens > 20


def code_agent(model: Any, *texts: str, **options: Any) -> Any:
    """The result of an agent whose actions are code."""
    agent = CodeAgent([get_weather], model, verbosity_level=LogLevel.OFF, **options)
    return agent.run(script(*texts))


CODE = ["x = get_weather('Paris')\nprint(x)", "final_answer(x.upper())"]


@EACH
def test_code_agent(model: Any) -> None:
    """The code stands between two tags, of which the second is a stop sequence."""
    texts = [f"Thought: so.\n<code>\n{one}\n</code> never said" for one in CODE]
    assert code_agent(model, *texts) == "SUNNY IN PARIS FOR 1 DAYS"


def test_structured_code_agent() -> None:
    """The code stands in an object that a response format asks for."""
    texts = [json.dumps({"thought": "So.", "code": one}) for one in CODE]
    assert code_agent(MODELS["openai"], *texts, use_structured_outputs_internally=True) == "SUNNY IN PARIS FOR 1 DAYS"
