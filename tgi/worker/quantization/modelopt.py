"""Checkpoints of NVIDIA's Model Optimizer (quant_method "modelopt"), which describes them in config.json or in
hf_quant_config.json, there in an entry "quantization".

A layer's tensors show how it is quantized: NAME.weight is float8 (fp8.py) or has the codes of 4-bit floats (float4.py).
"""

import torch
from torch import Tensor

from tgi.worker.quantization import fp8
from tgi.worker.quantization.config import QuantizationConfig
from tgi.worker.quantization.float4 import ACTIVATIONS_REMARK, read_float4
from tgi.worker.quantization.layer_tensors import LayerTensors, StoredWeight
from tgi.worker.quantization.weight_forms import modelopt_algorithm


class ModeloptFormat:
    """Reads weights in MXFP4, NVFP4 and FP8 as modelopt exports them; a CheckpointFormat. Raises UserError for other
    algorithms."""

    stored_as = ("weight",)

    def __init__(self, config: QuantizationConfig) -> None:
        algorithm = modelopt_algorithm(config)
        self.remarks: tuple[str, ...] = (f"the weights are in modelopt's {algorithm}",)
        self.remarks += (fp8.REMARK,) if algorithm.startswith("FP8") else (ACTIVATIONS_REMARK,)

    def read_weight(self, tensors: LayerTensors) -> StoredWeight | Tensor:
        for column in ("pre_quant_scale", "svdquant_lora_a"):
            if column in tensors:
                raise tensors.unfit(column, "changes the layer's activations or its result, which is not computed")
        dtype = tensors.stored("weight").dtype
        if dtype is torch.uint8:
            return read_float4(tensors, "weight", "weight_scale_2")
        return fp8.read_floats(tensors, None) if dtype in fp8.FLOAT8 else tensors.plain()
