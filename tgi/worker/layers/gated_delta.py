"""The gated delta rule, which Qwen3-Next and Qwen3.5 mix tokens with in three of four layers.

On torch's kernels it is computed token by token, which is slow for prompts.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tgi.worker.cpu_kernels import recurrent
from tgi.worker.cpu_kernels.kernels import CpuKernels
from tgi.worker.cpu_kernels.program import Program
from tgi.worker.cpu_kernels.recurrent import ConvForm, DeltaRule
from tgi.worker.layers.linear import Linear
from tgi.worker.layers.short_conv import convolve
from tgi.worker.state_cache import StateRows

LEAST_SQUARES = 1e-6  # added to the squared length of queries and keys


class GatedDelta(NamedTuple):
    """GatedDeltaConfig between its two projections."""

    layer: int  # its number among the recurrent layers
    conv: Tensor  # float32 [kernel, channels], for the oldest input first; channels are those of q, k and v
    ba: Linear  # [2 * value heads, hidden]
    rule: DeltaRule
    kernels: CpuKernels | None  # None: torch's

    @property
    def widths(self) -> tuple[int, int, int]:
        """The columns of its input, of its result, and of `ba`."""
        _, heads, _, size = self.rule.sizes
        return self.conv.shape[1] + heads * size, heads * size, 2 * heads

    @property
    def linears(self) -> list[Linear]:
        """Its linear layers."""
        return [self.ba]

    def __call__(self, normed: Tensor, x: Tensor, rows: StateRows) -> Tensor:
        """The result [T, value heads * elements of a value]. `normed` [T, hidden] is the input of the layer, x [T,
        columns] that of the mixer: q, k, v and z."""
        ba = self.ba(normed)[: len(x)]
        state, z = rows.cache.layers[self.layer], x[:, self.conv.shape[1] :]
        if self.kernels is not None:
            addresses = rows.addresses
            mixed = recurrent.causal_conv(self.kernels, x, state["window"], self.conv, None, ConvForm.PLAIN, addresses)
            return recurrent.delta_rule(self.kernels, self.rule, mixed, z, ba, state["matrix"], addresses)
        sums = convolve(x[:, : self.conv.shape[1]].contiguous(), self.conv, None, rows, state["window"])
        mixed = exactly(F.silu, sums).to(x.dtype)
        return self._mix(mixed, z.to(torch.float32), ba.to(torch.float32), state["matrix"], rows).to(x.dtype)

    def _mix(self, x: Tensor, z: Tensor, ba: Tensor, matrix: Tensor, rows: StateRows) -> Tensor:
        """The delta rule and the norm, in float32, token by token."""
        key_heads, heads, key_dim, value_dim = self.rule.sizes
        keys = key_heads * key_dim
        q, k, v = x.to(torch.float32).split((keys, keys, heads * value_dim), 1)
        q, k = (_unit(each.unflatten(1, (key_heads, key_dim))) for each in (q, k))
        q = q / key_dim**0.5
        v = v.unflatten(1, (heads, value_dim))
        b, a = ba.split(heads, 1)
        beta = exactly(torch.sigmoid, b)
        keep = exactly(torch.exp, exactly(F.softplus, a + self.rule.offset) * -self.rule.decay)
        mixed = torch.empty_like(v)
        for group in rows.groups:
            own = slice(group.tokens.start, group.tokens.stop)
            queries, each_key, values, weights, kept = (
                column[own].unflatten(0, (-1, group.each)) for column in (q, k, v, beta, keep)
            )
            state, out = rows.read(matrix, group), []
            for token in range(group.each):
                query, key = (
                    column[:, token].repeat_interleave(heads // key_heads, 1)[..., None]
                    for column in (queries, each_key)
                )
                state = state * kept[:, token, :, None, None]
                delta = (values[:, token] - (state * key).sum(-2)) * weights[:, token, :, None]
                state = state + key * delta[:, :, None]
                out.append((state * query).sum(-2))
                rows.keep(matrix, group, token, state)
            rows.write(matrix, group, state)
            mixed[own] = torch.stack(out, 1).flatten(0, 1)
        normed = F.rms_norm(mixed, (value_dim,), self.rule.norm, self.rule.epsilon)
        return normed.flatten(1) * exactly(F.silu, z)

    def append_to(self, program: Program, normed: int, x: int, gates: int, y: int) -> None:
        """Appends it to a program: of the buffers of the layer's input and of its own, x, which it overwrites, with
        scratch memory in `gates`, written to y."""
        self.ba.append_to(program, normed, gates)
        program.conv(x, x, 2 * self.layer, self.conv, None, ConvForm.PLAIN)
        program.delta_rule(x, gates, y, 2 * self.layer + 1, self.rule)


def exactly(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x) of a float32 tensor. On CPU computed in float64: torch computes the last elements of a tensor with
    other instructions, and their results differ in the last bits, which rounding removes."""
    return function(x.double()).to(x.dtype) if x.device.type == "cpu" else function(x)


def _unit(x: Tensor) -> Tensor:
    """x [.., size] with the length 1."""
    return x / (x.square().sum(-1, keepdim=True) + LEAST_SQUARES).sqrt()
