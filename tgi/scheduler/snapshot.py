"""Snapshots of a scheduler: all its state, so that a journal can begin in the middle of its life (journal.py).

A snapshot is a list of nodes in MessagePack: one for each container and object that can be reached from the scheduler.
A value is a scalar, or `[index]` of a node, so that what is shared remains shared. Only classes of the scheduler's own
modules are constructed, and none of their functions is called: a journal from elsewhere can do no harm.
"""

from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from enum import Enum
from importlib import import_module
from typing import Any

from tgi.microkernel.codec import pack_values, unpack_values
from tgi.microkernel.flight_recorder import FlightRecorder
from tgi.microkernel.work_register import WorkRegister
from tgi.scheduler.scheduler import Scheduler

# Modules whose classes are part of a scheduler's state.
_STATE_MODULES = frozenset(
    f"tgi.{name}"
    for name in (
        "microkernel.crash_isolation",
        "microkernel.link",
        "microkernel.liveness",
        "microkernel.protocol",
        "microkernel.sampling_params",
        "scheduler.adapters",
        "scheduler.columns",
        "scheduler.counters",
        "scheduler.decode_batch",
        "scheduler.estimators",
        "scheduler.in_flight",
        "scheduler.kv_cache",
        "scheduler.peers",
        "scheduler.request",
        "scheduler.scheduler",
        "scheduler.speculation",
        "scheduler.step_planner",
        "scheduler.waiting_queue",
    )
)
_SCALARS = frozenset((type(None), bool, int, float, str, bytes))
# The kinds of containers that have no other state than their items, and the default of a defaultdict.
_LISTS: dict[str, Callable[..., Any]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_DEFAULTS = {"int": int, "float": float, "list": list, "dict": dict}


def take_snapshot(scheduler: Scheduler, *, without: str = "") -> bytes:
    """The state of a scheduler, but for its attribute `without`. To be called between two calls of its methods."""
    return _Writer().write(scheduler, without)


def load_snapshot(snapshot: bytes) -> Scheduler:
    """A scheduler in the state of the snapshot, which records and registers nothing. Raises ValueError if the data is
    no snapshot of this version of tgi."""
    try:
        scheduler = _Reader(unpack_values(snapshot)).read()
    except Exception as error:  # data from elsewhere may raise any
        raise ValueError(f"its snapshot cannot be read: {error!r}") from error
    if not isinstance(scheduler, Scheduler):
        raise ValueError("its snapshot is something else")
    return scheduler


class _Writer:
    """A node is [kind, details, items]. The items of an object are the names and values of its attributes."""

    def __init__(self) -> None:
        self._index: dict[int, int] = {}  # by id of the object
        self._found: list[Any] = []

    def write(self, scheduler: Scheduler, without: str) -> bytes:
        self._value(scheduler)
        state = {name: value for name, value in _attributes(scheduler).items() if name != without}
        nodes = [["object", _class_name(Scheduler), self._pairs(state)]]
        while len(nodes) < len(self._found):
            nodes.append(self._node(self._found[len(nodes)]))
        return pack_values(nodes)

    def _value(self, value: Any) -> Any:
        if type(value) in _SCALARS:
            return value
        if (index := self._index.get(id(value))) is None:
            index = self._index[id(value)] = len(self._found)
            self._found.append(value)  # which keeps it, so that its id is not used again
        return [index]

    def _values(self, values: Iterable[Any]) -> list[Any]:
        values = list(values)
        return values if _SCALARS.issuperset(map(type, values)) else [self._value(one) for one in values]

    def _pairs(self, pairs: dict[Any, Any]) -> list[Any]:
        return [self._values(pairs), self._values(pairs.values())]

    def _node(self, value: Any) -> list[Any]:
        kind = type(value)
        if kind.__name__ in _LISTS and _LISTS[kind.__name__] is kind:
            return [kind.__name__, None, self._values(value)]
        if kind in (dict, OrderedDict):
            return [kind.__name__, None, self._pairs(value)]
        if kind is defaultdict:
            return ["defaultdict", value.default_factory.__name__, self._pairs(value)]
        if kind is deque:
            return ["deque", value.maxlen, self._values(value)]
        if kind is array:
            return ["array", value.typecode, value.tobytes()]
        if isinstance(value, FlightRecorder):
            return ["recorder", None, None]
        if isinstance(value, WorkRegister):
            return ["register", None, None]
        if kind is memoryview:  # the slots of the register
            return ["slots", None, None]
        if isinstance(value, Enum):
            return ["enum", _class_name(kind), value.name]
        if isinstance(value, tuple):
            return ["named", _class_name(kind), self._values(value)]
        return [
            "object",
            _class_name(Scheduler if isinstance(value, Scheduler) else kind),
            self._pairs(_attributes(value)),
        ]


class _Reader:
    """Makes all objects, then what cannot change (tuples), then fills the others."""

    def __init__(self, nodes: list[Any]) -> None:
        self._nodes = nodes
        self._made: list[Any] = [None] * len(nodes)
        self._known = [False] * len(nodes)

    def read(self) -> Any:
        for index, (kind, details, items) in enumerate(self._nodes):
            if kind not in ("tuple", "named", "frozenset"):
                self._made[index], self._known[index] = _new(kind, details, items), True
        for index in range(len(self._nodes)):
            self._fixed(index)
        for made, (kind, _, items) in zip(self._made, self._nodes, strict=True):
            if kind in ("list", "deque"):
                made.extend(map(self._value, items))
            elif kind == "set":
                made.update(map(self._value, items))
            elif kind in ("dict", "OrderedDict", "defaultdict"):
                made.update(self._pairs(items))
            elif kind == "object":
                for name, value in self._pairs(items):
                    object.__setattr__(made, name, value)
        return self._made[0]

    def _fixed(self, index: int) -> Any:
        if not self._known[index]:
            kind, details, items = self._nodes[index]
            values = map(self._value, items)
            made = tuple.__new__(_class(details), values) if kind == "named" else _LISTS[kind](values)
            self._made[index], self._known[index] = made, True
        return self._made[index]

    def _value(self, value: Any) -> Any:
        return self._fixed(value[0]) if type(value) is list else value

    def _pairs(self, items: list[Any]) -> Iterable[tuple[Any, Any]]:
        keys, values = items
        return zip(map(self._value, keys), map(self._value, values), strict=True)


def _new(kind: str, details: Any, items: Any) -> Any:
    """What a node stands for, empty if it is a container."""
    match kind:
        case "list" | "set":
            return _LISTS[kind]()
        case "dict":
            return {}
        case "OrderedDict":
            return OrderedDict()
        case "defaultdict":
            return defaultdict(_DEFAULTS[details])
        case "deque":
            return deque(maxlen=details)
        case "array":
            return array(details, items)
        case "recorder":
            return FlightRecorder()
        case "register":
            return WorkRegister()
        case "slots":
            return WorkRegister().slots
        case "enum":
            return _class(details)[items]  # type: ignore[index]  # an Enum
        case "object":
            return object.__new__(_class(details))
    raise ValueError(f"unknown kind {kind!r}")


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object that are set, in its dictionary and in its slots."""
    names = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    return {name: getattr(value, name) for name in names if hasattr(value, name)} | getattr(value, "__dict__", {})


def _class_name(kind: type) -> str:
    if kind.__module__ not in _STATE_MODULES:
        raise TypeError(f"{kind.__module__}.{kind.__qualname__} is no part of a scheduler")
    return f"{kind.__module__}:{kind.__qualname__}"


def _class(name: str) -> type:
    """The class of this name. Raises ValueError if it is none of the scheduler's."""
    module, _, attribute = name.partition(":")
    if module in _STATE_MODULES:
        found = vars(import_module(module)).get(attribute)
        if isinstance(found, type) and found.__module__ == module:
            return found
    raise ValueError(f"{name} is no part of a scheduler")
