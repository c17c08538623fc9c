"""The worker loop over real sockets: a child process with the fake engine, and engines that are slow or fail."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.models import model
from tests.worker.test_fake_worker import SCRIPT, good, slot, step
from tgi.microkernel.host import rundir
from tgi.microkernel.links.link import Link, PeerDisconnected, PeerId
from tgi.microkernel.messages.protocol import PIPELINE_DEPTH, PROTOCOL, Hello, Status, Step, StepResult
from tgi.microkernel.processes.child import ChildProcess, ProcessSpec
from tgi.microkernel.settings.table import Settings
from tgi.worker.engine.interface import OutOfMemory, Poisoned
from tgi.worker.engine.loop import WorkerLoop
from tgi.worker.fake_worker.fake_worker import FakeEngine, FakeWorker

TIMEOUT = 30.0
PROMPT = step(1, [(0, 0, 6, 1)], [slot(0, [1, 2, 3, 4, 5, 6])], [(0, 0), (0, 1)])
NEXT = step(2, [(0, 6, 1, 1)])


class Scheduler:
    """A scheduler's end of the link, driven by the test."""

    def __init__(self, run: Path, boot: bytes = b"12345678") -> None:
        self.link = Link.bind(f"ipc://{run}/sched-0.back", Hello(PROTOCOL, "scheduler", 0, boot))
        self.inbox: list[tuple[PeerId, Any]] = []

    def until(self, wanted: Callable[[Any], bool]) -> Any:
        """The next message that `wanted` accepts; earlier ones are skipped."""
        end = time.monotonic() + TIMEOUT
        while time.monotonic() < end:
            while self.inbox:
                self.peer, message = self.inbox.pop(0)
                if wanted(message):
                    return message
            self.link.socket.poll(50, zmq.POLLIN)
            self.inbox += self.link.receive()
        raise AssertionError("the worker did not say what was expected of it")

    def ready(self) -> Status:
        return self.until(lambda message: isinstance(message, Status) and message.ready)

    def send(self, *steps: Step) -> None:
        for one in steps:
            self.link.send(self.peer, one)
        self.link.flush()

    def result(self) -> StepResult:
        return self.until(lambda message: isinstance(message, StepResult))


class FakeProcess:
    """The parts of Process that the loop uses, for a thread of the test."""

    def __init__(self) -> None:
        self.settings = Settings()
        self.stopping = False
        self.states: list[str] = []
        self.works: list[tuple[str, float]] = []  # what has begun, and when

    def watch_link(self, link: Link) -> None:
        self.link = link

    def wait(self, timeout: float) -> None:
        self.link.socket.poll(0 if self.link.has_pending_work else min(timeout, 0.05) * 1000, zmq.POLLIN)

    def wake_loop(self) -> None:
        pass

    def publish_state(self, state: str, stage: str = "", percent: int = 0) -> None:
        self.states.append(state)

    beat_due = False

    def begin_work(self, seconds: float, work: str, began_at: float) -> None:
        self.works.append((work, began_at))

    def end_work(self) -> None:
        pass

    def extend_deadline(self, seconds: float) -> None:
        pass


class Running:
    """A worker loop with this engine in a thread, connected to a scheduler."""

    def __init__(self, run: Path, engine: Any) -> None:
        self.scheduler = Scheduler(run)
        self.process = FakeProcess()
        self.error: BaseException | None = None
        hello = Hello(PROTOCOL, "worker", 0, b"worker-1")
        self.loop = WorkerLoop(self.process, Link.connect(f"ipc://{run}/sched-0.back", hello))  # type: ignore[arg-type]
        self._thread = threading.Thread(target=self._run, args=(engine,))
        self._thread.start()

    def _run(self, engine: Any) -> None:
        try:
            self.loop.serve(engine)
        except BaseException as error:
            self.error = error

    def stop(self) -> None:
        self.process.stopping = True
        self._thread.join(TIMEOUT)
        assert not self._thread.is_alive()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[Any], Running]]:
    running: list[Running] = []

    def make(engine: Any) -> Running:
        running.append(Running(tmp_path, engine))
        return running[-1]

    yield make
    for one in running:
        one.stop()
        one.scheduler.link.close()


class Saving(FakeEngine):
    """An engine that has memory to prefault, in three parts, after each step."""

    def __init__(self) -> None:
        super().__init__(SCRIPT)
        self.left = 3
        self.finished, self.released = threading.Event(), threading.Event()

    def launch(self, step: Step) -> StepResult:
        self.left = 3
        self.finished.clear()
        self.released.clear()
        return super().launch(step)

    def prefault_memory(self) -> bool:
        self.left = max(self.left - 1, 0)
        if not self.left:
            self.finished.set()
        return self.left > 0

    def release_memory(self) -> None:
        assert not self.left
        self.released.set()


class Queueing(FakeEngine):
    """An engine with an asynchronous device: the test decides when a step is done."""

    def __init__(self) -> None:
        super().__init__(SCRIPT)
        self.launched = 0
        self.resets = 0
        self.finish = threading.Event()

    def reset(self) -> None:
        self.resets += 1
        super().reset()

    def launch(self, step: Step) -> StepResult:
        self.launched += 1
        return super().launch(step)

    def is_done(self, pending: StepResult) -> bool:
        return self.finish.is_set()

    def collect(self, pending: StepResult) -> StepResult:
        assert self.finish.wait(TIMEOUT)
        return pending


class Failing(FakeEngine):
    """An engine whose second step raises."""

    def __init__(self, error: Exception) -> None:
        super().__init__(SCRIPT)
        self.error = error

    def launch(self, step: Step) -> StepResult:
        if step.number == 2:
            raise self.error
        return super().launch(step)


def expected(*steps: Step) -> list[list[int]]:
    worker = FakeWorker(SCRIPT)
    return [good(worker.run_step(one)) for one in steps]


def test_a_worker_process_serves_one_scheduler_after_another(tmp_path: Path) -> None:
    """Results arrive in order, a restarted scheduler finds an empty worker, and SIGTERM ends it with code 0."""
    rundir.create_run_dir(tmp_path)
    limits = {"max_batch_size": 3, "max_total_tokens": 24}
    settings = Settings(worker="scripted", model_dir=model("llama"), run_dir=tmp_path, **limits)
    child = ChildProcess(ProcessSpec("worker", 0), settings)
    try:
        for boot in (b"first---", b"second--"):
            scheduler = Scheduler(tmp_path, boot)
            limits = scheduler.ready().limits
            assert limits is not None
            assert (limits.max_batch_size, limits.max_total_tokens, limits.max_input_tokens) == (3, 24, 23)
            first = PROMPT._replace(page_tables=PROMPT.page_tables[:4], page_ids=PROMPT.page_ids[:4])
            scheduler.send(first, NEXT)
            results = [scheduler.result(), scheduler.result()]
            assert [result.number for result in results] == [1, 2]
            assert all(good(result) for result in results)
            scheduler.link.close()
        child.signal(signal.SIGTERM)
        end = time.monotonic() + TIMEOUT
        while child.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
        assert child.poll() == 0
    finally:
        child.signal(signal.SIGKILL)
        child.close()


def test_at_most_two_steps_are_in_flight(start: Callable[[Any], Running]) -> None:
    engine = Queueing()
    running = start(engine)
    running.scheduler.ready()
    steps = [PROMPT, NEXT, step(3, [(0, 7, 1, 1)], pages=[(0, 2)])]
    running.scheduler.send(*steps)
    end = time.monotonic() + TIMEOUT
    while engine.launched < PIPELINE_DEPTH and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.05)
    assert engine.launched == PIPELINE_DEPTH
    engine.finish.set()
    assert [good(running.scheduler.result()) for _ in steps] == expected(*steps)


def test_memory_is_prefaulted_while_idle(start: Callable[[Any], Running]) -> None:
    engine = Saving()
    running = start(engine)
    running.scheduler.ready()
    assert engine.finished.wait(TIMEOUT)
    for one in (PROMPT, NEXT):
        running.scheduler.send(one)
        assert running.scheduler.result().number == one.number
        assert engine.finished.wait(TIMEOUT)
    assert engine.released.wait(TIMEOUT)


def test_a_step_that_raises_is_answered_and_the_worker_continues(start: Callable[[Any], Running]) -> None:
    running = start(Failing(ValueError("no such thing")))
    running.scheduler.ready()
    again = PROMPT._replace(epoch=2)
    running.scheduler.send(PROMPT, NEXT, again)
    assert running.scheduler.result().number == 1
    failed = running.scheduler.result()
    assert (failed.number, failed.epoch, failed.error, failed.token_ids) == (2, 1, "ValueError: no such thing", b"")
    assert [good(running.scheduler.result())] == expected(again)


@pytest.mark.parametrize("error", [MemoryError(), OutOfMemory("2 GiB"), RuntimeError("can't allocate memory: 9 bytes")])
def test_a_lack_of_memory_fails_the_step_and_the_worker_continues(
    start: Callable[[Any], Running], error: Exception
) -> None:
    running = start(Failing(error))
    running.scheduler.ready()
    again = PROMPT._replace(epoch=2)
    running.scheduler.send(PROMPT, NEXT, again)
    assert not running.scheduler.result().out_of_memory
    failed = running.scheduler.result()
    assert (failed.number, failed.out_of_memory) == (2, True)
    assert failed.error.startswith(type(error).__name__)
    assert [good(running.scheduler.result())] == expected(again)


def test_a_rank_group_that_lacks_memory_says_so_before_it_ends(start: Callable[[Any], Running]) -> None:
    error = Poisoned("OutOfMemory in step 2")
    error.__cause__ = OutOfMemory("2 GiB")
    running = start(Failing(error))
    running.scheduler.ready()
    running.scheduler.send(PROMPT, NEXT)
    assert [running.scheduler.result().out_of_memory for _ in range(2)] == [False, True]
    running._thread.join(TIMEOUT)
    assert isinstance(running.error, Poisoned)


def test_a_poisoned_worker_exits_without_an_answer(start: Callable[[Any], Running]) -> None:
    running = start(Failing(Poisoned("CUDA error: an illegal memory access")))
    running.scheduler.ready()
    running.scheduler.send(PROMPT, NEXT)
    assert running.scheduler.result().number == 1
    running._thread.join(TIMEOUT)
    assert isinstance(running.error, Poisoned)
    assert not [message for _, message in running.scheduler.link.receive() if not isinstance(message, PeerDisconnected)]


def test_a_step_keeps_its_age_when_the_next_one_is_launched(start: Callable[[Any], Running]) -> None:
    engine = Queueing()
    running = start(engine)
    running.scheduler.ready()
    works = running.process.works
    for count, one in enumerate((PROMPT, NEXT), 1):
        running.scheduler.send(one)
        while len(works) < count:
            time.sleep(0.001)
    engine.finish.set()
    assert [running.scheduler.result().number for _ in range(2)] == [1, 2]
    (first, began), (second, second_began), (third, third_began) = works[:3]
    assert (first, second, third) == ("step 1 of epoch 1: 1 rows", first, "step 2 of epoch 1: 1 rows")
    assert began == second_began < third_began


def test_steps_of_an_old_epoch_are_dropped(start: Callable[[Any], Running]) -> None:
    engine = Queueing()
    engine.finish.set()
    running = start(engine)
    running.scheduler.ready()
    newer = PROMPT._replace(epoch=3)
    running.scheduler.send(newer, NEXT._replace(epoch=2), NEXT._replace(epoch=3))
    first, second = running.scheduler.result(), running.scheduler.result()
    assert (first.number, first.epoch, second.number, second.epoch) == (1, 3, 2, 3)
    assert [good(first), good(second)] == expected(newer, NEXT._replace(epoch=3))
    assert engine.launched == 2


def test_progress_reaches_a_scheduler_that_connects_while_loading(tmp_path: Path) -> None:
    process = FakeProcess()
    hello = Hello(PROTOCOL, "worker", 0, b"worker-1")
    link = Link.connect(f"ipc://{tmp_path}/sched-0.back", hello)
    loop = WorkerLoop(process, link)  # type: ignore[arg-type]
    scheduler = Scheduler(tmp_path)
    seen: list[Status] = []
    end = time.monotonic() + TIMEOUT
    percent = 0
    while not seen and time.monotonic() < end:
        percent += 1
        loop.progress("loading weights", percent)
        time.sleep(0.01)
        seen = [message for _, message in scheduler.link.receive() if isinstance(message, Status)]
    assert (seen[0].ready, seen[0].stage) == (False, "loading weights")
    assert set(process.states) == {"starting"}
    link.close()
    scheduler.link.close()
