"""Chooses the number of torch's threads on CPU. Results do not depend on it."""

import logging
import time
from collections.abc import Callable

import torch

from tgi.worker.host_cpu import THREADS_VARIABLE, threads_from_environment, usable_cores
from tgi.worker.layers.linear import SMALL_ROW_COUNTS, Linear, RowCounts

log = logging.getLogger(__name__)

MIN_SPEEDUP = 0.85  # more threads are chosen where they need at most this share of the time of fewer
# The trial reads weights that do not fit a core's own cache, as a decode step does.
TRIAL_LAYERS, TRIAL_WIDTH, TRIAL_ROUNDS = 4, 1536, 5


def choose_threads() -> int:
    """Sets torch's number of threads, to OMP_NUM_THREADS if that is set, else to the fastest in a short trial, and
    returns it."""
    named = threads_from_environment()
    if named is not None:
        torch.set_num_threads(named)
        log.debug("computing with %d threads, as set by %s", named, THREADS_VARIABLE)
        return named
    cores = usable_cores()
    candidates = sorted({min(1 << power, cores) for power in range(cores.bit_length() + 1)})
    measure = _decode_trial()
    best, best_time = 1, float("inf")
    for threads in candidates:
        torch.set_num_threads(threads)
        needed = measure()
        if needed < MIN_SPEEDUP * best_time:
            best, best_time = threads, needed
    torch.set_num_threads(best)
    log.debug("computing with %d threads of %d cores, %.1f ms in the trial", best, cores, 1000 * best_time)
    return best


def _decode_trial() -> Callable[[], float]:
    """A function that computes some linear layers of a decode step and returns the median of its times in seconds."""
    layers = [Linear(torch.zeros(TRIAL_WIDTH, TRIAL_WIDTH)) for _ in range(TRIAL_LAYERS)]
    for layer in layers:
        layer.row_counts = RowCounts(SMALL_ROW_COUNTS)
    x = torch.zeros(SMALL_ROW_COUNTS[0], TRIAL_WIDTH)

    def run_once() -> float:
        began = time.perf_counter()
        for layer in layers:
            layer(x)
        return time.perf_counter() - began

    def median() -> float:
        run_once()
        return sorted(run_once() for _ in range(TRIAL_ROUNDS))[TRIAL_ROUNDS // 2]

    return median
