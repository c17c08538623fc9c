"""LoRA adapter updates in the simulation: tokenizers request them, and the worker applies one when a test says so."""

import atexit
import shutil
import tempfile
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from tgi.microkernel.messages.protocol import AdapterUpdated, LoadedAdapter, Status, UpdateAdapter
from tgi.worker.lora.registry import AdapterRegistry, FakeAdapter

if TYPE_CHECKING:
    from tests.scheduler.simulation import Simulation

STORE = Path(tempfile.mkdtemp(prefix="tgi-adapters-"))
atexit.register(shutil.rmtree, STORE, ignore_errors=True)
PATHS: dict[bytes, Path] = {}  # by digest


def directory(content: str) -> Path:
    """The directory of an adapter with this content, of which the fake worker reads nothing else."""
    path = STORE / content
    if not path.is_dir():
        path.mkdir()
        (path / "adapter_config.json").write_text(content)
        PATHS[AdapterRegistry(FakeAdapter).fetch_adapter("", path).adapter.digest] = path
    return path


class AdapterUpdates:
    """The requested updates, in order, and their expected outcome."""

    def __init__(self, sim: "Simulation") -> None:
        self._sim = sim
        self._rids = 0
        self.pending: dict[tuple[int, int], UpdateAdapter] = {}  # unanswered, by index of the tokenizer and rid
        self.begun: deque[UpdateAdapter] = deque()  # those that the worker carries out
        self.errors: list[str] = []  # of the answers
        self.preloaded: dict[str, Path] = {}  # what each worker loads at start
        self.wanted: dict[str, str] = {}  # name and path of each that should be loaded once all is answered
        self.latest: dict[str, int] = {}  # by name: the stamp of the latest change that this scheduler has been sent
        self.dropped: set[str] = set()  # paths that were once wanted and then not

    def preload(self, name: str, content: str) -> None:
        """Each worker will load this adapter at start."""
        self.preloaded[name] = directory(content)
        self.wanted[name] = str(self.preloaded[name])

    # --- tokenizers ---------------------------------------------------------------------------------------------------

    def request_update(self, name: str, content: str | None, tokenizer: int = 0) -> None:
        """Requests an adapter of this content under this name, or its removal."""
        self._rids += 1
        path = str(directory(content)) if content else ""
        self._send(tokenizer, UpdateAdapter(self._rids, name, path, stamp=self._rids))

    def _send(self, tokenizer: int, update: UpdateAdapter) -> None:
        self.pending[tokenizer, update.rid] = update
        if update.stamp >= self.latest.get(update.name, 0):  # else a later change holds
            self._expect(update)
        self._sim.handle(update, self._sim.tokenizers[tokenizer].peer)

    def _expect(self, update: UpdateAdapter) -> None:
        self.latest[update.name] = update.stamp
        before = self.wanted.pop(update.name, update.path)
        if before != update.path:
            self.dropped.add(before)
        if update.path:
            self.wanted[update.name] = update.path

    def request_again(self, tokenizer: int) -> None:
        """Sends this tokenizer's unanswered updates again."""
        for (index, _), update in [*self.pending.items()]:
            if index == tokenizer:
                self._send(tokenizer, update)

    def receive_answer(self, tokenizer: int, answer: AdapterUpdated) -> None:
        self.pending.pop((tokenizer, answer.rid))
        self.errors.append(answer.error)

    def loaded(self, tokenizer: int = 0) -> list[LoadedAdapter]:
        """As last reported to this tokenizer."""
        statuses = [status for status in self._sim.tokenizers[tokenizer].statuses if status.limits is not None]
        return statuses[-1].adapters if statuses else []

    def ever_reported(self, tokenizer: int = 0) -> list[LoadedAdapter]:
        """All adapters that were ever reported to this tokenizer. A late request may name one that is gone."""
        return [adapter for status in self._sim.tokenizers[tokenizer].statuses for adapter in status.adapters]

    @property
    def queued_updates(self) -> deque[UpdateAdapter]:
        """The updates that the worker may apply: it has computed all steps that were sent before them."""
        self._sim.begin_others()
        return self.begun

    # --- worker -------------------------------------------------------------------------------------------------------

    def worker_started(self) -> None:
        self.begun.clear()
        registry = self._sim.engine.adapters
        for name, path in self.preloaded.items():
            registry.add_adapter(registry.fetch_adapter(name, path))

    def worker_status(self) -> Status:
        engine = self._sim.engine
        return Status(
            ready=True,
            healthy=True,
            stage="ready",
            percent=100,
            limits=engine.limits,
            adapters=engine.adapters.loaded_adapters,
        )

    def fail_next_update(self) -> None:
        """The worker cannot carry out the next update."""
        assert self._sim.worker is not None
        self._sim.handle(AdapterUpdated(self.queued_updates.popleft().rid, "no such directory"), self._sim.worker)

    def apply_next_update(self) -> bool:
        """The worker applies the next update. Returns whether there was one."""
        worker = self._sim.worker
        if worker is None or not self.queued_updates:
            return False
        update = self.queued_updates.popleft()
        registry = self._sim.engine.adapters
        changed = (
            registry.add_adapter(registry.fetch_adapter(update.name, Path(update.path)))
            if update.path
            else registry.remove_adapter(update.name)
        )
        if changed:
            self._sim.handle(self.worker_status(), worker)
        self._sim.handle(AdapterUpdated(update.rid), worker)
        return True
