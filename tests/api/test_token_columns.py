"""Token columns: cutting them out of a message, taking them in parts, and prompt columns."""

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tgi.api.requests import Generation, WakeEvent
from tgi.api.token_columns import PromptColumns, TextsColumns, TopToken
from tgi.microkernel.messages.codec import FLOAT32, INT32, UINT32, pack_column
from tgi.microkernel.messages.protocol import AnswerPart, Generate, PartKind, PromptTokens, Texts
from tgi.microkernel.messages.sampling_params import SamplingParams


def message(count: int, **optional: Any) -> Texts:
    """`count` tokens of one request: ids 0, 1, … and texts "0", "1", …"""
    return Texts(
        pack_column(UINT32, [1]), pack_column(UINT32, [count]), pack_column(INT32, range(count)),
        pack_column(FLOAT32, [-0.5] * count), bytes(count), [str(token) for token in range(count)], **optional,
    )  # fmt: skip


def generation(hide_stop: bool = False, top_n: int = 0) -> Generation:
    sampling = SamplingParams(0, top_n=top_n)
    return Generation(Generate(1, "", sampling, hide_stop=hide_stop), True, WakeEvent())


@given(st.data())
def test_tokens_are_taken_once_and_in_order(data: st.DataObject) -> None:
    """For any cuts of a message, and any maximum of tokens that are taken at once."""
    count = data.draw(st.integers(1, 12))
    cuts = sorted(data.draw(st.sets(st.integers(1, count - 1), max_size=4))) if count > 1 else []
    columns = TextsColumns.from_message(message(count, held_chars=pack_column(UINT32, range(count))))
    request = generation(hide_stop=True)
    taken, held = [], []
    for start, stop in zip([0, *cuts], [*cuts, count], strict=True):
        request.add_tokens(columns, start, stop)
        tokens = request.take_tokens(data.draw(st.none() | st.integers(1, 5)))
        assert len({len(column) for column in (tokens.ids, tokens.logprobs, tokens.special, tokens.texts)}) == 1
        taken += tokens.texts
        held += tokens.held
    taken += request.take_tokens().texts
    assert taken == [str(token) for token in range(count)]
    assert held == [*range(len(held))]
    assert request.generated_ids == array("i", range(count))
    assert not request.unread_tokens.texts


def test_columns_that_no_request_needs_are_filled_for_one_that_does() -> None:
    """In a message such a column is empty."""
    columns = TextsColumns.from_message(message(3))
    request = generation(hide_stop=True, top_n=1)
    request.has_parts = True
    request.add_tokens(columns, 1, 3)
    tokens = request.take_tokens()
    assert (tokens.held, tokens.tops, tokens.parts) == (array("I", [0, 0]), [[], []], [[], []])
    plain = generation()
    plain.add_tokens(columns, 1, 3)
    tokens = plain.take_tokens()
    assert (tokens.held, tokens.tops, tokens.parts) == (array("I"), [], [])


def test_top_tokens_and_parts_are_grouped_by_token() -> None:
    part = AnswerPart(2, PartKind.TEXT, "x")
    columns = TextsColumns.from_message(
        message(
            3,
            top_counts=pack_column(UINT32, [1, 0, 2]),
            top_ids=pack_column(INT32, [7, 8, 9]),
            top_logprobs=pack_column(FLOAT32, [-1.0, -2.0, -3.0]),
            top_special=b"\0\1\0",
            top_texts=["a", "b", "c"],
            parts=[part],
        )
    )
    first, second, third = TopToken(7, "a", -1.0, 0), TopToken(8, "b", -2.0, 1), TopToken(9, "c", -3.0, 0)
    assert columns.tops == [[first], [], [second, third]]
    assert columns.parts == [[], [], [part]]


@pytest.mark.parametrize("top_n", [0, 2])
def test_prompt_columns(top_n: int) -> None:
    """Of several top tokens with one text the likeliest is kept."""
    prompt = PromptColumns.empty()
    for token in range(2):
        prompt.extend(
            PromptTokens(
                1,
                pack_column(INT32, [token]),
                pack_column(FLOAT32, [-0.5]),
                pack_column(INT32, [token]),
                [str(token)],
                pack_column(INT32, [3, 4][:top_n]),
                pack_column(FLOAT32, [-1.0, -2.0][:top_n]),
                ["same", "same"][:top_n],
            )
        )
    assert (prompt.ids, prompt.starts, prompt.texts) == (array("i", [0, 1]), array("i", [0, 1]), ["0", "1"])
    assert prompt.tops == [{"same": -1.0} if top_n else {}] * 2
