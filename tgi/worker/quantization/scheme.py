"""How a model's weights are quantized in its files, and what --quantize makes of them."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tgi.microkernel.errors import UserError
from tgi.microkernel.settings.table import QUANTIZED_AT_LOAD
from tgi.worker.checkpoint import Checkpoint
from tgi.worker.quantization.awq import AwqFormat
from tgi.worker.quantization.compressed_tensors import CompressedTensorsFormat
from tgi.worker.quantization.config import GGUF_METHOD, QuantizationConfig, find_config
from tgi.worker.quantization.fp8 import Fp8Format
from tgi.worker.quantization.gptq import GptqFormat
from tgi.worker.quantization.modelopt import ModeloptFormat
from tgi.worker.quantization.mxfp4 import Mxfp4Format
from tgi.worker.quantization.quantize import WeightQuantizer, quantize_weight
from tgi.worker.quantization.weight_sources import (
    CheckpointFormat,
    FormatWeightSource,
    PackedWeightSource,
    QuantizingWeightSource,
    WeightSource,
)

log = logging.getLogger(__name__)

# By the quant_method that a config declares.
FORMATS: dict[str, Callable[[QuantizationConfig], CheckpointFormat]] = {
    "gptq": GptqFormat,
    "awq": AwqFormat,
    "compressed-tensors": CompressedTensorsFormat,
    **dict.fromkeys(("fp8", "fbgemm-fp8"), Fp8Format),
    "mxfp4": Mxfp4Format,
    **dict.fromkeys(("modelopt", "modelopt-fp4", "modelopt-mixed"), ModeloptFormat),
}

# The values of --quantize that name a checkpoint format, and the formats that each accepts. marlin is a kernel for two
# formats; fp8 is also made from plain weights.
STORED_FORMATS: dict[str, tuple[type, ...]] = {
    "gptq": (GptqFormat,),
    "awq": (AwqFormat,),
    "compressed-tensors": (CompressedTensorsFormat,),
    "fp8": (Fp8Format,),
    "marlin": (GptqFormat, AwqFormat),
}


class QuantizationScheme(NamedTuple):
    """How the weights of one model are read, and quantized at load."""

    stored: CheckpointFormat | None = None  # None: plain, or in the columns that PackedWeightSource reads
    made: str | None = None  # what plain weights become at load: "int8", "int4", "fp8"; None: they stay plain

    def stored_source(self, checkpoint: Checkpoint, float8: bool = False, exact: bool = False) -> WeightSource:
        """A source of the weights as the files have them. `exact`: scales of groups are not rounded to float16."""
        return (
            PackedWeightSource(checkpoint, exact)
            if self.stored is None
            else FormatWeightSource(checkpoint, self.stored, float8, exact)
        )

    def source(
        self,
        checkpoint: Checkpoint,
        quantize: WeightQuantizer = quantize_weight,
        float8: bool = False,
        exact: bool = False,
    ) -> WeightSource:
        """A source of the weights as the model computes with them; `quantize` quantizes plain ones. `float8`: the
        device multiplies 8-bit floats. `exact`: as for `stored_source`. Raises UserError if --quantize fp8 is given and
        the device does not."""
        for remark in () if self.stored is None else self.stored.remarks:
            log.debug("%s", remark)
        stored = self.stored_source(checkpoint, float8, exact)
        if self.made is None:
            return stored
        if self.made == "fp8" and not float8:
            raise UserError(
                "--quantize fp8 makes weights 8-bit floats, which this device does not multiply: NVIDIA GPUs from "
                "compute capability 8.9 on do (Ada, Hopper and later). Choose int8 or int4, which are for all devices."
            )
        log.debug("plain weights are quantized to %s at load", self.made)
        return QuantizingWeightSource(stored, self.made, quantize)


def resolve_scheme(directory: Path, config: dict[str, Any], quantize: str | None) -> QuantizationScheme:
    """The scheme of the model in `directory` with this config.json. `quantize` is None or one of
    settings.QUANTIZATIONS. Raises UserError if the combination is not supported."""
    if quantize == "exl2":
        raise UserError(
            "--quantize exl2 is not supported: weights in exl2 are not read. Use GPTQ, AWQ or GGUF weights."
        )
    stored = find_format(directory, config)
    made = QUANTIZED_AT_LOAD.get(quantize or "")
    if isinstance(stored, STORED_FORMATS.get(quantize or "", ())):
        return QuantizationScheme(stored)
    if quantize is None or made is not None:
        return QuantizationScheme(stored, made)
    if stored is None:
        raise UserError(
            f"--quantize {quantize} is for weights that are quantized already, and those in {directory} are not. "
            f"Choose int8 or int4, which are made at load, or leave out --quantize."
        )
    raise UserError(
        f"--quantize {quantize} is for weights of that kind, and those in {directory} are of another: "
        f"{stored.remarks[0]}. Leave out --quantize: how they are quantized shows in their config."
    )


def find_format(directory: Path, config: dict[str, Any]) -> CheckpointFormat | None:
    """The checkpoint format of the model in `directory` with this config.json; None: its weights are plain, or in the
    columns that our own imports write (PackedWeightSource). Raises UserError if the format is not supported."""
    found = find_config(directory, config)
    if found is None or found.method == GGUF_METHOD:
        return None
    if found.method not in FORMATS:
        method = found.values.get("quant_method")
        raise found.unfit(
            f"quant_method is {method!r}, but {', '.join(FORMATS)} are read. Use such weights or the original ones"
        )
    return FORMATS[found.method](found)
