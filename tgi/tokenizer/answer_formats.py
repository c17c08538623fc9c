"""How models write tool calls and reasoning: one record per format, detected from a model's chat template."""

import re
from enum import StrEnum
from functools import cache
from typing import NamedTuple

from tgi.tokenizer.vocabulary import Vocabulary

# White space that may precede the first piece of an answer, and is not part of it.
WHITESPACE = " \t\r\n"


class CallPlaceholder(StrEnum):
    """The variable pieces of a tool call."""

    NAME = "<name>"  # the tool's name as a JSON string
    WORD = "<word>"  # the tool's name without quotes
    ARGUMENTS = "<arguments>"  # a JSON object
    FIELDS = "<fields>"  # the arguments as further fields of the object that holds the name: `, "a": 1}`, or only `}`


class ToolCallFormat(NamedTuple):
    """How tool calls are written: [marker] before call [between [marker] call]… after.

    Pieces are separated by one space, one newline or nothing. A piece that is a special token of the model's
    vocabulary is written as that token.
    """

    name: str
    call: tuple[str, ...]
    required_signs: tuple[str, ...] = ()  # a template that contains all of them has this format …
    excluding_signs: tuple[str, ...] = ()  # … unless it contains one of these
    marker: str = ""  # begins the calls; "": no marker
    marker_repeats: bool = False  # the marker precedes every call, not only the first
    bare: bool = False  # calls may begin without the marker, at the beginning of an answer
    before: tuple[str, ...] = ()
    between: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    parallel_calls: bool = True  # default if the request does not say whether several calls are allowed

    def can_express(self, name: str) -> bool:
        """Whether the parser can recover this tool name: an unquoted name ends at the piece that follows it."""
        if CallPlaceholder.WORD not in self.call:
            return True
        return name == name.strip(WHITESPACE) and self.call[self.call.index(CallPlaceholder.WORD) + 1] not in name


def _json_call(arguments_key: str) -> tuple[str, ...]:
    return (
        "{", '"name"', ":", CallPlaceholder.NAME, ",", f'"{arguments_key}"', ":", CallPlaceholder.ARGUMENTS, "}",
    )  # fmt: skip


# Formats with one tag per argument are not supported.
_XML_ARGUMENT_SIGNS = ("<function=", "<arg_key>", "<parameter=")
# Detection takes the first that matches.
TOOL_CALL_FORMATS = (
    ToolCallFormat(
        name="mistral-args",
        call=(CallPlaceholder.WORD, "[ARGS]", CallPlaceholder.ARGUMENTS),
        required_signs=("[TOOL_CALLS]", "[ARGS]"),
        marker="[TOOL_CALLS]",
        marker_repeats=True,
    ),
    ToolCallFormat(
        name="mistral",
        call=_json_call("arguments"),
        required_signs=("[TOOL_CALLS]",),
        marker="[TOOL_CALLS]",
        before=("[",),
        between=(",",),
        after=("]",),
    ),
    ToolCallFormat(
        name="hermes",
        call=(*_json_call("arguments"), "</tool_call>"),
        required_signs=("<tool_call>",),
        excluding_signs=_XML_ARGUMENT_SIGNS,
        marker="<tool_call>",
        marker_repeats=True,
    ),
    ToolCallFormat(
        name="llama3",
        call=_json_call("parameters"),
        required_signs=('"parameters"',),
        excluding_signs=_XML_ARGUMENT_SIGNS,
        marker="<|python_tag|>",
        bare=True,
        between=(";",),
        parallel_calls=False,  # the family's templates reject a message with more than one call
    ),
)
# For templates without any of them: TGI's own format, and the one that the default `tool_prompt` asks for.
FALLBACK_FORMATS = (
    ToolCallFormat(
        name="tgi",
        call=("{", '"function"', ":", "{", '"_name"', ":", CallPlaceholder.NAME, CallPlaceholder.FIELDS, "}"),
        bare=True,
        between=("\n",),
        parallel_calls=False,
    ),
    ToolCallFormat(
        name="named", call=_json_call("parameters"), bare=True, between=("\n",), parallel_calls=False
    ),
)  # fmt: skip


# For answers that may begin as the calls of a format: its variant in which calls have their marker.
MARKED_FORMATS = {
    known.name: known._replace(name=f"{known.name}-marked", bare=False)
    for known in TOOL_CALL_FORMATS
    if known.bare and known.marker
}
FORMATS_BY_NAME = {known.name: known for known in (*TOOL_CALL_FORMATS, *FALLBACK_FORMATS, *MARKED_FORMATS.values())}


class ReasoningTags(NamedTuple):
    """The tags around reasoning."""

    open: str
    close: str


REASONING_TAGS = (ReasoningTags("<think>", "</think>"), ReasoningTags("[THINK]", "[/THINK]"))


class AnswerFormat(NamedTuple):
    """What an answer may contain besides text."""

    call_formats: tuple[ToolCallFormat, ...] = ()
    reasoning_tags: ReasoningTags | None = None
    starts_in_reasoning: bool = False  # the prompt ends with the opening tag or within reasoning
    text_has_grammar: bool = False  # calls stand only at the beginning; markers within text have no meaning


def call_prefix(call_format: ToolCallFormat) -> tuple[str, ...]:
    """The pieces that identify a call without a marker: all up to the first key."""
    return call_format.call[:2]


@cache
def detect_tool_call_format(template: str) -> ToolCallFormat | None:
    """The format of the calls that a chat template renders; None if it is none of TOOL_CALL_FORMATS."""
    for call_format in TOOL_CALL_FORMATS:
        if all(sign in template for sign in call_format.required_signs) and not any(
            sign in template for sign in call_format.excluding_signs
        ):
            return call_format
    return None


@cache
def detect_reasoning_tags(template: str) -> ReasoningTags | None:
    """The reasoning tags that a chat template contains."""
    return next((tags for tags in REASONING_TAGS if tags.open in template or tags.close in template), None)


# Format pieces that are special tokens: ids in grammars, stand-in characters in parsed answers

# In the text that is parsed, a lone surrogate stands for each hidden token (most special tokens); decoded text never
# contains one. All hidden tokens that are no piece of a format share _OTHER_STAND_IN, so that an answer which begins
# with one does not begin with a call.
_FIRST_STAND_IN = 0xD800
_OTHER_STAND_IN = "\udfff"
STAND_IN = re.compile("[\ud800-\udfff]")


class FormatTokens:
    """The format pieces that a vocabulary has as special tokens.

    `ids` are their token ids, `other_ids` those of all other special tokens except EOS, in ascending order.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        pieces = {piece for tags in REASONING_TAGS for piece in tags}
        call_pieces = (piece for known in TOOL_CALL_FORMATS for piece in (known.marker, *known.call))
        pieces |= {piece for piece in call_pieces if not isinstance(piece, CallPlaceholder)}
        found = ((piece, vocabulary.tokenizer.token_to_id(piece)) for piece in sorted(pieces))
        self._ids = {
            piece: token_id for piece, token_id in found if token_id is not None and token_id in vocabulary.special_ids
        }
        self._stand_ins = {piece: chr(_FIRST_STAND_IN + at) for at, piece in enumerate(self._ids)}
        self._stand_ins_by_id = {token_id: self._stand_ins[piece] for piece, token_id in self._ids.items()}
        self.ids = frozenset(self._stand_ins_by_id)
        self.other_ids = sorted(vocabulary.special_ids - self._stand_ins_by_id.keys() - vocabulary.eos_ids)

    def token_id(self, piece: str) -> int | None:
        """The id of a piece that is a special token; None if it is text."""
        return self._ids.get(piece)

    def piece_text(self, piece: str) -> str:
        """How a piece appears in the text that is parsed: its stand-in, or the piece itself."""
        return self._stand_ins.get(piece, piece)

    def stand_in(self, token_id: int) -> str:
        """The stand-in of a hidden token in the text that is parsed."""
        return self._stand_ins_by_id.get(token_id, _OTHER_STAND_IN)
