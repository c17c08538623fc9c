"""The first layer: each token's row of a matrix, quantized or not."""

from collections.abc import Callable

import torch
from torch import Tensor

from tgi.worker.linear import Linear
from tgi.worker.quantization.weight import Weight, plain


class Embedding:
    """Rows of a weight [vocab, hidden], converted when they are looked up: either as it lies in the file, of which, if
    it is mapped, no others are read, or as a linear layer of our own kernels has it, whose weight it is."""

    def __init__(self, weight: Weight | Linear, dtype: torch.dtype) -> None:
        self._weight = weight
        self._dtype = dtype

    @property
    def shared(self) -> bool:
        """Whether a linear layer keeps the weight, so that the file is needed no more."""
        return isinstance(self._weight, Linear)

    def __call__(self, tokens: Tensor) -> Tensor:
        """[tokens, hidden] for ids [tokens], which are below vocab."""
        if isinstance(self._weight, Linear):
            return self._weight.lookup(tokens)
        if isinstance(self._weight, Tensor):
            return self._weight.index_select(0, tokens).to(self._dtype)
        return plain(self._weight.rows(tokens), self._dtype)

    def into(self, tokens: Tensor, found: Tensor) -> Callable[[], object]:
        """What does so with whatever is in `tokens` when it is called, and leaves it in `found`."""
        if isinstance(self._weight, Linear):
            return self._weight.lookup_into(tokens, found)
        return lambda: found.copy_(self(tokens))
