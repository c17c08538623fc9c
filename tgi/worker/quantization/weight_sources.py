"""Sources of a model's weights: the loader's one interface to plain, pre-quantized and yet-to-be-quantized weights."""

import logging
import math
from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import override

from tgi.microkernel.errors import UserError
from tgi.worker.checkpoint import Checkpoint
from tgi.worker.quantization.float4 import Float4Weight
from tgi.worker.quantization.layer_tensors import LayerTensors, StoredWeight
from tgi.worker.quantization.quantize import WeightQuantizer, quantize_weight
from tgi.worker.quantization.weight import QuantizedWeight, Weight, as_plain
from tgi.worker.quantization.weight_forms import (
    EMBEDDING,
    FACTOR_GROUP,
    FLOAT8_MULTIPLE,
    GROUPS,
    HEAD,
    INT8,
    MX_GROUP,
    form_made_at_load,
)

log = logging.getLogger(__name__)

# Smallest scale of a quantized weight's largest output: float16 has smaller numbers, but with too few bits.
MIN_LARGEST_SCALE = 2.0**-20


class WeightSource(Protocol):
    """The weights of a model by the names of its plain checkpoint. Raises UserError if one is missing or unfit."""

    def __contains__(self, name: str) -> bool:
        """Whether there is a tensor of that name: "lm_head.weight" also if that weight is quantized."""

    def tensor(self, name: str, *shape: int) -> Tensor:
        """A plain tensor: of a norm, a bias or a router."""

    def weight(self, name: str, outputs: int, inputs: int) -> Weight:
        """The weight [outputs, inputs] of the layer of that name, which is "lm_head", not "lm_head.weight"."""


class PackedWeightSource(WeightSource):
    """Reads quantized weights from the columns of QuantizedWeight, where a checkpoint has them: NAME.weight.codes,
    NAME.weight.scales and, if there are any, NAME.weight.shifts; of 4-bit floats NAME.weight.codes and uint8
    NAME.weight.factors. All other tensors are plain.

    Scales are floats, or int8 [outputs, groups] with float32 NAME.weight.super_scales [outputs, fewer groups], each for
    several neighbouring scales: their product is the scale. Shifts alike. `exact`: scales and shifts are not rounded to
    float16. A weight of which float16 cannot hold them is then dequantized.
    """

    def __init__(self, checkpoint: Checkpoint, exact: bool = False) -> None:
        self._checkpoint = checkpoint
        self._exact = exact

    def __contains__(self, name: str) -> bool:
        return name in self._checkpoint or f"{name}.codes" in self._checkpoint

    @override
    def tensor(self, name: str, *shape: int) -> Tensor:
        if f"{name}.codes" in self._checkpoint and len(shape) == 2:
            return as_plain(self.weight(name.removesuffix(".weight"), *shape), torch.float32)
        return self._checkpoint.tensor(name, *shape)

    @override
    def weight(self, name: str, outputs: int, inputs: int) -> Weight:
        stored = f"{name}.weight"
        if f"{stored}.codes" not in self._checkpoint:
            return self._checkpoint.tensor(stored, outputs, inputs)
        found = self._read(stored, self._exact)
        if found.shape != (outputs, inputs):
            raise self._checkpoint.shape_error(stored, found.shape, (outputs, inputs))
        if self._exact or all(_within_range(column) for column in (found.scales, found.shifts) if column is not None):
            return found
        log.debug("the weight of %s is dequantized at load: float16 cannot hold its scales", name)
        return self._read(stored, True).dequantized(torch.float32)

    def _read(self, name: str, exact: bool) -> QuantizedWeight:
        if f"{name}.factors" in self._checkpoint:
            return self._read_float4(name)
        shifts = self._factors(name, "shifts", exact) if f"{name}.shifts" in self._checkpoint else None
        found = QuantizedWeight(
            self._checkpoint.raw_tensor(f"{name}.codes"), self._factors(name, "scales", exact), shifts
        )
        codes, scales, *_ = found
        fit = codes.dtype in (torch.int8, torch.uint8) and codes.dim() == scales.dim() == 2 and scales.numel() > 0
        fit = fit and codes.shape[0] == scales.shape[0] and found.shape[1] % scales.shape[1] == 0
        fit = fit and found.group in GROUPS and (shifts is None or shifts.shape == scales.shape)
        if not fit:
            raise _unfit(name)
        return found if shifts is None or shifts.dtype is scales.dtype else found.with_factors(torch.float32)

    def _read_float4(self, name: str) -> QuantizedWeight:
        codes, factors = (self._checkpoint.raw_tensor(f"{name}.{column}") for column in ("codes", "factors"))
        fit = codes.dtype is factors.dtype is torch.uint8 and codes.dim() == factors.dim() == 2
        if not fit or len(codes) != len(factors) or 2 * codes.shape[1] != MX_GROUP * factors.shape[1]:
            raise _unfit(name)
        return Float4Weight(codes, factors).quantized()

    def _factors(self, name: str, column: str, exact: bool) -> Tensor:
        """Scales or shifts: float16, or float32 if `exact` and they are not stored as float16."""
        stored, dtype = self._checkpoint.raw_tensor(f"{name}.{column}"), torch.float32 if exact else torch.float16
        if f"{name}.super_{column}" not in self._checkpoint:
            if stored.dtype not in (torch.float16, torch.float32):
                raise _unfit(name)
            return stored if stored.dtype is torch.float16 else stored.to(dtype)
        units = self._checkpoint.raw_tensor(f"{name}.super_{column}")
        fit = stored.dtype is torch.int8 and units.dtype is torch.float32 and stored.dim() == units.dim() == 2
        fit = fit and units.numel() > 0 and len(stored) == len(units) and stored.shape[1] % units.shape[1] == 0
        if not fit:
            raise _unfit(name)
        found = torch.empty(*units.shape, stored.shape[1] // units.shape[1], dtype=dtype)
        torch.mul(stored.view(found.shape), units[:, :, None], out=found)
        return found.view(stored.shape)


def _unfit(name: str) -> UserError:
    return UserError(f"The quantized weight {name!r} has columns that do not fit each other. Fetch the model again.")


def _within_range(column: Tensor) -> bool:
    """Whether these scales or shifts were within the range of float16, to which they have been rounded."""
    return bool(column.isfinite().all())


class CheckpointFormat(Protocol):
    """How a checkpoint stores quantized weights."""

    @property
    def stored_as(self) -> tuple[str, ...]:
        """What follows a layer's name in the name of its weight tensor."""

    @property
    def remarks(self) -> tuple[str, ...]:
        """Lines for the log about this checkpoint."""

    def read_weight(self, tensors: LayerTensors) -> StoredWeight | Tensor:
        """The weight of a layer that has one of these tensors. Raises UserError if it is not as the format says."""


class FormatWeightSource(WeightSource):
    """Reads a checkpoint with weights in a format of other tools; a WeightSource. A weight that is not quantized stays
    plain, and one that QuantizedWeight cannot represent is dequantized: the log names the first one for each reason.
    Raises UserError if no weight at all is in that format."""

    def __init__(
        self, checkpoint: Checkpoint, format: CheckpointFormat, float8: bool = False, exact: bool = False
    ) -> None:
        """`float8`: the device multiplies 8-bit floats. `exact`: scales and shifts are not rounded to float16."""
        if not {name.rpartition(".")[2] for name in checkpoint} & set(format.stored_as):
            raise UserError(
                f"The config in {checkpoint.directory} says that its weights are quantized, but none of its tensors is "
                f"a {format.stored_as[0]}. Fetch the weights that it describes, or take that entry out of it."
            )
        self._checkpoint = checkpoint
        self._format = format
        self._float8 = float8
        self._exact = exact
        self._logged: set[str] = set()  # reasons

    def __contains__(self, name: str) -> bool:
        if name in self._checkpoint:
            return True
        layer = name.removesuffix(".weight")
        return layer != name and self._has_weight(layer)

    @override
    def tensor(self, name: str, *shape: int) -> Tensor:
        layer = name.removesuffix(".weight")
        if len(shape) == 2 and layer != name:
            return as_plain(self.weight(layer, *shape), torch.float32)
        return self._checkpoint.tensor(name, *shape)

    @override
    def weight(self, name: str, outputs: int, inputs: int) -> Weight:
        if not self._has_weight(name):
            return self._checkpoint.weight(name, outputs, inputs)
        found = self._format.read_weight(LayerTensors(self._checkpoint, name, outputs, inputs))
        if isinstance(found, Tensor):
            return found
        reason = found.unsupported_reason(self._exact, self._float8)
        if reason is None:
            return found.quantized(self._exact)
        if reason not in self._logged:
            self._logged.add(reason)
            log.debug("the weight of %s, and others like it, is dequantized at load: %s", name, reason)
        return found.dequantized()

    def _has_weight(self, layer: str) -> bool:
        return any(f"{layer}.{column}" in self._checkpoint for column in self._format.stored_as)


class QuantizingWeightSource(WeightSource):
    """Quantizes the plain weights of another source when they are asked for: they are never all in memory.

    Errors of the first and the last layer weigh most, and these layers are few: they get 8 bits where others get 4, and
    stay plain where others become 8-bit floats, which are less exact than 8-bit integers with a scale per output.
    """

    def __init__(self, source: WeightSource, form: str, quantize: WeightQuantizer = quantize_weight) -> None:
        self._source = source
        self._form = form
        self._quantize = quantize
        self._logged: set[str] = set()  # reasons

    def __contains__(self, name: str) -> bool:
        return name in self._source

    @override
    def tensor(self, name: str, *shape: int) -> Tensor:
        return self._source.tensor(name, *shape)

    @override
    def weight(self, name: str, outputs: int, inputs: int) -> Weight:
        """Weights that cannot be quantized stay as they are, which is logged."""
        found = self._source.weight(name, outputs, inputs)
        if isinstance(found, QuantizedWeight):
            self._log_skipped(name, "quantized already")
            return found
        if (form := form_made_at_load(self._form, name, outputs, inputs)) is None:
            if inputs % FACTOR_GROUP:
                self._log_skipped(name, f"of inputs that are no multiple of {FACTOR_GROUP}")
            elif name not in (EMBEDDING, HEAD):
                self._log_skipped(name, f"of outputs that are no multiple of {FLOAT8_MULTIPLE}")
            return found
        made = self._quantize(found, "int8" if form == INT8 else self._form)
        least = 0 if form.floating else MIN_LARGEST_SCALE
        if not least < float(made.scales.abs().max()) < math.inf:
            self._log_skipped(name, "of numbers too large or too small for its scales")
            return found
        return made

    def _log_skipped(self, name: str, why: str) -> None:
        """Logs why a weight is not quantized, once for each reason."""
        if why not in self._logged:
            self._logged.add(why)
            log.warning("--quantize leaves %s as it is, and others like it: it is %s", name, why)
