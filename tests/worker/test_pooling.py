"""Models that end in a vector, compared with transformers: each family, as a model of embeddings and as a classifier,
with our CPU kernels and with torch's; and the engine's steps."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from scripts.make_pooling_model import CONFIGS, VOCAB
from tests.models import pooling_model
from tgi.hub.pooling import read_pooling_config
from tgi.microkernel.messages.codec import FLOAT32, INT32, pack_column
from tgi.microkernel.messages.protocol import DeploymentLimits, SlotAssignment, Step
from tgi.worker.attention.packed import PackedSequences
from tgi.worker.cpu_kernels.build import build_library
from tgi.worker.cpu_kernels.kernels import CpuKernels
from tgi.worker.engine.pooling_engine import NO_TEXT, PoolingEngine
from tgi.worker.engine.pooling_startup import PooledModel, load_pooled_model

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
# A text of one token, and of more than a page, a block and a tile of the kernels, and than the windows of the models.
LENGTHS = (1, 33, 7, 130, 64, 2)
CLASSES = {"bert": 3, "roberta": 1, "xlm-roberta": 1, "modernbert": 4, "qwen3": 1}


@cache
def kernels() -> CpuKernels:
    return CpuKernels(build_library("float32"), 2, torch.float32)


def load(directory: Path, own: bool) -> PooledModel:
    pooling = read_pooling_config(directory)
    assert pooling is not None
    with torch.inference_mode():
        return load_pooled_model(
            directory, pooling, torch.float32, CPU, kernels() if own else None, lambda *told: None, 128
        )


def texts(seed: int = 0) -> list[np.ndarray[Any, Any]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(3, VOCAB, length) for length in LENGTHS]


def vectors(model: PooledModel, sequences: list[np.ndarray[Any, Any]]) -> Tensor:
    with torch.inference_mode():
        return model.vectors(PackedSequences.of(sequences, CPU))


def pooled_by_transformers(directory: Path) -> Callable[[np.ndarray[Any, Any]], Tensor]:
    """What transformers and the modules of sentence-transformers make of a text."""
    model = transformers.AutoModel.from_pretrained(directory, attn_implementation="eager").eval()
    pooling = read_pooling_config(directory)
    assert pooling is not None
    dense = [load_file(one.directory / "model.safetensors")["linear.weight"] for one in pooling.dense]

    @torch.no_grad()
    def pool(ids: np.ndarray[Any, Any]) -> Tensor:
        hidden = model(torch.from_numpy(ids)[None]).last_hidden_state[0]
        vector = {"mean": hidden.mean(0), "cls": hidden[0], "last": hidden[-1]}[pooling.pooling]
        for weight in dense:
            vector = weight @ vector
        return vector

    return pool


@pytest.mark.parametrize("own", [True, False], ids=["our kernels", "torch"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_embeddings_are_those_of_transformers(kind: str, own: bool) -> None:
    directory = pooling_model(kind)
    model, expected = load(directory, own), pooled_by_transformers(directory)
    found = vectors(model, texts())
    for ids, vector in zip(texts(), found, strict=True):
        wanted = expected(ids)
        assert torch.allclose(vector / vector.norm(), wanted / wanted.norm(), rtol=0, atol=1e-5)
        assert torch.allclose(vector, wanted, rtol=1e-5, atol=1e-5)
    alone = [vectors(model, [ids])[0] for ids in texts()]
    if own:
        assert torch.equal(torch.stack(alone), found)  # whatever else is computed
    else:
        assert torch.allclose(torch.stack(alone), found, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", CLASSES)
def test_logits_are_those_of_transformers(kind: str) -> None:
    directory = pooling_model(kind, classes=CLASSES[kind])
    model = load(directory, own=True)
    reference = transformers.AutoModelForSequenceClassification.from_pretrained(directory).eval()
    found = vectors(model, texts())
    for ids, logits in zip(texts(), found, strict=True):
        with torch.no_grad():
            wanted = reference(torch.from_numpy(ids)[None]).logits[0]
        assert torch.allclose(logits, wanted, rtol=1e-5, atol=1e-5)


def test_ids_beyond_the_vocabulary_are_of_the_second_token_type() -> None:
    directory = pooling_model("bert", classes=3)
    reference = transformers.AutoModelForSequenceClassification.from_pretrained(directory).eval()
    ids, kinds = texts()[3], np.arange(LENGTHS[3]) // 70
    with torch.no_grad():
        wanted = reference(torch.from_numpy(ids)[None], token_type_ids=torch.from_numpy(kinds)[None]).logits[0]
    found = vectors(load(directory, own=True), [ids + VOCAB * kinds])[0]
    assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_score_of_two_tokens(tmp_path: Path) -> None:
    """A causal model that ranks by the logits of "no" and "yes"."""
    import json
    import shutil

    from tests.models import model

    directory = tmp_path / "model"
    shutil.copytree(model("qwen3"), directory)
    config = json.loads((directory / "config.json").read_text())
    words = ["e", "n"]
    config |= {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": words}
    (directory / "config.json").write_text(json.dumps(config))
    reference = transformers.AutoModelForCausalLM.from_pretrained(model("qwen3")).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    no, yes = (tokenizer.convert_tokens_to_ids(word) for word in words)
    ids = texts()[1]
    with torch.no_grad():
        logits = reference(torch.from_numpy(ids)[None]).logits[0, -1]
    found = vectors(load(directory, own=True), [ids])[0]
    assert torch.allclose(found, (logits[yes] - logits[no])[None], rtol=1e-4, atol=1e-4)


def engine(model: PooledModel) -> PoolingEngine:
    limits = DeploymentLimits(512, 512, 4096, 256, 8, 16, 512, VOCAB, "float32", "cpu")
    return PoolingEngine(model.vectors, model.size, limits, CPU, 64)


def step(number: int, rows: list[tuple[int, int, int, int]], slots: list[SlotAssignment]) -> Step:
    """`rows`: slot, start, count and whether it samples."""
    owners, starts, counts, samples = zip(*rows, strict=True)
    columns = [pack_column(INT32, column) for column in (owners, starts, counts)]
    return Step(number, 1, slots, b"", b"", *columns, bytes(samples))


def test_engine_computes_a_text_with_its_last_part() -> None:
    model = load(pooling_model("bert"), own=True)
    sequences = texts()
    slots = [SlotAssignment(slot, pack_column(INT32, ids), len(ids), b"") for slot, ids in enumerate(sequences)]
    found = engine(model)
    parts = [(0, 0, 1, 0), (1, 0, 33, 0), (3, 0, 100, 0), (4, 0, 64, 0)]
    result = found.launch(step(1, parts, [slots[0], slots[1], slots[3], slots[4]]))
    wanted = [vectors(model, [sequences[index]])[0].numpy().tobytes() for index in (0, 1, 4)]
    assert result.vectors == b"".join(wanted)
    assert (result.counts, result.row_errors) == (b"", [])
    result = found.launch(step(2, [(3, 100, 30, 0), (5, 0, 2, 1)], [slots[5]]))
    assert result.vectors == vectors(model, [sequences[3]])[0].numpy().tobytes()
    assert result.row_errors == ["", NO_TEXT]  # a request that wants a token
    assert (result.counts, len(result.token_ids)) == (b"\1", len(pack_column(FLOAT32, [0])))
