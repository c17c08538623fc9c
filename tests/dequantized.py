"""Dequantizes checkpoints, for comparison with transformers."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tgi.worker.quantization.float4 import Float4Weight
from tgi.worker.quantization.weight import QuantizedWeight


def plain_weights(tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of a checkpoint, with quantized weights dequantized to `dtype`."""
    found = {}
    for name, tensor in tensors.items():
        stem, _, column = name.rpartition(".")
        if column == "codes":
            scales, shifts = (_factors(tensors, stem, column) for column in ("scales", "shifts"))
            if scales is None:
                found[stem] = Float4Weight(tensor, tensors[f"{stem}.factors"]).quantized().dequantized(dtype)
            else:
                found[stem] = QuantizedWeight(tensor, scales, shifts).dequantized(dtype)
        elif not column.endswith(("scales", "shifts", "factors")):
            found[name] = tensor.to(dtype)
    return found


def _factors(tensors: dict[str, Tensor], stem: str, column: str) -> Tensor | None:
    """Scales or shifts in float32: some are stored as products."""
    numbers, units = tensors.get(f"{stem}.{column}"), tensors.get(f"{stem}.super_{column}")
    if numbers is None or units is None:
        return None if numbers is None else numbers.float()
    return numbers.float() * units.repeat_interleave(numbers.shape[1] // units.shape[1], 1)


def transformers_model(directory: Path, dtype: torch.dtype) -> Any:
    """The model of transformers, also for a directory with quantized weights."""
    import transformers
    from transformers.initialization import no_init_weights

    config = transformers.AutoConfig.from_pretrained(directory)
    with no_init_weights():
        network = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    found = network.load_state_dict(plain_weights(load_file(directory / "model.safetensors"), dtype), strict=False)
    assert not found.unexpected_keys
    assert set(found.missing_keys) <= {"lm_head.weight"}  # tied
    network.tie_weights()
    return network.eval()
