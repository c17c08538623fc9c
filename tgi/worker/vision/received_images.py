"""Images that come from other hosts: the worker asks for their files in chunks and keeps them in a directory of its own
(see NeedImage). A thread writes and checks them while the worker computes steps."""

import contextlib
import logging
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import BinaryIO

from tgi.hub.image_file import image_fault
from tgi.microkernel.messages.protocol import (
    IMAGE_CHUNK_BYTES,
    IMAGE_DIGEST_BYTES,
    MAX_IMAGE_FILE_BYTES,
    FetchImage,
    ImageChunk,
    NeedImage,
)

log = logging.getLogger(__name__)

DRAFT = ".draft"
# Images that arrive at the same time, and chunks of each that were asked for and are not written yet: together they
# bound the memory of all processes on the way, and how long a slow network delays other messages.
MAX_ARRIVING, WINDOW = 4, 4
# Of the directory; no more than half of its file system.
MAX_BYTES = 2 << 30
NO_ROOM = "images of other requests take all memory for images of the worker's host"


class ArrivingImage:
    """An image whose file is not complete."""

    def __init__(self, digest: bytes, size: int, path: Path) -> None:
        self.digest = digest
        self.size = size
        self.path = path  # of the draft
        self.file: BinaryIO | None = None  # None: nothing was asked for yet
        self.asked = 0  # bytes before this were asked for
        self.received = 0  # and bytes before this have come
        self.written = 0  # and bytes before this are in the file
        self.dropped = False  # no request needs it any more

    def write(self, data: bytes) -> str:
        """Appends to the file, in a thread. Returns why it cannot be written, or ""."""
        assert self.file is not None
        try:
            if self.file.write(data) == len(data):
                return ""
            reason: str | None = "No space left on device"
        except (OSError, ValueError) as error:  # a file that was closed: it was dropped
            reason = error.strerror if isinstance(error, OSError) else str(error)
        return f"the file of an image cannot be written on the worker's host: {reason}"

    def complete(self, path: Path) -> str:
        """Checks the file and gives it its name, in a thread. Returns why it cannot be used, or ""."""
        assert self.file is not None
        self.file.close()
        if fault := image_fault(self.path, self.digest):
            return f"an image has not reached the worker as it was sent: {fault}"
        self.path.replace(path)
        return ""

    def close(self) -> None:
        """Removes the draft."""
        if self.file is not None:
            self.file.close()
        self.path.unlink(missing_ok=True)


class ReceivedImages:
    """The files of one worker. Of those that no request needs, the least recently used give way to others."""

    def __init__(self, directory: Path, wake: Callable[[], None], limit: int = MAX_BYTES) -> None:
        """Calls `wake` when `take_answers` may have some. What another life of the worker has left unfinished is
        removed."""
        directory.mkdir(mode=0o700, exist_ok=True)
        for path in directory.glob(f"*{DRAFT}"):
            path.unlink(missing_ok=True)
        status = os.statvfs(directory)
        self._directory = directory
        self._limit = min(limit, status.f_frsize * status.f_blocks // 2)
        self._wake = wake
        self._needed: set[bytes] = set()  # digests
        self._arriving: dict[bytes, ArrivingImage] = {}  # in the order in which they were needed
        self._thread = ThreadPoolExecutor(1, "image")
        # What the thread does, with the bytes that it writes; 0: it completes the file.
        self._running: deque[tuple[ArrivingImage, int, Future[str]]] = deque()
        self._answers: list[FetchImage] = []
        self._drafts = count()

    def reset(self) -> None:
        """The scheduler is gone: the next one tells anew what it needs."""
        self._needed.clear()
        self._answers.clear()
        for image in [*self._arriving.values()]:
            self._drop(image)

    def need(self, message: NeedImage) -> None:
        """Begins to ask for an image, unless its file is there; or forgets that it is needed."""
        digest, size = message
        image = self._arriving.get(digest)
        if not size:
            self._needed.discard(digest)
            if image is not None:
                self._drop(image)
        elif image is not None:
            image.asked = min(image.asked, image.received)
        elif len(digest) == IMAGE_DIGEST_BYTES and 0 < size <= MAX_IMAGE_FILE_BYTES:
            self._needed.add(digest)
            path = received_path(self._directory, digest)
            with contextlib.suppress(FileNotFoundError):
                os.utime(path)
                if path.stat().st_size == size:
                    self._answers.append(FetchImage(0, digest, size))
                    return
            draft = self._directory / f"{digest.hex()}-{next(self._drafts)}{DRAFT}"
            self._arriving[digest] = ArrivingImage(digest, size, draft)
        self._ask()

    def receive(self, chunk: ImageChunk) -> None:
        """Takes the next bytes of an image. Others are ignored: they were asked for twice, or are not needed."""
        image = self._arriving.get(chunk.digest)
        if image is None or image.file is None or chunk.offset != image.received:
            return
        if len(chunk.data) != min(IMAGE_CHUNK_BYTES, image.size - image.received):
            self._fail(image, f"a part of an image has {len(chunk.data)} bytes")
            return
        image.received += len(chunk.data)
        image.asked = max(image.asked, image.received)
        self._submit(image, len(chunk.data), lambda: image.write(chunk.data))

    def take_answers(self) -> list[FetchImage]:
        """What the worker has to say since the last call."""
        while self._running and self._running[0][2].done():
            image, written, future = self._running.popleft()
            if image.dropped:
                continue
            if fault := future.result():
                self._fail(image, fault)
            elif not written:
                del self._arriving[image.digest]
                self._answers.append(FetchImage(0, image.digest, image.size))
            else:
                image.written += written
                if image.written == image.size:
                    path = received_path(self._directory, image.digest)
                    self._submit(image, 0, lambda image=image, path=path: image.complete(path))  # type: ignore[misc]
            self._ask()
        answers, self._answers = self._answers, []
        return answers

    def close(self) -> None:
        """Ends the thread, and removes what is not complete."""
        self.reset()
        self._thread.shutdown()

    def _submit(self, image: ArrivingImage, written: int, work: Callable[[], str]) -> None:
        future = self._thread.submit(work)
        self._running.append((image, written, future))
        future.add_done_callback(lambda _: self._wake())

    def _ask(self) -> None:
        """Asks for the next chunks of the images whose turn it is."""
        for image in [*self._arriving.values()][:MAX_ARRIVING]:
            if image.file is None and (fault := self._open(image)):
                self._fail(image, fault)
                continue
            while image.asked < min(image.size, image.written + WINDOW * IMAGE_CHUNK_BYTES):
                self._answers.append(FetchImage(0, image.digest, image.asked))
                image.asked += IMAGE_CHUNK_BYTES

    def _open(self, image: ArrivingImage) -> str:
        """Makes room for an image, and its draft. Returns why that is not possible, or ""."""
        if image.size > self._limit:
            return f"an image takes {image.size} bytes, and the worker's host keeps {self._limit}"
        files = []
        for path in self._directory.iterdir():
            if path.suffix != DRAFT:
                status = path.stat()
                files.append((status.st_mtime_ns, status.st_size, path))
        arriving = sum(one.size for one in self._arriving.values() if one.file is not None)
        excess = sum(size for _, size, _ in files) + arriving + image.size - self._limit
        for _, size, path in sorted(files):
            if excess > 0 and bytes.fromhex(path.stem) not in self._needed:
                path.unlink()
                excess -= size
        if excess > 0:
            return NO_ROOM
        try:
            image.file = image.path.open("wb", buffering=0)
        except OSError as error:
            return f"the file of an image cannot be written on the worker's host: {error.strerror}"
        return ""

    def _fail(self, image: ArrivingImage, fault: str) -> None:
        log.error("an image of another host: %s", fault)
        self._drop(image)
        self._needed.discard(image.digest)
        self._answers.append(FetchImage(0, image.digest, 0, fault, overloaded=fault is NO_ROOM))

    def _drop(self, image: ArrivingImage) -> None:
        del self._arriving[image.digest]
        image.dropped = True
        self._thread.submit(image.close)  # which may be writing it


def received_path(directory: Path, digest: bytes) -> Path:
    """The file of an image that has come from another host."""
    return directory / f"{digest.hex()}.safetensors"
