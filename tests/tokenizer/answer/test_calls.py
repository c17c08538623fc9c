"""Every family's calls, through the pool: what its grammar takes and refuses, and the parts that come of it."""

import json
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from tests.schemas import validate
from tests.tokenizer.answer.families import FAMILIES, MARKERS, NOW, SUN, VOCABULARIES, WEATHER, Family, chat
from tests.tokenizer.answer.talk import accepts, begin, divided, held, house_of, play, said
from tests.tokenizer.house import API, EOS, ids_of
from tests.tokenizer.vocabularies import byte_level, sentencepiece
from tgi.kernel.messages import Reason
from tgi.kernel.pack import INT32, pack
from tgi.tokenizer.vocabulary import Vocabulary

# Whether its markers are special tokens matters to the families that have some.
ALIKE = {("thinking", "special"), ("llama", "special"), ("mistral", "text"), ("named", "special"), ("tgi", "special")}
WRITTEN = [(key, kind) for key in FAMILIES for kind in VOCABULARIES if (key, kind) not in ALIKE]
with_each = pytest.mark.parametrize(
    ("family", "vocabulary"),
    [pytest.param(FAMILIES[key], VOCABULARIES[kind](), id=f"{key}-{kind}") for key, kind in WRITTEN],
)


def parts_of(text: str, *calls: tuple[str, str]) -> list[tuple[str, str]]:
    called = [part for name, arguments in calls for part in (("call", name), ("arguments", arguments))]
    return [("text", text), *called] if text else called


@with_each
@pytest.mark.parametrize("parallel", [None, True, False])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_answers(family: Family, vocabulary: Vocabulary, choice: str, parallel: bool | None) -> None:
    house = house_of(vocabulary, family.template)
    several = family.usual if parallel is None else parallel
    asked = chat(tool_choice=choice, parallel_tool_calls=parallel)
    answers = [
        ("Hello <|user|>, {you}.\n", choice == "auto", parts_of("Hello , {you}.\n")),
        (family.write(SUN), True, parts_of("", SUN)),
        (family.write(NOW), True, parts_of("", NOW)),
        (family.write(SUN, NOW), several, parts_of("", SUN, NOW)),
    ]
    if family.mixes:
        answers.append(("Let me see. \n" + family.write(SUN), choice == "auto", parts_of("Let me see.", SUN)))
    for rid, (answer, taken, parts) in enumerate(answers):
        add = begin(house, rid, asked)
        assert divided(house.said(API))
        assert accepts(add, answer, vocabulary) == taken, answer
        assert said(play(house, add, ids_of(answer, vocabulary))).parts == parts


@with_each
def test_what_a_call_cannot_be(family: Family, vocabulary: Vocabulary) -> None:
    house = house_of(vocabulary, family.template)
    wrong = [
        ("sunset", "{}"),
        ("weather", "{}"),
        ("weather", '{"city": 3}'),
        ("time", "[]"),
        ("weather", '{"city": "U"'),
    ]
    for rid, choice in enumerate(["auto", "required"]):
        add = begin(house, rid, chat(tool_choice=choice))
        for call in wrong if "FIELDS" not in family.each else wrong[:3]:
            assert not accepts(add, family.write(call), vocabulary)
        assert not accepts(add, family.write(SUN) + "And?", vocabulary)


@with_each
def test_a_resumed_answer_gives_the_same_parts(family: Family, vocabulary: Vocabulary) -> None:
    house = house_of(vocabulary, family.template)
    before = "Wait <\n" if family.mixes else ""
    ids = ids_of(before + family.write(SUN, NOW), vocabulary)
    told = play(house, begin(house, 0, chat()), ids)
    assert said(told).parts == parts_of(before.strip(), SUN, NOW)
    for at in range(len(ids) + 1):
        again = play(house, begin(house, 1, chat(), resume=pack(INT32, ids[:at])), ids[at:], at_once=len(ids))
        assert said(told[: at + 1] + again).parts == said(told).parts


@with_each
def test_a_call_that_is_cut_short_is_no_text(family: Family, vocabulary: Vocabulary) -> None:
    house = house_of(vocabulary, family.template)
    ids = ids_of(family.write(SUN), vocabulary)
    for size in range(len(ids)):
        add = begin(house, size, chat(), max_new_tokens=size or 1)
        found, end = said(play(house, add, ids[: size or 1], Reason.LENGTH))
        kinds = [kind for kind, _ in found]
        assert kinds in ([], ["call"], ["call", "arguments"], ["text"])
        if "call" in kinds:
            assert found[0] == ("call", "weather")
            assert SUN[1].startswith(found[1][1] if len(found) > 1 else "")
        elif kinds:  # so little that it may have become anything
            assert (family.write(SUN) + " ").startswith(found[0][1])
            assert not any(marker in found[0][1] for marker in MARKERS)
        assert end is not None
        assert end.reason == Reason.LENGTH


@with_each
def test_while_it_is_text_nothing_is_kept_from_the_model(family: Family, vocabulary: Vocabulary) -> None:
    house = house_of(vocabulary, family.template)
    found = held(begin(house, 0, chat()), vocabulary)
    found.consume_tokens(ids_of("Well", vocabulary))
    mask = found.compute_bitmask()
    withheld = {
        piece for number, piece in enumerate(vocabulary.pieces) if piece and not mask[number // 8] >> number % 8 & 1
    }
    # A marker that is special has no meaning in another place or family. Bytes that end a character must have one.
    assert {piece for piece in withheld if isinstance(piece, str)} <= set(MARKERS)
    assert found.consume_tokens(ids_of("🙂 é", vocabulary))


@pytest.mark.parametrize("key", ["llama", "named", "tgi"])
@pytest.mark.parametrize("space", ["", " ", "\n", "\n\n", "  \r\n\t "])
def test_a_call_without_a_marker_may_stand_behind_white_space(key: str, space: str) -> None:
    family, vocabulary = FAMILIES[key], byte_level()
    house = house_of(vocabulary, family.template)
    answer = family.write(NOW)
    for written in (space + answer, space + answer.replace("{", "{\n  ", 1)):
        add = begin(house, 0, chat(tool_choice="auto"))
        assert accepts(add, written, vocabulary)
        assert said(play(house, add, ids_of(written, vocabulary))).parts == parts_of("", NOW)


# Without properties of any name: a random answer would not come to their end.
CLOSED = {"type": "object", "properties": {"zone": {"const": 0}}, "additionalProperties": False}
SCHEMAS = {"weather": {**WEATHER, "additionalProperties": False}, "time": CLOSED}


def draw(family: Family, vocabulary: Vocabulary, seed: int, **fields: Any) -> list[tuple[str, str]]:
    """The parts of a random answer under its grammar."""
    house, random = house_of(vocabulary, family.template), Random(seed)
    add = begin(house, 0, chat(**fields))
    found = held(add, vocabulary)
    # It might reason for ever.
    ids = ids_of("<think>Hm</think>", vocabulary) if family is FAMILIES["thinking"] else []
    assert found.consume_tokens(ids)
    blank = {number for number, piece in enumerate(vocabulary.pieces) if isinstance(piece, str) and piece.isspace()}
    for _ in range(400):
        mask = int.from_bytes(found.compute_bitmask(), "little")
        allowed = [number for number in range(mask.bit_length()) if mask >> number & 1]
        if EOS in allowed and random.random() < 0.5:
            return said(play(house, add, ids)).parts
        # Spaces may stand wherever they may stand, and an object of any kind may go on.
        words = [number for number in allowed if number not in blank and number != EOS] or allowed
        ids.append(random.choice(words))
        assert found.consume_token(ids[-1])
    raise AssertionError("it never ends")


@with_each
def test_random_answers_that_must_call_do_it_right(family: Family, vocabulary: Vocabulary) -> None:
    tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMAS[name]}} for name in SCHEMAS]
    for seed in range(4):
        parts = draw(family, vocabulary, seed, tool_choice="required", parallel_tool_calls=True, tools=tools)
        if family is FAMILIES["thinking"]:
            assert parts.pop(0) == ("reasoning", "Hm")
        assert parts
        assert [kind for kind, _ in parts] == ["call", "arguments"] * (len(parts) // 2)
        for (_, name), (_, arguments) in zip(parts[::2], parts[1::2], strict=True):
            validate(arguments, SCHEMAS[name])


def test_other_kinds_of_vocabularies() -> None:
    vocabulary = sentencepiece()
    house = house_of(vocabulary, FAMILIES["hermes"].template)
    add = begin(house, 0, chat())
    answer = "Let me see\n" + FAMILIES["hermes"].write(SUN)
    assert accepts(add, answer, vocabulary)
    assert said(play(house, add, ids_of(answer, vocabulary))).parts == parts_of(" Let me see", SUN)


@pytest.mark.parametrize("name", ['a"b', "x\\y", "né/🙂", "a b", "line\nbreak", "<tool_call>", "[]"])
def test_names_of_any_characters(name: str) -> None:
    vocabulary = byte_level()
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}}]
    written: list[tuple[str, Callable[[str], str]]] = [
        ("hermes", lambda name: json.dumps(name, ensure_ascii=False)[1:-1]),
        ("mistral-args", str),
    ]
    for key, write in written:
        house = house_of(vocabulary, FAMILIES[key].template)
        answer = FAMILIES[key].write((write(name), '{"x": [{}, "}"]}'))
        add = begin(house, 0, chat(tools=tools, tool_choice="required"))
        assert accepts(add, answer, vocabulary)
        assert said(play(house, add, ids_of(answer, vocabulary))).parts == parts_of("", (name, '{"x": [{}, "}"]}'))
