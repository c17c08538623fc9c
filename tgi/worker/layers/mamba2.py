"""State space duality (Dao and Gu, "Transformers are SSMs", 2024), which Mamba2 mixes tokens with, and Granite 4,
Nemotron-H, Bamba and Falcon-H1 in some or all layers.

On torch's kernels on CPU it is computed token by token, so that results do not depend on where a prompt is divided; on
a GPU in chunks.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tgi.worker.cpu_kernels import recurrent
from tgi.worker.cpu_kernels.kernels import CpuKernels
from tgi.worker.cpu_kernels.program import Program
from tgi.worker.cpu_kernels.recurrent import ConvForm, GatedNorm, GatedNormForm, Ssd
from tgi.worker.gpu_kernels.kernels import GpuKernels
from tgi.worker.layers.gated_delta import exactly
from tgi.worker.layers.linear import Linear
from tgi.worker.layers.recurrence import ChosenRows, MixerTensors, Recurrence
from tgi.worker.layers.short_conv import convolve
from tgi.worker.mixers.mamba2 import GatedNormKind, Mamba2Config
from tgi.worker.state_cache import StateRows

CHUNK = 64  # tokens computed at a time on a GPU

FORMS = {
    GatedNormKind.NONE: GatedNormForm.NONE,
    GatedNormKind.GATE_FIRST: GatedNormForm.GATE_FIRST,
    GatedNormKind.GATE_LAST: GatedNormForm.GATE_LAST,
}


class Mamba2(NamedTuple):
    """Mamba2Config between its two projections."""

    layer: int  # its number among the recurrent layers
    conv: Tensor  # float32 [kernel, channels], for the oldest input first; channels are those of x, B and C
    conv_bias: Tensor | None  # float32 [channels]
    rule: Ssd
    norm: GatedNorm
    kernels: CpuKernels | GpuKernels | None  # None: torch's

    @property
    def widths(self) -> tuple[int, int, int]:
        """The columns of its input (x, B, C, z and the time steps), of its result, and of its scratch memory."""
        rule = self.rule
        return rule.channels + rule.inner + rule.sizes[0], rule.inner, 0

    @property
    def linears(self) -> list[Linear]:
        return []

    def __call__(self, normed: Tensor, x: Tensor, rows: StateRows) -> Tensor:
        """The result [T, columns of the heads]. `normed` is not needed."""
        rule, state = self.rule, rows.cache.layers[self.layer]
        mixed, z, dt = x.split((rule.channels, rule.inner, rule.sizes[0]), 1)
        if isinstance(self.kernels, GpuKernels):
            mixed = self.kernels.causal_conv(x, self.conv, self.conv_bias, False, rows, state["window"])
            y = self.kernels.ssd(rule, mixed, dt, state["matrix"], rows)
            return self.kernels.gated_norm(self.norm, y, z)
        if isinstance(self.kernels, CpuKernels):
            window, matrix, at = state["window"], state["matrix"], rows.addresses
            mixed = recurrent.causal_conv(self.kernels, x, window, self.conv, self.conv_bias, ConvForm.PLAIN, at)
            y = recurrent.ssd(self.kernels, rule, mixed, dt, matrix, at)
            return recurrent.gated_norm(self.kernels, self.norm, y, z)
        sums = convolve(mixed.contiguous(), self.conv, self.conv_bias, rows, state["window"])
        y = self._mix(exactly(F.silu, sums).to(x.dtype), dt.to(torch.float32), state["matrix"], rows)
        return self._gate(y, z.to(torch.float32)).to(x.dtype)

    def _mix(self, x: Tensor, dt: Tensor, matrix: Tensor, rows: StateRows) -> Tensor:
        """The recurrence, float32 [T, columns of the heads]."""
        heads, groups, head_dim, state_dim = self.rule.sizes
        scale, least, most = self.rule.factors
        parts = x.to(torch.float32).split((self.rule.inner, groups * state_dim, groups * state_dim), 1)
        sizes = head_dim, state_dim, state_dim
        values, b, c = (part.unflatten(1, (-1, size)) for part, size in zip(parts, sizes, strict=True))
        b, c = (part.repeat_interleave(heads // groups, 1) for part in (b, c))
        steps = exactly(F.softplus, dt * scale + self.rule.offset).clamp(least, most)
        decay = steps * -self.rule.decay
        inputs = values * steps[..., None]
        mixed = torch.empty_like(values)
        by_token = x.device.type == "cpu" or rows.kept is not None
        for group in rows.groups:
            part, x_in, into, out_of = (
                column[group.tokens].unflatten(0, (-1, group.each)) for column in (decay, inputs, b, c)
            )
            first, keep = rows.read(matrix, group), partial(rows.keep, matrix, group)
            own = first, part, x_in, into, out_of
            state, out = scan_tokens(*own, keep) if by_token else scan_chunks(*own)
            rows.write(matrix, group, state)
            mixed[group.tokens] = out.flatten(0, 1)
        return (mixed + values * self.rule.skip[:, None]).flatten(1)

    def _gate(self, y: Tensor, z: Tensor) -> Tensor:
        """The gated norm, in float32."""
        norm, gate = self.norm, exactly(F.silu, z * self.norm.gate_scale)
        if norm.form != GatedNormForm.GATE_LAST:
            y = y * gate
        if norm.form != GatedNormForm.NONE:
            y = F.rms_norm(y.unflatten(1, (norm.groups, -1)), (y.shape[1] // norm.groups,), None, norm.epsilon).flatten(
                1
            )
        y = y * norm.weight
        return y * gate if norm.form == GatedNormForm.GATE_LAST else y

    def append_to(self, program: Program, normed: int, x: int, gates: int, y: int) -> None:
        """Appends it to a program, of buffer x, which it overwrites, written to y."""
        program.conv(x, x, 2 * self.layer, self.conv, self.conv_bias, ConvForm.PLAIN)
        program.ssd(x, y, 2 * self.layer + 1, self.rule)
        program.gated_norm(y, x, self.rule.channels, self.norm)


def scan_tokens(
    state: Tensor,
    decay: Tensor,
    inputs: Tensor,
    b: Tensor,
    c: Tensor,
    keep_state: Callable[[int, Tensor], None] = lambda token, state: None,
) -> tuple[Tensor, Tensor]:
    """The recurrence S = exp(decay) S + B x^T, y = S^T C, token by token: the last state [R, heads, N, P] and y
    [R, tokens, heads, P]. `state` is the first S, `decay` [R, tokens, heads], `inputs` has x [R, tokens, heads, P], `b`
    and `c` [R, tokens, heads, N]. `keep_state` is called with the number of each token and the state after it."""
    keep, out = exactly(torch.exp, decay), []
    for token in range(decay.shape[1]):
        state = state * keep[:, token, :, None, None] + b[:, token, :, :, None] * inputs[:, token, :, None]
        keep_state(token, state)
        out.append((state * c[:, token, :, :, None]).sum(-2))
    return state, torch.stack(out, 1)


def scan_chunks(state: Tensor, decay: Tensor, inputs: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """The same in chunks of CHUNK tokens, each of which is products of matrices."""
    found = []
    for begin in range(0, decay.shape[1], CHUNK):
        part, x, into, out = (column[:, begin : begin + CHUNK].transpose(1, 2) for column in (decay, inputs, b, c))
        total = part.cumsum(-1)  # [R, heads, tokens]
        size = total.shape[-1]
        later = torch.ones(size, size, dtype=torch.bool, device=part.device).tril()
        between = (total[..., :, None] - total[..., None, :]).masked_fill(~later, -torch.inf).exp()
        within = (out @ into.transpose(-1, -2) * between) @ x
        found.append(within + (out * total[..., None].exp()) @ state)
        rest = (total[..., -1:] - total).exp()
        state = state * total[..., -1, None, None].exp() + (into * rest[..., None]).transpose(-1, -2) @ x
    return state, torch.cat(found, 2).transpose(1, 2)


def load(tensors: MixerTensors, config: Mamba2Config, local: range, number: int) -> Recurrence:
    """Recurrent layer `number` of a rank that has the groups `local`."""
    own, each = config.part(local), config.heads // config.groups
    groups = torch.arange(local.start, local.stop)

    def of_groups(start: int, size: int) -> Tensor:
        """The columns of the groups, of which each has `size`, the first one from `start` on."""
        return (start + groups[:, None] * size + torch.arange(size)).flatten()

    values, states, of = each * config.head_dim, config.state_dim, tensors.vector
    starts = config.inner, 2 * config.inner, 2 * config.inner + config.groups * states
    channels = torch.cat([of_groups(*part) for part in zip(starts, (values, states, states), strict=True)])
    gate, heads = of_groups(0, values), of_groups(0, each)
    steps = config.inner + config.channels + heads
    scale_z, *scales, scale_dt = config.scales
    # What the convolution sees may be scaled by its weights.
    sizes = own.inner, own.groups * states, own.groups * states
    scaled = torch.cat([torch.full((size,), scale) for size, scale in zip(sizes, scales, strict=True)])
    convolved = channels - config.inner
    conv = of("conv1d.weight", convolved, config.channels, 1, config.kernel)[:, 0].t()
    norm = of("norm.weight", gate, config.inner) if config.norm != GatedNormKind.NONE else conv.new_ones(own.inner)
    rule = Ssd(
        (own.heads, own.groups, own.head_dim, own.state_dim),
        of("A_log", heads, config.heads).exp(),
        of("dt_bias", heads, config.heads),
        of("D", heads, config.heads),
        (scale_dt, *config.limits),
    )
    form = FORMS[GatedNormKind(config.norm)]
    mixer = Mamba2(
        number,
        (conv * scaled.to(conv.device)).contiguous(),
        of("conv1d.bias", convolved, config.channels) if config.conv_bias else None,
        rule,
        GatedNorm(form, norm * config.output_scale, own.groups, scale_z, tensors.norm_epsilon),
        tensors.kernels,
    )
    rows = ChosenRows("in_proj", config.outputs, torch.cat((channels, gate, steps)))
    return Recurrence(
        tensors.input([rows], config.bias),
        mixer,
        tensors.output("out_proj", config.inner, config.columns(local), config.bias),
    )
