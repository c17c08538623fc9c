"""Reads one layer of a checkpoint that a test has written."""

import json
from pathlib import Path

import torch
from torch import Tensor

from tgi.worker.checkpoint import Checkpoint
from tgi.worker.quantization.scheme import find_format
from tgi.worker.quantization.weight import Weight
from tgi.worker.quantization.weight_sources import FormatWeightSource

OUTPUTS, INPUTS = 48, 256


def some_weight() -> Tensor:
    """A random weight; some rows have one sign, so that zero points are at both ends of their range."""
    weight = torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(1)) * 0.05
    weight[:4] = weight[:4].abs()
    weight[4:8] = -weight[4:8].abs()
    return weight


def read(
    directory: Path, outputs: int = OUTPUTS, inputs: int = INPUTS, float8: bool = False, exact: bool = False
) -> Weight:
    """The weight of "some.layer". `float8`: the device multiplies 8-bit floats. `exact`: scales are not rounded."""
    format = find_format(directory, json.loads((directory / "config.json").read_text()))
    assert format is not None
    with Checkpoint(directory) as checkpoint:
        return FormatWeightSource(checkpoint, format, float8, exact).weight("some.layer", outputs, inputs)
