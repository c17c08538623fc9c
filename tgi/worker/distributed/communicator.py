"""Communicators: how the ranks of a tensor parallel group combine their results. All ranks call the same functions in
the same order.

If another rank dies, a call may never return: who starts the ranks ends them together.
"""

from collections.abc import Sequence
from datetime import timedelta
from functools import reduce
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from tgi.worker.distributed.rank_place import HostRendezvous
from tgi.worker.distributed.symmetric_memory import SymmetricMemory, connect

# A rank that loads or compiles longer than the others lets them wait.
PATIENCE = timedelta(hours=1)


class Communicator(Protocol):
    """The collective operations of one rank."""

    rank: int
    ranks: int

    def all_reduce(self, x: Tensor) -> None:
        """Replaces a contiguous x by its sum over all ranks. On CPU the sum is computed in float32, in the order of the
        ranks, and rounded once, so all ranks get the same bits every time."""

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """The columns of all ranks [rows, sum(widths)], in the order of the ranks, for x [rows, widths[rank]]."""

    def minimum(self, *numbers: int) -> list[int]:
        """Of each of these numbers the minimum over all ranks."""


class TorchCommunicator(Communicator):
    """Implements Communicator by torch.distributed: gloo on CPU; on GPUs NCCL, and symmetric memory for sums of few
    bytes where that works."""

    def __init__(self, rank: int, ranks: int, rendezvous: Path | HostRendezvous, device: torch.device) -> None:
        """`rendezvous`: a file that only this group uses and that does not exist before, or a place on the network."""
        self.rank, self.ranks = rank, ranks
        backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
        self._small: SymmetricMemory | None = None
        if isinstance(rendezvous, Path):
            dist.init_process_group(backend, f"file://{rendezvous}", PATIENCE, ranks, rank)
            if device.type == "cuda" and torch.version.hip is None:  # all ranks are on this host
                self._small = connect(device)
            return
        host, port, listener = rendezvous
        store = dist.TCPStore(host, port, ranks, rank == 0, PATIENCE, False, master_listen_fd=listener)
        dist.init_process_group(backend, None, PATIENCE, ranks, rank, store)

    @override
    def all_reduce(self, x: Tensor) -> None:
        if x.device.type != "cpu":
            reduce_sum = dist.all_reduce if self._small is None or not self._small.takes(x) else self._small.all_reduce
            reduce_sum(x)
            return
        parts = [torch.empty_like(x) for _ in range(self.ranks)]
        dist.all_gather(parts, x)
        x.copy_(reduce(torch.add, (part.float() for part in parts)))

    @override
    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        widest = max(widths)  # all parts must have one shape
        padded = x.new_zeros(x.shape[0], widest)
        padded[:, : x.shape[1]] = x
        parts = [torch.empty_like(padded) for _ in widths]
        dist.all_gather(parts, padded)
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], 1)

    @override
    def minimum(self, *numbers: int) -> list[int]:
        found = torch.tensor(numbers)
        dist.all_reduce(found, dist.ReduceOp.MIN)
        return [int(number) for number in found]
