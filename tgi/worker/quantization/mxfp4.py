"""Checkpoints in MXFP4, as those of gpt-oss: 4-bit floats with a power of 2 for each 32 inputs (OCP Microscaling
Formats (MX) Specification 1.0, 2023).

The tensors of the layer NAME: NAME.blocks uint8 [outputs, inputs / 32, 16] has the codes of consecutive inputs, the
first one in the lower half of a byte; NAME.scales uint8 [outputs, inputs / 32] has exponents e of factors 2^(e - 127).
Twice the number of a code is an integer, so that a weight is one of 8 bits in groups of 32, exactly.
"""

import torch

from tgi.worker.quantization.affine import AffineWeight, unpack_bits
from tgi.worker.quantization.config import QuantizationConfig
from tgi.worker.quantization.layer_tensors import LayerTensors

GROUP = 32
DOUBLED = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])  # twice the numbers of the codes
ZERO = 128  # of the codes of AffineWeight
SCALES = torch.tensor([2.0 ** (exponent - 128) for exponent in range(256)])


class Mxfp4Format:
    """Reads MXFP4 weights; a CheckpointFormat. The tensors of a layer show whether it is quantized, so the config's
    list of other layers is not needed."""

    stored_as = ("blocks",)
    remarks = ("the weights are in MXFP4, which is held in 8 bits, exactly",)

    def __init__(self, config: QuantizationConfig) -> None:
        """The config has nothing that the tensors do not show."""

    def read_weight(self, tensors: LayerTensors) -> AffineWeight:
        """See CheckpointFormat."""
        groups = tensors.group_count(GROUP)
        blocks = tensors.read_checked("blocks", (torch.uint8,), tensors.outputs, groups, GROUP // 2)
        exponents = tensors.read_checked("scales", (torch.uint8,), tensors.outputs, groups)
        codes = (DOUBLED + ZERO).to(torch.uint8)[unpack_bits(blocks.flatten(1), 4).int()]
        return AffineWeight(8, tensors.inputs, codes, torch.full_like(exponents, ZERO), SCALES[exponents.int()])
