"""One layer of a checkpoint that a test has written: its weight, and what is read of it."""

import json
from pathlib import Path

import torch
from torch import Tensor

from tgi.worker.checkpoint import Checkpoint
from tgi.worker.quantization.formats import FormatSource, find_format
from tgi.worker.quantization.weight import Weight

OUTPUTS, INPUTS = 48, 256


def some_weight() -> Tensor:
    """Some rows are of one sign, so that zero points are at both ends of their range."""
    weight = torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(1)) * 0.05
    weight[:4] = weight[:4].abs()
    weight[4:8] = -weight[4:8].abs()
    return weight


def read(directory: Path, outputs: int = OUTPUTS, inputs: int = INPUTS, float8: bool = False) -> Weight:
    """For a device that multiplies 8-bit floats, or not."""
    format = find_format(directory, json.loads((directory / "config.json").read_text()))
    assert format is not None
    with Checkpoint(directory) as checkpoint:
        return FormatSource(checkpoint, format, float8).weight("some.layer", outputs, inputs)
