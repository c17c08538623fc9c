"""Replays a journal: makes every call again on a new scheduler and compares what it returns, bit for bit."""

from collections.abc import Callable
from typing import NamedTuple

from tgi.scheduler.journal import Call, Journal, messages_digest, step_digest
from tgi.scheduler.scheduler import Scheduler


class Divergence(NamedTuple):
    """The first call whose result differs from the recorded one."""

    number: int  # of the call, from 0
    call: Call


def replay(
    journal: Journal, observe: Callable[[Scheduler, Call], None] = lambda scheduler, call: None
) -> Divergence | None:
    """Makes the calls of a journal until one gives another result than the recorded one; None: none does. `observe` is
    called before each of them."""
    scheduler = Scheduler(journal.config)
    for number, call in enumerate(journal.calls):
        observe(scheduler, call)
        if _differs(scheduler, call):
            return Divergence(number, call)
    return None


def describe(journal: Journal, divergence: Divergence | None) -> str:
    """Whether the decisions were repeated, in a sentence."""
    if divergence is None:
        cut = "; the journal ends within a record" if journal.cut_off else ""
        return f"All {len(journal.calls)} calls gave the recorded results, bit for bit{cut}."
    number, call = divergence
    return (
        f"Call {number} of {len(journal.calls)} ({call.method} at {call.now:.6f} s) gave another result than the "
        "recorded one. Was the journal written by another version of tgi?"
    )


def _differs(scheduler: Scheduler, call: Call) -> bool:
    """Makes a call. Returns whether its result differs from the recorded one."""
    match call.method:
        case "handle":
            assert call.source is not None
            scheduler.handle(call.message, call.source, call.now)
        case "plan":
            return step_digest(scheduler.plan(call.now)) != call.digest
        case "report_status":
            scheduler.report_status(call.now)
        case "outgoing":
            return messages_digest(list(scheduler.outgoing())) != call.digest
        case _:
            scheduler.commit()
    return False
