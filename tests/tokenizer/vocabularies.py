"""Small tokenizers of each type."""

import json
import tempfile
from functools import cache
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from scripts.make_model import SPECIAL_TOKENS, TEXT, make_tokenizer
from tgi.tokenizer.vocabulary import Vocabulary


@cache
def byte_level() -> Vocabulary:
    """Byte-level BPE (GPT-2) of scripts/make_model.py: ids 0 to 5 are special, 2 is EOS, emoji have several ids."""
    with tempfile.TemporaryDirectory() as directory:
        make_tokenizer("llama", Path(directory), 512, 2048)
        tokenizer = Tokenizer.from_file(str(Path(directory) / "tokenizer.json"))
    return Vocabulary(tokenizer, SPECIAL_TOKENS, [2])


@cache
def sentencepiece() -> Vocabulary:
    """BPE over "▁" with byte fallback, and <s> before each prompt (Llama 2)."""
    special = ["<unk>", "<s>", "</s>"]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("▁?[^▁]+"), "isolated")
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special + [f"<0x{byte:02X}>" for byte in range(256)], show_progress=False,
        limit_alphabet=90,
    )  # fmt: skip
    tokenizer.train_from_iterator([TEXT], trainer)
    # Byte tokens are ordinary tokens; only <unk>, <s> and </s> are special. That can be changed only in the file.
    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] in special]
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 1)])
    return Vocabulary(tokenizer, ["<s>", "</s>"], [2])


@cache
def wordpiece() -> Vocabulary:
    """WordPiece (BERT): words are joined by spaces, "##" marks continuations."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.decoder = decoders.WordPiece()
    return Vocabulary(tokenizer, [], [1])


@cache
def metaspace() -> Vocabulary:
    """Unigram over "▁" without byte fallback (T5, XLNet)."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.decoder = decoders.Metaspace()
    return Vocabulary(tokenizer, [], [1])


KINDS = {"byte_level": byte_level, "sentencepiece": sentencepiece, "wordpiece": wordpiece, "metaspace": metaspace}
