"""HeadLogits: logits as the output head writes them."""

from typing import NamedTuple

import torch
from torch import Tensor


class HeadLogits(NamedTuple):
    """Logits of D rows: cap * tanh(scale * values / cap), or scale * values without a cap, in float32."""

    values: Tensor  # [D, vocab], in any float type
    scale: float = 1.0
    cap: float | None = None

    def float32(self) -> Tensor:
        """The logits float32 [D, vocab]; `values` themselves if they are."""
        logits = self.values.to(torch.float32)
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap
