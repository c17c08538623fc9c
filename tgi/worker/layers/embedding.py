"""The first layer: each token's row of a matrix, which stays as it lies in the file, quantized or not."""

import torch
from torch import Tensor

from tgi.worker.quantization.weight import Weight, plain


class Embedding:
    """Rows of a weight [vocab, hidden], converted when they are looked up: of a mapped file no others are read."""

    def __init__(self, weight: Weight, dtype: torch.dtype) -> None:
        self._weight = weight
        self._dtype = dtype

    def __call__(self, tokens: Tensor) -> Tensor:
        """[tokens, hidden] for ids [tokens]."""
        if isinstance(self._weight, Tensor):
            return self._weight.index_select(0, tokens).to(self._dtype)
        return plain(self._weight.rows(tokens), self._dtype)
