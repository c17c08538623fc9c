"""The gated delta rule, which Qwen3-Next, Qwen3.5 and OLMo Hybrid mix tokens with in three of four
layers.

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
from tgi.worker.gpu_kernels.kernels import GpuKernels
from tgi.worker.layers.linear import Linear
from tgi.worker.layers.recurrence import ChosenRows, MixerTensors, Recurrence
from tgi.worker.layers.short_conv import convolve
from tgi.worker.mixers.gated_delta import DeltaTensors, GatedDeltaConfig
from tgi.worker.state_cache import StateRows

LEAST_SQUARES = 1e-6  # added to the squared length of queries and keys


class GatedDelta(NamedTuple):
    """GatedDeltaConfig between its two projections."""

    layer: int  # its number among the recurrent layers
    conv: Tensor  # float32 [kernel, channels], for the oldest input first; channels are those of q, k and v
    ba: Linear  # [2 * value heads, hidden]
    rule: DeltaRule
    kernels: CpuKernels | GpuKernels | None  # None: torch's

    @property
    def widths(self) -> tuple[int, int, int]:
        _, heads, _, size = self.rule.sizes
        return self.conv.shape[1] + heads * size, heads * size, 2 * heads

    @property
    def linears(self) -> list[Linear]:
        return [self.ba]

    def __call__(self, normed: Tensor, x: Tensor, rows: StateRows) -> Tensor:
        """The result [T, value heads * elements of a value]. `normed` [T, hidden] is the input of the layer, x [T,
        columns] that of the mixer: q, k, v and z."""
        ba = self.ba(normed)[: len(x)]
        state, z = rows.cache.layers[self.layer], x[:, self.conv.shape[1] :]
        if isinstance(self.kernels, GpuKernels):
            mixed = self.kernels.causal_conv(x, self.conv, None, False, rows, state["window"])
            return self.kernels.delta_rule(self.rule, mixed, z, ba, state["matrix"], rows)
        if isinstance(self.kernels, CpuKernels):
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
        beta = exactly(torch.sigmoid, b) * self.rule.most
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


def load(tensors: MixerTensors, config: GatedDeltaConfig, local: range, number: int) -> Recurrence:
    """Recurrent layer `number` of a rank that has the key heads `local`."""
    own, each = config.part(local), config.value_heads // config.key_heads
    sizes, qkv = config.inputs, (config.keys, config.keys, config.values)

    def of_heads(columns: Tensor) -> Tensor:
        """The columns of the local heads, of `columns` in the order of key heads."""
        return columns.view(config.key_heads, -1)[local.start : local.stop].flatten()

    values, value_heads = of_heads(torch.arange(config.values)), of_heads(torch.arange(config.value_heads))
    channels = torch.cat([of_heads(part) for part in torch.arange(config.channels).split(qkv)])
    if config.tensors == DeltaTensors.BY_KEY_HEAD:
        columns = torch.arange(sum(outputs for _, outputs in sizes)).view(config.key_heads, -1)
        widths = (config.key_dim, config.key_dim, each * config.value_dim, each * config.value_dim)
        chosen = torch.cat([of_heads(part) for part in columns.split(widths, 1)])
        parts = [ChosenRows(sizes[0][0], columns.numel(), chosen)]
        ba = torch.arange(2 * config.value_heads).view(config.key_heads, 2, each)
        gates = [ChosenRows(name, ba.numel(), of_heads(ba[:, n].contiguous())) for n, name in enumerate(config.gates)]
    else:
        gates = [ChosenRows(name, config.value_heads, value_heads) for name in config.gates]
        if config.tensors == DeltaTensors.BY_KIND:
            parts = [ChosenRows(sizes[0][0], config.channels, channels)]
        else:
            parts = [ChosenRows(name, outputs, of_heads(torch.arange(outputs))) for name, outputs in sizes[:3]]
        parts.append(ChosenRows(*sizes[3], values))
    rule = DeltaRule(
        (own.key_heads, own.value_heads, own.key_dim, own.value_dim),
        tensors.vector("A_log", value_heads, config.value_heads).exp(),
        tensors.vector("dt_bias", value_heads, config.value_heads),
        tensors.vector(f"{config.norm_name}.weight", torch.arange(config.value_dim), config.value_dim),
        config.norm_epsilon or tensors.norm_epsilon,
        2.0 if config.negative else 1.0,
    )
    if config.tensors == DeltaTensors.SEPARATE:
        taps = [(f"{name}.weight", of_heads(torch.arange(size)), size) for name, size in config.convolutions]
    else:
        taps = [(f"{name}.weight", channels, size) for name, size in config.convolutions]
    conv = torch.cat([tensors.vector(name, rows, size, 1, config.kernel) for name, rows, size in taps])
    columns = range(local.start * config.values // config.key_heads, local.stop * config.values // config.key_heads)
    return Recurrence(
        tensors.input(parts),
        GatedDelta(number, conv[:, 0].t().contiguous(), tensors.gates(gates), rule, tensors.kernels),
        tensors.output(config.output_name, config.values, columns),
    )


def exactly(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x) of a float32 tensor. On CPU computed in float64: torch computes the last elements of a tensor with
    other instructions, and their results differ in the last bits, which rounding removes."""
    return function(x.double()).to(x.dtype) if x.device.type == "cpu" else function(x)


def _unit(x: Tensor) -> Tensor:
    """x [.., size] with the length 1."""
    return x / (x.square().sum(-1, keepdim=True) + LEAST_SQUARES).sqrt()
