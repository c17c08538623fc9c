"""Noise that can be drawn again: a hash of (seed, choice, position, token id), the same on every device.

No generator and no state: what a request draws depends on nothing but these four numbers, so not on its batch mates,
and a request that is resumed, preempted or verified later draws what it would have drawn. Built from two public
integer mixers: splitmix64's (Steele, Lea, Flood 2014) makes a 64-bit key of (seed, choice, position), and a 32-bit
xorshift-multiply mixer ("lowbias32", Wellons 2018) stretches it over the vocabulary.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Hashes of this many bytes at once stay in a core's second-level cache.
CPU_BLOCK_BYTES = 512 << 10
CUDA_BLOCK_ROWS = 64

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
M32 = (0x7FEB352D, 0x846CA68B - (1 << 32))  # as int32


def keys(seeds: NDArray[np.uint64], positions: NDArray[np.int64], choice: int = 0) -> NDArray[np.int32]:
    """The keys [n, 2] of n draws: request seed, position of the drawn token, and which draw at it (speculation)."""
    key = _mix64(seeds + GOLDEN)
    key = _mix64((key ^ positions.astype(np.uint64)) + GOLDEN)
    if choice:
        key = _mix64((key ^ np.uint64(choice)) + GOLDEN)
    return key.view(np.int32).reshape(-1, 2)


class Noise:
    """Draws over one vocabulary on one device. Keeps scratch memory for one block of rows."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        on_cpu = device.type == "cpu"
        self.rows = max(1, CPU_BLOCK_BYTES // (4 * vocab_size)) if on_cpu else CUDA_BLOCK_ROWS
        shape = (self.rows, vocab_size)
        self._hash = torch.empty(shape, dtype=torch.int32, device=device)
        self._shifted = torch.empty(shape, dtype=torch.int32, device=device)
        self._float = torch.empty(shape, dtype=torch.float32, device=device)
        ids = torch.arange(vocab_size, dtype=torch.int32, device=device)
        self._ids = _mix32(ids, torch.empty_like(ids)).clone()

    def exponentials(self, row_keys: Tensor) -> Tensor:
        """Exponential(1) numbers, float32 [n, vocab], for int32 keys [n, 2], n <= self.rows.

        The result is scratch: use it before the next call. Small values, which decide a race, are exact to 31 bits.
        """
        count = row_keys.shape[0]
        bits, shifted, result = self._hash[:count], self._shifted[:count], self._float[:count]
        torch.bitwise_xor(self._ids, row_keys[:, :1], out=bits)
        _mix32(bits, shifted)
        _mix32(bits.add_(row_keys[:, 1:]), shifted)
        # |signed 31-bit fraction| is uniform in [0, 1); the ends are kept out so that the logarithm stays finite.
        result.copy_(bits).mul_(2.0**-31).abs_().clamp_(2.0**-33, 1 - 2.0**-24)
        return result.neg_().log1p_().neg_()


def _mix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _mix32(x: Tensor, shifted: Tensor) -> Tensor:
    """Mixes int32 `x` in place. The masks make torch's arithmetic shifts logical ones."""
    for bits, factor in ((16, M32[0]), (15, M32[1]), (16, 0)):
        torch.bitwise_right_shift(x, bits, out=shifted)
        shifted.bitwise_and_((1 << (32 - bits)) - 1)
        x.bitwise_xor_(shifted)
        if factor:
            x.mul_(factor)
    return x
