"""A chat as clients send it, to the text of a prompt: messages and tools are fitted to what the template expects.

A chat is a JSON object with `messages` (a list of objects as the client sent them) and, all optional, `tools` (a list
of objects, those that may be called), `tool_prompt` (a string), `tool_choice` ("auto" or "required": whether the answer
may or must call them), `parallel_tool_calls` (true or false: whether it may call several), `add_generation_prompt`,
`continue_final_message` (true or false) and `chat_template_kwargs` (an object). null means absent everywhere.
"""

import json
from typing import Any, NamedTuple

from tgi.hub.card import Card
from tgi.hub.tokens import special_tokens
from tgi.tokenizer.answer.formats import FALLBACK, WHITE, Answer, Format, Tags, native, reasoning
from tgi.tokenizer.fit import Object, fitted, fitted_tool, has_text
from tgi.tokenizer.template import ChatTemplates, TemplateError

# What a model is told about tools that its template does not know, if the client does not say it.
TOOL_PROMPT = (
    "\nGiven the functions available, please respond with a JSON for a function call with its proper arguments that "
    "best answers the given prompt. Respond in the format {name: function name, parameters: dictionary of argument "
    "name and its value}.Do not use variables.\n"
)
# A template may raise an error with whatever a client wrote.
LONGEST_ERROR = 2000


class Chat(NamedTuple):
    """A chat that has been read: the text of its prompt, and what its answer may hold."""

    text: str
    answer: Answer | None = None  # None: text alone
    tools: list[tuple[str, Any]] = []  # those that may be called: the name and the JSON schema of the arguments
    required: bool = False  # the answer must be a call
    several: bool | None = None  # whether it may be several; None: as is usual with the model


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
        return self.read(chat).text

    def read(self, chat: bytes) -> Chat:
        """A chat's prompt, and what its answer may hold. Raises TemplateError."""
        try:
            return self._chat(_read(chat))
        except TemplateError as error:
            message = str(error)[:LONGEST_ERROR].encode(errors="replace").decode()
            raise TemplateError(message) from error
        except RecursionError as error:
            raise TemplateError("the chat is nested too deeply") from error

    def _chat(self, chat: Object) -> Chat:
        tools = [fitted_tool(tool) for tool in _objects(chat, "tools")] or None
        traits = self._templates.traits(tools is not None)
        source = self._templates.source(tools is not None)
        given = _objects(chat, "messages")
        proceed, continued = _ending(chat, given)
        messages = fitted(given, traits, source)
        format = native(source) if traits.tools else None
        if tools is not None:
            said = _tool_text(tools, chat.get("tool_prompt"), traits.tools, format is not None)
            _append(messages[:-1] if continued else messages, said)
        variables = dict(chat.get("chat_template_kwargs") or {})
        text = self._templates.render(
            messages,
            tools,
            add_generation_prompt=proceed,
            continue_final_message=continued,
            documents=variables.pop("documents", None),
            kwargs=variables,
        )
        formats = () if tools is None else FALLBACK if format is None else (format,)
        answer = _answer(formats, reasoning(source), text, messages[-1] if continued else None)
        callable = [_named_schema(tool) for tool in tools or []]
        return Chat(text, answer, callable, chat.get("tool_choice") == "required", chat.get("parallel_tool_calls"))


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

    If the client says neither, a last message of the assistant is continued: it is the beginning of the answer. One
    with calls is not, since calls are the end of an answer.
    """
    proceed, continued = chat.get("add_generation_prompt"), chat.get("continue_final_message")
    if proceed is None and continued is None:
        final = messages[-1] if messages else {}
        continued = final.get("role") == "assistant" and has_text(final) and not final.get("tool_calls")
    if proceed is None:
        proceed = not continued
    return bool(proceed), bool(continued)


def _answer(formats: tuple[Format, ...], tags: Tags | None, prompt: str, final: Object | None) -> Answer | None:
    """What the answer behind a prompt may hold. `final` is the message that it continues, if it does."""
    inside = False
    if tags is not None:
        end = prompt.rstrip(WHITE)
        inside = end.endswith(tags.open)
        if final is not None:
            inside = prompt.rfind(tags.open) > prompt.rfind(tags.close)
        if not inside and (final is not None or end.endswith(tags.close)):
            tags = None  # the answer is behind the reasoning already
    return Answer(formats, tags, inside) if formats or tags is not None else None


# Tools


def _tool_text(tools: list[Object], prompt: str | None, listed: bool, format: bool) -> str:
    """What is said about tools in the text itself, behind what the template says: whether it lists them, and has a
    format of its own for calls."""
    if format:
        return f"\n---\n{prompt}" if prompt else ""
    if listed:
        return f"\n---\n{prompt or TOOL_PROMPT}"
    described = json.dumps(tools, ensure_ascii=False, separators=(",", ":"))
    return f"\n---\n{described}\n{prompt or TOOL_PROMPT}"


def _named_schema(tool: Object) -> tuple[str, Any]:
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise TemplateError("a tool has no `function` with a `name`")
    return function["name"], function.get("parameters")


def _append(messages: list[Object], text: str) -> None:
    """Puts a text behind the text of the last message, if it has any."""
    if not messages or not text:
        return
    last = messages[-1]
    if isinstance(last["content"], str):
        last["content"] += text
    elif isinstance(last["content"], list):
        last["content"] = [*last["content"], {"type": "text", "text": text}]
