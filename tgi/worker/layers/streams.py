"""Alternating updates (AltUp; Baykal et al., 2023), as in Gemma 3n: the hidden states of a token are several streams
[rows, count, hidden]. Before a layer all of them are predicted from all; the layer computes one, the active stream, and
by how much its result differs from the prediction corrects all.

Computed in float32, in an order of sums that does not depend on the number of rows.
"""

from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from tgi.worker.layers.gated_delta import exactly
from tgi.worker.layers.linear import Linear
from tgi.worker.layers.norm import Norm

LEAST_SQUARE = 1e-5  # of a stream's numbers, on average


class Streams(NamedTuple):
    """Makes the streams of an embedding, and hidden states of streams. Linear layers for all streams but the first."""

    to: tuple[Linear, ...]
    back: tuple[Linear, ...]

    def split(self, hidden: Tensor) -> Tensor:
        """The streams [rows, count, hidden] of embeddings [rows, hidden]; all have the magnitude of the first."""
        others = [_with_magnitude(linear(hidden), hidden) for linear in self.to]
        return torch.stack([hidden, *others], 1)

    def merge(self, streams: Tensor) -> Tensor:
        """The mean [rows, hidden] of the streams, made alike in magnitude."""
        first = streams[:, 0].contiguous()
        others = [
            _with_magnitude(linear(streams[:, number].contiguous()), first).float()
            for number, linear in enumerate(self.back, 1)
        ]
        return (reduce(torch.add, others, first.float()) / streams.shape[1]).to(streams.dtype)


class LayerStreams(NamedTuple):
    """What a layer does to the streams."""

    norm: Norm  # divides by the hidden size, too
    router: Linear  # [count, hidden]
    prediction: Linear  # [count * count, count]
    correction: Linear  # [count, count]
    active: int
    scale: Tensor | None  # float32 [hidden]: what `scaled_active` multiplies by

    def predict(self, streams: Tensor) -> Tensor:
        """Stream j + sum over i of w_ji * stream i, with weights that the active stream chooses."""
        count, wide = streams.shape[1], streams.float()
        weights = self.prediction(self._modes(streams[:, self.active])).float().view(-1, count, count)
        parts = (weights[:, :, number, None] * wide[:, None, number] for number in range(count))
        return reduce(torch.add, parts, wide).to(streams.dtype)

    def correct(self, predicted: Tensor, computed: Tensor) -> Tensor:
        """Stream j + (1 + c_j) * (computed - active stream), with weights c that the computed one chooses."""
        weights = self.correction(self._modes(computed)).float() + 1
        news = computed.float() - predicted[:, self.active].float()
        return (predicted.float() + news[:, None] * weights[:, :, None]).to(predicted.dtype)

    def scaled_active(self, streams: Tensor) -> Tensor:
        """The active stream [rows, hidden], scaled."""
        active = streams[:, self.active]
        return active.contiguous() if self.scale is None else (active.float() * self.scale).to(streams.dtype)

    def _modes(self, x: Tensor) -> Tensor:
        routed = self.router(self.norm(x.contiguous()))
        return exactly(torch.tanh, routed.float()).to(x.dtype)


def _with_magnitude(x: Tensor, of: Tensor) -> Tensor:
    """x, with the root mean square of each row of another tensor."""
    factor = (_mean_square(of) / _mean_square(x).clamp(min=LEAST_SQUARE)).sqrt()
    return (x * factor).to(x.dtype)


def _mean_square(x: Tensor) -> Tensor:
    wide = x.double() if x.device.type == "cpu" else x.float()
    return wide.square().mean(-1, keepdim=True)
