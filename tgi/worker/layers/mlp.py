"""The part of a layer that works on each token alone: an MLP, or a router and many of them."""

from functools import reduce
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tgi.worker.linear import Linear


class Mlp(NamedTuple):
    """down(f(gate(x)) * up(x)), or, without a gate, down(f(up(x))). f and the product are part of the linear layers.
    Where one layer has both weights, it is `up`."""

    gate: Linear | None
    up: Linear
    down: Linear

    def inner(self, x: Tensor) -> Tensor:
        """All but the last matrix."""
        return self.up(x) if self.gate is None else self.up(x, self.gate(x))


class Experts(NamedTuple):
    """A mixture of experts; see ExpertsConfig.

    An expert computes the tokens that chose it, in their order. Its linear layers give each row the same bits whatever
    other rows there are, and a token's sum runs over its experts from the likeliest on, so a token's result does not
    depend on what the others chose.
    """

    router: Linear
    experts: list[Mlp]
    chosen: int
    normalized: bool

    def __call__(self, x: Tensor, count: int) -> Tensor:
        """For x [rows, hidden], of which the first `count` rows are tokens; the others come out as zeros."""
        likely = self.router(x)[:count].to(torch.float32).softmax(-1)
        weights, experts = likely.topk(self.chosen)
        if self.normalized:
            weights = weights / reduce(torch.add, weights.unbind(1))[:, None]
        order = experts.view(-1).argsort(stable=True)
        loads = torch.bincount(experts.view(-1), minlength=len(self.experts)).tolist()
        rows = x.index_select(0, order // self.chosen).split(loads)
        found = [mlp.down(mlp.inner(mine)) for mlp, mine in zip(self.experts, rows, strict=True) if len(mine)]
        back = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))
        parts = torch.cat(found).index_select(0, back).view(count, self.chosen, -1).to(torch.float32)
        whole = reduce(torch.add, (parts * weights[:, :, None]).unbind(1))
        return F.pad(whole.to(x.dtype), (0, 0, 0, x.shape[0] - count))
