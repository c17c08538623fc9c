"""Feed-forward blocks: a dense MLP, and a mixture of experts, computed expert by expert or, on our own kernels, in
products of all experts."""

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from tgi.worker.activations import sigmoid, sparse
from tgi.worker.cpu_kernels.experts import PackedExperts, PackedMlp
from tgi.worker.cpu_kernels.kernels import CpuKernels
from tgi.worker.decoder_config import RouterConfig
from tgi.worker.gpu_kernels.kernels import GpuKernels
from tgi.worker.layers.linear import Linear
from tgi.worker.quantization.weight import Weight

LEAST_SUM = 1e-20  # added to the sum of weights, which may be 0


class Mlp(NamedTuple):
    """down(f(gate(x)) * up(x)), or another product of both (activations.gated), or, without a gate, down(f(up(x))).

    f and the product are epilogues of the linear layers. Where gate and up are fused, `gate` is None and `up` holds
    both weights.

    With `sparse_above` f sees relu(g - (mean + sparse_above * deviation)) in place of g = gate(x), with the mean and
    the standard deviation of a token's g, and is no epilogue (Gemma 3n).
    """

    gate: Linear | None
    up: Linear
    down: Linear
    sparse_above: float | None = None
    activation: str = "none"  # f, with sparse_above

    def gate_up(self, x: Tensor) -> Tensor:
        """The input of `down`."""
        if self.sparse_above is not None:
            assert self.gate is not None
            return self.up(x, sparse(self.gate(x), self.sparse_above, self.activation))
        return self.up(x) if self.gate is None else self.up(x, self.gate(x))


class Router(NamedTuple):
    """Chooses a token's experts; see RouterConfig."""

    linear: Linear
    bias: Tensor | None  # float32 [experts]
    config: RouterConfig
    top_k: int  # experts per token
    expert_scales: Tensor | None = None  # float32 [experts]: factors of the weights

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The weights float32 and the numbers of the experts of each row of x, both [rows, top_k]. The order of a row
        is that of the choice, the first one first."""
        config, logits = self.config, self.linear(x).to(torch.float32)
        if config.score == "sparsemixer":
            return self._mix_sparsely(logits)
        scores = logits.softmax(-1) if config.score == "softmax" else sigmoid(logits)
        choice = scores if self.bias is None else scores + self.bias
        if config.groups > 1:
            by_group = choice.unflatten(1, (config.groups, -1))
            best = by_group.topk(config.group_best).values.sum(-1).topk(config.top_groups).indices
            excluded = torch.ones_like(by_group[..., 0], dtype=torch.bool).scatter_(1, best, False)
            choice = by_group.masked_fill(excluded[..., None], -torch.inf).flatten(1)
        chosen = choice.topk(self.top_k).indices
        weights = scores.gather(1, chosen)
        if config.normalized:
            weights = weights / (reduce(torch.add, weights.unbind(1)) + LEAST_SUM)[:, None]
        weights = weights * config.scale
        return weights if self.expert_scales is None else weights * self.expert_scales[chosen], chosen

    def _mix_sparsely(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        left, weights, chosen = logits, [], []
        for _ in range(self.top_k):
            most, best = left.max(-1, keepdim=True)
            far = (most - logits) / logits.abs().clamp(min=most) > 2 * self.config.jitter
            weights.append(left.masked_fill(far, -torch.inf).softmax(-1).gather(1, best))
            chosen.append(best)
            left = left.scatter(1, best, -torch.inf)
        return torch.cat(weights, 1), torch.cat(chosen, 1)


class SharedExpert(NamedTuple):
    """The MLP of a mixture that every token uses."""

    mlp: Mlp
    gate: Linear | None  # [1, hidden]

    def __call__(self, x: Tensor) -> Tensor:
        """The result float32 [rows, hidden] for x [rows, hidden]."""
        y = self.mlp.down(self.mlp.gate_up(x)).to(torch.float32)
        return y if self.gate is None else y * sigmoid(self.gate(x).to(torch.float32))


class MixtureOfExperts(NamedTuple):
    """A mixture of experts; see ExpertsConfig.

    Batch invariance, where linear layers have it: each expert computes its tokens in the order of the batch, and a
    token's result is summed over its experts from the most probable one on. So it does not depend on the experts that
    other tokens chose.
    """

    router: Router
    experts: list[Mlp]
    shared: SharedExpert | None
    packed: PackedExperts | None = None  # on our CPU kernels, computes all of it in one call

    @property
    def partial_sum(self) -> bool:
        """Whether the experts have the inner columns of one rank: see Linear."""
        return self.experts[0].down.partial_sum

    def __call__(self, x: Tensor, count: int, seen: Tensor | None = None) -> Tensor:
        """The result [rows, hidden] for x [rows, hidden]. Rows from `count` on are padding and become zeros. `seen` is
        what the router chooses by; None: x."""
        seen = x if seen is None else seen
        if self.packed is not None:
            assert count == len(x)
            return self.packed(x, seen)
        weights, chosen = self.router.choose(seen)
        weights, chosen, top_k = weights[:count], chosen[:count], self.router.top_k
        order = chosen.view(-1).argsort(stable=True)
        loads = torch.bincount(chosen.view(-1), minlength=len(self.experts)).tolist()
        gathered = x.index_select(0, order // top_k)
        if self.router.config.scales_inputs:
            gathered = (gathered * weights.view(-1)[order][:, None]).to(x.dtype)
            weights = torch.ones_like(weights)
        inputs = gathered.split(loads)
        outputs = [mlp.down(mlp.gate_up(rows)) for mlp, rows in zip(self.experts, inputs, strict=True) if len(rows)]
        inverse = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))
        parts = torch.cat(outputs).index_select(0, inverse).view(count, top_k, -1).to(torch.float32)
        mixed = reduce(torch.add, (parts * weights[:, :, None]).unbind(1))
        if self.shared is not None:
            mixed = mixed + self.shared(x)[:count]
        return F.pad(mixed.to(x.dtype), (0, 0, 0, x.shape[0] - count))


def pack_experts(
    kernels: CpuKernels, router: Router, experts: Sequence[Mlp], shared: SharedExpert | None
) -> PackedExperts | None:
    """MixtureOfExperts.packed of layers on our CPU kernels. None if a gate and an up projection, or two experts, differ
    in their format."""
    every = [*experts, *([] if shared is None else [shared.mlp])]
    if any(mlp.gate is not None for mlp in every):
        return None
    packed = [PackedMlp(mlp.up.packed, mlp.down.packed, mlp.up.epilogue) for mlp in every]
    own = packed[: len(experts)]
    if len({mlp.shape for mlp in own}) > 1:
        return None
    gate = None if shared is None or shared.gate is None else shared.gate.packed.weight
    shared_mlp = None if shared is None else packed[-1]
    rule = router.config, router.top_k, router.linear.packed, router.bias
    return PackedExperts(kernels, *rule, own, shared_mlp, gate, router.expert_scales)


class GroupedExperts(NamedTuple):
    """A mixture of experts on our GPU kernels. The host does not learn what the tokens choose, and all shapes follow
    from the number of tokens, so that a CUDA graph can keep a step.

    The products choose their tiles by the number of rows, not by the loads of experts; so a token's result does not
    depend on the experts that other tokens chose, but may on their number.
    """

    router: Router
    up: Weight  # of all experts, one after the other; of each the gate, if there is one, then up
    down: Weight
    activation: str
    gated: bool
    shared: SharedExpert | None
    partial_sum: bool  # the experts have the inner columns of one rank: see Linear
    kernels: GpuKernels
    up_bias: Tensor | None = None  # [rows of `up`]
    down_bias: Tensor | None = None

    def __call__(self, x: Tensor, count: int, seen: Tensor | None = None) -> Tensor:
        """The result [rows, hidden] for x [rows, hidden]; all `count` rows are tokens."""
        assert count == len(x)
        assert seen is None
        kernels, router = self.kernels, self.router
        size = x.dtype, count * router.top_k, router.linear.outputs
        first, last = (kernels.choose_expert_tile(weight, *size) for weight in (self.up, self.down))
        routing = kernels.route(router.linear(x), router.bias, router.config, router.top_k, first.rows)
        how = self.activation, self.gated, True
        inner = kernels.grouped_matmul(x, self.up, routing, first, *how, bias=self.up_bias)
        parts = kernels.grouped_matmul(inner, self.down, routing, last._replace(rows=first.rows), bias=self.down_bias)
        mixed = kernels.combine(parts, routing)
        if self.shared is None:
            return mixed
        if self.shared.gate is None:  # no float32 in between: a launch less on either side
            return mixed.add_(self.shared.mlp.down(self.shared.mlp.gate_up(x)))
        return mixed.add_(self.shared(x))


Experts: TypeAlias = MixtureOfExperts | GroupedExperts
