"""How models write calls of tools and reasoning: one record for each form, found by what a chat template says of it."""

from enum import StrEnum
from functools import cache
from typing import NamedTuple

# What may stand before the first thing of an answer without belonging to it.
WHITE = " \t\r\n"


class Slot(StrEnum):
    """What stands at a place of a call that differs from call to call."""

    NAME = "<name>"  # the tool's name as a JSON string
    WORD = "<word>"  # the tool's name as it is
    ARGUMENTS = "<arguments>"  # a JSON object
    FIELDS = "<fields>"  # the arguments behind other fields of an object: `, "a": 1}`, or only `}`


class Format(NamedTuple):
    """How calls are written: [marker] before call [between [marker] call]… after.

    Pieces are written one behind the other, with a space or newline between them or none. A piece that is a special
    token of the model's vocabulary is written as that token.
    """

    name: str
    call: tuple[str, ...]
    signs: tuple[str, ...] = ()  # a template that holds all of them means this format …
    foreign: tuple[str, ...] = ()  # … unless it holds one of these
    marker: str = ""  # what begins the calls; "": nothing does
    each: bool = False  # the marker stands before each call, not only before the first
    bare: bool = False  # calls may begin without the marker, as the first thing of an answer
    before: tuple[str, ...] = ()
    between: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    several: bool = True  # more than one call, if the client does not say

    def can_tell(self, name: str) -> bool:
        """Whether this name of a tool can be read again from a call: where it is no string, something ends it."""
        if Slot.WORD not in self.call:
            return True
        return name == name.strip(WHITE) and self.call[self.call.index(Slot.WORD) + 1] not in name


def _call(arguments: str) -> tuple[str, ...]:
    return "{", '"name"', ":", Slot.NAME, ",", f'"{arguments}"', ":", Slot.ARGUMENTS, "}"


# The first whose signs are there counts. Formats with a tag for each argument are not known.
_XML = ("<function=", "<arg_key>", "<parameter=")
FORMATS = (
    Format(
        "mistral-args",
        (Slot.WORD, "[ARGS]", Slot.ARGUMENTS),
        ("[TOOL_CALLS]", "[ARGS]"),
        marker="[TOOL_CALLS]",
        each=True,
    ),
    Format(
        "mistral",
        _call("arguments"),
        ("[TOOL_CALLS]",),
        marker="[TOOL_CALLS]",
        before=("[",),
        between=(",",),
        after=("]",),
    ),
    Format(
        "hermes",
        (*_call("arguments"), "</tool_call>"),
        ("<tool_call>",),
        _XML,
        marker="<tool_call>",
        each=True,
    ),
    Format(
        "llama3",
        _call("parameters"),
        ('"parameters"',),
        _XML,
        marker="<|python_tag|>",
        bare=True,
        between=(";",),
        several=False,  # the family's templates refuse a message with more than one
    ),
)
# For templates without any of them: TGI's own form, and the one that the default `tool_prompt` asks for.
FALLBACK = (
    Format(
        "tgi",
        ("{", '"function"', ":", "{", '"_name"', ":", Slot.NAME, Slot.FIELDS, "}"),
        bare=True,
        between=("\n",),
        several=False,
    ),
    Format("named", _call("parameters"), bare=True, between=("\n",), several=False),
)


class Tags(NamedTuple):
    """What stands around reasoning."""

    open: str
    close: str


TAGS = (Tags("<think>", "</think>"), Tags("[THINK]", "[/THINK]"))


class Answer(NamedTuple):
    """What one answer may hold besides text. `inside`: the prompt ends within reasoning, so the answer begins there."""

    formats: tuple[Format, ...] = ()
    tags: Tags | None = None
    inside: bool = False


def beginning(format: Format) -> tuple[str, ...]:
    """By what calls without a marker are known: everything up to the first key."""
    return format.call[:2]


@cache
def native(source: str) -> Format | None:
    """The format that a chat template teaches its model; None if it is none of FORMATS."""
    for format in FORMATS:
        if all(sign in source for sign in format.signs) and not any(sign in source for sign in format.foreign):
            return format
    return None


@cache
def reasoning(source: str) -> Tags | None:
    """The tags of reasoning that a chat template knows."""
    return next((tags for tags in TAGS if tags.open in source or tags.close in source), None)
