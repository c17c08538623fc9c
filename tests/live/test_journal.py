"""The scheduler's journal: recorded by a whole server with kills, repeated by `tgi replay`."""

import subprocess
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from tests.live import commands
from tests.live.server import Server, scheduled_requests
from tgi.microkernel.messages.protocol import Add
from tgi.scheduler.journal import SUFFIX, read_journal
from tgi.scheduler.replay import describe, replay

pytestmark = pytest.mark.live

REQUESTS = 24
# Requests with prompts of this length fill the files of 1 MB, and take few steps to compute and to repeat.
LARGE, LARGE_PROMPT = 140, 1900


def replay_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return commands.run("replay", *arguments)


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
            for target in ("scheduler-0", "worker-0"):
                with server.suspended("worker-0"):  # until the scheduler has all requests
                    answers = [threads.submit(ask, number) for number in range(REQUESTS)]
                    server.wait_until(lambda: scheduled_requests(server) == REQUESTS, "all requests have arrived")
                wait(answers, return_when=FIRST_COMPLETED)
                server.kill(target)
                assert all(answer.result() for answer in answers)
        server.stop()
    return sorted((directory / "journals").glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime)


def test_every_life_is_repeated_bit_for_bit(journals: list[Path]) -> None:
    assert len(journals) == 2
    for path in journals:
        journal = read_journal(path)
        assert sum(isinstance(call.message, Add) for call in journal.calls) >= REQUESTS
        divergence = replay(journal)
        assert divergence is None, describe(journal, divergence)


def test_the_command_says_so(journals: list[Path]) -> None:
    printed = replay_command(str(journals[-1]))
    assert printed.returncode == 0, printed.stderr
    assert "bit for bit" in printed.stdout


def test_a_journal_that_was_cut_off_is_replayed_up_to_there(journals: list[Path], tmp_path: Path) -> None:
    cut = tmp_path / "cut.journal"
    cut.write_bytes(journals[-1].read_bytes()[:-3])
    printed = replay_command(str(cut))
    assert printed.returncode == 0, printed.stderr
    assert "ends within a record" in printed.stdout


def test_another_file_is_refused_in_a_sentence(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"something else")
    printed = replay_command(str(other))
    assert printed.returncode != 0
    assert "is not a journal" in printed.stderr
    assert "Traceback" not in printed.stderr


def test_a_journal_goes_on_in_files_that_are_repeated_on_their_own(tiny_llama: Path, tmp_path: Path) -> None:
    options = ("--worker", "scripted", "--journal", str(tmp_path / "journals"), "--journal-size", "1")
    seen: set[Path] = set()
    with Server(tmp_path / "run", "--model-id", str(tiny_llama), *options) as server:
        server.start().wait_until_ready()
        for number in range(LARGE):
            answer = server.generate(f"{number % 10} " * LARGE_PROMPT, max_new_tokens=2)
            assert answer["details"]["generated_tokens"] == 2
            seen |= set((tmp_path / "journals").glob(f"*{SUFFIX}"))
        server.stop()
    kept = sorted((tmp_path / "journals").glob(f"*{SUFFIX}"))
    assert len(seen | {*kept}) > len(kept) > 1  # the oldest have been removed
    assert sum(path.stat().st_size for path in kept) <= 1 << 20
    for path in kept:
        journal = read_journal(path)
        divergence = replay(journal)
        assert divergence is None, describe(journal, divergence)
