"""Chat templates: messages to prompt text, in Jinja2's sandbox, with the environment of `transformers`.

TemplateFeatures says what a template expects of messages; it is found in the template's syntax tree.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from jinja2 import Template, TemplateSyntaxError, meta, nodes
from jinja2 import TemplateError as JinjaError
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

Message = Mapping[str, Any]

# Marks the end of the message to continue. Its trailing space reveals whether the template trims messages.
END_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
# Rendering stops at these limits. They do not stop a template that loops without output, or that allocates gigabytes in
# one expression: a template is a program of the model's owner.
MAX_OUTPUT_CHARACTERS = 16 << 20
MAX_RENDER_SECONDS = 10.0


class TemplateError(Exception):
    """The template cannot render a chat. The message is for the client, after "Template error: "."""


class TemplateFeatures(NamedTuple):
    """What a chat template does with tools and messages."""

    lists_tools: bool  # it uses `tools`
    renders_calls: bool  # it uses a message's `tool_calls`
    iterates_parts: bool  # it expects a message's content as a list of parts …
    tests_for_string: bool  # … or accepts both a list and a string
    tests_for_none: bool  # it tests whether a message's content is none
    iterates_arguments: bool  # it expects the arguments of a call as an object, and tests for nothing else
    variables: frozenset[str]  # that a chat may set


class ChatTemplates:
    """The chat templates of one model, by name, with the special tokens that they may use ("bos_token", …)."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._sources = dict(sources)
        self._special_tokens = dict(special_tokens)
        self._environment = _environment()
        self._compiled: dict[str, Template] = {}  # the model's own templates, by source
        self._features: dict[str, TemplateFeatures] = {}  # by source
        self._refuses_later_system: dict[str, bool] = {}  # by source

    def source(self, tools: bool = False) -> str:
        """The source of the template for chats with or without tools. Raises TemplateError if the model has none."""
        name = "tool_use" if tools and "tool_use" in self._sources else "default"
        if name not in self._sources:
            raise TemplateError("template not found")
        return self._sources[name]

    def features(self, tools: bool = False) -> TemplateFeatures:
        """The features of the template for chats with or without tools. Raises TemplateError."""
        return self._features_of(self.source(tools))

    def _features_of(self, source: str) -> TemplateFeatures:
        found = self._features.get(source)
        if found is None:
            try:
                found = template_features(self._environment.parse(source))
            except TemplateSyntaxError as error:
                raise _syntax_error(error) from error
            if source in self._sources.values():
                self._features[source] = found
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
        """Renders the prompt text of a chat. All values are plain JSON. Raises TemplateError.

        `continue_final_message` ends the prompt within the last message, so that the model continues it; it excludes
        `add_generation_prompt`. `template` replaces the model's own. `kwargs` are further variables of the template;
        they override special tokens, but not the other arguments.
        """
        if continue_final_message and add_generation_prompt:
            raise TemplateError("`continue_final_message` and `add_generation_prompt` exclude each other")
        source = self.source(tools is not None) if template is None else template
        # Clients send null for absent keys, but templates test whether a key exists, or whether the content is none.
        kept = {"content"} if self._features_of(source).tests_for_none else set()
        chat = [
            {key: value for key, value in message.items() if value is not None or key in kept} for message in messages
        ]
        final = _mark_final_message(chat) if continue_final_message else ""
        variables = self._special_tokens | dict(kwargs or {})
        variables |= {
            "messages": chat,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._generate(source, variables)
        return _cut_at_mark(text, final) if continue_final_message else text

    def turn_end(self, tokens: Iterable[str]) -> str:
        """The one of these tokens that the template writes after an answer; "" if it writes none or cannot render a
        short chat."""
        if "default" not in self._sources:
            return ""
        chat: list[dict[str, Any]] = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": END_MARK.strip()},
        ]
        try:
            features = self.features()
            if features.iterates_parts and not features.tests_for_string:
                chat = [one | {"content": [{"type": "text", "text": one["content"]}]} for one in chat]
            rest = self.render(chat, add_generation_prompt=False).rpartition(END_MARK.strip())[2].lstrip()
        except TemplateError:
            return ""
        return max((token for token in tokens if token and rest.startswith(token)), key=len, default="")

    def refuses_later_system(self, tools: bool = False) -> bool:
        """Whether the template has an error for a system message that is not the first message, but takes a message of
        the user in its place."""
        source = self.source(tools)
        if source not in self._refuses_later_system:
            self._refuses_later_system[source] = not self._renders(source, "system", "user", "system", "user") and (
                self._renders(source, "system", "user", "user", "user")
            )
        return self._refuses_later_system[source]

    def _renders(self, source: str, *roles: str) -> bool:
        features = self._features_of(source)
        parts = features.iterates_parts and not features.tests_for_string
        content = [{"type": "text", "text": "a"}] if parts else "a"
        try:
            self.render([{"role": role, "content": content} for role in roles], template=source)
        except TemplateError:
            return False
        return True

    def _generate(self, source: str, variables: dict[str, Any]) -> str:
        try:
            return _join_limited(self._compile(source).generate(variables))
        except TemplateSyntaxError as error:
            raise _syntax_error(error) from error
        except TemplateError:
            raise
        except _RaisedByTemplate as error:
            line = _line(error)
            raise TemplateError(f"syntax error: {error.message} (in <string>:{line})") from error
        except JinjaError as error:
            raise TemplateError(f"{error.message} (in <string>:{_line(error)})") from error
        except Exception as error:  # a template can divide by zero, index a number, recurse without end
            raise TemplateError(f"{type(error).__name__}: {error} (in <string>:{_line(error)})") from error

    def _compile(self, source: str) -> Template:
        compiled = self._compiled.get(source)
        if compiled is None:
            compiled = self._environment.from_string(source)
            if source in self._sources.values():
                self._compiled[source] = compiled
        return compiled


class _RaisedByTemplate(JinjaError):
    """Raised by `raise_exception(message)` in a template."""


class _GenerationTag(Extension):
    """`{% generation %}`…`{% endgeneration %}` marks the model's messages for training. Renders its body unchanged."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Namespace(Namespace):
    """Jinja2's `namespace` without names that begin with an underscore, through which a template could leave the
    sandbox."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _check_public(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def _check_public(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}: names with a leading underscore are not allowed")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _Namespace
    return environment


def _join_limited(pieces: Iterable[str]) -> str:
    """Joins the pieces of rendered text. Raises TemplateError at the limits on size and time."""
    written: list[str] = []
    size = 0
    end = time.monotonic() + MAX_RENDER_SECONDS
    for piece in pieces:
        written.append(piece)
        size += len(piece)
        if size > MAX_OUTPUT_CHARACTERS or time.monotonic() > end:
            raise TemplateError(
                f"the template has written {size} characters and goes on; it may write {MAX_OUTPUT_CHARACTERS} in "
                f"{MAX_RENDER_SECONDS:.0f} seconds"
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
    """Filter `tojson` as in `transformers`: keeps the order of keys and does not escape for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> None:
    raise _RaisedByTemplate(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _line(error: BaseException) -> int:
    """The line of the template that raised an error."""
    line = 1
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _mark_final_message(chat: list[dict[str, Any]]) -> str:
    """Appends END_MARK to the text of the last message, and returns that text."""
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


def _cut_at_mark(text: str, final: str) -> str:
    """The rendered text up to END_MARK. If the template has trimmed the mark's space, the text is trimmed as well."""
    mark = text.rfind(END_MARK.strip())
    if mark < 0 or final.strip() not in text:
        raise TemplateError("`continue_final_message` is set but the template changes or drops the last message")
    return text[:mark] if text.startswith(END_MARK, mark) else text[:mark].rstrip()


# Template features


def template_features(tree: nodes.Template) -> TemplateFeatures:
    """Finds the features of a parsed template."""
    content_names = _bound_names(tree, _is_content)
    argument_names = _bound_names(tree, _is_arguments)
    return TemplateFeatures(
        lists_tools=any(name.name == "tools" for name in tree.find_all(nodes.Name)),
        renders_calls=any(field.attr == "tool_calls" for field in tree.find_all(nodes.Getattr))
        or any(const.value == "tool_calls" for const in tree.find_all(nodes.Const)),
        iterates_parts=any(_is_content(loop.iter, content_names) for loop in tree.find_all(nodes.For))
        or any(_is_content_part(field.node, content_names) for field in tree.find_all(nodes.Getattr))
        or any(_is_content_part(field.node, content_names) for field in tree.find_all(nodes.Getitem)),
        tests_for_string=any(
            test.name == "string" and _is_content(test.node, content_names) for test in tree.find_all(nodes.Test)
        ),
        tests_for_none=any(
            test.name == "none" and _is_content(test.node, content_names) for test in tree.find_all(nodes.Test)
        )
        or any(_compares_content_with_none(compare, content_names) for compare in tree.find_all(nodes.Compare)),
        iterates_arguments=any(_iterates_arguments(node, argument_names) for node in tree.find_all(nodes.Expr))
        and not any(
            test.name in ("string", "mapping") and _is_arguments(test.node, argument_names)
            for test in tree.find_all(nodes.Test)
        ),
        variables=frozenset(meta.find_undeclared_variables(tree)),
    )


def _compares_content_with_none(compare: nodes.Compare, content_names: set[str]) -> bool:
    operands = [compare.expr, *(operand.expr for operand in compare.ops)]
    has_none = any(isinstance(operand, nodes.Const) and operand.value is None for operand in operands)
    return has_none and any(_is_content(operand, content_names) for operand in operands)


def _iterates_arguments(node: nodes.Expr, argument_names: set[str]) -> bool:
    """Whether an expression lists the members of a call's arguments."""
    name = node.name if isinstance(node, nodes.Filter) else node.attr if isinstance(node, nodes.Getattr) else ""
    return name in ("items", "keys", "dictsort") and _is_arguments(getattr(node, "node", None), argument_names)


def _is_arguments(node: nodes.Node | None, argument_names: set[str]) -> bool:
    """Whether an expression is the arguments of a call."""
    if isinstance(node, nodes.Name):
        return node.name in argument_names
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "arguments"
    return isinstance(node, nodes.Getattr) and node.attr == "arguments"


def _bound_names(tree: nodes.Template, is_bound: Callable[[nodes.Node, set[str]], bool]) -> set[str]:
    """Names of variables and macro parameters that are bound to such a value anywhere in the template.

    `is_bound` tells whether an expression has it, given the names known so far.
    """
    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    names: set[str] = set()
    while True:
        count = len(names)
        for name, value in _bindings(tree, macros):
            if is_bound(value, names):
                names.add(name)
        if len(names) == count:
            return names


def _bindings(tree: nodes.Template, macros: dict[str, nodes.Macro]) -> Iterator[tuple[str, nodes.Node]]:
    """Yields (name, bound expression) for each `set` and each argument of a macro call."""
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name):
            yield assign.target.name, assign.node
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name in macros:
            parameters = [parameter.name for parameter in macros[call.node.name].args]
            yield from zip(parameters, call.args, strict=False)
            yield from ((keyword.key, keyword.value) for keyword in call.kwargs)


def _is_content_part(node: nodes.Node, content_names: set[str]) -> bool:
    """Whether an expression is a message's content indexed by an integer."""
    if not (isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const)):
        return False
    return isinstance(node.arg.value, int) and _is_content(node.node, content_names)


def _is_content(node: nodes.Node | None, content_names: set[str]) -> bool:
    """Whether an expression is a message's content, or a filter or slice of it."""
    if isinstance(node, nodes.Name):
        return node.name in content_names
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Filter):
        return _is_content(node.node, content_names)
    if isinstance(node, nodes.CondExpr):
        return _is_content(node.expr1, content_names) or _is_content(node.expr2, content_names)
    if isinstance(node, nodes.Getitem):
        if isinstance(node.arg, nodes.Slice):
            return _is_content(node.node, content_names)
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return False
