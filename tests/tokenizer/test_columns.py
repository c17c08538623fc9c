"""The likeliest tokens beside the drawn ones reach the api that asked, in words."""

from typing import Any

import pytest

from tests.tokenizer.house import API, OTHER, House, ids_of
from tests.tokenizer.vocabularies import KINDS, byte_level, sentencepiece
from tgi.kernel.answer import Kind, Part, Prompted
from tgi.kernel.messages import Generate, Sampling, Tokens
from tgi.kernel.pack import FLOAT32, INT32, UINT32, floats, ints, pack, uints


def step(*rows: tuple[int, list[tuple[int, list[int]]]]) -> Tokens:
    """A Tokens: (rid, [(id, ids on top)]) per request."""
    tokens = [token for _, row in rows for token in row]
    top = [number for _, numbers in tokens for number in numbers]
    return Tokens(
        pack(UINT32, [rid for rid, _ in rows]),
        pack(UINT32, [len(row) for _, row in rows]),
        pack(INT32, [number for number, _ in tokens]),
        pack(FLOAT32, [-1.0] * len(tokens)),
        pack(UINT32, [len(numbers) for _, numbers in tokens]),
        pack(INT32, top),
        pack(FLOAT32, [-number / 4 for number in top]),
    )


def tops(texts: Any) -> list[tuple[list[int], list[str]]]:
    """Of each token: the ids and the texts on top."""
    found, at = [], 0
    assert floats(texts.top_logprobs) == [-number / 4 for number in ints(texts.top_ids)]
    assert len(uints(texts.top_counts)) == len(texts.texts)
    for count in uints(texts.top_counts):
        found.append((ints(texts.top_ids)[at : at + count], texts.top_texts[at : at + count]))
        at += count
    assert at == len(texts.top_texts) == len(texts.top_special)
    return found


def test_tops_go_with_their_tokens() -> None:
    house = House()
    one, two, three = house.ask(1, stop=["b"]), house.ask(2), house.ask(1, api=OTHER)
    (a,), (b,), (c,) = ids_of("a"), ids_of("b"), ids_of("c")
    house.tokens((two.rid, [c]))
    house.pool.handle(
        house.scheduler,
        step(
            (three.rid, [(a, [a])]),
            (999, [(c, [c, c])]),
            (one.rid, [(a, [a, 0]), (b, [b]), (c, [c, a])]),  # ends with b: goes up with its End
            (two.rid, [(a, []), (b, [b, a, c])]),
        ),
    )
    house.tokens((two.rid, [c]))
    house.end(one.rid)
    going, last, _ = house.said(API)
    assert (going.texts, last.texts) == (["c", "a", "b", "c"], ["a", "b"])
    assert tops(going) == [([], []), ([], []), ([b, a, c], ["b", "a", "c"]), ([], [])]
    assert tops(last) == [([a, 0], ["a", "<|pad|>"]), ([b], ["b"])]
    assert ([*going.top_special], [*last.top_special]) == ([0, 0, 0], [0, 1, 0])
    (texts,) = house.said(OTHER)
    assert tops(texts) == [([a], ["a"])]


def test_parts_go_with_their_tokens() -> None:
    house = House(template="<think>")  # all prompts end within reasoning
    chat = b'{"messages": []}'
    rids = []
    for rid in (1, 2):
        house.pool.handle(API, Generate(rid, "", Sampling(5), chat=chat, max_new_tokens=5))
        (add,) = house.said(house.scheduler)
        rids.append(add.rid)
    house.tokens((rids[0], ids_of("a")), (rids[1], ids_of("b") + ids_of("c")))
    house.tokens((rids[0], ids_of("d")), (rids[1], [*ids_of("e"), *ids_of("\n"), *ids_of("<")]))
    house.end(rids[1])
    going, last, end = (message for message in house.said(API) if not isinstance(message, Prompted))
    kind = Kind.REASONING
    assert going.parts == [Part(0, kind, "a"), Part(1, kind, "b"), Part(2, kind, "c"), Part(3, kind, "d")]
    assert last.parts == [Part(0, kind, "e")]
    assert end.parts == [Part(0, kind, "\n<")]


def test_nothing_is_on_top_of_an_api_that_did_not_ask() -> None:
    house = House()
    one, other = house.ask(1), house.ask(1, api=OTHER)
    (a,) = ids_of("a")
    house.pool.handle(house.scheduler, step((one.rid, [(a, [a])]), (other.rid, [(a, [])])))
    assert len(house.said(API)[0].top_texts) == 1
    (texts,) = house.said(OTHER)
    assert texts[7:] == (b"", b"", b"", b"", [], [])


def test_a_token_by_itself() -> None:
    vocabulary = byte_level()
    assert vocabulary.text(0) == "<|pad|>"
    assert vocabulary.text(ids_of("a👍")[0]) == "a"
    assert "\ufffd" in vocabulary.text(ids_of("👍")[0])
    assert vocabulary.text(99_999_999) == ""
    byte = sentencepiece().tokenizer.token_to_id("<0xE2>")
    assert sentencepiece().text(byte) == "\ufffd"


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_by_itself_as_the_package_decodes_it(kind: str) -> None:
    vocabulary = KINDS[kind]()
    space = vocabulary.tokenizer.token_to_id("<0x20>")  # the package strips it, as if it began a text
    for number in {*range(len(vocabulary.pieces))} - {space}:
        assert vocabulary.text(number) == vocabulary.tokenizer.decode([number], skip_special_tokens=False)
