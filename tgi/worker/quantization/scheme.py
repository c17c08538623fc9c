"""How a model's weights come, and what becomes of them: what its directory says, and what --quantize asks for."""

from pathlib import Path
from typing import Any, NamedTuple

from tgi.kernel.errors import UserError
from tgi.kernel.settings import MADE_AT_LOAD
from tgi.worker.checkpoint import Checkpoint
from tgi.worker.quantization.source import PackedSource, QuantizingSource, Source


class Scheme(NamedTuple):
    """Of one model."""

    stored: dict[str, Any] | None = None  # config.json's quantization_config; None: plain, or as PackedSource reads it
    made: str | None = None  # what plain weights are made at load: "int8", "int4"; None: they stay plain

    def stored_source(self, checkpoint: Checkpoint) -> Source:
        """What reads the weights as they lie in the files."""
        return PackedSource(checkpoint)

    def source(self, checkpoint: Checkpoint) -> Source:
        """What reads the weights as they are computed with."""
        stored = self.stored_source(checkpoint)
        return stored if self.made is None else QuantizingSource(stored, self.made)


def read_scheme(directory: Path, config: dict[str, Any], quantize: str | None) -> Scheme:
    """Of the model in a directory with this config.json. `quantize` is None or one of settings.QUANTIZATIONS. Raises
    UserError for what is not served."""
    if "quantization_config" in config:
        raise UserError(f"The weights in {directory} are quantized, which is not supported. Use the original weights.")
    if quantize is not None and quantize not in MADE_AT_LOAD:
        raise UserError(
            f"--quantize {quantize} is for weights that are quantized already, and those in {directory} are not. "
            f"Choose int8 or int4, which are made at load, or leave out --quantize."
        )
    return Scheme(None, None if quantize is None else MADE_AT_LOAD[quantize])
