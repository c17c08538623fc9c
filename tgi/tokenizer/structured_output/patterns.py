"""Regular expressions of strings within JSON: `pattern`, the names of `patternProperties`, and formats."""

import re

from llguidance import LLMatcher

# The formats that the library enforces. Any other is an annotation, as JSON Schema says.
LIBRARY_FORMATS = frozenset({"duration", "email", "hostname", "ipv4", "uuid", "uri"})

_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    rf"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_H16 = "[0-9a-fA-F]{1,4}"
_LS32 = rf"(?:{_H16}:{_H16}|{_BYTE}(?:\.{_BYTE}){{3}})"
# RFC 3986, section 3.2.2: the groups before and after "::", which stands for one or more.
_IPV6 = "|".join(
    [
        f"(?:{_H16}:){{6}}{_LS32}",
        *(f"(?:(?:{_H16}:){{0,{most}}}{_H16})?::(?:{_H16}:){{{4 - most}}}{_LS32}" for most in range(5)),
        f"::(?:{_H16}:){{5}}{_LS32}",
        f"(?:(?:{_H16}:){{0,5}}{_H16})?::{_H16}",
        f"(?:(?:{_H16}:){{0,6}}{_H16})?::",
    ]
)
# Formats that are written as patterns: the library admits 30 February, the year 0 and leap seconds, which clients
# cannot parse, and any number of digits in a fraction; it lacks IPv6 addresses that end in one of IPv4.
FORMAT_PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "ipv6": f"^(?:{_IPV6})$",
}

# Enables the flag `x` of a regular expression, with which white space and comments are ignored.
_VERBOSE_FLAG = re.compile(r"\(\?[a-zA-Z]*x")


def regex_error(regex: str) -> str:
    """Returns an error of a regular expression that the library does not detect, or "".

    The library writes the expression into a grammar first. There, a backslash at the end is lost, and a line feed
    becomes an escape, which does not end a comment.
    """
    if (len(regex) - len(regex.rstrip("\\"))) % 2:
        return "incomplete escape sequence, reached end of pattern prematurely"
    if "\n" in regex and _VERBOSE_FLAG.search(regex):
        return "the flag `x` cannot be used together with line feeds"
    return ""


def pattern_error(regex: str) -> str:
    """Why the library cannot compile a `pattern`: syntax, or look-around; "" if it can, or if nothing matches it."""
    schema = {"type": "string", "pattern": regex}
    is_error, messages = LLMatcher.validate_grammar_with_warnings(LLMatcher.grammar_from_json_schema(schema))
    if not is_error or "Regex is empty" in messages[0]:
        return ""
    return messages[0].rpartition("error: ")[2].partition(" in regex /")[0].strip()


_LITERALS = re.compile(r"\^(?:\((?:\?:)?(?P<several>.*)\)|(?P<one>[^|]*))\$", re.DOTALL)
_LITERAL = re.compile(r"(?:[^\\^$.|?*+()\[\]{}]|\\[^\w\s])*", re.DOTALL)


def literal_names(regex: str) -> list[str] | None:
    """The texts that a pattern such as `^name$` or `^(a|b)$` admits; None of a pattern of another form."""
    match = _LITERALS.fullmatch(regex)
    names = [] if match is None else [match["one"]] if match["one"] is not None else match["several"].split("|")
    if not names or not all(map(_LITERAL.fullmatch, names)):
        return None
    return [re.sub(r"\\(.)", r"\1", name, flags=re.DOTALL) for name in names]


# The library admits the JSON escapes `\"` and `\\` wherever a set of characters has all control characters without a
# short escape, whether the set has the quote and the backslash or not. So U+0001 is taken out of all sets.
_EXCLUDED = r"&&[^\x01]]"
_PIECE = re.compile(
    r"(?P<set>\\[pP](?:\{[^}]*\}|.)|\\x01|\\[uU]0*1(?![0-9a-fA-F])|\\[xuU]\{0*1\}|\x01)|(?P<open>\[)|\\.|.", re.DOTALL
)
_CLASS_PIECE = re.compile(r"(?P<open>\[\^?\]?)|(?P<close>\])|\\.|.", re.DOTALL)


def json_safe_pattern(regex: str) -> str:
    """A pattern without U+0001 in its character classes: equivalent for all other texts, and enforced by the library.

    A class without an end is left to the library, which rejects it.
    """
    parts, at = [], 0
    while at < len(regex):
        piece = _PIECE.match(regex, at)
        assert piece is not None
        end = _class_end(regex, at) if piece["open"] else piece.end()
        text = regex[at:end]
        parts.append(f"[{text}{_EXCLUDED}" if piece["open"] or piece["set"] else text)
        at = end
    return "".join(parts)


def _class_end(regex: str, start: int) -> int:
    """The end of the character class that begins at `start`; classes nest."""
    depth, at = 0, start
    while at < len(regex):
        piece = _CLASS_PIECE.match(regex, at)
        assert piece is not None
        at = piece.end()
        depth += 1 if piece["open"] else -1 if piece["close"] else 0
        if depth == 0:
            return at
    return len(regex)
