"""Counts what work costs in function calls and bytecode instructions: the same on every machine, however busy it is.

    cost = per_item(lambda count: partial(handle, message(count)))
    assert cost.within(calls=6, instructions=80), cost

What an addition of ours costs is seen however small it is: another dictionary is an instruction or two. What happens
inside a function written in C is not, except that it is called. Budgets are upper bounds, taken with Python 3.11:
later versions need fewer instructions for the same code, and no call for a comprehension.
"""

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

# How many items the two runs have whose difference is measured: what a run costs once is in both.
FEW, MANY = 16, 80


class Cost(NamedTuple):
    """What some work takes. `calls` are those of functions, in Python and in C; each resumption of a generator or a
    coroutine counts as one."""

    calls: float
    instructions: float

    def __sub__(self, other: "Cost") -> "Cost":
        return Cost(self.calls - other.calls, self.instructions - other.instructions)

    def __truediv__(self, count: int) -> "Cost":
        return Cost(self.calls / count, self.instructions / count)

    def within(self, calls: int, instructions: int) -> bool:
        """Whether the budget is kept."""
        return self.calls <= calls and self.instructions <= instructions


def cost(work: Callable[[], object]) -> Cost:
    """What `work` takes in this thread. The garbage collector waits: what it finalizes is other tests' garbage."""
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

    before, collects = (sys.gettrace(), sys.getprofile()), gc.isenabled()
    gc.disable()
    sys.settrace(traced)
    sys.setprofile(called)
    try:
        work()
    finally:
        sys.setprofile(before[1])
        sys.settrace(before[0])
        if collects:
            gc.enable()
    return Cost(calls - 1, instructions)  # setprofile itself is the last call


def per_item(prepare: Callable[[int], Callable[[], object]], few: int = FEW, many: int = MANY) -> Cost:
    """What each further item takes. `prepare` returns the work for so many items; only the work is measured, after it
    has run once, so that what is done on first use does not count."""
    prepare(few)()
    return (cost(prepare(many)) - cost(prepare(few))) / (many - few)
