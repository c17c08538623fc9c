"""Writes adapters as peft does, and models with an adapter merged into the weights, from the formula."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "c_fc", "c_proj", *FUSED)


def make_adapter(
    directory: Path,
    model: Path,
    rank: int = 4,
    targets: Sequence[str] = ALL,
    seed: int = 1,
    ranks: dict[str, int] | None = None,
    layers: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """Writes an adapter with random matrices for these projections. `ranks` overrides the rank by a module's suffix."""
    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, weight in load_file(model / "model.safetensors").items():
        module = name.removesuffix(".weight")
        chosen = layers is None or any(f"layers.{layer}." in name for layer in layers)
        if not module.endswith(tuple(targets)) or not chosen or not name.endswith(".weight") or weight.ndim != 2:
            continue
        own = next((value for end, value in (ranks or {}).items() if module.endswith(end)), rank)
        outputs, inputs = weight.shape
        a = torch.randn(own, inputs, generator=generator) / inputs**0.5
        b = torch.randn(outputs, own, generator=generator) / own**0.5
        tensors[f"base_model.model.{module}.lora_A.weight"] = a.to(dtype)
        tensors[f"base_model.model.{module}.lora_B.weight"] = b.to(dtype)
    save_file(tensors, directory / WEIGHTS, {"format": "pt"})
    values = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted({key.split(".")[-3] for key in tensors}),
        "bias": "none",
        "task_type": "CAUSAL_LM",
        "modules_to_save": None,
        "use_dora": False,
        "layers_to_transform": None if layers is None else list(layers),
        "rank_pattern": ranks or {},
    }
    (directory / CONFIG).write_text(json.dumps(values | config))
    return directory


def merge(directory: Path, model: Path, adapter: Path, scales: dict[str, float]) -> Path:
    """Writes the model with W + scale * B A for each projection; `scales` by module suffix, "" for all others."""
    shutil.copytree(model, directory)
    weights, found = load_file(model / "model.safetensors"), load_file(adapter / WEIGHTS)
    for key in found:
        if ".lora_A." in key:
            module = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            scale = next(value for end, value in scales.items() if module.endswith(end))
            change = scale * (found[key.replace("lora_A", "lora_B")].double() @ found[key].double())
            weights[f"{module}.weight"] = (weights[f"{module}.weight"].double() + change).float()
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory
