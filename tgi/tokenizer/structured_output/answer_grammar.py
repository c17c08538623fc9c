"""Grammars of whole chat answers, in llguidance's Lark: text that may turn into tool calls, calls only, and reasoning
before either.

Within text all characters and special tokens are allowed; only bytes that can never become a character are not. From a
call's marker on, or from the first key of a call without a marker, only a call can follow.

The lexer takes the longest terminal and does not backtrack. So text that may turn out to be something else is a single
terminal up to the point where that is decided, including the white space before it.
"""

import json
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, groupby, pairwise, repeat
from typing import Any, NamedTuple
from urllib.parse import quote

from tgi.hub.llguidance_tables import OPTIONS
from tgi.tokenizer.answers.arguments import argument_types
from tgi.tokenizer.answers.formats import (
    MARKED_FORMATS,
    AnswerFormat,
    CallPlaceholder,
    Channels,
    FormatTokens,
    ToolCallFormat,
    call_prefix,
)
from tgi.tokenizer.chat import OfferedTool, RenderedChat
from tgi.tokenizer.structured_output.argument_grammar import (
    ArgumentRules,
    LarkRules,
    LiteralRules,
    keywords_can_express,
    literals_can_express,
    tags_can_express,
    unenforced,
    unenforced_literals,
)
from tgi.tokenizer.structured_output.grammar import (
    IGNORABLE_KEYWORDS,
    MAX_GRAMMAR_BYTES,
    CheckedGrammar,
    GrammarError,
    GrammarValidator,
    begins_with_pieces,
    checked_schema,
    schema_grammars,
)
from tgi.tokenizer.structured_output.json_schema_lark import any_object_lark
from tgi.tokenizer.vocabulary import Vocabulary

# The grammar of `response_format: {"type": "json_object"}`.
ANY_OBJECT = {"schema": {"type": "object"}}
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
    not_enforced: list[str]  # as in EnforceableSchema
    schema: dict[str, Any]  # checked, for formats in which arguments are no JSON object
    types: Mapping[str, list[str]]  # see argument_types


class AnswerGrammarBuilder:
    """Builds the grammars of answers, with a cache of results and errors. Not thread-safe."""

    def __init__(self, vocabulary: Vocabulary, described: AnswerFormat | None = None) -> None:
        """`described`: what the model's response template says."""
        self._format_tokens = FormatTokens(vocabulary, described)
        self._validator = GrammarValidator(vocabulary)

    def build(self, grammar: bytes, chat: RenderedChat | None) -> CheckedGrammar:
        """The grammar of an answer for the worker, an empty one if it is not constrained. `grammar` is the client's, as
        JSON; together with tools, the answer is one or more calls or matches it. Raises GrammarError."""
        if chat is not None and chat.tools:
            return self._build_calls(grammar, chat)
        validated = self._validator.validate(grammar)
        answer_format = None if chat is None else chat.answer_format
        if not validated.text or answer_format is None:
            return validated
        writer = AnswerGrammarWriter(self._format_tokens)
        return validated._replace(text=writer.write_with_reasoning(answer_format, validated.text))

    def _build_calls(self, grammar: bytes, chat: RenderedChat) -> CheckedGrammar:
        if (count := len(chat.tools)) > MAX_TOOLS:
            raise GrammarError(f"`tools` is not valid: at most {MAX_TOOLS} tools may be given. Given: {count}")
        key = json.dumps([chat.tools, chat.answer_format, chat.parallel_calls]).encode()
        if len(key) > MAX_GRAMMAR_BYTES:
            raise GrammarError(
                f"`tools` is not valid: it must have at most {MAX_GRAMMAR_BYTES} bytes. Given: {len(key)}"
            )
        answer = CheckedGrammar() if chat.call_required else self._validator.validate(grammar)
        try:
            tools = self._validator.cached(b"check " + key, lambda: self._checked_tools(chat))
            return self._validator.cached(
                (b"must " if chat.call_required else b"") + key + grammar,
                lambda: self._write_calls(chat, tools, grammar, answer),
            )
        except RecursionError:
            raise GrammarError("`tools` is not valid: it is nested too deeply") from None

    def _checked_tools(self, chat: RenderedChat) -> list[ToolGrammar]:
        """The grammars of the tools, which compile."""
        tools = [_tool_grammar(tool) for tool in chat.tools]
        answer_format = chat.answer_format or AnswerFormat()
        for tool in tools:
            if any(not call_format.can_express(tool.name) for call_format in answer_format.call_formats):
                raise GrammarError(
                    f"`tools` is not valid: {tool.name!a} cannot be the name of a tool in this model's form of calls"
                )
        tools = [
            _with_unenforced(offered, tool, answer_format) for offered, tool in zip(chat.tools, tools, strict=True)
        ]
        if sum(_count_properties(tool.schema) for tool in chat.tools) > MAX_TOOL_PROPERTIES:
            raise GrammarError(
                f"`tools` is not valid: their `properties` have more than {MAX_TOOL_PROPERTIES} names in all"
            )
        # Reasoning cannot cause an error.
        calls_only = AnswerFormat(answer_format.call_formats, channels=answer_format.channels)

        def compile_error(tools: list[ToolGrammar]) -> str:
            writer = AnswerGrammarWriter(self._format_tokens, only_text=True)
            grammar = writer.write_calls(calls_only, tools, chat.parallel_calls, True)
            return self._validator.schema_grammar_error(grammar)

        if not compile_error(tools):
            return tools
        tools = [
            _with_unenforced(offered, _compiling_tool(offered, tool, compile_error), answer_format)
            for offered, tool in zip(chat.tools, tools, strict=True)
        ]
        if error := compile_error(tools):
            raise GrammarError(f"`tools` is not valid: all tools together cannot be compiled: {error}")
        return tools

    def _write_calls(
        self, chat: RenderedChat, tools: list[ToolGrammar], grammar: bytes, answer: CheckedGrammar
    ) -> CheckedGrammar:
        answer_format = chat.answer_format or AnswerFormat()
        entry = ""
        if answer.text:
            call_formats, entry = self._formats_beside(answer.text, grammar, answer_format.call_formats)
            answer_format = answer_format._replace(call_formats=call_formats)
        writer = AnswerGrammarWriter(self._format_tokens)
        pointers = [quote(tool.name, safe="") + pointer for tool in tools for pointer in tool.not_enforced]
        return CheckedGrammar(
            writer.write_calls(answer_format, tools, chat.parallel_calls, chat.call_required, entry),
            answer.not_enforced + pointers,
            [call_format.name for call_format in answer_format.call_formats] if entry else [],
        )

    def _formats_beside(
        self, answer: str, grammar: bytes, call_formats: Sequence[ToolCallFormat]
    ) -> tuple[tuple[ToolCallFormat, ...], str]:
        """The formats of calls that no answer of this grammar begins like, and the grammar as an entry of `grammars`.
        Raises GrammarError if no format is left."""
        entry = json.dumps(json.loads(answer)["grammars"][0])
        if any(call_format.channels for call_format in call_formats):
            return tuple(call_formats), entry  # the header of a message says which it is
        if json.loads(grammar) == ANY_OBJECT:
            keys = [call_prefix(call_format)[1] for call_format in call_formats if call_format.bare]
            return tuple(call_formats), json.dumps({"lark_grammar": any_object_lark(keys)})

        def is_distinct(call_format: ToolCallFormat) -> bool:
            if call_format.bare and begins_with_pieces(answer, call_prefix(call_format)):
                return False
            marker = call_format.marker
            is_text = bool(marker) and self._format_tokens.token_id(marker) is None
            return not is_text or not begins_with_pieces(answer, [marker])

        candidates = chain.from_iterable((known, MARKED_FORMATS.get(known.name)) for known in call_formats)
        distinct = [known for known in candidates if known is not None and is_distinct(known)]
        if not distinct:
            pieces = " ".join(call_prefix(call_formats[0]) if call_formats[0].bare else [call_formats[0].marker])
            raise GrammarError(
                "grammar is not valid: together with tools, an answer must not begin as this model's calls do "
                f"({pieces}); rename the first property or leave the tools out"
            )
        return tuple({known.call: known for known in reversed(distinct)}.values())[::-1], entry


def _tool_grammar(tool: OfferedTool, ignored: Container[str] = ()) -> ToolGrammar:
    """Checks the schema of a tool's arguments, which must be an object, and writes its grammars. Without a schema there
    are no arguments."""
    name, schema = tool.name, tool.schema
    if not name or name != name.encode(errors="ignore").decode():
        raise GrammarError(f"`tools` is not valid: {name!a} cannot be the name of a tool")
    if schema is None:
        schema = {"properties": {}}
    elif schema is True:
        schema = {}
    if isinstance(schema, dict) and schema.get("additionalProperties") == "true":
        schema = {**schema, "additionalProperties": True}  # TGI's clients send the string
    try:
        checked, not_enforced = checked_schema(schema, lenient=not tool.strict, ignored=ignored)
    except GrammarError as error:
        raise GrammarError(f"tool `{name}`: {error}") from None
    types = checked.get("type", "object")
    if "object" not in ([types] if isinstance(types, str) else types):
        raise GrammarError(f"tool `{name}`: grammar is not valid: `parameters` must describe an object")
    checked["type"] = "object"
    types = argument_types(tool.schema)
    return ToolGrammar(name, _schema_grammar(checked), _fields_grammar(name, checked), not_enforced, checked, types)


def _with_unenforced(offered: OfferedTool, tool: ToolGrammar, answer_format: AnswerFormat) -> ToolGrammar:
    """The tool with the keywords that this format of calls does not enforce. Raises GrammarError if there are some and
    the tool is strict, or if a required argument cannot be written."""
    found: list[str] = []
    can_express: Callable[[str], bool]
    for known in answer_format.call_formats:
        if CallPlaceholder.TAGS in known.call:
            can_express = partial(tags_can_express, known.tags)
            found += unenforced(tool.schema, tool.types, as_text=True)
        elif CallPlaceholder.KEYWORDS in known.call:
            can_express = keywords_can_express
            found += unenforced(tool.schema, tool.types, as_text=False)
        elif CallPlaceholder.LITERALS in known.call:
            can_express = literals_can_express
            found += unenforced_literals(tool.schema)
        else:
            continue
        for name in tool.schema.get("required", ()):
            if not can_express(name):
                raise GrammarError(
                    f"tool `{tool.name}`: {name!a} cannot be the name of an argument in this model's form of calls"
                )
    missing = [pointer for pointer in dict.fromkeys(found) if pointer not in tool.not_enforced]
    if missing and offered.strict:
        raise GrammarError(f"tool `{tool.name}`: {missing[0]} cannot be enforced in this model's form of calls")
    return tool._replace(not_enforced=tool.not_enforced + missing)


def _compiling_tool(
    offered: OfferedTool, tool: ToolGrammar, compile_error: Callable[[list[ToolGrammar]], str]
) -> ToolGrammar:
    """The tool without the keywords that keep the library from compiling it. Raises GrammarError."""
    ignored: set[str] = set()
    while error := compile_error([tool]):
        candidates = (words for pattern, words in IGNORABLE_KEYWORDS if pattern.search(error) and words - ignored)
        words = next(candidates, None)
        if words is None or offered.strict:
            raise GrammarError(f"tool `{tool.name}`: cannot compile regex from schema: {error}")
        ignored |= words
        tool = _tool_grammar(offered, ignored)
    return tool


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
    """Writes one grammar. Methods return the text of a rule's body."""

    def __init__(self, format_tokens: FormatTokens, only_text: bool = False) -> None:
        """`only_text` writes special tokens as text, so that the grammar can be tried out with a table without them."""
        self._lark = LarkRules(None if only_text else format_tokens)
        self._arguments = ArgumentRules(self._lark, _schema_grammar)
        self._eos_ids = format_tokens.eos_ids
        others = format_tokens.other_ids
        self._other_tokens = f"<[{_id_ranges(others)}]>" if others and not only_text else ""

    def write_calls(
        self,
        answer_format: AnswerFormat,
        tools: Sequence[ToolGrammar],
        parallel_calls: bool | None,
        call_required: bool,
        answer: str = "",
    ) -> str:
        """The grammar of an answer that may, or must, call these tools. With `answer`, an entry of `grammars`, text
        must match it."""
        if answer_format.channels:
            return self._to_json(self._channels(tools, call_required, answer))
        call_sequences = []  # (format, its calls from behind the marker)
        bare_sequences = []  # calls without a marker, which may still turn out to be text
        for call_format in answer_format.call_formats:
            call = self._one_call(call_format, tools)
            if not call:
                continue
            if answer and call_format.bare:
                call = self._one_call(call_format, tools, split=True)
            parallel = call_format.parallel_calls if parallel_calls is None else parallel_calls
            further = self._further_calls(call_format, call, parallel)
            sequence = self._lark.rule(f"{self._sequence(call_format.before)} {call} {further}")
            call_sequences.append((call_format, sequence))
            if call_format.bare and not answer:
                begun = call_format._replace(call=(*call_format.before, *call_format.call))
                first = self._one_call(begun, tools, loose_pieces=len(call_prefix(call_format)))
                bare_sequences.append(f"{first} {further}")
        calls_only = [self._with_marker(call_format, sequence) for call_format, sequence in call_sequences]
        if call_required:
            body = f"LEAD ({_alternatives(calls_only)})"
        elif answer:
            lead = "LEAD " if answer_format.reasoning_tags is not None else ""
            body = f"(LEAD ({_alternatives(calls_only)}) | {lead}{self._lark.object(answer)})"
        else:
            names = [tool.name for tool in tools]
            body = self._text_or_calls(answer_format, call_sequences, bare_sequences, names)
        return self._to_json(self._after_reasoning(answer_format, body, may_end=not (call_required or answer)))

    def write_with_reasoning(self, answer_format: AnswerFormat, grammar: str) -> str:
        """A validated grammar that applies after the reasoning."""
        entry = json.dumps(json.loads(grammar)["grammars"][0])
        if answer_format.channels:
            return self._to_json(self._channels((), False, entry))
        body = self._lark.object(entry)
        return self._to_json(self._after_reasoning(answer_format, f"LEAD {body}", may_end=False))

    def _to_json(self, start: str) -> str:
        top = {"lark_grammar": f"{_TERMINALS}start: {start}\n{self._lark.definitions()}"}
        return json.dumps({"grammars": [top, *self._lark.grammars()]})

    # Reasoning and text

    def _after_reasoning(self, answer_format: AnswerFormat, body: str, may_end: bool) -> str:
        """The body after optional reasoning.

        With `may_end` the answer may consist of reasoning only. Without it the white space at the beginning is bounded,
        so that the model must begin.
        """
        tags = answer_format.reasoning_tags
        if tags is None:
            return body
        body = self._lark.rule(body)
        reasoning = f"{self._anything_up_to(tags.close)} {body}"
        if may_end:
            reasoning = f"({reasoning} | {self._anything()})"
        if answer_format.starts_in_reasoning:
            return reasoning
        opening = f"{'WHITE' if may_end else 'LEAD'} {self._lark.piece(tags.open)}"
        if not self._lark.is_special(tags.open):
            opening = self._lark.terminal(opening)
        return f"{opening} {reasoning} | {body}"

    def _anything(self) -> str:
        return f"(ANY {self._other_tokens})* ANY" if self._other_tokens else "ANY"

    def _anything_up_to(self, marker: str) -> str:
        """Anything up to the first such marker, and the marker."""
        prefix = f"(ANY {self._other_tokens})* " if self._other_tokens else ""
        return prefix + self._lark.text_up_to("ANY", marker)

    def _text_or_calls(
        self,
        answer_format: AnswerFormat,
        call_sequences: list[tuple[ToolCallFormat, str]],
        bare_sequences: list[str],
        names: Sequence[str],
    ) -> str:
        """Text, which may turn into calls at a marker, or `bare_sequences`."""
        tags = answer_format.reasoning_tags
        # Beginnings that are not text.
        prefixes = []
        if tags is not None and not self._lark.is_special(tags.open):
            prefixes = [f"WHITE {json.dumps(tags.open)}"]
        for call_format, _ in call_sequences:
            if call_format.bare:
                prefix = call_prefix(call_format)
                pieces = [f"WHITE {json.dumps(piece)}" for piece in prefix]
                name, end = (*call_format.before, *call_format.call)[len(prefix) : len(prefix) + 2]
                if name is CallPlaceholder.WORD:  # what a bracket begins is a call only if a name follows
                    known = [json.dumps(name + end, ensure_ascii=False) for name in names]
                    word = rf"/[A-Za-z_]\w*/ {json.dumps(end)}"
                    pieces.append(f"WHITE ({_alternatives([word, *known])})")
                prefixes.append(" ".join(pieces))
        first = "ANY"
        if prefixes:
            excluded = (f"~({prefix} ANY)" for prefix in prefixes)
            first = self._lark.terminal(f"ANY & {' & '.join(excluded)}")
        marked = [(call_format, sequence) for call_format, sequence in call_sequences if call_format.marker]

        def with_endings(text: str) -> list[str]:
            up_to = [self._lark.text_up_to(text, call_format.marker) for call_format, _ in marked]
            return [text, *(f"{before} {after}" for before, after in zip(up_to, behind_markers, strict=True))]

        def behind_marker(call_format: ToolCallFormat, sequence: str) -> str:
            """Calls, or behind a marker that is text what does not begin like one: a sentence about the marker."""
            marker = call_format.marker
            if self._lark.is_special(marker):
                return sequence
            no_call = self._lark.terminal(f"ANY & ~({_call_beginning(call_format, names)} ANY)")
            return self._lark.recursive_rule(
                lambda name: _alternatives([sequence, *self._text_again(no_call, marker, name)])
            )

        behind_markers = [behind_marker(*one) for one in marked]
        options = with_endings(first) + bare_sequences
        if self._other_tokens:
            others = self._other_tokens
            options.append(f"{first} {others} (ANY {others})* ({_alternatives(with_endings('ANY'))})")
        return f"({_alternatives(options)})"

    def _text_again(self, text: str, marker: str, behind: str) -> list[str]:
        """Text, which may reach the same marker again."""
        others = self._other_tokens
        further = [text, f"{self._lark.text_up_to(text, marker)} {behind}"]
        if others:
            after = f"ANY | {self._lark.text_up_to('ANY', marker)} {behind}"
            further.append(f"{text} {others} (ANY {others})* ({after})")
        return further

    # Calls

    def _with_marker(self, call_format: ToolCallFormat, sequence: str) -> str:
        """Calls with their marker, as the whole answer."""
        if not call_format.marker:
            return sequence
        marker = f"{self._lark.piece(call_format.marker)} GAP"
        return f"({marker})? {sequence}" if call_format.bare else f"{marker} {sequence}"

    def _one_call(
        self, call_format: ToolCallFormat, tools: Sequence[ToolGrammar], loose_pieces: int = 0, split: bool = False
    ) -> str:
        """The rule of one call of any tool; "" if no tool fits the format. Any white space may precede each of the
        first `loose_pieces` pieces. `split` as in _sequence."""
        calls = [
            self._call_of_tool(call_format, tool, loose_pieces, split)
            for tool in tools
            if tool.fields or CallPlaceholder.FIELDS not in call_format.call
        ]
        return self._lark.rule(_alternatives(calls)) if calls else ""

    def _further_calls(self, call_format: ToolCallFormat, call: str, parallel_calls: bool) -> str:
        """What may follow the first call: further calls, and what ends the calls."""
        again = ""
        if parallel_calls:
            pieces = [*call_format.between, *([call_format.marker] if call_format.marker_repeats else [])]
            again = f"({self._sequence([*pieces, call], {call})})*"
            if not pieces and call_format.call[0] is CallPlaceholder.WORD:
                again = f'("\\n" {call})*'  # names would run together
        return f"{again} {self._sequence(call_format.after)}"

    def _call_of_tool(self, call_format: ToolCallFormat, tool: ToolGrammar, loose_pieces: int, split: bool) -> str:
        call = call_format.call
        if CallPlaceholder.FIELDS in call:
            # The object that contains the name contains the arguments as well.
            object_start = call.index("{", 1)
            fields = self._lark.object(tool.fields)
            after_fields = call[call.index(CallPlaceholder.FIELDS) + 1 :]
            return self._sequence([*call[:object_start], fields, *after_fields], {fields}, loose_pieces, split)
        rules: set[str] = set()
        pieces: list[str] = []
        for at, piece in enumerate(call):
            follows_name = at > 0 and call[at - 1] is CallPlaceholder.WORD
            match piece:
                case CallPlaceholder.NAME:
                    pieces.append(json.dumps(tool.name, ensure_ascii=False))
                case CallPlaceholder.WORD if pieces and not self._lark.is_special(pieces[-1]) and pieces[-1] in _HUGS:
                    pieces[-1] += tool.name
                case CallPlaceholder.WORD:
                    pieces.append(tool.name)
                case CallPlaceholder.INDEX:
                    rules.add(rule := self._lark.terminal("/[0-9A-Za-z]{1,9}/"))
                    pieces.append(rule)
                case (
                    CallPlaceholder.ARGUMENTS
                    | CallPlaceholder.TAGS
                    | CallPlaceholder.KEYWORDS
                    | CallPlaceholder.LITERALS
                ):
                    if rule := self._body(call_format, piece, tool):
                        rules.add(rule)
                        pieces.append(rule)
                case _ if follows_name and piece[0] in '>":(' and not self._lark.is_special(piece):
                    pieces[-1] += piece
                case _:
                    pieces.append(piece)
        return self._sequence(pieces, rules, loose_pieces, split)

    def _body(self, call_format: ToolCallFormat, kind: str, tool: ToolGrammar) -> str:
        """The rule of a tool's arguments; "" if there is nothing to write."""
        if kind is CallPlaceholder.TAGS:
            return self._arguments.tags(call_format.tags, tool.schema, tool.types)
        if kind is CallPlaceholder.KEYWORDS:
            return self._arguments.keywords(tool.schema, tool.types)
        if kind is CallPlaceholder.LITERALS:
            return LiteralRules(self._lark, self._arguments, _schema_grammar, call_format.quote).members(tool.schema)
        return self._lark.object(tool.arguments)

    def _sequence(
        self, pieces: Iterable[str], rules: Container[str] = (), loose_pieces: int = 0, split: bool = False
    ) -> str:
        """Pieces with gaps between them. Adjacent text pieces become one terminal, unless `split`; `rules` are names of
        rules.

        Any white space may precede each of the first `loose_pieces` pieces. `split` is for calls that may turn out to
        be another JSON text: its parts are the same terminals.
        """
        if split:
            return " ".join(f"GAP {piece if piece in rules else self._lark.piece(piece)}" for piece in pieces)
        gaps = chain(repeat("WHITE", loose_pieces), repeat("GAP"))
        written: list[str] = []
        runs = [(text, list(run)) for text, run in groupby(pieces, lambda piece: self._is_text(piece, rules))]
        for at, (text, run) in enumerate(runs, 1):
            if text:
                spaced = [f"{next(gaps)} {json.dumps(piece, ensure_ascii=False)}" for piece in run]
                written.append(self._lark.terminal(" ".join(spaced) + (" GAP" if at < len(runs) else "")))
            else:
                written += (piece if piece in rules else f"{next(gaps)} {self._lark.piece(piece)}" for piece in run)
        return " ".join(filter(None, written))

    def _is_text(self, piece: str, rules: Container[str]) -> bool:
        return piece not in rules and not self._lark.is_special(piece)

    # Channels

    def _channels(self, tools: Sequence[ToolGrammar], call_required: bool, answer: str) -> str:
        """An answer of messages with headers, from behind the first START and role: reasoning, and then calls, or text
        that matches `answer` if there is one; without it, any messages. A header that names a tool begins its call."""
        piece, terminal = self._lark.piece, self._lark.terminal
        others = f" | {self._other_tokens}" if self._other_tokens else ""
        in_header = f"({' | '.join(map(piece, (Channels.START, Channels.CHANNEL, Channels.CONSTRAIN)))}{others})"
        recipient = json.dumps(Channels.RECIPIENT)
        head = terminal(f"ANY & ~(ANY {recipient} ANY)")
        tail = terminal("/[ a-z]{0,16}/")
        message, end = piece(Channels.MESSAGE), piece(Channels.END)
        is_free = not (call_required or answer)
        beginning = f"(ANY & ~(ANY {recipient} ANY))" if is_free else "/[ a-z]{0,16}/"
        before = f"({head} {in_header})*" if is_free else f"({tail} {in_header}){{0,3}}"
        calls = []
        for tool in tools:
            named = json.dumps(Channels.RECIPIENT + tool.name, ensure_ascii=False)
            name = terminal(f"{beginning} {named} /( [a-z]{{0,16}})?/")
            arguments = f"{self._lark.object(tool.arguments)} {self._closing(Channels.CALL)}"
            calls.append(f"{name} ({in_header} {tail}){{0,3}} {message} {arguments}")
        call = self._lark.rule(f"{before} ({_alternatives(calls)})") if calls else ""
        body = self._anything()
        if is_free:
            free = f"({head} {in_header})* {head} {message} {body}"
            return self._lark.recursive_rule(
                lambda name: _alternatives([f"{free} ({end} {name})?", *filter(None, [call]), body])
            )
        role = terminal(r"/(assistant)?/")
        opening = f"({piece(Channels.START)} {role})? {piece(Channels.CHANNEL)}"
        reasoning = f"{opening} {terminal(json.dumps(Channels.REASONING))} {message} {body} {end}"
        options = [call] if call else []
        if answer:
            final = terminal(f"{json.dumps(Channels.FINAL)} / ?(json)?/")
            constrain = f"({piece(Channels.CONSTRAIN)} {terminal('/(json)?/')})?"
            options.append(f"{opening} {final} {constrain} {message} {self._lark.object(answer)}")
        return f"({reasoning})* ({_alternatives(options)})"

    def _closing(self, token: str) -> str:
        """A token that may end a message, unless it ends the answer anyway."""
        parts = self._lark.parts(token)
        return "" if any(part in self._eos_ids for part in parts) else f"({self._lark.piece(token)})?"


# Pieces that a name follows without white space.
_HUGS = {"<function=", '<invoke name="', '<steptml:invoke name="', "functions."}


def _call_beginning(call_format: ToolCallFormat, names: Sequence[str]) -> str:
    """What a call begins with behind its marker, as a terminal of Lark."""
    first = (*call_format.before, *call_format.call)[0]
    if first is not CallPlaceholder.WORD:
        return f"WHITE {json.dumps(first)}"
    known = _alternatives([json.dumps(name, ensure_ascii=False) for name in names])
    return rf"(/\n?/ /\w/ | WHITE ({known}))"


def _alternatives(options: Sequence[str]) -> str:
    return " | ".join(options)


def _id_ranges(ids: Sequence[int]) -> str:
    """Ascending ids in llguidance's notation: "1-3,7-7"."""
    edges = [at for at, (one, next) in enumerate(pairwise(ids), 1) if next != one + 1]
    return ",".join(f"{ids[a]}-{ids[b - 1]}" for a, b in pairwise([0, *edges, len(ids)]))
