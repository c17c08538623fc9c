"""An adapter's adapter_config.json, as peft writes it: ranks, scales, and refusals of what is not served."""

import json
import math
import re
from pathlib import Path
from typing import Any

from tgi.kernel.errors import UserError
from tgi.worker.lora.files import CONFIG

# A pattern that repeats a group, or much, may take for ever to match.
REPEATED_GROUP = re.compile(r"\)[+*{]")
REPEATED = re.compile(r"[+*{]")
MOST_REPEATED, LONGEST_PATTERN = 4, 2000
# Values that change what is computed in ways that are not built, and what is said of them. Empty ones are fine.
REFUSED = {
    "use_dora": "DoRA adapters",
    "modules_to_save": "whole modules beside the adapter",
    "lora_bias": "adapters with biases",
    "target_parameters": "adapters of bare parameters, such as experts",
    "trainable_token_indices": "trained tokens",
    "layer_replication": "replicated layers",
    "use_bdlora": "block-diagonal adapters",
    "alora_invocation_tokens": "adapters that begin at a token",
}


class LoraConfig:
    """What the file says of the modules of a model, by their full names ("model.layers.0.self_attn.q_proj")."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / CONFIG
        values = _read(self.path)
        kind = values.get("peft_type")
        if kind != "LORA":
            raise UserError(f"{self.path} says peft_type {kind!r}. Only LORA adapters are served.")
        for key, what in REFUSED.items():
            if values.get(key):
                raise UserError(f"{self.path} says {key} {values[key]!r}: {what} are not served.")
        if values.get("bias", "none") != "none":
            raise UserError(f"{self.path} says bias {values['bias']!r}: adapters with biases are not served.")
        self._rank = self._number(values, "r", 8)
        self._alpha = self._number(values, "lora_alpha", 8)
        self._ranks = self._patterns(values, "rank_pattern")
        self._alphas = self._patterns(values, "alpha_pattern")
        self._stable = bool(values.get("use_rslora"))
        self._targets = self._names(values, "target_modules")
        self._excluded = self._names(values, "exclude_modules")
        self._layers = self._numbers(values, "layers_to_transform")

    def rank(self, module: str) -> int:
        """r of this module."""
        return int(_found(self._ranks, module, self._rank))

    def scale(self, module: str) -> float:
        """alpha / r, or with rank-stabilized scaling (Kalajdzievski, 2023) alpha / sqrt(r)."""
        rank = self.rank(module)
        return float(_found(self._alphas, module, self._alpha)) / (math.sqrt(rank) if self._stable else rank)

    def targets(self, module: str, layer: int) -> bool:
        """Whether the adapter is to have weights for this projection of a layer."""
        if self._targets is None or (self._excluded is not None and _among(self._excluded, module)):
            return False
        if isinstance(self._targets, list) and module in self._targets:
            return True
        chosen = self._layers is None or layer in self._layers
        return chosen and (self._targets == "all-linear" or _among(self._targets, module))

    def _number(self, values: dict[str, Any], key: str, missing: int) -> float:
        found = values.get(key, missing)
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < math.inf:
            raise UserError(f"{self.path} says {key} {found!r}. A number above 0 is expected.")
        return found

    def _numbers(self, values: dict[str, Any], key: str) -> set[int] | None:
        found = values.get(key)
        if found is None:
            return None
        numbers = found if isinstance(found, list) else [found]
        if not all(isinstance(number, int) for number in numbers):
            raise UserError(f"{self.path} says {key} {found!r}. A number, or a list of numbers, is expected.")
        return set(numbers)

    def _patterns(self, values: dict[str, Any], key: str) -> dict[re.Pattern[str], float]:
        found = values.get(key) or {}
        if not isinstance(found, dict):
            raise UserError(f"{self.path} says {key} {found!r}. Names of modules, each with a number, are expected.")
        return {self._compiled(rf"(.*\.)?({name})$", name): self._number(found, name, 0) for name in found}

    def _names(self, values: dict[str, Any], key: str) -> str | list[str] | re.Pattern[str] | None:
        found = values.get(key)
        if found is None or found == "all-linear":
            return found
        if isinstance(found, str):
            return self._compiled(found, found)
        if isinstance(found, list) and all(isinstance(name, str) for name in found):
            return found
        raise UserError(f"{self.path} says {key} {found!r}. A list of names, or a pattern, is expected.")

    def _compiled(self, pattern: str, shown: str) -> re.Pattern[str]:
        repeated = len(REPEATED.findall(shown))
        if len(shown) > LONGEST_PATTERN or repeated > MOST_REPEATED or REPEATED_GROUP.search(shown):
            raise UserError(
                f"{self.path} has the pattern {shown[:100]!r}, which may take for ever to match: no group may be "
                f"repeated, and no more than {MOST_REPEATED} other parts. List the names of the modules instead."
            )
        try:
            return re.compile(pattern)
        except re.error as error:
            raise UserError(f"{self.path} has the pattern {shown!r}, which is none: {error}.") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path.parent} has no {CONFIG}, so it is no LoRA adapter.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}. Fetch the adapter again.") from error
    if not isinstance(values, dict):
        raise UserError(f"{path} is not what peft writes: expected an object of settings.")
    return values


def _found(patterns: dict[re.Pattern[str], float], module: str, otherwise: float) -> float:
    return next((value for pattern, value in patterns.items() if pattern.match(module)), otherwise)


def _among(names: str | list[str] | re.Pattern[str], module: str) -> bool:
    if isinstance(names, re.Pattern):
        return names.fullmatch(module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)
