"""HeadLogits: logits as the output head writes them."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tgi.worker.distributed.communicator import Communicator


class VocabularyShard(NamedTuple):
    """The tokens whose logits a rank has."""

    communicator: Communicator
    widths: Sequence[int]  # tokens of each rank

    @property
    def first(self) -> int:
        """The first token of this rank."""
        return sum(self.widths[: self.communicator.rank])

    @property
    def vocab(self) -> int:
        """The tokens of all ranks."""
        return sum(self.widths)


class HeadLogits(NamedTuple):
    """Logits of D rows: cap * tanh(scale * values / cap), or scale * values without a cap, in float32."""

    values: Tensor  # [D, vocab], in any float type
    scale: float = 1.0
    cap: float | None = None
    shard: VocabularyShard | None = None  # where `values` are those of one rank of several

    def joined(self) -> "HeadLogits":
        """The logits of the whole vocabulary. All ranks call it together."""
        if self.shard is None:
            return self
        return self._replace(values=self.shard.communicator.all_gather(self.values, self.shard.widths), shard=None)

    def float32(self) -> Tensor:
        """The logits float32 [D, vocab]; `values` themselves if they are. All ranks call it together."""
        logits = self.joined().values.to(torch.float32)
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap
