"""Divided answers: however they are cut, the pieces join to the whole."""

import json
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tgi.api.calls import Bell, Generation
from tgi.api.columns import NOTHING, Columns
from tgi.api.parts import Reply, unreadable
from tgi.kernel.answer import Kind, Part
from tgi.kernel.messages import End, Generate, Reason, Sampling


def columns(parts: list[list[Part]]) -> Columns:
    count = len(parts)
    return NOTHING._replace(ids=array("i", range(count)), texts=["x"] * count, parts=parts)


def generation(parts: list[list[Part]]) -> Generation:
    call = Generation(Generate(0, "", Sampling(0)), False, Bell())
    call.divided = True
    call.fresh = columns(parts)
    return call


def pieces(text: str) -> st.SearchStrategy[list[str]]:
    """A text cut at any places."""
    cuts = st.lists(st.integers(0, len(text)), max_size=4).map(sorted)
    return cuts.map(lambda at: [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)])


ARGUMENTS = st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=5), max_size=3)


@st.composite
def answers(draw: st.DrawFn) -> list[Part]:
    """Reasoning, text and calls, in pieces."""
    said = [Part(0, Kind.REASONING, piece) for piece in draw(st.lists(st.text(min_size=1, max_size=4), max_size=3))]
    said += [Part(0, Kind.TEXT, piece) for piece in draw(st.lists(st.text(min_size=1, max_size=4), max_size=3))]
    for name in draw(st.lists(st.text("fgh", min_size=1, max_size=3), max_size=3)):
        text = json.dumps(draw(ARGUMENTS), ensure_ascii=draw(st.booleans()))
        said.append(Part(0, Kind.CALL, name))
        said += [Part(0, Kind.ARGUMENTS, piece) for piece in draw(pieces(text))]
    return said


def joined(deltas: list[str]) -> dict[str, Any]:
    """What a client makes of deltas, as OpenAI's does: strings are joined, entries of lists found by their index."""
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
                    calls[-1]["function"]["arguments"] += piece["function"]["arguments"]
    return message


@given(st.data())
def test_deltas_join_to_the_message(data: st.DataObject) -> None:
    said = data.draw(answers())
    tokens = data.draw(st.integers(1, 6))
    places = sorted(data.draw(st.lists(st.integers(0, tokens), min_size=len(said), max_size=len(said))))
    parts = [[part for part, at in zip(said, places, strict=True) if at == token] for token in range(tokens)]
    rest = [part for part, at in zip(said, places, strict=True) if at == tokens]
    end = End(0, Reason.EOS, parts=rest)
    reply = Reply()
    cut = data.draw(st.integers(0, tokens - 1))
    names = [f"logprob {token}" for token in range(tokens)]
    first, beside_first = reply.deltas(columns(parts[:cut]), None, names[:cut])
    last, beside_last = reply.deltas(columns(parts[cut:]), end, names[cut:])
    streamed = joined(first + last)
    call = generation(parts)
    whole = Reply.of(call, end)
    message = json.loads(f"{{{whole.message()}}}")
    assert message.pop("content") == (streamed.pop("content", None if "tool_calls" in streamed else ""))
    for calls in (message.get("tool_calls", ()), streamed.get("tool_calls", ())):
        assert len({each.pop("id") for each in calls}) == len(calls)
    assert message == streamed
    assert unreadable(call, end) is None
    assert (
        reply.finish_reason(end)
        == whole.finish_reason(end)
        == ('"tool_calls"' if "tool_calls" in message else '"stop"')
    )
    # Each token's logprobs stand beside one delta, in order.
    assert [told for told in beside_first + beside_last if told != "null"] == names
    assert len(first + last) == len(beside_first + beside_last)


@pytest.mark.parametrize(
    ("arguments", "reason", "told", "why"),
    [
        ("{}", Reason.EOS, "tool_calls", None),
        ('{"a": [1', Reason.LENGTH, "length", "EOF while parsing a value at line 1 column 8"),
        ('{"a": 1}', Reason.LENGTH, "length", None),
        ('{"a', Reason.STOP, "stop", "EOF while parsing a value at line 1 column 3"),
        ("", Reason.EOS, "stop", "EOF while parsing a value at line 1 column 0"),
        ("{a}", Reason.EOS, "stop", "object keys must be strings at line 1 column 2"),
    ],
)
def test_calls_that_end_early(arguments: str, reason: Reason, told: str, why: str | None) -> None:
    parts = [[Part(0, Kind.CALL, "f"), Part(0, Kind.ARGUMENTS, arguments)]]
    end = End(0, reason, text='f("')
    assert Reply.of(generation(parts), end).finish_reason(end) == f'"{told}"'
    error = unreadable(generation(parts), end)
    assert (None if error is None else error.message) == (
        None if why is None else f'Tool error: Failed to parse generated text: {why} "f(\\""'
    )


def test_text_alone_is_never_unreadable() -> None:
    call = generation([[Part(0, Kind.TEXT, "{")]])
    assert unreadable(call, End(0, Reason.LENGTH)) is None
