"""Feed-forward blocks: a dense MLP, and a mixture of experts."""

from functools import reduce
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tgi.worker.layers.linear import Linear


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
