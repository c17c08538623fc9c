"""Import of GGUF files of models that end in a vector: the result computes what the model does that a file was written
from, token ids included. scripts/check_gguf.py compares with llama.cpp's own files and computation."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from scripts.make_gguf import add, write_gguf, write_vector_gguf
from scripts.make_pooling_model import CONFIGS, VOCAB
from tests.models import model, pooling_model
from tgi.hub.gguf import reader, tokenizer
from tgi.hub.gguf.conversion_plan import Metadata
from tgi.hub.gguf.convert import convert
from tgi.hub.gguf.families import REFUSED_ENCODERS
from tgi.hub.gguf.pooling import MAX_CLASSES, labels
from tgi.hub.pooling import read_pooling_config
from tgi.microkernel.errors import UserError
from tgi.microkernel.messages.protocol import ModelTask
from tgi.worker.attention.packed import PackedSequences
from tgi.worker.engine.pooling_startup import load_pooled_model

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
TEXTS = [np.random.default_rng(length).integers(6, VOCAB, length) for length in (1, 33, 130)]


def imported(source: Path, directory: Path) -> Path:
    directory.mkdir()
    convert(source, directory, lambda stage, percent, size=0: None, packed=True)
    return directory


def vectors(directory: Path) -> torch.Tensor:
    """Those of TEXTS, by torch's kernels in float32, before they get the length 1."""
    pooling = read_pooling_config(directory)
    assert pooling is not None
    with torch.inference_mode():
        loaded = load_pooled_model(directory, pooling, torch.float32, CPU, None, lambda *told: None, 128)
        return loaded.vectors(PackedSequences.of(TEXTS, CPU))


@pytest.mark.parametrize("kind", CONFIGS)
def test_embeddings(kind: str, tmp_path: Path) -> None:
    """Pooling, positions, token types, epsilon, windows and dense layers are those of the file."""
    # llama.cpp has in its code which layers of EmbeddingGemma have a window, and the factor of its scores.
    more = (("sliding_window_pattern", 6), ("query_pre_attn_scalar", 32), ("num_hidden_layers", 7))
    original = pooling_model(kind, more=more) if kind == "gemma3" else pooling_model(kind)
    made = imported(write_vector_gguf(original, tmp_path / "m.gguf"), tmp_path / "out")
    before, after = read_pooling_config(original), read_pooling_config(made)
    assert before is not None
    assert after is not None
    for name in ("task", "vocab_size", "typed", "pooling", "max_tokens", "longest"):
        assert getattr(after, name) == getattr(before, name), name
    assert after.normalizes
    configs = [json.loads((place / "config.json").read_text()) for place in (original, made)]
    for name in ("use_bidirectional_attention", "is_causal"):  # by which transformers computes masks
        assert configs[0].get(name) == configs[1].get(name)
    # norms of EmbeddingGemma are stored with 1 added
    torch.testing.assert_close(vectors(made), vectors(original), rtol=1e-5, atol=1e-5 if kind == "gemma3" else 0)


CLASSIFIERS: dict[str, tuple[str, int, tuple[tuple[str, Any], ...]]] = {
    "ranks": ("roberta", 1, ()),
    "classes": ("xlm-roberta", 3, ()),
    "mean": ("modernbert", 4, (("classifier_pooling", "mean"),)),
    "first token": ("modernbert", 1, (("classifier_pooling", "cls"),)),
}


@pytest.mark.parametrize("case", CLASSIFIERS)
def test_classifiers(case: str, tmp_path: Path) -> None:
    kind, classes, more = CLASSIFIERS[case]
    original = pooling_model(kind, classes=classes, more=more)
    names = [f"class {number}" for number in range(classes)]
    key = f"{'modern-' if kind == 'modernbert' else ''}bert.classifier.output_labels"
    source = write_vector_gguf(original, tmp_path / "m.gguf", metadata={key: names})
    made = imported(source, tmp_path / "out")
    found = read_pooling_config(made)
    assert found is not None
    assert (found.task, found.labels) == (ModelTask.CLASSIFY, tuple(names))
    assert torch.equal(vectors(made), vectors(original))
    pair = Tokenizer.from_file(str(made / "tokenizer.json")).encode("a", "b").tokens
    assert pair == ["<|bos|>", "a", "<|eos|>", *["<|eos|>"] * (kind != "modernbert"), "b", "<|eos|>"]


def test_quantized_encoders_are_dequantized_and_decoders_keep_their_bits(tmp_path: Path) -> None:
    for kind, kept in (("bert", False), ("qwen3", True)):
        original = pooling_model(kind)
        source = write_vector_gguf(original, tmp_path / f"{kind}.gguf", "Q8_0")
        made = imported(source, tmp_path / kind)
        assert any(name.endswith(".codes") for name in load_file(made / "model.safetensors")) is kept
        near = torch.cosine_similarity(vectors(made), vectors(original))
        assert 0.99 < float(near.min()) < 1 - 1e-6
        file = reader.read_gguf(source)
        name = "blk.0.ffn_up.weight"
        assert file.tensors[name].type.name == "Q8_0"


def test_distilbert_has_no_token_types(tmp_path: Path) -> None:
    original, name = tmp_path / "original", "embeddings.token_type_embeddings.weight"
    shutil.copytree(pooling_model("bert"), original)
    tensors = load_file(original / "model.safetensors")
    types = tensors.pop(name)
    save_file(tensors, original / "model.safetensors")
    source = write_vector_gguf(original, tmp_path / "m.gguf", metadata={"tokenizer.ggml.token_type_count": 1})
    save_file({**tensors, name: torch.zeros_like(types)}, original / "model.safetensors")
    assert torch.equal(vectors(imported(source, tmp_path / "out")), vectors(original))


def test_a_decoder_that_ranks_by_two_tokens(tmp_path: Path) -> None:
    """The file has the rows of the output head for "yes" and "no"; the score is the difference of their logits."""
    original = tmp_path / "original"
    shutil.copytree(model("qwen3"), original)
    config = json.loads((original / "config.json").read_text())
    config |= {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["n", "e"]}
    (original / "config.json").write_text(json.dumps(config))
    vocabulary = Tokenizer.from_file(str(original / "tokenizer.json"))
    head = load_file(original / "model.safetensors")["lm_head.weight"]
    rows = [head[vocabulary.token_to_id(word)].numpy() for word in ("e", "n")]
    ranking = {"qwen3.pooling_type": 4, "qwen3.classifier.output_labels": ["yes", "no"]}
    for number, (tensor, same) in enumerate(((np.stack(rows), True), (np.stack(rows[::-1]), False))):
        source = tmp_path / f"{number}.gguf"
        write_gguf(original, source, metadata=ranking, extra={"cls.output.weight": tensor})
        made = imported(source, tmp_path / str(number))
        assert torch.allclose(vectors(made), vectors(original), rtol=1e-4, atol=1e-4) is same


def test_a_decoder_whose_tokens_see_both_sides(tmp_path: Path) -> None:
    original = tmp_path / "original"
    shutil.copytree(pooling_model("qwen3"), original)
    config = json.loads((original / "config.json").read_text())
    (original / "config.json").write_text(json.dumps(config | {"is_causal": False}))
    both = write_vector_gguf(original, tmp_path / "m.gguf", metadata={"qwen3.attention.causal": False})
    found = vectors(imported(both, tmp_path / "out"))
    assert torch.equal(found, vectors(original))
    assert not torch.allclose(found, vectors(pooling_model("qwen3")), atol=1e-3)


@pytest.mark.parametrize("keys", [{}, {"qwen3.pooling_type": 0}])
def test_a_decoder_without_pooling_generates(keys: dict[str, int], tmp_path: Path) -> None:
    source = write_gguf(model("qwen3"), tmp_path / "m.gguf", metadata=keys)
    assert read_pooling_config(imported(source, tmp_path / "out")) is None


def test_classes_are_bounded() -> None:
    metadata = Metadata(reader.GGUFFile(Path("m.gguf"), {}, {}))
    assert len(labels(metadata, "bert", MAX_CLASSES)) == MAX_CLASSES
    with pytest.raises(UserError, match="has 65537 classes; at most 65536 are served"):
        labels(metadata, "bert", MAX_CLASSES + 1)


def without_tensor(source: Path, path: Path, *names: str) -> Path:
    """A copy of a file without these tensors."""
    whole = reader.read_gguf(source)
    writer = GGUFWriter(path, whole.metadata["general.architecture"])
    for key, value in whole.metadata.items():
        add(writer, key, value)
    for tensor in whole.tensors.values():
        if tensor.name not in names:
            raw = np.frombuffer(tensor.data, np.uint8).reshape(*tensor.shape[:-1], -1)
            writer.add_tensor(tensor.name, raw, raw_dtype=tensor.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def bert(path: Path, **metadata: Any) -> Path:
    keys = {key.replace("__", "."): value for key, value in metadata.items()}
    return write_vector_gguf(pooling_model("bert"), path, metadata=keys)


REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "no pooling": (lambda path: bert(path, bert__pooling_type=0), r"'bert\.pooling_type' is '0'; 1 \(mean\)"),
    "ranks without a head": (lambda path: bert(path, bert__pooling_type=4), r"lacks the tensor 'cls\.output\.weight'"),
    "causal": (lambda path: bert(path, bert__attention__causal=True), "causal' is 'True'; false, as of all encoders"),
    "unknown key": (lambda path: bert(path, bert__attention__max_alibi_bias=8.0), "which import does not know"),
    "windows of a bert": (lambda path: bert(path, bert__attention__sliding_window=64), "which import does not know"),
    "heads of odd size": (
        lambda path: write_vector_gguf(
            pooling_model("modernbert"), path, metadata={"modern-bert.attention.head_count": 64}
        ),
        "heads of even size",
    ),
    "odd heads": (lambda path: bert(path, bert__attention__head_count=5), "a divisor of 64"),
    "many layers": (lambda path: bert(path, bert__block_count=1 << 20), "at most 1024"),
    "more layers": (lambda path: bert(path, bert__block_count=4), r"lacks the tensor 'blk\.3\.attn_q\.weight'"),
    "positions": (lambda path: bert(path, bert__context_length=600), r"'position_embd\.weight' has shape \[512, 64\]"),
    "types": (lambda path: bert(path, tokenizer__ggml__token_type_count=3), r"'token_types\.weight' has shape"),
    "tokenizer": (lambda path: bert(path, tokenizer__ggml__model="llama"), "one of bert, gpt2, t5 was expected"),
    "a classifier without its pooler": (
        lambda path: write_vector_gguf(pooling_model("bert", classes=3), path),
        r"is a classifier without the pooler \(bert\.pooler\.dense\)",
    ),
    "labels": (
        lambda path: write_vector_gguf(
            pooling_model("roberta", classes=1), path, metadata={"bert.classifier.output_labels": ["a", "b"]}
        ),
        "a list of 1 texts was expected",
    ),
    "half a head": (
        lambda path: without_tensor(
            write_vector_gguf(pooling_model("roberta", classes=1), path.with_suffix(".whole")), path, "cls.bias"
        ),
        r"lacks the tensor 'cls\.bias'",
    ),
    "ranking by another decoder": (
        lambda path: write_gguf(model("llama"), path, metadata={"llama.pooling_type": 4}),
        "as of all but a causal qwen3",
    ),
    "a decoder that generates and is not causal": (
        lambda path: write_gguf(model("llama"), path, metadata={"llama.attention.causal": False}),
        "which import does not know",
    ),
    "layers that do not fit": (
        lambda path: write_gguf(
            model("qwen3"),
            path,
            metadata={"qwen3.pooling_type": 3},
            extra={"dense_2.weight": np.ones((64, 32), np.float32)},
        ),
        "layers one after the other, of 64",
    ),
    "windows": (
        lambda path: write_vector_gguf(
            pooling_model("modernbert"), path, metadata={"modern-bert.attention.sliding_window_pattern": [True]}
        ),
        "a positive number, or a list of 3 truth values",
    ),
    "scaled positions": (
        lambda path: write_vector_gguf(
            pooling_model("modernbert"), path, metadata={"modern-bert.rope.scaling.type": "yarn"}
        ),
        "'modern-bert.rope.scaling.type' is 'yarn'; none was expected",
    ),
    **{
        name: (
            lambda path, name=name: bert(path, general__architecture=name),
            f"encoder of architecture '{name}', {re.escape(reason)}. Of encoders, bert, modern-bert",
        )
        for name, reason in REFUSED_ENCODERS.items()
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str, tmp_path: Path) -> None:
    write, words = REFUSED[case]
    with pytest.raises(UserError, match=words) as raised:
        imported(write(tmp_path / "m.gguf"), tmp_path / "out")
    assert "\n" not in str(raised.value)


# --- tokenizers ---

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz0123456789.,!?'-$▁公园天한é"]
WORDS += ["the", "cafe", "café", "Cafe", "##s", "##ing", "##é", "##▁", "##1", "ss", "##ß", "i", "##o", "##a", "[PAD9]"]
SPECIAL = WORDS[:5]
SAID = (
    "The cafés, THE Café! isn't 公园天 x",
    "a▁ [SEP] [MASK]ing the\tcafe\r\n\x00z\u200bs",
    "i̇stanbul ẞ Ao 한 1-a1 $9.50 😀 [PAD9]",
    "a" * 130,
    "",
)


def word_piece(lowercase: bool, strip: bool | None) -> Tokenizer:
    """As published."""
    words = [word for word in dict.fromkeys(WORDS) if not lowercase or word == word.lower() or word in SPECIAL]
    made = Tokenizer(models.WordPiece({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strip)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.add_special_tokens([AddedToken(word, normalized=False) for word in SPECIAL])
    return made


def described(metadata: dict[str, Any]) -> tuple[reader.GGUFFile, dict[str, Any]]:
    file = reader.GGUFFile(Path("m.gguf"), metadata, {})
    return file, tokenizer.tokenizer_description(file)


def word_piece_metadata(original: Tokenizer) -> dict[str, Any]:
    """As llama.cpp's converter writes it."""
    vocabulary = original.get_vocab()
    words = sorted(vocabulary, key=vocabulary.__getitem__)
    return {
        "general.architecture": "bert",
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": [
            word if word in SPECIAL else word[2:] if word.startswith("##") else f"▁{word}" for word in words
        ],
        "tokenizer.ggml.token_type": [3 if word in SPECIAL else 1 for word in words],
        **{f"tokenizer.ggml.{role}_token_id": number for number, role in enumerate(("padding", "unknown", "cls"))},
        "tokenizer.ggml.seperator_token_id": 3,
    }


@pytest.mark.parametrize(("lowercase", "strip"), [(True, None), (False, None), (False, True), (True, False)])
@pytest.mark.parametrize("told", [True, False])
def test_word_piece(lowercase: bool, strip: bool | None, told: bool) -> None:
    original = word_piece(lowercase, strip)
    metadata = word_piece_metadata(original)
    if told:
        metadata["tokenizer.ggml.normalizer.lowercase"] = lowercase
    if strip is not None:
        metadata["tokenizer.ggml.normalizer.strip_accents"] = strip
    file, words = described(metadata)
    made = tokenizer.wordpiece_tokenizer(file, words)
    tokenizer.complete_tokenizer(file, made, {})
    assert made.get_vocab() == original.get_vocab()
    for text in SAID:
        assert made.encode(text, add_special_tokens=False).tokens == original.encode(text).tokens, text
    pair = made.encode("a", "b")
    assert (pair.tokens, pair.type_ids) == (["[CLS]", "a", "[SEP]", "b", "[SEP]"], [0, 0, 0, 1, 1])
    assert made.encode("a").tokens == ["[CLS]", "a", "[SEP]"]


def test_a_vocabulary_that_is_no_word_piece_is_refused() -> None:
    metadata = word_piece_metadata(word_piece(True, None))
    metadata["tokenizer.ggml.tokens"][-1] = "▁▁le"
    with pytest.raises(UserError, match=r"writes CamemBERT\. Use the model's safetensors version instead\."):
        tokenizer.wordpiece_tokenizer(*described(metadata))
    with pytest.raises(UserError, match=r"seperator_token_id.* is 999, which is not in the vocabulary"):
        tokenizer.complete_tokenizer(
            described(metadata | {"tokenizer.ggml.seperator_token_id": 999})[0], Tokenizer(models.WordPiece()), {}
        )


def test_the_unigram_model_of_xlm_roberta() -> None:
    """Its places without tokens are no sentinels, and do not count as the least likely token."""
    pieces = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), ("▁ab", -3.0), ("a", -9.0)]
    pieces += [("b", -9.0), ("abc", -1.0), ("cç", -9.5), ("[PAD9]", -10000.0)]
    metadata = {
        "general.architecture": "bert",
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": [piece for piece, _ in pieces],
        "tokenizer.ggml.scores": [score for _, score in pieces],
        "tokenizer.ggml.token_type": [3, 3, 3, 2, *[1] * 6, 5],
        **{
            f"tokenizer.ggml.{role}_token_id": n for role, n in (("bos", 0), ("padding", 1), ("eos", 2), ("unknown", 3))
        },
        "tokenizer.ggml.seperator_token_id": 2,
        "tokenizer.ggml.remove_extra_whitespaces": False,
        **{f"tokenizer.ggml.add_{end}_token": True for end in ("bos", "eos", "sep")},
    }
    file, words = described(metadata)
    made = tokenizer.unigram_tokenizer(file, words)
    tokenizer.complete_tokenizer(file, made, {})
    assert made.encode("ab  b", "a").tokens == ["<s>", "▁ab", "▁", "b", "</s>", "</s>", "▁", "a", "</s>"]
    assert set(made.encode("ab b", "a").type_ids) == {0}
    assert made.token_to_id("<extra_id_99>") is None
    assert made.encode("é", add_special_tokens=False).tokens == ["▁", "é"]
    assert made.encode("é", add_special_tokens=False).ids == [4, 3]
    # An unknown letter costs 10 more than the least likely piece, 20.5 with "abc"; "a", "b" and "cç" cost 27.5.
    assert made.encode("babcç", add_special_tokens=False).ids == [4, 7, 8, 3]
