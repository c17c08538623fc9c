"""Tool calls of each model family: what the grammar accepts, and the parsed parts."""

import json
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from tests.schemas import validate
from tests.tokenizer.answer.dialogue import (
    accepts,
    harness_of,
    is_sent_in_parts,
    parsed_answer,
    play_answer,
    start_matcher,
    submit_valid_chat,
)
from tests.tokenizer.answer.model_families import FAMILIES, MARKERS, NOW, SUN, VOCABULARIES, WEATHER, Family, chat
from tests.tokenizer.harness import API, EOS, ids_of
from tests.tokenizer.vocabularies import byte_level, sentencepiece
from tgi.microkernel.messages.codec import INT32, pack_column
from tgi.microkernel.messages.protocol import FinishReason
from tgi.tokenizer.vocabulary import Vocabulary

pytestmark = pytest.mark.slow

# Families with markers are tested with and without markers as special tokens.
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
def test_grammar_and_parts_of_calls(family: Family, vocabulary: Vocabulary, choice: str, parallel: bool | None) -> None:
    harness = harness_of(vocabulary, family.template)
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
        add = submit_valid_chat(harness, rid, asked)
        assert is_sent_in_parts(harness.received_by(API))
        assert accepts(add, answer, vocabulary) == taken, answer
        assert parsed_answer(play_answer(harness, add, ids_of(answer, vocabulary))).parts == parts


@with_each
def test_malformed_calls_are_rejected(family: Family, vocabulary: Vocabulary) -> None:
    harness = harness_of(vocabulary, family.template)
    wrong = [
        ("sunset", "{}"),
        ("weather", "{}"),
        ("weather", '{"city": 3}'),
        ("time", "[]"),
        ("weather", '{"city": "U"'),
    ]
    for rid, choice in enumerate(["auto", "required"]):
        add = submit_valid_chat(harness, rid, chat(tool_choice=choice))
        for call in wrong if "FIELDS" not in family.each else wrong[:3]:
            assert not accepts(add, family.write(call), vocabulary)
        assert not accepts(add, family.write(SUN) + "And?", vocabulary)


@with_each
def test_resumed_answer_gives_the_same_parts(family: Family, vocabulary: Vocabulary) -> None:
    harness = harness_of(vocabulary, family.template)
    before = "Wait <\n" if family.mixes else ""
    ids = ids_of(before + family.write(SUN, NOW), vocabulary)
    messages = play_answer(harness, submit_valid_chat(harness, 0, chat()), ids)
    assert parsed_answer(messages).parts == parts_of(before.strip(), SUN, NOW)
    for at in range(len(ids) + 1):
        again = play_answer(
            harness,
            submit_valid_chat(harness, 1, chat(), resume_ids=pack_column(INT32, ids[:at])),
            ids[at:],
            at_once=len(ids),
        )
        assert parsed_answer(messages[: at + 1] + again).parts == parsed_answer(messages).parts


@with_each
def test_truncated_call_is_not_shown_as_text(family: Family, vocabulary: Vocabulary) -> None:
    harness = harness_of(vocabulary, family.template)
    ids = ids_of(family.write(SUN), vocabulary)
    for size in range(len(ids)):
        add = submit_valid_chat(harness, size, chat(), max_new_tokens=size or 1)
        found, end = parsed_answer(play_answer(harness, add, ids[: size or 1], FinishReason.LENGTH))
        kinds = [kind for kind, _ in found]
        assert kinds in ([], ["call"], ["call", "arguments"], ["text"])
        if "call" in kinds:
            assert found[0] == ("call", "weather")
            assert SUN[1].startswith(found[1][1] if len(found) > 1 else "")
        elif kinds:  # too short to be recognized as a call
            assert (family.write(SUN) + " ").startswith(found[0][1])
            assert not any(marker in found[0][1] for marker in MARKERS)
        assert end is not None
        assert end.reason == FinishReason.LENGTH


@with_each
def test_grammar_allows_any_token_within_text(family: Family, vocabulary: Vocabulary) -> None:
    harness = harness_of(vocabulary, family.template)
    found = start_matcher(submit_valid_chat(harness, 0, chat()), vocabulary)
    found.consume_tokens(ids_of("Well", vocabulary))
    mask = found.compute_bitmask()
    withheld = {
        piece for number, piece in enumerate(vocabulary.pieces) if piece and not mask[number // 8] >> number % 8 & 1
    }
    # Special markers of other formats are allowed. Continuation bytes need a character to continue.
    assert {piece for piece in withheld if isinstance(piece, str)} <= set(MARKERS)
    assert found.consume_tokens(ids_of("🙂 é", vocabulary))


@pytest.mark.parametrize("key", ["llama", "named", "tgi"])
@pytest.mark.parametrize("space", ["", " ", "\n", "\n\n", "  \r\n\t "])
def test_bare_call_after_white_space(key: str, space: str) -> None:
    family, vocabulary = FAMILIES[key], byte_level()
    harness = harness_of(vocabulary, family.template)
    answer = family.write(NOW)
    for written in (space + answer, space + answer.replace("{", "{\n  ", 1)):
        add = submit_valid_chat(harness, 0, chat(tool_choice="auto"))
        assert accepts(add, written, vocabulary)
        assert parsed_answer(play_answer(harness, add, ids_of(written, vocabulary))).parts == parts_of("", NOW)


# No additional properties, since a random answer would not end them.
CLOSED = {"type": "object", "properties": {"zone": {"const": 0}}, "additionalProperties": False}
SCHEMAS = {"weather": {**WEATHER, "additionalProperties": False}, "time": CLOSED}


def draw(family: Family, vocabulary: Vocabulary, seed: int, **fields: Any) -> list[tuple[str, str]]:
    """The parts of a random answer that its grammar allows."""
    harness, random = harness_of(vocabulary, family.template), Random(seed)
    add = submit_valid_chat(harness, 0, chat(**fields))
    found = start_matcher(add, vocabulary)
    # Random reasoning might not end.
    ids = ids_of("<think>Hm</think>", vocabulary) if family is FAMILIES["thinking"] else []
    assert found.consume_tokens(ids)
    blank = {number for number, piece in enumerate(vocabulary.pieces) if isinstance(piece, str) and piece.isspace()}
    for _ in range(400):
        mask = int.from_bytes(found.compute_bitmask(), "little")
        allowed = [number for number in range(mask.bit_length()) if mask >> number & 1]
        if EOS in allowed and random.random() < 0.5:
            return parsed_answer(play_answer(harness, add, ids)).parts
        # Prefers ends: white space and objects could continue without end.
        words = [number for number in allowed if number not in blank and number != EOS] or allowed
        ids.append(random.choice(words))
        assert found.consume_token(ids[-1])
    raise AssertionError("it never ends")


@with_each
def test_random_required_calls_are_valid(family: Family, vocabulary: Vocabulary) -> None:
    tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMAS[name]}} for name in SCHEMAS]
    for seed in range(4):
        parts = draw(family, vocabulary, seed, tool_choice="required", parallel_tool_calls=True, tools=tools)
        if family is FAMILIES["thinking"]:
            assert parts.pop(0) == ("reasoning", "Hm")
        assert parts
        assert [kind for kind, _ in parts] == ["call", "arguments"] * (len(parts) // 2)
        for (_, name), (_, arguments) in zip(parts[::2], parts[1::2], strict=True):
            validate(arguments, SCHEMAS[name])


def test_other_vocabulary_types() -> None:
    vocabulary = sentencepiece()
    harness = harness_of(vocabulary, FAMILIES["hermes"].template)
    add = submit_valid_chat(harness, 0, chat())
    answer = "Let me see\n" + FAMILIES["hermes"].write(SUN)
    assert accepts(add, answer, vocabulary)
    assert parsed_answer(play_answer(harness, add, ids_of(answer, vocabulary))).parts == parts_of(" Let me see", SUN)


@pytest.mark.parametrize("name", ['a"b', "x\\y", "né/🙂", "a b", "line\nbreak", "<tool_call>", "[]"])
def test_tool_names_with_any_characters(name: str) -> None:
    vocabulary = byte_level()
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}}]
    written: list[tuple[str, Callable[[str], str]]] = [
        ("hermes", lambda name: json.dumps(name, ensure_ascii=False)[1:-1]),
        ("mistral-args", str),
    ]
    for key, write in written:
        harness = harness_of(vocabulary, FAMILIES[key].template)
        answer = FAMILIES[key].write((write(name), '{"x": [{}, "}"]}'))
        add = submit_valid_chat(harness, 0, chat(tools=tools, tool_choice="required"))
        assert accepts(add, answer, vocabulary)
        assert parsed_answer(play_answer(harness, add, ids_of(answer, vocabulary))).parts == parts_of(
            "", (name, '{"x": [{}, "}"]}')
        )
