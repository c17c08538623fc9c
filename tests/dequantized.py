"""Dequantizes checkpoints, for comparison with transformers."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tgi.worker.quantization.weight import QuantizedWeight


def plain_weights(tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of a checkpoint, with quantized weights dequantized to `dtype`."""
    found = {}
    for name, tensor in tensors.items():
        stem, _, column = name.rpartition(".")
        if column == "codes":
            weight = QuantizedWeight(tensor, tensors[f"{stem}.scales"], tensors.get(f"{stem}.shifts"))
            found[stem] = weight.dequantized(dtype)
        elif column not in ("scales", "shifts"):
            found[name] = tensor.to(dtype)
    return found


def transformers_model(directory: Path, dtype: torch.dtype) -> Any:
    """The model of transformers, also for a directory with quantized weights."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(directory)
    network = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    found = network.load_state_dict(plain_weights(load_file(directory / "model.safetensors"), dtype), strict=False)
    assert not found.unexpected_keys
    assert set(found.missing_keys) <= {"lm_head.weight"}  # tied
    return network.eval()
