"""The layers of a model as one call: operations are recorded once, at load, and run for each step.

The operations are those of kernels.py and compute the same bits. They read and write rows of numbered buffers. See
program.h.
"""

import weakref
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from tgi.worker.cpu_kernels.experts import PackedExperts
from tgi.worker.cpu_kernels.kernels import (
    NO_FACTORS,
    AttentionRows,
    CpuKernels,
    LoraTiles,
    PackedHeads,
    PackedWeight,
    VocabularyShards,
)
from tgi.worker.cpu_kernels.recurrent import ConvForm, DeltaRule, GatedNorm, Ssd
from tgi.worker.greedy import GreedyTokens

# Argument types of the functions in interface.cpp, without the program, the first argument of all.
_SIGNATURES = {
    "tgi_program_norm": (*[c_int64] * 3, c_void_p, c_void_p, *[c_int64] * 3, c_float),
    "tgi_program_linear": (*[c_int64] * 5, c_void_p, c_int64, c_void_p, *[c_int64] * 3, c_float, c_float),
    "tgi_program_lora": (c_int64, c_int64, c_int64),
    "tgi_program_rope": (*[c_int64] * 7,),
    "tgi_program_head_products": (*[c_int64] * 3, c_void_p, *[c_int64] * 5),
    "tgi_program_attention": (*[c_int64] * 8, c_float, c_float, c_void_p, c_int64, c_int64, c_void_p),
    "tgi_program_conv": (*[c_int64] * 3, c_void_p, c_void_p, *[c_int64] * 3),
    "tgi_program_delta_rule": (*[c_int64] * 5, *[c_void_p] * 3, *[c_int64] * 4, c_float, c_float),
    "tgi_program_ssd": (*[c_int64] * 4, *[c_void_p] * 3, *[c_int64] * 4, *[c_float] * 3),
    "tgi_program_gated_norm": (*[c_int64] * 3, c_void_p, c_int64, c_int64, c_float, c_float, c_int64),
    "tgi_program_sigmoid_gate": (c_int64, c_int64),
    "tgi_program_experts": (c_int64, c_int64, c_int64, c_void_p),
    "tgi_program_add": (c_int64, c_int64, c_float),
    "tgi_program_scale": (c_int64, c_float),
    "tgi_program_multiply": (c_int64, c_int64, c_int64),
    "tgi_program_copy": (c_int64, c_int64, c_int64),
    "tgi_program_all_reduce": (c_int64, c_void_p),
    "tgi_program_attend_images": (*[c_int64] * 6, c_float),
    "tgi_program_copy_unseeing": (c_int64, c_int64),
    "tgi_program_add_features": (c_int64, c_int64),
    "tgi_program_head": (
        *(c_int64, c_int64, c_void_p, c_void_p, c_int64, c_int64, c_float),
        *(c_void_p, c_int64, c_void_p, c_int64, c_float, c_float, c_void_p, c_void_p, c_int64),
    ),
    "tgi_program_run": (
        *(*[c_void_p] * 5, c_int64, *[c_void_p] * 5, c_int64, c_int64, c_void_p, c_int64),
        *[c_void_p] * 5,
    ),
}
NO_TARGET = NO_BUFFER = -1


class LoraTarget(NamedTuple):
    """Where the sums of adapters for a linear operation are: a slot of LoraStep, and its first column there."""

    place: int
    column: int = 0


class LoraStep(NamedTuple):
    """What adapters add in a step: struct LoraStep of program.h."""

    fields: Tensor  # the struct, as int64 numbers
    referenced: object  # keeps the memory alive whose addresses are in the struct


def lora_step(tiles: LoraTiles, adapters: int, slots: Sequence["tuple[Tensor, Tensor, Tensor] | None"]) -> LoraStep:
    """The struct of a step whose tokens have `adapters` different adapters. `slots` has an entry for each slot of the
    struct: the addresses of the adapters' pairs, int64 [layers, adapters], with `bounds` and `plus` as CpuKernels.lora
    takes them; None where no adapter adds anything."""
    fields = [*(column.data_ptr() for column in tiles), len(tiles.owners), adapters]
    for slot in slots:
        if slot is None:
            fields += [0] * 5
            continue
        pairs, bounds, plus = slot
        fields += [plus.data_ptr(), pairs.data_ptr(), bounds.data_ptr(), plus.shape[1], len(bounds) - 1]
    return LoraStep(torch.tensor(fields), (tiles, slots))


class StateStep(NamedTuple):
    """The state of the rows of a step: struct StateStep of program.h."""

    fields: Tensor  # the struct, as int64 numbers
    referenced: object  # keeps the memory alive whose addresses are in the struct


def state_step(tensors: Sequence[Tensor], slot_bytes: int, slots: Tensor, kept: Tensor | None) -> StateStep:
    """The struct of a step whose rows have these slots, int32 [rows]. `tensors` [slots, ...] are those of all recurrent
    layers, `slot_bytes` from one slot to the next; `kept` is ForwardBatch.kept_states."""
    addresses = torch.tensor([tensor.data_ptr() for tensor in tensors])
    fields = torch.tensor(
        [slots.data_ptr(), slot_bytes, addresses.data_ptr(), kept.data_ptr() if kept is not None else 0]
    )
    return StateStep(fields, (tensors, slots, addresses, kept))


class ImageStep(NamedTuple):
    """What the tokens of a step get of images: struct ImageStep of program.h."""

    fields: Tensor  # the struct, as int64 numbers
    referenced: object  # keeps the memory alive whose addresses are in the struct


def image_step(
    seen: tuple[Tensor, Tensor, AttentionRows] | None, tokens: Tensor | None, features: Sequence[Tensor]
) -> ImageStep:
    """The struct of a step. `seen`: whether each token sees images, bool [T], the addresses of the memory of each layer
    that attends to them, and the runs of tokens that see the same. `features` [n, hidden] are added at these `tokens`
    int64 [n] to the result of the first layers."""
    fields = [0] * 10
    if seen is not None:
        sees, memory, runs = seen
        slots, *rest, last_keys, windows_alone = runs
        fields = [sees.data_ptr(), memory.data_ptr(), slots, *rest, last_keys or 0, int(windows_alone)]
    addresses = torch.tensor([level.data_ptr() for level in features])
    count, at = (0, 0) if tokens is None else (len(tokens), tokens.data_ptr())
    fields += [at, count, len(features), addresses.data_ptr()]
    return ImageStep(torch.tensor(fields), (seen, tokens, features, addresses))


_GreedyRows = c_int64 * 6  # struct GreedyRows of program.h


class PreparedStep(NamedTuple):
    """The arguments of `Program.run`. They may be used again after the tensors have been filled with another step."""

    best: GreedyTokens | None
    arguments: tuple[object, ...]
    referenced: object  # keeps the memory alive whose addresses are in the arguments


class Program:
    """Recorded operations on buffers of these widths. Buffer 0 belongs to the caller, and buffer 1 in a step that has a
    `side`; the others are scratch memory that grows to the largest step. The caller keeps all recorded weights
    alive."""

    def __init__(self, kernels: CpuKernels, widths: Sequence[int]) -> None:
        library = kernels.library
        library.tgi_program.argtypes, library.tgi_program.restype = (c_void_p, c_int64), c_void_p
        library.tgi_program_free.argtypes, library.tgi_program_free.restype = (c_void_p,), None
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = (c_void_p, *arguments), None
        self._panels = 0  # of the logits of a token
        self.operations: list[str] = []  # names, in the order of execution
        self.clock: Tensor | None = None  # float64 [operations]: each run adds the seconds of each operation
        self._library = library
        self._kernels = kernels
        self._widths = list(widths)
        self._handle = library.tgi_program((c_int64 * len(widths))(*widths), len(widths))
        weakref.finalize(self, library.tgi_program_free, self._handle)

    def norm(
        self, x: int, y: int, start: int, weight: Tensor, bias: Tensor | None, epsilon: float, centred: bool
    ) -> None:
        """CpuKernels.norm of the columns of x from `start` on, written to the same columns of y, which is as wide."""
        assert self._widths[x] == self._widths[y]
        parts = 1 if weight.ndim == 1 else len(weight)
        at = None if bias is None else bias.data_ptr()
        self._record("norm", x, y, start, weight.data_ptr(), at, parts, weight.shape[-1], centred, epsilon)

    def linear(
        self,
        x: int,
        y: int,
        weight: PackedWeight,
        bias: Tensor | None = None,
        then: int = 0,
        other: int = 0,
        delta: LoraTarget | None = None,
        factors: tuple[float, float] = NO_FACTORS,
    ) -> None:
        """CpuKernels.linear; `other`, which may be y, is read only for binary epilogues."""
        memory, outputs, inputs, form = weight
        assert (self._widths[x], self._widths[y]) == (inputs, outputs)
        place, column = delta or (NO_TARGET, 0)
        at = None if bias is None else bias.data_ptr()
        self._record("linear", x, other, y, place, column, memory.data_ptr(), form, at, inputs, outputs, then, *factors)

    def lora(self, x: int, place: int, layer: int) -> None:
        """CpuKernels.lora for one slot of the step's LoraStep. Recorded before the linear operations that add its
        sums."""
        self._record("lora", x, place, layer)

    def rope(
        self, x: int, rope: int, heads: int, head_dim: int, rotary_dim: int, neighbours: bool, start: int = 0
    ) -> None:
        """CpuKernels.apply_rope, with one of the tables of angles of the step."""
        self._record("rope", x, rope, heads, head_dim, rotary_dim, neighbours, start)

    def head_products(self, x: int, y: int, weights: PackedHeads, kept: int, last: int | None) -> None:
        """CpuKernels.head_products. The caller keeps the weights alive."""
        (_, outputs, inputs, form), heads = weights.heads[0], len(weights.heads)
        assert self._widths[x] == heads * (inputs + kept)
        assert self._widths[y] == (heads + (last is not None)) * (outputs + kept)
        addresses = weights.addresses.data_ptr()
        self._record(
            "head_products", x, NO_BUFFER if last is None else last, y, addresses, heads, form, outputs, inputs, kept
        )

    def attention(
        self,
        qkv: int,
        y: int,
        layer: int,
        heads: tuple[int, int],
        head_dim: int,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None = None,
        value_dim: int | None = None,
        shared: bool = False,
        chunked: bool = False,
        slopes: Tensor | None = None,
    ) -> None:
        """CpuKernels.paged_attention on the cache of a layer; `heads` are the numbers of query and KV heads; `shared`:
        qkv has queries alone. The caller keeps `sinks` and `slopes` alive."""
        assert self._widths[y] == heads[0] * (value_dim or head_dim)
        at_sinks, at_slopes = (None if one is None else one.data_ptr() for one in (sinks, slopes))
        sizes = head_dim, value_dim or 0
        options = scale, softcap or 0.0, at_sinks, shared, chunked, at_slopes
        self._record("attention", qkv, y, layer, *heads, *sizes, window or 0, *options)

    def conv(self, x: int, y: int, window: int, weight: Tensor, bias: Tensor | None, form: ConvForm) -> None:
        """`recurrent.causal_conv` with the state tensor of number `window`, counted over all recurrent layers."""
        at = None if bias is None else bias.data_ptr()
        self._record("conv", x, y, window, weight.data_ptr(), at, weight.shape[1], weight.shape[0], form)

    def delta_rule(self, x: int, ba: int, y: int, state: int, rule: DeltaRule) -> None:
        """`recurrent.delta_rule` of the first columns of buffer x, whose last columns are z, with the state tensor of
        number `state`, counted over all recurrent layers. The caller keeps the tensors of the rule alive."""
        key_heads, value_heads, key_dim, value_dim = rule.sizes
        values = value_heads * value_dim
        z = 2 * key_heads * key_dim + values
        assert (self._widths[x], self._widths[ba], self._widths[y]) == (z + values, 2 * value_heads, values)
        addresses = (tensor.data_ptr() for tensor in (rule.decay, rule.offset, rule.norm))
        self._record("delta_rule", x, ba, y, z, state, *addresses, *rule.sizes, rule.epsilon, rule.most)

    def ssd(self, x: int, y: int, state: int, rule: Ssd) -> None:
        """`recurrent.ssd` of the first columns of buffer x, whose last columns are dt, with the state tensor of number
        `state`, counted over all recurrent layers. The caller keeps the tensors of the rule alive."""
        assert self._widths[x] == rule.channels + rule.inner + rule.sizes[0]
        assert self._widths[y] == rule.inner
        addresses = (tensor.data_ptr() for tensor in (rule.decay, rule.offset, rule.skip))
        self._record("ssd", x, rule.channels + rule.inner, y, state, *addresses, *rule.sizes, *rule.factors)

    def gated_norm(self, y: int, x: int, z: int, norm: GatedNorm) -> None:
        """`recurrent.gated_norm` of buffer y by the columns of buffer x from `z` on. The caller keeps the weight
        alive."""
        sizes = norm.groups, self._widths[y] // norm.groups
        self._record("gated_norm", y, x, z, norm.weight.data_ptr(), *sizes, norm.gate_scale, norm.epsilon, norm.form)

    def sigmoid_gate(self, x: int, y: int) -> None:
        """y *= sigmoid(x)."""
        assert self._widths[x] == self._widths[y]
        self._record("sigmoid_gate", x, y)

    def experts(self, x: int, seen: int, y: int, experts: PackedExperts) -> None:
        """The mixture of experts of x, chosen by what the router sees. The caller keeps it alive."""
        assert self._widths[x] == self._widths[seen] == self._widths[y]
        self._record("experts", x, seen, y, experts.handle)

    def add(self, x: int, y: int, scale: float) -> None:
        """y += scale * x, with scale * x rounded to the type of the buffers first."""
        assert self._widths[x] == self._widths[y]
        self._record("add", x, y, scale)

    def scale(self, y: int, scale: float) -> None:
        """y *= scale."""
        self._record("scale", y, scale)

    def multiply(self, x: int, y: int, start: int) -> None:
        """y *= the columns of x from `start` on."""
        assert start + self._widths[y] <= self._widths[x]
        self._record("multiply", x, y, start)

    def copy(self, x: int, y: int, start: int) -> None:
        """The columns of y from `start` on = x."""
        assert start + self._widths[x] <= self._widths[y]
        self._record("copy", x, y, start)

    def all_reduce(self, x: int, group: int) -> None:
        """x = the sum of x over all ranks. `group` is SharedMemoryCommunicator.handle."""
        self._record("all_reduce", x, group)

    def attend_images(self, x: int, y: int, layer: int, heads: tuple[int, int], head_dim: int, scale: float) -> None:
        """ImageStates.attend of the queries x in the layer of this number among those that attend to images. Such a
        program is for steps with an ImageStep that has `seen` alone."""
        assert self._widths[x] == self._widths[y] == heads[0] * head_dim
        self._record("attend_images", x, y, layer, *heads, head_dim, scale)

    def copy_unseeing(self, x: int, y: int) -> None:
        """y = x for tokens that see no image. As `attend_images`."""
        assert self._widths[x] == self._widths[y]
        self._record("copy_unseeing", x, y)

    def add_features(self, y: int, level: int) -> None:
        """y += the features of this number in ImageStep, at their tokens."""
        self._record("add_features", y, level)

    def head(
        self,
        x: int,
        y: int,
        norm: tuple[Tensor, Tensor | None, float, bool],
        weight: PackedWeight,
        bias: Tensor | None,
        scale: float,
        cap: float | None,
        shards: VocabularyShards,
    ) -> None:
        """CpuKernels.greedy_head of the tokens in `draw_at` of `prepare`, normed as by CpuKernels.norm; y is
        scratch."""
        scales, shifts, epsilon, centred = norm
        memory, outputs, inputs, form = weight
        self._panels = shards.panels(outputs)
        assert self._widths[x] == self._widths[y] == inputs
        addresses = [None if one is None else one.data_ptr() for one in (scales, shifts, memory, bias)]
        self._record(
            "head", x, y, *addresses[:2], inputs, centred, epsilon, addresses[2], form, addresses[3], outputs,
            scale, cap or 0.0, *shards.arguments,
        )  # fmt: skip

    def prepare(
        self,
        rows: Tensor,
        positions: Tensor,
        angles: Sequence[tuple[Tensor, Tensor]],
        caches: Tensor,
        kv_form: int,
        step: AttentionRows,
        lora: LoraStep | None = None,
        draw_at: Tensor | None = None,
        state: StateStep | None = None,
        side: Tensor | None = None,
        images: ImageStep | None = None,
    ) -> PreparedStep:
        """The arguments of `run` for the rows of buffer 0, which are computed in place. `angles` are those of each rope
        (Rotary.angles), `caches` (int64 [layers, 2]) the addresses of the layers' KV caches with the KV group of
        each, their form is `kv_form` (CpuKernels.kv_form), and `step` has the rows of the first group. If draw_at
        (int64 [D], token numbers) is given, `run` returns the greedy tokens of those tokens. `state` is that of
        recurrent layers, `side` is buffer 1, and `images` what the step has of images."""
        assert rows.is_contiguous()
        assert rows.dtype is self._kernels.dtype
        best = peaks = drawing = None
        if draw_at is not None:
            best, peaks = (
                GreedyTokens.empty(len(draw_at)),
                self._kernels.block_maxima_memory(len(draw_at), self._panels),
            )
            columns = (column.data_ptr() for column in (peaks, *best))
            drawing = _GreedyRows(draw_at.data_ptr(), len(draw_at), *columns)
        tables = (c_void_p * len(angles))(*(table.data_ptr() for table, _ in angles))
        arguments = (
            rows.data_ptr(), positions.data_ptr(), tables, caches.data_ptr(), kv_form,
            None if lora is None else lora.fields.data_ptr(), *step, drawing,
            None if state is None else state.fields.data_ptr(),
            None if side is None else side.data_ptr(),
            None if images is None else images.fields.data_ptr(),
        )  # fmt: skip
        kept = rows, positions, angles, caches, lora, draw_at, peaks, state, side, images
        return PreparedStep(best, arguments, kept)

    def run(self, ready: PreparedStep) -> GreedyTokens | None:
        """Runs the operations on the current contents of the prepared tensors. Each run of the same arguments writes
        its greedy tokens to the same memory."""
        clock = None if self.clock is None else self.clock.data_ptr()
        self._library.tgi_program_run(self._handle, self._kernels.thread_pool, *ready.arguments, clock)
        return ready.best

    def _record(self, name: str, *arguments: object) -> None:
        self.operations.append(name)
        getattr(self._library, f"tgi_program_{name}")(self._handle, *arguments)
