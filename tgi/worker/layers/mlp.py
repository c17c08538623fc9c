"""Feed-forward blocks: a dense MLP, and a mixture of experts, computed expert by expert or, on our GPU kernels, in
products of all experts."""

from functools import reduce
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from tgi.worker.gpu_kernels.kernels import GpuKernels
from tgi.worker.layers.linear import Linear
from tgi.worker.quantization.weight import Weight


class Mlp(NamedTuple):
    """down(f(gate(x)) * up(x)) or, without a gate, down(f(up(x))).

    f and the product are epilogues of the linear layers. Where gate and up are fused, `gate` is None and `up` holds
    both weights.
    """

    gate: Linear | None
    up: Linear
    down: Linear

    def gate_up(self, x: Tensor) -> Tensor:
        """The input of `down`."""
        return self.up(x) if self.gate is None else self.up(x, self.gate(x))


class MixtureOfExperts(NamedTuple):
    """A mixture of experts; see ExpertsConfig.

    Batch invariance: each expert computes its tokens in the order of the batch, with linear layers whose rows do not
    depend on each other, and a token's result is summed over its experts from the most probable one on. So it does not
    depend on the experts that other tokens chose.
    """

    router: Linear
    experts: list[Mlp]
    top_k: int  # experts per token
    normalized: bool  # the weights of the chosen experts are scaled to sum to 1

    @property
    def partial_sum(self) -> bool:
        """Whether the experts have the inner columns of one rank: see Linear."""
        return self.experts[0].down.partial_sum

    def __call__(self, x: Tensor, count: int) -> Tensor:
        """The result [rows, hidden] for x [rows, hidden]. Rows from `count` on are padding and become zeros."""
        probabilities = self.router(x)[:count].to(torch.float32).softmax(-1)
        weights, chosen = probabilities.topk(self.top_k)
        if self.normalized:
            weights = weights / reduce(torch.add, weights.unbind(1))[:, None]
        order = chosen.view(-1).argsort(stable=True)
        loads = torch.bincount(chosen.view(-1), minlength=len(self.experts)).tolist()
        inputs = x.index_select(0, order // self.top_k).split(loads)
        outputs = [mlp.down(mlp.gate_up(rows)) for mlp, rows in zip(self.experts, inputs, strict=True) if len(rows)]
        inverse = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))
        parts = torch.cat(outputs).index_select(0, inverse).view(count, self.top_k, -1).to(torch.float32)
        mixed = reduce(torch.add, (parts * weights[:, :, None]).unbind(1))
        return F.pad(mixed.to(x.dtype), (0, 0, 0, x.shape[0] - count))


class GroupedExperts(NamedTuple):
    """A mixture of experts on our GPU kernels. The host does not learn what the tokens choose, and all shapes follow
    from the number of tokens, so that a CUDA graph can keep a step.

    The products choose their tiles by the number of rows, not by the loads of experts; so a token's result does not
    depend on the experts that other tokens chose, but may on their number.
    """

    router: Linear
    up: Weight  # of all experts, one after the other; of each the gate, if there is one, then up
    down: Weight
    activation: str
    gated: bool
    top_k: int  # experts per token
    normalized: bool  # the weights of the chosen experts are scaled to sum to 1
    partial_sum: bool  # the experts have the inner columns of one rank: see Linear
    kernels: GpuKernels

    def __call__(self, x: Tensor, count: int) -> Tensor:
        """The result [rows, hidden] for x [rows, hidden]; all `count` rows are tokens."""
        assert count == len(x)
        kernels, size = self.kernels, (x.dtype, count * self.top_k, self.router.outputs)
        first, last = (kernels.choose_expert_tile(weight, *size) for weight in (self.up, self.down))
        routing = kernels.route(self.router(x), self.top_k, self.normalized, first.rows)
        inner = kernels.grouped_matmul(x, self.up, routing, first, self.activation, self.gated, by_token=True)
        return kernels.combine(
            kernels.grouped_matmul(inner, self.down, routing, last._replace(rows=first.rows)), routing
        )


Experts: TypeAlias = MixtureOfExperts | GroupedExperts
