"""An adapter's adapter_config.json as peft or mlx-lm writes it: ranks, scales, modules. Rejects what is not served."""

import json
import math
import re
from pathlib import Path
from typing import Any

from tgi.hub import adapter_files
from tgi.microkernel.errors import UserError

CONFIG_FILE, WEIGHTS_FILE = adapter_files.CONFIG, adapter_files.WEIGHTS

# A regular expression that repeats a group, or many parts, may take exponential time to match.
REPEATED_GROUP = re.compile(r"\)[+*{]")
REPEATED = re.compile(r"[+*{]")
MAX_REPEATED, MAX_PATTERN_LENGTH = 4, 2000
# Settings that change the computation in ways that are not implemented, with their description. Empty values are off.
UNSUPPORTED = {
    "use_dora": "DoRA adapters",
    "modules_to_save": "whole modules in addition to the adapter",
    "lora_bias": "adapters with biases",
    "target_parameters": "adapters of bare parameters, such as experts",
    "trainable_token_indices": "trained tokens",
    "layer_replication": "replicated layers",
    "use_bdlora": "block-diagonal adapters",
    "alora_invocation_tokens": "adapters that begin at a token",
}


class LoraConfig:
    """Rank and scale of each module, by its full name ("model.layers.0.self_attn.q_proj"). Raises UserError if the file
    is broken or asks for what is not served."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / CONFIG_FILE
        values = _read(self.path)
        self.lists_modules = True  # False: which modules it names is known from its tensors alone
        if "lora_parameters" in values and "peft_type" not in values:
            values, self.lists_modules = self._from_mlx(values), False
        kind = values.get("peft_type")
        if kind != "LORA":
            raise UserError(f"{self.path} says peft_type {kind!r}. Only LORA adapters are served.")
        for key, what in UNSUPPORTED.items():
            if values.get(key):
                raise UserError(f"{self.path} says {key} {values[key]!r}: {what} are not served.")
        if values.get("bias", "none") != "none":
            raise UserError(f"{self.path} says bias {values['bias']!r}: adapters with biases are not served.")
        self._rank = self._number(values, "r", 8)
        self._alpha = self._number(values, "lora_alpha", 8)
        self._ranks = self._patterns(values, "rank_pattern")
        self._alphas = self._patterns(values, "alpha_pattern")
        self._stable = bool(values.get("use_rslora"))
        targets = values.get("target_modules")
        if isinstance(targets, str) and _is_slow(targets):  # unsloth's pattern for models with a vision tower
            values, self.lists_modules = values | {"target_modules": "all-linear"}, False
        self._targets = self._names(values, "target_modules")
        self._excluded = self._names(values, "exclude_modules")
        self._layers = self._numbers(values, "layers_to_transform")

    def rank(self, module: str) -> int:
        return int(_match_pattern(self._ranks, module, self._rank))

    def scale(self, module: str) -> float:
        """alpha / r, or alpha / sqrt(r) with rank-stabilized scaling (Kalajdzievski 2023)."""
        rank = self.rank(module)
        return float(_match_pattern(self._alphas, module, self._alpha)) / (math.sqrt(rank) if self._stable else rank)

    def targets(self, module: str, layer: int) -> bool:
        """Whether the config names this module of a layer, so that the adapter must have weights for it."""
        if self._targets is None or (self._excluded is not None and _names_module(self._excluded, module)):
            return False
        if isinstance(self._targets, list) and module in self._targets:
            return True
        chosen = self._layers is None or layer in self._layers
        return chosen and (self._targets == "all-linear" or _names_module(self._targets, module))

    def _from_mlx(self, values: dict[str, Any]) -> dict[str, Any]:
        """The settings of mlx-lm in peft's terms. It adapts the last `num_layers` layers, whose `scale` is not divided
        by the rank."""
        parameters, kind = values["lora_parameters"], values.get("fine_tune_type", "lora")
        if kind != "lora" or not isinstance(parameters, dict):
            raise UserError(f"{self.path} says fine_tune_type {kind!r}. Of mlx-lm's adapters only lora is served.")
        rank, scale = self._number(parameters, "rank", 8), self._number(parameters, "scale", 20)
        targets = parameters.get("keys") or "all-linear"
        return {"peft_type": "LORA", "r": rank, "lora_alpha": scale * rank, "target_modules": targets}

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
        if _is_slow(shown):
            raise UserError(
                f"{self.path} has the pattern {shown[:100]!r}, which may take for ever to match: no group may be "
                f"repeated, and no more than {MAX_REPEATED} other parts. List the names of the modules instead."
            )
        try:
            return re.compile(pattern)
        except re.error as error:
            raise UserError(
                f"{self.path} has the pattern {shown!r}, which is not a regular expression: {error}."
            ) from error


def weights_path(directory: Path) -> Path:
    """The file with an adapter's weights, whether it exists or not."""
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    return directory / adapter_files.weights_file(names)


def _is_slow(pattern: str) -> bool:
    """Whether a regular expression may take for ever to match."""
    repeated = len(REPEATED.findall(pattern))
    return len(pattern) > MAX_PATTERN_LENGTH or repeated > MAX_REPEATED or REPEATED_GROUP.search(pattern) is not None


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path.parent} has no {CONFIG_FILE}, so it is no LoRA adapter.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}. Fetch the adapter again.") from error
    if not isinstance(values, dict):
        raise UserError(f"{path} is not what peft writes: expected an object of settings.")
    return values


def _match_pattern(patterns: dict[re.Pattern[str], float], module: str, otherwise: float) -> float:
    return next((value for pattern, value in patterns.items() if pattern.match(module)), otherwise)


def _names_module(names: str | list[str] | re.Pattern[str], module: str) -> bool:
    if isinstance(names, re.Pattern):
        return names.fullmatch(module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)
