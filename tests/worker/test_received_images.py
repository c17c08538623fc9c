"""The files of images that come from other hosts: asked for in chunks, checked, kept within a limit."""

import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tgi.hub.image_file import encode_image, read_prompt_ids
from tgi.microkernel.messages.protocol import IMAGE_CHUNK_BYTES, FetchImage, ImageChunk, NeedImage
from tgi.worker.vision.received_images import MAX_ARRIVING, WINDOW, ReceivedImages, received_path

CHUNKS = 7


def digest(number: int) -> bytes:
    return b"%016d" % number


@cache
def content(number: int, chunks: float = CHUNKS - 0.5) -> bytes:
    """The file of an image with this many chunks."""
    values = np.random.default_rng(number).integers(0, 256, int(chunks * IMAGE_CHUNK_BYTES), dtype=np.uint8)
    return encode_image(digest(number), b"\1\0\0\0", {"pixel_values": values})


class Worker:
    """A worker's images, and a sender that has those of `files`."""

    def __init__(self, directory: Path, limit: int = 1 << 30) -> None:
        self.woken = threading.Event()
        self.directory = directory / "received"
        self.images = ReceivedImages(self.directory, self.woken.set, limit)
        self.files: dict[bytes, bytes] = {}
        self.asked: list[FetchImage] = []
        self.ended: list[FetchImage] = []  # it has all, or there is an error

    def need(self, number: int, data: bytes | None = None) -> None:
        self.files[digest(number)] = data or content(number)
        self.images.need(NeedImage(digest(number), len(self.files[digest(number)])))

    def turn(self) -> None:
        """What a worker's loop does; `asked` grows."""
        for message in self.images.take_answers():
            ends = message.error or message.offset == len(self.files[message.digest])
            (self.ended if ends else self.asked).append(message)

    def answer(self) -> None:
        """Sends what was asked for."""
        asked, self.asked = self.asked, []
        for _, key, offset, *_ in asked:
            self.images.receive(ImageChunk(1, key, offset, self.files[key][offset : offset + IMAGE_CHUNK_BYTES]))

    def run(self, ends: int = 1) -> list[FetchImage]:
        """Until this many images have ended."""
        while len(self.ended) < ends:
            self.turn()
            self.answer()
            if len(self.ended) < ends and not self.asked:
                assert self.woken.wait(30)
                self.woken.clear()
        ended, self.ended = self.ended, []
        return ended

    def names(self) -> set[str]:
        return {path.name for path in self.directory.iterdir()}


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    made = Worker(tmp_path)
    yield made
    made.images.close()
    assert not [name for name in made.names() if name.endswith(".draft")]


def test_an_image_comes_in_chunks_a_few_ahead(worker: Worker) -> None:
    worker.need(1)
    worker.turn()
    assert [one.offset for one in worker.asked] == [IMAGE_CHUNK_BYTES * at for at in range(WINDOW)]
    assert worker.run() == [FetchImage(0, digest(1), len(content(1)))]
    path = received_path(worker.directory, digest(1))
    assert path.read_bytes() == content(1)
    assert read_prompt_ids(path) == b"\1\0\0\0"
    assert worker.names() == {path.name}
    worker.need(1)  # it is there
    worker.turn()
    assert (worker.asked, len(worker.ended)) == ([], 1)


def test_chunks_that_come_twice_or_out_of_order_are_ignored(worker: Worker) -> None:
    worker.need(1)
    worker.turn()
    lost, *rest = worker.asked
    worker.asked = rest
    worker.answer()  # without the first: none fits
    worker.images.receive(ImageChunk(1, digest(2), 0, b"of another image"))
    worker.need(1)  # the request over which it came has ended
    worker.turn()
    assert [one.offset for one in worker.asked] == [lost.offset, *(one.offset for one in rest)]
    worker.asked += worker.asked
    assert worker.run()[0].error == ""
    assert received_path(worker.directory, digest(1)).read_bytes() == content(1)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda data: data[:-9] + b"x" + data[-8:], "its checksum does not match"),
        (lambda data: encode_image(digest(2), b"", {"pixel_values": np.zeros(9)}), "it is that of another image"),
        (lambda data: b"\xff" * 100, "it cannot be read"),
        (lambda data: b"", ""),
    ],
)
def test_what_is_not_the_image_is_refused(worker: Worker, damage, said: str) -> None:  # type: ignore[no-untyped-def]
    data = damage(content(1, 1.5))
    if not data:
        worker.need(1)
        worker.turn()
        worker.images.receive(ImageChunk(1, digest(1), 0, b""))
        said = "a part of an image has 0 bytes"
    else:
        worker.need(1, data)
    (end,) = worker.run()
    assert said in end.error
    worker.need(1, content(1, 1.5))  # it may come again
    assert worker.run()[0].error == ""


def test_images_that_are_not_needed_any_more(worker: Worker) -> None:
    """One that has come in part is removed; so is all that comes when the scheduler is lost."""
    for number in (1, 2):
        worker.need(number)
    worker.turn()
    worker.answer()
    worker.images.need(NeedImage(digest(1), 0))
    assert worker.run()[0].digest == digest(2)
    assert worker.names() == {received_path(worker.directory, digest(2)).name}
    worker.need(3)
    worker.turn()
    worker.images.reset()
    worker.need(1)
    assert worker.run()[0].digest == digest(1)


def test_few_images_arrive_at_the_same_time(worker: Worker) -> None:
    for number in range(MAX_ARRIVING + 2):
        worker.need(number, content(number, 1.5))
    worker.turn()
    assert {one.digest for one in worker.asked} == {digest(number) for number in range(MAX_ARRIVING)}
    assert len(worker.asked) <= WINDOW * MAX_ARRIVING
    assert {one.digest for one in worker.run(MAX_ARRIVING + 2)} == {*worker.files}


def test_the_least_recently_used_gives_way_to_those_that_are_needed(tmp_path: Path) -> None:
    size = len(content(1, 1.5))
    worker = Worker(tmp_path, limit=2 * size + size // 2)
    for number in (1, 2):
        worker.need(number, content(number, 1.5))
        worker.run()
    worker.images.need(NeedImage(digest(1), 0))
    worker.need(3, content(3, 1.5))
    assert worker.run()[0].error == ""
    assert worker.names() == {received_path(worker.directory, digest(number)).name for number in (2, 3)}
    worker.need(4, content(4, 1.5))  # the others are needed
    (end,) = worker.run()
    assert ("take all memory" in end.error, end.overloaded) == (True, True)
    worker.need(5, content(5, 4.5))
    (end,) = worker.run()
    assert (f"{len(content(5, 4.5))} bytes" in end.error, end.overloaded) == (True, False)
    worker.images.close()


def test_a_successor_removes_what_was_left_unfinished(tmp_path: Path) -> None:
    first = Worker(tmp_path)
    first.need(1)
    first.turn()
    first.answer()
    assert any(name.endswith(".draft") for name in first.names())
    second = Worker(tmp_path)  # without `close`: the first was killed
    assert second.names() == set()
    first.images.close()
    second.images.close()
