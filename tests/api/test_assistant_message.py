"""Answers that consist of parts: however they are cut, the deltas join to the whole message."""

import json
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tgi.api.answer import Answer, incomplete_tool_call
from tgi.api.openai_output import AssistantMessage
from tgi.api.requests import Generation, WakeEvent
from tgi.api.token_columns import NO_TOKENS, TokenColumns
from tgi.microkernel.messages.protocol import AnswerPart, End, FinishReason, Generate, PartKind
from tgi.microkernel.messages.sampling_params import SamplingParams


def columns(parts: list[list[AnswerPart]]) -> TokenColumns:
    count = len(parts)
    return NO_TOKENS._replace(ids=array("i", range(count)), texts=["x"] * count, parts=parts)


def generation(parts: list[list[AnswerPart]]) -> Generation:
    call = Generation(Generate(0, "", SamplingParams(0)), False, WakeEvent())
    call.has_parts = True
    call.unread_tokens = columns(parts)
    return call


def pieces(text: str) -> st.SearchStrategy[list[str]]:
    """A text cut at random positions."""
    cuts = st.lists(st.integers(0, len(text)), max_size=4).map(sorted)
    return cuts.map(lambda at: [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)])


CUSTOM = ("f", "gh")  # tools whose input is text
ARGUMENTS = st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=5), max_size=3)


@st.composite
def answers(draw: st.DrawFn) -> list[AnswerPart]:
    """Reasoning, text and tool calls, in pieces."""
    said = [
        AnswerPart(0, PartKind.REASONING, piece)
        for piece in draw(st.lists(st.text(min_size=1, max_size=4), max_size=3))
    ]
    said += [
        AnswerPart(0, PartKind.TEXT, piece) for piece in draw(st.lists(st.text(min_size=1, max_size=4), max_size=3))
    ]
    for name in draw(st.lists(st.text("fgh", min_size=1, max_size=3), max_size=3)):
        arguments = {"input": draw(st.text(max_size=5))} if name in CUSTOM else draw(ARGUMENTS)
        text = json.dumps(arguments, ensure_ascii=draw(st.booleans()))
        said.append(AnswerPart(0, PartKind.CALL, name))
        said += [AnswerPart(0, PartKind.ARGUMENTS, piece) for piece in draw(pieces(text))]
    return said


def joined(deltas: list[str]) -> dict[str, Any]:
    """The message that a client builds from deltas: strings are joined, list entries are found by index."""
    message: dict[str, Any] = {}
    for delta in deltas:
        for name, value in json.loads(f"{{{delta}}}").items():
            if name != "tool_calls":
                message[name] = message.get(name, "") + value
                continue
            calls = message.setdefault("tool_calls", [])
            for piece in value:
                if piece.pop("index") == len(calls):
                    calls.append(piece)
                else:
                    kind = calls[-1]["type"]
                    member = "arguments" if kind == "function" else "input"
                    calls[-1][kind][member] += piece[kind][member]
    return message


@given(st.data())
def test_deltas_join_to_the_message(data: st.DataObject) -> None:
    said = data.draw(answers())
    tokens = data.draw(st.integers(1, 6))
    places = sorted(data.draw(st.lists(st.integers(0, tokens), min_size=len(said), max_size=len(said))))
    parts = [[part for part, at in zip(said, places, strict=True) if at == token] for token in range(tokens)]
    rest = [part for part, at in zip(said, places, strict=True) if at == tokens]
    end = End(0, FinishReason.EOS, parts=rest)
    reply = AssistantMessage(str, custom_tools=CUSTOM)
    cut = data.draw(st.integers(0, tokens - 1))
    names = [f"logprob {token}" for token in range(tokens)]
    first, beside_first = reply.deltas(columns(parts[:cut]), None, names[:cut])
    last, beside_last = reply.deltas(columns(parts[cut:]), end, names[cut:])
    streamed = joined(first + last)
    call = generation(parts)
    whole = AssistantMessage(str, Answer.whole(call, end), CUSTOM)
    message = json.loads(f"{{{whole.members_json()}}}")
    assert message.pop("content") == (streamed.pop("content", None if "tool_calls" in streamed else ""))
    for calls in (message.get("tool_calls", ()), streamed.get("tool_calls", ())):
        assert len({each.pop("id") for each in calls}) == len(calls)
    assert message == streamed
    assert incomplete_tool_call(call, end) is None
    assert (
        reply.finish_reason_json(end)
        == whole.finish_reason_json(end)
        == ('"tool_calls"' if "tool_calls" in message else '"stop"')
    )
    # Each token's logprobs go with one delta, in order.
    assert [told for told in beside_first + beside_last if told != "null"] == names
    assert len(first + last) == len(beside_first + beside_last)


@pytest.mark.parametrize(
    ("arguments", "reason", "told", "why"),
    [
        ("{}", FinishReason.EOS, "tool_calls", None),
        ('{"a": [1', FinishReason.LENGTH, "length", "EOF while parsing a value at line 1 column 8"),
        ('{"a": 1}', FinishReason.LENGTH, "length", None),
        ('{"a', FinishReason.STOP, "stop", "EOF while parsing a value at line 1 column 3"),
        ("", FinishReason.EOS, "stop", "EOF while parsing a value at line 1 column 0"),
        ("{a}", FinishReason.EOS, "stop", "object keys must be strings at line 1 column 2"),
    ],
)
def test_tool_calls_that_are_cut_off(arguments: str, reason: FinishReason, told: str, why: str | None) -> None:
    parts = [[AnswerPart(0, PartKind.CALL, "f"), AnswerPart(0, PartKind.ARGUMENTS, arguments)]]
    end = End(0, reason, text='f("')
    assert Answer.whole(generation(parts), end).outcome(end) == told
    error = incomplete_tool_call(generation(parts), end)
    assert (None if error is None else error.message) == (
        None if why is None else f'Tool error: Failed to parse generated text: {why} "f(\\""'
    )


def test_text_without_tool_calls_is_never_incomplete() -> None:
    call = generation([[AnswerPart(0, PartKind.TEXT, "{")]])
    assert incomplete_tool_call(call, End(0, FinishReason.LENGTH)) is None
