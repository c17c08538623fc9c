"""Memory in large pages, which the processor finds sooner: for weights, for keys and values, and for scratch."""

import mmap
import sys
from contextlib import suppress

import torch
from torch import Tensor

REGION = 64 << 20  # bytes that are asked for at once
LARGE = REGION // 4  # a piece of more has a region of its own
LARGE_PAGE = 2 << 20  # bytes that the system gives at once, if it can,
SMALL_PAGE = 4 << 10  # and if it cannot
LINE = 64  # every piece begins at a multiple of this


class Arena:
    """Hands out pieces of memory. A region is freed when the last of its pieces is, and the next one is begun."""

    def __init__(self) -> None:
        self._region: mmap.mmap | None = None
        self._used = 0

    def take(self, size: int) -> Tensor:
        """So many bytes, at a multiple of LINE. They may hold anything."""
        if size > LARGE:
            return torch.frombuffer(region(size), dtype=torch.uint8)
        if self._region is None or self._used + size > REGION:
            self._region, self._used = region(REGION), 0
        piece = torch.frombuffer(self._region, dtype=torch.uint8, count=size, offset=self._used)
        self._used += -(-size // LINE) * LINE
        return piece


class Scratch:
    """Memory that is used again and again, since new memory costs a fault for each page."""

    def __init__(self) -> None:
        self._region = region(LINE)

    def take(self, size: int) -> Tensor:
        """So many bytes, which may hold anything. They are handed out again when no tensor is left of them; while there
        is one, others get new memory."""
        mine = 2  # references: this object's, and that of the call that counts them
        if len(self._region) < size or sys.getrefcount(self._region) > mine:
            self._region = region(max(size, LINE))
        return torch.frombuffer(self._region, dtype=torch.uint8)[:size]


def region(size: int) -> mmap.mmap:
    """So many bytes, all 0, which take memory once they are written to."""
    # Private, since the system gives large pages for shared memory, Python's own choice, only where it is told to.
    found = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # of a system that has none
            found.madvise(mmap.MADV_HUGEPAGE)
    return found
