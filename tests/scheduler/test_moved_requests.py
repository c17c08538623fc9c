"""A generation that its front end moves to another tokenizer while the first one is stopped: computed once."""

from tests.scheduler.invariants import check_scheduler
from tgi.microkernel.links.link import PeerId
from tgi.microkernel.messages.codec import INT32, pack_column
from tgi.microkernel.messages.protocol import PROTOCOL, Add, End, FinishReason, Hello, RequestContext, Status, encode
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.scheduler.scheduler import Scheduler, SchedulerConfig
from tgi.worker.fake_worker.fake_worker import FakeWorker, FakeWorkerConfig

STOPPED, LIVING = PeerId("tokenizer", 0, b"0"), PeerId("tokenizer", 1, b"1")
WORKER = PeerId("worker", 0, b"w")


class Harness:
    """A scheduler with two tokenizers and a worker."""

    def __init__(self) -> None:
        self.scheduler, self.worker = Scheduler(SchedulerConfig()), FakeWorker(FakeWorkerConfig())
        for peer in (STOPPED, LIVING, WORKER):
            self.scheduler.handle(Hello(PROTOCOL, *peer), peer, 0.0)
        self.scheduler.handle(Status(True, True, "", 100, self.worker.limits), WORKER, 0.0)

    def submit(self, tokenizer: PeerId, rid: int, attempt: int) -> None:
        prompt, sampling = pack_column(INT32, [1, 2, 3]), encode(SamplingParams(0))
        self.scheduler.handle(
            Add(rid, prompt, 10, sampling, context=RequestContext(generation_id=77, attempt=attempt)), tokenizer, 0.0
        )

    def compute(self, steps: int) -> None:
        for _ in range(steps):
            if (step := self.scheduler.plan(0.0)) is not None:
                self.scheduler.handle(self.worker.run_step(step), WORKER, 0.0)
            self.scheduler.commit()

    def ends(self) -> list[tuple[PeerId, int, str]]:
        return [(peer, end.rid, end.reason) for peer, end in self.scheduler.outgoing() if isinstance(end, End)]


def test_a_later_submission_replaces_an_earlier_one() -> None:
    harness = Harness()
    harness.submit(STOPPED, 5, attempt=1)
    harness.compute(3)
    assert harness.ends() == []
    harness.submit(LIVING, 9, attempt=2)
    assert harness.ends() == [(STOPPED, 5, FinishReason.CANCELLED)]
    harness.compute(20)
    assert harness.ends() == [(LIVING, 9, FinishReason.LENGTH)]
    check_scheduler(harness.scheduler)
    assert not harness.scheduler._generations


def test_an_earlier_submission_that_arrives_late_is_ended() -> None:
    """The first tokenizer continues after the scheduler was restarted, and submits its requests again."""
    harness = Harness()
    harness.submit(LIVING, 9, attempt=2)
    harness.compute(3)
    harness.submit(STOPPED, 5, attempt=1)
    assert harness.ends() == [(STOPPED, 5, FinishReason.CANCELLED)]
    harness.compute(20)
    assert harness.ends() == [(LIVING, 9, FinishReason.LENGTH)]
    check_scheduler(harness.scheduler)
    assert not harness.scheduler._generations
