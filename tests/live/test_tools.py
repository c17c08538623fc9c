"""Tool calls through a whole process tree, by a random model with a template in Hermes' format: whatever tokens it
samples, calls have the right form and valid arguments."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.live.server import Server
from tests.models import model
from tests.schemas import validate

pytestmark = pytest.mark.live

TEMPLATE = """\
{%- if tools %}system: {% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call them so: <tool_call>{"name": NAME, "arguments": ARGUMENTS}</tool_call>
{% endif %}
{%- for message in messages %}{{ message.role }}: {{ message.content or "" }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{% endfor %}
{%- if add_generation_prompt %}assistant: {% endif %}"""


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [tool("turn", left={"type": "boolean"}), tool("go", speed={"enum": ["slow", "fast"]}), tool("stop")]
SCHEMAS = {each["function"]["name"]: each["function"]["parameters"] for each in TOOLS}
REQUEST = {
    "messages": [{"role": "user", "content": "Drive."}],
    "tools": TOOLS,
    "tool_choice": "required",
    "max_tokens": 200,
}
Calls = list[tuple[str, str]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("tools")
    template = directory / "hermes.jinja"
    template.write_text(TEMPLATE)
    options = ("--dtype", "float32", "--validation-workers", "1", "--tokenizer-config-path", str(template))
    with Server(directory / "run", "--model-id", str(model("llama")), *options) as server:
        yield server.start().wait_until_ready()


def whole(server: Server, **fields: Any) -> tuple[dict[str, Any], Calls] | None:
    """The choice and its calls; None if the answer was rejected because it was cut off within a call."""
    answer = server.client.post("/v1/chat/completions", json=REQUEST | fields)
    if answer.status_code == 422:
        assert answer.json()["error"]["message"].startswith("Tool error: Failed to parse generated text: EOF"), (
            answer.text
        )
        return None
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    message = choice["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
    for name, arguments in calls:
        validate(arguments, SCHEMAS[name])
    assert len({call["id"] for call in message["tool_calls"]}) == len(calls)
    return choice, calls


def streamed(server: Server, **fields: Any) -> tuple[Calls, str]:
    """The calls of a stream, joined from its pieces, and its finish reason."""
    answer = server.client.post("/v1/chat/completions", json=REQUEST | fields | {"stream": True})
    data = [event.removeprefix("data: ") for event in answer.text.split("\n\n") if event]
    assert data.pop() == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in data]
    pieces = [piece for choice in choices for piece in choice["delta"].get("tool_calls", ())]
    names = [piece["function"]["name"] for piece in pieces if "id" in piece]
    assert [piece["index"] for piece in pieces if "id" in piece] == [*range(len(names))]
    calls = [
        (name, "".join(piece["function"]["arguments"] for piece in pieces if piece["index"] == index))
        for index, name in enumerate(names)
    ]
    return calls, choices[-1]["finish_reason"]


def test_several_calls_whole_and_streamed(server: Server) -> None:
    """The same seed gives the same calls in a whole answer and in a stream."""

    def one(seed: int) -> int:
        asked = {"seed": seed, "parallel_tool_calls": True}
        found, (calls, reason) = whole(server, **asked), streamed(server, **asked)
        if found is None:
            assert reason == "length"
            return 0
        choice, expected = found
        assert (calls, reason) == (expected, choice["finish_reason"])
        assert choice["message"]["content"] is None
        return len(calls)

    with ThreadPoolExecutor(4) as pool:
        counts = list(pool.map(one, range(12)))
    assert max(counts) > 1
    assert counts.count(0) < len(counts)


@pytest.mark.parametrize("choice", ["required", "go", ["turn", "stop"]], ids=str)
def test_one_call(server: Server, choice: Any) -> None:
    for seed in range(3):
        found = whole(server, seed=seed, tool_choice=choice, parallel_tool_calls=False)
        assert found is not None
        answer, [(name, _)] = found
        assert answer["finish_reason"] == "tool_calls"
        assert choice == "required" or name in choice


def test_the_result_of_a_call_is_part_of_the_next_prompt(server: Server) -> None:
    """The prompt of the second turn contains the call in the model's format and the result."""
    found = whole(server, seed=1, tool_choice="go", parallel_tool_calls=False)
    assert found is not None
    message = found[0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "gone"}
    turns = [*REQUEST["messages"], message, result]
    tokenized = server.client.post("/chat_tokenize", json=REQUEST | {"messages": turns}).json()
    assert '<tool_call>{"name": "go", "arguments": {"speed":' in tokenized["templated_text"]
    assert "tool: gone" in tokenized["templated_text"]
    assert whole(server, messages=turns, parallel_tool_calls=False) is not None


@pytest.mark.parametrize("stream", [False, True])
def test_keywords_that_cannot_be_enforced_are_hints_unless_a_tool_is_strict(server: Server, stream: bool) -> None:
    # One call of few tokens, whatever is drawn: the answer is never cut off within a call.
    switches = {"type": "array", "items": {"type": "boolean"}, "maxItems": 2, "uniqueItems": True}
    schema = {"type": "object", "properties": {"a": switches}, "additionalProperties": False}
    for strict, status in ((False, 200), (True, 422)):
        tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": strict}}
        body = REQUEST | {"tools": [*TOOLS, tool], "parallel_tool_calls": False, "stream": stream}
        answer = server.client.post("/v1/chat/completions", json=body)
        assert answer.status_code == status
        assert answer.headers.get("x-tgi-not-enforced") == (None if strict else "f#/properties/a/uniqueItems")
        assert not strict or "`uniqueItems`" in answer.json()["error"]["message"]
