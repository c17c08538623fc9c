"""KV pages in files (--prefix-cache-dir): the scheduler says which pages are written and read, see TransferPages.

A file has one page, and is named by its key. The files of a model are in a directory named by a digest of all that the
bytes depend on besides the key: weights, types, kernels and the layout of a page. Pages are written by a thread, and
read by another one, while the worker computes steps. A file whose digest does not match is removed.
"""

import hashlib
import json
import logging
import os
import re
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tgi.microkernel.errors import UserError
from tgi.microkernel.messages.codec import unpack_int32
from tgi.microkernel.messages.protocol import (
    MAX_STORED_PAGES,
    PAGE_KEY_BYTES,
    PagesTransferred,
    StoredPages,
    TransferPages,
)
from tgi.microkernel.observability.log import ComplaintLimit

log = logging.getLogger(__name__)

MAGIC = b"tgi kv page 1\n\0\0"
SUFFIX, DRAFT = ".page", ".draft"
PAGE_NAME = re.compile(f"[0-9a-f]{{{2 * PAGE_KEY_BYTES}}}{SUFFIX}")


class PageFiles:
    """The files of one worker's pages."""

    def __init__(self, root: Path, identity: dict[str, Any], memory: Sequence[Tensor], most_bytes: int) -> None:
        """`memory`: the parts of all pages, each [pages, ...]. `identity`: what their bytes depend on. `most_bytes` of
        all files under `root`, those of other models included. Raises UserError if the directory cannot be used."""
        self._parts = memory
        self._page_bytes = sum(part[0].nbytes for part in memory)
        self._file_bytes = len(MAGIC) + hashlib.sha256().digest_size + self._page_bytes
        self._most_bytes = most_bytes
        if self._most_bytes < self._file_bytes:
            raise UserError(
                f"`prefix_cache_bytes` is {most_bytes}, less than the {self._file_bytes} bytes of one page. "
                "Raise --prefix-cache-bytes, or leave out --prefix-cache-dir."
            )
        layout = [(str(part.dtype), list(part.shape[1:]), list(part.stride()[1:])) for part in memory]
        described = json.dumps([identity, layout], sort_keys=True)
        self._directory = root / hashlib.sha256(described.encode()).hexdigest()[:32]
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._keys = self._find_pages()
            self._others = self._find_others(root)
        except OSError as error:
            raise UserError(f"--prefix-cache-dir {root} cannot be used: {error.strerror}.") from error
        self._others_bytes = sum(size for _, size in self._others)
        self._writer, self._reader = (ThreadPoolExecutor(1, f"page {work}") for work in ("writer", "reader"))
        self._running: list[tuple[TransferPages, Future[int]]] = []
        self._complaints = ComplaintLimit()
        self.touched_pages = 0  # pages from this one on were never read
        log.info(
            "The prefix cache has %d pages of %.2f MB in %s, of at most %d",
            *(len(self._keys), self._page_bytes / 1e6, self._directory, self.most),
        )

    @property
    def most(self) -> int:
        """The number of pages that may be kept."""
        return min(self._most_bytes // self._file_bytes, MAX_STORED_PAGES)

    def report(self) -> StoredPages:
        """The pages that are kept. Drops what was submitted, and waits for what is being done."""
        for _, work in self._running:
            work.cancel()
        for _, work in self._running:
            if not work.cancelled():
                work.exception()
        self._running.clear()
        keys = list(self._keys)[-self.most :]
        return StoredPages(b"".join(keys), self.most)

    def submit(self, message: TransferPages, wake: Callable[[], None]) -> None:
        """Begins a transfer, when the steps before it are launched. Calls `wake` when it is done."""
        if message.load:
            self.touched_pages = max(self.touched_pages, 1 + max(unpack_int32(message.page_ids), default=-1))
        work = self._reader.submit(self._read, message) if message.load else self._writer.submit(self._write, message)
        work.add_done_callback(lambda _: wake())
        self._running.append((message, work))

    def take_answers(self) -> list[PagesTransferred]:
        """The answers to the transfers that are done."""
        done = [(message, work) for message, work in self._running if work.done()]
        self._running = [one for one in self._running if one not in done]
        return [PagesTransferred(message.number, work.result()) for message, work in done]

    def close(self) -> None:
        """Finishes what was submitted."""
        for pool in (self._writer, self._reader):
            pool.shutdown()

    # --- in threads ---------------------------------------------------------------------------------------------------

    def _write(self, message: TransferPages) -> int:
        """Removes and writes files. Returns how many were written before the first that could not be."""
        done = 0
        try:
            for key in _split_keys(message.removed):
                self._remove(key)
            for key, page in zip(_split_keys(message.keys), unpack_int32(message.page_ids), strict=True):
                self._write_page(key, page)
                done += 1
        except OSError as error:
            if self._complaints.allows_one():
                log.error("a page of the prefix cache cannot be written to %s: %s", self._directory, error.strerror)
        return done

    def _write_page(self, key: bytes, page: int) -> None:
        own = (len(self._keys) + 1) * self._file_bytes
        while self._others and own + self._others_bytes > self._most_bytes:
            path, size = self._others.popleft()
            path.unlink(missing_ok=True)
            self._others_bytes -= size
        buffer = torch.cat([part[page].contiguous().view(torch.uint8).flatten() for part in self._parts]).numpy()
        path = self._path(key)
        draft = path.with_suffix(DRAFT)
        with draft.open("wb", buffering=0) as file:
            written = file.write(MAGIC + _digest(key, buffer)) + file.write(buffer)
        if written != self._file_bytes:
            draft.unlink()
            raise OSError(0, "it is full")
        draft.replace(path)
        self._keys[key] = None

    def _read(self, message: TransferPages) -> int:
        """Reads files to their pages. Returns how many were read before the first that is missing or damaged."""
        keys = _split_keys(message.keys)
        done = 0
        buffer = torch.empty(self._page_bytes, dtype=torch.uint8)
        for key, page in zip(keys, unpack_int32(message.page_ids), strict=True):
            if fault := self._read_page(key, page, buffer):
                log.warning("dropped %s from the prefix cache: %s", self._path(key), fault)
                with suppress(OSError):
                    self._remove(key)
                break
            done += 1
        for key in reversed(keys[:done]):  # the end of a prefix is of no use without its begin
            self._keys.pop(key, None)
            self._keys[key] = None
            with suppress(OSError):
                os.utime(self._path(key))
        return done

    def _read_page(self, key: bytes, page: int, buffer: Tensor) -> str:
        """Reads a file to its page. Returns why it cannot be used; the page is not written then."""
        data = buffer.numpy()
        head = bytearray(self._file_bytes - self._page_bytes)
        try:
            with self._path(key).open("rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                read = file.readinto(head) + file.readinto(data)
        except OSError as error:
            return error.strerror or str(error)
        if size != self._file_bytes or read != size:
            return f"it has {size} bytes, not {self._file_bytes}"
        if head != MAGIC + _digest(key, data):
            return "its digest does not match"
        begin = 0
        for part in self._parts:
            target = part[page]
            source = buffer[begin : begin + target.nbytes]
            target.copy_(source.view(target.dtype).view(target.shape))
            begin += target.nbytes
        return ""

    def _remove(self, key: bytes) -> None:
        self._keys.pop(key, None)
        self._path(key).unlink(missing_ok=True)

    # --- files --------------------------------------------------------------------------------------------------------

    def _path(self, key: bytes) -> Path:
        return self._directory / (key.hex() + SUFFIX)

    def _find_pages(self) -> dict[bytes, None]:
        """The keys of the files, the least recently used first. Removes those that were not
        finished, and what is beyond the limit."""
        found = []
        with os.scandir(self._directory) as entries:
            for entry in entries:
                status = entry.stat()
                if PAGE_NAME.fullmatch(entry.name) and status.st_size == self._file_bytes:
                    found.append((status.st_mtime_ns, entry.name.removesuffix(SUFFIX)))
                elif entry.name.endswith((SUFFIX, DRAFT)):
                    Path(entry.path).unlink()
        keys = [bytes.fromhex(name) for _, name in sorted(found)]
        for key in keys[: -self.most]:
            self._path(key).unlink()
        return dict.fromkeys(keys[-self.most :])

    def _find_others(self, root: Path) -> deque[tuple[Path, int]]:
        """The files of other models, with their bytes, the least recently used first."""
        found = [
            (status.st_mtime_ns, path, status.st_size)
            for path in root.glob(f"*/*{SUFFIX}")
            if path.parent != self._directory and (status := path.stat())
        ]
        return deque((path, size) for _, path, size in sorted(found))


def _split_keys(column: bytes) -> list[bytes]:
    return [column[begin : begin + PAGE_KEY_BYTES] for begin in range(0, len(column), PAGE_KEY_BYTES)]


def _digest(key: bytes, data: Any) -> bytes:
    """Of a page: its bytes, and what they are."""
    digest = hashlib.sha256(key)
    digest.update(data)
    return digest.digest()
