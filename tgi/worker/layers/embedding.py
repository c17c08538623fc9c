"""Token embedding: looks up rows of a matrix, quantized or not."""

from collections.abc import Callable

import torch
from torch import Tensor

from tgi.worker.layers.linear import Linear
from tgi.worker.quantization.weight import Weight, as_plain


class Embedding:
    """Rows of a weight [vocab, hidden], converted to `dtype` at lookup.

    The weight is either a tensor, usually mapped from the checkpoint file, of which only the rows looked up are read;
    or a linear layer (a tied output head) in the packed layout of the CPU kernels.
    """

    def __init__(self, weight: Weight | Linear, dtype: torch.dtype) -> None:
        self._weight = weight
        self._dtype = dtype

    @property
    def shared(self) -> bool:
        """Whether a linear layer holds the weight, so that the checkpoint file need not stay mapped."""
        return isinstance(self._weight, Linear)

    def __call__(self, tokens: Tensor) -> Tensor:
        """[tokens, hidden] for ids [tokens] below vocab."""
        if isinstance(self._weight, Linear):
            return self._weight.lookup(tokens)
        if isinstance(self._weight, Tensor):
            return self._weight.index_select(0, tokens).to(self._dtype)
        return as_plain(self._weight.rows(tokens), self._dtype)

    def prepare_lookup(self, tokens: Tensor, out: Tensor) -> Callable[[], object]:
        """A call that writes the embeddings of the current contents of `tokens` to `out`."""
        if isinstance(self._weight, Linear):
            return self._weight.prepare_lookup(tokens, out)
        return lambda: out.copy_(self(tokens))
