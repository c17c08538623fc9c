"""Mixtures of experts on the CPU kernels: the router's choice and the products of all experts as one call.

The call computes what `tgi.worker.layers.mlp.MixtureOfExperts` describes, with linear layers as of CpuKernels.linear.
See experts.h.
"""

import weakref
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from tgi.worker.cpu_kernels.kernels import EPILOGUES, CpuKernels, PackedWeight
from tgi.worker.decoder_config import RouterConfig

MAX_GROUPS = 64  # of experts (experts.cpp)

# Argument types of the functions in interface.cpp.
_CREATE = (c_int64, c_void_p, c_float, c_float, c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_void_p)
_RUN = (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int64)
# RouterConfig.score -> the number in `enum class RouterScore` of experts.h.
_SCORES = {"softmax": 0, "sigmoid": 1, "sparsemixer": 2}


class PackedLinear(NamedTuple):
    """The weight and the bias of a linear layer on the CPU kernels."""

    weight: PackedWeight
    bias: Tensor | None  # float32 [outputs]


class PackedMlp(NamedTuple):
    """down(f(gate(x)) * up(x)), with gate and up in one weight, or down(f(up(x)))."""

    up: PackedLinear
    down: PackedLinear
    activation: str  # f, one of EPILOGUES

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The inner width, the formats of both weights and the number of the activation."""
        return self.up.weight.outputs, self.up.weight.form, self.down.weight.form, EPILOGUES[self.activation]

    @property
    def columns(self) -> tuple[Tensor | None, ...]:
        """The memory of both layers: weight, bias, weight, bias."""
        return self.up.weight.memory, self.up.bias, self.down.weight.memory, self.down.bias


class PackedExperts:
    """A mixture of experts of one shape and format (PackedMlp.shape)."""

    def __init__(
        self,
        kernels: CpuKernels,
        rule: RouterConfig,
        top_k: int,
        router: PackedLinear,
        choice_bias: Tensor | None,
        experts: Sequence[PackedMlp],
        shared: PackedMlp | None,
        shared_gate: PackedWeight | None,
        expert_scales: Tensor | None = None,
    ) -> None:
        """`choice_bias` is that of a `biased` rule, and `expert_scales` Router.expert_scales, float32 [experts]."""
        self.made_of = kernels, rule, top_k, router, choice_bias, experts, shared, shared_gate, expert_scales
        assert len({expert.shape for expert in experts}) == 1
        assert rule.groups <= MAX_GROUPS
        library = kernels.library
        library.tgi_experts.argtypes, library.tgi_experts.restype = _CREATE, c_void_p
        library.tgi_experts_free.argtypes, library.tgi_experts_free.restype = (c_void_p,), None
        library.tgi_run_experts.argtypes, library.tgi_run_experts.restype = _RUN, None
        gate = None if shared_gate is None else shared_gate.memory
        columns = [column for expert in experts for column in expert.columns]
        columns += [*([None] * 4 if shared is None else shared.columns), router.weight.memory, router.bias, gate]
        # The library keeps addresses: of the memory of what is in `made_of`.
        sizes = (
            *(len(experts), top_k, rule.groups, rule.top_groups),
            *(_SCORES[rule.score], rule.normalized, rule.group_best, rule.scales_inputs),
        )
        self._run, self._kernels = library.tgi_run_experts, kernels
        self.handle = library.tgi_experts(
            router.weight.inputs,
            (c_int64 * len(sizes))(*sizes),
            rule.scale,
            rule.jitter,
            *(None if one is None else one.data_ptr() for one in (choice_bias, expert_scales)),
            router.weight.form,
            (c_int64 * 4)(*experts[0].shape),
            (c_int64 * 4)(*(experts[0] if shared is None else shared).shape),
            router.weight.form if shared_gate is None else shared_gate.form,
            (c_void_p * len(columns))(*(None if one is None else one.data_ptr() for one in columns)),
        )
        weakref.finalize(self, library.tgi_experts_free, self.handle)

    def __call__(self, x: Tensor, seen: Tensor) -> Tensor:
        """The result [rows, hidden] for x [rows, hidden]; `seen`, which may be x, is what the router chooses by."""
        x, seen = x.contiguous(), seen.contiguous()
        y = torch.empty_like(x)
        self._run(self._kernels.thread_pool, self.handle, x.data_ptr(), seen.data_ptr(), y.data_ptr(), len(x))
        return y
