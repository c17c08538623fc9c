"""Custom tools: grammars as patterns, and the input of a call from its arguments, however they are cut."""

import json
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tgi.api.custom_tools import (
    MAX_DEFINITION,
    CustomFormat,
    InputReader,
    NotRegular,
    custom_function,
    input_arguments,
    lark_regex,
)

# The form of Codex's tool: a patch of files.
PATCH = r"""
start: "*** Begin Patch" LF hunk+ "*** End Patch" LF?
hunk: add_hunk | delete_hunk // one file
    | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF ("*** Move to: " filename LF)? change?
?filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
change: (("@@" | "@@ " /(.+)/) LF | ("+" | "-" | " ") /(.*)/ LF)+ ["*** End of File" LF]

%import common.LF
"""
GOOD = '*** Begin Patch\n*** Add File: a "b"\\c\n+é\n*** Update File: x\n@@ f\n-b\n*** Delete File: y\n*** End Patch\n'


@pytest.mark.parametrize(
    ("definition", "good", "bad"),
    [
        (PATCH, [GOOD, GOOD[:-1]], [GOOD.replace("Add", "Ad"), GOOD.replace("+", ""), "*** Begin Patch\n", ""]),
        ('start: A~2 "x"i ("0".."3")~1..2\nA.2: /[a.]\\//', ["a/./x1", "a/a/X03"], ["a/x1", "a/a/x4", "a/a/x"]),
        ("start: INT [WS] w\nw: N+\n%import common (INT, WS)\n%import common.WORD -> N", ["1 ab", "12a"], ["a", "1"]),
    ],
)
def test_a_grammar_becomes_a_pattern(definition: str, good: list[str], bad: list[str]) -> None:
    pattern = re.compile(lark_regex(definition))
    assert [text for text in good + bad if pattern.fullmatch(text)] == good


@pytest.mark.parametrize(
    ("definition", "error"),
    [
        ("start: a\na: start?", NotRegular),
        ('start: "a"\n%ignore " "', NotRegular),
        ("start: <|special|>", NotRegular),
        ("a: b", ValueError),
        ("start: b", ValueError),
        ("start: (/a/", ValueError),
        ("start: [/a/)", ValueError),
        ("start: /a/)", ValueError),
        ('start: "\\q"', ValueError),
        ("".join(f"a{n}: a{n + 1} a{n + 1}\n" for n in range(40)) + "a40: /x/\nstart: a0", NotRegular),
        (f'a: "{"x" * 700}"\nstart: {"|".join(["a"] * 100)}', NotRegular),
        ("start: " + "(" * 8000, NotRegular),
        ("start: a0\n" + "".join(f"a{n}: a{n + 1}\n" for n in range(1200)), NotRegular),
        ('start: "\\ud800"', ValueError),
        ('start: "ab".."cd"', ValueError),
        ('start: "z".."a"', ValueError),
    ],
)
def test_what_no_pattern_can_be_made_of(definition: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        lark_regex(definition)


def test_the_model_is_told_the_grammar_and_not_the_pattern() -> None:
    function = custom_function("f", "Patches.", CustomFormat("lark", PATCH))
    assert PATCH in str(function.description)
    assert "pattern" not in json.dumps(function.parameters)
    with pytest.raises(ValueError, match="at most"):
        custom_function("f", None, CustomFormat("regex", "a" * (MAX_DEFINITION + 1)))


@given(
    text=st.text(alphabet=st.characters() | st.sampled_from('"\\\n\u2028😀')),
    cuts=st.lists(st.integers(0, 200)),
    to_ascii=st.booleans(),
)
def test_the_input_is_read_from_any_pieces(text: str, cuts: list[int], to_ascii: bool) -> None:
    arguments = json.dumps({"input": text}) if to_ascii else input_arguments(text)
    ends = sorted({0, len(arguments), *(cut for cut in cuts if cut < len(arguments))})
    reader = InputReader()
    pieces = [reader.read(arguments[begin:end]) for begin, end in pairwise(ends)]
    assert "".join(pieces) == text.encode(errors="replace").decode()
