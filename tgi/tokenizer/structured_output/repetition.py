"""How often a grammar repeats a part, found before it is compiled: `(a{50}){20}` repeats `a` 1000 times.

The patterns read only what repetition needs. What they misread is compiled nevertheless, within the limits of
compile_process.
"""

import re

# Counts of nested repetitions multiply.
MAX_REPETITION = 100_000

# A count of more digits is as good as infinite.
_MAX_DIGITS = 15
_COUNT = r"\{\s*(?P<least>\d+)\s*(?:,\s*(?P<most>\d*)\s*)?\}"
_REGEX_PIECE = re.compile(
    rf"(?P<atom> \\[pPxuU]\{{[^}}]*\}} | \\. | \[\^?\]?(?:\\.|[^\]\\])*\] )"
    rf" | (?P<open>\() | (?P<close>\)) | {_COUNT} | .",
    re.DOTALL | re.VERBOSE,
)
_LARK_PIECE = re.compile(
    r"""(?P<atom> "(?:\\.|[^"\\\n])*"i? | (?:\#|//)[^\n]* ) | /(?P<regex>(?:\\.|[^/\\\n])+)/"""
    rf" | (?P<open>[(\[]) | (?P<close>[)\]]) | {_COUNT} | ~\s*(?P<from>\d+)(?:\s*\.\.\s*(?P<to>\d+))? | \w+ | \s+ | .",
    re.DOTALL | re.VERBOSE,
)
_GBNF_PIECE = re.compile(
    r"""(?P<atom> "(?:\\.|[^"\\\n])*" | \[(?:\\.|[^\]\\])*\] | \#[^\n]* )"""
    rf" | (?P<open>\() | (?P<close>\)) | {_COUNT} | [\w-]+ | \s+ | .",
    re.DOTALL | re.VERBOSE,
)


def regex_repetition(regex: str) -> int:
    """The largest product of nested counts in a regular expression."""
    return _largest_product(_REGEX_PIECE, regex)


def lark_repetition(text: str) -> int:
    """The same within a rule of a grammar in Lark, with its regular expressions."""
    return _largest_product(_LARK_PIECE, text)


def gbnf_repetition(text: str) -> int:
    """The same within a rule of a grammar in GBNF."""
    return _largest_product(_GBNF_PIECE, text)


def repetition_error(repetition: int) -> str:
    """Returns why a grammar with this repetition is rejected, or ""."""
    if repetition <= MAX_REPETITION:
        return ""
    given = "an unlimited number of" if repetition >= 10**_MAX_DIGITS else repetition
    return (
        f"a part is repeated {given} times, where the counts of nested repetitions multiply; "
        f"at most {MAX_REPETITION} are allowed"
    )


def _largest_product(piece_pattern: re.Pattern[str], text: str) -> int:
    largest = [1]  # within each open group, outermost first
    atom = 1  # within the piece before a count
    for piece in piece_pattern.finditer(text):
        found = piece.groupdict()
        if found["open"]:
            largest.append(1)
            atom = 1
        elif found["close"]:
            atom = largest.pop() if len(largest) > 1 else 1
        elif count := found["most"] or found["least"] or found.get("to") or found.get("from"):
            atom *= max(1, int(count) if len(count) <= _MAX_DIGITS else 10**_MAX_DIGITS)
        elif regex := found.get("regex"):
            atom = regex_repetition(regex)
        elif not piece[0].isspace() or piece_pattern is _REGEX_PIECE:
            atom = 1
        largest[-1] = max(largest[-1], atom)
    return max(largest)
