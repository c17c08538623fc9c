"""Images of other hosts: a request waits outside of the queue until the worker has its images, and others do not."""

from typing import Any

import pytest

from tests.scheduler.invariants import check_scheduler
from tests.scheduler.test_images import SECOND, TOKENIZER, WORKER, add
from tgi.microkernel.links.link import PeerDisconnected, PeerId
from tgi.microkernel.messages.codec import INT32, pack_column
from tgi.microkernel.messages.protocol import (
    IMAGE_CHUNK_BYTES,
    PROTOCOL,
    Add,
    Cancel,
    End,
    FetchImage,
    Hello,
    ImageChunk,
    ImageSegment,
    NeedImage,
    Status,
    Step,
    encode,
)
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.scheduler.image_transfers import TRANSFER_SECONDS
from tgi.scheduler.scheduler import Scheduler, SchedulerConfig
from tgi.worker.fake_worker.fake_worker import FakeWorker, FakeWorkerConfig

HERE, THERE = "1" * 16, "2" * 16  # run directories
OTHER = PeerId("tokenizer", 1, b"u")
SIZE = 3 * IMAGE_CHUNK_BYTES
REMOTE = ImageSegment(4, 6, b"%016d" % 4, "4.safetensors", HERE, SIZE)
ALSO = SECOND._replace(site=HERE, size=SIZE)
TEXT = Add(9, pack_column(INT32, range(3, 23)), 4, encode(SamplingParams(0)))
ARRIVED, OFFERED = FetchImage(0, REMOTE.digest, SIZE), NeedImage(REMOTE.digest, SIZE)
NOT_NEEDED = NeedImage(REMOTE.digest, 0)


class Driven:
    """A scheduler whose worker is on another host than the front ends, driven by a test."""

    def __init__(self, site: str = THERE) -> None:
        self.scheduler, self.now, self.site = Scheduler(SchedulerConfig()), 0.0, site
        self.worker = FakeWorker(FakeWorkerConfig(page_size=4))
        for peer in (TOKENIZER, OTHER):
            self.handle(Hello(PROTOCOL, *peer), peer)
        self.connect()

    def connect(self) -> None:
        self.handle(Hello(PROTOCOL, *WORKER, site=self.site), WORKER)
        self.handle(Status(True, True, "", 100, self.worker.limits), WORKER)

    def handle(self, message: Any, peer: PeerId = TOKENIZER) -> None:
        self.scheduler.handle(message, peer, self.now)
        check_scheduler(self.scheduler)

    def told(self, peer: PeerId = WORKER) -> list[Any]:
        """What the peer is sent about images, and Ends."""
        self.scheduler.report_status(self.now)
        kinds = (NeedImage, FetchImage, End)
        return [message for to, message in self.scheduler.outgoing() if to == peer and isinstance(message, kinds)]

    def slots(self) -> int:
        """Requests that the next step begins. It is computed."""
        if (step := self.scheduler.plan(self.now)) is None:
            return 0
        assert isinstance(step, Step)
        self.handle(self.worker.run_step(step), WORKER)
        self.scheduler.commit()
        return len(step.slots)


def test_only_requests_with_images_wait() -> None:
    driven = Driven()
    driven.handle(add(1, [REMOTE]))
    driven.handle(add(2, [REMOTE]), OTHER)
    assert driven.told() == [OFFERED]
    driven.handle(TEXT)
    assert driven.scheduler.queued == 3
    assert driven.slots() == 1
    for offset in (0, IMAGE_CHUNK_BYTES):
        driven.handle(FetchImage(0, REMOTE.digest, offset), WORKER)
        assert driven.told(TOKENIZER) == [FetchImage(1, REMOTE.digest, offset)]
    driven.handle(ARRIVED, WORKER)
    assert driven.told(OTHER) == []
    assert driven.slots() == 2
    driven.handle(add(3, [REMOTE]))
    assert driven.slots() == 1  # it is there
    for rid, peer in ((1, TOKENIZER), (2, OTHER)):
        driven.handle(Cancel(rid), peer)
        assert NOT_NEEDED not in driven.told()
    driven.handle(Cancel(3))
    assert driven.told() == [NOT_NEEDED]


def test_images_of_the_workers_own_host() -> None:
    driven = Driven(HERE)
    driven.handle(add(1, [REMOTE]))
    assert driven.told() == []
    assert driven.slots() == 1


def test_a_request_waits_for_all_of_its_images() -> None:
    driven = Driven()
    driven.handle(add(1, [REMOTE, ALSO]))
    assert driven.told() == [OFFERED, NeedImage(ALSO.digest, SIZE)]
    driven.handle(ARRIVED, WORKER)
    assert driven.slots() == 0
    driven.handle(ARRIVED._replace(digest=ALSO.digest), WORKER)
    assert driven.slots() == 1


@pytest.mark.parametrize("lost", [PeerDisconnected(), Cancel(1)])
def test_the_request_over_which_an_image_comes_ends(lost: Any) -> None:
    """The worker is told again, and asks over another one; or that it is not needed any more."""
    driven = Driven()
    driven.handle(add(1, [REMOTE]))
    driven.handle(add(2, [REMOTE]), OTHER)
    driven.handle(FetchImage(0, REMOTE.digest, 0), WORKER)
    driven.told()
    driven.handle(lost)
    assert driven.told() == [OFFERED]
    driven.handle(FetchImage(0, REMOTE.digest, IMAGE_CHUNK_BYTES), WORKER)
    assert driven.told(OTHER) == [FetchImage(2, REMOTE.digest, IMAGE_CHUNK_BYTES)]
    driven.handle(PeerDisconnected(), OTHER)
    assert driven.told() == [NOT_NEEDED]
    driven.handle(ARRIVED, WORKER)  # it has crossed
    assert driven.scheduler.queued == 0


@pytest.mark.parametrize("received", [False, True])
def test_a_worker_that_is_lost_gets_all_images_anew(received: bool) -> None:
    """Waiting or running, a request waits for the images of the next worker; not if that is on the front ends' host."""
    driven = Driven()
    driven.handle(add(1, [REMOTE]))
    driven.told()
    if received:
        driven.handle(ARRIVED, WORKER)
        assert driven.slots() == 1
    driven.handle(PeerDisconnected(), WORKER)
    driven.connect()
    assert driven.told() == [OFFERED]
    assert driven.slots() == 0
    driven.handle(PeerDisconnected(), WORKER)
    driven.site = HERE
    driven.connect()
    assert driven.told() == []
    assert driven.slots() == 1


def test_images_that_do_not_come() -> None:
    """The worker cannot keep one, a front end cannot read one, and one makes no progress: each ends its requests."""
    driven = Driven()
    driven.handle(add(1, [REMOTE]))
    driven.handle(FetchImage(0, REMOTE.digest, 0, "no space"), WORKER)
    assert [(end.rid, end.reason, end.message) for end in driven.told(TOKENIZER)] == [(1, "generation", "no space")]
    driven.handle(add(4, [REMOTE]))
    driven.handle(FetchImage(0, REMOTE.digest, 0, "no room now", overloaded=True), WORKER)
    assert [(end.rid, end.reason) for end in driven.told(TOKENIZER)] == [(4, "overloaded")]
    driven.handle(add(2, [REMOTE]))
    driven.handle(add(3, [REMOTE]), OTHER)
    driven.handle(ImageChunk(2, REMOTE.digest, 0, b"", "it is gone"))
    assert [end.message for end in driven.told(TOKENIZER)] == ["it is gone"]
    assert driven.scheduler.queued == 1
    driven.handle(TEXT)
    driven.now = TRANSFER_SECONDS - 1
    assert driven.told(OTHER) == []
    assert driven.scheduler.deadline(driven.now) == TRANSFER_SECONDS
    driven.now = TRANSFER_SECONDS
    assert ["within 60 s" in end.message for end in driven.told(OTHER)] == [True]
    assert driven.slots() == 1


def test_images_that_have_not_had_their_turn() -> None:
    """The worker asks for few images at a time. The others have as long from the latest chunk of any, and as long
    again if one that is asked for does not come."""
    driven = Driven()
    driven.handle(add(1, [REMOTE]))
    driven.handle(add(2, [ALSO]), OTHER)
    driven.handle(FetchImage(0, REMOTE.digest, 0), WORKER)
    driven.now = TRANSFER_SECONDS - 1
    driven.handle(FetchImage(0, REMOTE.digest, IMAGE_CHUNK_BYTES), WORKER)
    driven.now = TRANSFER_SECONDS
    assert [one for one in driven.told(OTHER) if isinstance(one, End)] == []
    driven.now = 2 * TRANSFER_SECONDS
    assert [one.rid for one in driven.told(TOKENIZER) if isinstance(one, End)] == [1]
    assert [one for one in driven.told(OTHER) if isinstance(one, End)] == []
    assert driven.scheduler.deadline(driven.now) == 3 * TRANSFER_SECONDS
    driven.now = 3 * TRANSFER_SECONDS
    assert [one.rid for one in driven.told(OTHER)] == [2]


def test_a_scheduler_that_waits_for_images_alone_is_not_late() -> None:
    driven = Driven()
    driven.handle(add(1, [REMOTE]))
    for driven.now in range(int(TRANSFER_SECONDS)):
        beat = driven.scheduler.beat(driven.now)
        assert beat.progress_age_ms is not None
        assert beat.progress_age_ms < beat.limit_ms


@pytest.mark.parametrize("size", [0, -1, 1 << 31])
def test_a_size_that_no_file_has(size: int) -> None:
    driven = Driven()
    driven.handle(add(1, [REMOTE._replace(size=size)]))
    (end,) = driven.told(TOKENIZER)
    assert end.reason == "validation"
