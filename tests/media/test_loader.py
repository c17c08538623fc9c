"""What waits for the threads of a media process: turns of clients, bounds, and images that are not wanted any more."""

import threading
from collections.abc import Iterator

import pytest

from tgi.media import loader
from tgi.media.loader import FETCHING_THREADS, LoadingThreads
from tgi.microkernel.links.link import PeerId
from tgi.microkernel.messages.protocol import ImageLoaded, LoadImage, RequestContext

API = PeerId("api", 0, b"a")


class Threads(LoadingThreads):
    """Whose images are loaded one by one: `finish` ends each that has begun, and returns their rids."""

    def __init__(self) -> None:
        self.began: list[int] = []
        self.unlinked: list[str] = []
        self._may_end = threading.Semaphore(0)
        self._woken = threading.Semaphore(0)
        self._lock = threading.Lock()
        super().__init__(self._wait, self.unlinked.append, self._woken.release)

    def _wait(self, message: LoadImage) -> ImageLoaded:
        with self._lock:
            self.began.append(message.rid)
        self._may_end.acquire()
        return ImageLoaded(message.rid)

    def ask(self, rid: int, client: str, url: str = "data:,") -> None:
        self.add(API, LoadImage(rid, f"file-{rid}", url, context=RequestContext(client=client)))

    def finish(self, count: int = 1) -> list[ImageLoaded]:
        found = []
        for _ in range(count):
            self._may_end.release()
            self._woken.acquire()
            found += [answer for _, answer in self.loaded()]
        return found


@pytest.fixture
def threads() -> Iterator[Threads]:
    made = Threads()
    yield made
    made._may_end.release(1000)
    made.shutdown()


def test_clients_take_turns(threads: Threads) -> None:
    for rid in range(5):
        threads.ask(rid, "many")
    threads.ask(5, "one")
    assert [answer.rid for answer in threads.finish(6)] == [0, 1, 5, 2, 3, 4]
    assert not len(threads)


def test_a_client_leaves_a_fetching_thread_to_others(threads: Threads) -> None:
    for rid in range(2 * FETCHING_THREADS):
        threads.ask(rid, "slow hosts", "https://example.com/")
    assert len(threads._fetching.running) == FETCHING_THREADS - 1
    threads.ask(99, "another", "https://example.com/")
    assert threads._fetching.running[-1] == "another"


def test_what_waits_is_bounded(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "MAX_QUEUED", 4)
    monkeypatch.setattr(loader, "MAX_QUEUED_BYTES", 1000)
    for rid in range(5):  # the first is loaded, the others wait
        threads.ask(rid, "many")
    threads.ask(5, "one")
    ((_, refused),) = threads.loaded()
    assert (refused.rid, refused.overloaded) == (4, True)
    threads.cancel(API, 2)
    threads.ask(6, "large", "data:," + 990 * "x")
    ((_, refused),) = threads.loaded()
    assert (refused.rid, refused.overloaded) == (6, True)
    assert [answer.rid for answer in threads.finish(4)] == [0, 1, 5, 3]


def test_what_is_not_wanted_is_not_loaded_or_not_kept(threads: Threads) -> None:
    for rid in range(3):
        threads.ask(rid, "one")
    threads.cancel(API, 1)
    threads.drop(API)
    assert threads.finish() == []
    assert threads.unlinked == ["file-0"]
    assert threads.began == [0]
    assert not len(threads)
