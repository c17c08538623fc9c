"""What OpenAI's routes share: parameters, chat prompts, usage, visible text."""

import json
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tgi.api import request_parameters
from tgi.api.answer import VisibleText
from tgi.api.chat_prompt import ToolSelection, chat_prompt_json
from tgi.api.json_body import JsonBody
from tgi.api.openai_output import AssistantMessage, TokenUsage
from tgi.api.shapes.chat import ChatRequest
from tgi.api.token_columns import NO_TOKENS, TokenColumns
from tgi.microkernel.messages.protocol import AnswerPart, End, FinishReason, PartKind

decode = JsonBody(ChatRequest).decode


def chat(**fields: object) -> ChatRequest:
    return decode(json.dumps({"messages": [{"role": "user", "content": "x"}], **fields}).encode())


def columns(texts: list[str], special: list[bool], held: list[int]) -> TokenColumns:
    count = len(texts)
    return TokenColumns(
        array("i", range(count)), array("f", [0] * count), bytearray(special), texts, array("I", held), [], []
    )


@given(st.data())
def test_visible_pieces_join_to_the_final_text_and_never_show_held_text(data: st.DataObject) -> None:
    """For random tokens, held characters and steps."""
    texts = data.draw(st.lists(st.text("ab", max_size=3), min_size=1, max_size=8))
    special = data.draw(st.lists(st.booleans(), min_size=len(texts), max_size=len(texts)))
    visible = "".join(text for text, hidden in zip(texts, special, strict=True) if not hidden)
    # As the tokenizer does: visible text only grows, and the final text includes all that was visible before the end.
    free, lengths = 0, []
    length = 0
    for text, hidden in zip(texts, special, strict=True):
        length += 0 if hidden else len(text)
        free = data.draw(st.integers(free, length))
        lengths.append((length, free))
    held = [length - free for length, free in lengths]
    before = lengths[-2][1] if len(lengths) > 1 else 0
    final = visible[: data.draw(st.integers(before, len(visible)))]
    end = End(0, FinishReason.STOP, text=final)
    cut = data.draw(st.integers(0, len(texts) - 1))
    shown = VisibleText()
    pieces = shown.pieces(columns(texts[:cut], special[:cut], held[:cut]), None)
    assert len("".join(pieces)) == (lengths[cut - 1][1] if cut else 0)
    pieces += shown.pieces(columns(texts[cut:], special[cut:], held[cut:]), end)
    assert len(pieces) == len(texts)
    assert "".join(pieces) == final


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"stop": "a"}, "stop", ["a"]),
        ({"stop": None}, "stop", []),
        ({"max_completion_tokens": 3}, "max_new_tokens", 3),
    ],
)
def test_parameters(fields: dict[str, object], name: str, value: object) -> None:
    assert getattr(request_parameters.openai_generate_parameters(chat(**fields), ()), name) == value


def test_max_tokens_has_two_names() -> None:
    assert chat(max_tokens=3).max_new_tokens == chat(max_completion_tokens=3, max_tokens=None).max_new_tokens == 3


def test_chat_prompt_keeps_all_sent_fields() -> None:
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
    assert json.loads(chat_prompt_json(request, ToolSelection())) == {
        "messages": messages,
        "add_generation_prompt": False,
    }


def test_usage_counts_a_prompt_once_for_all_choices() -> None:
    usages = [TokenUsage(2), TokenUsage(2, details=True), TokenUsage(2, details=True, reasoning=True)]
    for index, (prompt_tokens, cached_tokens) in enumerate(((5, 0), (5, 4), (7, 6), (7, 7))):
        for usage in usages:
            end = End(0, FinishReason.EOS, prompt_tokens=prompt_tokens, cached_tokens=cached_tokens)
            usage.add_generation(index, end, 3, 2)
    counts = {"prompt_tokens": 12, "completion_tokens": 12, "total_tokens": 24}
    cached, reasoning = {"cached_tokens": 6}, {"reasoning_tokens": 8}
    assert [json.loads(usage.to_json()) for usage in usages] == [
        counts,
        {**counts, "prompt_tokens_details": cached},
        {**counts, "prompt_tokens_details": cached, "completion_tokens_details": reasoning},
    ]


def test_tokens_of_reasoning_are_those_of_its_text() -> None:
    think, say = AnswerPart(0, PartKind.REASONING, "x"), AnswerPart(0, PartKind.TEXT, "y")
    # opening delimiter, two tokens of thoughts around one without a part, closing delimiter, the answer
    parts = [[], [think], [], [think], [], [say], []]
    message = AssistantMessage(str)
    message.deltas(NO_TOKENS._replace(parts=parts), None, ())
    assert message.reasoning_tokens == 3
