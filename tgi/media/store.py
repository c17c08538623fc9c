"""The media directory: what was made of images, by content, for the worker. Its processes share it.

`DIGEST.safetensors` is the file of an image (hub/image_file.py). A front end names a hard link for each
image of a live request and removes it at the request's end, so the file system counts who needs a file. Of the files
without links those that were used least recently are removed when the directory is full.
"""

import contextlib
import errno
import os
from pathlib import Path

from tgi.hub.image_file import encode_image, read_prompt_ids
from tgi.media.fetcher import ImageError
from tgi.media.processor import ProcessedImage
from tgi.microkernel.messages.protocol import ImageInput

SUFFIX = ".safetensors"
# Of the directory; no more than half of its file system, which in a container may have 64 MB.
MAX_BYTES = 2 << 30


class StoreFull(Exception):
    """Live requests need all that the directory may hold."""


class MediaStore:
    """The files of one directory, which one process at least writes."""

    def __init__(self, directory: Path, owner: str, site: str, limit: int = MAX_BYTES) -> None:
        """`owner` names this process; what one of its name has left unfinished is removed. `site`: as Hello.site."""
        self._directory = directory
        self._site = site
        self._draft = directory / f"{owner}.draft"
        self._draft.unlink(missing_ok=True)
        status = os.statvfs(directory)
        self._limit = min(limit, status.f_frsize * status.f_blocks // 2)

    def link(self, digest: bytes, name: str) -> ImageInput | None:
        """Makes the file of an image available under `name`. None: there is no such file."""
        path, link = self._path(digest), self._directory / name
        link.unlink(missing_ok=True)  # of the same request, whose media process died
        try:
            os.link(path, link)
        except FileNotFoundError:
            return None
        os.utime(link)
        return ImageInput(digest, read_prompt_ids(link), name, self._site, link.stat().st_size)

    def add(self, digest: bytes, image: ProcessedImage) -> None:
        """Writes the file of an image. Raises StoreFull, and ImageError for one that is too large at any time."""
        content = encode_image(digest, image.prompt_ids, image.tensors)
        self._make_room(len(content))
        try:
            self._draft.write_bytes(content)
            self._draft.replace(self._path(digest))
        except OSError as error:
            self._draft.unlink(missing_ok=True)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StoreFull from error
            raise

    def unlink(self, name: str) -> None:
        """Gives back the file that `link` has made available under this name."""
        (self._directory / name).unlink(missing_ok=True)

    def _path(self, digest: bytes) -> Path:
        return self._directory / (digest.hex() + SUFFIX)

    def _make_room(self, size: int) -> None:
        if size > self._limit:
            raise ImageError(f"the model needs {size} bytes for it, and {self._limit} are there. Send a smaller one")
        files = []
        for path in self._directory.glob(f"*{SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):  # another media process has removed it
                files.append((path, path.stat()))
        excess = sum(status.st_size for _, status in files) + size - self._limit
        unused = sorted((status.st_mtime, status.st_size, path) for path, status in files if status.st_nlink == 1)
        for _, freed, path in unused:
            if excess <= 0:
                return
            path.unlink(missing_ok=True)
            excess -= freed
        if excess > 0:
            raise StoreFull
