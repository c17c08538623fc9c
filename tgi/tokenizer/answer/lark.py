"""Grammars of whole answers in llguidance's Lark: text that may turn into calls, calls alone, reasoning before either.

While the answer is text any characters and any special tokens go; only bytes that can never become a character do not.
From the marker of a call on, or from the first key of one without a marker, nothing but a call can follow.

The lexer takes the longest terminal and never goes back. So whatever may turn out to be something else than text is one
terminal up to where that is known, with the white space before it.
"""

import json
from collections.abc import Container, Iterable, Sequence
from itertools import chain, groupby, pairwise, repeat
from typing import NamedTuple

from tgi.hub.grammar import OPTIONS
from tgi.tokenizer.answer.formats import Answer, Format, Slot, beginning
from tgi.tokenizer.answer.marks import Marks

# ANY must not match a special token, which is no UTF-8 where grammars are compiled. Between the pieces of a call a
# space or a newline may stand.
_TERMINALS = rf"""{OPTIONS}ANY: /(?s:.)*/
WHITE: /[ \t\r\n]*/
GAP: /[ \n]?/
LEAD: /[ \n]{{0,2}}/
"""


class Tool(NamedTuple):
    """A tool that may be called. `fields` is the grammar of its arguments with `_name` before them, "" if they cannot
    be put into one object."""

    name: str
    arguments: str  # the grammar of an object, as one of the library's `grammars`
    fields: str


class Writer:
    """Writes one grammar, rule by rule."""

    def __init__(self, marks: Marks, only_text: bool = False) -> None:
        """With `only_text` special tokens are left out: a table without them can then tell whether the rest can be
        written."""
        self._marks = marks
        self._only_text = only_text
        self._rules: dict[str, str] = {}  # names by what stands behind them, as of terminals
        self._terminals: dict[str, str] = {}
        self._objects: dict[str, str] = {}  # names of grammars that rules refer to
        self._others = f"<[{_ranges(marks.others)}]>" if marks.others else ""

    def calls(self, answer: Answer, tools: Sequence[Tool], several: bool | None, required: bool) -> str:
        """The grammar of an answer that may call these tools, or must."""
        arguments = [self._object(tool.arguments) for tool in tools]
        started = []  # each format's calls, from behind their marker
        bare = []  # those without a marker, where they may be text yet
        for format in answer.formats:
            one = self._one(format, tools, arguments)
            if not one:
                continue
            rest = self._rest(format, one, format.several if several is None else several)
            started.append((format, self._rule(f"{self._sequence(format.before)} {one} {rest}")))
            if format.bare:
                bare.append(f"{self._one(format, tools, arguments, len(beginning(format)))} {rest}")
        begun = [self._begun(format, held) for format, held in started]
        body = f"LEAD ({_either(begun)})" if required else self._text(answer, started, bare)
        return self._grammar(self._reasoned(answer, body, not required))

    def reasoned(self, answer: Answer, grammar: str) -> str:
        """A grammar as llguidance reads it, held to behind the reasoning."""
        body = self._object(json.dumps(json.loads(grammar)["grammars"][0]))
        return self._grammar(self._reasoned(answer, f"LEAD {body}", False))

    def _grammar(self, start: str) -> str:
        named = (f"{name}{body}\n" for body, name in [*self._terminals.items(), *self._rules.items()])
        top = {"lark_grammar": f"{_TERMINALS}start: {start}\n{''.join(named)}"}
        return json.dumps(
            {"grammars": [top, *({**json.loads(body), "name": name} for body, name in self._objects.items())]}
        )

    # Reasoning and text

    def _reasoned(self, answer: Answer, body: str, may_end: bool) -> str:
        """The body behind the reasoning that the answer begins with or may begin with. With `may_end` the answer may be
        nothing but reasoning; without it no white space can go on for ever before it begins."""
        if answer.tags is None:
            return body
        body = self._rule(body)
        thought = f"{self._until(answer.tags.close)} {body}"
        if may_end:
            thought = f"({thought} | {self._anything()})"
        if answer.inside:
            return thought
        begin = f"{'WHITE' if may_end else 'LEAD'} {self._piece(answer.tags.open)}"
        if not self._special(answer.tags.open):
            begin = self._terminal(begin)
        return f"{begin} {thought} | {body}"

    def _anything(self) -> str:
        return f"(ANY {self._others})* ANY" if self._others else "ANY"

    def _until(self, marker: str) -> str:
        """Anything up to this marker and with it."""
        begin = f"(ANY {self._others})* " if self._others else ""
        return begin + self._marked("ANY", marker)

    def _text(self, answer: Answer, started: list[tuple[Format, str]], bare: list[str]) -> str:
        """Text, which may turn into calls, or `bare` calls."""
        known = [[answer.tags.open]] if answer.tags is not None and not self._special(answer.tags.open) else []
        known += [list(beginning(format)) for format, _ in started if format.bare]
        first = "ANY"
        if known:
            excluded = (f"~({' '.join(f'WHITE {json.dumps(piece)}' for piece in pieces)} ANY)" for pieces in known)
            first = self._terminal(f"ANY & {' & '.join(excluded)}")
        marked = [(format.marker, held) for format, held in started if format.marker]

        def ends(text: str) -> list[str]:
            return [text, *(f"{self._marked(text, marker)} {held}" for marker, held in marked)]

        options = ends(first) + bare
        if self._others:
            options.append(f"{first} {self._others} (ANY {self._others})* ({_either(ends('ANY'))})")
        return f"({_either(options)})"

    def _marked(self, text: str, marker: str) -> str:
        """Some text up to the first such marker and with it."""
        if self._special(marker):
            return f"{text} {self._piece(marker)}"
        return self._rule(f"{text} {json.dumps(marker)}", "[lazy]")

    # Calls

    def _begun(self, format: Format, held: str) -> str:
        """Calls that are the whole answer."""
        if not format.marker:
            return held
        marker = f"{self._piece(format.marker)} GAP"
        return f"({marker})? {held}" if format.bare else f"{marker} {held}"

    def _one(self, format: Format, tools: Sequence[Tool], arguments: list[str], loose: int = 0) -> str:
        """The rule of one call of this format, with any white space before so many of its pieces; "" if none of the
        tools fits it."""
        calls = [
            self._call(format, tool, schema, loose)
            for tool, schema in zip(tools, arguments, strict=True)
            if tool.fields or Slot.FIELDS not in format.call
        ]
        return self._rule(_either(calls)) if calls else ""

    def _rest(self, format: Format, one: str, several: bool) -> str:
        """What may follow a first call, and what ends them all."""
        again = ""
        if several:
            pieces = [*format.between, *([format.marker] if format.each else [])]
            again = f"({self._sequence([*pieces, one], {one})})*"
        return f"{again} {self._sequence(format.after)}"

    def _call(self, format: Format, tool: Tool, arguments: str, loose: int) -> str:
        quoted = json.dumps(tool.name, ensure_ascii=False)
        filled: dict[str, str] = {Slot.NAME: quoted, Slot.WORD: tool.name, Slot.ARGUMENTS: arguments}
        if Slot.FIELDS in format.call:
            # The object that holds the name holds the arguments too.
            end = format.call.index("{", 1)
            fields = self._object(tool.fields)
            pieces = [*format.call[:end], fields, *format.call[format.call.index(Slot.FIELDS) + 1 :]]
            return self._sequence(pieces, {fields}, loose)
        pieces = [filled.get(piece, piece) for piece in format.call]
        return self._sequence(pieces, {arguments}, loose)

    def _sequence(self, pieces: Iterable[str], rules: Container[str] = (), loose: int = 0) -> str:
        """Pieces with gaps between them: what is text is one terminal as far as it goes. `rules` stand as they are.
        Before the first `loose` pieces there may be any white space."""
        gaps = chain(repeat("WHITE", loose), repeat("GAP"))
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
        return piece not in rules and not self._special(piece)

    # Atoms

    def _special(self, piece: str) -> bool:
        return self._marks.id(piece) is not None

    def _piece(self, piece: str) -> str:
        id = self._marks.id(piece)
        if id is None:
            return json.dumps(piece, ensure_ascii=False)
        return "" if self._only_text else f"<[{id}]>"

    def _terminal(self, body: str) -> str:
        return self._terminals.setdefault(f": {body}", f"T{len(self._terminals)}")

    def _object(self, grammar: str) -> str:
        """The rule for what stands in a grammar of its own."""
        return self._rule(f"@{self._objects.setdefault(grammar, f'object{len(self._objects)}')}")

    def _rule(self, body: str, options: str = "") -> str:
        return self._rules.setdefault(f"{options}: {body}", f"r{len(self._rules)}")


def _either(options: Sequence[str]) -> str:
    return " | ".join(options)


def _ranges(ids: Sequence[int]) -> str:
    """Ascending numbers as llguidance lists them: "1-3,7-7"."""
    edges = [at for at, (one, next) in enumerate(pairwise(ids), 1) if next != one + 1]
    return ",".join(f"{ids[a]}-{ids[b - 1]}" for a, b in pairwise([0, *edges, len(ids)]))
