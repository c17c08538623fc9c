"""Loads images: the way of one, from LoadImage to ImageLoaded, and the threads that go it.

Images are fetched at the same time and processed one at a time, so that the work register names the one that has
ended the process.
"""

import logging
import queue
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Lock
from typing import NamedTuple

from tgi.media.decoder import decode, with_detail
from tgi.media.fetcher import FetchRules, ImageError, fetch, from_data_url, is_data_url
from tgi.media.processor import ImageProcessor
from tgi.media.store import MediaStore, StoreFull
from tgi.microkernel.links.link import PeerId
from tgi.microkernel.messages.protocol import ImageLoaded, LoadImage
from tgi.microkernel.recovery.work_register import WorkRegister

log = logging.getLogger(__name__)

# Each holds at most one image that was fetched.
FETCHING_THREADS = 8
# What waits for the threads of one kind: images, and bytes of their URLs.
MAX_QUEUED, MAX_QUEUED_BYTES = 1024, 256 << 20
# The unit of the work register of the image that is processed; unit 0 is the loop's.
PROCESSING_UNIT = 1


class ImageLoader:
    """Loads the images of one model. `load` may be called by any thread."""

    def __init__(
        self,
        processor: ImageProcessor,
        store: MediaStore,
        rules: FetchRules,
        max_pixels: int,
        work_register: WorkRegister,
    ) -> None:
        self._processor = processor
        self._store = store
        self._rules = rules
        self._max_pixels = max_pixels
        self._register = work_register
        self._turn = Lock()  # to process
        self._began: float | None = None

    @property
    def busy_seconds(self) -> float:
        """For how long the image that is processed now has been; 0: there is none."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    def load(self, message: LoadImage) -> ImageLoaded:
        """The answer to a message. A defect of this program fails this image only."""
        try:
            data = from_data_url(message.url) if is_data_url(message.url) else fetch(message.url, self._rules)
            with self._turn:
                return self._process(message, data)
        except ImageError as error:
            return ImageLoaded(message.rid, error=str(error))
        except StoreFull:
            return ImageLoaded(message.rid, error="images of other requests take all memory", overloaded=True)
        except Exception as error:
            log.exception("an image could not be loaded")
            return ImageLoaded(message.rid, error=f"the image could not be loaded: {type(error).__name__}")

    def _process(self, message: LoadImage, data: bytes) -> ImageLoaded:
        """Makes the file, unless there is one. Pixels of clients are in progress for as long as this takes."""
        self._began = time.monotonic()
        self._register.working_on(message.context, PROCESSING_UNIT)
        try:
            several = message.images > 1
            digest = self._processor.digest(data, message.detail, several)
            found = self._store.link(digest, message.name)
            if found is None:
                image = with_detail(decode(data, self._max_pixels), message.detail)
                self._store.add(digest, processed := self._processor.process(image, several))
                found = self._store.link(digest, message.name)
                if found is None:
                    raise StoreFull  # another process has removed it already
                del processed
            return ImageLoaded(message.rid, found)
        finally:
            self._register.units[PROCESSING_UNIT] = 0
            self._began = None


class Waiting(NamedTuple):
    """An image that waits for a thread."""

    key: tuple[PeerId, int]
    message: LoadImage

    @property
    def client(self) -> str:
        """Whose turn it takes."""
        return self.message.context.client


class LoadQueue:
    """The images that wait for the threads of one kind. Clients take turns, image by image."""

    def __init__(self) -> None:
        self._clients: OrderedDict[str, dict[tuple[PeerId, int], Waiting]] = OrderedDict()  # in the order of turns
        self.bytes = 0  # of their URLs

    def __len__(self) -> int:
        return sum(map(len, self._clients.values()))

    def add(self, image: Waiting) -> None:
        """Queues an image."""
        self._clients.setdefault(image.client, {})[image.key] = image
        self.bytes += len(image.message.url)

    def discard(self, image: Waiting) -> bool:
        """Removes an image. False: it does not wait."""
        own = self._clients.get(image.client, {})
        if own.pop(image.key, None) is None:
            return False
        if not own:
            del self._clients[image.client]
        self.bytes -= len(image.message.url)
        return True

    def take(self, passed_over: Collection[str] = ()) -> Waiting | None:
        """Removes and returns the oldest image of the client whose turn it is, except for the clients `passed_over`,
        which keep their turn."""
        client = next((client for client in self._clients if client not in passed_over), None)
        if client is None:
            return None
        image = next(iter(self._clients[client].values()))
        self._clients.move_to_end(client)
        self.discard(image)
        return image

    def take_excess(self) -> Waiting:
        """Removes and returns the newest image of the client that has the most bytes of URLs here."""
        own = max(self._clients.values(), key=lambda one: sum(len(image.message.url) for image in one.values()))
        image = next(reversed(own.values()))
        self.discard(image)
        return image


class LoadingPool:
    """Threads of one kind, and what waits for them."""

    def __init__(self, name: str, threads: int) -> None:
        self.queue = LoadQueue()
        self.executor = ThreadPoolExecutor(threads, name)
        self.threads = threads
        self.running: list[str] = []  # the images' clients

    def take(self) -> Waiting | None:
        """The next image for a free thread, if there are both. Of several threads the last free one is kept for a
        client that has none."""
        free = self.threads - len(self.running)
        return self.queue.take(self.running if free == 1 else ()) if free else None


class LoadingThreads:
    """The threads of a media process. Calls `wake` after each image."""

    def __init__(
        self, load: Callable[[LoadImage], ImageLoaded], unlink: Callable[[str], None], wake: Callable[[], None]
    ) -> None:
        """`unlink` removes the file that was made for an image that is not wanted any more."""
        self._load = load
        self._unlink = unlink
        self._wake = wake
        self._fetching = LoadingPool("fetch", FETCHING_THREADS)
        self._processing = LoadingPool("process", 1)  # of data URLs, which wait for no host
        self._images: dict[tuple[PeerId, int], Waiting] = {}  # that are wanted
        self._refused: list[tuple[PeerId, ImageLoaded]] = []
        self._completed: queue.SimpleQueue[tuple[LoadingPool, Waiting, Future[ImageLoaded]]] = queue.SimpleQueue()

    def __len__(self) -> int:
        """Images that are not loaded yet, or not taken."""
        pools = (self._fetching, self._processing)
        return len(self._refused) + sum(len(pool.queue) + len(pool.running) for pool in pools)

    def add(self, peer: PeerId, message: LoadImage) -> None:
        """Loads an image for a peer. Beyond MAX_QUEUED or MAX_QUEUED_BYTES images are refused, those of the client that
        has the most first."""
        image = Waiting((peer, message.rid), message)
        if image.key in self._images:
            log.error("%s used rid %d twice; the second image is ignored", peer, message.rid)
            return
        self._images[image.key] = image
        (pool := self._pool_of(image)).queue.add(image)
        self._start(pool)
        while len(pool.queue) > MAX_QUEUED or pool.queue.bytes > MAX_QUEUED_BYTES:
            refused = pool.queue.take_excess()
            del self._images[refused.key]
            answer = ImageLoaded(refused.message.rid, error="too many images wait to be loaded", overloaded=True)
            self._refused.append((refused.key[0], answer))

    def cancel(self, peer: PeerId, rid: int) -> None:
        """Forgets an image, and does not load it if no thread has it yet."""
        if (image := self._images.pop((peer, rid), None)) is not None:
            self._pool_of(image).queue.discard(image)

    def drop(self, peer: PeerId) -> None:
        """Forgets all images of a peer that has disconnected."""
        for owner, rid in list(self._images):
            if owner == peer:
                self.cancel(owner, rid)

    def loaded(self) -> Iterator[tuple[PeerId, ImageLoaded]]:
        """Yields each answer once."""
        refused, self._refused = self._refused, []
        yield from refused
        while not self._completed.empty():
            pool, image, future = self._completed.get()
            pool.running.remove(image.client)
            self._start(pool)
            if self._images.get(image.key) is image:
                del self._images[image.key]
                yield image.key[0], future.result()
            else:
                self._unlink(image.message.name)

    def shutdown(self) -> None:
        """Ends the threads; what they fetch is given up."""
        for pool in (self._fetching, self._processing):
            pool.executor.shutdown(wait=False, cancel_futures=True)

    def _pool_of(self, image: Waiting) -> LoadingPool:
        return self._processing if is_data_url(image.message.url) else self._fetching

    def _start(self, pool: LoadingPool) -> None:
        """Gives what waits to free threads."""
        while (image := pool.take()) is not None:
            pool.running.append(image.client)
            pool.executor.submit(self._load, image.message).add_done_callback(partial(self._on_done, pool, image))

    def _on_done(self, pool: LoadingPool, image: Waiting, future: Future[ImageLoaded]) -> None:
        self._completed.put((pool, image, future))
        self._wake()
