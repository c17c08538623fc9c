"""How a model's weights come, and what becomes of them: what its directory says, and what --quantize asks for."""

import logging
from pathlib import Path
from typing import Any, NamedTuple

from tgi.kernel.errors import UserError
from tgi.kernel.settings import MADE_AT_LOAD
from tgi.worker.checkpoint import Checkpoint
from tgi.worker.quantization.formats import FORMATS, Format, FormatSource, find_format
from tgi.worker.quantization.quantize import Quantize, quantized
from tgi.worker.quantization.source import PackedSource, QuantizingSource, Source

log = logging.getLogger(__name__)

# The names of --quantize for weights that are so already, and the formats that a checkpoint may have for each. marlin
# names kernels for two; fp8 is also made of plain weights.
STORED: dict[str, tuple[type, ...]] = {name: (FORMATS[name],) for name in ("gptq", "awq", "compressed-tensors", "fp8")}
STORED["marlin"] = (FORMATS["gptq"], FORMATS["awq"])


class Scheme(NamedTuple):
    """Of one model."""

    stored: Format | None = None  # how its weights are quantized already; None: plain, or as PackedSource reads it
    made: str | None = None  # what plain weights are made at load: "int8", "int4", "fp8"; None: they stay plain

    def stored_source(self, checkpoint: Checkpoint, float8: bool = False) -> Source:
        """What reads the weights as they lie in the files."""
        return PackedSource(checkpoint) if self.stored is None else FormatSource(checkpoint, self.stored, float8)

    def source(self, checkpoint: Checkpoint, quantize: Quantize = quantized, float8: bool = False) -> Source:
        """What reads the weights as they are computed with. Plain ones are quantized by `quantize`. `float8`: where
        they are to be, 8-bit floats are multiplied as they are. Raises UserError where that is asked for and not so."""
        for remark in () if self.stored is None else self.stored.remarks:
            log.debug("%s", remark)
        stored = self.stored_source(checkpoint, float8)
        if self.made is None:
            return stored
        if self.made == "fp8" and not float8:
            raise UserError(
                "--quantize fp8 makes weights 8-bit floats, which this device does not multiply: NVIDIA GPUs from "
                "compute capability 8.9 on do (Ada, Hopper and later). Choose int8 or int4, which are for all devices."
            )
        log.debug("plain weights are made %s at load", self.made)
        return QuantizingSource(stored, self.made, quantize)


def read_scheme(directory: Path, config: dict[str, Any], quantize: str | None) -> Scheme:
    """Of the model in a directory with this config.json. `quantize` is None or one of settings.QUANTIZATIONS. Raises
    UserError for what is not served."""
    if quantize == "exl2":
        raise UserError(
            "--quantize exl2 is not supported: weights in exl2 are not read. Use GPTQ, AWQ or GGUF weights."
        )
    stored = find_format(directory, config)
    made = MADE_AT_LOAD.get(quantize or "")
    if isinstance(stored, STORED.get(quantize or "", ())):
        return Scheme(stored)
    if quantize is None or made is not None:
        return Scheme(stored, made)
    if stored is None:
        raise UserError(
            f"--quantize {quantize} is for weights that are quantized already, and those in {directory} are not. "
            f"Choose int8 or int4, which are made at load, or leave out --quantize."
        )
    raise UserError(
        f"--quantize {quantize} is for weights of that kind, and those in {directory} are of another: "
        f"{stored.remarks[0]}. Leave out --quantize: how they are quantized shows in their config."
    )
