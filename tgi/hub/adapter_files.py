"""The files of a LoRA adapter as PEFT or MLX writes them, and the errors for missing or misplaced ones."""

import json
from collections.abc import Collection
from pathlib import Path

from tgi.hub.weight_files import PICKLED
from tgi.microkernel.errors import UserError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MLX_WEIGHTS = "adapters.safetensors"


def wanted_files(weights: bool, names: Collection[str]) -> tuple[str, ...]:
    """The files of an adapter in a directory with these names, with or without its weights."""
    return (CONFIG, weights_file(names)) if weights else (CONFIG,)


def weights_file(names: Collection[str]) -> str:
    """The name of the weights among these file names."""
    return MLX_WEIGHTS if WEIGHTS not in names and MLX_WEIGHTS in names else WEIGHTS


def missing_files_problem(names: list[str], weights: bool = True) -> str:
    """Why these file names are not a complete adapter, as the end of a sentence about their location, or ""."""
    if CONFIG not in names:
        return f"has no {CONFIG}, so it is no LoRA adapter. Name one that PEFT has written."
    if weights_file(names) in names or not weights:
        return ""
    if pickled := [name for name in names if name.endswith(PICKLED)]:
        return (
            f"has its weights only as {pickled[0]}, a format that can run code when it is loaded. Only safetensors are "
            "served: load the adapter with PEFT on a machine where you trust the file, and save it again."
        )
    return f"has no {WEIGHTS}. Is the download complete?"


def not_a_model_error(name: str, directory: Path) -> UserError:
    """The error for an adapter that is given as the model."""
    try:
        base = json.loads((directory / CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        base = None
    adapter = f"NAME={name}" if Path(name).is_dir() else name
    return UserError(
        f"{name} is a LoRA adapter, not a model. Serve its base model with it: --model-id {base or 'BASE'} "
        f"--lora-adapters {adapter}"
    )
