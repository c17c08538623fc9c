"""Pages that the worker keeps in files are found by a later worker and scheduler."""

import pytest

from tests.scheduler.simulation import Simulation, assert_as_if_alone, replay
from tgi.microkernel.messages.kv_groups import GroupKind, KVGroup
from tgi.microkernel.messages.protocol import PAGE_KEY_BYTES, PagesTransferred, StoredPages, TransferPages
from tgi.scheduler.scheduler import Scheduler
from tgi.worker.fake_worker.fake_worker import FakeWorkerConfig

CONFIG = FakeWorkerConfig(
    pages=64, page_size=4, slots=8, vocab_size=128, max_total_tokens=64, max_batch_prefill_tokens=256
)
PROMPT = [*range(40)]  # 10 pages, of which the last is computed always: its row samples


def simulation(most_files: int = 1000, config: FakeWorkerConfig = CONFIG) -> Simulation:
    sim = Simulation(config)
    sim.files, sim.most_files = {}, most_files
    sim.adapters.preload("a", "one")
    sim.worker_up()
    return sim


def finish(sim: Simulation) -> int:
    """Runs all requests and transfers to the end. Returns the tokens that were found in the prefix cache."""
    found = sim.scheduler.counters.cache_hit_tokens
    sim.run()
    while sim.scheduler.deadline(sim.now) == sim.now or sim.steps or sim.transfers:
        sim.step()
    sim.check()
    assert sim.scheduler.pages_used == 0
    for request in sim.requests:
        assert_as_if_alone(request, sim.worker_config)
    return sim.scheduler.counters.cache_hit_tokens - found


@pytest.mark.parametrize("restart", ["worker", "scheduler and worker"])
@pytest.mark.parametrize("adapted", [False, True])
def test_a_prefix_is_read_after_a_restart(restart: str, adapted: bool) -> None:
    sim = simulation()
    adapter = sim.adapters.loaded()[0] if adapted else None
    sim.add(PROMPT, 9, adapter=adapter)
    assert finish(sim) == 0
    assert sim.files is not None
    assert len(sim.files) == 48 // 4  # the last id is sampled and not computed
    sim.worker_up()
    if restart != "worker":
        sim.engine.__init__(CONFIG)  # type: ignore[misc]
        sim.adapters.worker_started()
        sim.restart_scheduler()
    sim.add(PROMPT, 4, adapter=adapter)
    sim.add([*PROMPT[:20], 99, 99, 99, 99, 99], 4, adapter=adapter)
    sim.add(PROMPT, 4, adapter=None if adapted else sim.adapters.loaded()[0])  # other keys and values
    assert finish(sim) == 36 + 20
    messages, steps = replay(sim.journal, Scheduler(sim.scheduler.config))
    assert (messages, steps) == (sim.received, sim.sent)


def test_pages_before_a_lost_file_are_read() -> None:
    sim = simulation()
    sim.add(PROMPT)
    finish(sim)
    sim.worker_up()
    assert sim.files is not None
    del sim.files[[*sim.files][5]]  # unnoticed, so that the scheduler asks for it
    sim.add(PROMPT)
    assert 0 < finish(sim) < 36
    sim.worker_up()
    sim.add(PROMPT)  # the page was computed, and written, again
    assert finish(sim) == 36


@pytest.mark.parametrize("transfer", ["written", "read"])
def test_pages_in_memory_outlive_the_worker_whatever_it_was_transferring(transfer: str) -> None:
    sim = simulation()
    sim.add(PROMPT, 9)
    if transfer == "read":
        finish(sim)
        sim.worker_up()
        sim.add(PROMPT, 9)
    for _ in range(5):
        sim.plan()
        sim.compute()
        sim.deliver()
        sim.begin_others()
    assert {message.load for message in sim.transfers} == {transfer == "read"}
    sim.worker_up(keeps_pages=True)
    assert sim.scheduler._planner is not None
    assert sim.scheduler._planner.kv_cache.pool.available == CONFIG.pages
    sim.add(PROMPT, 9)
    assert finish(sim) >= 36


def test_files_are_bounded_and_the_end_of_a_prefix_goes_first() -> None:
    sim = simulation(most_files=12)
    sim.add(PROMPT, 1)
    finish(sim)
    sim.add([100, *range(23)], 1)  # six pages, of which the simulation checks the bound
    finish(sim)
    sim.worker_up()
    sim.add(PROMPT, 1)
    assert finish(sim) == (12 - 6) * 4


def test_pages_of_failed_steps_are_not_written() -> None:
    sim = simulation()
    sim.broken.add(100)
    sim.add(PROMPT, 9)
    sim.step()
    sim.add([100, *PROMPT], 4)
    sim.add([101, *PROMPT], 4)
    while sim.step():
        pass
    sim.broken.clear()
    written = {key for message in sim.received if isinstance(message[1], TransferPages) for key in _keys(message[1])}
    assert sim.files is not None
    assert written == set(sim.files)
    sim.worker_up()
    sim.add(PROMPT, 9)
    sim.add([101, *PROMPT], 4)
    sim.run()
    for request in sim.requests:
        if request.prompt[0] != 100:
            assert_as_if_alone(request, CONFIG)


def test_a_new_journal_keeps_the_files() -> None:
    sim = simulation()
    sim.add(PROMPT)
    finish(sim)
    assert sim.scheduler.idle
    sim.begin_again_when_idle()
    sim.add(PROMPT)
    assert finish(sim) == 36
    messages, steps = replay(sim.journal, Scheduler(sim.scheduler.config))
    assert (messages, steps) == (sim.received, sim.sent)


def test_what_no_worker_reports_is_not_used() -> None:
    sliding = (KVGroup(), KVGroup(GroupKind.SLIDING, 5))
    for config in (CONFIG, CONFIG._replace(groups=sliding)):
        sim = Simulation(config)
        sim.worker_up()
        assert sim.worker is not None
        good = StoredPages(bytes(PAGE_KEY_BYTES), 1)
        bad = [good] if config is not CONFIG else [good._replace(most=0), good._replace(keys=b"short")]
        for report in bad:
            sim.handle(report, sim.worker)
            sim.handle(sim.adapters.worker_status(), sim.worker)
            sim.handle(PagesTransferred(1, 5), sim.worker)
            sim.add(PROMPT)
            sim.run()
            assert not any(isinstance(message, TransferPages) for _, message in sim.received)


def _keys(message: TransferPages) -> list[bytes]:
    size = PAGE_KEY_BYTES
    return [message.keys[begin : begin + size] for begin in range(0, len(message.keys), size) if not message.load]
