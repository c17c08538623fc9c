"""Activation functions by name, as computed by torch. The compute kernels have their own implementations of them."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tgi.worker.decoder_config import ALPHA, LIMIT


def sigmoid(x: Tensor) -> Tensor:
    """sigmoid(x), as a softmax over x and 0: torch computes each row of a softmax alike, but the elements at the end of
    a thread's share of a sigmoid with another exp(), which would not be batch invariant."""
    return torch.stack((x, torch.zeros_like(x)), -1).softmax(-1)[..., 0]


def _clamped_silu(x: Tensor) -> Tensor:
    x = x.clamp(max=LIMIT)
    return (x.float() * sigmoid(ALPHA * x.float())).to(x.dtype)


def xielu(x: Tensor, positive: float, negative: float) -> Tensor:
    """x / 2, plus positive * x^2 above 0 and else negative * (exp(x) - 1 - x), where x counts as at most -1e-6 in the
    exponent: the activation of Apertus, whose factors are learned. As batch invariant as `sigmoid`."""
    wide = x.float()
    low = wide.clamp(max=-1e-6)
    shares = torch.stack((low, torch.zeros_like(low)), -1).softmax(-1)
    power = shares[..., 0] / shares[..., 1] - 1
    return (torch.where(wide > 0, wide * wide * positive, (power - wide) * negative) + 0.5 * wide).to(x.dtype)


def _clip(x: Tensor, low: float, high: float) -> Tensor:
    return x.clamp(low, high)


# Those with two factors, which belong to a layer.
FACTORED: dict[str, Callable[[Tensor, float, float], Tensor]] = {"xielu": xielu, "clip": _clip}

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "clamped_silu": _clamped_silu,
}

# What multiplies an activated gate, by the activation: the outputs of the up projection, if it is not here.
UP_EPILOGUES = {"clamped_silu": "clamped_mul"}


def sparse(x: Tensor, above: float, then: str) -> Tensor:
    """An activation of what exceeds the mean of a row of x by `above` standard deviations. On CPU in float64, as
    layers.gated_delta.exactly: torch's sums over rows depend on their number in the last bits."""
    wide = x.double() if x.device.type == "cpu" else x.float()
    deviation, mean = torch.std_mean(wide, dim=-1, correction=0, keepdim=True)
    return ACTIVATIONS[then](F.relu(wide - (mean + above * deviation))).to(x.dtype)


def clamped_mul(up: Tensor, gate: Tensor) -> Tensor:
    """(1 + up) * gate, with up within -LIMIT and LIMIT."""
    return (up.clamp(-LIMIT, LIMIT) + 1) * gate


def gated(then: str, gate: Tensor, up: Tensor) -> Tensor:
    """The product of an activated gate and an up projection."""
    left = ACTIVATIONS[then](gate)
    return clamped_mul(up, left) if then in UP_EPILOGUES else left * up
