"""The first layer: each token's row of a matrix, which stays as it lies in the file, quantized or not."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgi.worker.quantization.weight import Weight, plain


class Embedding:
    """Rows of a weight [vocab, hidden], converted when they are looked up: of a mapped file no others are read."""

    def __init__(self, weight: Weight, dtype: torch.dtype) -> None:
        self._weight = weight
        self._dtype = dtype
        # Where no number is converted, rows are copied as they are: for a few numpy takes a fraction of torch's time.
        self._here: NDArray[np.uint8] | None = None
        if isinstance(weight, Tensor) and weight.device.type == "cpu" and weight.dtype is dtype:
            self._here = weight.contiguous().view(torch.uint8).numpy()

    def __call__(self, tokens: Tensor) -> Tensor:
        """[tokens, hidden] for ids [tokens]."""
        if self._here is not None:
            return torch.from_numpy(self._here.take(tokens.numpy(), 0)).view(self._dtype)
        if isinstance(self._weight, Tensor):
            return self._weight.index_select(0, tokens).to(self._dtype)
        return plain(self._weight.rows(tokens), self._dtype)
