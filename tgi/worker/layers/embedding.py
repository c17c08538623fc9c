"""Token embedding: looks up rows of a matrix, quantized or not."""

from collections.abc import Callable

import torch
from torch import Tensor

from tgi.worker.layers.linear import Linear
from tgi.worker.quantization.weight import Weight, as_plain


class Embedding:
    """Rows of a weight [vocab, hidden], converted to `dtype` at lookup. If it is `partial`, this rank has the rows of
    some tokens, and zeros for the others.

    The weight is either a tensor, usually mapped from the checkpoint file, of which only the rows looked up are read;
    or a linear layer (a tied output head) in the packed layout of the CPU kernels.
    """

    def __init__(self, weight: Weight | Linear, dtype: torch.dtype, local: range | None = None) -> None:
        """`local`: the tokens of this rank; None: all."""
        self._weight = weight
        self._dtype = dtype
        self._local = local
        self._first = 0 if local is None else local.start

    @property
    def partial(self) -> bool:
        """Whether the results are complete when all ranks' are added up."""
        return self._local is not None

    @property
    def shared(self) -> bool:
        """Whether a linear layer holds the weight, so that the checkpoint file need not stay mapped."""
        return isinstance(self._weight, Linear)

    def __call__(self, tokens: Tensor) -> Tensor:
        """[tokens, hidden] for ids [tokens] below vocab."""
        if isinstance(self._weight, Linear):
            return self._weight.lookup(tokens, self._first)
        if self._local is None:
            return self._rows(tokens)
        elsewhere = (tokens < self._local.start) | (tokens >= self._local.stop)
        return self._rows((tokens - self._first).masked_fill_(elsewhere, 0)).masked_fill_(elsewhere[:, None], 0.0)

    def prepare_lookup(self, tokens: Tensor, out: Tensor) -> Callable[[], object]:
        """A call that writes the embeddings of the current contents of `tokens` to `out`."""
        if isinstance(self._weight, Linear):
            return self._weight.prepare_lookup(tokens, out, self._first)
        return lambda: out.copy_(self(tokens))

    def _rows(self, numbers: Tensor) -> Tensor:
        assert not isinstance(self._weight, Linear)
        if isinstance(self._weight, Tensor):
            return self._weight.index_select(0, numbers).to(self._dtype)
        return as_plain(self._weight.rows(numbers), self._dtype)
