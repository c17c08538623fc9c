"""Chat templates: messages to prompt text, in Jinja2's sandbox with the settings that models are trained with."""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateSyntaxError, nodes
from jinja2 import TemplateError as JinjaError
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from tgi.tokenizer.traits import Traits, traits

Message = Mapping[str, Any]

# Marks the end of the message that is to be continued. The space shows whether the template trims messages.
END_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
# A template is the model owner's program. One that writes for ever is stopped here; one that loops without writing, or
# allocates gigabytes in one expression, is not.
MAX_CHARACTERS = 16 << 20
MAX_SECONDS = 10.0


class TemplateError(Exception):
    """A chat that the template cannot render; the text is for the client, behind "Template error: "."""


class ChatTemplates:
    """The chat templates of one model, by name, and the special tokens that they are given ("bos_token", …)."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._sources = dict(sources)
        self._special_tokens = dict(special_tokens)
        self._environment = _environment()
        self._compiled: dict[str, Template] = {}  # of the model's own
        self._traits: dict[str, Traits] = {}

    def source(self, tools: bool = False) -> str:
        """The template for a chat with or without tools. Raises TemplateError if the model has none."""
        name = "tool_use" if tools and "tool_use" in self._sources else "default"
        if name not in self._sources:
            raise TemplateError("template not found")
        return self._sources[name]

    def traits(self, tools: bool = False) -> Traits:
        """What the template for a chat with or without tools expects. Raises TemplateError as `render` does."""
        source = self.source(tools)
        found = self._traits.get(source)
        if found is None:
            try:
                found = self._traits[source] = traits(self._environment.parse(source))
            except TemplateSyntaxError as error:
                raise _syntax_error(error) from error
        return found

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a chat.

        `continue_final_message` ends the prompt within the last message, for the model to go on; it excludes
        `add_generation_prompt`. `template` takes the place of the model's own. `kwargs` are further variables and
        win over special tokens, not over the arguments here. All values are plain JSON. Raises TemplateError.
        """
        if continue_final_message and add_generation_prompt:
            raise TemplateError("`continue_final_message` and `add_generation_prompt` exclude each other")
        source = self.source(tools is not None) if template is None else template
        # Clients send null for what is absent, and templates ask whether a key is there.
        chat = [{key: value for key, value in message.items() if value is not None} for message in messages]
        final = _mark(chat) if continue_final_message else ""
        variables = self._special_tokens | dict(kwargs or {})
        variables |= {
            "messages": chat,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._run(source, variables)
        return _cut(text, final) if continue_final_message else text

    def _run(self, source: str, variables: dict[str, Any]) -> str:
        try:
            return _bounded(self._compile(source).generate(variables))
        except TemplateSyntaxError as error:
            raise _syntax_error(error) from error
        except TemplateError:
            raise
        except _Raised as error:
            line = _line(error)
            raise TemplateError(f"syntax error: {error.message} (in <string>:{line})") from error
        except JinjaError as error:
            raise TemplateError(f"{error.message} (in <string>:{_line(error)})") from error
        except Exception as error:  # a template is a program: it can divide by zero, index a number, recurse for ever
            raise TemplateError(f"{type(error).__name__}: {error} (in <string>:{_line(error)})") from error

    def _compile(self, source: str) -> Template:
        compiled = self._compiled.get(source)
        if compiled is None:
            compiled = self._environment.from_string(source)
            if source in self._sources.values():
                self._compiled[source] = compiled
        return compiled


class _Raised(JinjaError):
    """What `raise_exception(message)` in a template raises."""


class _GenerationTag(Extension):
    """`{% generation %}`…`{% endgeneration %}` marks what the model has said; the text between is kept as it is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Namespace(Namespace):
    """Jinja2's `namespace`, without names that begin with an underscore: they lead out of the sandbox."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _public(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _public(name)
        super().__setitem__(name, value)


def _public(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}: names with a leading underscore are not allowed")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _Namespace
    return environment


def _bounded(pieces: Iterable[str]) -> str:
    """The pieces of a text as one. Raises TemplateError if there is no end of them."""
    written: list[str] = []
    size = 0
    end = time.monotonic() + MAX_SECONDS
    for piece in pieces:
        written.append(piece)
        size += len(piece)
        if size > MAX_CHARACTERS or time.monotonic() > end:
            raise TemplateError(
                f"the template has written {size} characters and goes on; it may write {MAX_CHARACTERS} in "
                f"{MAX_SECONDS:.0f} seconds"
            )
    return "".join(written)


def _syntax_error(error: TemplateSyntaxError) -> TemplateError:
    return TemplateError(f"syntax error: {error.message} (in <string>:{error.lineno})")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models have seen it in training: in the order of its keys, and not escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: Any) -> None:
    raise _Raised(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _line(error: BaseException) -> int:
    """The line of the template in which an error was raised."""
    line = 1
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _mark(chat: list[dict[str, Any]]) -> str:
    """Puts END_MARK behind the text of the last message, and returns that text."""
    content = chat[-1].get("content") if chat else None
    if isinstance(content, str):
        chat[-1]["content"] = content + END_MARK
        return content
    parts = [*content] if isinstance(content, list) else []
    for at in reversed(range(len(parts))):
        if isinstance(parts[at], Mapping) and isinstance(parts[at].get("text"), str):
            text: str = parts[at]["text"]
            parts[at] = {**parts[at], "text": text + END_MARK}
            chat[-1]["content"] = parts
            return text
    raise TemplateError("`continue_final_message` is set but the last message has no text")


def _cut(text: str, final: str) -> str:
    """The rendered text up to END_MARK; a template that trims the mark's space would have trimmed the message."""
    mark = text.rfind(END_MARK.strip())
    if mark < 0 or final.strip() not in text:
        raise TemplateError("`continue_final_message` is set but the template changes or drops the last message")
    return text[:mark] if text.startswith(END_MARK, mark) else text[:mark].rstrip()
