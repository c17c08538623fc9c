"""Reads the tensors of an adapter and fits them to the projections of a model.

What an adapter's modules are called follows from the names that the model's checkpoint has for its projections. Where
several projections are one matrix there (phi3), the adapter's A serves all of them, and its B holds theirs, one above
the other.
"""

import re
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tgi.kernel.errors import UserError
from tgi.worker.lora.config import LoraConfig
from tgi.worker.lora.files import WEIGHTS
from tgi.worker.lora.weights import PROJECTIONS, LoraWeights, Pair, shapes
from tgi.worker.models.config import DecoderConfig

MOST_RANK = 512
KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")
FORMATS = (torch.float32, torch.bfloat16, torch.float16)
# Parts of names that say why a tensor does not fit.
REASONS = {
    "lora_magnitude_vector": "DoRA adapters are not served",
    "modules_to_save": "whole modules beside the adapter are not served",
    "embed_tokens": "adapters of the embedding are not served",
    "lora_embedding": "adapters of the embedding are not served",
    "lm_head": "adapters of the output layer are not served",
    ".bias": "adapters with biases are not served",
    "expert": "adapters of a mixture's experts are not served",
    "block_sparse_moe": "adapters of a mixture's experts are not served",
}

Module = tuple[int, tuple[str, ...]]  # a layer, and which of PROJECTIONS are one matrix there


def read_adapter(directory: Path, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> LoraWeights:
    """The adapter in `directory`, for a model with this config, as tensors of `dtype`.

    Raises UserError, naming file and tensor, where it is broken, of another model, or of a kind that is not served.
    """
    lora = LoraConfig(directory)
    path = directory / WEIGHTS
    if not path.is_file():
        raise UserError(_nothing_here(directory))
    modules = _modules(config)
    with torch.inference_mode():
        found = _tensors(path, modules)
        layers: list[list[Pair | None]] = [[None] * len(PROJECTIONS) for _ in config.layers]
        for name, (layer, projections) in modules.items():
            sides = found.get(name, {})
            if not sides:
                if lora.targets(name, layer):
                    raise UserError(f"{path} has no tensors for {name}, which {lora.path} names. {_AGAIN}")
                continue
            for projection, pair in _pairs(path, name, sides, projections, lora, config).items():
                layers[layer][PROJECTIONS.index(projection)] = Pair(*(side.to(device, dtype) for side in pair))
        return LoraWeights(layers)


def _modules(config: DecoderConfig) -> dict[str, Module]:
    """What adapters may change, by the names that checkpoints have for it."""
    found: dict[str, Module] = {}
    for number, layer in enumerate(config.layers):
        for projection in PROJECTIONS:
            inner = projection in ("gate", "up", "down")
            if projection not in shapes(config) or (inner and layer.routed):
                continue
            name = f"model.layers.{number}.{getattr(config.names, projection)}"
            _, others = found.get(name, (number, ()))
            found[name] = number, (*others, projection)
    return found


def _tensors(path: Path, modules: dict[str, Module]) -> dict[str, dict[str, Tensor]]:
    """Both sides of each module that the file has."""
    found: dict[str, dict[str, Tensor]] = {}
    try:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - it is no dictionary
                match = KEY.fullmatch(key)
                if match is None or match["module"] not in modules:
                    raise UserError(f"Tensor {key!r} in {path} does not fit: {_reason(key)}.")
                found.setdefault(match["module"], {})[match["side"]] = _checked(path, key, file.get_tensor(key))
    except (SafetensorError, OSError, ValueError, UnicodeError) as error:
        raise UserError(f"{path} cannot be read as safetensors: {error}. {_AGAIN}") from error
    if not found:
        raise UserError(f"{path} has no tensors. {_AGAIN}")
    return found


def _checked(path: Path, key: str, tensor: Tensor) -> Tensor:
    if tensor.dtype not in FORMATS or tensor.ndim != 2:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise UserError(
            f"Tensor {key!r} in {path} is {kind} of shape {list(tensor.shape)}. Matrices in float32, bfloat16 and "
            "float16 can be loaded."
        )
    wide = tensor.to(torch.float32)
    if not wide.isfinite().all():
        raise UserError(f"Tensor {key!r} in {path} has values that are no finite numbers. {_AGAIN}")
    return wide


def _pairs(
    path: Path,
    name: str,
    sides: dict[str, Tensor],
    projections: tuple[str, ...],
    lora: LoraConfig,
    config: DecoderConfig,
) -> dict[str, Pair]:
    """What the module's tensors add to each projection."""
    wanted = [shapes(config)[projection] for projection in projections]
    outputs = [shape.outputs for shape in wanted]
    rank = lora.rank(name)
    if rank > MOST_RANK:
        raise UserError(f"{lora.path} says rank {rank} for {name}. {MOST_RANK} is the most that is served.")
    for side, shape in (("A", [rank, wanted[0].inputs]), ("B", [sum(outputs), rank])):
        if side not in sides:
            raise UserError(f"{path} has no lora_{side} for {name}. {_AGAIN}")
        if list(sides[side].shape) != shape:
            raise UserError(
                f"lora_{side} of {name} in {path} has shape {list(sides[side].shape)}, but the model and rank {rank} "
                f"in {lora.path} ask for {shape}. Is the adapter made for this model?"
            )
    a = sides["A"].t().contiguous()
    parts = (sides["B"] * lora.scale(name)).split(outputs)
    return {projection: Pair(a, part.t().contiguous()) for projection, part in zip(projections, parts, strict=True)}


_AGAIN = "It is incomplete or damaged: fetch the adapter again."


def _reason(key: str) -> str:
    return next((why for part, why in REASONS.items() if part in key), "this model has no such projection")


def _nothing_here(directory: Path) -> str:
    if (directory / "adapter_model.bin").is_file():
        return (
            f"{directory} has its weights in adapter_model.bin, a pickled file, which can run code and is never "
            "loaded. Convert it to safetensors, for example with peft's save_pretrained in a place that you trust."
        )
    return f"{directory} has no {WEIGHTS}, so there is nothing to load."
