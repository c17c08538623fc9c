"""Text to ids, byte offsets, and loading of vocabularies."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from scripts.make_model import TEXT
from tests.tokenizer.vocabularies import KINDS, byte_level, sentencepiece, wordpiece
from tgi.hub.model_config import read_model_config
from tgi.hub.tokenizer_files import special_tokens
from tgi.microkernel.errors import UserError
from tgi.microkernel.messages.codec import unpack_int32
from tgi.tokenizer import encoder
from tgi.tokenizer.answers.formats import AnswerFormat
from tgi.tokenizer.encoder import EncodedPrompt, EncodeError
from tgi.tokenizer.vocabulary import Vocabulary


@pytest.mark.parametrize("kind", KINDS)
def test_offsets_are_bytes_of_the_input(kind: str) -> None:
    vocabulary = KINDS[kind]()
    text = "Le garçon naïf → 今天 👍🏽 ok\0!"
    found = encoder.tokenize_text(vocabulary, 7, text, True)
    assert (found.rid, found.error) == (7, "")
    data = text.encode()
    reference = vocabulary.tokenizer.encode(text)
    assert unpack_int32(found.token_ids) == reference.ids
    slices = [
        data[a:b].decode() for a, b in zip(unpack_int32(found.byte_starts), unpack_int32(found.byte_stops), strict=True)
    ]
    assert slices == [text[a:b] for a, b in reference.offsets]
    assert [*found.special] == [number in vocabulary.special_ids for number in reference.ids]


def test_special_tokens_added_or_not() -> None:
    with_them = encoder.tokenize_text(sentencepiece(), 1, "Hello", True)
    without = encoder.tokenize_text(sentencepiece(), 1, "Hello", False)
    assert unpack_int32(with_them.token_ids) == [1, *unpack_int32(without.token_ids)]
    assert (unpack_int32(with_them.byte_starts)[0], unpack_int32(with_them.byte_stops)[0], with_them.special[0]) == (
        0,
        0,
        1,
    )


def test_special_token_in_text_is_encoded_as_special() -> None:
    found = encoder.tokenize_text(byte_level(), 1, "é<|eos|>x", True)
    at = unpack_int32(found.token_ids).index(2)
    assert (unpack_int32(found.byte_starts)[at], unpack_int32(found.byte_stops)[at], found.special[at]) == (2, 9, 1)


@pytest.mark.parametrize("truncate", [None, 1, 5, 10_000])
def test_truncate_keeps_the_end(truncate: int | None) -> None:
    ids = byte_level().tokenizer.encode(TEXT).ids
    prompt = encoder.encode_prompt(byte_level(), TEXT, True, truncate)
    expected = ids if truncate is None else ids[-truncate:]
    assert (unpack_int32(prompt.ids), prompt.token_count) == (expected, len(expected))


def test_lone_surrogates_are_rejected() -> None:
    with pytest.raises(encoder.EncodeError, match="tokenizer error"):
        encoder.encode_prompt(byte_level(), "a\ud800b", True, None)
    assert encoder.tokenize_text(byte_level(), 3, "a\ud800b", True).error.startswith("tokenizer error")


def test_empty_text() -> None:
    assert encoder.encode_prompt(byte_level(), "", True, None).token_count == 0
    assert encoder.tokenize_text(byte_level(), 1, "", True).token_ids == b""


def directory_with(directory: Path, base: Path, **config: object) -> Path:
    """Copies a model directory and changes settings of its tokenizer."""
    for path in base.iterdir():
        (directory / path.name).symlink_to(path)
    (directory / "tokenizer_config.json").unlink()
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def test_truncation_and_padding_of_tokenizer_json_are_disabled(tmp_path: Path, tiny_llama: Path) -> None:
    directory = directory_with(tmp_path, tiny_llama)
    tokenizer = Tokenizer.from_file(str(tiny_llama / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=4)
    (directory / "tokenizer.json").unlink()
    tokenizer.save(str(directory / "tokenizer.json"))
    vocabulary = Vocabulary.load(read_model_config(directory))
    assert encoder.encode_prompt(vocabulary, TEXT, True, None).token_count > 100
    assert encoder.encode_prompt(vocabulary, "a", True, None).token_count == 1


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|pad|>\n{% endfor %}", {0, 2}),
        ("{% for m in messages %}{{ m.content[0].text }}<|pad|><|bos|>{% endfor %}", {0, 2}),
        ("{% for m in messages %}<|pad|>{{ m.content }}{% endfor %}", {2}),
        ("{{ raise_exception('no') }}", {2}),
        (None, {2}),
    ],
)
def test_the_token_with_which_a_template_ends_a_turn_ends_texts(
    template: str | None, ends: set[int], tmp_path: Path, tiny_llama: Path
) -> None:
    directory = directory_with(tmp_path, tiny_llama, chat_template=template)
    assert Vocabulary.load(read_model_config(directory)).eos_ids == ends


def test_tokens_that_stand_only_in_older_files(tmp_path: Path, tiny_llama: Path) -> None:
    directory = directory_with(tmp_path, tiny_llama, bos_token=None, eos_token=None)
    (directory / "special_tokens_map.json").write_text('{"bos_token": {"content": "<|pad|>"}, "eos_token": "<|new|>"}')
    (directory / "added_tokens.json").write_text('{"<|new|>": 512, "<|far|>": 600}')
    config = read_model_config(directory)
    assert (config.bos_token, config.eos_token) == ("<|pad|>", "<|new|>")
    assert special_tokens(directory)["bos_token"] == "<|pad|>"
    vocabulary = Vocabulary.load(config)
    assert vocabulary.tokenizer.encode("a<|new|>", add_special_tokens=False).ids[-1] == 512
    assert 512 in vocabulary.eos_ids & vocabulary.special_ids
    assert vocabulary.tokenizer.token_to_id("<|far|>") is None


def test_special_tokens_of_tokenizer_config(tmp_path: Path, tiny_llama: Path) -> None:
    vocabulary = Vocabulary.load(read_model_config(tiny_llama))
    number = vocabulary.tokenizer.token_to_id("a")
    assert number not in vocabulary.special_ids
    directory = directory_with(tmp_path, tiny_llama, unk_token={"content": "a"}, additional_special_tokens=["nowhere"])
    assert special_tokens(directory) == {"unk_token": "a", "nowhere": "nowhere"}
    named = Vocabulary.load(read_model_config(directory))
    assert number in named.special_ids
    assert len(named.pieces) == len(vocabulary.pieces)


def test_eos_ids_come_from_the_model_config(tiny_llama: Path) -> None:
    assert Vocabulary.load(read_model_config(tiny_llama)).eos_ids == {2}


def test_damaged_or_missing_tokenizer_raises_user_error(tmp_path: Path, tiny_llama: Path) -> None:
    directory = directory_with(tmp_path, tiny_llama)
    (directory / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        Vocabulary.load(read_model_config(directory))
    (directory / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(UserError, match="damaged"):
        Vocabulary.load(read_model_config(directory))


def vllms_bad_words(encoded: Callable[[str], list[int]], words: list[str]) -> list[list[int]]:
    """Bad words as in vLLM's SamplingParams.update_from_tokenizer."""
    found: list[list[int]] = []
    for word in words:
        plain, spaced = encoded(word.lstrip()), encoded(" " + word.lstrip())
        found.append(plain)
        if spaced[0] != plain[0] and len(spaced) == len(plain):
            found.append(spaced)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_bad_words_match_vllm(kind: str) -> None:
    vocabulary = KINDS[kind]()
    words = [*[*dict.fromkeys(TEXT.split())][:60], "a", " the", "\n the", "naïve 👍", "of the", "zzz ", "."]

    def encoded(text: str) -> list[int]:
        return list(vocabulary.tokenizer.encode(text, add_special_tokens=False).ids)

    found = encoder.encode_bad_words(vocabulary, words)
    assert found == vllms_bad_words(encoded, words)
    if vocabulary is byte_level():  # other vocabularies have one form for both, or a token before the space
        assert len(words) < len(found) < 2 * len(words)


def test_listed_texts_are_all_tokens_that_begin_an_answer_with_them() -> None:
    pieces = sentencepiece()
    for vocabulary, text in ((byte_level(), "a"), (pieces, "a"), (pieces, "A")):
        found = encoder.listed_ids(vocabulary, [text], EncodedPrompt(b"", 0, 0))
        reading = range(vocabulary.tokenizer.get_vocab_size())
        assert sorted(found) == [one for one in reading if vocabulary.tokenizer.decode([one]) == text]
    assert len(encoder.listed_ids(pieces, ["a"], EncodedPrompt(b"", 0, 0))) == 3  # "a", "\u2581a" and the byte
    with pytest.raises(EncodeError, match="no token of its own for: zq"):
        encoder.listed_ids(wordpiece(), ["a", "zq"], EncodedPrompt(b"", 0, 0))
    for later in (AnswerFormat(channels=True), AnswerFormat(starts_in_reasoning=True)):
        with pytest.raises(EncodeError, match="begin with something else"):
            encoder.listed_ids(pieces, ["a"], EncodedPrompt(b"", 0, 0, answer_format=later))


def test_bad_word_without_tokens_or_with_surrogates() -> None:
    vocabulary = KINDS["wordpiece"]()
    assert (
        encoder.encode_bad_words(vocabulary, ["\u200b" * 3, "the"])[-1]
        == encoder.encode_bad_words(vocabulary, ["the"])[-1]
    )
    with pytest.raises(encoder.EncodeError, match="tokenizer error"):
        encoder.encode_bad_words(byte_level(), ["a\ud800b"])


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.one_of(st.text(), st.text(st.characters(max_codepoint=127)), st.sampled_from([TEXT, "  \n" * 99])))
def test_lower_bound_on_tokens_holds(kind: str, text: str) -> None:
    vocabulary = KINDS[kind]()
    least = vocabulary.min_token_count(text)
    assert least <= len(vocabulary.tokenizer.encode(text, add_special_tokens=False).ids)
    if kind == "byte_level" and text.isascii():
        assert least >= len(text) / max(map(len, vocabulary.tokenizer.get_vocab()))


def with_changes(**changes: object) -> Vocabulary:
    """The byte-level vocabulary with other parts of tokenizer.json."""
    spec = json.loads(byte_level().tokenizer.to_str()) | changes
    return Vocabulary(Tokenizer.from_str(json.dumps(spec)))


def test_lower_bound_is_unknown_where_characters_may_vanish() -> None:
    byte = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    split = {"type": "Split", "pattern": {"String": " "}, "invert": False}
    nfc = with_changes(normalizer={"type": "NFC"})
    assert nfc.min_token_count("a" * 99) == byte_level().min_token_count("a" * 99) > 0
    assert nfc.min_token_count("a" * 99 + "é") == 0
    for behavior, known in (("Isolated", True), ("Removed", False)):
        parts = {"type": "Sequence", "pretokenizers": [split | {"behavior": behavior}, byte]}
        assert bool(with_changes(pre_tokenizer=parts).min_token_count("a " * 99)) == known
    for part in ({"type": "Strip", "strip_left": True, "strip_right": True}, {"type": "Lowercase"}):
        assert with_changes(normalizer=part).min_token_count("a" * 99) == 0
    added = json.loads(byte_level().tokenizer.to_str())["added_tokens"]
    assert with_changes(added_tokens=[one | {"lstrip": True} for one in added]).min_token_count("a" * 99) == 0
