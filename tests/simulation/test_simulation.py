"""Whole servers from seeds: every answer is exact, whatever goes wrong."""

import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest

from tests.simulation.planted_bugs import PLANTED_BUGS
from tests.simulation.simulation import Simulation, SimulationConfig, SimulationFailed, draw_config

# 20,000 requests in this many runs, each of another configuration.
SEEDS, REQUESTS = 40, 500

TRACE_SCRIPT = """
import hashlib, sys
from tests.simulation.main import use_metrics_directory
from tests.simulation.simulation import Simulation, draw_config
use_metrics_directory()
simulation = Simulation(draw_config(7, 200))
simulation.run()
print(hashlib.sha256("\\n".join(simulation.trace_lines()).encode()).hexdigest(), simulation.clock.events)
"""


@pytest.mark.parametrize("seed", range(SEEDS))
def test_answers_are_exact(seed: int) -> None:
    simulation = Simulation(draw_config(seed, REQUESTS))
    simulation.run()
    assert simulation.workload.ended == REQUESTS
    assert simulation.workload.outcomes["exact"] > REQUESTS // 20
    assert simulation.health.samples > 20


@pytest.mark.parametrize("name", PLANTED_BUGS)
def test_planted_bug_is_found(name: str) -> None:
    bug = PLANTED_BUGS[name]
    with bug.planted():
        for config in bug.configs():
            try:
                Simulation(config).run()
            except SimulationFailed as failed:
                fault = failed.fault
                break
        else:
            pytest.fail(f"not found: {name}")
    assert not fault.startswith("TypeError"), "the planted function has the wrong parameters"
    check_without_bug(config)


@lru_cache
def check_without_bug(config: SimulationConfig) -> None:
    """The same run passes."""
    Simulation(config).run()


def test_a_seed_repeats_the_same_events() -> None:
    """Also in processes with different hashes of strings."""
    root = Path(__file__).parents[2]
    outputs = {
        subprocess.run(
            [sys.executable, "-c", TRACE_SCRIPT],
            check=True, capture_output=True, text=True, cwd=root, env=os.environ | {"PYTHONHASHSEED": hash_seed},
        ).stdout
        for hash_seed in ("1", "2")
    }  # fmt: skip
    assert len(outputs) == 1
