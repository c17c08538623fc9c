"""The life of a request: its states, and the one table of what may lead from each to which."""

from enum import StrEnum


class State(StrEnum):
    """Where a request is, seen from the scheduler (and, without PREFILL and DECODE, from each floor above)."""

    QUEUED = "queued"
    PREFILL = "prefill"
    DECODE = "decode"
    ENDED = "ended"


# By themselves, for whoever asks often: an enum takes longer to look one up than many a function to do its work.
QUEUED, PREFILL, DECODE, ENDED = State


# The single truth about legal transitions: (from, what happens) -> to. ENDED has no way out and is reached once.
TRANSITIONS: dict[tuple[State, str], State] = {
    (State.QUEUED, "chunk"): State.PREFILL,
    (State.QUEUED, "last chunk"): State.DECODE,
    (State.QUEUED, "end"): State.ENDED,
    (State.PREFILL, "chunk"): State.PREFILL,
    (State.PREFILL, "last chunk"): State.DECODE,
    (State.PREFILL, "preempt"): State.QUEUED,
    (State.PREFILL, "worker lost"): State.QUEUED,
    (State.PREFILL, "end"): State.ENDED,
    (State.DECODE, "token"): State.DECODE,
    (State.DECODE, "preempt"): State.QUEUED,
    (State.DECODE, "worker lost"): State.QUEUED,
    (State.DECODE, "end"): State.ENDED,
}


def transition(state: State, event: str) -> State:
    """The state after `event`. Raises ValueError on an illegal one: that is a defect, never an input."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise ValueError(f"illegal transition: {event!r} in state {state}") from None
