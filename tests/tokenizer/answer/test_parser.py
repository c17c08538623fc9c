"""AnswerParser: parts do not depend on token boundaries, and never contain markers or stop strings."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.counting import per_item
from tests.tokenizer.answer.dialogue import (
    accepts,
    format_tokens,
    harness_of,
    merge_parts,
    parsed_answer,
    play_answer,
    submit_valid_chat,
)
from tests.tokenizer.answer.model_families import FAMILIES, MARKERS, NOW, SUN, VOCABULARIES, chat
from tests.tokenizer.harness import API, ids_of
from tests.tokenizer.vocabularies import byte_level
from tgi.microkernel.messages.protocol import FinishReason, Stop
from tgi.tokenizer.answers.formats import (
    FALLBACK_FORMATS,
    REASONING_TAGS,
    AnswerFormat,
    detect_tool_call_format,
)
from tgi.tokenizer.answers.parser import AnswerParser, StreamingAnswerParser

TEXTS = st.lists(
    st.sampled_from(["Hi", " ", "\n", "<", "<tool", "[", "{", '{"', "é", "</think>", "}", '"']), max_size=6
)
ANSWERS = {
    key: AnswerFormat(
        FALLBACK_FORMATS if (format := detect_tool_call_format(family.template)) is None else (format,),
        REASONING_TAGS[0],
    )
    for key, family in FAMILIES.items()
}


def parts(answer: AnswerFormat, pieces: list[str], over: bool = True) -> list[tuple[str, str]]:
    parser = AnswerParser(answer, format_tokens(byte_level()))
    found: list[tuple[Any, str]] = []
    for piece in pieces:
        found += parser.parse_piece(piece)
    return merge_parts(found + (parser.finish() if over else []))


def cut(text: str, places: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[one:other] for one, other in pairwise(edges)]


@given(st.sampled_from(list(FAMILIES)), TEXTS, TEXTS, st.booleans(), st.integers(0, 2), st.lists(st.integers(0, 400)))
def test_parts_do_not_depend_on_token_boundaries(
    key: str, thought: list[str], before: list[str], thinks: bool, calls: int, places: list[int]
) -> None:
    family = FAMILIES[key]
    reasoning = "".join(thought).replace("</think>", "")
    text = "".join(before) if family.mixes else ""
    written = family.write(*[SUN, NOW][:calls]) if calls else ""
    whole = (f"<think>\n{reasoning}\n</think>\n\n" if thinks else "") + text + written
    pieces = cut(whole, places)
    found = parts(ANSWERS[key], pieces)
    assert found == parts(ANSWERS[key], list(whole)) == parts(ANSWERS[key], [whole])
    assert [part for part in found if part[0] in ("call", "arguments")] == [
        part for name, arguments in [SUN, NOW][:calls] for part in (("call", name), ("arguments", arguments))
    ]
    if thinks:
        stripped = reasoning.strip("\n")
        assert [text for kind, text in found if kind == "reasoning"] == ([stripped] if stripped else [])
    # Shown text is never retracted.
    seen = ""
    for at in range(len(pieces)):
        shown = "".join(text for _, text in parts(ANSWERS[key], pieces[:at], over=False))
        assert shown.startswith(seen)
        seen = shown
    assert "".join(text for _, text in found).startswith(seen)


@pytest.mark.parametrize("vocabulary", VOCABULARIES.values(), ids=VOCABULARIES)
def test_text_is_shown_as_soon_as_it_cannot_be_a_call(vocabulary: Any) -> None:
    harness = harness_of(vocabulary(), FAMILIES["hermes"].template)
    add = submit_valid_chat(harness, 1, chat())
    shown = []
    for piece in ["a", " ", "b", "<", "t", "x", "\n"]:
        harness.send_tokens((add.rid, ids_of(piece, vocabulary())))
        shown.append("".join(text for _, text in parsed_answer(harness.received_by(API)).parts))
    harness.send_end(add.rid)
    # White space may precede a call; "<" may begin a marker only if markers are text.
    special = vocabulary is VOCABULARIES["special"]
    assert shown == (["a", "", " b", "<", "t", "x", ""] if special else ["a", "", " b", "", "", "<tx", ""])
    assert parsed_answer(harness.received_by(API)).parts == [("text", "\n")]


@settings(max_examples=50)
@given(st.sampled_from(list(FAMILIES)), st.sampled_from(list(VOCABULARIES)), st.data())
def test_stop_strings_cut_the_answer_and_are_not_shown(key: str, kind: str, data: st.DataObject) -> None:
    family, vocabulary = FAMILIES[key], VOCABULARIES[kind]()
    harness = harness_of(vocabulary, family.template)
    answer = ("One two <three. " if family.mixes else "") + family.write(SUN, NOW)
    begins = data.draw(st.integers(0, len(answer) - 1))
    stop = answer[begins : begins + data.draw(st.integers(1, 12))]
    add = submit_valid_chat(harness, 1, chat(), stop_strings=[stop], hide_stop=True)
    ids = ids_of(answer, vocabulary)
    messages = []
    for number in ids:
        harness.send_tokens((add.rid, [number]))
        messages += harness.received_by(API)
        if harness.received_by(harness.scheduler) == [Stop(add.rid)]:
            break
    harness.send_end(add.rid, FinishReason.STOP)
    found, end = parsed_answer(messages + harness.received_by(API))
    assert end is not None
    assert end.reason == FinishReason.STOP
    uncut = parsed_answer(play_answer(harness, submit_valid_chat(harness, 1, chat()), ids)).parts
    for mine, whole in zip(found[:-1], uncut, strict=False):
        assert mine == whole
    if found and found[-1][0] != "text":
        assert uncut[len(found) - 1][1].startswith(found[-1][1])
    for part_kind, text in found:
        if part_kind == "text":
            assert stop not in text
            assert not any(marker in text for marker in MARKERS)


def test_format_violations_are_text() -> None:
    hermes = AnswerFormat((detect_tool_call_format(FAMILIES["hermes"].template),))  # type: ignore[arg-type]
    for prose in ("a <tool_call>nonsense", '<tool_call>{"name": "\\q"}</tool_call>', "a <tool_call> or <tool_call>\n"):
        assert parts(hermes, [prose]) == [("text", prose.removesuffix("<tool_call>\n").rstrip())]
    assert parts(hermes, ["Use <tool_call>: " + FAMILIES["hermes"].write(NOW)])[:2] == [
        ("text", "Use <tool_call>:"),
        ("call", NOW[0]),
    ]
    assert parts(hermes, [FAMILIES["hermes"].write(NOW) + "\nThat was it."])[-1] == ("text", "That was it.")
    assert parts(AnswerFormat(FALLBACK_FORMATS), ['{"name": "Bob"}'])[:1] == [("call", "Bob")]
    assert parts(AnswerFormat(FALLBACK_FORMATS), ['{"names": []}']) == [("text", '{"names": []}')]


@pytest.mark.parametrize("key", FAMILIES)
def test_truncated_second_call_is_not_text(key: str) -> None:
    family = FAMILIES[key]
    one, two = family.write(SUN), family.write(SUN, NOW)
    whole = parts(ANSWERS[key], [one])
    for size in range(len(one), len(two)):
        found = parts(ANSWERS[key], [two[:size]])
        assert found[: len(whole)] == whole or family.after
        assert {kind for kind, _ in found} == {"call", "arguments"}, two[:size]


@pytest.mark.parametrize("key", ["llama", "named", "tgi"])
def test_no_bare_call_after_a_special_token(key: str) -> None:
    """Neither in the grammar, which allows any text there, nor in the parser."""
    harness, answer = harness_of(byte_level(), FAMILIES[key].template), "<|user|>" + FAMILIES[key].write(("none", "[]"))
    add = submit_valid_chat(harness, 1, chat())
    assert accepts(add, answer, byte_level())
    assert parsed_answer(play_answer(harness, add, ids_of(answer))).parts == [("text", answer.removeprefix("<|user|>"))]


# --- cost -------------------------------------------------------------------------------------------------------------

LONG = 300


@pytest.mark.parametrize(
    "begin",
    ["", "Text.", "<think>", "<think>Thought.", "</think>Text.", "{", "[", "<tool_call>", '<tool_call>{"name": "',
     '[TOOL_CALLS] [{"name": "', '[{"name": "', "<function="],
)  # fmt: skip
@pytest.mark.parametrize("character", ["\n", " ", "a"])
@pytest.mark.parametrize("key", FAMILIES)
def test_a_token_is_parsed_without_those_before_it(key: str, begin: str, character: str) -> None:
    """What is held back, like white space that a marker may follow, is not searched again for each token."""
    parser = AnswerParser(ANSWERS[key], format_tokens(byte_level()))
    parser.parse_piece(begin)
    searched = 0
    for _ in range(LONG):
        parser.parse_piece(character)
        searched += len(parser._rest)
    assert searched <= 40 * LONG


def test_a_token_behind_much_held_text_costs_what_the_first_does() -> None:
    """A stop string of 4,000 characters may hold all of them back."""

    def work(count: int) -> Callable[[], None]:
        parser = StreamingAnswerParser(ANSWERS["hermes"], format_tokens(byte_level()))

        def parse() -> None:
            for held in range(count):
                parser.parse_token(0, "a", held + 1, hidden=False)

        return parse

    first, later = (per_item(work, few, 2 * few) for few in (100, 2000))
    assert later.within(int(first.calls) + 1, int(first.instructions) + 1), (first, later)


@given(st.lists(st.tuples(st.text("ab\n", max_size=4), st.booleans(), st.integers(0, 3)), max_size=12))
def test_held_characters_are_parsed_when_they_are_released(tokens: list[tuple[str, bool, int]]) -> None:
    parser = StreamingAnswerParser(AnswerFormat((), None), format_tokens(byte_level()))
    visible, shown, held = "", "", 0
    for text, hidden, more in tokens:
        visible += "" if hidden else text
        held = min(held + more, len(visible) - len(shown))
        shown += "".join(part for _, part in parser.parse_token(0, text, held, hidden))
        assert shown == visible[: len(visible) - held]
    assert shown + "".join(part for _, part in parser.finish(None)) == visible
