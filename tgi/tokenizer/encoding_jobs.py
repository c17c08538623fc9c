"""Encoding in threads: the rule which requests are too long for the process loop, and the threads themselves."""

import queue
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from enum import StrEnum
from typing import Any, NamedTuple

from tgi.microkernel.protocol import Generate, Tokenize

# In characters of text, or bytes of a chat or of ids (some 3 ms of encoding). Larger requests are encoded in a thread,
# so that the streams of other requests continue.
MAX_INLINE_SIZE = 8 << 10
# Cost of one character of a bad word, in characters of a prompt: each word is encoded separately, in two forms.
BAD_WORD_COST = 16
# A chat that contains this may have tools, whose grammar is compiled in a thread.
TOOLS_KEY = b'"tools"'


class ExecutorName(StrEnum):
    """The executors, each of one thread. The values are the thread names."""

    TEXTS = "encode"
    GRAMMARS = "grammar"


class EncodingJob(NamedTuple):
    """Work for a thread: `run` is called there, and TokenizerPool.complete_job gets `key` and what it returned."""

    key: Any
    run: Callable[[], Any]
    executor: ExecutorName


def executor_for(message: Generate | Tokenize) -> ExecutorName | None:
    """The executor that encodes this request; None: the loop encodes it at once."""
    if isinstance(message, Generate) and (message.grammar or TOOLS_KEY in message.chat):
        return ExecutorName.GRAMMARS
    size = len(message.inputs) + len(message.chat)
    if isinstance(message, Generate):
        size += len(message.input_ids) + BAD_WORD_COST * sum(map(len, message.bad_words))
    return ExecutorName.TEXTS if size > MAX_INLINE_SIZE else None


class JobExecutors:
    """One thread per ExecutorName, which runs its jobs in order. Calls `wake` after each job."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._executors = {name: ThreadPoolExecutor(1, name) for name in ExecutorName}
        self._wake = wake
        self._completed: queue.SimpleQueue[tuple[EncodingJob, Future[Any]]] = queue.SimpleQueue()
        self._pending = 0

    @property
    def idle(self) -> bool:
        """Whether all results have been taken."""
        return self._pending == 0

    def submit(self, job: EncodingJob) -> None:
        """Queues a job."""

        def done(future: Future[Any]) -> None:
            self._completed.put((job, future))
            self._wake()

        self._pending += 1
        self._executors[job.executor].submit(job.run).add_done_callback(done)

    def completed_jobs(self) -> Iterator[tuple[EncodingJob, Any]]:
        """Yields each completed job once, with its result. Raises what the job raised."""
        while not self._completed.empty():
            job, future = self._completed.get()
            self._pending -= 1
            yield job, future.result()

    def shutdown(self) -> None:
        """Ends the threads. Call it when `idle`."""
        for executor in self._executors.values():
            executor.shutdown()
