"""Checks the grammars that clients request, and converts them to the form that the worker compiles.

A grammar arrives as JSON with one key: `schema` (a JSON schema), `schema_text` (the same as a string), `regex`, or
`grammar` (Lark or GBNF). The worker's form is the JSON of llguidance with the key `grammars`.
"""

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from tgi.hub.llguidance_tables import OPTIONS, TRIAL_LIMITS, new_matcher, piece_table, token_table
from tgi.tokenizer.structured_output.json_schema import (
    EnforceableSchema,
    SchemaError,
    UnenforceableSchema,
    enforceable_schema,
)
from tgi.tokenizer.structured_output.json_schema_lark import schema_to_lark
from tgi.tokenizer.structured_output.patterns import regex_error
from tgi.tokenizer.structured_output.repetition import (
    gbnf_repetition,
    lark_repetition,
    regex_repetition,
    repetition_error,
)
from tgi.tokenizer.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions  # exists only in the type stubs

# Of a grammar as it arrives.
MAX_GRAMMAR_BYTES = 512 << 10
# Each grammar is tried out by generating this many texts of this many tokens, to find out whether it stays within
# TRIAL_LIMITS. Half of the texts consist of random tokens, the others repeat the same token where possible.
TRIAL_COUNT = 4
TRIAL_TOKENS = 64
# Cached results, for the next request with the same grammar.
MAX_CACHED_GRAMMARS = 256
MAX_CACHE_BYTES = 16 << 20

# Limits on what a client is shown of an error of the library.
MAX_ERROR_LINE_CHARACTERS, MAX_ERROR_LINES = 200, 12

# Of a grammar in Lark or GBNF. The library's time is quadratic in both, and it follows references between rules
# recursively.
MAX_EBNF_BYTES = 16 << 10
MAX_RULES = 500

# White space: at most one space, where TGI's converter allows it. The other options keep a schema from changing how it
# is interpreted.
JSON_COMPILE_OPTIONS: "JsonCompileOptions" = {
    "whitespace_flexible": True,
    "whitespace_pattern": " ",
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": False,
    "lenient": False,
}
NO_MATCHING_TEXT = "no text that this model's tokens can write matches it"
# Errors of the library about a lenient schema, and the keywords without which it may compile. In the order of trial.
IGNORABLE_KEYWORDS = [
    (re.compile("oneOf"), {"oneOf"}),
    (re.compile("patternProper"), {"patternProperties"}),
    (re.compile("minProperties"), {"minProperties", "maxProperties"}),
    (re.compile("ref|not present"), {"$ref"}),
    (re.compile("regex|pattern|complex|limit"), {"pattern", "patternProperties"}),
    (re.compile("multipleOf"), {"multipleOf"}),
    (re.compile("dynamicAnchor"), {"$dynamicAnchor"}),
    (re.compile("dynamicAnchor"), {"$ref"}),
]
# Errors of the library about a schema, and the message that names the keyword behind each.
_SCHEMA_ERROR_MESSAGES = [
    (re.compile("oneOf constraints"), "`oneOf` cannot be enforced where its branches may overlap"),
    (re.compile("Unimplemented keys: (.*)"), "{0} cannot be enforced"),
    (re.compile("patternProperty regexes|patternProperties"), "`patternProperties` cannot be enforced: {all}"),
    (re.compile("minProperties|maxProperties"), "`minProperties` and `maxProperties` cannot be enforced here"),
    (re.compile("NoExtension"), NO_MATCHING_TEXT),
    (re.compile("regex parse error|lookaround|look-around"), "`pattern` cannot be enforced: {all}"),
]
_REGEX_ERROR_MESSAGES = [(re.compile("NoExtension"), NO_MATCHING_TEXT)]


class GrammarError(Exception):
    """A grammar is rejected. The message is for the client."""

    def __init__(self, message: str) -> None:
        super().__init__(message.encode(errors="replace").decode())  # lone surrogates of the client cannot be sent


class CheckedGrammar(NamedTuple):
    """A grammar for the worker, "" without one, and the keywords of the client's schemas that it does not enforce."""

    text: str = ""
    not_enforced: list[str] = []  # as in EnforceableSchema; those of a tool after the tool's name
    call_formats: list[str] = []  # names of the formats of calls, if a grammar leaves fewer than the chat has


Result = TypeVar("Result")


class GrammarValidator:
    """Checks and converts grammars, with a cache of results and errors. Not thread-safe."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._token_table: LLTokenizer | None = None
        self._eos_bits = 0  # mask of the token ids that end a text
        self._cache: OrderedDict[bytes, Any] = OrderedDict()  # results and GrammarErrors, least recently used first
        self._cache_bytes = 0

    def validate(self, grammar: bytes) -> CheckedGrammar:
        """Returns the grammar for the worker; an empty one for b"". Raises GrammarError."""
        return self.cached(grammar, lambda: self._convert(grammar)) if grammar else CheckedGrammar()

    def cached(self, key: bytes, make: Callable[[], Result]) -> Result:
        """Returns the cached result of `make` for this key, or calls it. Errors are cached, too. Raises
        GrammarError."""
        result = self._cache.pop(key, None)
        if result is None:
            try:
                result = make()
            except GrammarError as error:
                result = error
            self._cache_bytes += _entry_size(key, result)
        self._cache[key] = result
        while len(self._cache) > MAX_CACHED_GRAMMARS or self._cache_bytes > MAX_CACHE_BYTES:
            self._cache_bytes -= _entry_size(*self._cache.popitem(last=False))
        if isinstance(result, GrammarError):
            raise result.with_traceback(None)
        return cast("Result", result)

    def schema_grammar_error(self, grammar: str) -> str:
        """Why no text can match this grammar of schemas, with the keyword that causes it; "" if one can."""
        return _client_message(self._trial_error(grammar), _SCHEMA_ERROR_MESSAGES)

    def _convert(self, data: bytes) -> CheckedGrammar:
        if len(data) > MAX_GRAMMAR_BYTES:
            raise GrammarError(
                f"grammar is not valid: it must have at most {MAX_GRAMMAR_BYTES} bytes. Given: {len(data)}"
            )
        try:
            grammar = json.loads(data)
            if "schema_text" in grammar:
                grammar = {"schema": json.loads(grammar["schema_text"], parse_constant=_reject_constant)}
            if "grammar" in grammar:
                return self._convert_ebnf(grammar["grammar"])
            if "schema" in grammar:
                return self._convert_schema(grammar["schema"])
            return CheckedGrammar(self._convert_regex(grammar["regex"]))
        except RecursionError:
            raise GrammarError("grammar is not valid: it is nested too deeply") from None
        except ValueError as error:
            raise GrammarError(f"grammar is not valid: {error}") from None

    def _convert_schema(self, schema: Any) -> CheckedGrammar:
        checked = checked_schema(schema)
        for body in schema_grammars(checked.schema):
            grammar = _lark_grammar(body.get("lark_grammar") or f"start: %json {json.dumps(body['json_schema'])}\n")
            if not (error := self.schema_grammar_error(grammar)):
                return CheckedGrammar(grammar, checked.not_enforced)
        raise GrammarError(f"cannot compile regex from schema: {error}")

    def _convert_regex(self, regex: str) -> str:
        if error := regex_error(regex):
            raise GrammarError(f"grammar is not valid: regex parse error: {error}")
        if error := repetition_error(regex_repetition(regex)):
            raise GrammarError(f"grammar is not valid: {error}")
        grammar = _lark_grammar(json.loads(LLMatcher.grammar_from_regex(regex))["grammars"][0]["lark_grammar"])
        if error := self._trial_error(grammar):
            # The message begins with a position in the generated grammar, which the client does not know.
            error = error.partition(" (in regex): ")[2] or error
            raise GrammarError(f"grammar is not valid: {_client_message(error, _REGEX_ERROR_MESSAGES)}")
        return grammar

    def _convert_ebnf(self, text: str) -> CheckedGrammar:
        not_enforced: list[str] = []

        def convert_schema(schema: Any) -> str:
            checked = checked_schema(schema)
            not_enforced.extend(checked.not_enforced)
            return json.dumps({**checked.schema, "x-guidance": JSON_COMPILE_OPTIONS})

        grammar = _lark_grammar(ebnf_to_lark(text, convert_schema))
        if error := self._trial_error(grammar):
            raise GrammarError(f"grammar is not valid: {_client_message(error, _REGEX_ERROR_MESSAGES)}")
        return CheckedGrammar(grammar, not_enforced)

    def _trial_error(self, grammar: str) -> str:
        """Compiles the grammar and generates trial texts. Returns the library's error, or ""."""
        if self._token_table is None:
            try:
                self._token_table, self._eos_bits = self._make_token_table()
            except ValueError as error:
                raise GrammarError(f"grammar is not supported: of this model's tokenizer, {error}") from None
        compiled = new_matcher(self._token_table, grammar, TRIAL_LIMITS)
        if compiled.is_error():
            return compiled.get_error().partition("\n<backtrace>")[0].strip()
        mask = compiled.compute_bitmask()
        if compiled.is_error():
            return compiled.get_error().splitlines()[0]
        if not any(mask) or (compiled.is_stopped() and not compiled.is_accepting()):
            return NO_MATCHING_TEXT
        trials = (
            _generate_trial_text(compiled.deep_copy(), self._eos_bits, Random(seed), repeat=seed % 2 == 1)
            for seed in range(TRIAL_COUNT)
        )
        return next(filter(None, trials), "")

    def _make_token_table(self) -> tuple[LLTokenizer, int]:
        """A table of tokens with the bytes of the model's tokens, and the mask of its tokens that end a text."""
        vocabulary = self._vocabulary
        if not vocabulary.byte_level:
            eos_ids = sorted(vocabulary.eos_ids)
            return token_table(vocabulary.tokenizer, eos_ids, 0), sum(1 << token_id for token_id in eos_ids)
        pieces = (
            piece
            for token_id, piece in enumerate(vocabulary.pieces)
            if piece and token_id not in vocabulary.special_ids
        )
        return piece_table(piece.encode() if isinstance(piece, str) else piece for piece in pieces), 1


def begins_with_pieces(grammar: str, pieces: Sequence[str]) -> bool:
    """Whether a text of a grammar for the worker can begin with these pieces, with or without a space between them."""
    start = new_matcher(_BYTES, grammar, TRIAL_LIMITS)
    for text in {"".join(pieces), " ".join(pieces), "\n".join(pieces)}:
        ids = [1 + byte for byte in text.encode()]
        if start.deep_copy().try_consume_tokens(ids) == len(ids):
            return True
    return False


# A table of all bytes: token 1 + b is the byte b.
_BYTES = piece_table(bytes([byte]) for byte in range(256))


def checked_schema(schema: Any, lenient: bool = False, ignored: Container[str] = ()) -> EnforceableSchema:
    """Returns the schema as the library can enforce it, see enforceable_schema. Raises GrammarError."""
    try:
        return enforceable_schema(schema, lenient, ignored)
    except SchemaError as error:
        raise GrammarError(f"grammar is not valid: {error}") from None
    except UnenforceableSchema as error:
        raise GrammarError(f"cannot compile regex from schema: {error}") from None


def schema_grammars(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """A checked schema as entries of the library's `grammars`, in order of preference.

    The first, in Lark, limits the digits of numbers. It is missing if the schema cannot be written in Lark; the second
    is used if the first does not compile.
    """
    options = {**JSON_COMPILE_OPTIONS}
    lark = schema_to_lark(schema, options)
    return [{"lark_grammar": lark}] * bool(lark) + [{"json_schema": {**schema, "x-guidance": options}}]


def _lark_grammar(lark: str) -> str:
    """A grammar in Lark for the worker. OPTIONS come last, so that the client's text cannot override them."""
    return json.dumps({"grammars": [{"lark_grammar": f"{lark}\n{OPTIONS}"}]})


# Position in a grammar that was written here, and the lines of the grammar around it.
_ERROR_POSITION = re.compile(r"\Aat \d+\(\d+\): (failed to compile JSON schema: )?|\n +\d+ \| .*", re.DOTALL)


def _client_message(error: str, messages: list[tuple[re.Pattern[str], str]]) -> str:
    """The library's error as a message for the client, without excerpts of the generated grammar."""
    error = _ERROR_POSITION.sub("", error)
    message = next(
        (text.format(*found.groups(), all=error) for pattern, text in messages if (found := pattern.search(error))),
        error,
    )
    return "\n".join(
        line if len(line) <= MAX_ERROR_LINE_CHARACTERS else f"{line[:MAX_ERROR_LINE_CHARACTERS]}…"
        for line in message.splitlines()[:MAX_ERROR_LINES]
    )


def _generate_trial_text(trial: LLMatcher, eos_bits: int, random: Random, repeat: bool) -> str:
    """Generates a text of allowed tokens; with `repeat` takes the latest token again if it is allowed.

    Returns the error if the grammar becomes too complex, else "".
    """
    token_id = 0
    for _ in range(TRIAL_TOKENS):
        mask = trial.compute_bitmask()
        if trial.is_error():
            return f"it becomes too complex: {trial.get_error().splitlines()[0]}"
        allowed = int.from_bytes(mask, "little") & ~eos_bits
        if trial.is_stopped() or not allowed:
            return ""
        if not (repeat and allowed >> token_id & 1):
            token_id = _next_set_bit(allowed, random.randrange(allowed.bit_length()))
        trial.consume_token(token_id)  # an error shows in the next mask
    return ""


def _next_set_bit(bits: int, position: int) -> int:
    """The lowest set bit at this position or above."""
    rest = bits >> position
    return position + (rest & -rest).bit_length() - 1


def _reject_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _entry_size(key: bytes, result: object) -> int:
    return len(key) + len(str(result))


# Grammars as text: llguidance's Lark, or GBNF as llama.cpp and xgrammar read it

_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
# Escapes that the converter would write in a form that Lark cannot read: it drops leading zeros.
_GBNF_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)
_LARK_PIECE = re.compile(
    r"""
      (?P<quoted> "(?:\\.|[^"\\\n])*" | /(?:\\.|[^/\\])+/ | (?:\#|//)[^\n]* )
    | (?P<schema> %json\b )
    | (?P<token> <[^<>\s]+> )
    | (?P<option> \b(?:max_tokens|temperature|stop) (?=\s*=) )
    | (?P<rule> : )
    """,
    re.VERBOSE,
)
_SPACE = re.compile(r"\s*")


def ebnf_to_lark(text: str, convert_schema: Callable[[Any], str]) -> str:
    """Converts Lark or GBNF to Lark; `convert_schema` converts the JSON schemas in it. Raises ValueError."""
    if (size := len(text.encode())) > MAX_EBNF_BYTES:
        raise ValueError(f"it must have at most {MAX_EBNF_BYTES} bytes. Given: {size}")
    is_gbnf = _GBNF_RULE.search(text) is not None
    if error := repetition_error(gbnf_repetition(text) if is_gbnf else lark_repetition(text)):
        raise ValueError(error)
    return _gbnf_to_lark(text) if is_gbnf else _check_lark(text, convert_schema)


def _gbnf_to_lark(text: str) -> str:
    _check_rule_count(len(_GBNF_RULE.findall(text)))
    try:
        return str(gbnf_to_lark(_GBNF_ESCAPE.sub(_replace_escape, text)))
    except RecursionError:
        raise
    except Exception as error:  # the converter raises plain Exception
        raise ValueError(f"as GBNF: {error}") from None


def _replace_escape(found: re.Match[str]) -> str:
    digits = found[1] or found[2]
    code = int(digits, 16) if digits else -1
    if code < 0 or 0xD800 <= code < 0xE000 or code > 0x10FFFF:
        return found[0]
    return chr(code) if code > 0x7F else f"\\x{code:02x}"


def _check_lark(text: str, convert_schema: Callable[[Any], str]) -> str:
    """Rejects special tokens and sampling options in Lark, and converts its schemas."""
    parts, at, rules = [], 0, 0
    while found := _LARK_PIECE.search(text, at):
        parts.append(text[at : found.end()])
        at = found.end()
        match found.lastgroup:
            case "token":
                raise ValueError(f"a special token cannot be part of it: {found[0]}")
            case "option":
                raise ValueError(f"the option `{found[0]}` is not supported")
            case "rule":
                rules += 1
            case "schema":
                begin = _SPACE.match(text, at)
                assert begin is not None
                schema, at = json.JSONDecoder().raw_decode(text, begin.end())
                parts.append(f" {convert_schema(schema)}")
    _check_rule_count(rules)
    return "".join(parts) + text[at:]


def _check_rule_count(rules: int) -> None:
    if rules > MAX_RULES:
        raise ValueError(f"it must have at most {MAX_RULES} rules. Given: {rules}")
