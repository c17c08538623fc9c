"""Whole servers from seeds: every answer is exact, whatever goes wrong."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.simulation.planted_bugs import NO_FAULTS, PLANTED_BUGS
from tests.simulation.simulation import Simulation, SimulationConfig, SimulationFailed, draw_config
from tgi.microkernel.recovery.crash_isolation import QUARANTINE_STRIKES

pytestmark = pytest.mark.slow

# Runs of another configuration each. `python -m tests.simulation.main --requests N` explores further seeds.
SEEDS, REQUESTS = 4, 400

TRACE_SCRIPT = """
from tests.simulation.main import use_metrics_directory
from tests.simulation.test_simulation import trace
use_metrics_directory()
print(trace())
"""


def trace() -> str:
    simulation = Simulation(draw_config(7, 100))
    simulation.run()
    return "\n".join([*simulation.trace_lines(), str(simulation.clock.events)])


@pytest.mark.parametrize("seed", range(SEEDS))
def test_answers_are_exact(seed: int) -> None:
    simulation = Simulation(draw_config(seed, REQUESTS))
    simulation.run()
    assert simulation.workload.ended == REQUESTS
    assert simulation.workload.outcomes["exact"] > REQUESTS // 20
    assert simulation.health.samples > 20


@pytest.mark.parametrize("seed", range(2))
def test_a_request_ends_three_tokenizers_however_long_they_take_to_start(seed: int) -> None:
    config = draw_config(seed, 150)._replace(
        faults=NO_FAULTS, poison_share=0.03, poison_roles=("tokenizer",), tokenizers=2, front_ends=1, replicas=1,
        restart_seconds=8.0, healthy_after=20.0,
    )  # fmt: skip
    simulation = Simulation(config)
    simulation.run()
    assert simulation.workload.outcomes["poisonous"] > 1
    assert max(simulation.tokenizer_crashes.values()) == QUARANTINE_STRIKES


@pytest.mark.parametrize("name", PLANTED_BUGS)
def test_planted_bug_is_found(name: str) -> None:
    bug = PLANTED_BUGS[name]
    with bug.planted():
        for config in bug.configs():
            simulation = Simulation(config)
            try:
                simulation.run()
            except SimulationFailed as failed:
                fault = failed.fault
                break
        else:
            pytest.fail(f"not found: {name}")
    assert not fault.startswith("TypeError"), "the planted function has the wrong parameters"
    check_without_bug(config, simulation.clock.events)


PASSED: dict[SimulationConfig, int] = {}  # events of runs that passed


def check_without_bug(config: SimulationConfig, events: int) -> None:
    """The same run passes, for as many events as found the bug."""
    if PASSED.get(config, 0) < events:
        Simulation(config).run(events)
        PASSED[config] = events


def test_a_seed_repeats_the_same_events() -> None:
    """Also in a process with different hashes of strings, and after other simulations."""
    other = next(seed for seed in ("1", "2") if seed != os.environ.get("PYTHONHASHSEED"))
    found = subprocess.run(
        [sys.executable, "-c", TRACE_SCRIPT],
        check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2],
        env=os.environ | {"PYTHONHASHSEED": other},
    )  # fmt: skip
    assert found.stdout == trace() + "\n"


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_exploration_that_is_ended_leaves_no_process_behind(how: signal.Signals) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.simulation.main", "--requests", "1000000", "--jobs", "1"]
    exploration = psutil.Popen(
        command, cwd=root, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        # Its child does not only exist: it computes.
        while not any(one.cpu_times().user > 0.2 for one in exploration.children(recursive=True)):
            assert exploration.poll() is None
            time.sleep(0.05)
        children = exploration.children(recursive=True)
        if how == signal.SIGINT:  # a terminal sends it to all processes
            os.killpg(exploration.pid, how)
        else:
            exploration.send_signal(how)
        assert exploration.wait(60) != 0
        assert psutil.wait_procs(children, 60)[1] == []
    finally:
        for one in [exploration, *exploration.children(recursive=True)] if exploration.is_running() else []:
            one.kill()
