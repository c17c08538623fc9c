"""Rotary position embedding: turns each pair of numbers of a head by an angle that grows with the position."""

import math
from typing import Any

import numpy
import torch
from torch import Tensor

TYPES = ("default", "linear", "llama3")
# Positions are added to the table in blocks of this many.
BLOCK = 2048


def rope_type(parameters: dict[str, Any]) -> str:
    """The kind of scaling; this module computes those in TYPES."""
    return parameters.get("rope_type", parameters.get("type")) or "default"


def frequencies(head_dim: int, parameters: dict[str, Any]) -> Tensor:
    """Angle per position of each pair, float32 [head_dim / 2] (Su et al., 2021).

    `parameters` are those of config.json: rope_theta, rope_type (one of TYPES) and what that type needs.
    """
    kind = rope_type(parameters)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    inverse = 1.0 / (float(parameters["rope_theta"]) ** exponents)
    if kind == "default":
        return inverse
    if kind == "linear":
        return inverse / float(parameters["factor"])
    return _llama3(inverse, parameters)


def _llama3(inverse: Tensor, parameters: dict[str, Any]) -> Tensor:
    """Llama 3.1's scaling: long wavelengths are stretched by `factor`, short ones kept, those between are blended."""
    factor = float(parameters["factor"])
    low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
    context = float(parameters["original_max_position_embeddings"])
    wavelength = 2 * math.pi / inverse
    blend = ((context / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * inverse / factor + blend * inverse


class Rotary:
    """cos and sin for every position, kept as a table that grows as far as it is used.

    The table is made in float64 and then rounded, so that it does not depend on a fast cos and sin that computes
    some elements otherwise than others.
    """

    def __init__(self, head_dim: int, parameters: dict[str, Any], device: torch.device) -> None:
        self._inverse = frequencies(head_dim, parameters)
        self._device = device
        self._table = torch.empty(0, 2, head_dim, device=device)

    def angles(self, positions: Tensor, longest: int, heads: int) -> tuple[Tensor, Tensor]:
        """cos and sin of positions [T], all less than `longest`, repeated for each head: float32 [T, heads, head_dim].

        Repeated in memory, since every layer multiplies with them and long runs of numbers are quick.
        """
        if longest > self._table.shape[0]:
            self._extend(-(-longest // BLOCK) * BLOCK)
        cos, sin = self._table.index_select(0, positions).unbind(1)
        return cos[:, None].repeat(1, heads, 1), sin[:, None].repeat(1, heads, 1)

    def _extend(self, size: int) -> None:
        positions = torch.arange(self._table.shape[0], size, dtype=torch.float32)
        angles = (positions[:, None] * self._inverse).to(torch.float64).numpy()
        rows = torch.from_numpy(numpy.stack([numpy.cos(angles), numpy.sin(angles)], axis=1)).to(torch.float32)
        self._table = torch.cat([self._table, rows.repeat(1, 1, 2).to(self._device)])


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns x [T, heads, head_dim]; numbers i and i + head_dim / 2 make a pair. Computed in float32, x's dtype back.

    Products and sums stay separate operations: a fused multiply-add is used for some elements and not for others,
    depending on how many there are.
    """
    half = x.shape[-1] // 2
    wide = x.to(torch.float32)
    turned = wide * cos
    across = wide * sin
    turned[..., :half] -= across[..., half:]
    turned[..., half:] += across[..., :half]
    return turned.to(x.dtype)
