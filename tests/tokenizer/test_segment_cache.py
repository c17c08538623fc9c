"""SegmentCache: a text encoded by segments has the ids of the whole text."""

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

from tests.tokenizer.vocabularies import KINDS
from tgi.microkernel.messages.codec import unpack_int32
from tgi.tokenizer import segment_cache
from tgi.tokenizer.segment_cache import SegmentCache

# Tokens with common prefixes, one a prefix of another, and tokens that overlap with the following text.
NAMED = ["<|a|>", "<|a|><|b|>", "<|b|>", "<|ab", "|>", "[x]"]
TEXTS = [" ", "  ", "\n", "a", "Hello", " world", "é", "e\u0301", "今天", "▁", "<|", "a|>", "1 234", "'s", "\u00a0"]


def named(tokenizer: Tokenizer, **how: bool) -> Tokenizer:
    tokenizer.add_tokens(
        [AddedToken(one, normalized=False, special=at % 2 == 0, **how) for at, one in enumerate(NAMED)]
    )
    return tokenizer


def bytes_of_text(kind: str) -> Tokenizer:
    """Each byte is a token, so that ids determine the text."""
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
def test_same_ids_as_encoding_the_whole_text(kind: str, parts: list[str], add: bool) -> None:
    tokenizer, text = tokenizers(kind), "".join(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segment_cache, "MIN_TEXT_CHARACTERS", 0)
        divided = SegmentCache(tokenizer)
        expected = tokenizer.encode(text, add_special_tokens=add).ids
        for _ in range(2):  # encoded, then cached
            found = divided.encode(text, add)
            assert (found is not None) == any(one in text for one in NAMED)
            assert found is None or unpack_int32(found) == expected


@pytest.mark.parametrize("how", ["lstrip", "rstrip", "single_word"])
def test_context_dependent_added_tokens_disable_the_cache(how: str) -> None:
    tokenizer = named(Tokenizer.from_str(KINDS["byte_level"]().tokenizer.to_str()), **{how: True})
    assert SegmentCache(tokenizer).encode("Hello <|a|> world" * 1000, False) is None


class Counting:
    """A tokenizer that counts the characters it encodes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.characters = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> Any:
        self.characters += sum(map(len, texts))
        return self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)


def test_chat_turn_encodes_only_new_segments() -> None:
    counting = Counting(tokenizers("byte_level"))
    divided = SegmentCache(counting)
    chat = "".join(f"<|a|>{turn} Hello world, and so on. {'word ' * turn}<|b|>\n" for turn in range(100))
    divided.encode(chat, False)
    first, counting.characters = counting.characters, 0
    assert first > len(chat) // 2
    assert (
        unpack_int32(divided.encode(chat + "<|a|>What now?<|b|>", False) or b"")
        == tokenizers("byte_level").encode(chat + "<|a|>What now?<|b|>", add_special_tokens=False).ids
    )
    assert counting.characters == len("<|a|>What now?")


def test_least_recently_used_segment_is_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_cache, "MIN_TEXT_CHARACTERS", 0)
    monkeypatch.setattr(segment_cache, "MAX_CACHE_BYTES", 15_000)
    counting = Counting(tokenizers("byte_level"))
    divided = SegmentCache(counting)
    for number in range(30):
        divided.encode(f"Hello {number}<|a|>always the same", False)
        divided.encode(f"<|b|>{'x' * 100}{number}", False)
    counting.characters = 0
    divided.encode(f"<|b|>{'x' * 100}29<|a|>always the same", False)
    assert counting.characters == 0
    divided.encode(f"<|b|>{'x' * 100}0", False)
    assert counting.characters == len(f"<|b|>{'x' * 100}0")


def plain(words: dict[str, int]) -> Tokenizer:
    return Tokenizer(models.WordLevel(words, unk_token=""))


def test_unencodable_probe_text_disables_the_cache() -> None:
    """The probe for added special tokens is the text "a", which a vocabulary may not contain."""
    assert SegmentCache(named(plain({"Hello": 0}))).encode("Hello<|a|>" * 1000, True) is None


def test_several_post_processors_disable_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_cache, "MIN_TEXT_CHARACTERS", 0)
    tokenizer = named(plain({"a": 0, "[CLS]": 1, "[SEP]": 2}))
    both = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    tokenizer.post_processor = processors.Sequence([both, both])
    assert tokenizer.encode("a").ids == [1, 1, 0, 2, 2]
    assert SegmentCache(tokenizer).encode("a<|a|>a", True) is None


def test_thousands_of_added_tokens_are_matched_like_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text without added tokens is not compared with each of them."""
    monkeypatch.setattr(segment_cache, "MIN_TEXT_CHARACTERS", 0)
    tokenizer = Tokenizer.from_str(KINDS["byte_level"]().tokenizer.to_str())
    many = [f"<unused{number}>" for number in range(3000)] + [f"<unused{number}" for number in range(0, 3000, 7)]
    many += ["\n" * size for size in range(2, 60)] + ["<", "(.*)", "é", "e"]
    tokenizer.add_tokens([AddedToken(one, normalized=False) for one in many])
    divided = SegmentCache(tokenizer)
    for text in ["<unused12<unused7><unused14<unused2999>>", "a" + "\n" * 59 + "b\n" + "\n" * 140, "<(.*)é\n\n"]:
        assert unpack_int32(divided.encode(text, False) or b"") == tokenizer.encode(text, add_special_tokens=False).ids
    assert divided.encode("<unuse" * 300_000 + "\n\n", False)
