"""Whole quantized models with the GPU kernels, in Triton's interpreter, compared with dequantized weights."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from scripts.benchmarks.quality import Plain
from tests.models import model as make
from tests.worker.gpu_kernels.test_models import GPU, logprobs
from tests.worker.quantization.checkpoints import Fp8, write
from tgi.worker.checkpoint import Checkpoint
from tgi.worker.distributed.sharding import whole_model
from tgi.worker.models.decoder import DecoderModel
from tgi.worker.models.loader import read_model_spec
from tgi.worker.models.weight_loader import DecoderWeightLoader
from tgi.worker.quantization.weight import QuantizedWeight, Weight, as_plain

pytestmark = pytest.mark.slow

CPU, HALF = torch.device("cpu"), torch.float16
SIZES = {"hidden": 64, "intermediate": 96, "layers": 1}


class Rounded(Plain):
    """A source that converts all weights of the file to float16."""

    def weight(self, name: str, outputs: int, inputs: int) -> Weight:
        return as_plain(self._source.weight(name, outputs, inputs), HALF)


def computed(directory: Path, quantize: str | None, bits: int) -> Tensor:
    """Logprobs after seven tokens (few rows), with weights of this many bits; 16: plain."""
    recipe = read_model_spec(directory, "float16", quantize)
    assert recipe.decoder is not None
    with Checkpoint(directory) as checkpoint, torch.inference_mode():
        source = recipe.scheme.source(checkpoint, float8=True)
        source = Rounded(source) if bits == 16 else source
        weights = DecoderWeightLoader(source, recipe.decoder, whole_model(recipe.decoder), HALF, CPU, None, GPU).load(
            lambda percent: None
        )
        model = DecoderModel(recipe.decoder, weights, HALF, CPU, None, GPU)
    attention = weights.layers[0].attention
    assert attention is not None
    held = attention.qkv._weight
    assert (held.bits if isinstance(held, QuantizedWeight) else 16) == bits
    return logprobs(model)


@pytest.mark.parametrize(("quantize", "bits"), [("int8", 8), ("int4", 4), ("fp8", 8), (None, 8)])
def test_a_model_matches_its_dequantized_weights(quantize: str | None, bits: int, tmp_path: Path) -> None:
    """Quantized at load, or read from a checkpoint of 8-bit floats."""
    if quantize is None:
        directory = write("llama", Fp8("fbgemm_fp8", 1), tmp_path, ("lm_head",), **SIZES).directory
    else:
        directory = make("llama", **SIZES)
    found, expected = (computed(directory, quantize, each) for each in (bits, 16))
    torch.testing.assert_close(found, expected, rtol=0, atol=0.02)
