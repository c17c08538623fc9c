"""Crash isolation: finds the requests that crash a process, by trial. Sans-IO.

Equal requests have the same fingerprint, so a retry of the same request is recognised. A death of a process gives a
strike to each request that the process had in progress, never to those that it had queued. These requests are then on
trial: they are divided into groups, and only one group is worked on at a time, in short turns, with turns of all other
requests in between, so that every stream continues. The next death therefore names one group, and the one after it, as
a rule, one request. A request is quarantined by its third strike if that fell while it was alone in progress. A group
is released when its members have made enough progress; their strikes remain until they end well.

A death from outside (a signal that neither the supervisor nor the process itself sent) says nearly nothing about the
requests in progress. A request shows that it did not cause one by surviving: it makes the tokens of a trial, or another
death comes without it. Two deaths without that in between begin a trial, in which a single group has one turn in six:
an accident hardly ever hits it again and again. A request that was in progress at QUARANTINE_OUTSIDE_DEATHS of them in
a row, at the last one alone, is quarantined. A death of another process begins a new row.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tgi.microkernel.messages.protocol import SuspectRecord
from tgi.microkernel.recovery.work_register import FINGERPRINT_BYTES, Named

# Strikes that quarantine, if the last one fell while the request was alone in progress.
QUARANTINE_STRIKES = 3
# Deaths from outside in a row that quarantine, if the request was alone in progress at the last one: after the two that
# begin the trial, five in a turn that comes once in six times.
QUARANTINE_OUTSIDE_DEATHS = 7
# Up to this many suspects are tried alone; more in groups of √n, so that a third death names one request.
MAX_TRIED_ALONE = 8
# Steps of a turn. Blame is exact however short a turn is, since only one group is in progress. Longer turns have fewer
# pauses in between, shorter ones delay streams less.
TURN_STEPS = 2
# Steps of all other requests between two turns of a single group that is tried for deaths from outside.
OTHER_STEPS = 5 * TURN_STEPS
# Tokens that each member of a group makes until the group is released. Doubled with each further strike, for requests
# that crash the process rarely.
TRIAL_TOKENS, MAX_DOUBLINGS = 8, 6
# Suspects that have not ended well are remembered: at most this many, the latest ones, and for this long.
MAX_SUSPECTS, MEMORY_SECONDS = 4096, 3600.0


@dataclass(slots=True)
class Suspect:
    """What is known of a suspect."""

    strikes: int = 0
    quarantined: bool = False
    cause: str = ""  # of the latest strike, in words
    blamed_at: float = 0.0  # the latest death with it in progress
    outside_deaths: int = 0  # in a row
    group: int = -1  # number of the group in which it is tried; -1: it is not on trial
    tokens_left: int = 0  # that it makes until it may be released, or has survived a death from outside
    live: int = 0  # its admitted requests; a client may have sent the same one twice


@dataclass(slots=True, eq=False)
class TrialGroup:
    """Suspects that are worked on together, and with no other request."""

    number: int
    strikes: int
    members: set[bytes] = field(default_factory=set)


class CrashIsolation:
    """The suspects, and which requests may be worked on now. Times are seconds on one clock.

    Call `record_death` at each death, `admit` for each suspect that arrives (those that have just become suspects
    included) and `discard` for each that ends. While there are `suspects`, report tokens. While `on_trial`, work only
    on requests for which `may_run`, report steps, and call `next_turn` when `turn_over`, as soon as nothing is in
    progress.
    """

    def __init__(self) -> None:
        self.suspects: dict[bytes, Suspect] = {}  # in the order of the latest deaths
        self.changes = 0  # counts up with each change that a successor of this process must know
        self._groups: list[TrialGroup] = []  # those with live members, most strikes first
        self._group: TrialGroup | None = None  # whose turn it is; None: all requests that are not on trial
        self._next_group = 0  # index of the next group
        self._steps_left = 0  # of this turn
        self._last_number = 0  # of a group

    # --- deaths -------------------------------------------------------------------------------------------------------

    def record_death(
        self, in_progress: Iterable[bytes], now: float, *, cause: str = "", outside: bool = False, strikes: int = 1
    ) -> list[bytes]:
        """The process died with the requests of these fingerprints in progress. Puts them on trial, and returns those
        that are quarantined."""
        self.changes += 1
        in_progress = list(in_progress)
        blamed = self._blame_for_outside_death(in_progress, now) if outside else in_progress
        quarantined = []
        for key in blamed:
            suspect = self._touch(key)
            if not outside:
                suspect.strikes += strikes
            elif suspect.strikes < QUARANTINE_STRIKES - 1:
                suspect.strikes += 1
            suspect.blamed_at = now
            suspect.cause = cause
            self._leave_group(key, suspect)
            suspect.group = -1
            if len(in_progress) == 1 and (
                suspect.outside_deaths >= QUARANTINE_OUTSIDE_DEATHS
                if outside
                else suspect.strikes >= QUARANTINE_STRIKES
            ):
                suspect.quarantined = True
                quarantined.append(key)
        if blamed:
            self._forget_old(now)
            self._begin_trial([key for key in blamed if key not in quarantined])
        if outside and self._group is not None:  # the turns of other groups are next
            self._next_group = self._groups.index(self._group) + 1
        else:
            self._next_group = 0
        self._group, self._steps_left = None, 0
        return quarantined

    def record_other_death(self) -> None:
        """Another process has died, so deaths from outside have another cause than the requests in progress."""
        for key in list(self.suspects):
            self._end_row(key)

    def _blame_for_outside_death(self, in_progress: list[bytes], now: float) -> list[bytes]:
        """Counts a death from outside. Returns those that are to be tried, or tried in smaller groups."""
        for key in self.suspects.keys() - in_progress:
            self._end_row(key)
        blamed = []
        for key in in_progress:
            suspect = self._touch(key)
            suspect.blamed_at = now
            suspect.outside_deaths += 1
            suspect.tokens_left = _trial_tokens(suspect)
            if suspect.outside_deaths > 1 and (
                suspect.group < 0 or len(in_progress) > 1 or suspect.outside_deaths >= QUARANTINE_OUTSIDE_DEATHS
            ):
                blamed.append(key)
        return blamed

    def _end_row(self, key: bytes) -> None:
        """The deaths from outside so far are no evidence against this request."""
        suspect = self.suspects[key]
        self.changes += suspect.outside_deaths > 0
        suspect.outside_deaths = 0
        if not suspect.strikes:
            del self.suspects[key]

    def _touch(self, key: bytes) -> Suspect:
        """The record of a suspect, which becomes the latest."""
        suspect = self.suspects.pop(key, None) or Suspect()
        self.suspects[key] = suspect
        return suspect

    def _forget_old(self, now: float) -> None:
        for key, suspect in list(self.suspects.items()):
            if len(self.suspects) <= MAX_SUSPECTS and now - suspect.blamed_at < MEMORY_SECONDS:
                break
            self._leave_group(key, suspect)
            del self.suspects[key]

    def _begin_trial(self, keys: list[bytes]) -> None:
        """Divides these into groups, those with the most strikes first. Other groups remain as they are."""
        keys.sort(key=lambda key: -self.suspects[key].strikes)
        size = 1 if len(keys) <= MAX_TRIED_ALONE else math.isqrt(len(keys) - 1) + 1
        for index, key in enumerate(keys):
            if index % size == 0:
                self._last_number += 1
            suspect = self.suspects[key]
            suspect.group = self._last_number
            suspect.live = 0
            suspect.tokens_left = _trial_tokens(suspect)

    # --- across restarts ----------------------------------------------------------------------------------------------

    @property
    def records(self) -> list[SuspectRecord]:
        """The suspects, for a successor: those whose names it can recognise."""
        return [
            SuspectRecord(
                fingerprint=key,
                strikes=suspect.strikes,
                quarantined=suspect.quarantined,
                cause=suspect.cause,
                blamed_at=suspect.blamed_at,
                outside_deaths=suspect.outside_deaths,
                group=suspect.group,
                tokens_left=suspect.tokens_left,
            )
            for key, suspect in self.suspects.items()
            if len(key) == FINGERPRINT_BYTES
        ]

    def restore(self, records: list[SuspectRecord], now: float) -> None:
        """Takes over the suspects of a predecessor, none of whose requests are here."""
        for record in records:
            self.suspects[record.fingerprint] = Suspect(
                strikes=record.strikes,
                quarantined=record.quarantined,
                cause=record.cause,
                blamed_at=min(record.blamed_at, now),
                outside_deaths=record.outside_deaths,
                group=record.group,
                tokens_left=record.tokens_left,
            )
        self._last_number = max((record.group for record in records), default=0)

    # --- requests -----------------------------------------------------------------------------------------------------

    def find(self, request: Named) -> Suspect | None:
        """What is known of a request, if it has a strike."""
        suspect = self.suspects.get(request.context.fingerprint)
        return suspect if suspect is not None and suspect.strikes else None

    def quarantine_reason(self, request: Named, now: float) -> str:
        """Why the request was quarantined, in words; "" if it was not within the last MEMORY_SECONDS."""
        suspect = self.suspects.get(request.context.fingerprint)
        if suspect is None or not suspect.quarantined or now - suspect.blamed_at >= MEMORY_SECONDS:
            return ""
        deaths = max(QUARANTINE_STRIKES, suspect.outside_deaths)
        return f"{suspect.cause} while it worked on this request alone, after {deaths - 1} similar deaths"

    def admit(self, request: Named) -> None:
        """A request has arrived, or has just become a suspect. It joins the group in which it is to be tried, if any:
        one that was cancelled, or was here before this process was restarted, is still on trial."""
        suspect = self.suspects.get(request.context.fingerprint)
        if suspect is None or suspect.group < 0:
            return
        suspect.live += 1
        group = next((group for group in self._groups if group.number == suspect.group), None)
        if group is None:
            group = TrialGroup(suspect.group, suspect.strikes)
            self._groups.append(group)
            self._groups.sort(key=lambda group: -group.strikes)
        group.members.add(request.context.fingerprint)

    def discard(self, request: Named, *, well: bool) -> None:
        """A request has ended. That clears its strikes if it ended well: otherwise the same request may come back."""
        suspect = self.suspects.get(key := request.context.fingerprint)
        if suspect is None:
            return
        suspect.live = max(0, suspect.live - 1)
        if well or not suspect.live:
            self._leave_group(key, suspect)
        if well or not suspect.strikes:
            self.changes += suspect.strikes > 0
            del self.suspects[key]

    # --- trial --------------------------------------------------------------------------------------------------------

    @property
    def dangerous(self) -> Iterator[bytes]:
        """The suspects on trial, also those that are not here now, and those that were quarantined."""
        return (key for key, suspect in self.suspects.items() if suspect.group >= 0 or suspect.quarantined)

    @property
    def on_trial(self) -> bool:
        """Whether any request is on trial: then work only on those for which `may_run`."""
        return bool(self._groups)

    @property
    def is_group_turn(self) -> bool:
        """Whether it is the turn of a group."""
        return self._group is not None

    def is_on_trial(self, request: Named) -> bool:
        """Whether this request has turns of its own, or of its group."""
        suspect = self.suspects.get(request.context.fingerprint)
        return suspect is not None and suspect.group >= 0 and suspect.live > 0

    def may_run(self, request: Named) -> bool:
        """Whether the request may be worked on in this turn."""
        if self._group is not None:
            return request.context.fingerprint in self._group.members
        return not self.is_on_trial(request)

    @property
    def turns(self) -> int:
        """The number of turns after which each request has had one."""
        return 2 * len(self._groups)

    @property
    def turn_over(self) -> bool:
        """Whether the next step belongs to another turn."""
        return self._steps_left <= 0

    def next_turn(self) -> None:
        """Begins the next turn: of the next group, or after a group of all requests that are not on trial. To be called
        when nothing is in progress."""
        self._steps_left = TURN_STEPS
        if self._group is not None or not self._groups:
            self._group = None
            if len(self._groups) == 1 and any(self.suspects[key].outside_deaths for key in self._groups[0].members):
                self._steps_left = OTHER_STEPS
            return
        self._group = self._groups[self._next_group % len(self._groups)]
        self._next_group = (self._next_group + 1) % len(self._groups)

    def record_step(self) -> None:
        """A step of this turn has begun."""
        self._steps_left -= 1

    def record_token(self, request: Named) -> list[bytes]:
        """A suspect has made a token. Releases its group if that completes its trial; returns those that are
        released."""
        suspect = self.suspects.get(key := request.context.fingerprint)
        if suspect is None:
            return []
        suspect.tokens_left -= 1
        if suspect.tokens_left > 0:
            return []
        if suspect.group < 0:
            self._end_row(key)
            return []
        group = next((group for group in self._groups if group.number == suspect.group), None)
        if group is None or any(self.suspects[member].tokens_left > 0 for member in group.members):
            return []
        self.changes += 1
        released = list(group.members)
        for member in released:
            self._leave_group(member, self.suspects[member])
            self.suspects[member].group = -1
            self._end_row(member)
        return released

    def _leave_group(self, key: bytes, suspect: Suspect) -> None:
        """Removes it from its group, and the group if it was the last member."""
        suspect.live = 0
        for index, group in enumerate(self._groups):
            if group.number == suspect.group:
                group.members.discard(key)
                if not group.members:
                    del self._groups[index]
                    if group is self._group or not self._groups:
                        # What it has in progress is awaited before anything else is worked on.
                        self._group, self._steps_left = None, 0
                    if index < self._next_group:
                        self._next_group -= 1
                return


def _trial_tokens(suspect: Suspect) -> int:
    return TRIAL_TOKENS << min(max(0, suspect.strikes - 1), MAX_DOUBLINGS)
