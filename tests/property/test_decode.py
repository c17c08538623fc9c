"""Incremental detokenization gives the text of the whole sequence, and never splits a character."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tokenizer.vocabularies import KINDS, byte_level, sentencepiece
from tgi.tokenizer.detokenizer import create_detokenizer
from tgi.tokenizer.vocabulary import Vocabulary

pytestmark = pytest.mark.fuzz

TEXTS = st.text(max_size=60)


def ids_of(vocabulary: Vocabulary) -> st.SearchStrategy[list[int]]:
    """Any ids, many of them special or parts of characters, and some outside the vocabulary (padding)."""
    special = sorted(vocabulary.special_ids)
    parts = [number for number, piece in enumerate(vocabulary.pieces) if isinstance(piece, bytes)]
    return st.lists(
        st.integers(0, len(vocabulary.pieces) + 3) | st.sampled_from(special) | st.sampled_from(parts), max_size=60
    )


def fed(vocabulary: Vocabulary, ids: list[int], context: list[int] | None = None) -> list[str]:
    state = create_detokenizer(vocabulary, context or [])
    return [state.decode_token(number) for number in ids]


def plain(vocabulary: Vocabulary, ids: list[int]) -> str:
    """The streamed text without special tokens."""
    pairs = zip(ids, fed(vocabulary, ids), strict=True)
    return "".join(text for number, text in pairs if number not in vocabulary.special_ids)


@given(ids_of(byte_level()))
def test_byte_level_detokenizer_matches_the_package(ids: list[int]) -> None:
    whole = byte_level().tokenizer.decode(ids, skip_special_tokens=True)
    text = plain(byte_level(), ids)
    assert whole.startswith(text)
    held = whole[len(text) :]
    assert held.strip("\ufffd") == ""  # at most an incomplete character is held back, of up to three bytes
    assert len(held) <= 3


@given(ids_of(byte_level()), st.integers(0, 60))
def test_streamed_text_is_never_retracted(ids: list[int], cut: int) -> None:
    assert plain(byte_level(), ids).startswith(plain(byte_level(), ids[:cut]))


@pytest.mark.parametrize("kind", ["sentencepiece", "wordpiece", "metaspace"])
def test_window_detokenizer_matches_the_package(kind: str) -> None:
    vocabulary = KINDS[kind]()
    # The package decodes a run of byte tokens that is not UTF-8 to U+FFFD only, which a stream cannot foresee.
    ordinary = [number for number, piece in enumerate(vocabulary.pieces) if not isinstance(piece, bytes)]

    @given(st.lists(st.sampled_from([*ordinary, len(vocabulary.pieces)]), max_size=60))
    def holds(ids: list[int]) -> None:
        assert plain(vocabulary, ids) == vocabulary.tokenizer.decode(ids, skip_special_tokens=True)

    holds()


@given(TEXTS)
def test_sentencepiece_streams_any_text_with_its_byte_tokens(text: str) -> None:
    vocabulary = sentencepiece()
    ids = vocabulary.tokenizer.encode(text).ids
    assert plain(vocabulary, ids) == vocabulary.tokenizer.decode(ids, skip_special_tokens=True)


@given(st.binary(max_size=40))
def test_byte_tokens_are_decoded_as_utf8(data: bytes) -> None:
    vocabulary = sentencepiece()
    number = {piece: number for number, piece in enumerate(vocabulary.pieces) if isinstance(piece, bytes)}
    vocab = vocabulary.tokenizer.get_vocab()
    ids = [number[bytes([byte])] for byte in data]
    whole = data.decode(errors="replace")
    assert "".join(fed(vocabulary, [*ids, vocab["a"]])) == whole + "a"
    assert "".join(fed(vocabulary, [*ids, vocab["▁a"]])) == whole + (" a" if data else "a")


@given(TEXTS, TEXTS)
def test_prompt_context_determines_leading_spaces(before: str, after: str) -> None:
    vocabulary = sentencepiece()
    prompt = vocabulary.tokenizer.encode("x" + before).ids
    ids = vocabulary.tokenizer.encode(after + "y", add_special_tokens=False).ids
    known = vocabulary.tokenizer.decode(prompt, skip_special_tokens=True)
    whole = vocabulary.tokenizer.decode(prompt + ids, skip_special_tokens=True)
    assert known + "".join(fed(vocabulary, ids, prompt[-5:])) == whole


@given(TEXTS)
def test_no_token_text_contains_half_a_character(text: str) -> None:
    for vocabulary in (byte_level(), sentencepiece()):
        ids = vocabulary.tokenizer.encode(text, add_special_tokens=False).ids
        texts = fed(vocabulary, ids)
        if "\ufffd" not in text:
            assert not any("\ufffd" in piece for piece in texts)
