"""Whole quantized models: they match the dequantized weights, and results do not depend on the batch."""

import json
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from scripts.benchmarks.quality import Plain
from tests.models import model as make
from tests.worker.batches import prefill
from tests.worker.cpu_kernels.available import our_kernels
from tests.worker.cpu_kernels.test_models import prompts
from tests.worker.driving import drive, make_engine
from tests.worker.loras import make_adapter
from tgi.microkernel.errors import UserError
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.worker.attention import build_attention
from tgi.worker.checkpoint import Checkpoint
from tgi.worker.distributed.sharding import whole_model
from tgi.worker.lora.registry import load_adapters
from tgi.worker.models.decoder import DecoderModel
from tgi.worker.models.interface import Model
from tgi.worker.models.loader import build_model, read_model_spec
from tgi.worker.models.weight_loader import DecoderWeightLoader

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
KINDS = ("llama", "phi3", "mixtral")  # separate projections, fused projections, and experts


@cache
def directory(kind: str) -> Path:
    return make(kind, hidden=128, intermediate=192)


def load(kind: str, quantize: str, native: bool, dtype: str = "bfloat16") -> Model:
    path = directory(kind)
    kernels = our_kernels(read_model_spec(path, dtype, quantize)) if native else None
    return build_model(path, dtype, "cpu", lambda stage, percent: None, kernels=kernels, quantize=quantize)


def dequantized(kind: str, quantize: str, native: bool) -> Model:
    """The plain model with the dequantized weights. Its embedding is that of the file."""
    recipe = read_model_spec(directory(kind), "bfloat16", quantize)
    kernels = our_kernels(recipe) if native else None
    assert recipe.decoder is not None
    with Checkpoint(directory(kind)) as checkpoint, torch.inference_mode():
        sources = [Plain(recipe.scheme.source(checkpoint)), recipe.scheme.stored_source(checkpoint)]
        shard = whole_model(recipe.decoder)
        readers = [
            DecoderWeightLoader(source, recipe.decoder, shard, torch.bfloat16, CPU, kernels) for source in sources
        ]
        weights, stored = (reader.load(lambda percent: None) for reader in readers)
    weights = weights._replace(embedding=stored.embedding)
    return DecoderModel(recipe.decoder, weights, torch.bfloat16, CPU, kernels)


def logits(model: Model) -> Tensor:
    attention = build_attention(model.kv, 32, CPU)
    return prefill(model, attention, prompts()[0], range(32))


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_quantized_model_matches_its_dequantized_weights(kind: str, quantize: str) -> None:
    assert torch.equal(logits(load(kind, quantize, False)), logits(dequantized(kind, quantize, False)))


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("kind", KINDS)
def test_integer_products_are_as_exact_as_bfloat16(kind: str, quantize: str) -> None:
    """On the CPU kernels with integers: the error is at most that between torch's and our bfloat16 kernels."""
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
def test_results_with_adapters_do_not_depend_on_the_batch(native: bool, quantize: str, tmp_path: Path) -> None:
    engine = make_engine(load("llama", quantize, native), pages=64)
    load_adapters(engine.adapters, (("a", str(make_adapter(tmp_path / "a", directory("llama")))),))
    asked = SamplingParams(0, adapter="a", adapter_digest=engine.adapters.loaded_adapters[0].digest)
    samplings = [asked, SamplingParams(7, temperature=0.8), asked._replace(seed=3, temperature=1.0), SamplingParams(0)]
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
        ("persimmon", "int8", "through transformers, which cannot be done with quantized weights"),
    ],
)
def test_models_that_cannot_be_quantized_are_rejected(kind: str, quantize: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        read_model_spec(make(kind), "auto", quantize)


def test_torch_on_cpu_logs_that_quantization_saves_no_memory(caplog: pytest.LogCaptureFixture) -> None:
    made = load("llama", "int4", False)
    assert made.footprint.bytes == made.footprint.numbers * made.kv.dtype.itemsize
    assert "--quantize saves no memory here" in caplog.text


def test_a_null_in_the_config_quantizes_nothing(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(make("persimmon"), directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": None}))
    assert build_model(directory, "float32", "cpu", lambda stage, percent: None).vocab_size == config["vocab_size"]
