"""A rank's place in its group: its number, where the group meets, and what it shares with other ranks of its host.
Imports no torch."""

from pathlib import Path
from typing import NamedTuple


class HostRendezvous(NamedTuple):
    """Where torch.distributed meets if the ranks run on several hosts: a TCPStore of the first rank."""

    host: str
    port: int
    listener: int | None = None  # on the first rank: file descriptor of the listening socket


class RankPlace(NamedTuple):
    """One rank's place in its group."""

    rank: int
    ranks: int
    rendezvous: Path | HostRendezvous  # for torch.distributed; a file if all ranks run on this host
    memory: int | None  # file descriptor of memory that all ranks share; None if they share none
    local_rank: int  # among the ranks of this host
    local_ranks: int  # ranks on this host, which share its memory and cores
    memory_error: str = ""  # on the first rank: why the ranks share no memory
