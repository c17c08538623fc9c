"""The scheduler's journal: recorded by a whole server with kills, repeated by `tgi replay`, and estimated otherwise."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.live.server import Server
from tgi.scheduler.journal import SUFFIX, read_journal
from tgi.scheduler.replay import RecordedRun, ReplayChanges, estimate

pytestmark = pytest.mark.live

REQUESTS = 24


def replay(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "tgi", "replay", *arguments], capture_output=True, text=True)


@pytest.fixture(scope="module")
def journals(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> list[Path]:
    """The journals of two lives of a scheduler, the older first: the first is killed, and a worker in the second."""
    directory = tmp_path_factory.mktemp("journal")
    options = ("--worker", "scripted", "--scripted-step-us", "10000", "--journal", str(directory / "journals"))
    with Server(directory / "run", "--model-id", str(tiny_llama), *options) as server:
        server.start().wait_until_ready()

        def ask(number: int) -> int:
            answer = server.generate(f"Request {number}", max_new_tokens=20 + 5 * number, stop=["Q"])
            return int(answer["details"]["generated_tokens"])

        with ThreadPoolExecutor(REQUESTS) as threads:
            for victim in ("scheduler-0", "worker-0"):
                answers = [threads.submit(ask, number) for number in range(REQUESTS)]
                while not any(answer.done() for answer in answers):
                    pass
                server.kill(victim)
                assert all(answer.result() for answer in answers)
        server.stop()
    return sorted((directory / "journals").glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime)


def test_every_life_is_repeated_bit_for_bit(journals: list[Path]) -> None:
    assert len(journals) == 2
    for path in journals:
        recorded = RecordedRun(read_journal(path))
        assert recorded.divergence is None, recorded.verdict()
        assert recorded.report().requests >= REQUESTS
        assert recorded.report().tokens > 0


def test_a_changed_decision_is_found(journals: list[Path]) -> None:
    journal = read_journal(journals[-1])
    steps = [number for number, call in enumerate(journal.calls) if call.method == "plan" and call.digest]
    changed = steps[len(steps) // 2]
    journal.calls[changed] = journal.calls[changed]._replace(digest=1)
    found = RecordedRun(journal).divergence
    assert found is not None
    assert found.number == changed


def test_an_estimate_serves_the_recorded_requests_otherwise(journals: list[Path]) -> None:
    recorded = RecordedRun(read_journal(journals[-1]))
    before, same = recorded.report(), estimate(recorded, ReplayChanges())
    fewer = estimate(recorded, ReplayChanges(max_batch_size=2))
    assert before.requests == same.requests == fewer.requests
    assert before.ended_well == same.ended_well == fewer.ended_well
    assert before.tokens == same.tokens == fewer.tokens
    assert fewer.steps > 2 * same.steps  # two requests at once instead of all
    assert sum(fewer.queue_seconds) > sum(same.queue_seconds)
    assert estimate(recorded, ReplayChanges(max_batch_size=2)) == fewer  # deterministic


def test_the_command_prints_both(journals: list[Path]) -> None:
    printed = replay(str(journals[-1]), "--load", "2", "--max-batch-size", "4")
    assert printed.returncode == 0, printed.stderr
    assert "bit for bit" in printed.stdout
    assert "estimated" in printed.stdout


def test_a_journal_that_was_cut_off_is_replayed_up_to_there(journals: list[Path], tmp_path: Path) -> None:
    cut = tmp_path / "cut.journal"
    cut.write_bytes(journals[-1].read_bytes()[:-3])
    printed = replay(str(cut))
    assert printed.returncode == 0, printed.stderr
    assert "ends within a record" in printed.stdout


def test_another_file_is_refused_in_a_sentence(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"something else")
    printed = replay(str(other))
    assert printed.returncode != 0
    assert "is not a journal" in printed.stderr
    assert "Traceback" not in printed.stderr


def test_a_journal_goes_on_in_files_that_are_repeated_on_their_own(tiny_llama: Path, tmp_path: Path) -> None:
    options = ("--worker", "scripted", "--journal", str(tmp_path / "journals"), "--journal-size", "1")
    seen: set[Path] = set()
    with Server(tmp_path / "run", "--model-id", str(tiny_llama), *options) as server:
        server.start().wait_until_ready()
        with ThreadPoolExecutor(4) as threads:  # the scheduler always has requests
            answers = [threads.submit(server.generate, f"{n} " * 900, max_new_tokens=1500) for n in range(12)]
            while not all(answer.done() for answer in answers):
                seen |= set((tmp_path / "journals").glob(f"*{SUFFIX}"))
                time.sleep(0.05)
            assert all(answer.result()["details"]["generated_tokens"] == 1500 for answer in answers)
        server.stop()
    kept = sorted((tmp_path / "journals").glob(f"*{SUFFIX}"))
    assert len(seen | {*kept}) > len(kept)  # the oldest have been removed
    assert sum(path.stat().st_size for path in kept) <= 1 << 20
    for path in kept:
        journal = read_journal(path)
        assert journal.snapshot
        recorded = RecordedRun(journal)
        assert recorded.divergence is None, recorded.verdict()
    printed = replay(str(kept[-1]), "--max-batch-size", "2")
    assert printed.returncode == 0, printed.stderr
    assert "requests of an earlier file" in printed.stdout
