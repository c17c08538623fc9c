"""Which images of other hosts the worker has, and the requests that wait for theirs.

The files of images are on the host of the media process that made them (ImageSegment.site). A request whose images are
elsewhere than its worker is kept out of the queue until the worker has said that it has received them, so that no step
waits for a file. The worker asks for chunks; this says over which request they come, and forgets all when the worker is
lost. The chunks themselves are handed on by the loop: they are no concern of the scheduler.
"""

from typing import NamedTuple

from tgi.microkernel.messages.protocol import FetchImage, NeedImage
from tgi.scheduler.peers import Outbox, WorkerPeer
from tgi.scheduler.request import Request

# An image that has made no progress for this long does not come. One that the worker has not asked for yet, since it
# asks for few at a time, makes progress with the others.
TRANSFER_SECONDS = 60.0


class NeededImage:
    """An image that requests need and whose file is on another host."""

    def __init__(self, size: int, now: float) -> None:
        self.size = size
        self.requests: dict[Request, None] = {}  # an ordered set: the chunks come over the first
        self.asked = False  # the worker has asked for a part of it
        self.received = False  # the worker has it
        self.progress_at = now


class TransferResult(NamedTuple):
    """What became of requests that wait: they have all of their images, or one of them does not come."""

    complete: list[Request]
    failed: list[Request]


class ImageTransfers:
    """The images of the requests of one scheduler. Queues messages in the outbox."""

    def __init__(self, outbox: Outbox, worker: WorkerPeer) -> None:
        self._outbox = outbox
        self._worker = worker
        self._images: dict[bytes, NeededImage] = {}  # by digest
        self._latest_at = 0.0  # when any image has made progress, or was given up
        self.waiting: dict[Request, None] = {}  # an ordered set

    def need(self, request: Request, now: float) -> bool:
        """Has the worker get the images of a request, which is ready and lacks some. False: it lacks none."""
        lacks = False
        for segment in request.images:
            if segment.site in ("", self._worker.site):
                continue
            if (image := self._images.get(segment.digest)) is None:
                image = self._images[segment.digest] = NeededImage(segment.size, now)
                self._tell(segment.digest, segment.size)
            image.requests[request] = None
            lacks |= not image.received
        if lacks:
            self.waiting[request] = None
        return lacks

    def record(self, fetch: FetchImage, now: float) -> TransferResult:
        """The worker asks for a chunk, has an image, or cannot have it."""
        if (image := self._images.get(fetch.digest)) is None:
            return TransferResult([], [])  # it is not needed any more
        image.asked = True
        image.progress_at = self._latest_at = now
        if fetch.error:
            return TransferResult([], [*image.requests])
        if fetch.offset < image.size:
            request = next(iter(image.requests))
            self._outbox.append(request.tokenizer.peer, fetch._replace(rid=request.rid))
            return TransferResult([], [])
        image.received = True
        complete = [one for one in image.requests if one in self.waiting and not self._lacks(one)]
        for request in complete:
            del self.waiting[request]
        return TransferResult(complete, [])

    def release(self, request: Request) -> None:
        """A request has ended. The worker asks again for what was to come over it and others need."""
        self.waiting.pop(request, None)
        for digest in {segment.digest for segment in request.images}:
            if (image := self._images.get(digest)) is None or request not in image.requests:
                continue
            first = next(iter(image.requests)) is request
            del image.requests[request]
            if not image.requests:
                del self._images[digest]
                self._tell(digest, 0)
            elif first and not image.received:
                self._tell(digest, image.size)

    def worker_lost(self) -> list[Request]:
        """Returns the requests that have waited for an image."""
        self._images.clear()
        waiting, self.waiting = [*self.waiting], {}
        return waiting

    @property
    def due_at(self) -> float | None:
        """When `late` must be called; None: no such time."""
        if not self.waiting:
            return None
        return min(map(self._late_at, self._arriving()), default=None)

    def late(self, now: float) -> list[Request]:
        """Requests that wait for an image that does not come."""
        if not self.waiting:
            return []
        late = [one for one in self._arriving() if now >= self._late_at(one)]
        if late:
            late = [one for one in late if one.asked] or late
            self._latest_at = now
        return list(dict.fromkeys(request for image in late for request in image.requests))

    def _late_at(self, image: NeededImage) -> float:
        return (image.progress_at if image.asked else max(image.progress_at, self._latest_at)) + TRANSFER_SECONDS

    def _arriving(self) -> list[NeededImage]:
        return [one for one in self._images.values() if not one.received]

    def _lacks(self, request: Request) -> bool:
        found = (self._images.get(segment.digest) for segment in request.images)
        return any(image is not None and not image.received for image in found)

    def _tell(self, digest: bytes, size: int) -> None:
        if self._worker.peer is not None:
            self._outbox.append(self._worker.peer, NeedImage(digest, size))
