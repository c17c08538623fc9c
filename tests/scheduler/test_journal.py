"""Journals under constant load: the scheduler never is idle, and each file is repeated bit for bit on its own."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.scheduler.simulation import Simulation
from tgi.microkernel.codec import pack_values
from tgi.microkernel.errors import UserError
from tgi.microkernel.flight_recorder import RingRecorder
from tgi.microkernel.work_register import WorkRegister
from tgi.scheduler.journal import MAX_FILES, SUFFIX, JournalWriter, RecordedScheduler, read_journal
from tgi.scheduler.replay import RecordedRun, ReplayChanges, estimate
from tgi.scheduler.scheduler import SchedulerConfig
from tgi.scheduler.snapshot import load_snapshot, take_snapshot
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


@pytest.mark.parametrize(("max_drafts", "limit"), [(0, 300_000), (3, 400_000)])
def test_a_journal_goes_on_under_constant_load(tmp_path: Path, max_drafts: int, limit: int) -> None:
    sim = recorded(tmp_path, SchedulerConfig(max_drafts=max_drafts), limit)
    seen = set()
    for _ in load(sim, 1000):
        seen |= set(files(tmp_path))
        assert sum(path.stat().st_size for path in files(tmp_path)) <= limit
    kept = files(tmp_path)
    assert len(seen) > len(kept)
    assert kept == sorted(seen)[-len(kept) :]  # the oldest have been removed
    assert sim.scheduler.counters.worker_losses
    for path in kept:
        journal = read_journal(path)
        assert journal.snapshot
        run = RecordedRun(journal)
        assert run.divergence is None, f"{path.name}: {run.verdict()}"
        assert "requests of an earlier file" in run.verdict()
        report = run.report()
        assert report.requests > 0
        assert 0 < report.steps < 1000
        assert estimate(run, ReplayChanges(max_batch_size=2)).requests == report.requests
    assert sum(RecordedRun(read_journal(path)).report().preemptions for path in kept)


def test_a_change_in_a_later_file_is_found(tmp_path: Path) -> None:
    sim = recorded(tmp_path, SchedulerConfig(), 400_000)
    for _ in load(sim, 800):
        pass
    journal = read_journal(files(tmp_path)[-1])
    changed = [number for number, call in enumerate(journal.calls) if call.method == "plan" and call.digest][5]
    journal.calls[changed] = journal.calls[changed]._replace(digest=1)
    found = RecordedRun(journal).divergence
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


def test_a_state_that_is_larger_than_the_limit_ends_the_journal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sim = recorded(tmp_path, SchedulerConfig(), 6_000)
    for _ in load(sim, 100):
        assert sum(path.stat().st_size for path in files(tmp_path)) <= 6_000
    assert caplog.text.count("larger than --journal-size") == 1
    first, last = files(tmp_path)
    assert RecordedRun(read_journal(first)).divergence is None  # is kept: nothing takes its place
    assert last.stat().st_size == 0


def test_a_state_that_cannot_be_written_ends_the_journal_and_not_the_scheduler(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sim = recorded(tmp_path, SchedulerConfig(), 400_000)
    sim.scheduler.unknown = Path("elsewhere")  # type: ignore[attr-defined]
    for _ in load(sim, 800):
        pass
    assert caplog.text.count("is no part of a scheduler") == 1
    (path,) = files(tmp_path)
    assert RecordedRun(read_journal(path)).divergence is None


def test_a_directory_that_is_gone_ends_the_journal_and_not_the_scheduler(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sim = recorded(tmp_path, SchedulerConfig(), 400_000)
    for number, _ in enumerate(load(sim, 800)):
        if number == 10:
            (tmp_path / "journals").rename(tmp_path / "elsewhere")
    assert caplog.text.count("cannot be written") == 1


def test_a_snapshot_leaves_the_scheduler_as_it_is(tmp_path: Path) -> None:
    sim = recorded(tmp_path, SchedulerConfig(), 1 << 20)
    for _ in load(sim, 50):
        pass
    snapshot = take_snapshot(sim.scheduler, without="_journal")
    assert snapshot == take_snapshot(sim.scheduler, without="_journal")
    copy = load_snapshot(snapshot)
    copy.check()
    assert (copy.queued, copy.running, copy.pages_used) == (
        sim.scheduler.queued, sim.scheduler.running, sim.scheduler.pages_used
    )  # fmt: skip


@pytest.mark.parametrize(
    "nodes",
    [
        5,
        [],
        [["list", None, []]],
        [["list", None, [[7]]]],
        [["tuple", None, [[0]]]],
        [["named", "os:stat_result", []]],
        [["object", "tgi.scheduler.journal:JournalWriter", [[], []]]],
        [["object", "tgi.microkernel.link:zmq", [[], []]]],
        [["object", "tgi.scheduler.scheduler:Scheduler.plan", [[], []]]],
        [["call", "os.mkdir", ["harm"]]],
    ],
)
def test_a_snapshot_constructs_nothing_but_a_scheduler(
    nodes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="its snapshot"):
        load_snapshot(pack_values(nodes))
    assert not list(tmp_path.iterdir())


def test_a_journal_with_another_snapshot_is_refused_in_a_sentence(tmp_path: Path) -> None:
    sim = recorded(tmp_path, SchedulerConfig(), 1 << 20)
    (path,) = files(tmp_path)
    journal = read_journal(path)
    with pytest.raises(UserError, match="another version of tgi"):
        RecordedRun(journal._replace(snapshot=pack_values([])))
    assert sim.scheduler.ready
