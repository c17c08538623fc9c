"""Reasoning parser; grammars apply after the reasoning."""

import json
from typing import Any

import pytest

from tests.tokenizer.answer.dialogue import (
    accepts,
    grammar_of,
    harness_of,
    is_sent_in_parts,
    parsed_answer,
    play_answer,
    start_matcher,
    submit_valid_chat,
)
from tests.tokenizer.answer.model_families import FAMILIES, PLAIN, SUN, THINKING, VOCABULARIES, chat
from tests.tokenizer.harness import API, ids_of
from tests.tokenizer.vocabularies import byte_level
from tgi.microkernel.messages.codec import INT32, pack_column
from tgi.tokenizer.vocabulary import Vocabulary

OPEN = PLAIN + "<think>\n"  # the prompt ends within reasoning, as for DeepSeek R1
ERNIE = THINKING + "{# <tool_call> <response> </response> #}"
HUNYUAN = THINKING + "{# <tool_calls> <answer> </answer> #}"
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
        (ERNIE, "<think>\nHm\n</think>\n\n<response>\nYes\n</response>\n", [("reasoning", "Hm"), ("text", "Yes")]),
        (ERNIE, "<response>\nYes </resp\n", [("text", "Yes </resp\n")]),
        (
            ERNIE,
            "<think>Hm</think>A <response> b</response>",
            [("reasoning", "Hm"), ("text", "A <response> b</response>")],
        ),
        (ERNIE, "\n<resp", [("text", "\n<resp")]),
        (HUNYUAN, "<think>\nHm\n</think>\n<answer>\nYes\n</answer>", [("reasoning", "Hm"), ("text", "Yes")]),
        (THINKING + "{# <answer> </answer> #}", "<answer>Yes</answer>", [("text", "<answer>Yes</answer>")]),
    ],
)
def test_parts(template: str, answer: str, parts: list[tuple[str, str]], vocabulary: Vocabulary) -> None:
    if vocabulary is not byte_level() and parts[0] == ("text", " Yes, <think> so</think>"):
        parts = [("text", " Yes,  so")]  # special tokens are not shown
    harness = harness_of(vocabulary, template)
    add = submit_valid_chat(harness, 1, hi())
    assert grammar_of(add) == ""
    assert is_sent_in_parts(harness.received_by(API))
    assert parsed_answer(play_answer(harness, add, ids_of(answer, vocabulary))).parts == parts


@pytest.mark.parametrize(
    ("template", "answer", "parts"),
    [
        (THINKING, "<think>\nA Q: b\n\n</think>\n\nC Q: d", [("reasoning", "A Q: b"), ("text", "C ")]),
        (OPEN, "Q: Q</think>: Q\n\nb", [("reasoning", "Q: Q"), ("text", ": Q")]),
        (OPEN, "Q</think>Q: b", [("reasoning", "Q")]),
        (OPEN, "Q: </thin", [("reasoning", "Q: </thin")]),
        (THINKING, " <thin Q: b", [("text", " <thin ")]),
        (THINKING, "\n\n<think>Q: </think>a", []),
    ],
)
@pytest.mark.parametrize("at_once", [1, 99])
def test_stop_strings_apply_after_the_reasoning(
    template: str, answer: str, parts: list[tuple[str, str]], at_once: int, vocabulary: Vocabulary
) -> None:
    harness = harness_of(vocabulary, template)
    add = submit_valid_chat(harness, 1, hi(), stop_strings=["Q:", "\n\n"], hide_stop=True)
    messages = play_answer(harness, add, ids_of(answer, vocabulary), at_once=at_once)
    assert parsed_answer(messages).parts == parts


def test_chats_without_reasoning_or_tools_are_not_parsed() -> None:
    harness = harness_of(byte_level(), PLAIN)
    add = submit_valid_chat(harness, 1, hi())
    messages = play_answer(harness, add, ids_of("<think>a</think> b"))
    assert not is_sent_in_parts(messages)
    assert parsed_answer(messages).parts == []


@pytest.mark.parametrize("closed", [{"chat_template_kwargs": {"enable_thinking": False}}, {"continue": "Well"}])
def test_answer_after_closed_reasoning_is_text(closed: dict[str, Any]) -> None:
    harness = harness_of(byte_level(), THINKING)
    begun = closed.pop("continue", None)
    messages = [{"role": "user", "content": "Hi"}] + ([{"role": "assistant", "content": begun}] if begun else [])
    add = submit_valid_chat(
        harness, 1, json.dumps({"messages": messages, **closed}).encode(), grammar=b'{"schema": true}'
    )
    messages = harness.received_by(API)
    assert not is_sent_in_parts(messages)
    assert not accepts(add, "<think>a</think>{}", byte_level())
    assert accepts(add, "{}", byte_level())


def test_reasoning_may_be_continued() -> None:
    harness = harness_of(byte_level(), THINKING)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<think>\nWell"}]
    add = submit_valid_chat(harness, 1, json.dumps({"messages": messages}).encode())
    parts = [("reasoning", ", yes"), ("text", "So")]
    assert parsed_answer(play_answer(harness, add, ids_of(", yes</think>So"))).parts == parts


@pytest.mark.parametrize("asked", SCHEMAS, ids=["schema", "text", "regex"])
@pytest.mark.parametrize(("template", "opening"), [(THINKING, "<think>"), (OPEN, "")], ids=["opens", "open"])
def test_grammar_applies_after_the_reasoning(
    template: str, opening: str, asked: dict[str, Any], vocabulary: Vocabulary
) -> None:
    harness = harness_of(vocabulary, template)
    add = submit_valid_chat(harness, 1, hi(), grammar=json.dumps(asked).encode())
    thought = opening + '\nHm <|user|> {"a": \n</think>'
    answer = thought + '\n\n{"a": 12}'
    assert accepts(add, answer, vocabulary)
    assert accepts(add, '{"a": 12}', vocabulary) == bool(opening)
    assert not accepts(add, thought + "No", vocabulary)
    assert not accepts(add, thought, vocabulary)
    parts = [("reasoning", 'Hm  {"a": '), ("text", '{"a": 12}')]
    assert parsed_answer(play_answer(harness, add, ids_of(answer, vocabulary))).parts == parts


def test_white_space_before_required_output_is_bounded(vocabulary: Vocabulary) -> None:
    harness = harness_of(vocabulary, THINKING)
    for choice in ("required", "auto"):
        found = start_matcher(submit_valid_chat(harness, 1, chat(tool_choice=choice)), vocabulary)
        taken = [found.try_consume_tokens(ids_of("\n", vocabulary)) for _ in range(3)]
        assert taken == [1, 1, choice == "auto"]
        assert found.try_consume_tokens(ids_of("<think>", vocabulary)) == len(ids_of("<think>", vocabulary))


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize(("tail", "opening"), [("", "<think>"), ("<think>\n", "")], ids=["opens", "open"])
def test_calls_after_the_reasoning(tail: str, opening: str, choice: str, vocabulary: Vocabulary) -> None:
    harness = harness_of(vocabulary, THINKING + tail)
    add = submit_valid_chat(harness, 1, chat(tool_choice=choice))
    thought = opening + "\nI could <tool_call>, {\n</think>"
    answer = f"{thought}\n\n{CALL}"
    assert accepts(add, answer, vocabulary) == (vocabulary is byte_level())  # otherwise the marker is a special token
    assert accepts(add, answer.replace("<tool_call>,", "<|user|>,"), vocabulary)
    assert accepts(add, thought.replace("<tool_call>", "") + "No", vocabulary) == (choice == "auto")
    assert accepts(add, opening + "On and on", vocabulary) == (choice == "auto")
    parts = parsed_answer(play_answer(harness, add, ids_of(answer, vocabulary))).parts
    assert [kind for kind, _ in parts] == ["reasoning", "call", "arguments"]
    assert parts[2] == ("arguments", SUN[1])


def test_grammar_and_calls_after_the_reasoning(vocabulary: Vocabulary) -> None:
    harness = harness_of(vocabulary, THINKING)
    for answer, kinds in (("yes", ["text"]), (CALL, ["call", "arguments"])):
        add = submit_valid_chat(harness, 1, chat(), grammar=b'{"regex": "yes"}')
        text = f"<think>So</think>{answer}"
        assert accepts(add, text, vocabulary)
        parts = parsed_answer(play_answer(harness, add, ids_of(text, vocabulary))).parts
        assert [kind for kind, _ in parts] == ["reasoning", *kinds]
        assert not accepts(add, "<think>So</think>", vocabulary)


def test_special_tokens_in_parts(vocabulary: Vocabulary) -> None:
    """Except those that delimit parts, and the one that ends the text."""
    harness = harness_of(vocabulary, THINKING)
    answer = "<think>Hm<|user|></think>Yes<|user|>!"
    shown = parsed_answer(
        play_answer(
            harness,
            submit_valid_chat(harness, 1, hi(), skip_special_tokens=False, hide_stop=True),
            ids_of(answer, vocabulary),
        )
    )
    assert shown.parts == [("reasoning", "Hm<|user|>"), ("text", "Yes<|user|>!")]
    left_out = parsed_answer(
        play_answer(harness, submit_valid_chat(harness, 1, hi(), hide_stop=True), ids_of(answer, vocabulary))
    )
    assert left_out.parts == [("reasoning", "Hm"), ("text", "Yes!")]


def test_stop_token_is_not_in_parts(vocabulary: Vocabulary) -> None:
    harness = harness_of(vocabulary, THINKING)
    ids = ids_of("<think>Hm</think>Yes no", vocabulary)
    add = submit_valid_chat(harness, 1, hi(), hide_stop=True, stop_token_ids=pack_column(INT32, ids[-1:]))
    shown = parsed_answer(play_answer(harness, add, ids))
    assert shown.parts == parsed_answer(play_answer(harness, submit_valid_chat(harness, 2, hi()), ids[:-1])).parts
