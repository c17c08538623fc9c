"""Encoding jobs: clients take turns, what waits is bounded, and work of clients that have left is dropped."""

import re
import threading
import time
from typing import Any

import pytest

from tests.tokenizer.harness import API, LIMITS, OTHER, PoolHarness, end_messages
from tgi.microkernel.links.link import PeerDisconnected
from tgi.microkernel.messages.protocol import Cancel, End, FinishReason, Generate, RequestContext, Tokenize, Tokenized
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.microkernel.observability import metrics
from tgi.microkernel.recovery.work_register import WorkRegister
from tgi.tokenizer import encoding_jobs
from tgi.tokenizer.encoding_jobs import (
    MAX_INLINE_SIZE,
    MAX_SHORT_SIZE,
    THREADS,
    EncodingJob,
    EncodingQueue,
    ExecutorName,
    JobExecutors,
    executor_for,
)

TEXTS, LONG_TEXTS, GRAMMARS = ExecutorName
LONG = "a b é " * MAX_INLINE_SIZE  # of which no lower bound on the tokens is known
TIMEOUT = 60.0


def job(key: Any, client: str, size: int = 10, executor: ExecutorName = TEXTS) -> EncodingJob:
    return EncodingJob(key, lambda: key, executor, client, size)


def queue_of(*jobs: EncodingJob) -> EncodingQueue:
    queue = EncodingQueue()
    for one in jobs:
        assert queue.add(one) == []
    return queue


def taken(queue: EncodingQueue, executor: ExecutorName = TEXTS) -> list[Any]:
    keys = []
    while (one := queue.take(executor)) is not None:
        keys.append(one.key)
    return keys


def test_executors_by_size() -> None:
    assert [executor_for(size) for size in (MAX_INLINE_SIZE, MAX_INLINE_SIZE + 1, MAX_SHORT_SIZE + 1)] == [
        None, TEXTS, LONG_TEXTS,
    ]  # fmt: skip


def test_clients_take_turns() -> None:
    queue = queue_of(*(job(f"a{n}", "a") for n in range(5)), job("b0", "b"), job("c0", "c"), job("b1", "b"))
    assert taken(queue) == ["a0", "b0", "c0", "a1", "b1", "a2", "a3", "a4"]
    assert len(queue) == 0


def test_a_client_that_is_passed_over_keeps_its_turn() -> None:
    queue = queue_of(job("a0", "a"), job("b0", "b"), job("b1", "b"))
    assert [queue.take(TEXTS, passed_over=["a"]).key for _ in range(2)] == ["b0", "b1"]  # type: ignore[union-attr]
    assert queue.take(TEXTS, passed_over=["a"]) is None
    assert queue.take(GRAMMARS) is None
    assert taken(queue) == ["a0"]


def test_discarded_jobs_leave_no_trace() -> None:
    queue = queue_of(job("a0", "a"), job("a1", "a"), job("b0", "b", 0))
    assert queue.discard("a0")
    assert not queue.discard("a0")
    assert queue.discard("b0")
    assert queue.queued_keys() == ["a1"]
    assert taken(queue) == ["a1"]


def test_the_newest_jobs_of_the_largest_client_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding_jobs, "MAX_QUEUED_JOBS", 4)
    monkeypatch.setattr(encoding_jobs, "MAX_QUEUED_SIZE", 100)
    queue = queue_of(*(job(f"a{n}", "a") for n in range(3)), job("b0", "b", 30))
    assert [one.key for one in queue.add(job("b1", "b"))] == ["a2"]
    assert [one.key for one in queue.add(job("a9", "a"))] == ["a9"]
    assert [one.key for one in queue.add(job("c0", "c", 45, GRAMMARS))] == ["a1"]
    assert [one.key for one in queue.add(job("d0", "d", 20))] == ["b1", "c0"]
    assert taken(queue) == ["a0", "b0", "d0"]


def test_the_last_free_thread_is_kept_for_another_client() -> None:
    assert THREADS[LONG_TEXTS] == 2
    began, release, woken = threading.Semaphore(0), threading.Event(), threading.Event()

    def blocking(key: str) -> EncodingJob:
        def run() -> str:
            began.release()
            release.wait(TIMEOUT)
            return key

        return job(key, key[0], executor=LONG_TEXTS)._replace(run=run)

    executors = JobExecutors(woken.set, WorkRegister())
    queue = queue_of(*(blocking(f"a{n}") for n in range(3)))
    executors.start_jobs(queue)
    assert queue.queued_keys() == ["a1", "a2"]
    queue.add(blocking("b0"))
    executors.start_jobs(queue)
    assert queue.queued_keys() == ["a1", "a2"]
    assert all(began.acquire(timeout=TIMEOUT) for _ in range(2))
    release.set()
    results, end = [], time.monotonic() + TIMEOUT
    while not (executors.idle and not len(queue)) and time.monotonic() < end:
        woken.wait(TIMEOUT)
        results += [result for _, result in executors.completed_jobs()]
        executors.start_jobs(queue)
    assert sorted(results) == ["a0", "a1", "a2", "b0"]
    executors.shutdown()


def test_a_job_on_trial_is_alone_in_progress() -> None:
    register, woken = WorkRegister(), threading.Event()
    seen: dict[str, bytes] = {}
    turn = {key: threading.Event() for key in "abtc"}

    def stating(key: str, executor: ExecutorName = TEXTS, alone: bool = False) -> EncodingJob:
        def run() -> str:
            turn[key].wait(TIMEOUT)
            seen[key] = register.in_progress()
            return key

        return EncodingJob(key, run, executor, key, 1, RequestContext(8 * key.encode()), alone)

    executors = JobExecutors(woken.set, register)
    queue = queue_of(stating("a"), stating("b", GRAMMARS))
    executors.start_jobs(queue)
    queue.add(stating("t", GRAMMARS, alone=True))
    queue.add(stating("c", GRAMMARS))
    executors.start_jobs(queue)
    assert queue.queued_keys() == ["t", "c"]  # the trial waits for the others, and all later ones for the trial

    def finish(key: str) -> None:
        turn[key].set()
        results: list[str] = []
        while not results:
            woken.wait(TIMEOUT)
            woken.clear()
            results = [result for _, result in executors.completed_jobs()]
            executors.start_jobs(queue)
        assert results == [key]

    finish("a")
    assert queue.queued_keys() == ["t", "c"]
    finish("b")
    assert queue.queued_keys() == ["c"]
    executors.start_jobs(queue)
    assert queue.queued_keys() == ["c"]
    finish("t")
    assert seen["t"] == b"tttttttt"
    finish("c")
    assert executors.idle
    assert register.in_progress() == b""
    executors.shutdown()


def test_the_pool_makes_a_trial_of_a_suspect() -> None:
    harness = PoolHarness()
    generate = Generate(1, "Hello", SamplingParams(1), alone=True, context=RequestContext(b"12345678"))
    harness.pool.handle(API, generate)
    assert harness.received_by(harness.scheduler) == []
    (trial,) = harness.pool.jobs.trials.values()
    assert trial.context == generate.context
    executors = JobExecutors(lambda: None, WorkRegister())
    executors.start_jobs(harness.pool.jobs)
    assert executors.idle  # it runs in the loop
    harness.pool.run_trials()
    (add,) = harness.received_by(harness.scheduler)
    assert add.context.fingerprint == b"12345678"
    harness.pool.handle(API, generate._replace(rid=2))
    harness.pool.handle(API, Cancel(2))
    assert not harness.pool.jobs.trials


def dropped(cause: str) -> float:
    prefix = f'tgi_encoding_jobs_dropped{{cause="{cause}"}} '
    found = (line.removeprefix(prefix) for line in metrics.render().splitlines() if line.startswith(prefix))
    return float(next(found, 0))


def test_jobs_of_absent_clients_are_dropped() -> None:
    harness, before = PoolHarness(), dropped("cancelled")
    for rid in range(1, 21):
        harness.pool.handle(API, Generate(rid, LONG, SamplingParams(1)))
        harness.pool.handle(OTHER, Generate(rid, "x", SamplingParams(1), grammar=b'{"regex": "%d"}' % rid))
        harness.pool.handle(OTHER, Tokenize(100 + rid, LONG))
    harness.pool.handle(API, Tokenize(50, LONG))
    running = harness.pool.jobs.take(TEXTS)
    assert running is not None
    for rid in range(1, 21):
        harness.pool.handle(API, Cancel(rid))
    harness.pool.handle(API, Cancel(50))
    harness.pool.handle(OTHER, PeerDisconnected())
    assert len(harness.pool.jobs) == 0
    assert dropped("cancelled") - before == 19 + 20 + 20 + 1
    ends = end_messages(harness.received_by(API))
    assert [(end.rid, end.reason) for end in ends] == [(rid, FinishReason.CANCELLED) for rid in (*range(1, 21), 50)]
    harness.pool.complete_job(running.key, running.run())
    assert harness.received_by(API) == harness.received_by(harness.scheduler) == []
    assert harness.pool.idle


def test_what_exceeds_the_queue_is_refused_as_overload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding_jobs, "MAX_QUEUED_JOBS", 2)
    harness, before = PoolHarness(), dropped("overloaded")
    harness.pool.handle(API, Generate(1, LONG, SamplingParams(1), truncate=5))
    harness.pool.handle(API, Tokenize(2, LONG))
    harness.pool.handle(API, Tokenize(3, LONG))
    harness.pool.handle(API, Generate(4, LONG, SamplingParams(1)))
    tokenized, end = harness.received_by(API)
    assert isinstance(tokenized, Tokenized)
    assert (tokenized.rid, tokenized.reason) == (3, FinishReason.OVERLOADED)
    assert isinstance(end, End)
    assert (end.rid, end.reason) == (4, FinishReason.OVERLOADED)
    assert dropped("overloaded") - before == 2
    harness.run_jobs()
    assert len(harness.received_by(harness.scheduler)) == 1


def test_a_prompt_that_is_too_long_is_refused_before_its_grammar_is_compiled() -> None:
    harness = PoolHarness()
    harness.pool.handle(API, Generate(1, LONG, SamplingParams(1), grammar=b'{"regex": "a"}'))
    assert harness.run_jobs() == [TEXTS]
    (end,) = end_messages(harness.received_by(API))
    assert end.message.startswith("`inputs` tokens + `max_new_tokens` must be <= 2048")


@pytest.mark.parametrize("new", [None, 5, 5000])
def test_a_text_that_can_never_fit_is_refused_before_it_is_encoded(new: int | None) -> None:
    """The message is that of the exact count, which is only known to be at least some number."""
    harness, text = PoolHarness(), "the " * 20_000
    harness.pool.handle(API, Generate(1, text, SamplingParams(1), new))
    assert len(harness.pool.jobs) == 0
    harness.pool.handle(API, Generate(2, text + "é", SamplingParams(1), new))  # no lower bound is known
    assert harness.run_jobs() == [TEXTS]
    early, exact = end_messages(harness.received_by(API))
    assert re.sub("at least ", "", early.message).split(" Given: ")[0] == exact.message.split(" Given: ")[0]
    found, count = (int(re.search(r"(\d+) `inputs` tokens", end.message)[1]) for end in (early, exact))  # type: ignore[index]
    assert LIMITS.max_total_tokens < found <= count
    harness.pool.handle(API, Generate(3, text, SamplingParams(1), new, truncate=5))
    assert harness.run_jobs() == [TEXTS]
