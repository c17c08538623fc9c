"""Rotary position embedding: turns each pair of numbers of a head by an angle that grows with the position."""

import math
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from tgi.worker.gpu.kernels import Gpu
from tgi.worker.native.kernels import Kernels
from tgi.worker.native.program import Program

TYPES = ("default", "linear", "llama3", "yarn", "longrope")
# Positions are added to the table in blocks of this many.
BLOCK = 2048


@dataclass(frozen=True)
class Rope:
    """Which numbers of a head are turned, and how fast.

    `parameters` are those of config.json: rope_theta, rope_type (one of TYPES) and what that type needs.
    """

    dim: int  # the first `dim` numbers of a head are turned, the others kept
    parameters: dict[str, Any]
    # A pair is numbers i and i + dim / 2 or, where `neighbours`, 2 i and 2 i + 1.
    neighbours: bool = False


def rope_type(parameters: dict[str, Any]) -> str:
    """The kind of scaling; this module computes those in TYPES."""
    return parameters.get("rope_type", parameters.get("type")) or "default"


def frequencies(dim: int, parameters: dict[str, Any]) -> Tensor:
    """Angle per position of each pair, float32 [dim / 2] (Su et al., 2021)."""
    kind = rope_type(parameters)
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).to(torch.float32) / dim
    inverse = 1.0 / (float(parameters["rope_theta"]) ** exponents)
    if kind == "linear":
        return inverse / float(parameters["factor"])
    if kind == "llama3":
        return _llama3(inverse, parameters)
    if kind == "yarn":
        return _yarn(inverse, parameters)
    if kind == "longrope":  # within the length that the model was first trained with
        return inverse / torch.tensor(parameters["short_factor"], dtype=torch.float32)
    return inverse


def magnitude(parameters: dict[str, Any]) -> float:
    """What cos and sin are multiplied by, which sharpens attention over stretched positions: yarn's 0.1 ln(factor) + 1,
    longrope's sqrt(1 + ln(factor) / ln(original length)), or `attention_factor` where the config names one."""
    kind, factor = rope_type(parameters), float(parameters.get("factor") or 1.0)
    if kind not in ("yarn", "longrope"):
        return 1.0
    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    if factor <= 1.0:
        return 1.0
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(parameters["original_max_position_embeddings"]))
    mscale, over = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if mscale and over:
        return (0.1 * mscale * math.log(factor) + 1.0) / (0.1 * over * math.log(factor) + 1.0)
    return 0.1 * math.log(factor) + 1.0


def _llama3(inverse: Tensor, parameters: dict[str, Any]) -> Tensor:
    """Llama 3.1's scaling: long wavelengths are stretched by `factor`, short ones kept, those between are blended."""
    factor = float(parameters["factor"])
    low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
    context = float(parameters["original_max_position_embeddings"])
    wavelength = 2 * math.pi / inverse
    blend = ((context / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * inverse / factor + blend * inverse


def _yarn(inverse: Tensor, parameters: dict[str, Any]) -> Tensor:
    """YaRN (Peng et al., 2023): pairs that turn less than `beta_slow` times within the original length are stretched
    by `factor`, those that turn more than `beta_fast` times are kept, those between are blended by their index."""
    factor, theta = float(parameters["factor"]), float(parameters["rope_theta"])
    context = float(parameters["original_max_position_embeddings"])
    pairs = len(inverse)

    def index(turns: float) -> float:
        """Of the pair that turns so often within the original length."""
        return pairs * math.log(context / (turns * 2 * math.pi)) / math.log(theta)

    first, last = index(parameters.get("beta_fast") or 32), index(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    blend = ((torch.arange(pairs, dtype=torch.float32) - first) / ((last - first) or 0.001)).clamp(0, 1)
    return inverse / factor * blend + inverse * (1 - blend)


class Rotary:
    """cos and sin for every position, kept as a table that grows as far as it is used.

    The table is made in float64 and then rounded, so that it does not depend on a fast cos and sin that computes
    some elements otherwise than others.
    """

    def __init__(self, rope: Rope, device: torch.device, kernels: Kernels | Gpu | None = None) -> None:
        self.neighbours = rope.neighbours
        self._kernels = kernels
        self._inverse = frequencies(rope.dim, rope.parameters)
        self._magnitude = magnitude(rope.parameters)
        self._device = device
        self._table = torch.empty(0, 2, rope.dim, device=device)

    def angles(self, positions: Tensor, longest: int, heads: int) -> tuple[Tensor, Tensor]:
        """What `rotate` needs for positions [T], all less than `longest`. For our kernels the table, float32
        [.., 2, dim], and the positions; else cos and sin, repeated for each head [T, heads, dim], since every layer
        multiplies with them and long runs of numbers are quick.
        """
        if longest > self._table.shape[0]:
            self._extend(-(-longest // BLOCK) * BLOCK)
        if self._kernels is not None:
            return self._table, positions
        cos, sin = self._table.index_select(0, positions).unbind(1)
        return cos[:, None].repeat(1, heads, 1), sin[:, None].repeat(1, heads, 1)

    def _extend(self, size: int) -> None:
        positions = torch.arange(self._table.shape[0], size, dtype=torch.float32)
        angles = (positions[:, None] * self._inverse).to(torch.float64).numpy()
        waves = numpy.stack([numpy.cos(angles), numpy.sin(angles)], axis=1) * self._magnitude
        rows = torch.from_numpy(waves).to(torch.float32)
        rows = rows.repeat_interleave(2, dim=2) if self.neighbours else rows.repeat(1, 1, 2)
        self._table = torch.cat([self._table, rows.to(self._device)])

    def rotate(self, qkv: Tensor, heads: int, angles: tuple[Tensor, Tensor]) -> None:
        """Turns, in place, the first numbers of the first `heads` heads of qkv [T, H, head_dim]. Computed in float32.

        Products and sums of torch's stay separate operations: a fused multiply-add is used for some elements and not
        for others, depending on how many there are.
        """
        if self._kernels is not None:
            self._kernels.turn(qkv, heads, *angles, self.neighbours)
            return
        cos, sin = angles
        dim = cos.shape[-1]
        x = qkv[:, :heads, :dim]
        wide = x.to(torch.float32)
        turned = wide * cos
        across = wide * sin
        if self.neighbours:
            first, second = slice(0, dim, 2), slice(1, dim, 2)
        else:
            first, second = slice(0, dim // 2), slice(dim // 2, dim)
        turned[..., first].sub_(across[..., second])
        turned[..., second].add_(across[..., first])
        x.copy_(turned)

    def write(self, program: Program, qkv: int, rope: int, heads: int, head_dim: int) -> None:
        """Writes `rotate` down for the rows in a buffer. `rope` is the number of this object among the model's."""
        program.turn(qkv, rope, heads, head_dim, self._table.shape[2], self.neighbours)
