"""OutputProcessor: top-n alternatives and answer parts per row, and the text of single tokens."""

from typing import Any

import pytest

from tests.tokenizer.harness import API, OTHER, PoolHarness, ids_of
from tests.tokenizer.vocabularies import KINDS, byte_level, sentencepiece
from tgi.microkernel.messages.codec import (
    FLOAT32,
    INT32,
    UINT32,
    pack_column,
    unpack_float32,
    unpack_int32,
    unpack_uint32,
)
from tgi.microkernel.messages.protocol import AnswerPart, Generate, PartKind, Prompted, Tokens
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.tokenizer.output_processor import TextsBuilder


def step(*rows: tuple[int, list[tuple[int, list[int]]]]) -> Tokens:
    """A Tokens message: (rid, [(id, top-n ids)]) per request."""
    tokens = [token for _, row in rows for token in row]
    top = [number for _, numbers in tokens for number in numbers]
    return Tokens(
        pack_column(UINT32, [rid for rid, _ in rows]),
        pack_column(UINT32, [len(row) for _, row in rows]),
        pack_column(INT32, [number for number, _ in tokens]),
        pack_column(FLOAT32, [-1.0] * len(tokens)),
        pack_column(UINT32, [len(numbers) for _, numbers in tokens]),
        pack_column(INT32, top),
        pack_column(FLOAT32, [-number / 4 for number in top]),
    )


def tops(texts: Any) -> list[tuple[list[int], list[str]]]:
    """The top-n ids and texts of each token."""
    found, at = [], 0
    assert unpack_float32(texts.top_logprobs) == [-number / 4 for number in unpack_int32(texts.top_ids)]
    assert len(unpack_uint32(texts.top_counts)) == len(texts.texts)
    for count in unpack_uint32(texts.top_counts):
        found.append((unpack_int32(texts.top_ids)[at : at + count], texts.top_texts[at : at + count]))
        at += count
    assert at == len(texts.top_texts) == len(texts.top_special)
    return found


def test_top_tokens_match_their_rows() -> None:
    harness = PoolHarness()
    one, two, three = harness.submit(1, stop_strings=["b"]), harness.submit(2), harness.submit(1, api=OTHER)
    (a,), (b,), (c,) = ids_of("a"), ids_of("b"), ids_of("c")
    harness.send_tokens((two.rid, [c]))
    harness.pool.handle(
        harness.scheduler,
        step(
            (three.rid, [(a, [a])]),
            (999, [(c, [c, c])]),
            (one.rid, [(a, [a, 0]), (b, [b]), (c, [c, a])]),  # ends with b, which is sent with its End
            (two.rid, [(a, []), (b, [b, a, c])]),
        ),
    )
    harness.send_tokens((two.rid, [c]))
    harness.send_end(one.rid)
    going, last, _ = harness.received_by(API)
    assert (going.texts, last.texts) == (["c", "a", "b", "c"], ["a", "b"])
    assert tops(going) == [([], []), ([], []), ([b, a, c], ["b", "a", "c"]), ([], [])]
    assert tops(last) == [([a, 0], ["a", "<|pad|>"]), ([b], ["b"])]
    assert ([*going.top_special], [*last.top_special]) == ([0, 0, 0], [0, 1, 0])
    (texts,) = harness.received_by(OTHER)
    assert tops(texts) == [([a], ["a"])]


def test_answer_parts_match_their_rows() -> None:
    harness = PoolHarness(template="<think>")  # all prompts end within reasoning
    chat = b'{"messages": []}'
    rids = []
    for rid in (1, 2):
        harness.pool.handle(API, Generate(rid, "", SamplingParams(5), chat=chat, max_new_tokens=5))
        (add,) = harness.received_by(harness.scheduler)
        rids.append(add.rid)
    harness.send_tokens((rids[0], ids_of("a")), (rids[1], ids_of("b") + ids_of("c")))
    harness.send_tokens((rids[0], ids_of("d")), (rids[1], [*ids_of("e"), *ids_of("\n"), *ids_of("<")]))
    harness.send_end(rids[1])
    going, last, end = (message for message in harness.received_by(API) if not isinstance(message, Prompted))
    kind = PartKind.REASONING
    assert going.parts == [
        AnswerPart(0, kind, "a"),
        AnswerPart(1, kind, "b"),
        AnswerPart(2, kind, "c"),
        AnswerPart(3, kind, "d"),
    ]
    assert last.parts == [AnswerPart(0, kind, "e")]
    assert end.parts == [AnswerPart(0, kind, "\n<")]


def test_no_top_tokens_for_apis_that_did_not_request_them() -> None:
    harness = PoolHarness()
    one, other = harness.submit(1), harness.submit(1, api=OTHER)
    (a,) = ids_of("a")
    harness.pool.handle(harness.scheduler, step((one.rid, [(a, [a])]), (other.rid, [(a, [])])))
    assert len(harness.received_by(API)[0].top_texts) == 1
    (texts,) = harness.received_by(OTHER)
    assert texts[7:] == (b"", b"", b"", b"", [], [], [])


def test_parts_of_characters_have_their_bytes() -> None:
    """Of tokens and alternatives, each id once; whatever else is in the step."""
    harness = PoolHarness()
    one = harness.submit(1)
    a, *parts = ids_of("a👍")
    harness.pool.handle(harness.scheduler, step((one.rid, [(a, [a, parts[0]]), *((part, [part]) for part in parts)])))
    (texts,) = harness.received_by(API)
    assert len(parts) > 1
    assert {token_id for token_id, _ in texts.partial} == {*parts}
    data = dict(texts.partial)
    assert b"".join(data[part] for part in parts).decode() == "👍" == "".join(texts.texts[1:])


def test_token_text() -> None:
    vocabulary = byte_level()
    assert vocabulary.token_text(0) == "<|pad|>"
    assert vocabulary.token_text(ids_of("a👍")[0]) == "a"
    assert "\ufffd" in vocabulary.token_text(ids_of("👍")[0])
    assert vocabulary.token_text(99_999_999) == ""
    byte = sentencepiece().tokenizer.token_to_id("<0xE2>")
    assert sentencepiece().token_text(byte) == "\ufffd"


@pytest.mark.parametrize("kind", KINDS)
def test_token_text_matches_the_tokenizers_package(kind: str) -> None:
    vocabulary = KINDS[kind]()
    space = vocabulary.tokenizer.token_to_id("<0x20>")  # the package strips it as at the beginning of a text
    for number in {*range(len(vocabulary.pieces))} - {space}:
        assert vocabulary.token_text(number) == vocabulary.tokenizer.decode([number], skip_special_tokens=False)


def test_last_row_is_split_with_its_columns() -> None:
    builder = TextsBuilder(byte_level())
    for rid, token_ids, held in ((7, [5, 6], 0), (8, [9], 3)):
        builder.rids.append(rid)
        builder.counts.append(len(token_ids))
        builder.ids += pack_column(INT32, token_ids)
        builder.logprobs += pack_column(FLOAT32, [-1.0] * len(token_ids))
        for token_id in token_ids:
            builder.texts.append(f"t{token_id}")
            builder.special.append(0)
        if held:
            builder.set_held_characters(held)
        builder.add_parts([("text", f"part of {rid}")])
    last, first = builder.split_last_row().build(), builder.build()
    assert unpack_uint32(first.rids) + unpack_uint32(last.rids) == [7, 8]
    assert (unpack_int32(first.token_ids), unpack_int32(last.token_ids)) == ([5, 6], [9])
    assert (first.texts, last.texts) == (["t5", "t6"], ["t9"])
    assert (first.held_chars, unpack_uint32(last.held_chars)) == (pack_column(UINT32, [0, 0]), [3])
    assert (first.parts, last.parts) == ([AnswerPart(1, "text", "part of 7")], [AnswerPart(0, "text", "part of 8")])
