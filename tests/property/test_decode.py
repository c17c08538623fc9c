"""Token by token or at once: any ids give the same text, and no character is split."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tokenizer.vocabularies import KINDS, byte_level, sentencepiece
from tgi.tokenizer.decode import decoder
from tgi.tokenizer.vocabulary import Vocabulary

TEXTS = st.text(max_size=60)


def ids_of(vocabulary: Vocabulary) -> st.SearchStrategy[list[int]]:
    """Any ids, many of them special or parts of characters, and some beyond the vocabulary, as padding is."""
    special = sorted(vocabulary.special)
    parts = [number for number, piece in enumerate(vocabulary.pieces) if isinstance(piece, bytes)]
    return st.lists(
        st.integers(0, len(vocabulary.pieces) + 3) | st.sampled_from(special) | st.sampled_from(parts), max_size=60
    )


def fed(vocabulary: Vocabulary, ids: list[int], context: list[int] | None = None) -> list[str]:
    state = decoder(vocabulary, context or [])
    return [state.feed(number) for number in ids]


def plain(vocabulary: Vocabulary, ids: list[int]) -> str:
    """The streamed text, special tokens left out."""
    pairs = zip(ids, fed(vocabulary, ids), strict=True)
    return "".join(text for number, text in pairs if number not in vocabulary.special)


@given(ids_of(byte_level()))
def test_byte_level_streams_what_the_package_decodes(ids: list[int]) -> None:
    whole = byte_level().tokenizer.decode(ids, skip_special_tokens=True)
    text = plain(byte_level(), ids)
    assert whole.startswith(text)
    held = whole[len(text) :]
    assert held.strip("\ufffd") == ""  # at most an unfinished character is held back: four bytes, less the last
    assert len(held) <= 3


@given(ids_of(byte_level()), st.integers(0, 60))
def test_what_is_streamed_is_never_taken_back(ids: list[int], cut: int) -> None:
    assert plain(byte_level(), ids).startswith(plain(byte_level(), ids[:cut]))


@pytest.mark.parametrize("kind", ["sentencepiece", "wordpiece", "metaspace"])
def test_windows_stream_what_the_package_decodes(kind: str) -> None:
    vocabulary = KINDS[kind]()
    # A run of byte tokens that is no UTF-8 is all U+FFFD to the package, which a stream cannot know beforehand.
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
def test_byte_tokens_become_characters_as_utf8_says(data: bytes) -> None:
    vocabulary = sentencepiece()
    number = {piece: number for number, piece in enumerate(vocabulary.pieces) if isinstance(piece, bytes)}
    vocab = vocabulary.tokenizer.get_vocab()
    ids = [number[bytes([byte])] for byte in data]
    whole = data.decode(errors="replace")
    assert "".join(fed(vocabulary, [*ids, vocab["a"]])) == whole + "a"
    assert "".join(fed(vocabulary, [*ids, vocab["▁a"]])) == whole + (" a" if data else "a")


@given(TEXTS, TEXTS)
def test_the_prompt_decides_on_leading_spaces_and_is_not_repeated(before: str, after: str) -> None:
    vocabulary = sentencepiece()
    prompt = vocabulary.tokenizer.encode("x" + before).ids
    ids = vocabulary.tokenizer.encode(after + "y", add_special_tokens=False).ids
    known = vocabulary.tokenizer.decode(prompt, skip_special_tokens=True)
    whole = vocabulary.tokenizer.decode(prompt + ids, skip_special_tokens=True)
    assert known + "".join(fed(vocabulary, ids, prompt[-5:])) == whole


@given(TEXTS)
def test_no_token_text_holds_half_a_character(text: str) -> None:
    for vocabulary in (byte_level(), sentencepiece()):
        ids = vocabulary.tokenizer.encode(text, add_special_tokens=False).ids
        texts = fed(vocabulary, ids)
        if "\ufffd" not in text:
            assert not any("\ufffd" in piece for piece in texts)
