"""Grammars of whole chat answers, in llguidance's Lark: text that may turn into tool calls, calls only, and reasoning
before either.

Within text all characters and special tokens are allowed; only bytes that can never become a character are not. From a
call's marker on, or from the first key of a call without a marker, only a call can follow.

The lexer takes the longest terminal and does not backtrack. So text that may turn out to be something else is a single
terminal up to the point where that is decided, including the white space before it.
"""

import json
from collections.abc import Container, Iterable, Sequence
from itertools import chain, groupby, pairwise, repeat
from typing import Any, NamedTuple

from tgi.hub.llguidance_tables import OPTIONS
from tgi.tokenizer.answer_formats import AnswerFormat, CallPlaceholder, FormatTokens, ToolCallFormat, call_prefix
from tgi.tokenizer.chat import RenderedChat
from tgi.tokenizer.structured_output.grammar import (
    MAX_GRAMMAR_BYTES,
    GrammarError,
    GrammarValidator,
    checked_schema,
    schema_grammars,
)
from tgi.tokenizer.vocabulary import Vocabulary

# OpenAI's limit. The time to compile a grammar grows with the number of tools.
MAX_TOOLS = 128
# Names in the `properties` of all tools, at all depths: half a second of compilation if calls have two formats.
MAX_TOOL_PROPERTIES = 2000
# Keywords with which `properties` alone do not say what an object may contain.
_NOT_PROPERTIES_ONLY = {
    "$ref", "allOf", "anyOf", "const", "enum", "maxProperties", "minProperties", "oneOf", "patternProperties",
}  # fmt: skip


class ToolGrammar(NamedTuple):
    """The grammars of one tool's arguments, each an entry of the library's `grammars`."""

    name: str
    arguments: str  # an object of the arguments
    fields: str  # an object of `_name` and the arguments; "" if the schema does not allow to add `_name`


class AnswerGrammarBuilder:
    """Builds the grammars of answers, with a cache of results and errors. Not thread-safe."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._format_tokens = FormatTokens(vocabulary)
        self._validator = GrammarValidator(vocabulary)

    def build(self, grammar: bytes, chat: RenderedChat | None) -> str:
        """The grammar of an answer for the worker, "" if it is not constrained. `grammar` is the client's, as JSON.
        Raises GrammarError."""
        if chat is not None and chat.tools:
            if grammar:
                raise GrammarError("grammar is not valid: it cannot be used together with tools")
            return self._build_calls(chat)
        validated = self._validator.validate(grammar)
        answer_format = None if chat is None else chat.answer_format
        if not validated or answer_format is None:
            return validated
        return AnswerGrammarWriter(self._format_tokens).write_with_reasoning(answer_format, validated)

    def _build_calls(self, chat: RenderedChat) -> str:
        if (count := len(chat.tools)) > MAX_TOOLS:
            raise GrammarError(f"`tools` is not valid: at most {MAX_TOOLS} tools may be given. Given: {count}")
        key = json.dumps([chat.tools, chat.answer_format, chat.parallel_calls]).encode()
        if len(key) > MAX_GRAMMAR_BYTES:
            raise GrammarError(
                f"`tools` is not valid: it must have at most {MAX_GRAMMAR_BYTES} bytes. Given: {len(key)}"
            )
        try:
            return self._validator.cached(
                b"must " + key if chat.call_required else key, lambda: self._write_calls(chat, key)
            )
        except RecursionError:
            raise GrammarError("`tools` is not valid: it is nested too deeply") from None

    def _write_calls(self, chat: RenderedChat, key: bytes) -> str:
        tools = [_tool_grammar(name, schema) for name, schema in chat.tools]
        answer_format = chat.answer_format or AnswerFormat()
        for tool in tools:
            if any(not call_format.can_express(tool.name) for call_format in answer_format.call_formats):
                raise GrammarError(
                    f"`tools` is not valid: {tool.name!a} cannot be the name of a tool in this model's form of calls"
                )
        if sum(_count_properties(schema) for _, schema in chat.tools) > MAX_TOOL_PROPERTIES:
            raise GrammarError(
                f"`tools` is not valid: their `properties` have more than {MAX_TOOL_PROPERTIES} names in all"
            )

        def check() -> str:
            self._check_compiles(answer_format, tools, chat.parallel_calls)
            return ""

        self._validator.cached(b"check " + key, check)
        writer = AnswerGrammarWriter(self._format_tokens)
        return writer.write_calls(answer_format, tools, chat.parallel_calls, chat.call_required)

    def _check_compiles(
        self, answer_format: AnswerFormat, tools: list[ToolGrammar], parallel_calls: bool | None
    ) -> None:
        """Compiles the grammar of required calls. Raises GrammarError, and names the tool that causes it."""
        calls_only = AnswerFormat(answer_format.call_formats)  # reasoning cannot cause an error

        def compile_error(tools: list[ToolGrammar]) -> str:
            writer = AnswerGrammarWriter(self._format_tokens, only_text=True)
            return self._validator.schema_grammar_error(writer.write_calls(calls_only, tools, parallel_calls, True))

        if error_of_all := compile_error(tools):
            for tool in tools:
                if error := compile_error([tool]):
                    raise GrammarError(f"tool `{tool.name}`: cannot compile regex from schema: {error}")
            raise GrammarError(f"`tools` is not valid: all tools together cannot be compiled: {error_of_all}")


def _tool_grammar(name: str, schema: Any) -> ToolGrammar:
    """Checks the schema of a tool's arguments, which must be an object, and writes its grammars."""
    if not name or name != name.encode(errors="ignore").decode():
        raise GrammarError(f"`tools` is not valid: {name!a} cannot be the name of a tool")
    if isinstance(schema, dict) and schema.get("additionalProperties") == "true":
        schema = {**schema, "additionalProperties": True}  # TGI's clients send the string
    try:
        checked = checked_schema({} if schema is None or schema is True else schema)
    except GrammarError as error:
        raise GrammarError(f"tool `{name}`: {error}") from None
    types = checked.get("type", "object")
    if "object" not in ([types] if isinstance(types, str) else types):
        raise GrammarError(f"tool `{name}`: grammar is not valid: `parameters` must describe an object")
    checked["type"] = "object"
    return ToolGrammar(name, _schema_grammar(checked), _fields_grammar(name, checked))


def _fields_grammar(name: str, schema: dict[str, Any]) -> str:
    properties = schema.get("properties", {})
    if _NOT_PROPERTIES_ONLY & set(schema) or "_name" in properties:
        return ""
    required = ["_name", *schema.get("required", ())]
    return _schema_grammar({**schema, "properties": {"_name": {"const": name}, **properties}, "required": required})


def _count_properties(schema: Any) -> int:
    """Number of names in `properties`, at all depths."""
    if isinstance(schema, list):
        return sum(map(_count_properties, schema))
    if not isinstance(schema, dict):
        return 0
    properties = schema.get("properties")
    own = len(properties) if isinstance(properties, dict) else 0
    return own + sum(map(_count_properties, schema.values()))


def _schema_grammar(schema: dict[str, Any]) -> str:
    return json.dumps(schema_grammars(schema)[0])


# The Lark text of an answer grammar

# ANY must not match a special token, whose bytes in the worker's token table are not UTF-8. GAP is the white space
# between the pieces of a call, LEAD that before an answer.
_TERMINALS = rf"""{OPTIONS}ANY: /(?s:.)*/
WHITE: /[ \t\r\n]*/
GAP: /[ \n]?/
LEAD: /[ \n]{{0,2}}/
"""


class AnswerGrammarWriter:
    """Writes one grammar. Methods return the text of a rule's body; `_rule` and `_terminal` name such texts."""

    def __init__(self, format_tokens: FormatTokens, only_text: bool = False) -> None:
        """`only_text` leaves special tokens out, so that the grammar can be tried out with a table without them."""
        self._format_tokens = format_tokens
        self._only_text = only_text
        self._rules: dict[str, str] = {}  # names by body
        self._terminals: dict[str, str] = {}  # names by body
        self._grammars: dict[str, str] = {}  # names of further entries of `grammars`, by entry
        self._other_tokens = f"<[{_id_ranges(format_tokens.other_ids)}]>" if format_tokens.other_ids else ""

    def write_calls(
        self,
        answer_format: AnswerFormat,
        tools: Sequence[ToolGrammar],
        parallel_calls: bool | None,
        call_required: bool,
    ) -> str:
        """The grammar of an answer that may, or must, call these tools."""
        arguments = [self._object(tool.arguments) for tool in tools]
        call_sequences = []  # (format, its calls from behind the marker)
        bare_sequences = []  # calls without a marker, which may still turn out to be text
        for call_format in answer_format.call_formats:
            call = self._one_call(call_format, tools, arguments)
            if not call:
                continue
            parallel = call_format.parallel_calls if parallel_calls is None else parallel_calls
            further = self._further_calls(call_format, call, parallel)
            sequence = self._rule(f"{self._sequence(call_format.before)} {call} {further}")
            call_sequences.append((call_format, sequence))
            if call_format.bare:
                first = self._one_call(call_format, tools, arguments, loose_pieces=len(call_prefix(call_format)))
                bare_sequences.append(f"{first} {further}")
        calls_only = [self._with_marker(call_format, sequence) for call_format, sequence in call_sequences]
        if call_required:
            body = f"LEAD ({_alternatives(calls_only)})"
        else:
            body = self._text_or_calls(answer_format, call_sequences, bare_sequences)
        return self._to_json(self._after_reasoning(answer_format, body, may_end=not call_required))

    def write_with_reasoning(self, answer_format: AnswerFormat, grammar: str) -> str:
        """A validated grammar that applies after the reasoning."""
        body = self._object(json.dumps(json.loads(grammar)["grammars"][0]))
        return self._to_json(self._after_reasoning(answer_format, f"LEAD {body}", may_end=False))

    def _to_json(self, start: str) -> str:
        definitions = (f"{name}{body}\n" for body, name in [*self._terminals.items(), *self._rules.items()])
        top = {"lark_grammar": f"{_TERMINALS}start: {start}\n{''.join(definitions)}"}
        return json.dumps(
            {"grammars": [top, *({**json.loads(entry), "name": name} for entry, name in self._grammars.items())]}
        )

    # Reasoning and text

    def _after_reasoning(self, answer_format: AnswerFormat, body: str, may_end: bool) -> str:
        """The body after optional reasoning.

        With `may_end` the answer may consist of reasoning only. Without it the white space at the beginning is bounded,
        so that the model must begin.
        """
        tags = answer_format.reasoning_tags
        if tags is None:
            return body
        body = self._rule(body)
        reasoning = f"{self._anything_up_to(tags.close)} {body}"
        if may_end:
            reasoning = f"({reasoning} | {self._anything()})"
        if answer_format.starts_in_reasoning:
            return reasoning
        opening = f"{'WHITE' if may_end else 'LEAD'} {self._piece(tags.open)}"
        if not self._is_special(tags.open):
            opening = self._terminal(opening)
        return f"{opening} {reasoning} | {body}"

    def _anything(self) -> str:
        return f"(ANY {self._other_tokens})* ANY" if self._other_tokens else "ANY"

    def _anything_up_to(self, marker: str) -> str:
        """Anything up to the first such marker, and the marker."""
        prefix = f"(ANY {self._other_tokens})* " if self._other_tokens else ""
        return prefix + self._text_up_to("ANY", marker)

    def _text_or_calls(
        self, answer_format: AnswerFormat, call_sequences: list[tuple[ToolCallFormat, str]], bare_sequences: list[str]
    ) -> str:
        """Text, which may turn into calls at a marker, or `bare_sequences`."""
        tags = answer_format.reasoning_tags
        # Beginnings that are not text.
        prefixes = [[tags.open]] if tags is not None and not self._is_special(tags.open) else []
        prefixes += [list(call_prefix(call_format)) for call_format, _ in call_sequences if call_format.bare]
        first = "ANY"
        if prefixes:
            excluded = (f"~({' '.join(f'WHITE {json.dumps(piece)}' for piece in pieces)} ANY)" for pieces in prefixes)
            first = self._terminal(f"ANY & {' & '.join(excluded)}")
        marked = [(call_format.marker, sequence) for call_format, sequence in call_sequences if call_format.marker]

        def with_endings(text: str) -> list[str]:
            return [text, *(f"{self._text_up_to(text, marker)} {sequence}" for marker, sequence in marked)]

        options = with_endings(first) + bare_sequences
        if self._other_tokens:
            others = self._other_tokens
            options.append(f"{first} {others} (ANY {others})* ({_alternatives(with_endings('ANY'))})")
        return f"({_alternatives(options)})"

    def _text_up_to(self, text: str, marker: str) -> str:
        """Text up to the first such marker, and the marker."""
        if self._is_special(marker):
            return f"{text} {self._piece(marker)}"
        return self._rule(f"{text} {json.dumps(marker)}", "[lazy]")

    # Calls

    def _with_marker(self, call_format: ToolCallFormat, sequence: str) -> str:
        """Calls with their marker, as the whole answer."""
        if not call_format.marker:
            return sequence
        marker = f"{self._piece(call_format.marker)} GAP"
        return f"({marker})? {sequence}" if call_format.bare else f"{marker} {sequence}"

    def _one_call(
        self, call_format: ToolCallFormat, tools: Sequence[ToolGrammar], arguments: list[str], loose_pieces: int = 0
    ) -> str:
        """The rule of one call of any tool; "" if no tool fits the format. Any white space may precede each of the
        first `loose_pieces` pieces."""
        calls = [
            self._call_of_tool(call_format, tool, rule, loose_pieces)
            for tool, rule in zip(tools, arguments, strict=True)
            if tool.fields or CallPlaceholder.FIELDS not in call_format.call
        ]
        return self._rule(_alternatives(calls)) if calls else ""

    def _further_calls(self, call_format: ToolCallFormat, call: str, parallel_calls: bool) -> str:
        """What may follow the first call: further calls, and what ends the calls."""
        again = ""
        if parallel_calls:
            pieces = [*call_format.between, *([call_format.marker] if call_format.marker_repeats else [])]
            again = f"({self._sequence([*pieces, call], {call})})*"
        return f"{again} {self._sequence(call_format.after)}"

    def _call_of_tool(self, call_format: ToolCallFormat, tool: ToolGrammar, arguments: str, loose_pieces: int) -> str:
        quoted = json.dumps(tool.name, ensure_ascii=False)
        values: dict[str, str] = {
            CallPlaceholder.NAME: quoted,
            CallPlaceholder.WORD: tool.name,
            CallPlaceholder.ARGUMENTS: arguments,
        }
        if CallPlaceholder.FIELDS in call_format.call:
            # The object that contains the name contains the arguments as well.
            object_start = call_format.call.index("{", 1)
            fields = self._object(tool.fields)
            after_fields = call_format.call[call_format.call.index(CallPlaceholder.FIELDS) + 1 :]
            return self._sequence([*call_format.call[:object_start], fields, *after_fields], {fields}, loose_pieces)
        pieces = [values.get(piece, piece) for piece in call_format.call]
        return self._sequence(pieces, {arguments}, loose_pieces)

    def _sequence(self, pieces: Iterable[str], rules: Container[str] = (), loose_pieces: int = 0) -> str:
        """Pieces with gaps between them. Adjacent text pieces become one terminal; `rules` are names of rules.

        Any white space may precede each of the first `loose_pieces` pieces.
        """
        gaps = chain(repeat("WHITE", loose_pieces), repeat("GAP"))
        written: list[str] = []
        runs = [(text, list(run)) for text, run in groupby(pieces, lambda piece: self._is_text(piece, rules))]
        for at, (text, run) in enumerate(runs, 1):
            if text:
                spaced = [f"{next(gaps)} {json.dumps(piece, ensure_ascii=False)}" for piece in run]
                written.append(self._terminal(" ".join(spaced) + (" GAP" if at < len(runs) else "")))
            else:
                written += (piece if piece in rules else f"{next(gaps)} {self._piece(piece)}" for piece in run)
        return " ".join(filter(None, written))

    def _is_text(self, piece: str, rules: Container[str]) -> bool:
        return piece not in rules and not self._is_special(piece)

    # Pieces and names

    def _is_special(self, piece: str) -> bool:
        return self._format_tokens.token_id(piece) is not None

    def _piece(self, piece: str) -> str:
        token_id = self._format_tokens.token_id(piece)
        if token_id is None:
            return json.dumps(piece, ensure_ascii=False)
        return "" if self._only_text else f"<[{token_id}]>"

    def _terminal(self, body: str) -> str:
        return self._terminals.setdefault(f": {body}", f"T{len(self._terminals)}")

    def _object(self, grammar: str) -> str:
        """The rule that refers to a separate entry of `grammars`."""
        return self._rule(f"@{self._grammars.setdefault(grammar, f'object{len(self._grammars)}')}")

    def _rule(self, body: str, options: str = "") -> str:
        return self._rules.setdefault(f"{options}: {body}", f"r{len(self._rules)}")


def _alternatives(options: Sequence[str]) -> str:
    return " | ".join(options)


def _id_ranges(ids: Sequence[int]) -> str:
    """Ascending ids in llguidance's notation: "1-3,7-7"."""
    edges = [at for at, (one, next) in enumerate(pairwise(ids), 1) if next != one + 1]
    return ",".join(f"{ids[a]}-{ids[b - 1]}" for a, b in pairwise([0, *edges, len(ids)]))
