"""Images of requests: where they are, and the media processes that load them before a request goes to a tokenizer."""

import asyncio
import itertools
import logging
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from tgi.api import errors
from tgi.api.downstream import Connection, Downstream
from tgi.api.shapes.chat import ImageSource
from tgi.microkernel.links.discovery import DownstreamLinks
from tgi.microkernel.links.link import PeerDisconnected, PeerId
from tgi.microkernel.messages.codec import MAX_FRAME_BYTES
from tgi.microkernel.messages.protocol import (
    IMAGE_CHUNK_BYTES,
    Beat,
    FetchImage,
    FinishReason,
    Hello,
    ImageChunk,
    ImageInput,
    ImageLoaded,
    LoadImage,
    RequestContext,
)
from tgi.microkernel.settings.table import Settings

log = logging.getLogger(__name__)


# OpenAI's values of `detail`. With "low" the image is made small first.
DETAILS = ("", "auto", "low", "high", "original")
# Of a data URL: it travels in one message.
MAX_URL_CHARACTERS = MAX_FRAME_BYTES // 2
# An image in a text of TGI's own routes.
MARKDOWN = re.compile(r"!\[\]\(([^)]*)\)")


def check_images(sources: Sequence[ImageSource], settings: Settings) -> None:
    """Raises ApiError: 422 for too many images in a prompt, and for one that cannot be loaded whatever it is."""
    if len(sources) > settings.max_images:
        raise errors.validation_error(f"a prompt may have {settings.max_images} images. Given: {len(sources)}")
    for number, source in enumerate(sources, 1):
        limit = MAX_URL_CHARACTERS
        if source.url[:5].lower() == "data:":
            limit = min(limit, 4 * settings.max_image_fetch_size // 3 + 1024)
        if len(source.url) > limit:
            raise errors.validation_error(f"the URL of image {number} may have {limit} characters")
        if source.detail not in DETAILS:
            raise errors.validation_error(
                f"`detail` of image {number} must be auto, low or high. Given: {source.detail[:64]}"
            )


def markdown_images(text: str, image_token: str) -> tuple[str, list[ImageSource]]:
    """A text of TGI's own routes with the model's image token in place of each `![](URL)`, and those images."""
    return MARKDOWN.sub(lambda _: image_token, text), [ImageSource(found) for found in MARKDOWN.findall(text)]


class ImageFailure(NamedTuple):
    """Why the images of a prompt are not loaded. `message` is for the client."""

    reason: FinishReason
    message: str


# What is called once, when all images of a set are loaded, or one of them failed.
WhenLoaded = Callable[[ImageFailure | None], None]


class ImageSet:
    """The images of one prompt, in its order. All generations from the prompt share them; while one of them is active
    their files are kept."""

    def __init__(self, sources: Sequence[ImageSource], context: RequestContext) -> None:
        """`context`: of the first generation, which is blamed for what they do to media processes."""
        self.sources = [*sources]  # without the URL of each that is loaded
        self.context = context
        self.users = 0  # active requests
        self.requests: list[ImageRequest] = []  # begun
        self.failure: ImageFailure | None = None
        self.waiting: list[WhenLoaded] = []

    @property
    def loaded(self) -> bool:
        return bool(self.requests) and all(request.result is not None for request in self.requests)

    @property
    def inputs(self) -> list[ImageInput]:
        return [request.result for request in self.requests if request.result is not None]


class ImageRequest:
    """One image of a set, until it is loaded."""

    def __init__(self, images: ImageSet, index: int, name: str) -> None:
        self.images = images
        self.index = index
        self.name = name  # of its file
        self.result: ImageInput | None = None

    @property
    def context(self) -> RequestContext:
        """Of the set."""
        return self.images.context


MediaConnection = Connection[ImageRequest]


class ImageLoading:
    """Has media processes load the images of this front end's requests, each the one with the fewest. What a process
    that died had not loaded goes to another one, or to its successor; an image that ends them again and again is
    quarantined with its request."""

    def __init__(
        self,
        directory: Path,
        owner: str,
        work_in_progress: Callable[[PeerId], bytes | None],
        refuse: Callable[[bytes, str], None],
    ) -> None:
        """`directory`: the media directory. `owner`: begins the names of this process's files. `refuse` quarantines the
        requests of a name."""
        self._directory = directory
        self._owner = owner
        self._refuse = refuse
        self._media: Downstream[MediaConnection, ImageRequest] = Downstream(
            self._choose, self._send, self._handle, self._quarantine, work_in_progress
        )
        self._assignments = self._media.assignments
        self._numbers = itertools.count(1)  # of rids and names
        self._loop: asyncio.AbstractEventLoop | None = None

    # --- for the router ---

    def load(self, images: ImageSet, when_loaded: WhenLoaded) -> None:
        """A request needs the images of a set until it calls `release`. Begins to load them, unless another request has
        done so."""
        images.users += 1
        if images.loaded or images.failure is not None:
            when_loaded(images.failure)
            return
        images.waiting.append(when_loaded)
        if not images.requests:
            images.requests = [
                ImageRequest(images, index, f"{self._owner}-{next(self._numbers)}")
                for index in range(len(images.sources))
            ]
            for request in images.requests:
                self._media.submit(request)

    def release(self, images: ImageSet, kept_ms: int = 0) -> None:
        """A request has ended, or does so in `kept_ms`. After the last one the files of its images are given back."""
        if kept_ms and self._loop is not None:
            self._loop.call_later(kept_ms / 1000, self.release, images)
            return
        images.users -= 1
        if images.users == 0:
            self._drop(images)

    def read_chunk(self, images: ImageSet, fetch: FetchImage) -> ImageChunk:
        """What a worker on another host asks for of an image of this set."""
        rid, digest, offset, *_ = fetch
        answer = ImageChunk(rid, digest, offset, b"")
        image = next((one for one in images.inputs if one.digest == digest), None)
        if image is None or not 0 <= offset < image.size:
            return answer._replace(error="a worker asks for an image that this request does not have")
        try:
            with (self._directory / image.name).open("rb", buffering=0) as file:
                return answer._replace(data=os.pread(file.fileno(), IMAGE_CHUNK_BYTES, offset))
        except OSError as error:
            return answer._replace(error=f"the file of an image cannot be read: {error.strerror}")

    # --- links ---

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Reads links from the running loop. Removes the files of a process that was killed before this one."""
        self._loop = loop
        prefix = self._owner.rpartition("-")[0]  # without the boot id
        for path in self._directory.glob(f"{prefix}-*"):
            path.unlink(missing_ok=True)
        self._media.attach(loop)

    def follow(self, links: DownstreamLinks) -> None:
        """Uses the media processes that were found, and forgets those that are gone."""
        added, removed = links.follow()
        for link in added:
            self._media.add(MediaConnection(link))
        for connection in [one for one in self._media.connections if one.link in removed]:
            self._media.remove(connection)

    def tick(self, beat: Beat) -> None:
        """Every BEAT_SECONDS."""
        self._media.tick(beat)

    def close(self) -> None:
        self._media.close()

    def _handle(self, connection: MediaConnection, message: object) -> None:
        match message:
            case ImageLoaded():
                if (request := self._assignments.pop(connection, message.rid)) is not None:
                    self._on_loaded(request, message)
                elif not message.error:  # it has crossed with a Cancel
                    (self._directory / message.image.name).unlink(missing_ok=True)
            case Hello() | PeerDisconnected():
                pass
            case _:
                log.warning("unexpected %s from %s", type(message).__name__, connection.peer)

    # --- assignments ---

    def _choose(self, request: ImageRequest) -> MediaConnection | None:
        responding = [one for one in self._media.connections if one.responds]
        return min(responding, key=lambda one: len(one.requests), default=None)

    def _send(self, request: ImageRequest, connection: MediaConnection) -> int:
        assert connection.peer is not None
        rid, source = next(self._numbers), request.images.sources[request.index]
        message = LoadImage(rid, request.name, source.url, source.detail, request.context, len(request.images.sources))
        connection.link.send(connection.peer, message)
        return rid

    def _on_loaded(self, request: ImageRequest, answer: ImageLoaded) -> None:
        self._media.ended_well(request)
        images = request.images
        if answer.error:
            count = len(images.sources)
            which = "the image" if count == 1 else f"image {request.index + 1} of {count}"
            reason = FinishReason.OVERLOADED if answer.overloaded else FinishReason.INVALID
            self._fail(images, ImageFailure(reason, f"{which} cannot be used: {answer.error}"))
            return
        request.result = answer.image
        images.sources[request.index] = ImageSource("")  # it may be megabytes
        if images.loaded:
            self._tell(images)

    def _fail(self, images: ImageSet, failure: ImageFailure) -> None:
        """Ends a set, of which nothing is needed any more."""
        images.failure = failure
        self._drop(images)
        self._tell(images)

    def _tell(self, images: ImageSet) -> None:
        waiting, images.waiting = images.waiting, []
        for when_loaded in waiting:
            when_loaded(images.failure)

    def _drop(self, images: ImageSet) -> None:
        """Cancels what is not loaded, and removes the files of what is."""
        for request in images.requests:
            self._media.withdraw(request)
            (self._directory / request.name).unlink(missing_ok=True)
        images.requests = []
        self._media.exchange_soon()

    def _quarantine(self, name: bytes, requests: list[ImageRequest], cause: str) -> None:
        """Ends the sets of requests with which a media process has ended like that, and has their name refused."""
        text = f"a media process {cause} while it worked on an image of this request"
        self._refuse(name, text)
        for images in {request.images for request in requests}:
            self._fail(images, ImageFailure(FinishReason.QUARANTINED, text))
