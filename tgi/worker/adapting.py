"""Loads and unloads adapters while steps run: files are read in a thread of its own, the list changes between steps."""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tgi.kernel.errors import UserError
from tgi.kernel.link import Peer
from tgi.kernel.messages import Adapt, Adapted
from tgi.worker.lora.shelf import Fetched, Shelf

log = logging.getLogger(__name__)


class Answer(NamedTuple):
    """What to tell whom."""

    peer: Peer
    adapted: Adapted
    changed: bool  # the list of adapters is another one


class Adapting:
    """The requests for adapters of one shelf, done one after the other. `wake` is called when one may be answered."""

    def __init__(self, shelf: Shelf, wake: Callable[[], None]) -> None:
        self._shelf = shelf
        self._wake = wake
        self._waiting: deque[tuple[Peer, Adapt, Future[Fetched] | None]] = deque()
        self._reading = ThreadPoolExecutor(1, "adapters")

    def ask(self, peer: Peer, wanted: Adapt) -> None:
        """Begins with what is wanted."""
        fetched = None
        if wanted.path:
            fetched = self._reading.submit(self._shelf.fetch, wanted.name, Path(wanted.path))
            fetched.add_done_callback(lambda _: self._wake())
        self._waiting.append((peer, wanted, fetched))

    def forget(self) -> None:
        """Nobody waits for an answer any more, and whoever still wants a change asks again."""
        self._waiting.clear()

    def answers(self) -> Iterator[Answer]:
        """Does what is ready to be done, in the order of asking. Between two steps."""
        while self._waiting and ((fetched := self._waiting[0][2]) is None or fetched.done()):
            peer, wanted, _ = self._waiting.popleft()
            error, changed = "", False
            try:
                changed = self._shelf.drop(wanted.name) if fetched is None else self._shelf.put(fetched.result())
            except UserError as refusal:
                error = str(refusal)
            except Exception as fault:
                log.exception("adapter %s could not be loaded from %s", wanted.name, wanted.path)
                error = f"The adapter in {wanted.path} could not be loaded: {type(fault).__name__}: {fault}"
            if changed:
                log.info("adapter %s %s", wanted.name, f"loaded from {wanted.path}" if wanted.path else "unloaded")
            yield Answer(peer, Adapted(wanted.rid, error), changed)
