"""The prompt of a chat as JSON for the tokenizer, and the tools that the model may call in it."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from tgi.api import errors
from tgi.api.shapes.chat import ChatRequest, FunctionName, ImageChunk, NamedTool, Tool, ToolChoiceObject


class ToolSelection(NamedTuple):
    """The tools that the model may call. Without tools it answers in text."""

    tools: Sequence[Tool] = ()
    required: bool = False  # the model must call at least one

    @classmethod
    def from_request(cls, request: ChatRequest) -> "ToolSelection":
        """Applies `tool_choice` to `tools`. Raises ApiError: 422 for invalid tools, an unknown tool, or a choice that
        needs tools without them."""
        tools = request.tools or []
        match request.tool_choice:
            case "none":
                return cls()
            case None | "auto":
                selection = cls(tools)
            case "required" if not tools:
                raise errors.tool_error("`tool_choice` is `required`, but `tools` has none", "tool_choice")
            case "required":
                selection = cls(tools, required=True)
            case ToolChoiceObject(type="allowed_tools", allowed_tools=allowed) if allowed is not None:
                selection = cls(_chosen(tools, allowed.tools), allowed.mode == "required")
            case list(choices):
                selection = cls(_chosen(tools, choices), required=True)
            case str(name) | ToolChoiceObject(function=FunctionName(name=name)):
                selection = cls(_chosen(tools, [name]), required=True)
        _check_names([tool.function.name for tool in tools])
        return selection


def chat_prompt_json(request: ChatRequest, selection: ToolSelection) -> bytes:
    """The chat as JSON (tokenizer/chat.py names its keys). Raises ApiError: 422 for images."""
    for message in request.messages:
        if isinstance(message.content, list) and any(isinstance(part, ImageChunk) for part in message.content):
            text = "`image_url` parts are not supported: this model reads text alone"
            raise errors.validation_error(text, param="messages")
    return request.chat(selection.tools, selection.required)


def _chosen(tools: Sequence[Tool], choices: Sequence[str | NamedTool]) -> list[Tool]:
    """The tools that a choice names, in the order of `tools`. Raises ApiError for an unknown name."""
    names = {choice.function.name if isinstance(choice, NamedTool) else choice for choice in choices}
    if not names:
        raise errors.tool_error("`tool_choice` names no tool", "tool_choice")
    for name in sorted(names - {tool.function.name for tool in tools}):
        raise errors.tool_error(f"Tool with name {name} not found", "tool_choice")
    return [tool for tool in tools if tool.function.name in names]


def _check_names(names: list[str]) -> None:
    """Raises ApiError for an empty name and for one that is given twice."""
    if "" in names:
        raise errors.tool_error("a tool needs a name", "tools")
    for name, count in Counter(names).items():
        if count > 1:
            raise errors.tool_error(f"Tool names must be unique. Given twice: {name}", "tools")
