"""scripts/simulate replicas: balance and hit rate of a small fleet; the same seed gives the same figures."""

import os
import subprocess
import sys

import pytest

from scripts.replica_simulation.__main__ import ASSUMED_H100_8B, main
from scripts.replica_simulation.fleet import (
    Figures,
    FleetConfig,
    InTurn,
    Policy,
    Product,
    ShortestQueue,
    StepTimes,
    simulate,
)
from scripts.replica_simulation.workload import Mix

pytestmark = pytest.mark.slow

CONFIG = FleetConfig(8, 4, slots=128, pages=1024, step_times=ASSUMED_H100_8B, prefill_tokens=2048)
# Many prefixes for the caches.
MIX = Mix(unshared=0.1)


# Measured: SmolLM2-135M on two cores (docs/replicas.md). Prompt tokens cost half as much as steps, so caches decide.
MEASURED_135M = StepTimes(fixed=7.93e-3, row=2.15e-3, token=1.01e-3, position=0.0)


def run(policy: Policy, requests: int = 1600, step_times: StepTimes = ASSUMED_H100_8B) -> Figures:
    return simulate(CONFIG._replace(step_times=step_times), policy, MIX, 0.7, requests, seed=1)


@pytest.fixture(scope="module")
def product() -> Figures:
    return run(Product())


def test_the_load_is_shared(product: Figures) -> None:
    """By a window of a second or two, in which also chance makes replicas differ."""
    print(product.load_imbalance, product.loads)
    assert product.load_imbalance < 1.1
    assert product.preemptions == 0
    assert product.choice_seconds / product.requests < 0.01


def test_the_load_is_shared_where_prompts_cost_more_than_steps() -> None:
    """Each has few requests, and popular prefixes draw them to where they are cached."""
    figures = run(Product(), step_times=MEASURED_135M)
    print(figures.load_imbalance, figures.loads, figures.hit_rate)
    assert figures.load_imbalance < 1.1


def test_the_hit_rate_is_near_that_of_one_cache(product: Figures) -> None:
    in_turn = run(InTurn())
    print(product.hit_rate, product.one_cache_hit_rate, in_turn.hit_rate)
    assert 0.93 * product.one_cache_hit_rate < product.hit_rate <= product.one_cache_hit_rate
    assert in_turn.hit_rate < product.hit_rate


def test_a_perfect_balancer_shares_the_load_exactly() -> None:
    assert run(ShortestQueue(), 800).load_imbalance < 1.02


def test_the_same_seed_gives_the_same_figures() -> None:
    """In a process with different hashes of strings, too."""
    script = (
        "from tests.scripts.test_replica_simulation import *\nprint(run(Product(), 300)._replace(choice_seconds=0.0))"
    )
    other = next(seed for seed in ("1", "2") if seed != os.environ.get("PYTHONHASHSEED"))
    found = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, env={"PYTHONHASHSEED": other}
    )
    assert found.stdout == f"{run(Product(), 300)._replace(choice_seconds=0.0)}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--replicas", "0"), "argument --replicas: '0' is not above 0"),
        (("--tokenizers", "many"), "argument --tokenizers: 'many' is not a whole number"),
        (("--requests", "1"), "--requests is 1; give at least 100"),
        (("--pages", "10"), "--pages is 10; the longest request needs 244"),
        (("--load", "0"), "--load is 0; give a number above 0 and at most 10"),
        (("--step-times", "0.1"), "give FIXED,ROW,TOKEN"),
    ],
)
def test_nonsense_is_refused_in_a_sentence(
    arguments: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["simulate", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert said in capsys.readouterr().err
