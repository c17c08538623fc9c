"""Checkpoints of families whose tensors have other names than a llama's, or another order of rows."""

import re
from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import override

from tgi.microkernel.errors import UserError
from tgi.worker.checkpoint import Checkpoint
from tgi.worker.decoder_config import CheckpointLayout, DecoderConfig
from tgi.worker.quantization.weight_forms import POSITIONS


class RenamedCheckpoint(Checkpoint):
    """Has the tensors by a llama's names, with the rows and columns in its order. Those that are stored by these names,
    as of imported GGUF files, are stored in this order, too."""

    def __init__(self, directory: Path, layout: CheckpointLayout, config: DecoderConfig) -> None:
        super().__init__(directory)
        self._layout, self._config = layout, config
        patterns = [(re.compile(pattern), replacement) for pattern, replacement in layout.renames]

        def renamed(name: str) -> str:
            for pattern, replacement in patterns:
                name = pattern.sub(replacement, name)
            return name

        names = {renamed(name): name for name in self._file_by_name}
        self._renamed = {name for name, old in names.items() if name != old}
        self._stored_names = {name: self._stored_names[old] for name, old in names.items()}
        self._file_by_name = {name: self._file_by_name[old] for name, old in names.items()}

    @override
    def raw_tensor(self, name: str) -> Tensor:
        """Raises UserError for a quantized joint matrix of queries, keys and values to be reordered."""
        tensor = super().raw_tensor(name)
        if name not in self._renamed:
            return tensor
        module, _, kind = name.rpartition(".")
        if module == POSITIONS:
            return tensor[self._layout.positions_offset :]
        if self._layout.transposed and tensor.ndim == 2 and name.startswith("model.layers.") and kind == "weight":
            return tensor.t().contiguous()
        if self._layout.qkv_rows is None or not module.endswith(self._config.names.query):
            return tensor
        if kind not in ("weight", "bias"):
            raise UserError(
                f"Tensor {name!r} in {self.file_of(name)} is quantized, and has rows of queries, keys and values in "
                "turn: this server reads only plain weights so. Serve the original weights, with --quantize."
            )
        return self._in_order(tensor)

    def _in_order(self, rows: Tensor) -> Tensor:
        """All queries, then all keys, then all values."""
        config = self._config
        heads = config.heads // config.kv_heads + 2  # per key head
        if rows.shape[0] != config.kv_heads * heads * config.head_dim:
            return rows  # its shape is refused later
        groups = rows.view(config.kv_heads, heads, config.head_dim, *rows.shape[1:])
        queries, keys, values = groups.tensor_split((heads - 2, heads - 1), 1)
        return torch.cat([part.flatten(0, 2) for part in (queries, keys, values)])
