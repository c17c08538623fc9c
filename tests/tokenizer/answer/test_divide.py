"""However an answer is cut, its parts are the same, and nothing of a marker or a stop string is shown."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tokenizer.answer.families import FAMILIES, MARKERS, NOW, SUN, VOCABULARIES, chat
from tests.tokenizer.answer.talk import accepts, begin, house_of, merged, play, said
from tests.tokenizer.house import API, ids_of
from tests.tokenizer.vocabularies import byte_level
from tgi.kernel.messages import Reason, Stop
from tgi.tokenizer.answer.divide import Divider
from tgi.tokenizer.answer.formats import FALLBACK, TAGS, Answer, native
from tgi.tokenizer.answer.marks import Marks

TEXTS = st.lists(
    st.sampled_from(["Hi", " ", "\n", "<", "<tool", "[", "{", '{"', "é", "</think>", "}", '"']), max_size=6
)
ANSWERS = {
    key: Answer(FALLBACK if (format := native(family.template)) is None else (format,), TAGS[0])
    for key, family in FAMILIES.items()
}


def parts(answer: Answer, pieces: list[str], over: bool = True) -> list[tuple[str, str]]:
    divider = Divider(answer, Marks(byte_level()))
    found: list[tuple[Any, str]] = []
    for piece in pieces:
        found += divider.feed(piece)
    return merged(found + (divider.end() if over else []))


def cut(text: str, places: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[one:other] for one, other in pairwise(edges)]


@given(st.sampled_from(list(FAMILIES)), TEXTS, TEXTS, st.booleans(), st.integers(0, 2), st.lists(st.integers(0, 400)))
def test_parts_do_not_depend_on_how_the_answer_is_cut(
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
        assert [told for kind, told in found if kind == "reasoning"] == ([stripped] if stripped else [])
    # What is shown on the way is never taken back.
    seen = ""
    for at in range(len(pieces)):
        shown = "".join(told for _, told in parts(ANSWERS[key], pieces[:at], over=False))
        assert shown.startswith(seen)
        seen = shown
    assert "".join(told for _, told in found).startswith(seen)


@pytest.mark.parametrize("vocabulary", VOCABULARIES.values(), ids=VOCABULARIES)
def test_text_is_shown_as_soon_as_it_cannot_be_a_call(vocabulary: Any) -> None:
    house = house_of(vocabulary(), FAMILIES["hermes"].template)
    add = begin(house, 1, chat())
    shown = []
    for piece in ["a", " ", "b", "<", "t", "x", "\n"]:
        house.tokens((add.rid, ids_of(piece, vocabulary())))
        shown.append("".join(text for _, text in said(house.said(API)).parts))
    house.end(add.rid)
    # White space may stand before a call; "<" is the beginning of a marker only where that is text.
    special = vocabulary is VOCABULARIES["special"]
    assert shown == (["a", "", " b", "<", "t", "x", ""] if special else ["a", "", " b", "", "", "<tx", ""])
    assert said(house.said(API)).parts == [("text", "\n")]


@settings(max_examples=50)
@given(st.sampled_from(list(FAMILIES)), st.sampled_from(list(VOCABULARIES)), st.data())
def test_stop_strings_cut_the_answer_and_are_not_shown(key: str, kind: str, data: st.DataObject) -> None:
    family, vocabulary = FAMILIES[key], VOCABULARIES[kind]()
    house = house_of(vocabulary, family.template)
    answer = ("One two <three. " if family.mixes else "") + family.write(SUN, NOW)
    begins = data.draw(st.integers(0, len(answer) - 1))
    stop = answer[begins : begins + data.draw(st.integers(1, 12))]
    add = begin(house, 1, chat(), stop=[stop], hide_stop=True)
    ids = ids_of(answer, vocabulary)
    told = []
    for number in ids:
        house.tokens((add.rid, [number]))
        told += house.said(API)
        if house.said(house.scheduler) == [Stop(add.rid)]:
            break
    house.end(add.rid, Reason.STOP)
    found, end = said(told + house.said(API))
    assert end is not None
    assert end.reason == Reason.STOP
    uncut = said(play(house, begin(house, 1, chat()), ids)).parts
    for mine, whole in zip(found[:-1], uncut, strict=False):
        assert mine == whole
    if found and found[-1][0] != "text":
        assert uncut[len(found) - 1][1].startswith(found[-1][1])
    for part_kind, text in found:
        if part_kind == "text":
            assert stop not in text
            assert not any(marker in text for marker in MARKERS)


def test_what_does_not_fit_the_format_is_text() -> None:
    hermes = Answer((native(FAMILIES["hermes"].template),))  # type: ignore[arg-type]
    assert parts(hermes, ["a <tool_call>nonsense"]) == [("text", "anonsense")]
    assert parts(hermes, ['<tool_call>{"name": "\\q"}</tool_call>']) == [("text", "}</tool_call>")]
    assert parts(hermes, [FAMILIES["hermes"].write(NOW) + "\nThat was it."])[-1] == ("text", "That was it.")
    assert parts(Answer(FALLBACK), ['{"name": "Bob"}'])[:1] == [("call", "Bob")]
    assert parts(Answer(FALLBACK), ['{"names": []}']) == [("text", '{"names": []}')]


@pytest.mark.parametrize("key", FAMILIES)
def test_what_follows_calls_and_is_cut_is_no_text(key: str) -> None:
    family = FAMILIES[key]
    one, two = family.write(SUN), family.write(SUN, NOW)
    whole = parts(ANSWERS[key], [one])
    for size in range(len(one), len(two)):
        found = parts(ANSWERS[key], [two[:size]])
        assert found[: len(whole)] == whole or family.after
        assert {kind for kind, _ in found} == {"call", "arguments"}, two[:size]


@pytest.mark.parametrize("key", ["llama", "named", "tgi"])
def test_behind_a_special_token_an_answer_does_not_begin_with_a_call(key: str) -> None:
    """Neither for the grammar, which leaves text open there, nor for its parts."""
    house, answer = house_of(byte_level(), FAMILIES[key].template), "<|user|>" + FAMILIES[key].write(("none", "[]"))
    add = begin(house, 1, chat())
    assert accepts(add, answer, byte_level())
    assert said(play(house, add, ids_of(answer))).parts == [("text", answer.removeprefix("<|user|>"))]
