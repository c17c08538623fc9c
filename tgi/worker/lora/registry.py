"""The adapter registry: loaded adapters by name (for new requests) and by content (for running requests).

Adapters are loaded and unloaded while steps run: a thread of its own reads the files, and the registry changes between
two steps.
"""

import hashlib
import logging
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from tgi.microkernel.errors import UserError
from tgi.microkernel.messages.protocol import AdapterUpdated, LoadedAdapter, UpdateAdapter
from tgi.worker.lora.config import CONFIG_FILE, weights_path

log = logging.getLogger(__name__)

MAX_ADAPTERS = 128
DIGEST_BYTES = 16
BLOCK_BYTES = 1 << 20
# Limits of a config file and of a safetensors header: some thousand modules each. Reading much larger ones would delay
# the steps.
MAX_CONFIG_BYTES, MAX_HEADER_BYTES = 1 << 20, 4 << 20


class FetchedAdapter(NamedTuple):
    """An adapter that was read from its files and is not in the registry yet."""

    adapter: LoadedAdapter
    content: Any


class AdapterRegistry:
    """The adapters of an engine. `read` turns a directory into the content that a model computes with; it raises
    UserError where it cannot.

    Content that is removed, or replaced by another under its name, stays alive while a request refers to it.
    """

    def __init__(self, read: Callable[[Path], Any]) -> None:
        self._read = read
        self._named: dict[str, tuple[LoadedAdapter, Any]] = {}
        self._contents: WeakValueDictionary[bytes, Any] = WeakValueDictionary()  # by digest
        # Called with name and path of each adapter that is added, and with name and "" of each that is removed.
        self.on_change: Callable[[str, str], None] = lambda name, path: None
        # Called with each adapter that was read, before it is added, in the thread that has read it. Raises UserError
        # if another rank cannot read it.
        self.on_fetch: Callable[[LoadedAdapter], None] = lambda adapter: None

    @property
    def loaded_adapters(self) -> list[LoadedAdapter]:
        """The adapters that a new request may name, in the order of loading."""
        return [adapter for adapter, _ in self._named.values()]

    def fetch_adapter(self, name: str, path: Path) -> FetchedAdapter:
        """Reads an adapter without changing the registry, so another thread may call it. Raises UserError."""
        self._require_free_name(name)
        digest = adapter_digest(path)
        content = self._contents.get(digest)
        if content is None:
            try:
                content = self._read(path)
            except (MemoryError, RuntimeError) as error:
                if isinstance(error, MemoryError) or "memory" in str(error):
                    raise UserError(f"There is not enough memory for the adapter in {path}. Unload another.") from error
                raise
            if adapter_digest(path) != digest:
                raise UserError(
                    f"The adapter in {path} has changed while it was read. Load it again when it is complete."
                )
        fetched = FetchedAdapter(LoadedAdapter(name, str(path), digest), content)
        self.on_fetch(fetched.adapter)
        return fetched

    def add_adapter(self, fetched: FetchedAdapter) -> bool:
        """Registers a fetched adapter, between two steps. Returns False if its name has this content, from this
        directory, already. Raises UserError if the registry is full."""
        adapter, content = fetched
        known = self._named.get(adapter.name)
        if known is not None and known[0] == adapter:
            return False
        self._require_free_name(adapter.name)  # others may have been added since it was fetched
        content = self._contents.setdefault(adapter.digest, content)
        self._named[adapter.name] = adapter, content
        self.on_change(adapter.name, adapter.path)
        return True

    def remove_adapter(self, name: str) -> bool:
        """Removes a name. Returns False if it is not registered."""
        removed = self._named.pop(name, None) is not None
        if removed:
            self.on_change(name, "")
        return removed

    def find_content(self, digest: bytes) -> Any:
        """The content with this digest, while a name or a request refers to it; None otherwise."""
        return self._contents.get(digest)

    def _require_free_name(self, name: str) -> None:
        if name not in self._named and len(self._named) >= MAX_ADAPTERS:
            raise UserError(f"{MAX_ADAPTERS} adapters are loaded, which is the most there can be. Unload one first.")


class AdapterUpdates:
    """The updates of one registry, applied one after another. Calls `wake` when an update is ready to apply."""

    def __init__(self, registry: AdapterRegistry, wake: Callable[[], None]) -> None:
        self._registry = registry
        self._wake = wake
        self._queued: deque[tuple[UpdateAdapter, Future[FetchedAdapter] | None]] = deque()
        self._reader_thread = ThreadPoolExecutor(1, "adapters")

    def submit_update(self, update: UpdateAdapter) -> None:
        """Queues an update and starts to read its files, if it has a path."""
        fetched = None
        if update.path:
            fetched = self._reader_thread.submit(self._registry.fetch_adapter, update.name, Path(update.path))
            fetched.add_done_callback(lambda _: self._wake())
        self._queued.append((update, fetched))

    def discard_all(self) -> None:
        """Drops all queued updates: their scheduler is gone, and the next one sends those still wanted again."""
        self._queued.clear()

    def apply_ready(self) -> Iterator[tuple[AdapterUpdated, bool]]:
        """Applies the updates that are ready, in the order of submission, between two steps. Yields each answer,
        and whether the registry has changed."""
        while self._queued and ((fetched := self._queued[0][1]) is None or fetched.done()):
            update, _ = self._queued.popleft()
            error, changed = "", False
            try:
                if fetched is None:
                    changed = self._registry.remove_adapter(update.name)
                else:
                    changed = self._registry.add_adapter(fetched.result())
            except UserError as expected:
                error = str(expected)
            except Exception as unexpected:
                log.exception("adapter %s could not be loaded from %s", update.name, update.path)
                error = f"The adapter in {update.path} could not be loaded: {type(unexpected).__name__}: {unexpected}"
            if changed:
                log.info("adapter %s %s", update.name, f"loaded from {update.path}" if update.path else "unloaded")
            yield AdapterUpdated(update.rid, error), changed


def load_adapters(registry: AdapterRegistry, items: tuple[tuple[str, str], ...]) -> None:
    """Loads the adapters of the settings, each given as name and directory. Raises UserError."""
    for name, path in items:
        registry.add_adapter(registry.fetch_adapter(name, Path(path)))


def missing_adapter_fault(name: str) -> str:
    """The fault of a request whose adapter is not loaded."""
    return f"the adapter {name} is not loaded any more"


def adapter_digest(directory: Path) -> bytes:
    """A digest of the content of an adapter's files, independent of their location. Raises UserError if the directory
    has no adapter, or a file is too large or damaged."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    try:
        if not (directory / CONFIG_FILE).is_file():
            raise UserError(f"{directory} has no {CONFIG_FILE}, so it is no LoRA adapter.")
        files = ((directory / CONFIG_FILE, _check_config_size), (weights_path(directory), _check_header_size))
        for path, check in files:
            if not path.is_file():
                continue  # reported when the adapter is read
            check(path)
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
            with path.open("rb") as file:
                while block := file.read(BLOCK_BYTES):
                    digest.update(block)
    except OSError as error:
        raise UserError(f"The adapter in {directory} cannot be read: {error}.") from error
    return digest.digest()


class FakeAdapter:
    """The content of an adapter in the fake worker, which does not read the files."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory


def _check_config_size(path: Path) -> None:
    size = path.stat().st_size
    if size > MAX_CONFIG_BYTES:
        raise UserError(
            f"{path} has {size} bytes. No config of an adapter is that large: {MAX_CONFIG_BYTES} are the most."
        )


def _check_header_size(path: Path) -> None:
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    if not 0 < header <= min(MAX_HEADER_BYTES, path.stat().st_size - 8):
        raise UserError(
            f"{path} does not begin as the safetensors file of an adapter: a header of {header} bytes is announced, "
            f"and {MAX_HEADER_BYTES} are the most. It is incomplete or damaged: fetch the adapter again."
        )
