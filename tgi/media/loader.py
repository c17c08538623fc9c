"""Loads images: the way of one, from LoadImage to ImageLoaded, and the threads that go it.

Images are fetched at the same time and processed one at a time, so that the work register names the one that has
ended the process.
"""

import logging
import queue
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

from tgi.media.decoder import decode, with_detail
from tgi.media.fetcher import FetchRules, ImageError, fetch, from_data_url, is_data_url
from tgi.media.processor import ImageProcessor
from tgi.media.store import MediaStore, StoreFull
from tgi.microkernel.links.link import PeerId
from tgi.microkernel.messages.protocol import ImageInput, ImageLoaded, LoadImage
from tgi.microkernel.recovery.work_register import WorkRegister

log = logging.getLogger(__name__)

# Each holds at most one image that was fetched.
FETCHING_THREADS = 8
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
            prompt_ids = self._store.link(digest, message.name)
            if prompt_ids is None:
                image = with_detail(decode(data, self._max_pixels), message.detail)
                self._store.add(digest, processed := self._processor.process(image, several))
                prompt_ids = self._store.link(digest, message.name)
                if prompt_ids is None:
                    raise StoreFull  # another process has removed it already
                del processed
            return ImageLoaded(message.rid, ImageInput(digest, prompt_ids, message.name))
        finally:
            self._register.units[PROCESSING_UNIT] = 0
            self._began = None


class LoadingThreads:
    """The threads of a media process. Calls `wake` after each image."""

    def __init__(
        self, load: Callable[[LoadImage], ImageLoaded], unlink: Callable[[str], None], wake: Callable[[], None]
    ) -> None:
        """`unlink` removes the file that was made for an image that is not wanted any more."""
        self._load = load
        self._unlink = unlink
        self._wake = wake
        self._fetching = ThreadPoolExecutor(FETCHING_THREADS, "fetch")
        self._processing = ThreadPoolExecutor(1, "process")  # of data URLs, which wait for no host
        self._futures: dict[tuple[PeerId, int], tuple[str, Future[ImageLoaded]]] = {}  # with the name of the file
        self._completed: queue.SimpleQueue[tuple[PeerId, int]] = queue.SimpleQueue()

    def __len__(self) -> int:
        """Images that are not loaded yet, or not taken."""
        return len(self._futures)

    def add(self, peer: PeerId, message: LoadImage) -> None:
        """Loads an image for a peer."""
        key = peer, message.rid
        if key in self._futures:
            log.error("%s used rid %d twice; the second image is ignored", peer, message.rid)
            return
        executor = self._processing if is_data_url(message.url) else self._fetching
        future = executor.submit(self._load, message)
        self._futures[key] = message.name, future

        def done(future: Future[ImageLoaded]) -> None:
            self._completed.put(key)
            self._wake()

        future.add_done_callback(done)

    def cancel(self, peer: PeerId, rid: int) -> None:
        """Forgets an image, and does not load it if no thread has it yet."""
        if (found := self._futures.pop((peer, rid), None)) is not None:
            name, future = found
            if not future.cancel():
                future.add_done_callback(lambda _: self._unlink(name))

    def drop(self, peer: PeerId) -> None:
        """Forgets all images of a peer that has disconnected."""
        for owner, rid in list(self._futures):
            if owner == peer:
                self.cancel(owner, rid)

    def loaded(self) -> Iterator[tuple[PeerId, ImageLoaded]]:
        """Yields each answer once."""
        while not self._completed.empty():
            key = self._completed.get()
            if (found := self._futures.pop(key, None)) is not None:
                yield key[0], found[1].result()

    def shutdown(self) -> None:
        """Ends the threads; what they fetch is given up."""
        self._fetching.shutdown(wait=False, cancel_futures=True)
        self._processing.shutdown(wait=False, cancel_futures=True)
