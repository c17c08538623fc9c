"""What OpenAI's routes share: parameters, usage, and text that is shown no sooner than it may be."""

import json
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tgi.api import openai
from tgi.api.columns import Columns
from tgi.api.openai import Usage, Visible
from tgi.api.serde import Body
from tgi.api.shapes.chat import ChatRequest
from tgi.api.tools import Offer
from tgi.kernel.messages import End, Reason

decode = Body(ChatRequest).decode


def chat(**fields: object) -> ChatRequest:
    return decode(json.dumps({"messages": [{"role": "user", "content": "x"}], **fields}).encode())


def columns(texts: list[str], special: list[bool], held: list[int]) -> Columns:
    count = len(texts)
    return Columns(
        array("i", range(count)), array("f", [0] * count), bytearray(special), texts, array("I", held), [], []
    )


@given(st.data())
def test_pieces_are_the_final_text_and_never_show_what_is_held(data: st.DataObject) -> None:
    """Any tokens, any amounts held, cut into any steps: the pieces join to the end's text."""
    texts = data.draw(st.lists(st.text("ab", max_size=3), min_size=1, max_size=8))
    special = data.draw(st.lists(st.booleans(), min_size=len(texts), max_size=len(texts)))
    visible = "".join(text for text, hidden in zip(texts, special, strict=True) if not hidden)
    # As the tokenizer does: what is free only grows, and the end's text has at least what was free before it.
    free, lengths = 0, []
    length = 0
    for text, hidden in zip(texts, special, strict=True):
        length += 0 if hidden else len(text)
        free = data.draw(st.integers(free, length))
        lengths.append((length, free))
    held = [length - free for length, free in lengths]
    before = lengths[-2][1] if len(lengths) > 1 else 0
    final = visible[: data.draw(st.integers(before, len(visible)))]
    end = End(0, Reason.STOP, text=final)
    cut = data.draw(st.integers(0, len(texts) - 1))
    shown = Visible()
    pieces = shown.pieces(columns(texts[:cut], special[:cut], held[:cut]), None)
    assert len("".join(pieces)) == (lengths[cut - 1][1] if cut else 0)
    pieces += shown.pieces(columns(texts[cut:], special[cut:], held[cut:]), end)
    assert len(pieces) == len(texts)
    assert "".join(pieces) == final


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"temperature": 0}, "do_sample", False),
        ({"temperature": 0}, "temperature", None),
        ({}, "do_sample", True),
        ({"top_p": 1.0}, "top_p", None),
        ({"top_k": 0}, "top_k", None),
        ({"top_k": -1}, "top_k", None),
        ({"top_k": -2}, "top_k", -2),  # for the rules to refuse
        ({"typical_p": 1}, "typical_p", None),
        ({"min_p": 0}, "min_p", 0),
        ({"min_p": 0.5}, "min_p", 0.5),
        ({"stop": "a"}, "stop", ["a"]),
        ({"stop": None}, "stop", []),
        ({"repetition_penalty": 1.5}, "repetition_penalty", 1.5),
    ],
)
def test_parameters(fields: dict[str, object], name: str, value: object) -> None:
    assert getattr(openai.parameters(chat(**fields), (), None, 0), name) == value


def test_max_tokens_has_two_names() -> None:
    assert chat(max_tokens=3).max_new_tokens == chat(max_completion_tokens=3, max_tokens=None).max_new_tokens == 3


def test_the_prompt_of_a_chat_keeps_what_was_sent() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "é"}], "name": "n"},
        {
            "role": "assistant",
            "tool_calls": [call],
        },
        {"role": "tool", "content": "3", "tool_call_id": "1"},
    ]
    request = decode(json.dumps({"messages": messages, "add_generation_prompt": False, "seed": None}).encode())
    assert json.loads(openai.chat_prompt(request, Offer())) == {"messages": messages, "add_generation_prompt": False}


def test_a_prompt_counts_once_however_many_choices_it_has() -> None:
    usage = Usage(choices=2)
    for place, prompt_tokens in enumerate((5, 5, 7, 7)):
        usage.add(place, End(0, Reason.EOS, prompt_tokens=prompt_tokens), 3)
    assert json.loads(usage.render()) == {"prompt_tokens": 12, "completion_tokens": 12, "total_tokens": 24}
