"""Reasoning is a part of its own, and grammars hold from behind it on."""

import json
from typing import Any

import pytest

from tests.tokenizer.answer.families import FAMILIES, PLAIN, SUN, THINKING, VOCABULARIES, chat
from tests.tokenizer.answer.talk import accepts, begin, divided, grammar, held, house_of, play, refusal, said
from tests.tokenizer.house import API, ids_of
from tests.tokenizer.vocabularies import byte_level
from tgi.kernel.answer import Prompted
from tgi.kernel.pack import INT32, pack
from tgi.tokenizer.vocabulary import Vocabulary

OPEN = PLAIN + "<think>\n"  # the prompt ends within reasoning, as with the R1 family
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
SCHEMAS = [{"schema": SCHEMA}, {"schema_text": json.dumps(SCHEMA)}, {"regex": r'\{"a": \d+/?\}'}]
CALL = FAMILIES["hermes"].write(SUN)


@pytest.fixture(params=VOCABULARIES)
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    return VOCABULARIES[request.param]()


def hi(**fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "Hi"}], **fields}).encode()


@pytest.mark.parametrize(
    ("template", "answer", "parts"),
    [
        (THINKING, "<think>\nHm.\n\nSo \n</think>\n\nYes\n", [("reasoning", "Hm.\n\nSo "), ("text", "Yes\n")]),
        (THINKING, "\n<think>Hm</think>Yes", [("reasoning", "Hm"), ("text", "Yes")]),
        (THINKING, " Yes, <think> so</think>", [("text", " Yes, <think> so</think>")]),
        (THINKING, "<think>\n\n</think>\n\nYes", [("text", "Yes")]),
        (THINKING, "<think>\nWithout end <", [("reasoning", "Without end <")]),
        (OPEN, "\nHm\n</think>\n\nYes", [("reasoning", "Hm"), ("text", "Yes")]),
        (OPEN, "Hm", [("reasoning", "Hm")]),
        (OPEN, "</think>Yes", [("text", "Yes")]),
    ],
)
def test_parts(template: str, answer: str, parts: list[tuple[str, str]], vocabulary: Vocabulary) -> None:
    if vocabulary is not byte_level() and parts[0] == ("text", " Yes, <think> so</think>"):
        parts = [("text", " Yes,  so")]  # special tokens are never shown
    house = house_of(vocabulary, template)
    add = begin(house, 1, hi())
    assert grammar(add) == ""
    assert divided(house.said(API))
    assert said(play(house, add, ids_of(answer, vocabulary))).parts == parts


def test_other_chats_are_not_divided() -> None:
    house = house_of(byte_level(), PLAIN)
    add = begin(house, 1, hi())
    told = play(house, add, ids_of("<think>a</think> b"))
    assert not divided(told)
    assert said(told).parts == []


@pytest.mark.parametrize("closed", [{"chat_template_kwargs": {"enable_thinking": False}}, {"continue": "Well"}])
def test_an_answer_behind_its_reasoning_is_text(closed: dict[str, Any]) -> None:
    house = house_of(byte_level(), THINKING)
    begun = closed.pop("continue", None)
    messages = [{"role": "user", "content": "Hi"}] + ([{"role": "assistant", "content": begun}] if begun else [])
    add = begin(house, 1, json.dumps({"messages": messages, **closed}).encode(), grammar=b'{"schema": true}')
    told = house.said(API)
    assert not divided(told)
    assert not accepts(add, "<think>a</think>{}", byte_level())
    assert accepts(add, "{}", byte_level())


def test_reasoning_may_be_continued() -> None:
    house = house_of(byte_level(), THINKING)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<think>\nWell"}]
    add = begin(house, 1, json.dumps({"messages": messages}).encode())
    parts = [("reasoning", ", yes"), ("text", "So")]
    assert said(play(house, add, ids_of(", yes</think>So"))).parts == parts


@pytest.mark.parametrize("asked", SCHEMAS, ids=["schema", "text", "regex"])
@pytest.mark.parametrize(("template", "opening"), [(THINKING, "<think>"), (OPEN, "")], ids=["opens", "open"])
def test_a_grammar_holds_behind_the_reasoning(
    template: str, opening: str, asked: dict[str, Any], vocabulary: Vocabulary
) -> None:
    house = house_of(vocabulary, template)
    add = begin(house, 1, hi(), grammar=json.dumps(asked).encode())
    thought = opening + '\nHm <|user|> {"a": \n</think>'
    answer = thought + '\n\n{"a": 12}'
    assert accepts(add, answer, vocabulary)
    assert accepts(add, '{"a": 12}', vocabulary) == bool(opening)
    assert not accepts(add, thought + "No", vocabulary)
    assert not accepts(add, thought, vocabulary)
    parts = [("reasoning", 'Hm  {"a": '), ("text", '{"a": 12}')]
    assert said(play(house, add, ids_of(answer, vocabulary))).parts == parts


def test_white_space_cannot_go_on_before_what_must_come(vocabulary: Vocabulary) -> None:
    house = house_of(vocabulary, THINKING)
    for choice in ("required", "auto"):
        found = held(begin(house, 1, chat(tool_choice=choice)), vocabulary)
        taken = [found.try_consume_tokens(ids_of("\n", vocabulary)) for _ in range(3)]
        assert taken == [1, 1, choice == "auto"]
        assert found.try_consume_tokens(ids_of("<think>", vocabulary)) == len(ids_of("<think>", vocabulary))


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize(("tail", "opening"), [("", "<think>"), ("<think>\n", "")], ids=["opens", "open"])
def test_calls_behind_the_reasoning(tail: str, opening: str, choice: str, vocabulary: Vocabulary) -> None:
    house = house_of(vocabulary, THINKING + tail)
    add = begin(house, 1, chat(tool_choice=choice))
    thought = opening + "\nI could <tool_call>, {\n</think>"
    answer = f"{thought}\n\n{CALL}"
    assert accepts(add, answer, vocabulary) == (vocabulary is byte_level())  # or else the marker is a token of its own
    assert accepts(add, answer.replace("<tool_call>,", "<|user|>,"), vocabulary)
    assert accepts(add, thought.replace("<tool_call>", "") + "No", vocabulary) == (choice == "auto")
    assert accepts(add, opening + "On and on", vocabulary) == (choice == "auto")
    parts = said(play(house, add, ids_of(answer, vocabulary))).parts
    assert [kind for kind, _ in parts] == ["reasoning", "call", "arguments"]
    assert parts[2] == ("arguments", SUN[1])


def test_tools_and_a_grammar_exclude_each_other() -> None:
    house = house_of(byte_level(), THINKING)
    assert "cannot be used together" in refusal(house, chat(), grammar=b'{"schema": true}')
    assert not any(isinstance(message, Prompted) for message in house.said(API))


def test_special_tokens_are_shown_in_parts_on_request(vocabulary: Vocabulary) -> None:
    """But those that delimit parts, and the one that ends the text."""
    house = house_of(vocabulary, THINKING)
    answer = "<think>Hm<|user|></think>Yes<|user|>!"
    shown = said(
        play(house, begin(house, 1, hi(), skip_special_tokens=False, hide_stop=True), ids_of(answer, vocabulary))
    )
    assert shown.parts == [("reasoning", "Hm<|user|>"), ("text", "Yes<|user|>!")]
    left_out = said(play(house, begin(house, 1, hi(), hide_stop=True), ids_of(answer, vocabulary)))
    assert left_out.parts == [("reasoning", "Hm"), ("text", "Yes!")]


def test_a_stop_token_is_no_part(vocabulary: Vocabulary) -> None:
    house = house_of(vocabulary, THINKING)
    ids = ids_of("<think>Hm</think>Yes no", vocabulary)
    add = begin(house, 1, hi(), hide_stop=True, stop_token_ids=pack(INT32, ids[-1:]))
    shown = said(play(house, add, ids))
    assert shown.parts == said(play(house, begin(house, 2, hi()), ids[:-1])).parts
