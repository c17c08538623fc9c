"""Adapters in the scheduler's house: tokenizers ask for changes, and the worker makes them when a test lets it."""

import atexit
import shutil
import tempfile
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from tgi.kernel.messages import Adapt, Adapted
from tgi.kernel.presence import Adapter, Status
from tgi.worker.lora.shelf import Shelf, Unread

if TYPE_CHECKING:
    from tests.scheduler.house import House

STORE = Path(tempfile.mkdtemp(prefix="tgi-adapters-"))
atexit.register(shutil.rmtree, STORE, ignore_errors=True)
PATHS: dict[bytes, Path] = {}  # of each digest


def directory(content: str) -> Path:
    """That of an adapter with this content; the scripted worker reads no more of it."""
    path = STORE / content
    if not path.is_dir():
        path.mkdir()
        (path / "adapter_config.json").write_text(content)
        PATHS[Shelf(Unread).fetch("", path).adapter.digest] = path
    return path


class Changes:
    """What was asked for, in the order of asking, and what should come of it."""

    def __init__(self, house: "House") -> None:
        self._house = house
        self._rids = 0
        self.asked: dict[tuple[int, int], Adapt] = {}  # by place of the tokenizer and rid, until it is answered
        self.orders: deque[Adapt] = deque()  # on their way to the worker
        self.errors: list[str] = []
        self.stock: dict[str, Path] = {}  # what each worker loads by itself
        self.wanted: dict[str, str] = {}  # name and path of each that should be loaded once all is answered
        self.dropped: set[str] = set()  # paths that were once wanted and then not

    def start_with(self, name: str, content: str) -> None:
        """Each worker will load this one by itself."""
        self.stock[name] = directory(content)
        self.wanted[name] = str(self.stock[name])

    # --- what tokenizers do ---------------------------------------------------------------------------------------

    def ask(self, name: str, content: str | None, place: int = 0) -> None:
        """Wants an adapter of this content under this name, or none."""
        self._rids += 1
        self._ask(place, Adapt(self._rids, name, str(directory(content)) if content else ""))

    def _ask(self, place: int, adapt: Adapt) -> None:
        self.asked[place, adapt.rid] = adapt
        before = self.wanted.pop(adapt.name, adapt.path)
        if before != adapt.path:
            self.dropped.add(before)
        if adapt.path:
            self.wanted[adapt.name] = adapt.path
        self._house.handle(adapt, self._house.tokenizers[place].peer)

    def ask_again(self, place: int) -> None:
        """What this tokenizer has not heard of."""
        for (at, _), adapt in [*self.asked.items()]:
            if at == place:
                self._ask(place, adapt)

    def hears(self, place: int, answer: Adapted) -> None:
        self.asked.pop((place, answer.rid))
        self.errors.append(answer.error)

    def loaded(self, place: int = 0) -> list[Adapter]:
        """As this tokenizer knows them."""
        statuses = [status for status in self._house.tokenizers[place].statuses if status.limits is not None]
        return statuses[-1].adapters if statuses else []

    def told(self, place: int = 0) -> list[Adapter]:
        """All that this tokenizer ever knew. Some may be gone: a request may come late."""
        return [adapter for status in self._house.tokenizers[place].statuses for adapter in status.adapters]

    # --- what the worker does -------------------------------------------------------------------------------------

    def worker_up(self) -> None:
        self.orders.clear()
        shelf = self._house.engine.adapters
        for name, path in self.stock.items():
            shelf.put(shelf.fetch(name, path))

    def core_gone(self) -> None:
        """The next one knows what the worker has, and no more."""
        self.orders.clear()
        before = set(self.wanted.values())
        if self._house.worker is None:
            self.wanted = {name: str(path) for name, path in self.stock.items()}
        else:
            self.wanted = {adapter.name: adapter.path for adapter in self._house.engine.adapters.listed}
        self.dropped |= before - set(self.wanted.values())

    def status(self) -> Status:
        engine = self._house.engine
        return Status(True, True, "ready", 100, engine.limits, adapters=engine.adapters.listed)

    def work(self) -> bool:
        """The worker does the next thing that it was asked for. Whether there was one."""
        worker = self._house.worker
        if worker is None or not self.orders:
            return False
        order = self.orders.popleft()
        shelf = self._house.engine.adapters
        changed = shelf.put(shelf.fetch(order.name, Path(order.path))) if order.path else shelf.drop(order.name)
        if changed:
            self._house.handle(self.status(), worker)
        self._house.handle(Adapted(order.rid), worker)
        return True
