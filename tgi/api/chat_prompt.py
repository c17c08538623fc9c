"""The prompt of a chat as JSON for the tokenizer, and the tools that the model may call in it."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from tgi.api import errors
from tgi.api.custom_tools import CustomFormat, custom_call, custom_tool
from tgi.api.shapes.chat import (
    ChatRequest,
    FunctionName,
    ImagePart,
    ImageSource,
    NamedTool,
    Tool,
    ToolChoiceObject,
)


class ToolSelection(NamedTuple):
    """The tools that the model may call, all as functions. Without tools it answers in text."""

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
            case (
                str(name)
                | ToolChoiceObject(type="custom", custom=FunctionName(name=name))
                | ToolChoiceObject(function=FunctionName(name=name))
            ):
                selection = cls(_chosen(tools, [name]), required=True)
        _check_names([tool.name for tool in tools])
        return selection._replace(tools=[_function_tool(tool) for tool in selection.tools])


def chat_prompt_json(request: ChatRequest, selection: ToolSelection, images: list[ImageSource] | None = None) -> bytes:
    """The chat as JSON (tokenizer/chat.py names its keys), with calls of custom tools as those of functions. Appends
    where its images are to `images`; None: the model reads text alone. Raises ApiError: 422 for images then."""
    for message in request.messages:
        parts: list[Any] = message.content if isinstance(message.content, list) else []
        for at, part in enumerate(parts):
            if isinstance(part, ImagePart) and part.source is not None:
                if images is None:
                    text = f"{part.kind} are not supported: this model reads text alone"
                    raise errors.validation_error(text, param=part.param)
                images.append(part.source)
                parts[at] = ImagePart()
        if message.tool_calls:
            message.tool_calls = [
                call if call.custom is None else custom_call(call.id, call.custom.name, call.custom.input)
                for call in message.tool_calls
            ]
    return request.chat(selection.tools, selection.required)


def _function_tool(tool: Tool) -> Tool:
    """A tool as a function. Raises ApiError: 422 for the format of a custom tool."""
    if tool.function is not None or tool.custom is None:
        return tool
    grammar = tool.custom.format and tool.custom.format.grammar
    form = CustomFormat(grammar.syntax, grammar.definition) if grammar else None
    return custom_tool(tool.name, tool.custom.description, form, "tools")


def _chosen(tools: Sequence[Tool], choices: Sequence[str | NamedTool]) -> list[Tool]:
    """The tools that a choice names, in the order of `tools`. Raises ApiError for an unknown name."""
    names = {choice.name if isinstance(choice, NamedTool) else choice for choice in choices}
    if not names:
        raise errors.tool_error("`tool_choice` names no tool", "tool_choice")
    for name in sorted(names - {tool.name for tool in tools}):
        raise errors.tool_error(f"Tool with name {name} not found", "tool_choice")
    return [tool for tool in tools if tool.name in names]


def _check_names(names: list[str]) -> None:
    """Raises ApiError for an empty name and for one that is given twice."""
    if "" in names:
        raise errors.tool_error("a tool needs a name", "tools")
    for name, count in Counter(names).items():
        if count > 1:
            raise errors.tool_error(f"Tool names must be unique. Given twice: {name}", "tools")
