"""Checkpoints that come quantized: which formats are read, and the source that reads them."""

import logging
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from tgi.kernel.errors import UserError
from tgi.worker.checkpoint import Checkpoint
from tgi.worker.quantization.awq import Awq
from tgi.worker.quantization.columns import Columns
from tgi.worker.quantization.compressed import Compressed
from tgi.worker.quantization.declared import declared
from tgi.worker.quantization.fp8 import Floats, Fp8
from tgi.worker.quantization.gptq import Gptq
from tgi.worker.quantization.levels import Levels
from tgi.worker.quantization.weight import Weight, plain

log = logging.getLogger(__name__)


class Format(Protocol):
    """How a checkpoint stores the weights of its layers."""

    @property
    def stored_as(self) -> tuple[str, ...]:
        """What follows the name of a layer in that of its weight."""

    @property
    def remarks(self) -> tuple[str, ...]:
        """What the log should say of this checkpoint."""

    def read(self, columns: Columns) -> Levels | Floats | Tensor:
        """The weight of a layer that has a tensor of one of those names, or UserError."""


# By the quant_method that a config declares.
FORMATS: dict[str, type[Gptq] | type[Awq] | type[Compressed] | type[Fp8]] = {
    "gptq": Gptq,
    "awq": Awq,
    "compressed-tensors": Compressed,
    "fp8": Fp8,
    "fbgemm-fp8": Fp8,
}
OWN = "gguf"  # what hub/gguf/convert.py declares


def find_format(directory: Path, config: dict[str, Any]) -> Format | None:
    """How the weights in a directory with this config.json are quantized; None: they are plain, or as our own imports
    write them, which PackedSource reads. Raises UserError where they are and cannot be read."""
    found = declared(directory, config)
    if found is None or found.method == OWN:
        return None
    if found.method not in FORMATS:
        method = found.values.get("quant_method")
        raise found.unfit(
            f"quant_method is {method!r}, but {', '.join(FORMATS)} are read. Use such weights or the original ones"
        )
    return FORMATS[found.method](found)


class FormatSource:
    """Reads a checkpoint whose weights are in a format of others; a Source (source.py). What is not quantized is plain,
    and so becomes what does not fit into QuantizedWeight; the log says once for each reason which weight was first.
    Raises UserError where no weight at all is in that format."""

    def __init__(self, checkpoint: Checkpoint, format: Format, float8: bool = False) -> None:
        """`float8`: weights are to be where 8-bit floats are multiplied as they are."""
        if not {name.rpartition(".")[2] for name in checkpoint} & set(format.stored_as):
            raise UserError(
                f"The config in {checkpoint.directory} says that its weights are quantized, but none of its tensors is "
                f"a {format.stored_as[0]}. Fetch the weights that it describes, or take that entry out of it."
            )
        self._checkpoint = checkpoint
        self._format = format
        self._float8 = float8
        self._said: set[str] = set()

    def __contains__(self, name: str) -> bool:
        if name in self._checkpoint:
            return True
        layer = name.removesuffix(".weight")
        return layer != name and self._has(layer)

    def tensor(self, name: str, *shape: int) -> Tensor:
        """See Source. A matrix that is to be plain is, whatever its form in the checkpoint."""
        layer = name.removesuffix(".weight")
        if len(shape) == 2 and layer != name:
            return plain(self.weight(layer, *shape), torch.float32)
        return self._checkpoint.tensor(name, *shape)

    def weight(self, name: str, outputs: int, inputs: int) -> Weight:
        """See Source."""
        if not self._has(name):
            return self._checkpoint.weight(name, outputs, inputs)
        found = self._format.read(Columns(self._checkpoint, name, outputs, inputs))
        if isinstance(found, Tensor):
            return found
        reason = found.misfit()
        if isinstance(found, Floats) and not self._float8:
            reason = "this device does not multiply 8-bit floats"
        if reason is None:
            return found.quantized()
        if reason not in self._said:
            self._said.add(reason)
            log.debug("the weight of %s, and others like it, becomes a plain one: %s", name, reason)
        return found.dequantized()

    def _has(self, layer: str) -> bool:
        return any(f"{layer}.{column}" in self._checkpoint for column in self._format.stored_as)
