"""Journals go on in new files at idle moments, and each file is repeated bit for bit on its own."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scheduler.simulation import Simulation
from tgi.microkernel.messages.protocol import Add
from tgi.microkernel.observability.flight_recorder import RingRecorder
from tgi.microkernel.recovery.work_register import WorkRegister
from tgi.scheduler.journal import MAX_FILES, SUFFIX, JournalWriter, RecordedScheduler, read_journal
from tgi.scheduler.replay import replay
from tgi.scheduler.scheduler import SchedulerConfig
from tgi.worker.fake_worker.fake_worker import FakeWorkerConfig

WORKER = FakeWorkerConfig(pages=64, page_size=4, slots=6, max_total_tokens=64, max_batch_prefill_tokens=32)


def recorded(directory: Path, config: SchedulerConfig, limit_bytes: int, boot: bytes = b"boot") -> Simulation:
    """A simulation with a worker and two tokenizers, whose scheduler keeps a journal, recorder and register."""
    sim = Simulation(WORKER, config, tokenizers=0)
    journal = JournalWriter(directory / "journals", boot, config, limit_bytes)
    sim.scheduler = RecordedScheduler(config, journal, RingRecorder(directory / "ring"), WorkRegister())
    sim.names_requests = True
    for index in range(2):
        sim.tokenizer_up(index)
    sim.worker_up()
    return sim


def recorded_scheduler(sim: Simulation) -> RecordedScheduler:
    assert isinstance(sim.scheduler, RecordedScheduler)
    return sim.scheduler


def files(directory: Path) -> list[Path]:
    return sorted((directory / "journals").glob(f"*{SUFFIX}"))


def load(sim: Simulation, rounds: int, seed: int = 0) -> Iterator[None]:
    """Requests that wait and run all the time: some preempted, cancelled or with drafts, and lost workers."""
    random_source = random.Random(seed)
    for number in range(rounds):
        while len([one for one in sim.requests if one.end is None]) < 12:
            prompt = [random_source.randrange(1, 4) for _ in range(random_source.randrange(1, 30))]
            client = random_source.choice("ab")
            request = sim.add(
                prompt, random_source.randrange(1, 30), tokenizer=random_source.randrange(2), client=client
            )
            if random_source.random() < 0.1:
                sim.cancel(request)
        if random_source.random() < 0.01:
            sim.worker_down()
            sim.worker_up()
        if random_source.random() < 0.01:
            sim.adapters.request_update("a", random_source.choice([None, "one", "two"]))
        sim.step()
        sim.advance_time(random_source.random() / 100)
        for tokenizer in sim.tokenizers.values():  # what has ended is of no interest
            tokenizer.requests = {rid: one for rid, one in tokenizer.requests.items() if one.end is None}
        assert sim.scheduler.running + sim.scheduler.queued > 0
        if number % 10 == 0:
            sim.check()
        yield


def idle_moment(sim: Simulation) -> None:
    """All requests end; the scheduler may begin a new file."""
    sim.run()
    recorded_scheduler(sim).begin_file_when_idle(sim.now)


@pytest.mark.parametrize(("max_drafts", "limit"), [(0, 150_000), (3, 200_000)])
def test_a_journal_goes_on_in_files_that_are_repeated_on_their_own(tmp_path: Path, max_drafts: int, limit: int) -> None:
    sim = recorded(tmp_path, SchedulerConfig(max_drafts=max_drafts), limit)
    seen = set()
    for number, _ in enumerate(load(sim, 800)):
        recorded_scheduler(sim).begin_file_when_idle(sim.now)  # it is not idle
        if number % 100 == 99:
            idle_moment(sim)
        seen |= set(files(tmp_path))
        assert sum(path.stat().st_size for path in files(tmp_path)) <= limit
    kept = files(tmp_path)
    assert len(seen) > len(kept) > 1
    assert kept == sorted(seen)[-len(kept) :]  # the oldest have been removed
    assert sim.scheduler.counters.worker_losses
    assert sim.scheduler.config.first_epoch > 1
    for path in kept:
        journal = read_journal(path)
        assert path == kept[-1] or any(isinstance(call.message, Add) for call in journal.calls)
        assert replay(journal) is None, path.name


def test_a_journal_of_constant_load_goes_on_when_there_is_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sim = recorded(tmp_path, SchedulerConfig(), 30_000)
    for _ in load(sim, 300):
        recorded_scheduler(sim).begin_file_when_idle(sim.now)
    assert caplog.text.count("has reached --journal-size") == 1
    (first,) = files(tmp_path)
    assert replay(read_journal(first)) is None  # is kept until the next one needs its place
    idle_moment(sim)
    sim.add([1, 2, 3])
    sim.run()
    assert replay(read_journal(files(tmp_path)[-1])) is None
    assert files(tmp_path) != [first]


def test_a_changed_decision_is_found(tmp_path: Path) -> None:
    sim = recorded(tmp_path, SchedulerConfig(), 400_000)
    for _ in load(sim, 100):
        pass
    journal = read_journal(files(tmp_path)[-1])
    changed = [number for number, call in enumerate(journal.calls) if call.method == "plan" and call.digest][5]
    journal.calls[changed] = journal.calls[changed]._replace(digest=1)
    found = replay(journal)
    assert found is not None
    assert found.number == changed


def test_files_of_earlier_lives_are_removed_first(tmp_path: Path) -> None:
    config = SchedulerConfig()
    for life in range(MAX_FILES + 10):
        JournalWriter(tmp_path / "journals", bytes([life]), config, 1 << 20).close()
    left = {path.name for path in files(tmp_path)}
    assert len(left) <= MAX_FILES + 1
    assert f"scheduler-{MAX_FILES + 9:02x}-0000{SUFFIX}" in left
    assert f"scheduler-00-0000{SUFFIX}" not in left


def test_a_directory_that_is_gone_ends_the_journal_and_not_the_scheduler(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sim = recorded(tmp_path, SchedulerConfig(), 400_000)
    for _ in load(sim, 400):
        pass
    (tmp_path / "journals").rename(tmp_path / "elsewhere")
    idle_moment(sim)
    idle_moment(sim)
    assert caplog.text.count("cannot be written") == 1
