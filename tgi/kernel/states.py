"""The life of a request: its states, and of each event the one table of what it may lead from to what."""

from enum import StrEnum


class State(StrEnum):
    """Where a request is, seen from the scheduler (and, without PREFILL and DECODE, from each floor above)."""

    QUEUED = "queued"
    PREFILL = "prefill"
    DECODE = "decode"
    ENDED = "ended"


# By themselves, for whoever asks often: an enum takes longer to look one up than many a function to do its work.
QUEUED, PREFILL, DECODE, ENDED = State


class Event(dict[State, State]):
    """What happens to requests: `request.state = END[request.state]`. Raises ValueError in a state in which it must not
    happen: that is a defect, never an input."""

    def __init__(self, name: str, leads: dict[State, State]) -> None:
        super().__init__(leads)
        self.name = name

    def __missing__(self, state: State) -> State:
        raise ValueError(f"illegal transition: {self.name!r} in state {state}")


# The single truth about legal transitions. ENDED has no way out and is reached once.
CHUNK = Event("chunk", {QUEUED: PREFILL, PREFILL: PREFILL})
LAST_CHUNK = Event("last chunk", {QUEUED: DECODE, PREFILL: DECODE})
PREEMPT = Event("preempt", {PREFILL: QUEUED, DECODE: QUEUED})
WORKER_LOST = Event("worker lost", {PREFILL: QUEUED, DECODE: QUEUED})
END = Event("end", {QUEUED: ENDED, PREFILL: ENDED, DECODE: ENDED})
EVENTS = (CHUNK, LAST_CHUNK, PREEMPT, WORKER_LOST, END)
