"""Which models end in a vector, and how they pool."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.models import model, pooling_model
from tgi.hub.pooling import PoolingConfig, read_pooling_config
from tgi.microkernel.errors import UserError
from tgi.microkernel.messages.protocol import ModelTask

TYPE = "sentence_transformers.models."
BERT = {"model_type": "bert", "vocab_size": 9, "type_vocab_size": 2, "max_position_embeddings": 64}
MEAN = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}


def written(directory: Path, **files: Any) -> Path:
    """A directory with these JSON files; "__" in a name stands for "/"."""
    for name, content in files.items():
        path = directory / f"{name.replace('__', '/')}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return directory


def modules(*kinds: str) -> list[dict[str, str]]:
    paths = {"Pooling": "1_Pooling", "Dense": "2_Dense"}
    return [{"type": TYPE + kind, "path": paths.get(kind, "")} for kind in kinds]


def read(directory: Path, **files: Any) -> PoolingConfig:
    found = read_pooling_config(written(directory, **files))
    assert found is not None
    return found


def test_positions_are_bounded(tmp_path: Path) -> None:
    """By which limits of the deployment fit their messages."""
    config = {"model_type": "modernbert", "vocab_size": 9, "max_position_embeddings": 2**64 - 1}
    assert read(tmp_path, config=config).longest == 1 << 31


def test_models_that_generate_have_no_pooling(tiny_llama: Path, tmp_path: Path) -> None:
    assert read_pooling_config(tiny_llama) is None
    assert read_pooling_config(model("qwen3")) is None
    assert read_pooling_config(model("gemma4_unified_text")) is None  # where images see both sides
    assert read_pooling_config(tmp_path) is None


@pytest.mark.parametrize(
    ("kind", "pooling", "dense", "normalizes"),
    [("bert", "mean", 0, True), ("roberta", "mean", 0, False), ("modernbert", "cls", 0, True),
     ("gemma3", "mean", 2, True), ("qwen3", "last", 0, True)],
)  # fmt: skip
def test_files_of_sentence_transformers(kind: str, pooling: str, dense: int, normalizes: bool) -> None:
    found = read_pooling_config(pooling_model(kind))
    assert found is not None
    assert (found.task, found.pooling, len(found.dense), found.normalizes) == (
        ModelTask.EMBED, pooling, dense, normalizes,
    )  # fmt: skip
    assert found.longest == found.max_tokens == 512  # roberta has 514 positions
    assert found.prompts == (("query", "The question: "),)


def test_config_alone(tmp_path: Path) -> None:
    found = read(tmp_path, config=BERT)
    assert (found.task, found.pooling, found.normalizes, found.typed) == (ModelTask.EMBED, "cls", True, True)
    assert read(tmp_path, sentence_bert_config={"max_seq_length": 32}).max_tokens == 32
    assert read(tmp_path, sentence_bert_config={"max_seq_length": 999}).max_tokens == 64
    labels = {"architectures": ["BertForSequenceClassification"], "id2label": {"1": "b", "0": "a"}}
    found = read(tmp_path, config=BERT | labels | {"problem_type": "multi_label_classification"})
    assert (found.task, found.labels, found.multi_label) == (ModelTask.CLASSIFY, ("a", "b"), True)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"modules": modules("Transformer", "WordWeights")}, "has a module WordWeights, which is not served"),
        ({"modules": {}}, "is not a list of modules"),
        ({"modules": [{"type": TYPE + "Dense", "path": "../other"}]}, "outside of the model"),
        ({"modules": "["}, "is damaged"),
        ({"modules": modules("Pooling"), "1_Pooling__config": {"pooling_mode_max_tokens": True}}, "mean, cls or last"),
        ({"modules": modules("Pooling"), "1_Pooling__config": MEAN | {"pooling_mode_max_tokens": True}}, "mean, cls"),
        ({"modules": modules("Pooling"), "1_Pooling__config": {"pooling_mode": "weightedmean"}}, "mean, cls or last"),
        ({"modules": modules("Dense"), "2_Dense__config": {}}, "is not a Dense module"),
        (
            {"modules": modules("Dense"), "2_Dense__config": {"in_features": 1, "out_features": 1,
             "activation_function": "torch.nn.modules.activation.Softmax"}},
            "the activation Softmax is not served",
        ),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused(tmp_path: Path, files: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        read(tmp_path, config=BERT, **files)
