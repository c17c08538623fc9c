"""A text that is encoded stretch by stretch has the ids that the tokenizer gives it whole."""

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

from tests.tokenizer.vocabularies import KINDS
from tgi.kernel.pack import ints
from tgi.tokenizer import stretches
from tgi.tokenizer.stretches import Stretches

# Tokens that begin alike, of which one begins another, and that overlap with what comes behind.
NAMED = ["<|a|>", "<|a|><|b|>", "<|b|>", "<|ab", "|>", "[x]"]
TEXTS = [" ", "  ", "\n", "a", "Hello", " world", "é", "e\u0301", "今天", "▁", "<|", "a|>", "1 234", "'s", "\u00a0"]


def named(tokenizer: Tokenizer, **how: bool) -> Tokenizer:
    tokenizer.add_tokens(
        [AddedToken(one, normalized=False, special=at % 2 == 0, **how) for at, one in enumerate(NAMED)]
    )
    return tokenizer


def bytes_of_text(kind: str) -> Tokenizer:
    """Every byte is a token of its own, so that nothing is lost on the way to the ids."""
    tokenizer = Tokenizer(
        models.BPE({f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁": 256, "Ġ": 257}, [], byte_fallback=True)
    )
    match kind:
        case "first":
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        case "always":
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        case "prefix space":
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        case "prepended":
            tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        case "normalized":
            tokenizer.normalizer = normalizers.Sequence(
                [normalizers.NFC(), normalizers.Strip(), normalizers.Lowercase()]
            )
    tokenizer.post_processor = processors.TemplateProcessing("[x] $A [x] |>", "$A $B", [("[x]", 0), ("|>", 1)])
    return named(tokenizer)


SYNTHETIC = ["first", "always", "prefix space", "prepended", "normalized"]


@cache
def tokenizers(kind: str) -> Tokenizer:
    return bytes_of_text(kind) if kind in SYNTHETIC else named(Tokenizer.from_str(KINDS[kind]().tokenizer.to_str()))


@pytest.mark.parametrize("kind", [*KINDS, *SYNTHETIC])
@given(parts=st.lists(st.sampled_from(NAMED + TEXTS), max_size=12), add=st.booleans())
@settings(max_examples=80)
def test_the_same_ids_as_whole(kind: str, parts: list[str], add: bool) -> None:
    tokenizer, text = tokenizers(kind), "".join(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stretches, "LONG_TEXT", 0)
        divided = Stretches(tokenizer)
        expected = tokenizer.encode(text, add_special_tokens=add).ids
        for _ in range(2):  # made, and remembered
            found = divided.ids(text, add)
            assert (found is not None) == any(one in text for one in NAMED)
            assert found is None or ints(found) == expected


@pytest.mark.parametrize("how", ["lstrip", "rstrip", "single_word"])
def test_tokens_that_look_beyond_themselves_leave_texts_whole(how: str) -> None:
    tokenizer = named(Tokenizer.from_str(KINDS["byte_level"]().tokenizer.to_str()), **{how: True})
    assert Stretches(tokenizer).ids("Hello <|a|> world" * 1000, False) is None


class Counting:
    """A tokenizer that counts what it encodes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.characters = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> Any:
        self.characters += sum(map(len, texts))
        return self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)


def test_a_turn_encodes_what_is_new() -> None:
    counting = Counting(tokenizers("byte_level"))
    divided = Stretches(counting)
    chat = "".join(f"<|a|>{turn} Hello world, and so on. {'word ' * turn}<|b|>\n" for turn in range(100))
    divided.ids(chat, False)
    first, counting.characters = counting.characters, 0
    assert first > len(chat) // 2
    assert (
        ints(divided.ids(chat + "<|a|>What now?<|b|>", False) or b"")
        == tokenizers("byte_level").encode(chat + "<|a|>What now?<|b|>", add_special_tokens=False).ids
    )
    assert counting.characters == len("<|a|>What now?")


def test_what_was_not_asked_for_longest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stretches, "LONG_TEXT", 0)
    monkeypatch.setattr(stretches, "MOST_BYTES", 15_000)
    counting = Counting(tokenizers("byte_level"))
    divided = Stretches(counting)
    for number in range(30):
        divided.ids(f"Hello {number}<|a|>always the same", False)
        divided.ids(f"<|b|>{'x' * 100}{number}", False)
    counting.characters = 0
    divided.ids(f"<|b|>{'x' * 100}29<|a|>always the same", False)
    assert counting.characters == 0
    divided.ids(f"<|b|>{'x' * 100}0", False)
    assert counting.characters == len(f"<|b|>{'x' * 100}0")


def plain(words: dict[str, int]) -> Tokenizer:
    return Tokenizer(models.WordLevel(words, unk_token=""))


def test_a_text_that_cannot_be_read_is_no_reason_not_to_start() -> None:
    """The probe for what a tokenizer adds is such a text where the vocabulary has neither it nor a token for it."""
    assert Stretches(named(plain({"Hello": 0}))).ids("Hello<|a|>" * 1000, True) is None


def test_what_several_post_processors_add_is_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stretches, "LONG_TEXT", 0)
    tokenizer = named(plain({"a": 0, "[CLS]": 1, "[SEP]": 2}))
    both = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    tokenizer.post_processor = processors.Sequence([both, both])
    assert tokenizer.encode("a").ids == [1, 1, 0, 2, 2]
    assert Stretches(tokenizer).ids("a<|a|>a", True) is None


def test_thousands_of_tokens_are_found_as_the_tokenizer_finds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a place where none stands is not compared with each of them, which would take many times as long."""
    monkeypatch.setattr(stretches, "LONG_TEXT", 0)
    tokenizer = Tokenizer.from_str(KINDS["byte_level"]().tokenizer.to_str())
    many = [f"<unused{number}>" for number in range(3000)] + [f"<unused{number}" for number in range(0, 3000, 7)]
    many += ["\n" * size for size in range(2, 60)] + ["<", "(.*)", "é", "e"]
    tokenizer.add_tokens([AddedToken(one, normalized=False) for one in many])
    divided = Stretches(tokenizer)
    for text in ["<unused12<unused7><unused14<unused2999>>", "a" + "\n" * 59 + "b\n" + "\n" * 140, "<(.*)é\n\n"]:
        assert ints(divided.ids(text, False) or b"") == tokenizer.encode(text, add_special_tokens=False).ids
    assert divided.ids("<unuse" * 300_000 + "\n\n", False)
