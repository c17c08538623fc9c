"""Random quantized weights of all kinds."""

import torch

from tgi.worker.quantization.quantize import quantize_weight
from tgi.worker.quantization.weight import CODEBOOK, QuantizedWeight
from tgi.worker.quantization.weight_forms import MX_GROUP


def random_weight(outputs: int, inputs: int, bits: int, group: int, shifted: bool, seed: int = 0) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(seed)
    scales = (torch.rand(outputs, inputs // group, generator=generator) / 50 - 0.01).half()
    shifts = (torch.rand(outputs, inputs // group, generator=generator) - 0.5).half() if shifted else None
    if bits == 8:
        codes = torch.randint(-128, 128, (outputs, inputs), generator=generator, dtype=torch.int8)
    else:
        codes = torch.randint(0, 256, (outputs, inputs // 2), generator=generator, dtype=torch.uint8)
    return QuantizedWeight(codes, scales, shifts)


def random_floats(outputs: int, inputs: int, seed: int = 0) -> QuantizedWeight:
    """A weight of 8-bit floats."""
    generator = torch.Generator().manual_seed(seed)
    return quantize_weight(torch.randn(outputs, inputs, generator=generator) / 50, "fp8")


def random_float4(outputs: int, inputs: int, group: int, seed: int = 0) -> QuantizedWeight:
    """A weight of 4-bit floats, in MXFP4 with groups of 32 inputs and in NVFP4 with groups of 16."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (outputs, inputs // 2), generator=generator, dtype=torch.uint8)
    if group == MX_GROUP:
        factors = torch.randint(110, 126, (outputs, inputs // group), generator=generator, dtype=torch.uint8)
        return QuantizedWeight(codes, torch.ones(outputs, 1, dtype=torch.float64), None, factors.view(torch.int8))
    floats = torch.rand(outputs, inputs // group, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.full((outputs, 1), 1 / 75.0, dtype=torch.float64)
    return QuantizedWeight(codes, scales, None, floats.view(torch.int8))


def random_whole(outputs: int, inputs: int, bits: int, seed: int = 0) -> QuantizedWeight:
    """A weight with one scale for each output; with 4 bits, of the codebook."""
    weight, generator = random_weight(outputs, inputs, bits, inputs, False, seed), torch.Generator().manual_seed(seed)
    if bits == 8:
        return weight
    factors = torch.randint(0, len(CODEBOOK), (outputs, inputs // 32), generator=generator, dtype=torch.uint8)
    return weight._replace(factors=factors)
