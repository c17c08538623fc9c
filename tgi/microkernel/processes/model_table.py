"""Which of several models are loaded: a table of states without sockets, clocks and processes.

The supervisor tells the table what front ends and processes do, and carries out the operations that `decide` returns.
A model is unloaded or put to sleep when each front end has said that none of its requests uses it: a front end that has
been told that a model drains keeps further requests for it, which wait until the model is loaded again.
"""

from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import NamedTuple

# For this long a request for a model that could not be loaded is answered with the reason; a later one tries again.
RETRY_SECONDS = 30.0
# A model for which requests wait takes the place of one in use after this time: that finishes its requests and waits in
# turn.
PATIENCE_SECONDS = 10.0


class ModelState(StrEnum):
    """What clients see of a model."""

    UNLOADED = "unloaded"
    LOADING = "loading"  # also what waits for memory, and what wakes up
    LOADED = "loaded"
    DRAINING = "draining"  # finishes its requests, and is unloaded or put to sleep then
    SLEEPING = "sleeping"  # without its weights and KV cache
    FAILED = "failed"  # could not be loaded


# What may follow on each state.
TRANSITIONS: dict[ModelState, frozenset[ModelState]] = {
    ModelState.UNLOADED: frozenset({ModelState.LOADING}),
    ModelState.LOADING: frozenset(
        {ModelState.LOADED, ModelState.FAILED, ModelState.UNLOADED, ModelState.SLEEPING, ModelState.DRAINING}
    ),
    ModelState.LOADED: frozenset({ModelState.DRAINING}),
    ModelState.DRAINING: frozenset({ModelState.LOADED, ModelState.UNLOADED, ModelState.SLEEPING}),
    ModelState.SLEEPING: frozenset({ModelState.LOADING, ModelState.DRAINING}),
    ModelState.FAILED: frozenset({ModelState.LOADING, ModelState.UNLOADED}),
}


class Operation(StrEnum):
    """What the supervisor does with a model. One operation at a time for a model; one LOAD or WAKE in all."""

    RESOLVE = "resolve"  # finds or downloads its files
    LOAD = "load"
    UNLOAD = "unload"
    SLEEP = "sleep"
    WAKE = "wake"


# What is done with a model that has drained, by its target.
DRAINED = {ModelState.UNLOADED: Operation.UNLOAD, ModelState.SLEEPING: Operation.SLEEP}


# The socket in the run directory, at which the supervisor and the front ends tell each other of the models.
SOCKET_NAME = "models"


class FrontEndCommand(StrEnum):
    """What a front end sends about a model: see the methods of ModelTable."""

    WANT = "want"
    GIVE_UP = "give up"
    BEGIN = "begin"
    END = "end"
    CONFIRM = "confirm"  # with the epoch
    LOAD = "load"
    UNLOAD = "unload"
    SLEEP = "sleep"


class ModelView(NamedTuple):
    """What front ends know of a model. `retry_at` is of time.monotonic, which all processes of a host share."""

    name: str
    state: str
    stage: str
    error: str
    retry_at: float
    epoch: int
    life: int
    adapters: list[str]  # those that the settings name


class Model:
    """One model of the table."""

    def __init__(self, name: str, ttl: float | None) -> None:
        self.name = name
        self.ttl = ttl
        self.state = ModelState.UNLOADED
        self.stage = ""  # of loading, in words
        self.error = ""  # why it could not be loaded
        self.retry_at = 0.0  # of a failed one: from then on a request tries again
        self.life = 0  # counts the times that its processes have ended
        self.epoch = 0  # counts changes of the state: front ends confirm those to DRAINING
        self.holders: set[int] = set()  # front ends with requests that use it
        self.waiting: set[int] = set()  # front ends with requests that wait for it
        self.confirmed: set[int] = set()  # of DRAINING: front ends that keep further requests
        self.target = ModelState.UNLOADED  # of DRAINING
        self.for_idleness = False  # it drains only because it was idle: a request ends that
        self.operation: Operation | None = None  # that is carried out now
        self.resolved = False
        self.has_processes = False
        self.unload_next = False  # asked for while it loads
        self.wanted_since = 0.0
        self.used_at = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether a request uses it or waits for it."""
        return bool(self.holders or self.waiting)


class Started(NamedTuple):
    """An operation to be carried out now."""

    model: str
    operation: Operation


class ModelTable:
    """The models of a server. Times are seconds of any one clock."""

    def __init__(
        self,
        models: Iterable[tuple[str, float | None]],
        max_loaded: int | None = None,
        fits: Callable[[str], bool] = lambda name: True,
    ) -> None:
        """`models`: names with their seconds without a request until they are unloaded (None: never). `fits`: whether
        there is memory for a model now, by an estimate, which unloads others and refuses nothing."""
        self.models = {name: Model(name, ttl) for name, ttl in models}
        self._max_loaded = max_loaded
        self._fits = fits
        self._front_ends: set[int] = set()

    # --- what front ends tell; `front_end` is any number ---

    def connect(self, front_end: int) -> None:
        """Another front end has connected."""
        self._front_ends.add(front_end)

    def disconnect(self, front_end: int, now: float) -> None:
        """A front end has ended, and its requests with it."""
        self._front_ends.discard(front_end)
        for model in self.models.values():
            model.waiting.discard(front_end)
            self.end(front_end, model.name, now)

    def want(self, front_end: int, name: str, now: float, *, again: bool = False) -> None:
        """A request waits for a model that it cannot use now: to be repeated when the state has changed to another one
        than LOADED. `again`: also for one that has just failed."""
        model = self.models[name]
        if model.state is ModelState.FAILED and now < model.retry_at and not again:
            return
        model.waiting.add(front_end)
        self._load(model, now)

    def give_up(self, front_end: int, name: str) -> None:
        """No request of this front end waits for the model any more."""
        self.models[name].waiting.discard(front_end)

    def begin(self, front_end: int, name: str, now: float) -> None:
        """The first request of a front end uses the model."""
        model = self.models[name]
        model.holders.add(front_end)
        model.used_at = now

    def end(self, front_end: int, name: str, now: float) -> None:
        """The last request of a front end that used the model has ended."""
        model = self.models[name]
        if front_end in model.holders:
            model.holders.remove(front_end)
            model.used_at = now

    def confirm(self, front_end: int, name: str, epoch: int) -> None:
        """A front end has seen that the model drains. From now on it begins no request."""
        model = self.models[name]
        if model.state is ModelState.DRAINING and model.epoch == epoch:
            model.confirmed.add(front_end)

    # --- what is asked for ---

    def load(self, name: str, now: float) -> None:
        """Loads a model if there is room without unloading another one."""
        self._load(self.models[name], now)

    def unload(self, name: str, target: ModelState = ModelState.UNLOADED) -> None:
        """Unloads a model, or has it sleep (`target`), when its requests have ended."""
        model = self.models[name]
        match model.state:
            case ModelState.LOADED:
                self._drain(model, target)
            case ModelState.SLEEPING if target is ModelState.UNLOADED:
                self._drain(model, target)
            case ModelState.DRAINING:
                model.for_idleness = False
                if target is ModelState.UNLOADED and model.operation is None:
                    model.target = target
            case ModelState.LOADING:
                if model.operation in (None, Operation.RESOLVE):
                    self._stop_waiting(model)
                    if model.has_processes and target is ModelState.UNLOADED:
                        self._drain(model, target)
                else:
                    model.unload_next, model.target = True, target
            case ModelState.FAILED if target is ModelState.UNLOADED:
                self._enter(model, ModelState.UNLOADED)
            case _:
                pass

    # --- what the supervisor reports ---

    def operation_ended(self, name: str, now: float, error: str = "") -> None:
        """An operation has ended; `error`: why it has failed, in words."""
        model = self.models[name]
        operation, model.operation = model.operation, None
        if operation is Operation.RESOLVE:
            model.resolved = not error
            if error and model.state is ModelState.LOADING:
                self._fail(model, error, now)
        elif operation in (Operation.LOAD, Operation.WAKE):
            if error:
                model.has_processes = False  # the supervisor has ended all of them
                model.life += 1
                model.resolved = False  # its files may be others when it is tried again
                self._fail(model, error, now)
            else:
                model.has_processes, model.used_at = True, now
                self._enter(model, ModelState.LOADED)
                if model.unload_next:
                    self._drain(model, model.target)
            model.unload_next = False
        else:
            if operation is Operation.UNLOAD:
                model.has_processes = False
                model.life += 1
            self._enter(model, model.target)

    def decide(self, now: float) -> list[Started]:
        """The operations to begin now. To be called after each change, and from time to time."""
        for model in self.models.values():
            self._decide_to_drain(model, now)
        drained = [model for model in self.models.values() if self._has_drained(model)]
        started = [self._start(model, DRAINED[model.target]) for model in drained]
        loading = sorted(
            (one for one in self.models.values() if one.state is ModelState.LOADING and one.operation is None),
            key=lambda one: one.wanted_since,
        )
        for model in loading:
            if not model.resolved:
                started.append(self._start(model, Operation.RESOLVE))
            elif self._is_loading():
                break
            elif self._has_room(model, now):
                started.append(self._start(model, Operation.WAKE if model.has_processes else Operation.LOAD))
            elif model.state is ModelState.LOADING:
                break  # the order of requests is that of loading
        return started

    # --- internals ---

    def _enter(self, model: Model, state: ModelState) -> None:
        assert state in TRANSITIONS[model.state], f"{model.name}: {model.state} -> {state}"
        model.state, model.stage = state, ""
        model.epoch += 1
        model.confirmed.clear()

    def _load(self, model: Model, now: float) -> None:
        if model.state in (ModelState.UNLOADED, ModelState.SLEEPING, ModelState.FAILED):
            model.error, model.wanted_since = "", now
            self._enter(model, ModelState.LOADING)
        elif model.state is ModelState.DRAINING and model.for_idleness and model.operation is None:
            model.for_idleness = False
            self._enter(model, ModelState.LOADED)
        elif model.state is ModelState.LOADING:
            model.unload_next = False

    def _drain(self, model: Model, target: ModelState, *, for_idleness: bool = False) -> None:
        self._enter(model, ModelState.DRAINING)
        model.target, model.for_idleness = target, for_idleness

    def _fail(self, model: Model, error: str, now: float) -> None:
        self._enter(model, ModelState.FAILED)
        model.error, model.retry_at = error, now + RETRY_SECONDS
        model.waiting.clear()  # those requests are answered with the error

    def _decide_to_drain(self, model: Model, now: float) -> None:
        """Begins to unload a model that has been idle for its time."""
        if model.state is not ModelState.LOADED or model.ttl is None or model.is_busy:
            return
        if now - model.used_at >= model.ttl:
            self._drain(model, ModelState.UNLOADED, for_idleness=True)

    def _has_drained(self, model: Model) -> bool:
        """Whether nothing uses a model that drains, and nothing will."""
        may_stop = model.state is ModelState.DRAINING and model.operation is None and not model.holders
        return may_stop and self._front_ends <= model.confirmed

    def _stop_waiting(self, model: Model) -> None:
        """Ends the wait of a model whose loading has not begun."""
        self._enter(model, ModelState.SLEEPING if model.has_processes else ModelState.UNLOADED)

    def _start(self, model: Model, operation: Operation) -> Started:
        model.operation = operation
        return Started(model.name, operation)

    def _is_loading(self) -> bool:
        return any(one.operation in (Operation.LOAD, Operation.WAKE) for one in self.models.values())

    def _has_room(self, model: Model, now: float) -> bool:
        """Whether a model can be loaded now; else makes room."""
        others = [one for one in self.models.values() if one is not model]
        resident = [one for one in others if one.state in (ModelState.LOADED, ModelState.DRAINING)]
        is_full = self._max_loaded is not None and len(resident) >= self._max_loaded
        if not is_full and (not resident or self._fits(model.name)):
            return True  # with nothing left to unload, loading tells whether the estimate is right
        if not model.waiting:  # it was to be loaded at start, or its clients have left
            self._stop_waiting(model)
            return False
        if any(one.state is ModelState.DRAINING for one in resident):
            return False  # there will be room, or more is to be made then
        loaded = sorted(resident, key=lambda one: one.used_at)
        idle = [one for one in loaded if not one.is_busy]
        if idle:
            self._drain(idle[0], ModelState.UNLOADED)
        elif now - model.wanted_since >= PATIENCE_SECONDS:
            self._drain(loaded[0], ModelState.UNLOADED)
        else:
            model.stage = "waiting for memory that other models use"
        return False
