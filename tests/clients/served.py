"""Shared by the checks of all clients: the servers' addresses, prompts with known answers, and tools."""

import json
import os

from tests.clients.answering.sitecustomize import RESULT as RESULT
from tests.clients.answering.sitecustomize import SCRIPT, THOUGHT_END

URL = os.environ["TGI_URL"]  # answers QUESTION, and grammars
# A server that requires a key. Its model answers as its prompt says, see `script`.
GUARDED_URL, KEY = os.environ["TGI_GUARDED_URL"], os.environ["TGI_KEY"]
QUESTION = "What is the capital of France?"
ANSWER = "Paris"
SYSTEM = "You answer questions on geography."
MESSAGES = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
PROMPT = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"


def function(name: str, description: str, **properties: object) -> dict[str, object]:
    """A tool, with all of its properties required."""
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"name": name, "description": description, "parameters": schema, "strict": True}


# Arguments are enumerations: their values are known without a model.
CITIES, UNITS = ["Paris", "London", "Berlin"], ["celsius", "fahrenheit"]
WEATHER = function("get_weather", "The weather in a city now", city={"enum": CITIES}, unit={"enum": UNITS})
CLOCK = function("get_time", "The time of day in a city", city={"enum": CITIES})
TOOLS = [{"type": "function", "function": each} for each in (WEATHER, CLOCK)]
ASKED = [{"role": "user", "content": "What is the weather in Paris, in celsius?"}]


def check_call(name: str, arguments: str) -> None:
    """Asserts that this is a call of one of TOOLS with arguments that its schema allows."""
    given = json.loads(arguments)
    assert given.pop("city") in CITIES
    assert name in ("get_weather", "get_time")
    if name == "get_weather":
        assert given.pop("unit") in UNITS
    assert given == {}


# A chat with GUARDED_URL, whose model answers as it is told.


def script(*texts: str) -> str:
    """A message that says what the model answers next, in its next turns."""
    return f"{SCRIPT} {json.dumps(texts)}"


def call(name: str, **arguments: object) -> str:
    """How the model calls a tool."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def thought(text: str) -> str:
    """How the model reasons before an answer."""
    return f"<think>\n{text}{THOUGHT_END}"
