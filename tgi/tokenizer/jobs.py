"""Work that is too long for the loop: what that is, and the threads beside it."""

import queue
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from enum import StrEnum
from typing import Any, NamedTuple

from tgi.kernel.messages import Generate, Tokenize

# A text of more characters than this (some 3 ms), or a chat or ids of more bytes, is encoded in a thread: the streams
# of others go on meanwhile.
LONG_TEXT = 8 << 10
# A character of a bad word costs as much as this many of a text: each word is encoded by itself, in two forms.
BAD_WORD_COST = 16
# A chat with this in it may have tools, and they a grammar to be compiled.
TOOLS = b'"tools"'


class Lane(StrEnum):
    """Jobs of a lane are done one after the other, and lanes side by side."""

    TEXTS = "encode"
    GRAMMARS = "grammar"


class Job(NamedTuple):
    """Work to be done in a thread: `result` is called there, and given to `Pool.finished` with `key`."""

    key: Any
    result: Callable[[], Any]
    lane: Lane


def lane_of(asked: Generate | Tokenize) -> Lane | None:
    """Where this is encoded; None: at once, in the loop."""
    if isinstance(asked, Generate) and (asked.grammar or TOOLS in asked.chat):
        return Lane.GRAMMARS
    size = len(asked.inputs) + len(asked.chat)
    if isinstance(asked, Generate):
        size += len(asked.input_ids) + BAD_WORD_COST * sum(map(len, asked.bad_words))
    return Lane.TEXTS if size > LONG_TEXT else None


class Threads:
    """Runs the jobs of each lane one after the other beside the loop, and calls `wake` when one is done."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._executors = {lane: ThreadPoolExecutor(1, lane) for lane in Lane}
        self._wake = wake
        self._results: queue.SimpleQueue[tuple[Job, Future[Any]]] = queue.SimpleQueue()
        self._open = 0

    @property
    def idle(self) -> bool:
        """Whether no result is to come."""
        return self._open == 0

    def start(self, job: Job) -> None:
        """Takes a job."""

        def done(future: Future[Any]) -> None:
            self._results.put((job, future))
            self._wake()

        self._open += 1
        self._executors[job.lane].submit(job.result).add_done_callback(done)

    def results(self) -> Iterator[tuple[Job, Any]]:
        """The jobs that are done, each once, with what they returned. What a job raised is raised here."""
        while not self._results.empty():
            job, future = self._results.get()
            self._open -= 1
            yield job, future.result()

    def close(self) -> None:
        """To be called when it is idle."""
        for executor in self._executors.values():
            executor.shutdown()
