"""A chat as clients send it, to the text of a prompt: messages and tools are fitted to what the template expects.

A chat is a JSON object with `messages` (a list of objects as the client sent them) and, all optional, `tools` (a list
of objects), `tool_prompt` (a string), `add_generation_prompt`, `continue_final_message` (true or false) and
`chat_template_kwargs` (an object). null means absent everywhere.
"""

import json
from collections.abc import Mapping
from typing import Any

from tgi.hub.card import Card
from tgi.hub.tokens import special_tokens
from tgi.tokenizer.template import ChatTemplates, TemplateError

# What a model is told about tools that its template does not know, if the client does not say it.
TOOL_PROMPT = (
    "\nGiven the functions available, please respond with a JSON for a function call with its proper arguments that "
    "best answers the given prompt. Respond in the format {name: function name, parameters: dictionary of argument "
    "name and its value}.Do not use variables.\n"
)
# A template may raise an error with whatever a client wrote.
LONGEST_ERROR = 2000

Object = dict[str, Any]


class Chats:
    """Makes the prompts of one model's chats."""

    def __init__(self, templates: ChatTemplates) -> None:
        self._templates = templates

    @classmethod
    def load(cls, card: Card) -> "Chats":
        """With the templates and special tokens of a model directory."""
        return cls(ChatTemplates(card.chat_templates, special_tokens(card.directory)))

    def text(self, chat: bytes) -> str:
        """The prompt of a chat; to be encoded without further special tokens. Raises TemplateError."""
        try:
            return self._text(_read(chat))
        except TemplateError as error:
            message = str(error)[:LONGEST_ERROR].encode(errors="replace").decode()
            raise TemplateError(message) from error
        except RecursionError as error:
            raise TemplateError("the chat is nested too deeply") from error

    def _text(self, chat: Object) -> str:
        tools = [_tool(tool) for tool in _objects(chat, "tools")] or None
        traits = self._templates.traits(tools is not None)
        messages = [_message(message) for message in _objects(chat, "messages")]
        for message in messages:
            message["content"] = _content(message.get("content"), traits.parts, traits.strings)
        proceed, continued = _ending(chat, messages)
        if tools is not None:
            _append(messages[:-1] if continued else messages, _tool_text(tools, chat.get("tool_prompt"), traits.tools))
        variables = dict(chat.get("chat_template_kwargs") or {})
        return self._templates.render(
            messages,
            tools,
            add_generation_prompt=proceed,
            continue_final_message=continued,
            documents=variables.pop("documents", None),
            kwargs=variables,
        )


def _read(chat: bytes) -> Object:
    try:
        value = json.loads(chat)
    except (ValueError, RecursionError) as error:
        raise TemplateError(f"the chat is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise TemplateError("the chat is no JSON object")
    return value


def _objects(chat: Object, key: str) -> list[Object]:
    value = chat.get(key)
    listed = [] if value is None else value
    if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
        raise TemplateError(f"`{key}` is not a list of objects")
    return listed


def _ending(chat: Object, messages: list[Object]) -> tuple[bool, bool]:
    """Whether the prompt of the next message is added, and whether the last message is continued.

    If the client says neither, a last message of the assistant is continued: it is the beginning of the answer.
    """
    proceed, continued = chat.get("add_generation_prompt"), chat.get("continue_final_message")
    if proceed is None and continued is None:
        continued = bool(messages) and messages[-1].get("role") == "assistant" and _has_text(messages[-1])
    if proceed is None:
        proceed = not continued
    return bool(proceed), bool(continued)


# What templates expect, where it is not what clients send


def _message(message: Object) -> Object:
    """OpenAI's clients send the arguments of a call as JSON text; templates are written for the object itself."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return dict(message)
    return {**message, "tool_calls": [_call(call) if isinstance(call, dict) else call for call in calls]}


def _call(call: Object) -> Object:
    function = call.get("function")
    if not isinstance(function, dict):
        return call
    function = _named(function, "arguments", "parameters")
    if isinstance(function.get("arguments"), str):
        function["arguments"] = _arguments(function["arguments"])
    return {**call, "function": function}


def _arguments(text: str) -> Any:
    """The object that a text of JSON stands for; the text if it is none."""
    try:
        value = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _tool(tool: Object) -> Object:
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


def _has_text(message: Object) -> bool:
    content = message.get("content")
    return isinstance(content, str) or (isinstance(content, list) and any(_is_text(part) for part in content))


# Tools


def _tool_text(tools: list[Object], prompt: str | None, native: bool) -> str:
    """What is said about tools in the text itself: all, or for a template that knows them the client's words only."""
    if native:
        return f"\n---\n{prompt}" if prompt else ""
    described = json.dumps(tools, ensure_ascii=False, separators=(",", ":"))
    return f"\n---\n{described}\n{prompt or TOOL_PROMPT}"


def _append(messages: list[Object], text: str) -> None:
    """Puts a text behind the text of the last message, if it has any."""
    if not messages or not text:
        return
    last = messages[-1]
    if isinstance(last["content"], str):
        last["content"] += text
    elif isinstance(last["content"], list):
        last["content"] = [*last["content"], {"type": "text", "text": text}]
