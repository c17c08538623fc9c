"""Files of the run directory that processes map into memory to share it. Their disk space is allocated first: where the
disk is full, a write to a hole of a mapped file ends the process with SIGBUS."""

import mmap
import os
from pathlib import Path


def map_file(path: Path, size: int) -> mmap.mmap:
    """Maps the first `size` bytes of a file, which is created or extended with zeros if it is shorter. Never shortens a
    file, which would end processes that have mapped it. Raises OSError, also if the disk is full."""
    with path.open("a+b") as file:
        allocate(file.fileno(), size)
        return mmap.mmap(file.fileno(), size)


def allocate(file: int, size: int) -> None:
    """Gives a file disk space for its first `size` bytes. Raises OSError if the disk is full."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
    elif os.fstat(file).st_size < size:  # macOS: the file has a hole
        os.ftruncate(file, size)
