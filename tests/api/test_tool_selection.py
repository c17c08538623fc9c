"""Which tools the model may call, and the chat that the tokenizer receives."""

import json
from typing import Any

import pytest

from tests.api.conftest import Front
from tests.golden.scripts import SCRIPTS
from tgi.api.chat_prompt import ToolSelection
from tgi.api.errors import ApiError
from tgi.api.json_body import JsonBody
from tgi.api.shapes.chat import ChatRequest
from tgi.microkernel.messages.protocol import Generate, Tokenize

ADD, SUB = ({"type": "function", "function": {"name": name, "parameters": {}}} for name in ("add", "sub"))
PATCH = {"type": "custom", "custom": {"name": "patch"}}
NAMED = {"type": "function", "function": {"name": "add"}}
MESSAGES = [{"role": "user", "content": "x"}]
decode = JsonBody(ChatRequest).decode


def allowed(mode: str, *tools: object) -> dict[str, object]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def selection(**fields: object) -> ToolSelection:
    return ToolSelection.from_request(decode(json.dumps({"messages": MESSAGES, **fields}).encode()))


@pytest.mark.parametrize(
    ("choice", "names", "must"),
    [
        (None, ["add", "sub", "patch"], False),
        ("auto", ["add", "sub", "patch"], False),
        ("required", ["add", "sub", "patch"], True),
        ("none", [], False),
        ("add", ["add"], True),
        (NAMED, ["add"], True),
        ({"function": {"name": "add"}}, ["add"], True),
        ({**ADD, "extra": 1}, ["add"], True),
        (["sub", NAMED], ["add", "sub"], True),
        (["sub"], ["sub"], True),
        (allowed("auto", NAMED), ["add"], False),
        (allowed("required", NAMED), ["add"], True),
        (PATCH, ["patch"], True),
        (allowed("auto", PATCH, NAMED), ["add", "patch"], False),
    ],
)
def test_tool_choice_selects_tools(choice: object, names: list[str], must: bool) -> None:
    found = selection(tools=[ADD, SUB, PATCH], tool_choice=choice)
    assert ([tool.name for tool in found.tools], found.required) == (names, must)
    assert all(tool.type == "function" and tool.function for tool in found.tools)


@pytest.mark.parametrize("fields", [{}, {"tools": []}, {"tools": None}, {"tools": [], "tool_choice": "auto"}])
def test_no_tools(fields: dict[str, object]) -> None:
    assert not selection(**fields).tools


def test_tools_are_not_checked_with_choice_none() -> None:
    assert not selection(tools=[ADD, ADD], tool_choice="none").tools


FORM = {"type": "json_object"}


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"tools": [ADD], "tool_choice": "mul"}, "Tool with name mul not found"),
        ({"tool_choice": "mul"}, "Tool with name mul not found"),
        ({"tools": [ADD], "tool_choice": ["add", "mul"]}, "Tool with name mul not found"),
        ({"tools": [ADD], "tool_choice": allowed("auto", {"function": {"name": "m"}})}, "Tool with name m not found"),
        ({"tools": [ADD], "tool_choice": allowed("auto")}, "`tool_choice` names no tool"),
        ({"tools": [ADD], "response_format": FORM, "tool_choice": "mul"}, "Tool with name mul not found"),
        ({"tool_choice": "required"}, "`tool_choice` is `required`, but `tools` has none"),
        ({"tools": [], "tool_choice": "required"}, "`tool_choice` is `required`, but `tools` has none"),
        ({"tools": [ADD, SUB, ADD]}, "Tool names must be unique. Given twice: add"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "a tool needs a name"),
        (
            {"tools": [ADD, {"type": "custom", "custom": {"name": "add"}}]},
            "Tool names must be unique. Given twice: add",
        ),
        ({"tools": [ADD], "tool_choice": PATCH}, "Tool with name patch not found"),
    ],
)
def test_invalid_tools_are_rejected(fields: dict[str, object], text: str) -> None:
    with pytest.raises(ApiError) as rejection:
        selection(**fields)
    assert (rejection.value.status, rejection.value.error_type) == (422, "tool_error")
    assert rejection.value.message == f"Tool error: {text}"


def received_chat(front: Front, path: str, kind: type, **fields: Any) -> Any:
    """The chat that the tokenizer receives for these fields."""
    front.post(path, json.dumps({"messages": MESSAGES, **fields}))
    return json.loads(front.tokenizers[0].next(kind).chat)


@pytest.mark.parametrize(("path", "kind"), [("/v1/chat/completions", Generate), ("/chat_tokenize", Tokenize)])
def test_tools_reach_the_tokenizer(front: Front, path: str, kind: type) -> None:
    def chat(**fields: Any) -> Any:
        return received_chat(front, path, kind, **fields)

    plain = {"messages": MESSAGES}
    options = {"reasoning_effort": "none", "verbosity": "low"}
    assert chat(**options) == {**plain, **options}
    assert chat() == chat(tools=[ADD], tool_choice="none", parallel_tool_calls=True, tool_prompt="Use.") == plain
    assert chat(tools=[ADD]) == chat(tools=[ADD], parallel_tool_calls=None) == {
        **plain, "tools": [ADD], "tool_choice": "auto",
    }  # fmt: skip
    assert chat(tools=[ADD, SUB], tool_choice="sub", parallel_tool_calls=False, tool_prompt="Use.") == {
        **plain, "tools": [SUB], "tool_choice": "required", "parallel_tool_calls": False, "tool_prompt": "Use.",
    }  # fmt: skip
    older = {"type": "function", "function": {"name": "add", "description": "Adds.", "arguments": {"type": "object"}}}
    assert chat(tools=[older])["tools"] == [older]
    call = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": 'a "b"'}}
    custom = chat(messages=[{"role": "assistant", "tool_calls": [call]}], tools=[PATCH])
    assert custom["messages"][0]["tool_calls"] == [
        {"id": "c", "type": "function", "function": {"name": "patch", "arguments": '{"input": "a \\"b\\""}'}}
    ]
    [tool] = custom["tools"]
    assert (tool["type"], tool["function"]["name"]) == ("function", "patch")
    assert [*tool["function"]["parameters"]["properties"]] == ["input"]


def test_a_tool_call_that_is_cut_off_counts_as_failure_only_if_sent_whole(serve: Any) -> None:
    front = serve(SCRIPTS["a call of f that is cut off"]())
    names = ("tgi_request_count", "tgi_request_success", 'tgi_request_failure{err="validation"}')

    def counts() -> list[float]:
        text = front.get("/metrics").body.decode()
        found = dict(line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
        return [float(found.get(name, 0)) for name in names]

    def change(stream: bool) -> list[float]:
        before = counts()
        body = json.dumps({"messages": MESSAGES, "tools": [ADD], "stream": stream})
        assert front.post("/v1/chat/completions", body).status == (200 if stream else 422)
        return [after - was for was, after in zip(before, counts(), strict=True)]

    assert change(stream=False) == [1, 0, 1]
    assert change(stream=True) == [1, 1, 0]


DIVIDED = [name for name in SCRIPTS if name.startswith(("a call of f", "text,", "text that", "reasoning"))]


def test_answers_with_parts_conform_to_the_document(serve: Any) -> None:
    """`post` checks each response against the document."""
    front = serve()
    for script in DIVIDED:
        for fields in ({}, {"stream": True}, {"stream": True, "logprobs": True}):
            front.tokenizers[0].answer = SCRIPTS[script]()
            choices = 2 if "|" in script else 1
            body = json.dumps({"messages": MESSAGES, "tools": [ADD], "n": choices, **fields})
            assert front.post("/v1/chat/completions", body).status in (200, 422)
