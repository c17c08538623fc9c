"""Checks the grammars that clients ask for, and puts them into the form that workers read.

A grammar arrives as JSON with one key: `schema` (a JSON schema), `schema_text` (the same as a string), `regex`, or
`grammar` (Lark or GBNF).
"""

import json
import re
from collections import OrderedDict
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLTokenizer

from tgi.hub.grammar import OPTIONS, TRIAL_LIMITS, matcher, piece_table, token_table
from tgi.tokenizer.ebnf import to_lark
from tgi.tokenizer.schema import SchemaError, Unenforceable, enforceable, regex_fault
from tgi.tokenizer.schema_lark import plain_lark
from tgi.tokenizer.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions  # has no life at run time

# Bytes that a grammar may have, as it arrives.
MOST_BYTES = 512 << 10
# Texts that are begun to see whether a grammar stays within its limits: of any tokens, and of few that come again and
# again; and tokens of each.
TRIALS = 4
TRIAL_TOKENS = 64
# So many answers are kept for the next request that has one of these grammars, of so many bytes in all.
KEPT = 256
KEPT_BYTES = 16 << 20

# What is shown of an error of the library.
MAX_LINE, MAX_LINES = 200, 12

# Where TGI's converter allows a space, and at most one. Nothing of a schema can change how it is read.
JSON: "JsonCompileOptions" = {
    "whitespace_flexible": True,
    "whitespace_pattern": " ",
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": False,
    "lenient": False,
}
NOTHING = "no text that this model's tokens can write matches it"
# What the library says of a schema, and which keyword is behind it.
_NAMES = [
    (re.compile("oneOf constraints"), "`oneOf` cannot be enforced where its branches may overlap"),
    (re.compile("Unimplemented keys: (.*)"), "{0} cannot be enforced"),
    (re.compile("Unknown format: (.*)"), "`format` {0} cannot be enforced"),
    (re.compile("patternProperty regexes|patternProperties"), "`patternProperties` cannot be enforced: {all}"),
    (re.compile("minProperties|maxProperties"), "`minProperties` and `maxProperties` cannot be enforced here"),
    (re.compile("NoExtension"), NOTHING),
    (re.compile("regex parse error|lookaround|look-around"), "`pattern` cannot be enforced: {all}"),
]


class GrammarError(Exception):
    """A grammar that is refused. The message is for the client."""


class GrammarReader:
    """Reads grammars; may be called from one thread at a time. Answers are kept, refusals too."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._table: LLTokenizer | None = None
        self._ends = 0  # the bits of its tokens that end a text
        self._known: OrderedDict[bytes, str | GrammarError] = OrderedDict()
        self._bytes = 0

    def read(self, asked: bytes) -> str:
        """What a worker reads of the grammar; "" of none. Raises GrammarError."""
        return self.kept(asked, lambda: self._read(asked)) if asked else ""

    def kept(self, key: bytes, make: Callable[[], str]) -> str:
        """What `make` gave, or raised, when it was called for this key. Raises GrammarError."""
        answer = self._known.pop(key, None)
        if answer is None:
            try:
                answer = make()
            except GrammarError as error:
                answer = error
            self._bytes += _size(key, answer)
        self._known[key] = answer
        while len(self._known) > KEPT or self._bytes > KEPT_BYTES:
            self._bytes -= _size(*self._known.popitem(last=False))
        if isinstance(answer, GrammarError):
            raise answer.with_traceback(None)
        return answer

    def _read(self, asked: bytes) -> str:
        if len(asked) > MOST_BYTES:
            raise GrammarError(f"grammar is not valid: it must have at most {MOST_BYTES} bytes. Given: {len(asked)}")
        try:
            grammar = json.loads(asked)
            if "schema_text" in grammar:
                grammar = {"schema": json.loads(grammar["schema_text"], parse_constant=_refuse)}
            if "grammar" in grammar:
                return self._lark(grammar["grammar"])
            return self._schema(grammar["schema"]) if "schema" in grammar else self._regex(grammar["regex"])
        except RecursionError:
            raise GrammarError("grammar is not valid: it is nested too deeply") from None
        except ValueError as error:
            raise GrammarError(f"grammar is not valid: {error}") from None

    def _schema(self, schema: Any) -> str:
        read = checked(schema)
        for body in schema_bodies(read):
            grammar = _lark_json(body.get("lark_grammar") or f"start: %json {json.dumps(body['json_schema'])}\n")
            if not (fault := self.fault(grammar)):
                return grammar
        raise GrammarError(f"cannot compile regex from schema: {fault}")

    def _regex(self, regex: str) -> str:
        if fault := regex_fault(regex):
            raise GrammarError(f"grammar is not valid: regex parse error: {fault}")
        grammar = _lark_json(json.loads(LLMatcher.grammar_from_regex(regex))["grammars"][0]["lark_grammar"])
        if fault := self._fault(grammar):
            # The library's words begin with the place in a text that the client does not know.
            fault = fault.partition(" (in regex): ")[2] or fault
            raise GrammarError(f"grammar is not valid: {_named(fault, _REGEX_NAMES)}")
        return grammar

    def _lark(self, text: str) -> str:
        lark = to_lark(text, lambda schema: json.dumps({**checked(schema), "x-guidance": JSON}))
        grammar = _lark_json(lark)
        if fault := self._fault(grammar):
            raise GrammarError(f"grammar is not valid: {_named(fault, _REGEX_NAMES)}")
        return grammar

    def fault(self, grammar: str) -> str:
        """Why no text can be held to this grammar with schemas, and which keyword is behind it; "" if one can."""
        return _named(self._fault(grammar), _NAMES)

    def _fault(self, grammar: str) -> str:
        """Why no text can be held to this grammar; "" if one can."""
        if self._table is None:
            try:
                self._table, self._ends = self._bytes_of_tokens()
            except ValueError as error:
                raise GrammarError(f"grammar is not supported: of this model's tokenizer, {error}") from None
        found = matcher(self._table, grammar, TRIAL_LIMITS)
        if found.is_error():
            return found.get_error().partition("\n<backtrace>")[0].strip()
        mask = found.compute_bitmask()
        if found.is_error():
            return found.get_error().splitlines()[0]
        if not any(mask) or (found.is_stopped() and not found.is_accepting()):
            return NOTHING
        trials = (_try_out(found.deep_copy(), self._ends, Random(seed), seed % 2 == 1) for seed in range(TRIALS))
        return next(filter(None, trials), "")

    def _bytes_of_tokens(self) -> tuple[LLTokenizer, int]:
        """Tokens of the same bytes as the model's, and the bits of those that end a text."""
        vocabulary = self._vocabulary
        if not vocabulary.byte_level:
            ends = sorted(vocabulary.eos_ids)
            return token_table(vocabulary.tokenizer, ends, 0), sum(1 << number for number in ends)
        plain = (piece for number, piece in enumerate(vocabulary.pieces) if piece and number not in vocabulary.special)
        return piece_table(piece.encode() if isinstance(piece, str) else piece for piece in plain), 1


def _lark_json(lark: str) -> str:
    """A grammar in Lark as the library and workers read it. No options that a client has written change ours."""
    return json.dumps({"grammars": [{"lark_grammar": f"{lark}\n{OPTIONS}"}]})


def schema_bodies(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """A checked schema as one of the library's `grammars`: as it should be, then what may do where that cannot be
    compiled."""
    options = {**JSON}
    plain = plain_lark(schema, options)
    return [{"lark_grammar": plain}] * bool(plain) + [{"json_schema": {**schema, "x-guidance": options}}]


def checked(schema: Any) -> dict[str, Any]:
    """A schema as the grammar library takes it. Raises GrammarError."""
    try:
        return enforceable(schema)
    except SchemaError as error:
        raise GrammarError(f"grammar is not valid: {error}") from None
    except Unenforceable as error:
        raise GrammarError(f"cannot compile regex from schema: {error}") from None


_REGEX_NAMES = [(re.compile("NoExtension"), NOTHING)]
# Where in a grammar that was written here, and the lines around that place.
_PLACE = re.compile(r"\Aat \d+\(\d+\): (failed to compile JSON schema: )?|\n +\d+ \| .*", re.DOTALL)


def _named(fault: str, names: list[tuple[re.Pattern[str], str]]) -> str:
    """The library's words, with the keyword that they are about and without whole grammars in them."""
    fault = _PLACE.sub("", fault)
    words = next(
        (words.format(*found.groups(), all=fault) for pattern, words in names if (found := pattern.search(fault))),
        fault,
    )
    return "\n".join(
        line if len(line) <= MAX_LINE else f"{line[:MAX_LINE]}…" for line in words.splitlines()[:MAX_LINES]
    )


def _try_out(found: LLMatcher, ends: int, draw: Random, again: bool) -> str:
    """Begins a text of tokens that are allowed, and the latest one `again` if it is. Why it cannot go on; "" if it can,
    or is complete."""
    token = 0
    for _ in range(TRIAL_TOKENS):
        mask = found.compute_bitmask()
        if found.is_error():
            return f"it becomes too complex: {found.get_error().splitlines()[0]}"
        allowed = int.from_bytes(mask, "little") & ~ends
        if found.is_stopped() or not allowed:
            return ""
        if not (again and allowed >> token & 1):
            token = _next_bit(allowed, draw.randrange(allowed.bit_length()))
        found.consume_token(token)  # if it cannot, the next mask says why
    return ""


def _next_bit(bits: int, place: int) -> int:
    """The lowest bit that is set from this place on."""
    rest = bits >> place
    return place + (rest & -rest).bit_length() - 1


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _size(asked: bytes, answer: str | GrammarError) -> int:
    return len(asked) + len(str(answer))
