"""Fits what clients send of messages and tools to what a template expects of them."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from tgi.tokenizer.template import TemplateError
from tgi.tokenizer.traits import Traits

# A template with this in it (Mistral's) refuses ids of calls that do not have nine characters.
SHORT_IDS = "length != 9"

Object = dict[str, Any]


class Arguments(Object):
    """The arguments of a call. A template that takes them for the text that OpenAI's clients send gets JSON."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, other: str) -> str:
        return str(self) + other

    def __radd__(self, other: str) -> str:
        return other + str(self)


def fitted(messages: list[Object], traits: Traits, source: str) -> list[Object]:
    """Messages for the template with these traits and this text. Raises TemplateError."""
    fit = [_message(message) for message in messages]
    _name_results(fit)
    for message in fit:
        content = message.get("content") if traits.calls else _with_calls(message)
        message["content"] = _content(content, traits.parts, traits.strings)
    if SHORT_IDS in source:
        _shorten_ids(fit)
    return fit


def _message(message: Object) -> Object:
    """OpenAI's clients send the arguments of a call as JSON text; templates are written for the object itself."""
    calls = message.get("tool_calls")
    if not calls:  # many templates ask only whether the field is there
        return {name: value for name, value in message.items() if name != "tool_calls"}
    if not isinstance(calls, list):
        return dict(message)
    return {**message, "tool_calls": [_call(call) if isinstance(call, dict) else call for call in calls]}


def _call(call: Object) -> Object:
    function = call.get("function")
    if not isinstance(function, dict):
        return call
    function = _named(function, "arguments", "parameters")
    if "arguments" in function:
        function["arguments"] = _arguments(function["arguments"])
    return {**call, "function": function}


def _with_calls(message: Object) -> Any:
    """A message's content with its calls written behind it, in the form that TOOL_PROMPT asks for."""
    calls, content = message.get("tool_calls"), message.get("content")
    functions = [call.get("function") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    said = "\n".join(
        json.dumps({"name": function.get("name"), "parameters": function.get("arguments")}, ensure_ascii=False)
        for function in functions
        if isinstance(function, dict)
    )
    if not said:
        return content
    if isinstance(content, list):
        return [*content, {"type": "text", "text": said}]
    return f"{content}\n{said}" if content else said


def _name_results(messages: list[Object]) -> None:
    """Gives results of calls the names of what was called: OpenAI's clients send ids alone, some templates want
    both."""
    called: dict[str, Any] = {}
    for message in messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else []:
            if isinstance(call, dict) and isinstance(call.get("id"), str) and isinstance(call.get("function"), dict):
                called[call["id"]] = call["function"].get("name")
        id = message.get("tool_call_id")
        if isinstance(id, str) and called.get(id) is not None and message.get("name") is None:
            message["name"] = called[id]


def _shorten_ids(messages: list[Object]) -> None:
    """Gives every id of a call nine characters, the same ones wherever the id stands."""
    for message in messages:
        if isinstance(message.get("tool_call_id"), str):
            message["tool_call_id"] = _short(message["tool_call_id"])
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else []:
            if isinstance(call, dict) and isinstance(call.get("id"), str):
                call["id"] = _short(call["id"])


def _short(id: str) -> str:
    return id if len(id) == 9 and id.isalnum() else hashlib.sha256(id.encode(errors="replace")).hexdigest()[:9]


def _arguments(given: Any) -> Any:
    """The object that a text of JSON stands for; what was given if it is none."""
    value = given
    if isinstance(given, str):
        try:
            value = json.loads(given) if given.strip() else {}
        except (ValueError, RecursionError):
            return given
    return Arguments(value) if isinstance(value, dict) else given


def fitted_tool(tool: Object) -> Object:
    """A tool whose schema stands under the name that templates know."""
    function = tool.get("function")
    return {**tool, "function": _named(function, "parameters", "arguments")} if isinstance(function, dict) else tool


def _named(function: Object, name: str, other: str) -> Object:
    """A function whose field `name` may have come under another name."""
    rest = dict(function)
    if rest.get(name) is None and rest.get(other) is not None:
        rest[name] = rest.pop(other)
    return rest


def _content(content: Any, parts: bool, strings: bool) -> Any:
    """A message's content as a template takes it: its text, or a list of parts if it goes through them."""
    if isinstance(content, str) and parts and not strings:
        return [{"type": "text", "text": content}]
    if isinstance(content, list) and not parts:
        if not all(_is_text(part) for part in content):
            raise TemplateError("the template takes text only, but a message has a part without `text`")
        return "".join(part["text"] for part in content)
    return content


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("text"), str)


def has_text(message: Object) -> bool:
    """Whether a message says anything in text."""
    content = message.get("content")
    return isinstance(content, str) or (isinstance(content, list) and any(_is_text(part) for part in content))
