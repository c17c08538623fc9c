"""Which tools a chat offers to the model, and what the tokenizer is told of them."""

import json
from typing import Any

import pytest

from tests.api.conftest import Front
from tgi.api.errors import ApiError
from tgi.api.serde import Body
from tgi.api.shapes.chat import ChatRequest
from tgi.api.tools import Offer
from tgi.kernel.messages import Generate, Tokenize

ADD, SUB = ({"type": "function", "function": {"name": name, "parameters": {}}} for name in ("add", "sub"))
NAMED = {"type": "function", "function": {"name": "add"}}
MESSAGES = [{"role": "user", "content": "x"}]
decode = Body(ChatRequest).decode


def allowed(mode: str, *tools: object) -> dict[str, object]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def offer(**fields: object) -> Offer:
    return Offer.of(decode(json.dumps({"messages": MESSAGES, **fields}).encode()))


@pytest.mark.parametrize(
    ("choice", "names", "must"),
    [
        (None, ["add", "sub"], False),
        ("auto", ["add", "sub"], False),
        ("required", ["add", "sub"], True),
        ("none", [], False),
        ("add", ["add"], True),
        (NAMED, ["add"], True),
        ({"function": {"name": "add"}}, ["add"], True),
        ({**ADD, "extra": 1}, ["add"], True),
        (["sub", NAMED], ["add", "sub"], True),
        (["sub"], ["sub"], True),
        (allowed("auto", NAMED), ["add"], False),
        (allowed("required", NAMED), ["add"], True),
    ],
)
def test_tools_that_may_be_called(choice: object, names: list[str], must: bool) -> None:
    found = offer(tools=[ADD, SUB], tool_choice=choice)
    assert ([tool.function.name for tool in found.tools], found.must) == (names, must)


@pytest.mark.parametrize("fields", [{}, {"tools": []}, {"tools": None}, {"tools": [], "tool_choice": "required"}])
def test_no_tools(fields: dict[str, object]) -> None:
    assert not offer(**fields).tools


def test_what_may_not_be_called_is_not_looked_at() -> None:
    assert not offer(tools=[ADD, ADD], tool_choice="none").tools


FORM = {"type": "json_object"}


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"tools": [ADD], "tool_choice": "mul"}, "Tool with name mul not found"),
        ({"tool_choice": "mul"}, "Tool with name mul not found"),
        ({"tools": [ADD], "tool_choice": ["add", "mul"]}, "Tool with name mul not found"),
        ({"tools": [ADD], "tool_choice": allowed("auto", {"function": {"name": "m"}})}, "Tool with name m not found"),
        ({"tools": [ADD], "tool_choice": allowed("auto")}, "`tool_choice` names no tool"),
        ({"tools": [], "response_format": FORM}, "Grammar and tools are mutually exclusive"),
        (
            {"tools": [ADD], "response_format": FORM, "tool_choice": "mul"},
            "Grammar and tools are mutually exclusive",
        ),
        ({"tools": [ADD, SUB, ADD]}, "Tool names must be unique. Given twice: add"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "a tool needs a name"),
    ],
)
def test_tools_that_do_not_fit(fields: dict[str, object], text: str) -> None:
    with pytest.raises(ApiError) as refusal:
        offer(**fields)
    assert (refusal.value.status, refusal.value.error_type) == (422, "tool_error")
    assert refusal.value.message == f"Tool error: {text}"


def told(front: Front, path: str, kind: type, **fields: Any) -> Any:
    """What the tokenizer is told when these fields are sent."""
    front.post(path, json.dumps({"messages": MESSAGES, **fields}))
    return json.loads(front.tokenizers[0].next(kind).chat)


@pytest.mark.parametrize(("path", "kind"), [("/v1/chat/completions", Generate), ("/chat_tokenize", Tokenize)])
def test_what_the_tokenizer_is_told(front: Front, path: str, kind: type) -> None:
    def chat(**fields: Any) -> Any:
        return told(front, path, kind, **fields)

    plain = {"messages": MESSAGES}
    assert chat() == chat(tools=[ADD], tool_choice="none", parallel_tool_calls=True, tool_prompt="Use.") == plain
    assert chat(tools=[ADD]) == chat(tools=[ADD], parallel_tool_calls=None) == {
        **plain, "tools": [ADD], "tool_choice": "auto",
    }  # fmt: skip
    assert chat(tools=[ADD, SUB], tool_choice="sub", parallel_tool_calls=False, tool_prompt="Use.") == {
        **plain, "tools": [SUB], "tool_choice": "required", "parallel_tool_calls": False, "tool_prompt": "Use.",
    }  # fmt: skip
    older = {"type": "function", "function": {"name": "add", "description": "Adds.", "arguments": {"type": "object"}}}
    assert chat(tools=[older])["tools"] == [older]
