"""Why a process has ended, and whether a request that it had in progress may be the cause."""

import contextlib
import errno
import signal
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from tgi.microkernel.host import control_groups

# Signals that a process raises by its own fault. Any other comes from outside.
OWN_SIGNALS = frozenset(
    (
        signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGSYS, signal.SIGTRAP,
        signal.SIGPIPE, signal.SIGXCPU, signal.SIGXFSZ,
    )
)  # fmt: skip

# What the supervisor has ended it for.
HUNG, STOPPED = "made no progress and was killed", "was stopped by a signal and was killed"
OUT_OF_MEMORY = "was killed for lack of memory"

# Advice where a server has too little memory.
MORE_MEMORY = (
    "The memory that this server may use is too small for its settings. Lower --max-batch-total-tokens (the KV cache, "
    "by default a quarter of the memory that is free at the start) or --max-batch-prefill-tokens, or allow more memory."
)
TOO_LITTLE_TO_START = (
    "The memory that this server may use is too small to load the model. Choose a smaller or quantized model "
    "(--quantize), or allow more memory."
)

# How long a process with much memory may take to end after the kernel has counted its kill.
OOM_SECONDS = 10.0
# How often the kills are counted.
OOM_TICK_SECONDS = 1.0


def is_lack_of_memory(error: Exception) -> bool:
    """Whether an exception means that no memory could be allocated."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    # torch's allocator raises a RuntimeError.
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "allocate memory" in str(error))


def cause_of_exit(code: int, out_of_memory: bool) -> tuple[str, bool]:
    """Why a process ended, in words, and whether the cause is outside of it. `out_of_memory`: the OOM killer was
    active recently; which process it ends depends on all that use memory, and a worker's use on the settings, not on
    the requests. A process that is told to end (SIGTERM) drains and ends with code 0."""
    if code >= 0:
        return f"ended with code {code}", code == 0
    number = -code
    if number == signal.SIGKILL and out_of_memory:
        return OUT_OF_MEMORY, True
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"  # a real-time signal has no name
    return f"was killed by {name}", number not in OWN_SIGNALS


class OomKills:
    """Tells whether the OOM killer was active in the last OOM_SECONDS. An earlier kill, of another process, says
    nothing about a death now."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts = deque(((clock(), oom_kills()),))  # with their times: the first is OOM_SECONDS old

    def tick(self) -> None:
        """To be called every second."""
        now = self._clock()
        if now - self._counts[-1][0] >= OOM_TICK_SECONDS:
            self._counts.append((now, oom_kills()))
            while self._counts[1][0] <= now - OOM_SECONDS:
                self._counts.popleft()

    def has_risen(self) -> bool:
        """Whether the kernel counts more kills now than OOM_SECONDS ago."""
        return oom_kills() > self._counts[0][1]


def oom_kills() -> int:
    """How many processes the OOM killer has ended so far: in this control group if its count can be read, else on this
    host; 0 where neither is known."""
    if (count := control_groups.oom_kills()) is not None:
        return count
    with contextlib.suppress(OSError, ValueError):
        lines = (line.partition(" ") for line in Path("/proc/vmstat").read_text().splitlines())
        return next((int(value) for name, _, value in lines if name == "oom_kill"), 0)
    return 0
