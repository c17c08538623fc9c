"""What the checks of all clients share: where the servers are, and a question whose answer is known."""

import json
import os

URL = os.environ["TGI_URL"]  # the demo model
GUARDED_URL, KEY = os.environ["TGI_GUARDED_URL"], os.environ["TGI_KEY"]  # a server that wants a key
QUESTION = "What is the capital of France?"
ANSWER = "Paris"
# With the system message that its template puts in by default, the small model wavers between English and French.
SYSTEM = "You answer questions on geography."
MESSAGES = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
PROMPT = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"


def function(name: str, description: str, **properties: object) -> dict[str, object]:
    """A tool, with all of its properties required."""
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"name": name, "description": description, "parameters": schema, "strict": True}


# Arguments are enumerations, so that a call has an end however small the model.
CITIES, UNITS = ["Paris", "London", "Berlin"], ["celsius", "fahrenheit"]
WEATHER = function("get_weather", "The weather in a city now", city={"enum": CITIES}, unit={"enum": UNITS})
CLOCK = function("get_time", "The time of day in a city", city={"enum": CITIES})
TOOLS = [{"type": "function", "function": each} for each in (WEATHER, CLOCK)]
ASKED = [{"role": "user", "content": "What is the weather in Paris, in celsius?"}]


def check_call(name: str, arguments: str) -> None:
    """A call of one of the tools, valid by its schema."""
    given = json.loads(arguments)
    assert given.pop("city") in CITIES
    assert name in ("get_weather", "get_time")
    if name == "get_weather":
        assert given.pop("unit") in UNITS
    assert given == {}
