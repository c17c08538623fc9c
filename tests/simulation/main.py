"""The command line of scripts/simulate."""

import argparse
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.simulation.simulation import Simulation, SimulationFailed, draw_config
from tgi.microkernel.observability import metrics

REQUESTS_PER_SEED = 1000
# Time between two lines on the progress of an exploration.
PROGRESS_SECONDS = 60.0


class Outcome(NamedTuple):
    """What became of one seed."""

    seed: int
    fault: str  # "" if all invariants held
    requests: int  # that have ended
    outcomes: dict[str, int]
    faults: dict[str, int]  # injected, by kind
    cpu_seconds: float


def use_metrics_directory() -> None:
    """The product's metrics go to a directory that is of no use later."""
    metrics.use_directory(Path(tempfile.mkdtemp(prefix="tgi-metrics-")))


def begin_worker() -> None:
    """Prepares a process of the pool. It ends with the exploration, however that ends: on Ctrl-C too, which reaches
    both, and when the exploration is killed, after which it would wait for work for ever."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=end_with, args=[parent.sentinel], daemon=True).start()
    use_metrics_directory()


def end_with(sentinel: int) -> None:
    """Ends this process when the parent has, which the sentinel tells."""
    multiprocessing.connection.wait([sentinel])
    os._exit(1)


def run_seed(seed: int, requests: int) -> Outcome:
    """Runs one seed."""
    began = time.process_time()
    simulation, fault = Simulation(draw_config(seed, requests)), ""
    try:
        simulation.run()
    except SimulationFailed as failed:
        fault = failed.fault
    workload = simulation.workload
    return Outcome(
        seed, fault, workload.ended, workload.outcomes, simulation.faults.counts, time.process_time() - began
    )


def replay_seed(seed: int, requests: int, entries: int) -> int:
    """Runs one seed, and prints the trace before a failure. Returns the exit status."""
    simulation = Simulation(draw_config(seed, requests))
    print(f"seed {seed}: {simulation.config}")
    try:
        simulation.run()
    except SimulationFailed as failed:
        print("\n".join(failed.trace[-entries:]))
        print(f"\nFAILED {failed.fault}")
        return 1
    print(f"passed after {simulation.clock.now:.1f} simulated seconds: {simulation.workload.outcomes}")
    print(f"faults: {simulation.faults.counts}; longest request: {simulation.workload.longest_seconds:.1f} s")
    return 0


def explore(first_seed: int, requests: int, jobs: int) -> int:
    """Runs seeds until there were this many requests. Returns the exit status."""
    began, cpu_seconds = time.monotonic(), 0.0
    ended = 0
    outcomes: Counter[str] = Counter()
    injected: Counter[str] = Counter()
    failed = []
    seeds = range(first_seed, first_seed + max(1, requests // REQUESTS_PER_SEED))
    reported = began
    with ProcessPoolExecutor(jobs, initializer=begin_worker, max_tasks_per_child=50) as pool:
        for finished, outcome in enumerate(pool.map(run_seed, seeds, [REQUESTS_PER_SEED] * len(seeds)), 1):
            ended += outcome.requests
            outcomes.update(outcome.outcomes)
            injected.update(outcome.faults)
            cpu_seconds += outcome.cpu_seconds
            if outcome.fault:
                failed.append(outcome.seed)
                print(f"seed {outcome.seed} FAILED {outcome.fault}", flush=True)
            if time.monotonic() - reported > PROGRESS_SECONDS:
                reported = time.monotonic()
                print(f"{finished} of {len(seeds)} seeds, {len(failed)} failed", flush=True)
    seconds = time.monotonic() - began
    print(f"{ended:,} requests of {len(seeds)} seeds in {seconds:.0f} s, {ended / cpu_seconds:.0f} per CPU second")
    print("outcomes:", dict(outcomes.most_common()))
    print("faults:", dict(injected.most_common()))
    print("failed seeds, to repeat with --seed:", *(failed or ["none"]))
    return 1 if failed else 0


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="scripts/simulate",
        description="Simulates whole servers under faults on virtual time. With --requests, explores seeds from --seed "
        "on, and names those that fail; without, runs one seed and prints the trace before its failure.",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--requests", type=int, help=f"explore this many requests, {REQUESTS_PER_SEED} per seed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes that explore")
    parser.add_argument("--trace", type=int, default=200, help="entries of the trace to print")
    arguments = parser.parse_args()
    if arguments.requests is not None:
        return explore(arguments.seed, arguments.requests, arguments.jobs)
    use_metrics_directory()
    return replay_seed(arguments.seed, REQUESTS_PER_SEED, arguments.trace)


if __name__ == "__main__":
    sys.exit(main())
