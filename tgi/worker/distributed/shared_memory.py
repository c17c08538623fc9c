"""SharedMemoryCommunicator: ranks on one host that compute on our CPU kernels combine their results in memory that they
share, also within a program, without returning to Python. See cpu_kernels/rank_group.h.
"""

import mmap
import os
import weakref
from collections.abc import Sequence
from ctypes import c_int, c_int64, c_void_p

import torch
from torch import Tensor
from typing_extensions import override

from tgi.worker.cpu_kernels.arena import ScratchBuffer
from tgi.worker.cpu_kernels.kernels import CpuKernels
from tgi.worker.distributed.communicator import Communicator

# Polls of another rank's announcement before this one sleeps: with a core for each rank some 100 microseconds, longer
# than ranks differ within a layer.
SPIN_COUNT, SPIN_COUNT_ON_SHARED_CORE = 2000, 50


class SharedMemoryCommunicator(Communicator):
    """Implements Communicator. `others` serves what is not of the kernels' types."""

    def __init__(self, kernels: CpuKernels, memory: int, others: Communicator, own_core: bool = True) -> None:
        """`memory`: a file descriptor that all ranks of the group have inherited. `own_core`: this rank's threads share
        no core with another rank."""
        library = kernels.library
        library.tgi_rank_group_bytes.argtypes, library.tgi_rank_group_bytes.restype = (c_int64,), c_int64
        library.tgi_rank_group.argtypes = (c_void_p, c_int64, c_int64, c_int)
        library.tgi_rank_group.restype = c_void_p
        library.tgi_rank_group_free.argtypes, library.tgi_rank_group_free.restype = (c_void_p,), None
        library.tgi_all_reduce.argtypes = (c_void_p, c_void_p, c_void_p, c_int64)
        library.tgi_all_gather.argtypes = (c_void_p, c_void_p, c_int64, c_void_p, c_void_p)
        library.tgi_all_reduce.restype = library.tgi_all_gather.restype = None
        self.rank, self.ranks = others.rank, others.ranks
        self._kernels, self._others, self._joined = kernels, others, ScratchBuffer()
        size = library.tgi_rank_group_bytes(self.ranks)
        if os.fstat(memory).st_size < size:
            os.ftruncate(memory, size)
        self._memory = torch.frombuffer(mmap.mmap(memory, size), dtype=torch.uint8)
        spins = SPIN_COUNT if own_core else SPIN_COUNT_ON_SHARED_CORE
        self.handle: int = library.tgi_rank_group(self._memory.data_ptr(), self.rank, self.ranks, spins)
        weakref.finalize(self, library.tgi_rank_group_free, self.handle)

    @override
    def all_reduce(self, x: Tensor) -> None:
        if x.dtype is not self._kernels.dtype:
            self._others.all_reduce(x)
            return
        assert x.is_contiguous()
        self._kernels.library.tgi_all_reduce(self.handle, self._kernels.thread_pool, x.data_ptr(), x.numel())

    @override
    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """The memory of the result is reused by the next call once no tensor refers to it."""
        x, size = x.contiguous(), x.dtype.itemsize
        joined = self._joined.allocate(len(x) * sum(widths) * size).view(x.dtype).view(len(x), -1)
        sizes = (c_int64 * self.ranks)(*(width * size for width in widths))
        self._kernels.library.tgi_all_gather(self.handle, x.data_ptr(), len(x), sizes, joined.data_ptr())
        return joined

    @override
    def minimum(self, *numbers: int) -> list[int]:
        return self._others.minimum(*numbers)
