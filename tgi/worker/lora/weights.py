"""LoRA weights: the two low-rank matrices of each projection that an adapter changes, and how they are read.

The names of an adapter's modules follow from the names of the projections in the model's checkpoint. Where several
projections are one matrix there (phi3), they share the adapter's A, and its B holds the parts of all of them, one above
the other.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tgi.hub.weight_files import TEXT_PREFIXES, text_name
from tgi.microkernel.errors import UserError
from tgi.worker.decoder_config import DecoderConfig
from tgi.worker.layers.linear import ROW_TILE, RowCounts
from tgi.worker.lora.config import WEIGHTS_FILE, LoraConfig, weights_path
from tgi.worker.lora.projections import (
    PROJECTION_GROUPS,
    PROJECTIONS,
    Module,
    ProjectionParts,
    adaptable_modules,
    projection_shapes,
)

# Row counts to try for a product. Below 4, some libraries use other code, which sums in another order.
ROW_SIZES = (4, 8, 16, ROW_TILE, 64, 128)


class LoraPair(NamedTuple):
    """The delta of one projection: x @ a @ b. The adapter's scale is part of b."""

    a: Tensor  # [inputs, rank]
    b: Tensor  # [rank, outputs]


class LoraWeights:
    """An adapter in memory. `layers` has for each layer a LoraPair or None for each of PROJECTIONS."""

    def __init__(self, layers: Sequence[Sequence[LoraPair | None]]) -> None:
        self.layers = layers
        changed = {name for pairs in layers for name, pair in zip(PROJECTIONS, pairs, strict=True) if pair is not None}
        self.groups = {
            group for group, matrices in PROJECTION_GROUPS.items() if any(changed & set(matrix) for matrix in matrices)
        }
        given = [pair for pairs in layers for pair in pairs if pair is not None]
        self.rows = choose_lora_rows(given)
        self.rank, self.dtype = max(pair.b.shape[0] for pair in given), given[0].a.dtype
        self.table: Tensor | None = None  # launched_deltas.adapter_table, on our GPU kernels

    def select_part(self, parts: ProjectionParts) -> "LoraWeights":
        """The adapter of one rank of several."""

        def select(name: str, pair: LoraPair | None) -> LoraPair | None:
            if pair is None:
                return None
            rows = parts.inputs.get(name, range(len(pair.a)))
            columns = parts.outputs.get(name, range(pair.b.shape[1]))
            return LoraPair(
                pair.a[rows.start : rows.stop].contiguous(), pair.b[:, columns.start : columns.stop].contiguous()
            )

        return LoraWeights(
            [[select(name, pair) for name, pair in zip(PROJECTIONS, pairs, strict=True)] for pairs in self.layers]
        )


def compute_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype that adapters of a model with this dtype compute in. On CPU float32: faster in small products."""
    return torch.float32 if device.type == "cpu" else dtype


def choose_lora_rows(pairs: Iterable[LoraPair]) -> RowCounts:
    """The row counts for which products with these matrices agree bit for bit, found by trying each shape."""
    matrices = {matrix.shape: matrix for pair in pairs for matrix in pair}
    if any(matrix.device.type != "cpu" for matrix in matrices.values()):
        return RowCounts(())
    torch.get_num_threads()  # sets this thread's number of threads, which a new thread does only at its first use
    agreed = set(ROW_SIZES)
    for matrix in matrices.values():
        generator = torch.Generator().manual_seed(matrix.shape[0])
        x = torch.randn(ROW_SIZES[-1], matrix.shape[0], generator=generator)
        expected = torch.cat([torch.mm(tile, matrix) for tile in x.split(ROW_TILE)])
        for size in ROW_SIZES:
            if not torch.equal(torch.cat([torch.mm(tile, matrix) for tile in x.split(size)]), expected):
                agreed.discard(size)
    return RowCounts(tuple(sorted({ROW_TILE, *agreed})))


MAX_RANK = 512
TENSOR_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")
MLX_TENSOR_NAME = re.compile(r"(?P<module>.+)\.lora_(?P<side>[ab])")  # transposed: [inputs, rank] and [rank, outputs]
WRAPPERS = re.compile(r"\b_(?:orig_mod|checkpoint_wrapped_module|fsdp_wrapped_module)\.")  # of torch, left by trainers
NO_PREFIX = "", ""  # as in TEXT_PREFIXES
SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Why a tensor does not fit, by a part of its name.
UNSUPPORTED_TENSORS = {
    **dict.fromkeys(
        ("vision", "visual", "image_", "multi_modal_projector", "connector", "resampler"),
        "adapters of the part of a model that sees images are not served",
    ),
    "lora_magnitude_vector": "DoRA adapters are not served",
    "modules_to_save": "whole modules in addition to the adapter are not served",
    "embed_tokens": "adapters of the embedding are not served",
    "lora_embedding": "adapters of the embedding are not served",
    **dict.fromkeys(
        ("q_a_proj", "q_b_proj", "kv_a_proj", "kv_b_proj"), "adapters of the projections to latents are not served"
    ),
    "lm_head": "adapters of the output layer are not served",
    "cross_attn": "adapters of the attention to images are not served",
    ".bias": "adapters with biases are not served",
    "expert": "adapters of a mixture's experts are not served",
    "block_sparse_moe": "adapters of a mixture's experts are not served",
}


def read_adapter(directory: Path, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> LoraWeights:
    """Reads the adapter in `directory` for a model with this config, as tensors of `dtype`.

    Raises UserError, naming file and tensor, if it is damaged, made for another model, or of a kind that is not served.
    """
    lora = LoraConfig(directory)
    path = weights_path(directory)
    if not path.is_file():
        raise UserError(_missing_weights_message(directory))
    modules = adaptable_modules(config)
    with torch.inference_mode():
        found, prefix = _read_tensors(path, modules)
        layers: list[list[LoraPair | None]] = [[None] * len(PROJECTIONS) for _ in config.layers]
        for name, (layer, projections) in modules.items():
            sides = found.get(name, {})
            if not sides:
                if lora.lists_modules and lora.targets(_spelled(name, prefix), layer):
                    raise UserError(f"{path} has no tensors for {name}, which {lora.path} names. {_FETCH_AGAIN}")
                continue
            pairs = _split_projections(path, _spelled(name, prefix), sides, projections, lora, config)
            for projection, pair in pairs.items():
                layers[layer][PROJECTIONS.index(projection)] = LoraPair(*(side.to(device, dtype) for side in pair))
        return LoraWeights(layers)


def _read_tensors(path: Path, modules: dict[str, Module]) -> tuple[dict[str, dict[str, Tensor]], tuple[str, str]]:
    """The matrices A and B of each module in the file, and which of TEXT_PREFIXES begins its names: an adapter of a
    model that sees images may name modules as the whole model does."""
    found: dict[str, dict[str, Tensor]] = {}
    prefix = NO_PREFIX
    try:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a dictionary
                name = WRAPPERS.sub("", key)
                match = TENSOR_NAME.fullmatch(name) or MLX_TENSOR_NAME.fullmatch(name)
                if match is None or (module := text_name(match["module"])) not in modules:
                    raise UserError(f"Tensor {key!r} in {path} does not fit: {_unsupported_reason(key)}.")
                tensor = _check_tensor(path, key, file.get_tensor(key))
                side = match["side"].upper()
                prefix = next((one for one in TEXT_PREFIXES if match["module"].startswith(one[0])), NO_PREFIX)
                found.setdefault(module, {})[side] = tensor if side == match["side"] else tensor.t()
    except (SafetensorError, OSError, ValueError, UnicodeError) as error:
        raise UserError(f"{path} cannot be read as safetensors: {error}. {_FETCH_AGAIN}") from error
    if not found:
        raise UserError(f"{path} has no tensors. {_FETCH_AGAIN}")
    return found, prefix


def _spelled(module: str, prefix: tuple[str, str]) -> str:
    """How the adapter's files name a module: the reverse of `text_name`."""
    whole, text = prefix
    return whole + module.removeprefix(text)


def _check_tensor(path: Path, key: str, tensor: Tensor) -> Tensor:
    if tensor.dtype not in SUPPORTED_DTYPES or tensor.ndim != 2:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise UserError(
            f"Tensor {key!r} in {path} is {kind} of shape {list(tensor.shape)}. Matrices in float32, bfloat16 and "
            "float16 can be loaded."
        )
    wide = tensor.to(torch.float32)
    if not wide.isfinite().all():
        raise UserError(f"Tensor {key!r} in {path} has values that are no finite numbers. {_FETCH_AGAIN}")
    return wide


def _split_projections(
    path: Path,
    name: str,
    sides: dict[str, Tensor],
    projections: tuple[str, ...],
    lora: LoraConfig,
    config: DecoderConfig,
) -> dict[str, LoraPair]:
    """The matrices of each projection of a module."""
    wanted = [projection_shapes(config)[projection] for projection in projections]
    outputs = [shape.outputs for shape in wanted]
    rank = lora.rank(name)
    if rank > MAX_RANK:
        raise UserError(f"{lora.path} says rank {rank} for {name}. {MAX_RANK} is the most that is served.")
    for side, shape in (("A", [rank, wanted[0].inputs]), ("B", [sum(outputs), rank])):
        if side not in sides:
            raise UserError(f"{path} has no lora_{side} for {name}. {_FETCH_AGAIN}")
        if list(sides[side].shape) != shape:
            raise UserError(
                f"lora_{side} of {name} in {path} has shape {list(sides[side].shape)}, but the model and rank {rank} "
                f"in {lora.path} ask for {shape}. Is the adapter made for this model?"
            )
    a = sides["A"].t().contiguous()
    parts = (sides["B"] * lora.scale(name)).split(outputs)
    return {projection: LoraPair(a, part.t().contiguous()) for projection, part in zip(projections, parts, strict=True)}


_FETCH_AGAIN = "It is incomplete or damaged: fetch the adapter again."


def _unsupported_reason(key: str) -> str:
    return next((why for part, why in UNSUPPORTED_TENSORS.items() if part in key), "this model has no such projection")


def _missing_weights_message(directory: Path) -> str:
    if (directory / "adapter_model.bin").is_file():
        return (
            f"{directory} has its weights in adapter_model.bin, a pickled file, which can run code and is never "
            "loaded. Convert it to safetensors, for example with peft's save_pretrained in a trusted environment."
        )
    return f"{directory} has no {WEIGHTS_FILE}, so there is nothing to load."
