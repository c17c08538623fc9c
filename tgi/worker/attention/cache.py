"""The keys and values of a layer on a GPU, in pages, in the model's type or in 8 bits."""

import torch
from torch import Tensor

from tgi.worker.batch import KVShape


class Cache:
    """Two tensors [pages, page_size, kv_heads, head_dim], of numbers that have been divided by the layer's divisors."""

    def __init__(self, kv: KVShape, layer: int, pages: int, page_size: int, device: torch.device) -> None:
        shape = (pages, page_size, kv.kv_heads, kv.head_dim)
        self._kv = kv
        self.divisors = kv.divisors(layer)
        self.keys = torch.zeros(shape, dtype=kv.kept, device=device)
        self.values = torch.zeros(shape, dtype=kv.kept, device=device)

    def write(self, qkv: Tensor, places: Tensor) -> None:
        """Keeps the keys and values of `qkv` [T, heads + 2 * kv_heads, head_dim], each token's at its place: int64 [T],
        page * page_size + offset."""
        kv = self._kv
        if kv.gpu is not None:
            kv.gpu.keep(qkv, self.keys, self.values, places, self.divisors)
            return
        news = qkv[:, kv.heads :].split(kv.kv_heads, 1)
        for cache, new, divisor in zip((self.keys, self.values), news, self.divisors, strict=True):
            _bits(cache).flatten(0, 1).index_copy_(0, places, _bits(narrowed(new, kv.kept, divisor)))

    def tokens(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [n, kv_heads, head_dim] at places int64 [n], in the model's type."""
        return self._picked(self.keys.flatten(0, 1), places), self._picked(self.values.flatten(0, 1), places)

    def pages(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [n, page_size, kv_heads, head_dim] of pages int64 [n], in the model's type."""
        return self._picked(self.keys, pages), self._picked(self.values, pages)

    def _picked(self, cache: Tensor, at: Tensor) -> Tensor:
        return _bits(cache).index_select(0, at).view(cache.dtype).to(self._kv.dtype)


def narrowed(x: Tensor, dtype: torch.dtype, divisor: float = 1.0) -> Tensor:
    """Numbers as a cache of this type holds them; those of 8 bits are divided first. An overflow in one request must
    not reach the next owner of its pages, and torch makes one of what is too large for 8 bits: in these and in float16
    that becomes the largest number, and what is no number 0."""
    if dtype.itemsize == 1:
        most = torch.finfo(dtype).max
        x = x if divisor == 1.0 else x.float() * (1 / divisor)
        return x.clamp(-most, most).nan_to_num(0.0).to(dtype)
    return x.nan_to_num() if dtype is torch.float16 else x


def _bits(x: Tensor) -> Tensor:
    """8-bit floats as bytes, which torch can copy in every way."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x
