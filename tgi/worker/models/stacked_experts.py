"""Checkpoints whose tensors hold the matrices of all experts of a layer: each expert's part gets a name of its own."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from torch import Tensor
from typing_extensions import override

from tgi.worker.checkpoint import Checkpoint
from tgi.worker.decoder_config import CheckpointLayout, DecoderConfig, StackedExperts
from tgi.worker.models.checkpoint_layout import RenamedCheckpoint


class _Part(NamedTuple):
    """A part of a stored tensor."""

    tensor: str
    expert: int
    half: int | None  # of the outputs: 0 the gate, 1 the up projection; None: all


class StackedExpertsCheckpoint(RenamedCheckpoint):
    """Has, in place of the stacked tensors, their parts by the names that they would have as tensors of their own: of
    "mlp.experts.gate_up_proj" these are "mlp.experts.0.gate_proj.weight", "mlp.experts.0.up_proj.weight" and so on, of
    "mlp.experts.gate_up_proj_bias", "mlp.experts.0.gate_proj.bias" and so on."""

    def __init__(self, directory: Path, config: DecoderConfig, stacked: StackedExperts, experts: int) -> None:
        names = config.names
        super().__init__(directory, names.layout or CheckpointLayout(()), config)
        self._stacked, self._experts = stacked, experts
        self._parts: dict[str, _Part] = {}
        parts: dict[str, dict[int | None, str]] = {
            stacked.gate_up: {0: names.expert_gate, 1: names.expert_up},
            stacked.down: {None: names.expert_down},
        }
        if stacked.up is not None:
            parts |= {stacked.gate_up: {None: names.expert_gate}, stacked.up: {None: names.expert_up}}
        pattern = re.compile(rf"((?:model|mtp)\.layers\.\d+\.)({'|'.join(map(re.escape, parts))})[._]?(\w*)")
        for stored, path in list(self._file_by_name.items()):
            if (found := pattern.fullmatch(stored)) is None:
                continue
            prefix, tensor, column = found.groups()
            for expert in range(experts):
                for half, name in parts[tensor].items():
                    one = f"{prefix}{name.format(expert)}.{column or 'weight'}"
                    self._parts[one], self._file_by_name[one] = _Part(stored, expert, half), path

    def __iter__(self) -> Iterator[str]:
        stacks = {part.tensor for part in self._parts.values()}
        return (name for name in super().__iter__() if name not in stacks)

    @override
    def raw_tensor(self, name: str) -> Tensor:
        """A part of a stacked tensor is a copy."""
        part = self._parts.get(name)
        if part is None:
            return super().raw_tensor(name)
        stored = super().raw_tensor(part.tensor)
        if self._stacked.flat and len(stored) % self._experts == 0:
            stored = stored.unflatten(0, (self._experts, -1))
        if len(stored) != self._experts:
            raise self.shape_error(part.tensor, stored.shape, (self._experts, *stored.shape[1:]))
        one = stored[part.expert]
        is_down = self._stacked.down_inputs_first and self._stacked.down in part.tensor
        if (self._stacked.inputs_first or is_down) and name.endswith(".weight"):
            one = one.t()
        if part.half is not None:
            one = one[part.half :: 2] if self._stacked.interleaved else one.tensor_split(2)[part.half]
        return one.contiguous()


def open_checkpoint(directory: Path, config: DecoderConfig) -> Checkpoint:
    """The checkpoint of a decoder, by a llama's names, with one for each matrix of an expert. Raises UserError as
    Checkpoint does."""
    names, experts = config.names, config.experts
    if names.stacked is not None and experts is not None:
        return StackedExpertsCheckpoint(directory, config, names.stacked, experts.count)
    if names.layout is not None:
        return RenamedCheckpoint(directory, names.layout, config)
    return Checkpoint(directory)
