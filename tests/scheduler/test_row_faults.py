"""Row errors: a row that cannot draw a token ends its own request only, with the reason."""

from tests.scheduler.simulation import Simulation, assert_as_if_alone
from tgi.microkernel.messages.protocol import FinishReason
from tgi.worker.fake_worker.fake_worker import FakeWorkerConfig

WORKER_CONFIG = FakeWorkerConfig(
    pages=64, page_size=4, slots=8, vocab_size=128, max_total_tokens=64, max_batch_prefill_tokens=64
)


def test_only_the_request_of_the_failed_row_ends() -> None:
    sim = Simulation(WORKER_CONFIG)
    sim.worker_up()
    first, failing, last = (sim.add([n, 2, 3], 12, top_n=n) for n in range(3))
    for _ in range(3):
        sim.step()
    known = len(failing.ids)
    sim.plan()
    sim.compute()
    sim.results[0] = sim.results[0]._replace(row_errors=["", "its grammar cannot go on", ""])
    sim.deliver()
    assert failing.end is not None
    assert (failing.end.reason, failing.end.message) == (FinishReason.FAILED, "its grammar cannot go on")
    assert len(failing.ids) == known
    sim.run()
    assert_as_if_alone(first, WORKER_CONFIG)
    assert_as_if_alone(last, WORKER_CONFIG)


def test_the_wrong_number_of_row_errors_fails_the_step() -> None:
    sim = Simulation(WORKER_CONFIG)
    sim.worker_up()
    request = sim.add([1, 2, 3], 4)
    sim.plan()
    sim.compute()
    sim.results[0] = sim.results[0]._replace(row_errors=["", ""])
    sim.deliver()
    sim.run()
    assert_as_if_alone(request, WORKER_CONFIG)  # the step was repeated
    assert sim.scheduler.pipeline.epoch == 2
