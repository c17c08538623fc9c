"""Several models: whatever front ends, processes and the network do, no request meets a model that is not loaded."""

from collections import deque
from itertools import count
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tgi.microkernel.processes.model_table import (
    PATIENCE_SECONDS,
    RETRY_SECONDS,
    ModelState,
    ModelTable,
    Operation,
)

NAMES = ("a", "b", "c")
FRONT_ENDS = 2
RESIDENT = (Operation.LOAD, Operation.WAKE)


class World:
    """A table with front ends that keep the protocol, over links that keep the order of messages, and processes whose
    operations end at any time."""

    def __init__(self, max_loaded: int | None, ttl: float | None, fits: bool) -> None:
        self.now = 0.0
        self.free = fits
        self.max_loaded = max_loaded
        self.table = ModelTable([(name, ttl) for name in NAMES], max_loaded, lambda name: self.free)
        self.up: list[deque[tuple[str, Any]]] = [deque() for _ in range(FRONT_ENDS)]
        self.down: list[deque[dict[str, tuple[ModelState, int, float]]]] = [deque() for _ in range(FRONT_ENDS)]
        self.seen = [dict.fromkeys(NAMES, (ModelState.UNLOADED, -1, 0.0)) for _ in range(FRONT_ENDS)]
        self.using = [dict.fromkeys(NAMES, 0) for _ in range(FRONT_ENDS)]
        self.waiting = [dict.fromkeys(NAMES, 0) for _ in range(FRONT_ENDS)]
        self.told: list[dict[str, int]] = [{} for _ in range(FRONT_ENDS)]
        self.computes: set[str] = set()  # models whose workers run
        self.running: dict[str, Operation] = {}
        self.answered = 0
        for number in range(FRONT_ENDS):
            self.table.connect(number)
        self.decide()

    # --- the supervisor ---

    def decide(self) -> None:
        for name, operation in self.table.decide(self.now):
            assert name not in self.running
            self.running[name] = operation
            if operation in RESIDENT:
                assert sum(one in RESIDENT for one in self.running.values()) == 1
                assert self.max_loaded is None or len(self.computes | {name}) <= self.max_loaded
            elif operation is not Operation.RESOLVE:
                assert not any(using[name] for using in self.using), "stopped in the middle of a request"
                self.computes.discard(name)
        views = {name: (model.state, model.epoch, model.retry_at) for name, model in self.table.models.items()}
        for queue in self.down:
            queue.append(views)

    def end_operation(self, name: str, error: str) -> None:
        if name in self.running:
            operation = self.running.pop(name)
            error = error if operation in (Operation.RESOLVE, *RESIDENT) else ""
            if operation in RESIDENT and not error:
                self.computes.add(name)
            self.table.operation_ended(name, self.now, error)
            self.decide()

    def deliver_up(self, number: int) -> None:
        if self.up[number]:
            method, arguments = self.up[number].popleft()
            getattr(self.table, method)(number, *arguments)
            self.decide()

    # --- front ends ---

    def deliver_down(self, number: int) -> None:
        if self.down[number]:
            before, self.seen[number] = self.seen[number], self.down[number].popleft()
            for name, (state, epoch, _) in self.seen[number].items():
                if state is ModelState.DRAINING and epoch != before[name][1]:
                    self.up[number].append(("confirm", (name, epoch)))
                self.serve_waiting(number, name)

    def request(self, number: int, name: str) -> None:
        self.waiting[number][name] += 1
        self.serve_waiting(number, name)

    def serve_waiting(self, number: int, name: str) -> None:
        state, epoch, retry_at = self.seen[number][name]
        if not self.waiting[number][name]:
            return
        if state is ModelState.LOADED:
            if not self.using[number][name]:
                self.up[number].append(("begin", (name, self.now)))
            assert name in self.computes, "a request meets a model that is not loaded"
            self.using[number][name] += self.waiting[number][name]
        elif state is not ModelState.FAILED or self.now >= retry_at:
            if self.told[number].get(name) != epoch:
                self.told[number][name] = epoch
                self.up[number].append(("want", (name, self.now)))
            return
        self.answered += self.waiting[number][name]
        self.stop_waiting(number, name)

    def stop_waiting(self, number: int, name: str) -> None:
        self.waiting[number][name] = 0
        self.told[number].pop(name, None)
        self.up[number].append(("give_up", (name,)))

    def finish(self, number: int, name: str) -> None:
        if self.using[number][name]:
            self.using[number][name] -= 1
            if not self.using[number][name]:
                self.up[number].append(("end", (name, self.now)))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.decide()


moves = st.lists(
    st.tuples(
        st.sampled_from(("request", "request", "finish", "up", "up", "down", "down", "end", "end", "fail", "time",
                         "unload", "sleep", "give up", "memory")),
        st.integers(0, FRONT_ENDS - 1),
        st.sampled_from(NAMES),
    ),
    max_size=80,
)  # fmt: skip


@settings(max_examples=300)
@given(moves, st.sampled_from((None, 1, 2)), st.sampled_from((None, 5.0)), st.booleans(), st.booleans())
def test_a_request_uses_a_loaded_model_and_none_waits_forever(
    moves: list[tuple[str, int, str]], max_loaded: int | None, ttl: float | None, fits: bool, flooded: bool
) -> None:
    """`flooded`: one model is never without a request."""
    world = World(max_loaded, ttl, fits)
    for move, number, name in moves:
        match move:
            case "request":
                world.request(number, name)
            case "finish":
                world.finish(number, name)
            case "up":
                world.deliver_up(number)
            case "down":
                world.deliver_down(number)
            case "end" | "fail":
                world.end_operation(name, "no memory" if move == "fail" else "")
            case "time":
                world.pass_time(3.0)
            case "unload" | "sleep":
                world.table.unload(name, ModelState.UNLOADED if move == "unload" else ModelState.SLEEPING)
                world.decide()
            case "give up":
                if world.waiting[number][name]:
                    world.stop_waiting(number, name)
            case "memory":
                world.free = not world.free
    # From now on all goes well: each request that waits is answered.
    for turn in count():
        for number in range(FRONT_ENDS):
            while world.up[number] or world.down[number]:
                world.deliver_up(number)
                world.deliver_down(number)
            flooded = flooded and any(one[name] for one in world.waiting for name in ("b", "c"))
            if flooded:
                world.request(number, "a")
            for name in NAMES:
                world.finish(number, name)
        for name in list(world.running):
            world.end_operation(name, "")
        world.pass_time(1.0)
        if not any(any(one.values()) for one in (*world.waiting, *world.using)) and not world.running:
            break
        assert turn < 10 * (PATIENCE_SECONDS + RETRY_SECONDS), "a request waits forever"
