"""JSON Schema's own test suite, and texts held against a schema."""

import json
import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema

# [keyword, what it tests, schema, [[value, whether it is valid], …]]
SUITE: list[list[Any]] = json.loads((Path(__file__).parent / "json_schema_suite.json").read_text())["cases"]


def validate(text: str, schema: Any) -> None:
    """Raises if the text is not JSON or not valid. Patterns that Python does not have are not looked at."""
    value = json.loads(text, parse_float=_number)
    if r"\\p{" not in json.dumps(schema):
        jsonschema.Draft202012Validator(schema).validate(value)


def _number(text: str) -> Decimal | float:
    """Exact, or multiples could not be told; but for numbers that are too large for anybody."""
    return Decimal(text) if math.isfinite(float(text)) else math.inf
