"""The memory that the ranks of one host share. It has no name in any file system and is gone with its last process.
Imports no torch.

A rank that the first one has started inherits it. Any other opens it in /proc, which is possible if both run on one
host, for the same user and in one PID namespace: ranks of one host may be in different containers.
"""

import os
import tempfile
from errno import ENOENT
from pathlib import Path

from tgi.microkernel.messages.protocol import OfferMemory

NAME = "tgi-ranks"  # which Linux shows in /proc


def create_memory(name: str = NAME) -> int:
    """A file descriptor of new memory, which the further ranks that this process starts can inherit."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, 0)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def create_offer() -> tuple[int, OfferMemory]:
    """New memory, and how ranks that this process has not started find it."""
    token = os.urandom(16).hex()
    memory = create_memory(f"{NAME}-{token}")
    return memory, OfferMemory(os.getpid(), memory, token)


def open_memory(offer: OfferMemory) -> int:
    """Opens the memory of the first rank. Raises OSError if this process cannot reach it."""
    path = Path(f"/proc/{offer.pid}/fd/{offer.file}")
    # In another PID namespace this may be a file of any process, which is not to be opened.
    if str(path.readlink()) != f"/memfd:{NAME}-{offer.token} (deleted)":
        raise FileNotFoundError(ENOENT, "another process has its number here")
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)
