"""The ranks of a worker on one host, as its first rank sees them: it starts the others, repeats to them what the
scheduler asks, and ends with them. To the scheduler and the supervisor they are one worker.

All ranks get the same steps in the same order, so they have the same state, and sample the same tokens from logits that
have the same bits. Only the first one answers the scheduler.
"""

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from typing_extensions import override

from tgi.microkernel.errors import FATAL
from tgi.microkernel.host.rundir import process_name
from tgi.microkernel.links.link import Link
from tgi.microkernel.messages.protocol import DeploymentLimits, HeldPages, ResetSlots, Step, StepResult, UpdateAdapter
from tgi.microkernel.processes.child import StartedChild, start_child, start_interpreter
from tgi.microkernel.processes.fork_server import ForkedProcess, count_threads, fork_role
from tgi.microkernel.processes.process import Heartbeat, Process, fatal_error_path
from tgi.microkernel.recovery.exit_causes import OWN_SIGNALS
from tgi.worker.distributed.group_memory import create_memory
from tgi.worker.distributed.rank_place import RankPlace
from tgi.worker.engine.interface import BadStep, Engine, Poisoned
from tgi.worker.engine.rank import RANK_MEMORY, RANK_RENDEZVOUS, ranks_socket
from tgi.worker.lora.registry import AdapterRegistry

if TYPE_CHECKING:
    import subprocess

log = logging.getLogger(__name__)

# Further ranks are told to end, and killed after this long.
GRACE_SECONDS = 5.0


class RankGroup:
    """The further ranks of a worker. If one ends, this process ends in the same way, and the kernel ends the others: a
    rank without the others can neither go on nor return from a collective operation."""

    def __init__(self, process: Process, ranks: int) -> None:
        """To be called before this process has threads."""
        self._process = process
        self._ending = False
        memory = create_memory()
        rendezvous = process.run_dir / f"{process.name}.rendezvous"
        rendezvous.unlink(missing_ok=True)  # of an earlier group, which is gone
        self.place = RankPlace(0, ranks, rendezvous, memory, 0, ranks)
        environment, inherited = {RANK_RENDEZVOUS: str(rendezvous)}, {RANK_MEMORY: memory}
        arguments = process.role, str(process.replica)
        names = [process_name(process.role, process.replica, rank) for rank in range(1, ranks)]
        self._heartbeats = [Heartbeat(process.run_dir / f"{name}.beat") for name in names]
        for heartbeat in self._heartbeats:
            heartbeat.begin(time.monotonic() + process.settings.start_timeout)
        # The supervisor reaps the process group of a worker that was killed, so the ranks belong to it.
        start: Callable[..., ForkedProcess | subprocess.Popen[bytes]] = partial(start_interpreter, process_group=None)
        if "torch" in sys.modules and count_threads() == 1:  # a fork server has imported it
            start = fork_role
        self._children = [
            start_child(process.settings, (*arguments, str(rank)), environment, inherited, start)
            for rank in range(1, ranks)
        ]
        self.link = Link.bind(process.link_address(ranks_socket(process.replica)), process.hello())  # starts threads
        self._watchers = [
            threading.Thread(target=self._await_end, args=(rank, child), daemon=True)
            for rank, child in enumerate(self._children, start=1)
        ]
        for watcher in self._watchers:
            watcher.start()

    def send(self, message: tuple[Any, ...]) -> None:
        for peer in self.link.peers:
            self.link.send(peer, message)
        self.link.flush()

    def wait_for_ranks(self) -> None:
        """Waits until all further ranks are connected, each of which has then loaded its part of the model. Meanwhile
        the deadline of this process is the earliest of theirs, which the supervisor does not know."""
        while len(self.link.peers) < len(self._children):
            deadline = min(heartbeat.read_deadline() for heartbeat in self._heartbeats)
            self._process.extend_deadline(deadline - time.monotonic())
            for _ in self.link.receive():
                pass
            self.link.socket.poll(100)

    def close(self) -> None:
        self._ending = True
        for child in self._children:
            child.process.send_signal(signal.SIGTERM)
        for child, watcher in zip(self._children, self._watchers, strict=True):
            watcher.join(GRACE_SECONDS)
            if watcher.is_alive():
                child.process.send_signal(signal.SIGKILL)
        self.link.close()

    def _await_end(self, rank: int, child: "StartedChild[ForkedProcess | subprocess.Popen[bytes]]") -> None:
        """Ends this process as the child has ended, so that the supervisor sees the cause. Runs in a thread of its own,
        since the main thread may wait for the rank that has ended."""
        code = child.process.wait()
        if self._ending:
            return
        name = process_name(self._process.role, self._process.replica, rank)
        log.error("%s ended with code %d; so does this process", name, code)
        if code == FATAL:
            own = fatal_error_path(self._process.run_dir, self._process.name)
            with contextlib.suppress(OSError):  # the log has the error, too
                fatal_error_path(self._process.run_dir, name).replace(own)
        if code >= 0:
            os._exit(code or 1)
        os.kill(os.getpid(), signal.SIGABRT if -code in OWN_SIGNALS else -code)


class FurtherRanks(Protocol):
    """The further ranks of a worker, on this host (RankGroup) or on several (HostGroup)."""

    def send(self, message: tuple[Any, ...]) -> None:
        """Sends a message to all further ranks."""

    def wait_for_ranks(self) -> None:
        """Waits until each further rank has loaded its part of the model."""

    def close(self) -> None:
        """Ends the further ranks."""


class LeadingEngine(Engine):
    """Implements Engine for the first rank: forwards everything that changes the state of an engine to the others,
    before its own engine does it."""

    def __init__(self, engine: Engine, group: FurtherRanks) -> None:
        self._engine = engine
        self._group = group
        self.limits: DeploymentLimits = engine.limits
        self.adapters: AdapterRegistry = engine.adapters
        self.adapters.on_change = self._forward_adapter

    @override
    def reset(self) -> None:
        self._group.send(ResetSlots())
        self._engine.reset()

    @override
    def held_pages(self) -> list[HeldPages]:
        """The other ranks have been told the same steps, so they hold the same pages."""
        return self._engine.held_pages()

    @override
    def prefault_memory(self) -> bool:
        return self._engine.prefault_memory()

    @override
    def release_memory(self) -> None:
        self._engine.release_memory()

    @override
    def launch(self, step: Step) -> Any:
        """After any error but a BadStep, which all ranks find, they may differ, so the worker ends."""
        self._group.send(step)
        try:
            return self._engine.launch(step)
        except BadStep:
            raise
        except Exception as error:
            raise Poisoned(f"{type(error).__name__} in step {step.number}: {error}") from error

    @override
    def is_done(self, pending: Any) -> bool:
        return self._engine.is_done(pending)

    @override
    def collect(self, pending: Any) -> StepResult:
        try:
            return self._engine.collect(pending)
        except Exception as error:
            raise Poisoned(f"{type(error).__name__} in a step: {error}") from error

    def _forward_adapter(self, name: str, path: str) -> None:
        self._group.send(UpdateAdapter(0, name, path))
