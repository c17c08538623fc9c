"""Where a model's weights come from, whatever form they have there."""

import logging
import math
from typing import Protocol

import torch
from torch import Tensor

from tgi.kernel.errors import UserError
from tgi.worker import float8
from tgi.worker.checkpoint import Checkpoint
from tgi.worker.quantization.quantize import GROUP, Quantize, quantized
from tgi.worker.quantization.weight import GROUPS, QuantizedWeight, Weight, plain

log = logging.getLogger(__name__)

LEAST_SCALE = 2.0**-20  # of a weight's largest: float16 has smaller ones, but with too few bits
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"  # what checkpoints call the first layer and the last


class Source(Protocol):
    """The weights of a model by the names of its plain checkpoint. Raises UserError where one is missing or unfit."""

    def __contains__(self, name: str) -> bool:
        """Whether there is a tensor of that name: "lm_head.weight" also where its weight is quantized."""

    def tensor(self, name: str, *shape: int) -> Tensor:
        """A tensor that is to be plain: of a norm, a bias or a router."""

    def weight(self, name: str, outputs: int, inputs: int) -> Weight:
        """The weight [outputs, inputs] of the layer of that name, which is "lm_head", not "lm_head.weight"."""


class PackedSource:
    """Reads quantized weights from the columns of QuantizedWeight, where a checkpoint has them: NAME.weight.codes,
    NAME.weight.scales and, if there are any, NAME.weight.shifts. All else is plain."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def __contains__(self, name: str) -> bool:
        return name in self._checkpoint or f"{name}.codes" in self._checkpoint

    def tensor(self, name: str, *shape: int) -> Tensor:
        """See Source."""
        if f"{name}.codes" in self._checkpoint and len(shape) == 2:
            return plain(self.weight(name.removesuffix(".weight"), *shape), torch.float32)
        return self._checkpoint.tensor(name, *shape)

    def weight(self, name: str, outputs: int, inputs: int) -> Weight:
        """See Source."""
        stored = f"{name}.weight"
        if f"{stored}.codes" not in self._checkpoint:
            return self._checkpoint.tensor(stored, outputs, inputs)
        codes, scales = (self._checkpoint.stored(f"{stored}.{column}") for column in ("codes", "scales"))
        shifts = f"{stored}.shifts"
        found = QuantizedWeight(codes, scales, self._checkpoint.stored(shifts) if shifts in self._checkpoint else None)
        _need_columns(stored, found)
        if found.shape != (outputs, inputs):
            raise self._checkpoint.other_shape(stored, found.shape, (outputs, inputs))
        return found


def _need_columns(name: str, found: QuantizedWeight) -> None:
    """Raises UserError unless the columns are those of a QuantizedWeight, and fit each other."""
    codes, scales, shifts, _ = found
    fit = codes.dtype in (torch.int8, torch.uint8) and codes.dim() == scales.dim() == 2 and scales.numel() > 0
    fit = fit and codes.shape[0] == scales.shape[0] and found.shape[1] % scales.shape[1] == 0 and found.group in GROUPS
    for column in (scales, scales if shifts is None else shifts):
        fit = fit and column.dtype is torch.float16 and column.shape == scales.shape
    if not fit:
        raise UserError(f"The quantized weight {name!r} has columns that do not fit each other. Fetch the model again.")


class QuantizingSource:
    """Quantizes what another source reads plain, when it is asked for: the plain weights are never all in memory.

    The first layer and the last are made of 8 bits where others are of 4, and stay plain where others are 8-bit floats,
    which are further off than whole numbers of 8 bits: errors there are dear, and they are few.
    """

    def __init__(self, source: Source, form: str, quantize: Quantize = quantized) -> None:
        self._source = source
        self._form = form
        self._quantize = quantize
        self._told: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._source

    def tensor(self, name: str, *shape: int) -> Tensor:
        """See Source."""
        return self._source.tensor(name, *shape)

    def weight(self, name: str, outputs: int, inputs: int) -> Weight:
        """See Source."""
        found = self._source.weight(name, outputs, inputs)
        if isinstance(found, QuantizedWeight):
            self._tell(name, "quantized already")
            return found
        if inputs % GROUP:
            self._tell(name, f"of inputs that are no multiple of {GROUP}")
            return found
        floats = self._form == "fp8"
        if floats and name in (EMBEDDING, HEAD):
            return found
        if floats and not float8.fits(outputs, inputs):
            self._tell(name, f"of outputs that are no multiple of {float8.MULTIPLE}")
            return found
        made = self._quantize(found, "int8" if name in (EMBEDDING, HEAD) else self._form)
        least = 0 if floats else LEAST_SCALE
        if not least < float(made.scales.abs().max()) < math.inf:
            self._tell(name, "of numbers too large or too small for its scales")
            return found
        return made

    def _tell(self, name: str, why: str) -> None:
        """Logs why a weight is left alone, for the first of its kind."""
        if why not in self._told:
            self._told.add(why)
            log.warning("--quantize leaves %s as it is, and others like it: it is %s", name, why)
