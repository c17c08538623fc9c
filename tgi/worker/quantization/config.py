"""The quantization entry of a model directory: in config.json, or in a file of its own."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from tgi.microkernel.errors import UserError

# Separate files of some checkpoints, and the method that each implies.
SEPARATE_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}

GGUF_METHOD = "gguf"  # the quant_method that hub/gguf/convert.py declares


class QuantizationConfig(NamedTuple):
    """The entries of a quantization config and the path of its file. Its methods raise UserError for an entry that is
    missing or has the wrong type."""

    path: Path
    values: dict[str, Any]

    @property
    def method(self) -> str:
        """The quant_method in lower case with dashes: "gptq", "compressed-tensors"."""
        return self.text("quant_method", "").lower().replace("_", "-")

    def integer(self, *names: str) -> int:
        """The integer entry with the first of these names that is present; tools differ in the name."""
        for name in names:
            if name in self.values:
                found = self.values[name]
                if isinstance(found, int) and not isinstance(found, bool):
                    return found
                raise self.unfit(f"{name} is {found!r}, but a whole number is expected")
        raise self.unfit(f"{names[0]} is missing")

    def text(self, name: str, default: str) -> str:
        """A string entry; the default if it is null or missing."""
        found = self.values.get(name)
        if found is None:
            return default
        if not isinstance(found, str):
            raise self.unfit(f"{name} is {found!r}, but a word is expected")
        return found

    def within(self, name: str) -> "QuantizationConfig":
        """An object entry; empty if it is null or missing."""
        found = self.values.get(name) or {}
        if not isinstance(found, dict):
            raise self.unfit(f"{name} is {found!r}, but an object is expected")
        return QuantizationConfig(self.path, found)

    def unfit(self, what: str) -> UserError:
        """The error to raise if weights with this config cannot be read."""
        return UserError(f"The quantized weights that {self.path} describes cannot be read: {what}.")


def find_config(directory: Path, config: dict[str, Any]) -> QuantizationConfig | None:
    """The quantization config of the model in `directory` with this config.json; None: its weights are plain. Raises
    UserError if a file cannot be read."""
    for name in ("quantization_config", "compression_config"):  # the second: early compressed-tensors
        if config.get(name) is not None:
            return _config_of(directory / "config.json", config[name])
    for file, method in SEPARATE_FILES.items():
        path = directory / file
        if path.is_file():
            try:
                values = json.loads(path.read_text())
            except (OSError, ValueError, RecursionError) as error:
                raise UserError(f"{path} cannot be read: {error}. Fetch the model again.") from error
            return _config_of(path, {"quant_method": method} | values if isinstance(values, dict) else values)
    return None


def _config_of(path: Path, values: object) -> QuantizationConfig:
    if not isinstance(values, dict):
        raise UserError(f"{path} has {values!r} where it should describe how the weights are quantized.")
    found = QuantizationConfig(path, values)
    return found._replace(values=values | found.within("quantization").values)  # modelopt's entries, in its own file
