"""The adapters that a worker has: by name for requests to come, by content for those that run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from tgi.kernel.errors import UserError
from tgi.kernel.presence import Adapter
from tgi.worker.lora.files import digest_of

MOST = 128  # adapters


class Fetched(NamedTuple):
    """An adapter that was read and is not on the shelf yet. `content` is None if the shelf has it already."""

    adapter: Adapter
    content: Any


class Shelf:
    """Adapters by name. `read` turns a directory into what computes, and raises UserError where it cannot.

    An adapter that is dropped, or replaced by another content under its name, lives on while a request holds it.
    """

    def __init__(self, read: Callable[[Path], Any]) -> None:
        self._read = read
        self._named: dict[str, tuple[Adapter, Any]] = {}
        self._contents: WeakValueDictionary[bytes, Any] = WeakValueDictionary()

    @property
    def listed(self) -> list[Adapter]:
        """What a request may ask for, in the order of loading."""
        return [adapter for adapter, _ in self._named.values()]

    def fetch(self, name: str, path: Path) -> Fetched:
        """Reads an adapter. Changes nothing, so another thread may call it. Raises UserError."""
        self._need_room(name)
        digest = digest_of(path)
        content = self._contents.get(digest)
        if content is None:
            try:
                content = self._read(path)
            except (MemoryError, RuntimeError) as error:
                if isinstance(error, MemoryError) or "memory" in str(error):
                    raise UserError(f"There is not enough memory for the adapter in {path}. Unload another.") from error
                raise
            if digest_of(path) != digest:
                raise UserError(
                    f"The adapter in {path} has changed while it was read. Load it again when it is complete."
                )
        return Fetched(Adapter(name, str(path), digest), content)

    def _need_room(self, name: str) -> None:
        if name not in self._named and len(self._named) >= MOST:
            raise UserError(f"{MOST} adapters are loaded, which is the most there can be. Unload one first.")

    def put(self, fetched: Fetched) -> bool:
        """Lists what was fetched, between two steps. False if it was there already. Raises UserError."""
        adapter, content = fetched
        known = self._named.get(adapter.name)
        if known is not None and known[0].digest == adapter.digest:
            return False
        self._need_room(adapter.name)  # others may have come since it was fetched
        content = self._contents.setdefault(adapter.digest, content)
        self._named[adapter.name] = adapter, content
        return True

    def drop(self, name: str) -> bool:
        """Takes a name off the list. False if it was not there."""
        return self._named.pop(name, None) is not None

    def find(self, digest: bytes) -> Any:
        """The content, as long as a name or a request has it; None otherwise."""
        return self._contents.get(digest)


class Unread:
    """Stands for the content of an adapter where nobody computes with it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory


def stock(shelf: Shelf, items: tuple[tuple[str, str], ...]) -> None:
    """Loads the adapters to start with, each given as its name and its directory. Raises UserError."""
    for name, path in items:
        shelf.put(shelf.fetch(name, Path(path)))


def missing(name: str) -> str:
    """What to say of a request whose adapter is not there."""
    return f"the adapter {name} is not loaded any more"
