"""How many threads compute on CPU, and how they wait for each other. No result depends on either.

torch's OpenMP (libgomp) lets a thread that waits for others spin for a while. Where another process has taken the core
of one thread, all others spin until it comes back, at every one of some two hundred parallel regions of a step: a step
then takes ten to forty times as long. Threads that sleep at once bound that loss, but are woken so slowly that two are
no quicker than one. So they spin for a few microseconds, about as long as the gap between two parallel regions, and
then sleep: most of the gain when alone, and less than twice the time when every core but one is taken.
"""

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)

WAIT_POLICY, SPINS = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"
FEW_SPINS = "5000"
THREADS = "OMP_NUM_THREADS"
CGROUP_CPU = Path("/sys/fs/cgroup/cpu.max")
# A larger number of threads has to be this much quicker than a smaller one.
WORTH = 0.85
# The work of the trial: weights that do not fit the core's own cache, read as a decode step reads them.
TRIAL_LAYERS, TRIAL_WIDTH, TRIAL_ROUNDS = 4, 1536, 5


def wait_shortly() -> None:
    """Makes waiting threads spin shortly, then sleep. What the environment says counts. Before torch is imported."""
    if WAIT_POLICY not in os.environ:
        os.environ[WAIT_POLICY] = "passive"
        os.environ.setdefault(SPINS, FEW_SPINS)


def usable_cores() -> int:
    """Cores that this process may use: its affinity, and what its container's quota amounts to."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = CGROUP_CPU.read_text().split()
    except (OSError, ValueError):
        return cores  # no cgroup v2 here
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def named_threads() -> int | None:
    """What OMP_NUM_THREADS says, if it is a number above 0. What else it says is warned of."""
    named = os.environ.get(THREADS, "").strip()
    if named.isdecimal() and int(named) > 0:
        return int(named)
    if named:
        log.warning("%s is %r, which is no number above 0, and does not count", THREADS, named)
    return None


def choose_threads() -> int:
    """Sets torch's threads to OMP_NUM_THREADS if that is set, else to what is quickest in a short trial."""
    import torch  # here, so that `wait_shortly` can be called before

    named = named_threads()
    if named is not None:
        torch.set_num_threads(named)
        log.debug("computing with %d threads, as %s says", named, THREADS)
        return named
    cores = usable_cores()
    numbers = sorted({min(1 << power, cores) for power in range(cores.bit_length() + 1)})
    measure = _trial()
    best, best_time = 1, float("inf")
    for threads in numbers:
        torch.set_num_threads(threads)
        needed = measure()
        if needed < WORTH * best_time:
            best, best_time = threads, needed
    torch.set_num_threads(best)
    log.debug("computing with %d threads of %d cores, %.1f ms in the trial", best, cores, 1000 * best_time)
    return best


def _trial() -> Callable[[], float]:
    """Something to measure: computes a part of a decode step and returns the seconds it took, the median of a few."""
    import torch

    from tgi.worker.linear import SMALLER, Linear, Rows

    layers = [Linear(torch.zeros(TRIAL_WIDTH, TRIAL_WIDTH)) for _ in range(TRIAL_LAYERS)]
    for layer in layers:
        layer.rows = Rows(SMALLER)
    x = torch.zeros(SMALLER[0], TRIAL_WIDTH)

    def once() -> float:
        began = time.perf_counter()
        for layer in layers:
            layer(x)
        return time.perf_counter() - began

    def median() -> float:
        once()
        return sorted(once() for _ in range(TRIAL_ROUNDS))[TRIAL_ROUNDS // 2]

    return median
