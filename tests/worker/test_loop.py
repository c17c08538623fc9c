"""The worker's loop over real sockets: a real child process with the scripted engine, and engines that fail."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.models import model
from tests.worker.test_scripted import SCRIPT, good, slot, step
from tgi.kernel import rundir
from tgi.kernel.link import Gone, Link, Peer
from tgi.kernel.messages import Result, Step
from tgi.kernel.presence import PROTOCOL, Hello, Status
from tgi.kernel.settings import Settings
from tgi.kernel.spawn import Child, Spec
from tgi.worker.loop import DEPTH, Loop, Poisoned
from tgi.worker.scripted import ScriptedEngine, ScriptedWorker

TIMEOUT = 30.0
PROMPT = step(1, [(0, 0, 6, 1)], [slot(0, [1, 2, 3, 4, 5, 6])], [(0, 0), (0, 1)])
NEXT = step(2, [(0, 6, 1, 1)])


class Scheduler:
    """The upper end of the worker's link, as a test drives it."""

    def __init__(self, run: Path, boot: bytes = b"12345678") -> None:
        self.link = Link.bind(f"ipc://{run}/sched-0.back", Hello(PROTOCOL, "scheduler", 0, boot))
        self.inbox: list[tuple[Peer, Any]] = []

    def until(self, wanted: Callable[[Any], bool]) -> Any:
        """The next message that is wanted; what came before it is skipped."""
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

    def result(self) -> Result:
        return self.until(lambda message: isinstance(message, Result))


class FakeProcess:
    """What the loop needs of its process, in a thread of the test."""

    def __init__(self) -> None:
        self.settings = Settings()
        self.stopping = False
        self.states: list[str] = []

    def watch(self, link: Link) -> None:
        self.link = link

    def wait(self, timeout: float) -> None:
        self.link.socket.poll(0 if self.link.pending else min(timeout, 0.05) * 1000, zmq.POLLIN)

    def wake(self) -> None:
        pass

    def state(self, state: str, stage: str = "", percent: int = 0) -> None:
        self.states.append(state)

    def promise(self, seconds: float) -> None:
        pass


class Running:
    """A loop with this engine in a thread, connected to a scheduler."""

    def __init__(self, run: Path, engine: Any) -> None:
        self.scheduler = Scheduler(run)
        self.process = FakeProcess()
        self.error: BaseException | None = None
        hello = Hello(PROTOCOL, "worker", 0, b"worker-1")
        self.loop = Loop(self.process, Link.connect(f"ipc://{run}/sched-0.back", hello))  # type: ignore[arg-type]
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


class Saving(ScriptedEngine):
    """An engine that has something to do while nobody waits, in three parts, after every step."""

    def __init__(self) -> None:
        super().__init__(SCRIPT)
        self.left = 3
        self.finished = threading.Event()

    def launch(self, step: Step) -> Result:
        self.left = 3
        self.finished.clear()
        return super().launch(step)

    def spare(self) -> bool:
        self.left = max(self.left - 1, 0)
        if not self.left:
            self.finished.set()
        return self.left > 0


class Queueing(ScriptedEngine):
    """An engine whose device takes its time: steps are done when the test says so."""

    def __init__(self) -> None:
        super().__init__(SCRIPT)
        self.launched = 0
        self.resets = 0
        self.finish = threading.Event()

    def reset(self) -> None:
        self.resets += 1
        super().reset()

    def launch(self, step: Step) -> Result:
        self.launched += 1
        return super().launch(step)

    def done(self, pending: Result) -> bool:
        return self.finish.is_set()

    def collect(self, pending: Result) -> Result:
        assert self.finish.wait(TIMEOUT)
        return pending


class Failing(ScriptedEngine):
    """An engine whose second step raises."""

    def __init__(self, error: Exception) -> None:
        super().__init__(SCRIPT)
        self.error = error

    def launch(self, step: Step) -> Result:
        if step.number == 2:
            raise self.error
        return super().launch(step)


def expected(*steps: Step) -> list[list[int]]:
    worker = ScriptedWorker(SCRIPT)
    return [good(worker.run_step(one)) for one in steps]


def test_a_worker_process_serves_one_scheduler_after_another(tmp_path: Path) -> None:
    """Results come in order, a scheduler's new life finds a clean worker, and SIGTERM ends it with code 0."""
    rundir.create(tmp_path)
    limits = {"max_batch_size": 3, "max_total_tokens": 24}
    settings = Settings(worker="scripted", model_dir=model("llama"), run_dir=tmp_path, **limits)
    child = Child(Spec("worker", 0), settings)
    try:
        for boot in (b"first---", b"second--"):
            scheduler = Scheduler(tmp_path, boot)
            limits = scheduler.ready().limits
            assert limits is not None
            assert (limits.max_batch_size, limits.max_total_tokens, limits.max_input_tokens) == (3, 24, 23)
            first = PROMPT._replace(page_slots=PROMPT.page_slots[:4], page_ids=PROMPT.page_ids[:4])
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


def test_two_steps_are_under_way_and_no_third(start: Callable[[Any], Running]) -> None:
    engine = Queueing()
    running = start(engine)
    running.scheduler.ready()
    steps = [PROMPT, NEXT, step(3, [(0, 7, 1, 1)], pages=[(0, 2)])]
    running.scheduler.send(*steps)
    end = time.monotonic() + TIMEOUT
    while engine.launched < DEPTH and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.05)
    assert engine.launched == DEPTH
    engine.finish.set()
    assert [good(running.scheduler.result()) for _ in steps] == expected(*steps)


def test_what_saves_time_later_is_done_while_nobody_waits(start: Callable[[Any], Running]) -> None:
    engine = Saving()
    running = start(engine)
    running.scheduler.ready()
    assert engine.finished.wait(TIMEOUT)
    for one in (PROMPT, NEXT):
        running.scheduler.send(one)
        assert running.scheduler.result().number == one.number
        assert engine.finished.wait(TIMEOUT)


def test_a_step_that_raises_is_answered_and_the_worker_goes_on(start: Callable[[Any], Running]) -> None:
    running = start(Failing(ValueError("no such thing")))
    running.scheduler.ready()
    again = PROMPT._replace(epoch=2)
    running.scheduler.send(PROMPT, NEXT, again)
    assert running.scheduler.result().number == 1
    failed = running.scheduler.result()
    assert (failed.number, failed.epoch, failed.error, failed.ids) == (2, 1, "ValueError: no such thing", b"")
    assert [good(running.scheduler.result())] == expected(again)


@pytest.mark.parametrize("error", [MemoryError(), Poisoned("CUDA error: an illegal memory access")])
def test_a_worker_that_cannot_go_on_ends_without_an_answer(start: Callable[[Any], Running], error: Exception) -> None:
    running = start(Failing(error))
    running.scheduler.ready()
    running.scheduler.send(PROMPT, NEXT)
    assert running.scheduler.result().number == 1
    running._thread.join(TIMEOUT)
    assert isinstance(running.error, Poisoned)
    assert not [message for _, message in running.scheduler.link.receive() if not isinstance(message, Gone)]


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


def test_progress_reaches_a_scheduler_that_comes_up_while_loading(tmp_path: Path) -> None:
    process = FakeProcess()
    hello = Hello(PROTOCOL, "worker", 0, b"worker-1")
    link = Link.connect(f"ipc://{tmp_path}/sched-0.back", hello)
    loop = Loop(process, link)  # type: ignore[arg-type]
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
