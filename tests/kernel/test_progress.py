"""What a terminal shows while processes start: each role its own, and whoever serves the port all floors."""

from pathlib import Path

import pytest

from tgi.kernel import rundir
from tgi.kernel.progress import Progress
from tgi.kernel.settings import Settings

URL = "http://127.0.0.1:3001"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    rundir.create(tmp_path / "run")
    return Settings(run_dir=tmp_path / "run", model_id="some/model", port=3001)


def say(settings: Settings, role: str, state: str, stage: str = "") -> None:
    rundir.write_state(settings.run_dir, rundir.ProcessState(role, 0, 1, "", state, stage))


def test_a_role_tells_of_itself_and_has_no_address(settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(settings, "scheduler")
    say(settings, "api", "ready")
    say(settings, "tokenizer", "starting", "loading the tokenizer")
    progress.tick(["scheduler-0"])
    say(settings, "scheduler", "starting", "waiting for the worker")
    progress.tick(["scheduler-0"])
    progress.tick(["scheduler-0"])
    assert capsys.readouterr() == ("", "scheduler: waiting for the worker\n")
    say(settings, "scheduler", "ready")
    progress.tick(["scheduler-0"])
    progress.tick(["scheduler-0"])
    said, err = capsys.readouterr()
    assert (said.startswith("Ready in "), said.endswith(" s: scheduler\n"), err) == (True, True, "")


@pytest.mark.parametrize(("title", "expected"), [("api", ["api-0"]), ("tgi", ["api-0", "tokenizer-0"])])
def test_who_serves_the_port_tells_what_it_waits_for_and_then_the_address(
    settings: Settings, capsys: pytest.CaptureFixture[str], title: str, expected: list[str]
) -> None:
    progress = Progress(settings, title)
    say(settings, "api", "ready")
    say(settings, "tokenizer", "starting", "loading the tokenizer")
    progress.tick(expected)
    assert capsys.readouterr() == ("", f"{title}: tokenizer: loading the tokenizer\n")
    say(settings, "tokenizer", "ready")
    progress.tick(expected)
    assert capsys.readouterr().out.endswith(f" s: some/model on {URL}\n")
