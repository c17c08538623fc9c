"""The tokenizer process: a thin loop between two links and the pool."""

import gc
import logging
import os
import queue
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from tgi.hub.card import read_card
from tgi.kernel import tracing
from tgi.kernel.link import Link
from tgi.kernel.process import Process
from tgi.tokenizer.chat import Chats
from tgi.tokenizer.pool import Job, Lane, Pool
from tgi.tokenizer.vocabulary import Vocabulary

log = logging.getLogger(__name__)

IDLE_SECONDS = 60.0


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


def main(process: Process) -> None:
    """Serves apis on "tok-<place>.front" through the scheduler at "sched-0.front", until told to stop and drained."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one text at a time: the package's threads would only disturb
    process.state("starting", "loading the tokenizer")
    card = read_card(process.settings.model_dir)
    tracer = tracing.tracer(process.settings, process.name)
    pool = Pool(Vocabulary.load(card), Chats.load(card), tracer=tracer)
    hello = process.hello(card.fingerprint)
    front = Link.bind(process.address(f"tok-{process.place}.front"), hello)
    down = Link.connect(process.address("sched-0.front"), hello)
    process.watch(front)
    process.watch(down)
    gc.collect()
    gc.freeze()
    process.state("ready")
    threads = Threads(process.wake)
    while not (process.stopping and pool.idle and threads.idle):
        if process.stopping:
            process.state("draining")
        process.wait(IDLE_SECONDS)
        turn(pool, front, down, threads)
    threads.close()
    down.close()
    front.close()
    if tracer is not None:
        tracer.close()


def turn(pool: Pool, front: Link, down: Link, threads: Threads) -> None:
    """One round: all that has come in, then all that it leads to."""
    for link in (down, front):
        for peer, message in link.receive():
            pool.handle(peer, message)
    for job, result in threads.results():
        pool.finished(job.key, result)
    while pool.jobs:
        threads.start(pool.jobs.popleft())
    for peer, message in pool.outgoing():
        (down if peer.role == "scheduler" else front).send(peer, message)
    front.flush()
    down.flush()
