"""Whole models in fewer bits: what they compute with, and that load changes no bit of it."""

import json
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from scripts.bench_quality import Plain
from tests.models import model as make
from tests.worker.batches import prefill
from tests.worker.driving import drive, make_engine
from tests.worker.loras import make_adapter
from tests.worker.ours import our_kernels
from tests.worker.test_native_models import prompts
from tgi.kernel.errors import UserError
from tgi.kernel.messages import Sampling
from tgi.worker.attention import build_attention
from tgi.worker.batch import Model
from tgi.worker.checkpoint import Checkpoint
from tgi.worker.load import build_model, read_recipe
from tgi.worker.lora.shelf import stock
from tgi.worker.models.decoder import Decoder
from tgi.worker.models.weights import WeightReader

CPU = torch.device("cpu")
KINDS = ("llama", "phi3", "mixtral")  # parts that are joined, parts that are one tensor, and experts


@cache
def directory(kind: str) -> Path:
    return make(kind, hidden=128, intermediate=192)


def load(kind: str, quantize: str, native: bool, dtype: str = "bfloat16") -> Model:
    path = directory(kind)
    kernels = our_kernels(read_recipe(path, dtype, quantize)) if native else None
    return build_model(path, dtype, "cpu", lambda stage, percent: None, kernels=kernels, quantize=quantize)


def dequantized(kind: str, quantize: str, native: bool) -> Model:
    """The plain model with the weights that the quantized ones stand for. Its embedding is that of the file."""
    recipe = read_recipe(directory(kind), "bfloat16", quantize)
    kernels = our_kernels(recipe) if native else None
    assert recipe.decoder is not None
    with Checkpoint(directory(kind)) as checkpoint, torch.inference_mode():
        sources = [Plain(recipe.scheme.source(checkpoint)), recipe.scheme.stored_source(checkpoint)]
        readers = [WeightReader(source, recipe.decoder, torch.bfloat16, CPU, kernels) for source in sources]
        weights, stored = (reader.weights(lambda percent: None) for reader in readers)
    weights = weights._replace(embedding=stored.embedding)
    return Decoder(recipe.decoder, weights, torch.bfloat16, CPU, kernels)


def logits(model: Model) -> Tensor:
    attention = build_attention(model.kv, 32, CPU)
    return prefill(model, attention, prompts()[0], range(32))


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_quantized_model_computes_with_what_its_codes_stand_for(kind: str, quantize: str) -> None:
    assert torch.equal(logits(load(kind, quantize, False)), logits(dequantized(kind, quantize, False)))


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("kind", KINDS)
def test_whole_numbers_are_no_further_from_it_than_bfloat16(kind: str, quantize: str) -> None:
    """On our own kernels, with whole numbers: as far off as torch's kernels are from ours with bfloat16."""
    found, ours, torchs = (
        logits(model)
        for model in (
            load(kind, quantize, True),
            dequantized(kind, quantize, True),
            dequantized(kind, quantize, False),
        )
    )
    assert float((found - ours).norm()) < 2 * float((torchs - ours).norm())


@pytest.mark.parametrize(("native", "quantize"), [(False, "int4"), (True, "int8"), (True, "int4")])
def test_load_changes_no_bit_of_it_with_adapters_too(native: bool, quantize: str, tmp_path: Path) -> None:
    engine = make_engine(load("llama", quantize, native), pages=64)
    stock(engine.adapters, (("a", str(make_adapter(tmp_path / "a", directory("llama")))),))
    asked = Sampling(0, adapter="a", adapter_digest=engine.adapters.listed[0].digest)
    samplings = [asked, Sampling(7, temperature=0.8), asked._replace(seed=3, temperature=1.0), Sampling(0)]
    together = drive(engine, prompts(), 8, samplings, chunk=23, stagger=1)
    alone = [drive(engine, [ids], 8, [how])[0] for ids, how in zip(prompts(), samplings, strict=True)]
    assert together == alone
    assert together[0] != drive(engine, prompts()[:1], 8)[0]  # the adapter does change the quantized model


def test_fewer_bits_are_further_from_the_model() -> None:
    exact = logits(build_model(directory("llama"), "bfloat16", "cpu", lambda stage, percent: None))
    off = [float((logits(load("llama", quantize, False)) - exact).norm()) for quantize in ("int8", "int4")]
    assert 0 < 5 * off[0] < off[1] < float((exact - exact.mean()).norm())


@pytest.mark.parametrize(
    ("kind", "quantize", "reason"),
    [
        ("llama", "gptq", "is for weights that are quantized already, and those in"),
        ("gpt2", "int8", "through transformers, which cannot be done with quantized weights"),
    ],
)
def test_what_cannot_be_quantized_is_refused_in_words(kind: str, quantize: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        read_recipe(make(kind), "auto", quantize)


def test_torch_on_cpu_says_that_it_saves_no_memory(caplog: pytest.LogCaptureFixture) -> None:
    made = load("llama", "int4", False)
    assert made.footprint.bytes == made.footprint.numbers * made.kv.dtype.itemsize
    assert "--quantize saves no memory here" in caplog.text


def test_a_null_in_the_config_quantizes_nothing(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(make("gpt2"), directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": None}))
    assert build_model(directory, "float32", "cpu", lambda stage, percent: None).vocab_size == config["vocab_size"]
