"""Whole models in fewer bits with our kernels for a GPU, by Triton's interpreter, and with what weights stand for."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from scripts.bench_quality import Plain
from tests.models import model as make
from tests.worker.gpu.test_models import GPU, logprobs
from tests.worker.quantization.checkpoints import Fp8, write
from tgi.worker.checkpoint import Checkpoint
from tgi.worker.load import read_recipe
from tgi.worker.models.decoder import Decoder
from tgi.worker.models.weights import WeightReader
from tgi.worker.quantization.weight import QuantizedWeight, Weight, plain

CPU, HALF = torch.device("cpu"), torch.float16
SIZES = {"hidden": 64, "intermediate": 96, "layers": 1}


class Rounded(Plain):
    """Weights in float16, whatever they are in the file."""

    def weight(self, name: str, outputs: int, inputs: int) -> Weight:
        return plain(self._source.weight(name, outputs, inputs), HALF)


def computed(directory: Path, quantize: str | None, bits: int) -> Tensor:
    """What a model finds likely behind seven tokens, thus few rows, with weights in so many bits; 16: plain ones."""
    recipe = read_recipe(directory, "float16", quantize)
    assert recipe.decoder is not None
    with Checkpoint(directory) as checkpoint, torch.inference_mode():
        source = recipe.scheme.source(checkpoint, float8=True)
        source = Rounded(source) if bits == 16 else source
        weights = WeightReader(source, recipe.decoder, HALF, CPU, None, GPU).weights(lambda percent: None)
        model = Decoder(recipe.decoder, weights, HALF, CPU, None, GPU)
    held = weights.layers[0].qkv._weight
    assert (held.bits if isinstance(held, QuantizedWeight) else 16) == bits
    return logprobs(model)


@pytest.mark.parametrize(("quantize", "bits"), [("int8", 8), ("int4", 4), ("fp8", 8), (None, 8)])
def test_a_model_is_what_its_weights_stand_for(quantize: str | None, bits: int, tmp_path: Path) -> None:
    """Made so at load, or read from a checkpoint of 8-bit floats."""
    if quantize is None:
        directory = write("llama", Fp8("fbgemm_fp8", 1), tmp_path, ("lm_head",), **SIZES).directory
    else:
        directory = make("llama", **SIZES)
    found, expected = (computed(directory, quantize, each) for each in (bits, 16))
    torch.testing.assert_close(found, expected, rtol=0, atol=0.02)
