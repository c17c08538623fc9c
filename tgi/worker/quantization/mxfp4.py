"""Checkpoints in MXFP4 as those of gpt-oss (quant_method "mxfp4"); float4.py says what the numbers are.

The tensors of the layer NAME: NAME.blocks uint8 [outputs, inputs / 32, 16] has the codes, NAME.scales uint8 [outputs,
inputs / 32] the exponents.
"""

import torch

from tgi.worker.quantization.config import QuantizationConfig
from tgi.worker.quantization.float4 import Float4Weight, read_exponents
from tgi.worker.quantization.layer_tensors import LayerTensors
from tgi.worker.quantization.weight_forms import MX_GROUP


class Mxfp4Format:
    """Reads MXFP4 weights; a CheckpointFormat. The tensors of a layer show whether it is quantized, so the config's
    list of other layers is not needed."""

    stored_as = ("blocks",)
    remarks = ("the weights are in MXFP4",)

    def __init__(self, config: QuantizationConfig) -> None:
        """The config has nothing that the tensors do not show."""

    def read_weight(self, tensors: LayerTensors) -> Float4Weight:
        groups = tensors.group_count(MX_GROUP)
        blocks = tensors.read_checked("blocks", (torch.uint8,), tensors.outputs, groups, MX_GROUP // 2)
        return read_exponents(tensors, blocks.flatten(1), "scales")
