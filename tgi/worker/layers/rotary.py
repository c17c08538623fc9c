"""Rotary position embedding (RoPE; Su et al., 2021): rotates pairs of a head's elements by position times frequency."""

import math
from typing import Any

import numpy
import torch
from torch import Tensor

from tgi.worker.cpu_kernels.kernels import CpuKernels
from tgi.worker.cpu_kernels.program import Program
from tgi.worker.decoder_config import QUERY_SCALE, RopeConfig, rope_type
from tgi.worker.gpu_kernels.kernels import GpuKernels

# The table of cos and sin grows by this many positions at a time.
TABLE_BLOCK = 2048


def inverse_frequencies(dim: int, parameters: dict[str, Any]) -> Tensor:
    """Angle per position of each pair, in radians: float32 [dim / 2]."""
    kind = rope_type(parameters)
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).to(torch.float32) / dim
    inverse = 1.0 / (float(parameters["rope_theta"]) ** exponents)
    if kind == "linear":
        return inverse / float(parameters["factor"])
    if kind == "dynamic":  # as for a sequence of the longest length: cached keys keep the angles that they have
        factor = float(parameters["factor"])
        growth = float(parameters.get("alpha") or factor * factor - (factor - 1))  # Hunyuan's alpha, instead of factor
        return 1.0 / ((float(parameters["rope_theta"]) * growth ** (dim / (dim - 2))) ** exponents)
    if kind == "llama3":
        return _llama3(inverse, parameters)
    if kind == "yarn":
        return _yarn(inverse, parameters)
    if kind == "proportional":  # frequencies are those of a whole head, of which some pairs are rotated
        rotated = int(float(parameters.get("partial_rotary_factor") or 1.0) * dim // 2)
        inverse[rotated:] = 0
        return inverse / float(parameters.get("factor") or 1.0)
    if kind == "longrope":  # for contexts within the original length; see config_reader
        return inverse / torch.tensor(parameters["short_factor"], dtype=torch.float32)
    return inverse


def attention_factor(parameters: dict[str, Any]) -> float:
    """Scales cos and sin, and so the attention scores, for contexts beyond the original length.

    YaRN: 0.1 ln(factor) + 1. LongRoPE: sqrt(1 + ln(factor) / ln(original length)). The config's `attention_factor`
    takes precedence.
    """
    kind, factor = rope_type(parameters), float(parameters.get("factor") or 1.0)
    if kind not in ("yarn", "longrope"):
        return 1.0
    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    if kind == "longrope" and parameters.get("short_mscale") is not None:  # Phi-3.5-MoE
        return float(parameters["short_mscale"])
    if factor <= 1.0:
        return 1.0
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(parameters["original_max_position_embeddings"]))
    mscale, over = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if mscale and over:
        return (0.1 * mscale * math.log(factor) + 1.0) / (0.1 * over * math.log(factor) + 1.0)
    return 0.1 * math.log(factor) + 1.0


def _llama3(inverse: Tensor, parameters: dict[str, Any]) -> Tensor:
    """Llama 3.1's scaling: divides low frequencies by `factor`, keeps high ones, and blends those in between."""
    factor = float(parameters["factor"])
    low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
    context = float(parameters["original_max_position_embeddings"])
    wavelength = 2 * math.pi / inverse
    blend = ((context / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * inverse / factor + blend * inverse


def _yarn(inverse: Tensor, parameters: dict[str, Any]) -> Tensor:
    """YaRN (Peng et al., 2023): divides the frequencies of pairs that rotate less than `beta_slow` times within the
    original length by `factor`, keeps those above `beta_fast` rotations, and blends those in between by their index."""
    factor, theta = float(parameters["factor"]), float(parameters["rope_theta"])
    context = float(parameters["original_max_position_embeddings"])
    pairs = len(inverse)

    def pair_index(rotations: float) -> float:
        """Index (fractional) of the pair that rotates this often within the original length."""
        return pairs * math.log(context / (rotations * 2 * math.pi)) / math.log(theta)

    first, last = pair_index(parameters.get("beta_fast") or 32), pair_index(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    blend = ((torch.arange(pairs, dtype=torch.float32) - first) / ((last - first) or 0.001)).clamp(0, 1)
    return inverse / factor * blend + inverse * (1 - blend)


class RotaryEmbedding:
    """Applies one RopeConfig, with a table of cos and sin per position that grows on demand.

    The table is computed in float64 and then rounded: vectorized float32 cos and sin differ between elements within a
    vector and those at the end of an array.
    """

    def __init__(self, rope: RopeConfig, device: torch.device, kernels: CpuKernels | GpuKernels | None = None) -> None:
        self.interleaved = rope.interleaved
        self.start = rope.start
        self._kernels = kernels
        self._query_scale: tuple[float, int, int] | None = None
        if rope_type(rope.parameters) == QUERY_SCALE:  # cos is the factor, and sin 0
            original = rope.parameters["original_max_position_embeddings"]
            counted = int(rope.parameters.get("counted_from") or 0)
            self._query_scale = float(rope.parameters["llama_4_scaling_beta"]), int(original), counted
        self._inverse_frequencies = inverse_frequencies(rope.dim, rope.parameters)
        self._attention_factor = attention_factor(rope.parameters)
        self._device = device
        self._table = torch.empty(0, 2, rope.dim, device=device)
        pairs = rope.dim // 2
        pair = torch.arange(rope.dim) // 2 if rope.interleaved else torch.arange(rope.dim) % pairs
        axes = torch.tensor(rope.axes or (0,) * pairs)[pair]
        self._axis_columns = [(axes == axis).nonzero()[:, 0].to(device) for axis in range(3)]

    def angles(self, positions: Tensor, longest: int, heads: int) -> tuple[Tensor, Tensor]:
        """The argument of `rotate` for positions [T] below `longest`, shared by all layers.

        For our own kernels: the table, float32 [positions, 2, dim], and the positions. For torch: cos and sin, each
        float32 [T, heads, dim]; expanded over the heads because torch multiplies contiguous tensors faster. With
        positions [3, T], each pair of elements takes the one of its axis (RopeConfig.axes), from a table of T rows.
        """
        if longest > self._table.shape[0]:
            self._extend_table(-(-longest // TABLE_BLOCK) * TABLE_BLOCK)
        table = self._table
        if positions.ndim > 1:
            table, positions = self._table_of_axes(positions), torch.arange(positions.shape[1], device=self._device)
        if self._kernels is not None:
            return table, positions
        cos, sin = table.index_select(0, positions).unbind(1)
        return cos[:, None].repeat(1, heads, 1), sin[:, None].repeat(1, heads, 1)

    def _table_of_axes(self, positions: Tensor) -> Tensor:
        """The rows [T, 2, dim] of the table for positions [3, T], the columns of each axis from its own position."""
        table = self._table.index_select(0, positions[0])
        for axis in (1, 2):
            columns = self._axis_columns[axis]
            table[:, :, columns] = self._table[positions[axis]][:, :, columns]
        return table

    def _extend_table(self, size: int) -> None:
        positions = torch.arange(self._table.shape[0], size, dtype=torch.float32)
        if self._query_scale is None:
            angles = (positions[:, None] * self._inverse_frequencies).to(torch.float64).numpy()
            waves = numpy.stack([numpy.cos(angles), numpy.sin(angles)], axis=1) * self._attention_factor
        else:
            beta, original, counted = self._query_scale
            factors = 1 + beta * numpy.log1p(numpy.floor((positions.to(torch.float64).numpy() + counted) / original))
            factors = factors[:, None].repeat(self._table.shape[2] // 2, 1)
            waves = numpy.stack([factors, numpy.zeros_like(factors)], axis=1)
        rows = torch.from_numpy(waves).to(torch.float32)
        rows = rows.repeat_interleave(2, dim=2) if self.interleaved else rows.repeat(1, 1, 2)
        self._table = torch.cat([self._table, rows.to(self._device)])

    def rotate(self, qkv: Tensor, heads: int, angles: tuple[Tensor, Tensor]) -> None:
        """Rotates the first `heads` heads of qkv [T, H, head_dim] in place; computed in float32. Our GPU kernels rotate
        while they write to the KV cache instead (attention.interface.HeadTransform).

        With torch, products and sums are separate operations: torch would use a fused multiply-add for some elements
        only, depending on their number, and results would not be batch invariant.
        """
        if self._kernels is not None:
            assert isinstance(self._kernels, CpuKernels)
            self._kernels.apply_rope(qkv, heads, *angles, self.interleaved, self.start)
            return
        cos, sin = (one[:, :heads] for one in angles)
        dim = cos.shape[-1]
        x = qkv[:, :heads, self.start : self.start + dim]
        wide = x.to(torch.float32)
        rotated = wide * cos
        crossed = wide * sin
        if self.interleaved:
            first, second = slice(0, dim, 2), slice(1, dim, 2)
        else:
            first, second = slice(0, dim // 2), slice(dim // 2, dim)
        rotated[..., first].sub_(crossed[..., second])
        rotated[..., second].add_(crossed[..., first])
        x.copy_(rotated)

    def scale(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> None:
        """Multiplies each row of x [T, heads, head_dim] by its factor, in place. Only for QUERY_SCALE, on our GPU
        kernels."""
        table, positions = angles
        x.mul_(table[:, 0, 0].index_select(0, positions)[:, None, None].to(x.dtype))

    def append_to(self, program: Program, qkv: int, rope: int, heads: int, head_dim: int) -> None:
        """Appends `rotate` of the rows in buffer `qkv` to a program. `rope` is this object's index in the model."""
        program.rope(qkv, rope, heads, head_dim, self._table.shape[2], self.interleaved, self.start)
