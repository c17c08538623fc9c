"""A group of rank processes without a server, for tests and measurements: calls a function on all ranks at once."""

import importlib
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tgi.worker.cpu_kernels.kernels import CpuKernels
from tgi.worker.distributed.communicator import Communicator, TorchCommunicator
from tgi.worker.distributed.shared_memory import SharedMemoryCommunicator

DEADLINE = 300.0  # seconds until a rank counts as hung


class RankCall(NamedTuple):
    """What a function called on a rank gets first."""

    gloo: TorchCommunicator
    memory: int  # file descriptor of the shared memory

    def communicator(self, kernels: CpuKernels | None, own_core: bool = False) -> Communicator:
        """As a worker chooses it. Each shared memory serves one group of communicators."""
        if kernels is None:
            return self.gloo
        torch.distributed.barrier()
        os.ftruncate(self.memory, 0)  # zeros for this group
        torch.distributed.barrier()
        return SharedMemoryCommunicator(kernels, self.memory, self.gloo, own_core)


class Ranks:
    """The ranks of a group, as seen by the process that has started them."""

    def __init__(self, connections: list[Connection]) -> None:
        self._connections = connections

    def call(self, function: str, *arguments: Any) -> list[Any]:
        """The results of `module.function(RankCall, *arguments)` of all ranks."""
        for connection in self._connections:
            connection.send((function, arguments))
        results = []
        for rank, connection in enumerate(self._connections):
            assert connection.poll(DEADLINE), f"rank {rank} does not answer"
            error, result = connection.recv()
            assert not error, f"rank {rank}: {error}"
            results.append(result)
        return results

    def single(self) -> list["Ranks"]:
        """Each rank alone, while the others wait."""
        return [Ranks([connection]) for connection in self._connections]

    @property
    def first(self) -> "Ranks":
        """The first rank alone, while the others wait."""
        return Ranks(self._connections[:1])


@contextmanager
def rank_group(ranks: int, *modules: str) -> Iterator[Ranks]:
    """Starts a group of rank processes. They are forks of one process that imports torch once for all groups, and
    `modules`: those of the functions that are called."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *modules])
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryFile() as memory:
        pipes = [context.Pipe() for _ in range(ranks)]
        processes = [
            context.Process(
                target=_run_rank,
                args=(rank, ranks, Path(directory) / "rendezvous", memory.fileno(), os.getpid(), far),
                daemon=True,
            )
            for rank, (_, far) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        try:
            yield Ranks([near for near, _ in pipes])
        finally:
            for process in processes:
                process.kill()
                process.join()


def _run_rank(rank: int, ranks: int, rendezvous: Path, memory: int, parent: int, connection: Connection) -> None:
    torch.set_num_threads(1)
    shared = os.open(f"/proc/{parent}/fd/{memory}", os.O_RDWR)
    group = RankCall(TorchCommunicator(rank, ranks, rendezvous, torch.device("cpu")), shared)
    while True:
        name, arguments = connection.recv()
        module, _, function = name.rpartition(".")
        try:
            found = getattr(importlib.import_module(module), function)(group, *arguments)
            connection.send(("", found))
        except Exception:
            connection.send((traceback.format_exc(), None))
