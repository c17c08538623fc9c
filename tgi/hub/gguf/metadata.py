"""Typed look-ups in a GGUF file's metadata."""

import math
from typing import Any

from tgi.hub.gguf.reader import GGUF
from tgi.kernel.errors import UserError


class Metadata:
    """Typed look-ups that end in a sentence."""

    def __init__(self, file: GGUF) -> None:
        self.file = file

    def string(self, key: str) -> str:
        value = self.file.metadata.get(key)
        if not isinstance(value, str):
            raise self.wrong(key, value, "a string")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.file.metadata.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.wrong(key, value, "a whole number")
        return value

    def positive(self, key: str, default: int | None = None) -> int:
        value = self.integer(key, default)
        if value == 0:
            raise self.wrong(key, value, "a positive number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.file.metadata.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.wrong(key, value, "a positive number")
        return float(f"{value:.7g}")  # 1e-5 stored as float32 reads 9.999999747378752e-06

    def wrong(self, key: str, value: Any, expected: str) -> UserError:
        found = "is missing" if value is None else f"is {str(value)[:80]!r}"
        return UserError(f"{self.file.path}: the metadata key {key!r} {found}; {expected} was expected.")
