"""Memory in huge pages (where the system gives them), for weights, the KV cache and scratch buffers: it needs fewer
address translations."""

import mmap
import sys
from contextlib import suppress

import torch
from torch import Tensor

REGION_BYTES = 64 << 20  # bytes mapped at once
OWN_REGION_BYTES = REGION_BYTES // 4  # a larger allocation has a region of its own
LARGE_PAGE, SMALL_PAGE = 2 << 20, 4 << 10  # bytes of a huge page, and of an ordinary one
ALIGNMENT = 64  # bytes


class Arena:
    """Allocates pieces of mapped regions. A region is unmapped when its last piece is freed."""

    def __init__(self) -> None:
        self._region: mmap.mmap | None = None
        self._used = 0

    def allocate(self, size: int) -> Tensor:
        """Uninitialized memory, uint8 [size], aligned to ALIGNMENT bytes."""
        if size > OWN_REGION_BYTES:
            return torch.frombuffer(map_region(size), dtype=torch.uint8)
        if self._region is None or self._used + size > REGION_BYTES:
            self._region, self._used = map_region(REGION_BYTES), 0
        piece = torch.frombuffer(self._region, dtype=torch.uint8, count=size, offset=self._used)
        self._used += -(-size // ALIGNMENT) * ALIGNMENT
        return piece


class ScratchBuffer:
    """A buffer that is reused from call to call, since new memory costs a page fault for each page."""

    def __init__(self) -> None:
        self._region = map_region(ALIGNMENT)

    def allocate(self, size: int) -> Tensor:
        """Uninitialized memory, uint8 [size]. It is handed out again once no tensor refers to it; while one does,
        a new region is mapped."""
        own_references = 2  # of this object and of the call that counts
        if len(self._region) < size or sys.getrefcount(self._region) > own_references:
            self._region = map_region(max(size, ALIGNMENT))
        return torch.frombuffer(self._region, dtype=torch.uint8)[:size]


def map_region(size: int, shared: bool = False) -> mmap.mmap:
    """Maps `size` bytes of zeros. Physical memory is used from the first write to a page. `shared`: with the processes
    that are forked from this one. Such memory has huge pages only where the system is configured so."""
    sharing = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE
    found = mmap.mmap(-1, size, flags=sharing | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without transparent huge pages
            found.madvise(mmap.MADV_HUGEPAGE)
    return found
