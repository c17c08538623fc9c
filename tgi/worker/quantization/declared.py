"""What a model directory says of how its weights are quantized."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from tgi.kernel.errors import UserError

# Where older checkpoints say it, and the method that such a file goes without naming.
BESIDE = {"quantize_config.json": "gptq", "quant_config.json": "awq"}


class Declared(NamedTuple):
    """The entries that say it, and the file that they stand in. Raises UserError for what is missing or unfit."""

    path: Path
    values: dict[str, Any]

    @property
    def method(self) -> str:
        """The quant_method, in lower case and with dashes: "gptq", "compressed-tensors"."""
        return self.text("quant_method", "").lower().replace("_", "-")

    def integer(self, *names: str) -> int:
        """The entry of the first of these names that is there: one thing has had several names."""
        for name in names:
            if name in self.values:
                found = self.values[name]
                if isinstance(found, int) and not isinstance(found, bool):
                    return found
                raise self.unfit(f"{name} is {found!r}, but a whole number is expected")
        raise self.unfit(f"{names[0]} is missing")

    def text(self, name: str, default: str) -> str:
        """An entry that is a word; null and missing are the default."""
        found = self.values.get(name)
        if found is None:
            return default
        if not isinstance(found, str):
            raise self.unfit(f"{name} is {found!r}, but a word is expected")
        return found

    def within(self, name: str) -> "Declared":
        """An entry that has entries itself; null and missing are none."""
        found = self.values.get(name) or {}
        if not isinstance(found, dict):
            raise self.unfit(f"{name} is {found!r}, but an object is expected")
        return Declared(self.path, found)

    def unfit(self, what: str) -> UserError:
        """What to raise where the weights cannot be read as they are declared."""
        return UserError(f"The quantized weights that {self.path} describes cannot be read: {what}.")


def declared(directory: Path, config: dict[str, Any]) -> Declared | None:
    """Of the model in a directory with this config.json; None: its weights are plain."""
    for name in ("quantization_config", "compression_config"):  # the second is an early compressed-tensors' name
        if config.get(name) is not None:
            return _checked(directory / "config.json", config[name])
    for file, method in BESIDE.items():
        path = directory / file
        if path.is_file():
            try:
                values = json.loads(path.read_text())
            except (OSError, ValueError, RecursionError) as error:
                raise UserError(f"{path} cannot be read: {error}. Fetch the model again.") from error
            return _checked(path, {"quant_method": method} | values if isinstance(values, dict) else values)
    return None


def _checked(path: Path, values: object) -> Declared:
    if not isinstance(values, dict):
        raise UserError(f"{path} has {values!r} where it should describe how the weights are quantized.")
    return Declared(path, values)
