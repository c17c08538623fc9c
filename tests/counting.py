"""Counts function calls and bytecode instructions, which do not depend on the machine or its load.

    cost = per_item(lambda count: partial(handle, message(count)))
    assert cost.within(calls=6, instructions=80), cost

Work inside a function written in C does not count, only its call. The recorded costs are those of Python 3.11; later
versions need fewer instructions for the same code, and no call for a comprehension.
"""

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

# Items of the two runs whose difference is measured, so that costs per run cancel out.
FEW, MANY = 16, 80
# A change that costs more than ten percent must be noticed.
SLACK = 1.1


class Cost(NamedTuple):
    """A measured cost. `calls` counts calls of Python and C functions; each resumption of a generator or a coroutine
    counts as one."""

    calls: float
    instructions: float

    def __sub__(self, other: "Cost") -> "Cost":
        return Cost(self.calls - other.calls, self.instructions - other.instructions)

    def __truediv__(self, count: int) -> "Cost":
        return Cost(self.calls / count, self.instructions / count)

    def within(self, calls: int, instructions: int) -> bool:
        """Whether the cost is at most SLACK times the recorded one."""
        return self.calls <= calls * SLACK and self.instructions <= instructions * SLACK


def cost(work: Callable[[], object]) -> Cost:
    """The cost of `work` in this thread. Garbage collection is off, since it would finalize objects of other tests."""
    calls = instructions = 0

    def called(frame: FrameType, event: str, function: Any) -> None:
        nonlocal calls
        if event in ("call", "c_call"):
            calls += 1

    def traced(frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        nonlocal instructions
        frame.f_trace_opcodes = True
        if event == "opcode":
            instructions += 1
        return traced

    previous, gc_enabled = (sys.gettrace(), sys.getprofile()), gc.isenabled()
    gc.disable()
    sys.settrace(traced)
    sys.setprofile(called)
    try:
        work()
    finally:
        sys.setprofile(previous[1])
        sys.settrace(previous[0])
        if gc_enabled:
            gc.enable()
    return Cost(calls - 1, instructions)  # setprofile itself is the last call


def per_item(prepare: Callable[[int], Callable[[], object]], few: int = FEW, many: int = MANY) -> Cost:
    """The cost of each further item. `prepare(count)` returns the work for that many items. Only the work is measured,
    and it runs once before, so that first-use costs do not count."""
    prepare(few)()
    return (cost(prepare(many)) - cost(prepare(few))) / (many - few)
