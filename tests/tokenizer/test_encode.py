"""Text to ids, byte offsets, and what a vocabulary takes from its files."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from scripts.make_model import TEXT
from tests.tokenizer.vocabularies import KINDS, byte_level, sentencepiece
from tgi.hub.card import read_card
from tgi.hub.tokens import special_tokens
from tgi.kernel.errors import UserError
from tgi.kernel.pack import ints
from tgi.tokenizer import encode
from tgi.tokenizer.vocabulary import Vocabulary


@pytest.mark.parametrize("kind", KINDS)
def test_offsets_are_bytes_of_the_input(kind: str) -> None:
    vocabulary = KINDS[kind]()
    text = "Le garçon naïf → 今天 👍🏽 ok\0!"
    found = encode.tokenized(vocabulary, 7, text, True)
    assert (found.rid, found.error) == (7, "")
    data = text.encode()
    reference = vocabulary.tokenizer.encode(text)
    assert ints(found.ids) == reference.ids
    slices = [data[a:b].decode() for a, b in zip(ints(found.starts), ints(found.stops), strict=True)]
    assert slices == [text[a:b] for a, b in reference.offsets]
    assert [*found.special] == [number in vocabulary.special for number in reference.ids]


def test_special_tokens_added_or_not() -> None:
    with_them = encode.tokenized(sentencepiece(), 1, "Hello", True)
    without = encode.tokenized(sentencepiece(), 1, "Hello", False)
    assert ints(with_them.ids) == [1, *ints(without.ids)]
    assert (ints(with_them.starts)[0], ints(with_them.stops)[0], with_them.special[0]) == (0, 0, 1)


def test_a_special_token_written_in_the_text_is_one() -> None:
    found = encode.tokenized(byte_level(), 1, "é<|eos|>x", True)
    at = ints(found.ids).index(2)
    assert (ints(found.starts)[at], ints(found.stops)[at], found.special[at]) == (2, 9, 1)


@pytest.mark.parametrize("truncate", [None, 1, 5, 10_000])
def test_truncate_keeps_the_end(truncate: int | None) -> None:
    ids = byte_level().tokenizer.encode(TEXT).ids
    prompt = encode.prompt(byte_level(), TEXT, True, truncate)
    expected = ids if truncate is None else ids[-truncate:]
    assert (ints(prompt.ids), prompt.tokens) == (expected, len(expected))


def test_text_that_is_not_unicode_is_refused_in_words() -> None:
    with pytest.raises(encode.EncodeError, match="tokenizer error"):
        encode.prompt(byte_level(), "a\ud800b", True, None)
    assert encode.tokenized(byte_level(), 3, "a\ud800b", True).error.startswith("tokenizer error")


def test_empty_text() -> None:
    assert encode.prompt(byte_level(), "", True, None).tokens == 0
    assert encode.tokenized(byte_level(), 1, "", True).ids == b""


def directory_with(directory: Path, base: Path, **config: object) -> Path:
    """A copy of a model directory with other settings of its tokenizer."""
    for path in base.iterdir():
        (directory / path.name).symlink_to(path)
    (directory / "tokenizer_config.json").unlink()
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path, tiny_llama: Path) -> None:
    directory = directory_with(tmp_path, tiny_llama)
    tokenizer = Tokenizer.from_file(str(tiny_llama / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=4)
    (directory / "tokenizer.json").unlink()
    tokenizer.save(str(directory / "tokenizer.json"))
    vocabulary = Vocabulary.load(read_card(directory))
    assert encode.prompt(vocabulary, TEXT, True, None).tokens > 100
    assert encode.prompt(vocabulary, "a", True, None).tokens == 1


def test_tokens_that_only_the_configuration_calls_special(tmp_path: Path, tiny_llama: Path) -> None:
    vocabulary = Vocabulary.load(read_card(tiny_llama))
    number = vocabulary.tokenizer.token_to_id("a")
    assert number not in vocabulary.special
    directory = directory_with(tmp_path, tiny_llama, unk_token={"content": "a"}, additional_special_tokens=["nowhere"])
    assert special_tokens(directory) == {"unk_token": "a", "nowhere": "nowhere"}
    named = Vocabulary.load(read_card(directory))
    assert number in named.special
    assert len(named.pieces) == len(vocabulary.pieces)


def test_eos_ids_are_the_models(tiny_llama: Path) -> None:
    assert Vocabulary.load(read_card(tiny_llama)).eos_ids == {2}


def test_a_damaged_or_missing_tokenizer_is_named(tmp_path: Path, tiny_llama: Path) -> None:
    directory = directory_with(tmp_path, tiny_llama)
    (directory / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        Vocabulary.load(read_card(directory))
    (directory / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(UserError, match="damaged"):
        Vocabulary.load(read_card(directory))


def vllms_bad_words(encoded: Callable[[str], list[int]], words: list[str]) -> list[list[int]]:
    """As vLLM's SamplingParams.update_from_tokenizer has them."""
    found: list[list[int]] = []
    for word in words:
        plain, spaced = encoded(word.lstrip()), encoded(" " + word.lstrip())
        found.append(plain)
        if spaced[0] != plain[0] and len(spaced) == len(plain):
            found.append(spaced)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_bad_words_are_vllms(kind: str) -> None:
    vocabulary = KINDS[kind]()
    words = [*[*dict.fromkeys(TEXT.split())][:60], "a", " the", "\n the", "naïve 👍", "of the", "zzz ", "."]

    def encoded(text: str) -> list[int]:
        return list(vocabulary.tokenizer.encode(text, add_special_tokens=False).ids)

    found = encode.bad_words(vocabulary, words)
    assert found == vllms_bad_words(encoded, words)
    if vocabulary is byte_level():  # others have one form for both, or put a token before the space
        assert len(words) < len(found) < 2 * len(words)


def test_a_bad_word_that_the_tokenizer_drops_or_cannot_read() -> None:
    vocabulary = KINDS["wordpiece"]()
    assert encode.bad_words(vocabulary, ["\u200b" * 3, "the"])[-1] == encode.bad_words(vocabulary, ["the"])[-1]
    with pytest.raises(encode.EncodeError, match="tokenizer error"):
        encode.bad_words(byte_level(), ["a\ud800b"])
