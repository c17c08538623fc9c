"""The heap of the C library: how freed memory returns to the system. Only glibc is known; others are left alone."""

import ctypes

M_MMAP_THRESHOLD = -3  # malloc.h
LARGE_BLOCK_BYTES = 128 << 10


def release_freed_memory() -> None:
    """Returns freed memory to the system that the C library keeps. Takes about 0.1 ms for each MB that is returned."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(ctypes.c_size_t(0))


def map_large_blocks() -> None:
    """From now on a block of LARGE_BLOCK_BYTES or more is a mapping of its own wherever no free part of the heap has
    room for it. This is the default of glibc until it has freed such a block; after that it raises the limit."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # else not glibc, and the number may mean something else
        libc.mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)
