"""The media directory: what links keep, and what gives way."""

import os
from pathlib import Path

import numpy as np
import pytest

from tgi.media.fetcher import ImageError
from tgi.media.processor import ProcessedImage
from tgi.media.store import MediaStore, StoreFull
from tgi.microkernel.messages.protocol import ImageInput

A, B, C = (letter * 16 for letter in (b"a", b"b", b"c"))


def picture(number: int = 0) -> ProcessedImage:
    return ProcessedImage(b"\1\0\0\0" * (number + 1), {"pixel_values": np.full(1000, number, dtype=np.float32)})


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_links_keep_files_and_the_least_recently_used_gives_way(tmp_path: Path) -> None:
    store = MediaStore(tmp_path, "media-0", "site", limit=10_000)
    assert store.link(A, "api-0-1") is None
    for digest, number in ((A, 0), (B, 1)):
        store.add(digest, picture(number))
    os.utime(store._path(A), (1, 1))
    os.utime(store._path(B), (2, 2))
    found = store.link(A, "api-0-1")
    assert found == ImageInput(A, picture(0).prompt_ids, "api-0-1", "site", store._path(A).stat().st_size)
    store.add(C, picture())  # A is linked, so B gives way
    assert names(tmp_path) == {f"{A.hex()}.safetensors", f"{C.hex()}.safetensors", "api-0-1"}
    assert store.link(C, "api-0-2") is not None
    with pytest.raises(StoreFull):
        store.add(B, picture())
    store.unlink("api-0-1")
    store.add(B, picture())
    assert names(tmp_path) == {f"{B.hex()}.safetensors", f"{C.hex()}.safetensors", "api-0-2"}
    assert store.link(C, "api-0-2") is not None  # of a request that is repeated


def test_a_file_larger_than_the_directory_is_an_error_of_its_image(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match=r"the model needs .* bytes for it, and 1000 are there"):
        MediaStore(tmp_path, "media-0", "site", limit=1000).add(A, picture())


def test_a_successor_removes_what_was_left_unfinished(tmp_path: Path) -> None:
    (tmp_path / "media-0.draft").write_bytes(b"half")
    MediaStore(tmp_path, "media-0", "site")
    assert names(tmp_path) == set()
