"""The run directory: one supervisor per claim, and states that come and go with their processes."""

from pathlib import Path

import pytest

from tgi.kernel import rundir
from tgi.kernel.errors import UserError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    rundir.create(tmp_path / "run")
    return tmp_path / "run"


def test_it_is_private(run: Path) -> None:
    assert run.stat().st_mode & 0o777 == 0o700


def test_a_claim_is_exclusive_and_names_its_holder(run: Path) -> None:
    lock = rundir.Lock(run, "api")
    assert list(rundir.holders(run)) == ["api"]
    with pytest.raises(UserError, match=r"Another tgi \(pid \d+\) runs `api`"):
        rundir.Lock(run, "api")
    lock.release()
    assert rundir.holders(run) == {}
    rundir.Lock(run, "api").release()


def test_states_are_read_back(run: Path) -> None:
    state = rundir.ProcessState("worker", 0, 42, "ab", "starting", "loading weights", 40)
    rundir.write_state(run, state)
    (found,) = rundir.read_states(run)
    assert (found.name, found.stage, found.percent) == ("worker-0", "loading weights", 40)
    rundir.remove_state(run, "worker-0")
    assert rundir.read_states(run) == []


def test_a_directory_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="TGI_RUN"):
        rundir.create(tmp_path / "file" / "run")
