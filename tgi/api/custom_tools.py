"""Custom tools, whose input is text: the model calls them as functions with one argument, a text.

A format that the input must match, a regular expression or a grammar in Lark, becomes the pattern of that argument. So
a call is written and enforced in whichever form the model has for calls.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from tgi.api import errors
from tgi.api.shapes.chat import FunctionDefinition, Tool, ToolCall

INPUT = "input"  # the name of the argument
# Bounds of a format's definition, and of the pattern that a grammar becomes.
MAX_DEFINITION, MAX_PATTERN = 16 << 10, 64 << 10
MAX_DEPTH = 100  # rules and brackets within each other
# Lark's terminals that grammars import.
COMMON_TERMINALS = {
    "CR": r"\r", "LF": r"\n", "NEWLINE": r"(?:\r?\n)+", "WS": r"[ \t\f\r\n]+", "WS_INLINE": r"[ \t]+",
    "DIGIT": "[0-9]", "HEXDIGIT": "[0-9a-fA-F]", "INT": "[0-9]+", "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)", "LCASE_LETTER": "[a-z]", "UCASE_LETTER": "[A-Z]", "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+", "CNAME": "[A-Za-z_][A-Za-z0-9_]*",
}  # fmt: skip


class CustomFormat(NamedTuple):
    """What the input of a custom tool must match."""

    syntax: str  # "lark" or "regex"
    definition: str


class EnforcedFunction(FunctionDefinition, omit_defaults=True):
    """A function whose arguments match more than the model is told in `parameters`."""

    enforced_parameters: Any = None


def custom_function(name: str, description: str | None, form: CustomFormat | None) -> FunctionDefinition:
    """A custom tool as a function. Raises ValueError for a format that is too long or not of the syntax it names."""
    value: dict[str, Any] = {"type": "string"}
    parameters = {"type": "object", "properties": {INPUT: value}, "required": [INPUT], "additionalProperties": False}
    if form is None:
        return FunctionDefinition(name, description, parameters=parameters)
    if len(form.definition) > MAX_DEFINITION:
        raise ValueError(f"must have at most {MAX_DEFINITION} characters. Given: {len(form.definition)}")
    try:
        pattern = form.definition if form.syntax == "regex" else lark_regex(form.definition)
        limit = {"pattern": f"^(?:{pattern})$"}
    except NotRegular:
        limit = {"format": "lark"}  # listed among what is not enforced
    told = f"The input matches this grammar ({form.syntax}):\n{form.definition}"
    return EnforcedFunction(
        name,
        f"{description}\n\n{told}" if description else told,
        parameters=parameters,
        enforced_parameters={**parameters, "properties": {INPUT: value | limit}},
    )


def custom_tool(name: str, description: str | None, form: CustomFormat | None, where: str) -> Tool:
    """A custom tool as one that is a function. Raises ApiError: 422, with the place of the format."""
    try:
        return Tool("function", custom_function(name, description, form))
    except ValueError as error:
        raise errors.tool_error(f"`definition` of the tool `{name}` {error}", where) from None


def custom_call(call_id: str, name: str, text: str) -> ToolCall:
    """An earlier call of a custom tool as that of a function."""
    return ToolCall(call_id, "function", FunctionDefinition(name, arguments=input_arguments(text)))


def input_arguments(text: str) -> str:
    """The arguments of a call with this input."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


class InputReader:
    """Reads the input of one call from its arguments, piece by piece."""

    def __init__(self) -> None:
        self._rest = ""
        self._begun = False

    def read(self, piece: str) -> str:
        """The text that the next piece of JSON adds."""
        self._rest += piece
        if not self._begun:
            if (opening := _OPENING.match(self._rest)) is None:
                return ""
            self._begun, self._rest = True, self._rest[opening.end() :]
        complete = _CHARACTERS.match(self._rest)
        assert complete is not None
        self._rest = self._rest[complete.end() :]
        text: str = json.loads(f'"{complete[0]}"', strict=False)
        return text.encode(errors="replace").decode()


_OPENING = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
# Whole characters of a JSON string; an escaped surrogate waits for what follows it.
_CHARACTERS = re.compile(
    r'(?:[^"\\]|\\[^u]|\\u(?:[0-9a-ce-fA-CE-F][0-9a-fA-F]{3}|[dD][0-7c-fC-F][0-9a-fA-F]{2})'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}(?=[^\\]|\\[^u]|\\u[0-9a-fA-F]{4})(?:\\u[dD][c-fC-F][0-9a-fA-F]{2})?)*"
)


# --- Lark to a regular expression -------------------------------------------------------------------------------------


class NotRegular(Exception):
    """A grammar refers to itself, or has what this conversion does not know."""


def lark_regex(definition: str) -> str:
    """A regular expression of the texts of a grammar in Lark. Raises ValueError for what is no Lark, and NotRegular."""
    return _LarkConverter(definition).rule("start")


_STRING = r'"(?:\\.|[^"\\\n])*"'
_TOKEN = re.compile(
    rf"""
      (?P<space> (?:[ \t\r\n]|//[^\n]*|\#[^\n]*)+ )
    | (?P<import> %import\s+common\s*(?:\.\w+(?:\s*->\s*\w+)?|\([\w\s,]+\)) )
    | (?P<range> {_STRING}\s*\.\.\s*{_STRING} )
    | (?P<string> {_STRING}i? )
    | (?P<regex> /(?:\\.|[^/\\\n])+/[a-z]* )
    | (?P<alias> ->\s*\w+ )
    | (?P<head> [?!]*[A-Za-z_]\w*(?:\.-?\d+)?\s*:(?!:) )
    | (?P<name> [A-Za-z_]\w* )
    | (?P<repeat> ~\s*\d+(?:\s*\.\.\s*\d+)? )
    | (?P<mark> [()\[\]|?*+] )
    """,
    re.VERBOSE,
)


class _LarkConverter:
    """Replaces names by what they stand for."""

    def __init__(self, definition: str) -> None:
        self._bodies: dict[str, list[tuple[str, str]]] = {}
        self._done: dict[str, str] = {}
        self._open: set[str] = set()
        self._depth = 0
        body: list[tuple[str, str]] = []
        for kind, text in _tokens(definition):
            match kind:
                case "import":
                    for name, alias in _imports(text):
                        if name not in COMMON_TERMINALS:
                            raise NotRegular
                        self._done[alias] = COMMON_TERMINALS[name]
                case "head":
                    name = text.strip("?!: \t\r\n").partition(".")[0]
                    body = self._bodies[name] = []
                case "space":
                    pass
                case _:
                    body.append((kind, text))

    def rule(self, name: str) -> str:
        """The expression of a rule or terminal."""
        if name not in self._done:
            if name not in self._bodies:
                raise ValueError(f"has no rule `{name}`")
            if name in self._open:
                raise NotRegular
            self._open.add(name)
            tokens = [*self._bodies[name]]
            self._done[name] = self._alternatives(tokens)
            if tokens:
                raise ValueError(f"is not valid Lark: `{tokens[0][1]}` in the rule `{name}`")
            self._open.discard(name)
        return self._done[name]

    def _alternatives(self, tokens: list[tuple[str, str]]) -> str:
        """Consumes tokens up to a closing bracket."""
        options, size = [""], 0
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise NotRegular
        while tokens and tokens[0][1] not in (")", "]"):
            kind, text = tokens.pop(0)
            if text == "|":
                options.append("")
            elif kind != "alias":
                part = self._repeated(self._atom(kind, text, tokens), tokens)
                options[-1] += part
                size += len(part)
            if size > MAX_PATTERN:
                raise NotRegular
        self._depth -= 1
        return options[0] if len(options) == 1 else f"(?:{'|'.join(options)})"

    def _atom(self, kind: str, text: str, tokens: list[tuple[str, str]]) -> str:
        match kind:
            case "string":
                literal = re.escape(_string(text.removesuffix("i"))).replace("\n", r"\n")
                return f"(?i:{literal})" if text.endswith("i") else literal
            case "range":
                first, last = (_string(end) for end in re.findall(_STRING, text))
                if not len(first) == len(last) == 1 or first > last:
                    raise ValueError(f"is not valid Lark: the range {text}")
                return f"[{re.escape(first)}-{re.escape(last)}]"
            case "regex":
                body, _, flags = text[1:].rpartition("/")
                return f"(?{flags}:{body})".replace(r"\/", "/")
            case "name":
                return self.rule(text)
        if text in ("(", "["):
            inner = self._alternatives(tokens)
            if not tokens or tokens.pop(0)[1] != {"(": ")", "[": "]"}[text]:
                raise ValueError(f"is not valid Lark: a `{text}` is not closed")
            return f"(?:{inner})?" if text == "[" else f"(?:{inner})"
        raise ValueError(f"is not valid Lark: `{text}`")

    def _repeated(self, atom: str, tokens: list[tuple[str, str]]) -> str:
        if not tokens:
            return atom
        kind, text = tokens[0]
        if kind == "repeat":
            tokens.pop(0)
            return f"(?:{atom}){{{','.join(re.findall('[0-9]+', text))}}}"
        if text in ("?", "*", "+"):
            tokens.pop(0)
            return f"(?:{atom}){text}"
        return atom


def _tokens(definition: str) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(definition):
        found = _TOKEN.match(definition, at)
        if found is None:
            raise NotRegular
        assert found.lastgroup is not None
        yield found.lastgroup, found[0]
        at = found.end()


def _imports(text: str) -> Iterator[tuple[str, str]]:
    """The terminals that an %import names, and what they are called."""
    if "(" in text:
        yield from ((name, name) for name in re.findall(r"\w+", text.partition("(")[2]))
    else:
        name, _, alias = text.rpartition("common.")[2].partition("->")
        yield name.strip(), alias.strip() or name.strip()


def _string(text: str) -> str:
    try:
        value: str = json.loads(text)
        value.encode()
    except ValueError:  # a half of a surrogate pair, too
        raise ValueError(f"is not valid Lark: the text {text}") from None
    return value
