"""What a vision tower makes of an image."""

from typing import NamedTuple

from torch import Tensor


class ImageFeatures(NamedTuple):
    """What the decoder gets of an image, on the model's device: for each of its image tokens, in order, the embedding,
    and with deepstack (Qwen3-VL, 2025) what is added to the result of each of the first layers."""

    embeddings: Tensor  # [n, hidden]
    deeper: tuple[Tensor, ...] = ()  # [n, hidden] each

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in (self.embeddings, *self.deeper))
