"""The dtype in which a model computes: its own, the one asked for, or the quickest of this processor by trial."""

import logging
import time
from collections.abc import Mapping
from typing import Any

import torch

from tgi.microkernel.errors import UserError
from tgi.worker.host_cpu import has_arithmetic
from tgi.worker.layers.linear import Linear
from tgi.worker.models import config_reader

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# The trial multiplies a weight of this width with as many rows as a short prompt has. Single rows are bound by the
# memory bandwidth, so 16 bits win there even where they are emulated: by less than prompts and batches lose.
TRIAL_WIDTH, TRIAL_ROWS, TRIAL_ROUNDS = 1024, 64, 3
# A 16-bit dtype takes half the memory of float32, so float32 must be clearly quicker. Measured: emulation takes 4 to 7
# times as long, arithmetic in 16 bits at most 1.4 times, so the choice does not depend on noise.
MAX_SLOWDOWN = 2.0


def resolve_dtype(config: Mapping[str, Any], dtype: str) -> torch.dtype:
    """The dtype of this name, one of DTYPES; "auto": the one that config.json names. Raises UserError for others."""
    return stored_dtype(config) if dtype == "auto" else _parse(dtype)


def stored_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """The dtype that config.json names; float32 if it names none."""
    return _parse(config_reader.stored_dtype(config))


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype, as in DTYPES."""
    return str(dtype).removeprefix("torch.")


def quickest_dtype(own: torch.dtype) -> torch.dtype:
    """The dtype in which torch's CPU kernels compute a model of dtype `own`: float32 if that is much quicker in a trial
    of some tens of milliseconds, as where the processor emulates `own`; else `own`."""
    if own is torch.float32:
        return own
    times = {dtype: _trial_time(dtype) for dtype in (own, torch.float32)}
    chosen = torch.float32 if times[own] > MAX_SLOWDOWN * times[torch.float32] else own
    log.info(
        "computing in %s: in a trial on this processor %s took %.1f ms and float32 %.1f ms",
        *(dtype_name(chosen), dtype_name(own), 1000 * times[own], 1000 * times[torch.float32]),
    )
    return chosen


def warn_of_emulation(dtype: torch.dtype) -> None:
    """Warns if torch's CPU kernels emulate this dtype."""
    if not has_arithmetic(dtype_name(dtype)):
        name = dtype_name(dtype)
        log.warning("this CPU has no arithmetic for %s and emulates it: prompts are faster in --dtype float32", name)


def _trial_time(dtype: torch.dtype) -> float:
    """The shortest CPU time of a linear layer in seconds, on one thread: other processes hardly change it."""
    layer = Linear(torch.zeros(TRIAL_WIDTH, TRIAL_WIDTH, dtype=dtype))
    x = torch.zeros(TRIAL_ROWS, TRIAL_WIDTH, dtype=dtype)

    def run_once() -> float:
        began = time.thread_time()
        layer(x)
        return time.thread_time() - began

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    run_once()
    shortest = min(run_once() for _ in range(TRIAL_ROUNDS))
    torch.set_num_threads(threads)
    return shortest


def _parse(name: Any) -> torch.dtype:
    """The dtype of a name. Raises UserError if it is not supported."""
    if not isinstance(name, str) or name not in DTYPES:
        raise UserError(f"dtype {name!r} is not supported; choose one of {', '.join(DTYPES)} with --dtype.")
    return DTYPES[name]
