"""Chats as clients send them, to prompt text. The message adapter rewrites messages and tools for the chat template.

A chat is a JSON object with `messages` (a list of objects, as the client sent them) and these optional keys. null means
absent everywhere.

- `tools`: a list of objects, the tools that may be called; the template gets those without `in_messages`
- `tool_prompt`: a string, instructions on tools
- `tool_choice`: "auto" or "required"; with "required" the answer must call a tool
- `parallel_tool_calls`: whether the answer may call several tools
- `add_generation_prompt`, `continue_final_message`: true or false
- `chat_template_kwargs`: an object, variables of the template
- `reasoning_effort`, `verbosity`: strings, variables of templates that read them; "none" switches reasoning off
- `thinking`: true switches reasoning on where the template has a variable for it
- `thinking_budget`: an integer, how many tokens of reasoning the answer may have; also a variable of templates
"""

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import count
from typing import Any, NamedTuple

from tgi.hub.model_config import ModelConfig
from tgi.hub.tokenizer_files import special_tokens
from tgi.tokenizer.answers.arguments import argument_types
from tgi.tokenizer.answers.formats import (
    FALLBACK_FORMATS,
    WHITESPACE,
    AnswerFormat,
    FormatDetector,
    ReasoningTags,
    ToolCallFormat,
)
from tgi.tokenizer.chat_template import ChatTemplates, TemplateError, TemplateFeatures

# Instructions on tools for a model whose template has no tool calls, unless the client gives a `tool_prompt`.
TOOL_PROMPT = (
    "\nGiven the functions available, please respond with a JSON for a function call with its proper arguments that "
    "best answers the given prompt. Respond in the format {name: function name, parameters: dictionary of argument "
    "name and its value}.Do not use variables.\n"
)
# A template may put text of the client into an error.
MAX_ERROR_CHARACTERS = 2000
# A template that contains this (Mistral's) rejects call ids of other than nine characters.
SHORT_IDS = "length != 9"
# A template that contains this (Kimi's) writes call ids, which the model knows as `functions.NAME:0`.
NUMBERED_IDS = "<|tool_call_begin|>"

# A template that contains this, and no `reasoning_content`, reads a message's reasoning from `thinking`.
THINKING_KEY = re.compile(r"message\.thinking|message\[['\"]thinking['\"]\]")

# Variables with which templates switch reasoning off.
THINKING_SWITCHES = ("enable_thinking", "thinking")
# The shares of an answer that reasoning may take, where the template does not read the effort itself.
EFFORT_SHARES = {"minimal": 0.1, "low": 0.2, "medium": 0.5, "high": 0.8, "xhigh": 0.95}
# The name of arguments that are no object, for templates that list their names and values.
MALFORMED_ARGUMENTS = "arguments"
# An image, as front ends send it.
IMAGE_PART = {"type": "image"}
# Messages of a chat whose text is looked for in the prompt.
MAX_SOUGHT_MESSAGES = 32

JsonObject = dict[str, Any]

log = logging.getLogger(__name__)


class OfferedTool(NamedTuple):
    """A tool that the model may call."""

    name: str
    schema: Any  # JSON schema of the arguments; None: it takes none
    strict: bool = False  # a keyword of the schema that cannot be enforced is an error


class ReasoningLimit(NamedTuple):
    """How much an answer may reason."""

    tokens: int | None = None
    share: float = 1.0  # of all its tokens, without `tokens`

    def budget(self, max_new_tokens: int) -> int:
        """The tokens of reasoning in an answer of at most this length."""
        return int(max_new_tokens * self.share) if self.tokens is None else self.tokens


class RenderedChat(NamedTuple):
    """The prompt text of a chat, and what its answer may contain."""

    text: str
    answer_format: AnswerFormat | None = None  # None: text only
    tools: list[OfferedTool] = []
    call_required: bool = False  # the answer must be a call
    parallel_calls: bool | None = None  # whether several calls are allowed; None: the format's default
    reasoning_limit: ReasoningLimit | None = None


class ChatRenderer:
    """Renders the chats of one model."""

    def __init__(self, templates: ChatTemplates, formats: FormatDetector | None = None, image_token: str = "") -> None:
        """`image_token`: what a template that knows no image parts gets in place of one."""
        self._image_token = image_token
        self._templates = templates
        self.formats = formats or FormatDetector()
        self._incomplete: set[str] = set()  # templates of which a lost text was logged

    @classmethod
    def load(cls, config: ModelConfig, formats: FormatDetector | None = None, image_token: str = "") -> "ChatRenderer":
        """Loads the templates and special tokens of a model directory."""
        return cls(ChatTemplates(config.chat_templates, special_tokens(config.directory)), formats, image_token)

    def render_chat(self, chat: bytes) -> RenderedChat:
        """Renders a chat (JSON). Its text must be encoded without further special tokens. Raises TemplateError."""
        try:
            return self._render(_parse_chat(chat))
        except TemplateError as error:
            message = str(error)[:MAX_ERROR_CHARACTERS].encode(errors="replace").decode()
            raise TemplateError(message) from error
        except RecursionError as error:
            raise TemplateError("the chat is nested too deeply") from error

    def _render(self, chat: JsonObject, as_objects: bool = False) -> RenderedChat:
        """`as_objects`: arguments of calls are objects even where they are no JSON."""
        given_tools = _object_list(chat, "tools")
        offered = [_offered_tool(tool) for tool in given_tools]
        listed = [tool for tool in given_tools if not tool.get("in_messages")] or given_tools
        tools = [adapt_tool(tool) for tool in listed] or None
        features = self._templates.features(tools is not None)
        if as_objects:
            features = features._replace(iterates_arguments=True)
        template = self._templates.source(tools is not None)
        original_messages = _object_list(chat, "messages")
        add_generation_prompt, continue_final = _ending(chat, original_messages)
        messages = adapt_messages(original_messages, features, template, self._image_token)
        has_later_system = any(message.get("role") == "system" for message in messages[1:])
        if has_later_system and self._templates.refuses_later_system(tools is not None):
            messages = _with_one_system_message(messages)
        is_known = features.lists_tools or self.formats.is_named
        call_format = self.formats.call_format(template) if is_known else None
        if tools is not None:
            instructions = _tool_instructions(
                tools, chat.get("tool_prompt"), features.lists_tools, call_format is not None
            )
            _append_to_last(messages[:-1] if continue_final else messages, instructions)
        tags = self.formats.reasoning_tags(template)
        variables = _options(chat, features) | dict(chat.get("chat_template_kwargs") or {})
        try:
            text = self._templates.render(
                messages,
                tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final,
                documents=variables.pop("documents", None),
                kwargs=variables,
            )
        except TemplateError:
            if features.iterates_arguments or not _has_malformed_arguments(messages):
                raise
            return self._render(chat, as_objects=True)  # a template may refuse arguments that are no object
        if template not in self._incomplete and (lost := _lost_role(messages, text, tags)) is not None:
            self._incomplete.add(template)
            log.warning("the chat template leaves out the text of a message with the role %s", ascii(lost[:64]))
        if chat.get("reasoning_effort") == "none" and tags is not None and add_generation_prompt:
            text = _without_reasoning(text, tags, features)
        call_formats = () if tools is None else FALLBACK_FORMATS if call_format is None else (call_format,)
        return RenderedChat(
            text=text,
            answer_format=_answer_format(
                call_formats,
                tags,
                text,
                continue_final,
                offered,
                self.formats.channels(template),
                self.formats.text_tags(template),
            ),
            tools=offered,
            call_required=chat.get("tool_choice") == "required",
            parallel_calls=chat.get("parallel_tool_calls"),
            reasoning_limit=_reasoning_limit(chat, features),
        )


def _parse_chat(chat: bytes) -> JsonObject:
    try:
        value = json.loads(chat)
    except (ValueError, RecursionError) as error:
        raise TemplateError(f"the chat is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise TemplateError("the chat is no JSON object")
    return value


def _object_list(chat: JsonObject, key: str) -> list[JsonObject]:
    value = chat.get(key)
    entries = [] if value is None else value
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise TemplateError(f"`{key}` is not a list of objects")
    return entries


def _ending(chat: JsonObject, messages: list[JsonObject]) -> tuple[bool, bool]:
    """Returns (add_generation_prompt, continue_final_message).

    If the chat sets neither, a last message of the assistant is continued: it is the beginning of the answer. One with
    calls is not continued, since calls end an answer.
    """
    add_generation_prompt, continue_final = chat.get("add_generation_prompt"), chat.get("continue_final_message")
    if add_generation_prompt is None and continue_final is None:
        final = messages[-1] if messages else {}
        continue_final = final.get("role") == "assistant" and has_text(final) and not final.get("tool_calls")
    if add_generation_prompt is None:
        add_generation_prompt = not continue_final
    return bool(add_generation_prompt), bool(continue_final)


def _answer_format(
    call_formats: tuple[ToolCallFormat, ...],
    tags: ReasoningTags | None,
    prompt: str,
    continue_final: bool,
    tools: list[OfferedTool],
    channels: bool,
    text_tags: tuple[str, str] | None,
) -> AnswerFormat | None:
    """What the answer to a prompt may contain. With `continue_final` the prompt ends within the answer."""
    in_reasoning = False
    if tags is not None:
        end = prompt.rstrip(WHITESPACE)
        in_reasoning = end.endswith(tags.open)
        if continue_final:
            in_reasoning = prompt.rfind(tags.open) > prompt.rfind(tags.close)
        if not in_reasoning and (continue_final or end.endswith(tags.close)):
            tags = None  # the reasoning is complete
    channels = channels and not continue_final  # a message that is continued has its header
    text_tags = None if continue_final else text_tags
    if not call_formats and tags is None and not channels and text_tags is None:
        return None
    types = {tool.name: argument_types(tool.schema) for tool in tools} if call_formats else None
    return AnswerFormat(call_formats, tags, in_reasoning, channels=channels, tools=types, text_tags=text_tags)


def _options(chat: JsonObject, features: TemplateFeatures) -> JsonObject:
    """The variables that `reasoning_effort`, `verbosity` and `thinking` stand for in this template."""
    options = {name: chat.get(name) for name in ("reasoning_effort", "verbosity", "thinking_budget")}
    if options["reasoning_effort"] == "none":
        options |= dict.fromkeys(THINKING_SWITCHES, False)
    elif chat.get("thinking"):
        options |= dict.fromkeys(THINKING_SWITCHES, True)
    return {name: value for name, value in options.items() if value is not None and name in features.variables}


def _reasoning_limit(chat: JsonObject, features: TemplateFeatures) -> ReasoningLimit | None:
    """How much the answer may reason; None: as much as it has tokens."""
    if (budget := chat.get("thinking_budget")) is not None:
        return ReasoningLimit(int(budget))
    share = None if "reasoning_effort" in features.variables else EFFORT_SHARES.get(chat.get("reasoning_effort", ""))
    return None if share is None else ReasoningLimit(share=share)


def _without_reasoning(text: str, tags: ReasoningTags, features: TemplateFeatures) -> str:
    """Ends a prompt with empty reasoning, where the template has no variable to switch it off."""
    end = text.rstrip(WHITESPACE)
    if end.endswith(tags.close) or features.variables & {*THINKING_SWITCHES, "reasoning_effort"}:
        return text
    return f"{end if end.endswith(tags.open) else text + tags.open}\n\n{tags.close}\n\n"


def _lost_role(messages: list[JsonObject], text: str, tags: ReasoningTags | None) -> str | None:
    """The role of the first message that has a text which is not in the prompt; reasoning may be left out."""
    at = 0
    for message in messages[:MAX_SOUGHT_MESSAGES]:
        for content in _texts(message["content"]):
            sought = (content if tags is None else content.rpartition(tags.close)[2]).strip()
            found = text.find(sought, at)
            if found >= 0:
                at = found
            elif sought not in text and json.dumps(sought, ensure_ascii=False)[1:-1] not in text:
                return str(message.get("role"))
    return None


def _texts(content: Any) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        yield from (part["text"] for part in content if _is_text_part(part))


# Tools


def _tool_instructions(
    tools: list[JsonObject], tool_prompt: str | None, template_lists_tools: bool, has_call_format: bool
) -> str:
    """What the last message says about tools, besides what the template says."""
    prompt = tool_prompt or ("" if has_call_format else TOOL_PROMPT)
    if template_lists_tools:
        return f"\n---\n{prompt}" if prompt else ""
    tool_list = json.dumps(tools, ensure_ascii=False, separators=(",", ":"))
    return f"\n---\n{tool_list}\n{prompt}"


def _offered_tool(tool: JsonObject) -> OfferedTool:
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise TemplateError("a tool has no `function` with a `name`")
    schema = _rename_key(function, "parameters", "arguments").get("parameters")
    schema = function.get("enforced_parameters", schema)
    return OfferedTool(function["name"], schema, function.get("strict") is True)


def _append_to_last(messages: list[JsonObject], text: str) -> None:
    """Appends to the text of the last message, if its content is text or a list of parts."""
    if not messages or not text:
        return
    last = messages[-1]
    if isinstance(last["content"], str):
        last["content"] += text
    elif isinstance(last["content"], list):
        last["content"] = [*last["content"], {"type": "text", "text": text}]


# Message adapter: messages and tools in the form that the template expects


class CallArguments(JsonObject):
    """The arguments of a call. A template that expects a string, as OpenAI's clients send it, gets JSON."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, other: str) -> str:
        return str(self) + other

    def __radd__(self, other: str) -> str:
        return other + str(self)


def adapt_messages(
    messages: list[JsonObject], features: TemplateFeatures, template: str, image_token: str = ""
) -> list[JsonObject]:
    """Adapts messages to a template with these features. Raises TemplateError."""
    adapted = [_adapt_message(message, features.iterates_arguments) for message in messages]
    _add_tool_names(adapted)
    for message in adapted:
        content = message.get("content") if features.renders_calls else _content_with_calls(message)
        if content is None and not message.get("tool_calls") and not features.tests_for_none:
            content = ""
        message["content"] = _adapt_content(content, features.iterates_parts, features.tests_for_string, image_token)
        if message.get("role") == "developer" and "developer" not in template:
            message["role"] = "system"
    if THINKING_KEY.search(template) and "reasoning_content" not in template:
        for message in adapted:
            # gpt-oss's template refuses both next to calls.
            if "thinking" not in message and not (message.get("content") and message.get("tool_calls")):
                message["thinking"] = message.get("reasoning_content")
    if SHORT_IDS in template:
        _replace_call_ids(adapted, lambda call_id, name: _short_id(call_id))
    elif NUMBERED_IDS in template:
        numbers = count()
        _replace_call_ids(adapted, lambda call_id, name: f"functions.{name}:{next(numbers)}")
    return adapted


def adapt_tool(tool: JsonObject) -> JsonObject:
    """Moves a tool's schema to the key that templates expect (`parameters`). What else the arguments must match is not
    for the model."""
    function = tool.get("function")
    if not isinstance(function, dict):
        return tool
    function = {name: value for name, value in function.items() if name not in ("strict", "enforced_parameters")}
    return {**tool, "function": _rename_key(function, "parameters", "arguments")}


def has_text(message: JsonObject) -> bool:
    """Whether a message has text content."""
    content = message.get("content")
    return isinstance(content, str) or (isinstance(content, list) and any(_is_text_part(part) for part in content))


def _adapt_message(message: JsonObject, as_objects: bool) -> JsonObject:
    """Copies a message, with the arguments of its calls as objects: OpenAI's clients send them as JSON text."""
    calls = message.get("tool_calls")
    if message.get("reasoning_content") is None and message.get("reasoning") is not None:
        message = {**message, "reasoning_content": message["reasoning"]}
    if not calls:  # many templates test only whether the key exists
        return {name: value for name, value in message.items() if name != "tool_calls"}
    if not isinstance(calls, list):
        return dict(message)
    return {
        **message,
        "tool_calls": [_adapt_call(call, as_objects) if isinstance(call, dict) else call for call in calls],
    }


def _adapt_call(call: JsonObject, as_object: bool) -> JsonObject:
    function = call.get("function")
    if not isinstance(function, dict):
        return call
    function = _rename_key(function, "arguments", "parameters")
    if as_object or "arguments" in function:
        function["arguments"] = _parse_arguments(function.get("arguments"), as_object)
    return {**call, "function": function}


def _parse_arguments(given: Any, as_object: bool) -> Any:
    """Parses arguments that are JSON text of an object. Anything else is returned as it is, or as an object.

    Calls that were cut or malformed stay in the history of agents.
    """
    value = given
    if isinstance(given, str):
        with suppress(ValueError, RecursionError):
            value = json.loads(given) if given.strip() else {}
            if "\\ud" in given.lower():  # half of a surrogate pair, as of a character that was cut, cannot be encoded
                value = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    if as_object and not isinstance(value, dict):
        value = {} if value is None else {MALFORMED_ARGUMENTS: given}
    return CallArguments(value) if isinstance(value, dict) else given


def _rename_key(function: JsonObject, name: str, other: str) -> JsonObject:
    """Copies a function object; if it has the key `other` instead of `name`, renames it."""
    copy = dict(function)
    if copy.get(name) is None and copy.get(other) is not None:
        copy[name] = copy.pop(other)
    return copy


def _content_with_calls(message: JsonObject) -> Any:
    """A message's content, followed by its calls in the form that TOOL_PROMPT asks for."""
    calls, content = message.get("tool_calls"), message.get("content")
    functions = [call.get("function") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    call_text = "\n".join(
        json.dumps({"name": function.get("name"), "parameters": function.get("arguments")}, ensure_ascii=False)
        for function in functions
        if isinstance(function, dict)
    )
    if not call_text:
        return content
    if isinstance(content, list):
        return [*content, {"type": "text", "text": call_text}]
    return f"{content}\n{call_text}" if content else call_text


def _with_one_system_message(messages: list[JsonObject]) -> list[JsonObject]:
    """Joins the system messages at the beginning; later ones stay where they are, as the user's."""
    later = next((at for at, message in enumerate(messages) if message.get("role") != "system"), len(messages))
    first = []
    if later:
        parts = [part for message in messages[:later] for part in _as_parts(message["content"])]
        if all(_is_text_part(part) for part in parts):
            parts = _as_parts("\n\n".join(part["text"] for part in parts))
        is_text = isinstance(messages[0]["content"], str)
        first = [messages[0] | {"content": parts[0]["text"] if is_text and len(parts) == 1 else parts}]
    return first + [
        message | {"role": "user"} if message.get("role") == "system" else message for message in messages[later:]
    ]


def _as_parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content or ""}]


def _add_tool_names(messages: list[JsonObject]) -> None:
    """Adds to tool results the name of the called tool: OpenAI's clients send only the id, some templates need both."""
    names_by_call_id: dict[str, Any] = {}
    for message in messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else []:
            if isinstance(call, dict) and isinstance(call.get("id"), str) and isinstance(call.get("function"), dict):
                names_by_call_id[call["id"]] = call["function"].get("name")
        call_id = message.get("tool_call_id")
        if isinstance(call_id, str) and names_by_call_id.get(call_id) is not None and message.get("name") is None:
            message["name"] = names_by_call_id[call_id]


def _replace_call_ids(messages: list[JsonObject], new_id: Callable[[str, Any], str]) -> None:
    """Replaces each call id by `new_id(id, name of the tool)`, consistently in calls and results."""
    replaced: dict[str, str] = {}
    for message in messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else []:
            if isinstance(call, dict) and isinstance(call.get("id"), str):
                function = call.get("function")
                name = function.get("name") if isinstance(function, dict) else None
                replaced[call["id"]] = call["id"] = new_id(call["id"], name)
        if isinstance(call_id := message.get("tool_call_id"), str):
            message["tool_call_id"] = replaced.get(call_id) or new_id(call_id, message.get("name"))


def _has_malformed_arguments(messages: list[JsonObject]) -> bool:
    """Whether the arguments of a call are no object."""
    for message in messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else []:
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict) and not isinstance(function.get("arguments"), dict):
                return True
    return False


def _short_id(call_id: str) -> str:
    if len(call_id) == 9 and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode(errors="replace")).hexdigest()[:9]


def _adapt_content(content: Any, iterates_parts: bool, tests_for_string: bool, image_token: str) -> Any:
    """A message's content as the template expects it: a string, or a list of parts if it iterates over parts."""
    if isinstance(content, str) and iterates_parts and not tests_for_string:
        return [{"type": "text", "text": content}]
    if isinstance(content, list) and not iterates_parts:
        texts = [part["text"] if _is_text_part(part) else image_token for part in content]
        if not all(
            _is_text_part(part) or (text and part == IMAGE_PART) for part, text in zip(content, texts, strict=True)
        ):
            raise TemplateError("the template takes text only, but a message has a part without `text`")
        return "".join(texts)
    return content


def _is_text_part(part: Any) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("text"), str)
