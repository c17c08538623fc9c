"""`response_template` of tokenizer_config.json (transformers 5), as rows of the table of formats.

A response template describes the fields of an answer by the texts or regular expressions that open and close them, and
how to read their content. Grammars are written from rows, so the regular expressions are read as literal pieces with
white space and named groups; others are refused.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tgi.hub.model_config import read_tokenizer_config
from tgi.tokenizer.answers.formats import (
    RESPONSE_TEMPLATE,
    WHITESPACE,
    AnswerFormat,
    ArgumentTags,
    CallPlaceholder,
    ReasoningTags,
    ToolCallFormat,
)

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_PIECE = re.compile(
    r"(?P<space>\\[srnt][*+?]?)|\\(?P<escaped>\W)|\(\?P<(?P<group>\w+)>|(?P<literal>[^\\^$.*+?{}\[\]|()])", re.DOTALL
)
# The element that a tool's name opens, which its closing tag ends before the call ends.
_ELEMENT = re.compile(r"<([\w:]+)(?:=| name=\")")
_PLACEHOLDER = re.compile(r"\{(?:content\.)?(\w+)\}")


class UnsupportedTemplate(Exception):
    """The response template describes what no row can say. The message says what, for the log."""


class _Group(NamedTuple):
    name: str


def described_formats(directory: Path) -> tuple[AnswerFormat | None, str]:
    """The formats that a model directory describes, None if there are none; and why they cannot be served, "" if they
    can."""
    spec = read_tokenizer_config(directory).get("response_template")
    if spec is None:
        return None, "tokenizer_config.json has no `response_template`"
    try:
        return read_response_template(spec), ""
    except UnsupportedTemplate as error:
        return None, f"the `response_template` of tokenizer_config.json has what cannot be served: {error}"


def read_response_template(spec: Any) -> AnswerFormat:
    """The formats that a response template describes. Raises UnsupportedTemplate."""
    fields = spec.get("fields") if isinstance(spec, dict) else None
    if not isinstance(fields, dict) or not all(isinstance(field, dict) for field in fields.values()):
        raise UnsupportedTemplate("`fields` is not an object of objects")
    if spec.get("version", 1) != 1:
        raise UnsupportedTemplate(f"its version is {spec['version']!r}")
    tags = next((_reasoning_tags(fields[name]) for name in REASONING_FIELDS if name in fields), None)
    calls = (_call_format(fields["tool_calls"]),) if "tool_calls" in fields else ()
    return AnswerFormat(calls, tags)


def _reasoning_tags(field: dict[str, Any]) -> ReasoningTags:
    opening, close = _pieces(field, "open"), _pieces(field, "close")
    if len(opening) != 1 or len(close) != 1 or isinstance(opening[0], _Group) or isinstance(close[0], _Group):
        raise UnsupportedTemplate("reasoning is not between two texts")
    return ReasoningTags(opening[0].strip(WHITESPACE), close[0].strip(WHITESPACE))


def _call_format(field: dict[str, Any]) -> ToolCallFormat:
    opening, close = _pieces(field, "open"), _pieces(field, "close")
    marker, *named = opening
    if isinstance(marker, _Group) or not all(isinstance(piece, str) for piece in close):
        raise UnsupportedTemplate("calls do not begin and end with a text")
    end = tuple(piece for piece in close if isinstance(piece, str))
    head = tuple(CallPlaceholder.WORD if isinstance(piece, _Group) else piece for piece in named)
    function = _function(field)
    arguments: dict[str, Any] = field.get("content_args") or {}
    row = ToolCallFormat(RESPONSE_TEMPLATE, (), marker=marker, marker_repeats=bool(field.get("repeats")))
    match field.get("content"):
        case "json" if arguments and not set(arguments) <= {"allow_non_json"}:
            raise UnsupportedTemplate(f"`content_args` of calls: {', '.join(sorted(arguments))}")
        case "json" if CallPlaceholder.WORD in head and function == ("name", None):
            return row._replace(call=(*head, CallPlaceholder.ARGUMENTS, *end))
        case "json" if not head and None not in function:
            name, key = function
            call = ("{", f'"{name}"', ":", CallPlaceholder.NAME, ",", f'"{key}"', ":", CallPlaceholder.ARGUMENTS, "}")
            if not field.get("transform_each"):
                return row._replace(call=(*call, *end))
            return row._replace(call=call, marker_repeats=False, before=("[",), between=(",",), after=("]", *end))
        case "xml-inline" if CallPlaceholder.WORD in head and function == ("name", None):
            element = _ELEMENT.fullmatch(str(head[0]))
            closed = (f"</{element[1]}>",) if element is not None else ()
            call = (*head, CallPlaceholder.TAGS, *closed, *end)
            return row._replace(call=call, tags=_tags(arguments.get("tag_pattern")))
        case content:
            raise UnsupportedTemplate(f"calls with the content {content!r} and this `transform`")


def _function(field: dict[str, Any]) -> tuple[str | None, str | None]:
    """The keys of name and arguments in the content; None for arguments that are the whole content."""
    transform = field.get("transform")
    function = transform.get("function") if isinstance(transform, dict) else None
    if function == "{content}":
        return "name", "arguments"
    if not isinstance(function, dict):
        raise UnsupportedTemplate("the `transform` of calls has no `function`")
    keys = []
    for key in ("name", "arguments"):
        found = _PLACEHOLDER.fullmatch(str(function.get(key)))
        keys.append(None if found is None or found[0] == "{content}" else found[1])
    return keys[0], keys[1]


def _tags(pattern: Any) -> ArgumentTags:
    pieces = [*_parse(pattern)] if isinstance(pattern, str) else []
    groups = [piece.name for piece in pieces if isinstance(piece, _Group)]
    texts = [piece for piece in pieces if isinstance(piece, str)]
    if groups != ["key", "value"] or isinstance(pieces[0], _Group) or isinstance(pieces[-1], _Group):
        raise UnsupportedTemplate("`tag_pattern` is not made of texts, a key and a value")
    opening, *between, close = texts
    key_end = "".join(between)
    own_lines = re.search(r"\\s[*+]?\(\?P<value>", pattern) is not None
    key_end, _, start = key_end.partition("><")  # the tag of the value, behind that of the key
    if start:
        key_end, start = key_end + ">", "<" + start
    return ArgumentTags(opening, key_end, close, start, start, own_lines)


def _pieces(field: dict[str, Any], side: str) -> list[str | _Group]:
    """The pieces of the text or the regular expression that opens or closes a field."""
    literal, pattern = field.get(side), field.get(f"{side}_pattern")
    if isinstance(literal, str) and literal.strip(WHITESPACE):
        return [literal]
    if not isinstance(pattern, str):
        raise UnsupportedTemplate(f"`{side}` of a field is not one text")
    pieces = [*_parse(pattern)]
    if not pieces:
        raise UnsupportedTemplate(f"`{side}_pattern` {pattern!r} has no text")
    return pieces


def _parse(pattern: str) -> Iterator[str | _Group]:
    """Literal texts and named groups of a regular expression; white space between them is left out."""
    text, at = "", 0
    while at < len(pattern):
        found = _PIECE.match(pattern, at)
        if found is None or pattern[found.end() : found.end() + 1] in ("*", "+", "?", "{"):
            raise UnsupportedTemplate(f"the regular expression {pattern!r}")
        at = found.end()
        if found["group"] is not None:
            end = _group_end(pattern, at)
            if text:
                yield text
            yield _Group(found["group"])
            text, at = "", end
        elif found["space"] is None:
            text += found["escaped"] or found["literal"]
        elif text and at < len(pattern):
            yield text
            text = ""
    if text:
        yield text


def _group_end(pattern: str, at: int) -> int:
    """The position behind a group whose content begins at `at`."""
    depth, in_class = 1, False
    while at < len(pattern):
        mark = pattern[at]
        at += 2 if mark == "\\" else 1
        if in_class:
            in_class = mark != "]"
        elif mark == "[":
            in_class = True
            at += pattern[at : at + 1] in ("]", "^")
        else:
            depth += 1 if mark == "(" else -1 if mark == ")" else 0
        if not depth:
            return at
    raise UnsupportedTemplate(f"the regular expression {pattern!r}")
