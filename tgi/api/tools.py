"""The tools of a chat: which of them the model may call, and whether it must."""

from collections.abc import Sequence
from typing import NamedTuple

from tgi.api import errors
from tgi.api.shapes.chat import ChatRequest, FunctionName, NamedTool, Tool, ToolChoiceObject


class Offer(NamedTuple):
    """What the model is told. Without tools it answers in text."""

    tools: Sequence[Tool] = ()
    must: bool = False  # call one of them at least

    @classmethod
    def of(cls, request: ChatRequest) -> "Offer":
        """What a request offers. Raises ApiError: 422 if its tools do not fit together, or not the rest of it."""
        if request.tools is not None and request.constraints:
            raise errors.tool("Grammar and tools are mutually exclusive", next(iter(request.constraints)))
        tools = request.tools or []
        match request.tool_choice:
            case "none":
                return cls()
            case None | "auto":
                offer = cls(tools)
            case "required":
                offer = cls(tools, must=True)
            case ToolChoiceObject(type="allowed_tools", allowed_tools=allowed) if allowed is not None:
                offer = cls(_named(tools, allowed.tools), allowed.mode == "required")
            case list(choices):
                offer = cls(_named(tools, choices), must=True)
            case str(name) | ToolChoiceObject(function=FunctionName(name=name)):
                offer = cls(_named(tools, [name]), must=True)
        _check([tool.function.name for tool in tools])
        return offer


def _named(tools: Sequence[Tool], choices: Sequence[str | NamedTool]) -> list[Tool]:
    """The tools that a choice names, in their own order. Raises ApiError if one is not there."""
    names = {choice.function.name if isinstance(choice, NamedTool) else choice for choice in choices}
    if not names:
        raise errors.tool("`tool_choice` names no tool", "tool_choice")
    for name in sorted(names - {tool.function.name for tool in tools}):
        raise errors.tool(f"Tool with name {name} not found", "tool_choice")
    return [tool for tool in tools if tool.function.name in names]


def _check(names: list[str]) -> None:
    """Raises ApiError for names that do not tell the tools apart."""
    if "" in names:
        raise errors.tool("a tool needs a name", "tools")
    for name in names:
        if names.count(name) > 1:
            raise errors.tool(f"Tool names must be unique. Given twice: {name}", "tools")
