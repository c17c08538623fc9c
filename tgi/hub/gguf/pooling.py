"""How the model of a GGUF file makes a vector of a text: its pooling and dense layers as files of
sentence-transformers, and the head of a classifier."""

from typing import Any, NamedTuple

from tgi.hub.gguf.conversion_plan import Metadata, TargetTensor
from tgi.hub.pooling import CLASSIFIER, MODULES, POOLING_KEYS, is_bidirectional
from tgi.microkernel.errors import UserError

# Values of the key pooling_type, as gguf.constants.PoolingType has them. The key that the mode is written as.
MODES = {1: "pooling_mode_mean_tokens", 2: "pooling_mode_cls_token", 3: "pooling_mode_lasttoken"}
NONE, FIRST, LAST, RANK = 0, 2, 3, 4
MAX_CLASSES = 1 << 16
CLASSIFIER_MODES = {1: "mean", 2: "cls"}  # of the key classifier.pooling_type
YES_AND_NO = "cls.output.weight"  # of a decoder that ranks: the rows of the output head for these two tokens
_TYPE = "sentence_transformers.models."


class VectorFiles(NamedTuple):
    """What a model directory has besides the hidden states' weights."""

    config: dict[str, Any]  # entries of config.json
    files: dict[str, Any]  # JSON files by name
    parts: dict[str, list[TargetTensor]]  # directories with weights of their own
    tensors: list[TargetTensor]  # of the model's weights


def pooling_type(metadata: Metadata, architecture: str, absent: int = NONE) -> int:
    """The number of a pooling that is served, or RANK, and of a model that generates NONE. `absent` is what a file
    without the key has; with another than NONE the model does not generate."""
    number = metadata.integer(key := f"{architecture}.pooling_type", absent)
    if number not in (*MODES, RANK, absent):
        raise metadata.wrong(key, number, "1 (mean), 2 (first token), 3 (last token) or 4 (a model that ranks)")
    return number


def labels(metadata: Metadata, architecture: str, count: int) -> dict[str, str]:
    """id2label of a classifier with `count` classes."""
    found = metadata.file.metadata.get(key := f"{architecture}.classifier.output_labels")
    if count > MAX_CLASSES:
        raise UserError(f"{metadata.file.path} has {count} classes; at most {MAX_CLASSES} are served.")
    if found is None:
        return {str(number): f"LABEL_{number}" for number in range(count)}
    if not isinstance(found, list) or len(found) != count or not all(isinstance(one, str) for one in found):
        raise metadata.wrong(key, found, f"a list of {count} texts")
    return {str(number): one for number, one in enumerate(found)}


def modules(pooling: int, hidden: int, dense: dict[str, tuple[int, int]] | None = None) -> dict[str, Any]:
    """The files of sentence-transformers: pooling, dense layers (inputs and outputs by name) and the normalization, by
    which llama.cpp ends as well."""
    chosen, dense = MODES[pooling], dense or {}
    settings = {"word_embedding_dimension": hidden} | {key: key == chosen for key in POOLING_KEYS}
    listed = [("Transformer", ""), ("Pooling", "1_Pooling"), *(("Dense", name) for name in dense)]
    listed.append(("Normalize", f"{len(listed)}_Normalize"))
    files: dict[str, Any] = {
        MODULES: [
            {"idx": index, "name": str(index), "path": path, "type": _TYPE + kind}
            for index, (kind, path) in enumerate(listed)
        ],
        "1_Pooling/config.json": settings,
    }
    for name, (inputs, outputs) in dense.items():
        files[f"{name}/config.json"] = {
            "in_features": inputs,
            "out_features": outputs,
            "bias": False,
            "activation_function": "torch.nn.modules.linear.Identity",
        }
    return files


def decoder_vectors(metadata: Metadata, architecture: str, config: dict[str, Any]) -> VectorFiles | None:
    """The files of a decoder; None if it generates text."""
    tensors, hidden, bidirectional = metadata.file.tensors, config["hidden_size"], is_bidirectional(config)
    pooling = pooling_type(metadata, architecture, LAST if bidirectional else NONE)
    if pooling == NONE:
        return None
    causal = metadata.file.metadata.get(key := f"{architecture}.attention.causal", True)
    if not isinstance(causal, bool):
        raise metadata.wrong(key, causal, "a truth value")
    if pooling == RANK:
        if architecture != "qwen3" or not causal:
            expected = "a pooling of embeddings, as of all but a causal qwen3,"
            raise metadata.wrong(f"{architecture}.pooling_type", RANK, expected)
        # A score of the difference of two logits is that of these rows' difference.
        head = TargetTensor(YES_AND_NO, "score.weight", (1, hidden), apart=True)
        return VectorFiles({"architectures": ["Qwen3" + CLASSIFIER], "id2label": {"0": "LABEL_0"}}, {}, {}, [head])
    dense, parts = {}, {}
    for number in (2, 3):
        found = tensors.get(source := f"dense_{number}.weight")
        if found is not None and len(found.shape) == 2:
            outputs, inputs = found.shape
            dense[name := f"{number}_Dense"] = inputs, outputs
            parts[name] = [TargetTensor(source, "linear.weight", (outputs, inputs))]
    sizes = [hidden, *(size for pair in dense.values() for size in pair)]
    if any(size != following for size, following in zip(sizes[::2], sizes[1::2], strict=False)):
        raise metadata.wrong("dense_2.weight, dense_3.weight", sizes[1:], f"layers one after the other, of {hidden}")
    entries = {} if causal or bidirectional else {"is_causal": False}
    return VectorFiles(entries, modules(pooling, hidden, dense), parts, [])
