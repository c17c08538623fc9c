"""Grammars of whole answers in llguidance's Lark: text that may turn into calls, calls alone, reasoning before either.

While the answer is text any characters and any special tokens go; only bytes that can never become a character do not.
From the marker of a call on, or from the first key of one without a marker, nothing but a call can follow.
"""

import json
from collections.abc import Container, Iterable, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

from tgi.tokenizer.answer.formats import Answer, Format, Slot, beginning
from tgi.tokenizer.answer.marks import Marks

# ANY must not match a special token, which is no UTF-8 where grammars are compiled. Between the pieces of a call a
# space or a newline may stand.
_TERMINALS = r"""%llguidance {}
ANY: /(?s:.)*/
WHITE: /[ \t\r\n]*/
GAP: /[ \n]?/
LEAD: /[ \n]{0,2}/
"""


class Tool(NamedTuple):
    """A tool that may be called. `fields` is the schema of its arguments with `_name` before them, "" if they cannot
    be put into one object."""

    name: str
    schema: str  # of an object, as the grammar library reads it
    fields: str


class Writer:
    """Writes one grammar, rule by rule."""

    def __init__(self, marks: Marks, only_text: bool = False) -> None:
        """With `only_text` special tokens are left out: a table without them can then tell whether the rest can be
        written."""
        self._marks = marks
        self._only_text = only_text
        self._rules: list[str] = []
        self._terminals: dict[str, str] = {}
        self._others = f"<[{_ranges(marks.others)}]>" if marks.others else ""

    def calls(self, answer: Answer, tools: Sequence[Tool], several: bool | None, required: bool) -> str:
        """The grammar of an answer that may call these tools, or must."""
        arguments = [self._rule(f"%json {tool.schema}") for tool in tools]
        started = []  # each format's calls: how they begin, and what follows
        for format in answer.formats:
            held = self._calls(format, tools, arguments, format.several if several is None else several)
            if held:
                started.append((format, held))
        begun = [self._begun(format, held) for format, held in started]
        body = f"LEAD ({_either(begun)})" if required else self._text(answer, started)
        return self._grammar(self._reasoned(answer, body, not required))

    def reasoned(self, answer: Answer, grammar: str) -> str:
        """A grammar as llguidance reads it, held to behind the reasoning."""
        body = json.loads(grammar)["grammars"][0]
        top = self._grammar(self._reasoned(answer, "LEAD @body", False))
        return json.dumps({"grammars": [{"lark_grammar": top}, {**body, "name": "body"}]})

    def _grammar(self, start: str) -> str:
        terminals = (f"{name}: {body}\n" for body, name in self._terminals.items())
        return f"{_TERMINALS}start: {start}\n" + "".join(terminals) + "\n".join(self._rules) + "\n"

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
        lead = "WHITE" if may_end else "LEAD"
        return f"{lead} {self._piece(answer.tags.open)} {thought} | {body}"

    def _anything(self) -> str:
        return f"(ANY {self._others})* ANY" if self._others else "ANY"

    def _until(self, marker: str) -> str:
        """Anything up to this marker and with it."""
        begin = f"(ANY {self._others})* " if self._others else ""
        return begin + self._marked("ANY", marker)

    def _text(self, answer: Answer, started: list[tuple[Format, str]]) -> str:
        """Text, which may turn into calls."""
        known = [[answer.tags.open]] if answer.tags is not None and not self._special(answer.tags.open) else []
        known += [list(beginning(format)) for format, _ in started if format.bare]
        first = "ANY"
        if known:
            excluded = (f"~({' '.join(f'WHITE {json.dumps(piece)}' for piece in pieces)} ANY)" for pieces in known)
            first = self._terminal(f"ANY & {' & '.join(excluded)}")
        marked = [(format.marker, held) for format, held in started if format.marker]

        def ends(text: str) -> list[str]:
            return [text, *(f"{self._marked(text, marker)} {held}" for marker, held in marked)]

        options = ends(first) + [f"WHITE {held}" for format, held in started if format.bare]
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

    def _calls(self, format: Format, tools: Sequence[Tool], arguments: list[str], several: bool) -> str:
        """The rule of calls of this format, from behind their marker; "" if none of the tools fits it."""
        calls = [
            self._call(format, tool, schema)
            for tool, schema in zip(tools, arguments, strict=True)
            if tool.fields or Slot.FIELDS not in format.call
        ]
        if not calls:
            return ""
        one = self._rule(_either(calls))
        rest = ""
        if several:
            pieces = [*format.between, *([format.marker] if format.each else [])]
            rest = f"({self._sequence([*pieces, one], {one})})*"
        return self._rule(f"{self._sequence(format.before)} {one} {rest} {self._sequence(format.after)}")

    def _call(self, format: Format, tool: Tool, arguments: str) -> str:
        quoted = json.dumps(tool.name, ensure_ascii=False)
        filled: dict[str, str] = {Slot.NAME: quoted, Slot.WORD: tool.name, Slot.ARGUMENTS: arguments}
        if Slot.FIELDS in format.call:
            # The object that holds the name holds the arguments too.
            end = format.call.index("{", 1)
            fields = self._rule(f"%json {tool.fields}")
            pieces = [*format.call[:end], fields, *format.call[format.call.index(Slot.FIELDS) + 1 :]]
            return self._sequence(pieces, {fields})
        pieces = [filled.get(piece, piece) for piece in format.call]
        return self._sequence(pieces, {arguments})

    def _sequence(self, pieces: Iterable[str], rules: Container[str] = ()) -> str:
        """Pieces with gaps between them: what is text is one terminal as far as it goes. `rules` stand as they are."""
        written: list[str] = []
        runs = [(text, list(run)) for text, run in groupby(pieces, lambda piece: self._is_text(piece, rules))]
        for at, (text, run) in enumerate(runs, 1):
            if text:
                spaced = [f"GAP {json.dumps(piece, ensure_ascii=False)}" for piece in run]
                written.append(self._terminal(" ".join(spaced) + (" GAP" if at < len(runs) else "")))
            else:
                written += (piece if piece in rules else f"GAP {self._piece(piece)}" for piece in run)
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
        return self._terminals.setdefault(body, f"T{len(self._terminals)}")

    def _rule(self, body: str, options: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name


def _either(options: Sequence[str]) -> str:
    return " | ".join(options)


def _ranges(ids: Sequence[int]) -> str:
    """Ascending numbers as llguidance lists them: "1-3,7-7"."""
    edges = [at for at, (one, next) in enumerate(pairwise(ids), 1) if next != one + 1]
    return ",".join(f"{ids[a]}-{ids[b - 1]}" for a, b in pairwise([0, *edges, len(ids)]))
