"""What the directory of a LoRA adapter holds, as PEFT writes it, and what to say where that is not so."""

import json
from pathlib import Path

from tgi.hub.safetensors import PICKLED
from tgi.kernel.errors import UserError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FILES = (CONFIG, WEIGHTS)


def lack(names: list[str]) -> str:
    """What keeps files of these names from being an adapter, in words behind the name of their place; "" if nothing."""
    if CONFIG not in names:
        return f"has no {CONFIG}, so it is no LoRA adapter. Name one that PEFT has written."
    if WEIGHTS in names:
        return ""
    if pickled := [name for name in names if name.endswith(PICKLED)]:
        return (
            f"has its weights only as {pickled[0]}, a format that can run code when it is loaded. Only safetensors are "
            "served: load the adapter with PEFT on a machine where you trust the file, and save it again."
        )
    return f"has no {WEIGHTS}. Is the download complete?"


def no_model(name: str, directory: Path) -> UserError:
    """What to say where an adapter is named in the place of a model."""
    try:
        base = json.loads((directory / CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        base = None
    adapter = f"NAME={name}" if Path(name).is_dir() else name
    return UserError(
        f"{name} is a LoRA adapter, not a model. Serve its base model with it: --model-id {base or 'BASE'} "
        f"--lora-adapters {adapter}"
    )
