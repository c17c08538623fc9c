"""Models for benchmarks: layer shapes of known models, with random weights."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tgi.worker.layers.linear import Linear

# Defaults of all shapes: SmolLM2-135M.
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
SHAPES: dict[str, dict[str, Any]] = {
    "135m": {},
    "0.5b": {  # Qwen2.5-0.5B
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "1b": {  # Llama-3.2-1B
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "two-layer": {
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    },
}


class RandomCheckpoint:
    """A weight source with random bfloat16 tensors instead of files."""

    def __init__(self, device: str = "cpu") -> None:
        self._device = device

    def __contains__(self, name: str) -> bool:
        return name != "lm_head.weight"

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Random numbers that preserve the scale of activations."""
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16, device=self._device)
        return (torch.randn(shape, device=self._device) / shape[-1] ** 0.5).to(torch.bfloat16)

    def weight(self, name: str, outputs: int, inputs: int) -> Tensor:
        """Random weight of a layer."""
        return self.tensor(name, outputs, inputs)


def matrices(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """The matrices of a layer: checkpoint name -> (outputs, inputs)."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    keys = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    return {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }


def write_model(config: dict[str, Any], directory: Path, device: str) -> None:
    """Writes a model directory without a tokenizer. The weights are generated on `device` and are in host memory until
    they are written."""
    made = RandomCheckpoint(device)
    config = config | {"torch_dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(config))
    save_file(
        {name: made.tensor(name, *shape).cpu() for name, shape in _tensors(config)}, directory / "model.safetensors"
    )


def _tensors(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Tensor names and shapes."""
    hidden = config["hidden_size"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for number in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{number}."
        for name, shape in matrices(config).items():
            yield f"{prefix}{name}.weight", shape
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}{name}.weight", (hidden,)
    yield "model.norm.weight", (hidden,)


def stored(part: Any) -> int:
    """Bytes of the weights of linear layers in any format, of one or of all in a tuple or list, without norms."""
    if isinstance(part, Linear):
        return stored(part._weight)
    if isinstance(part, (tuple, list)) and not hasattr(part, "nbytes"):
        return sum(map(stored, part))
    return int(getattr(part, "nbytes", 0))
