"""Reproducible noise: a hash of (seed, choice, position, token id), the same on every device.

There is no generator and no state. The noise of a request depends on these four numbers only, not on the other rows of
its batch, and a request that is resumed, preempted or verified later gets the same noise again. Two public integer
mixers are used: splitmix64 (Steele, Lea, Flood 2014) makes a 64-bit key of (seed, choice, position), and rounds of a
32-bit multiply-xorshift (factors of "lowbias32" and "triple32", Wellons 2018) extend it over the vocabulary.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Rows are hashed in blocks; on CPU a block of this size stays in a core's L2 cache.
CPU_BLOCK_BYTES = 512 << 10
CUDA_BLOCK_ROWS = 64

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
FACTORS = (0x7FEB352D, 0x846CA68B - (1 << 32), 0x31848BAB)  # as int32
LEAST = -(2.0**-33)


def noise_keys(
    seeds: NDArray[np.uint64], positions: NDArray[np.int64], choices: NDArray[np.uint64]
) -> NDArray[np.int32]:
    """The keys [n, 2] of n tokens: the request's seed, the token's position, and the index of the choice.

    Choice 0 has the noise of a request for one answer.
    """
    key = _mix64(seeds + GOLDEN)
    key = _mix64((key ^ positions.astype(np.uint64)) + GOLDEN)
    if np.count_nonzero(choices):
        key = np.where(choices == 0, key, _mix64((key ^ choices) + GOLDEN))
    return key.view(np.int32).reshape(-1, 2)


class Noise:
    """Noise over one vocabulary on one device. Holds scratch memory for one block of `rows` rows."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        on_cpu = device.type == "cpu"
        self.rows = max(1, CPU_BLOCK_BYTES // (4 * vocab_size)) if on_cpu else CUDA_BLOCK_ROWS
        shape = (self.rows, vocab_size)
        self._hash = torch.empty(shape, dtype=torch.int32, device=device)
        self._shifted = torch.empty(shape, dtype=torch.int32, device=device)
        self._float = torch.empty(shape, dtype=torch.float32, device=device)
        self._ids = torch.arange(vocab_size, dtype=torch.int32, device=device)
        scratch = torch.empty_like(self._ids)
        for factor, bits in zip(FACTORS, (16, 15, 16), strict=True):
            _fold(self._ids.add_(1).mul_(factor), bits, scratch)

    def exponentials(self, row_keys: Tensor) -> Tensor:
        """Exponential(1) variates, float32 [n, vocab], for int32 keys [n, 2], n <= self.rows.

        The result is scratch memory, overwritten by the next call. Small values, which decide the argmax, are exact to
        31 bits.
        """
        count = row_keys.shape[0]
        bits, shifted, result = self._hash[:count], self._shifted[:count], self._float[:count]
        torch.bitwise_xor(self._ids, row_keys[:, :1], out=bits)
        _fold(bits.mul_(FACTORS[0]), 16, shifted)
        _fold(bits.add_(row_keys[:, 1:]).mul_(FACTORS[1]), 15, shifted)
        # The magnitude is uniform in [0, 1), kept off both ends so that the logarithm is finite.
        result.copy_(bits.mul_(FACTORS[2])).abs_()
        torch.add(LEAST, result, alpha=-(2.0**-31) * (1 - 2.0**-24), out=result)
        return result.log1p_().neg_()


def _mix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _fold(x: Tensor, bits: int, shifted: Tensor) -> None:
    """x ^= x >>> bits on int32, in place; the mask makes torch's arithmetic shift a logical one."""
    torch.bitwise_right_shift(x, bits, out=shifted)
    x.bitwise_xor_(shifted.bitwise_and_((1 << (32 - bits)) - 1))
