"""Encoding in threads: which requests are too expensive for the process loop, their fair queue, and the threads."""

import queue
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from enum import StrEnum
from typing import Any, NamedTuple

from tgi.microkernel.host.heap import release_freed_memory
from tgi.microkernel.messages.protocol import Generate, RequestContext, Tokenize
from tgi.microkernel.recovery.work_register import WorkRegister

# In characters of text, or bytes of a chat or of ids (some 3 ms of encoding). Larger requests are encoded in a thread,
# so that the streams of other requests continue.
MAX_INLINE_SIZE = 8 << 10
# Some 50 ms of encoding. Larger requests have threads of their own, so that others do not wait for seconds.
MAX_SHORT_SIZE = 128 << 10
# Cost of one character of a bad word, in characters of a prompt: each word is encoded separately, in two forms.
BAD_WORD_COST = 16
# Limits on what waits for a thread. `size` is in characters or bytes, see MAX_INLINE_SIZE.
MAX_QUEUED_JOBS = 1024
MAX_QUEUED_SIZE = 64 << 20


class ExecutorName(StrEnum):
    """The executors. The values are the thread names."""

    TEXTS = "encode"
    LONG_TEXTS = "encode-long"
    GRAMMARS = "grammar"


# The last free thread of an executor is kept for a client without a running job there: with two threads a client has
# one at a time, and never delays another client by a whole job.
THREADS = dict.fromkeys(ExecutorName, 2)


class EncodingJob(NamedTuple):
    """Work for a thread: `run` is called there, and TokenizerPool.complete_job gets `key` and what it returned."""

    key: Any  # hashable
    run: Callable[[], Any]
    executor: ExecutorName
    client: str  # whose turn it takes
    size: int
    context: RequestContext = RequestContext()
    alone: bool = False  # it is on trial for a crash: no other job runs at the same time


def encoding_size(message: Generate | Tokenize) -> int:
    """What the encoding of a request costs, in characters of a prompt."""
    size = len(message.inputs) + len(message.chat)
    if isinstance(message, Tokenize):
        size += len(message.ids)
    else:
        if message.pooling is not None:
            size += len(message.pooling.pair or "")
        size += len(message.input_ids) + BAD_WORD_COST * sum(map(len, message.bad_words))
    return size


def executor_for(size: int) -> ExecutorName | None:
    """The executor that encodes a request of this size; None: the loop encodes it at once."""
    if size <= MAX_INLINE_SIZE:
        return None
    return ExecutorName.TEXTS if size <= MAX_SHORT_SIZE else ExecutorName.LONG_TEXTS


class EncodingQueue:
    """The jobs that wait for a thread. Clients take turns, job by job; the number and the size of all are bounded."""

    def __init__(self) -> None:
        # Per executor, the clients in the order of their turns, each with its jobs by key, oldest first.
        self._turns: dict[ExecutorName, OrderedDict[str, dict[Hashable, EncodingJob]]] = {
            name: OrderedDict() for name in ExecutorName
        }
        self.trials: dict[Hashable, EncodingJob] = {}  # jobs that must run alone, oldest first; few, and not bounded
        self._jobs: dict[Hashable, EncodingJob] = {}  # all others, oldest first
        self._counts: Counter[str] = Counter()  # jobs per client
        self._sizes: Counter[str] = Counter()  # sum of their sizes

    def __len__(self) -> int:
        return len(self.trials) + len(self._jobs)

    def queued_keys(self) -> list[Any]:
        return [*self.trials, *self._jobs]

    def add(self, job: EncodingJob) -> list[EncodingJob]:
        """Queues a job. Returns the jobs that must be refused for it: the newest of the client that has the most."""
        if job.alone:
            self.trials[job.key] = job
            return []
        if job.key in self._jobs:
            return [job]  # a peer has used the number of a queued request again
        self._turns[job.executor].setdefault(job.client, {})[job.key] = job
        self._jobs[job.key] = job
        self._counts[job.client] += 1
        self._sizes[job.client] += job.size
        refused = []
        while len(self._jobs) > MAX_QUEUED_JOBS or self._sizes.total() > MAX_QUEUED_SIZE:
            loads = self._counts if len(self._jobs) > MAX_QUEUED_JOBS else self._sizes
            ((client, _),) = loads.most_common(1)
            newest = next(one for one in reversed(self._jobs.values()) if one.client == client)
            self.discard(newest.key)
            refused.append(newest)
        return refused

    def discard(self, key: Hashable) -> bool:
        """Removes the job of this key. Returns False if none waits."""
        if self.trials.pop(key, None) is not None:
            return True
        job = self._jobs.pop(key, None)
        if job is None:
            return False
        clients = self._turns[job.executor]
        del clients[job.client][key]
        if not clients[job.client]:
            del clients[job.client]
        for loads, amount in ((self._counts, 1), (self._sizes, job.size)):
            loads[job.client] -= amount
            if not loads[job.client]:
                del loads[job.client]
        return True

    def take(self, executor: ExecutorName, passed_over: Collection[str] = ()) -> EncodingJob | None:
        """Removes and returns the next job of an executor: the oldest one of the client whose turn it is, except for
        the clients `passed_over`, which keep their turn."""
        clients = self._turns[executor]
        client = next((client for client in clients if client not in passed_over), None)
        if client is None:
            return None
        job = next(iter(clients[client].values()))
        clients.move_to_end(client)
        self.discard(job.key)
        return job

    def take_trial(self, in_loop: bool) -> EncodingJob | None:
        """Removes and returns the oldest of `trials`, if it is one for the loop, or one for a thread. Texts are tried
        in the loop, where the watchdog ends this process if they hang it; a grammar has a limit on its time."""
        job = next(iter(self.trials.values()), None)
        if job is None or in_loop == (job.executor is ExecutorName.GRAMMARS):
            return None
        return self.trials.pop(job.key)


class JobExecutors:
    """The threads. Calls `wake` after each job. Each thread states its job in a unit of the work register; unit 0 is
    the loop's."""

    def __init__(self, wake: Callable[[], None], work_register: WorkRegister) -> None:
        self._work_register = work_register
        self._free_units: queue.SimpleQueue[int] = queue.SimpleQueue()
        for unit in range(1, len(work_register.units)):
            self._free_units.put(unit)
        self._began: dict[int, float] = {}  # by unit: when its job began
        self._trial_running = False
        self._executors = {name: ThreadPoolExecutor(THREADS[name], name) for name in ExecutorName}
        self._running: dict[ExecutorName, list[str]] = {name: [] for name in ExecutorName}  # the jobs' clients
        self._wake = wake
        self._completed: queue.SimpleQueue[tuple[EncodingJob, Future[Any]]] = queue.SimpleQueue()

    @property
    def idle(self) -> bool:
        """Whether all results have been taken."""
        return not any(self._running.values())

    def start_jobs(self, jobs: EncodingQueue) -> None:
        """Starts queued jobs on the free threads. A job on trial runs alone, before all that are not."""
        if not jobs or self._trial_running:
            return
        if jobs.trials:
            if self.idle and (trial := jobs.take_trial(in_loop=False)) is not None:
                self._trial_running = True
                self._start(trial)
            return
        for name, running in self._running.items():
            while (free := THREADS[name] - len(running)) > 0:
                job = jobs.take(name, passed_over=running if free == 1 else ())
                if job is None:
                    break
                self._start(job)

    def completed_jobs(self) -> Iterator[tuple[EncodingJob, Any]]:
        """Yields each completed job once, with its result. Raises what the job raised."""
        while not self._completed.empty():
            job, future = self._completed.get()
            self._running[job.executor].remove(job.client)
            self._trial_running = False  # a trial was the only job
            yield job, future.result()

    def longest_seconds(self) -> float:
        """For how long the job that has run longest has run; 0 if none runs."""
        began = list(self._began.values())
        return time.monotonic() - min(began) if began else 0.0

    def shutdown(self) -> None:
        """Ends the threads. Call it when `idle`."""
        for executor in self._executors.values():
            executor.shutdown()

    def _start(self, job: EncodingJob) -> None:
        self._running[job.executor].append(job.client)

        def done(future: Future[Any]) -> None:
            self._completed.put((job, future))
            self._wake()

        self._executors[job.executor].submit(self._run, job).add_done_callback(done)

    def _run(self, job: EncodingJob) -> Any:
        unit = self._free_units.get()
        self._began[unit] = time.monotonic()
        try:
            with self._work_register.working_on(job.context, unit):
                return job.run()
        finally:
            del self._began[unit]
            self._free_units.put(unit)
            if job.size > MAX_SHORT_SIZE:
                release_freed_memory()  # up to 200 bytes per character of the text
