"""Crash isolation against simulated processes: requests that crash them are quarantined, all others never."""

import random
from dataclasses import dataclass, field

import pytest

from tgi.microkernel.messages.protocol import RequestContext
from tgi.microkernel.recovery.crash_isolation import (
    MEMORY_SECONDS,
    QUARANTINE_STRIKES,
    TRIAL_TOKENS,
    TURN_STEPS,
    CrashIsolation,
)


class Named:
    """A request by its fingerprint."""

    def __init__(self, name: bytes) -> None:
        self.context = RequestContext(fingerprint=name)


A, B = Named(b"a"), Named(b"b")


@dataclass
class Stream:
    """A request that makes one token per step, and crashes its process when it makes every `lethal`-th."""

    tokens_left: int
    lethal: int = 0
    tokens: int = 0
    kills: int = 0
    context: RequestContext = field(default_factory=RequestContext)


class Machine:
    """Computes streams in steps, as a scheduler with a worker does. Time passes by one second per step."""

    def __init__(self, *streams: Stream) -> None:
        self.isolation = CrashIsolation()
        self.streams: dict[int, Stream] = {}
        self.quarantined: list[int] = []
        self.finished: list[int] = []
        self.now = 1e6  # as on a host that has run for days
        self.longest_silence = 0
        self._silence: dict[int, int] = {}
        for stream in streams:
            self.add(stream)

    def add(self, stream: Stream) -> int:
        key = max(self.streams, default=-1) + 1
        stream.context = RequestContext(fingerprint=b"%d" % key)
        self.streams[key] = stream
        self._silence[key] = 0
        self.isolation.admit(stream)
        return key

    def rows(self) -> list[int]:
        """The streams of the next step."""
        isolation = self.isolation
        if isolation.turn_over:
            isolation.next_turn()
        for _ in range(isolation.turns + 1):
            if rows := [key for key, one in self.streams.items() if not isolation.on_trial or isolation.may_run(one)]:
                isolation.record_step()
                return rows
            isolation.next_turn()
        raise AssertionError("no stream may run")

    def step(self, kill: bool = False) -> None:
        """One step, or a death from outside during it."""
        self.now += 1.0
        rows = self.rows()
        for key in self.streams.keys() - rows:
            self._silence[key] += 1
            self.longest_silence = max(self.longest_silence, self._silence[key])
        self._silence.update(dict.fromkeys(rows, 0))
        streams = [self.streams[key] for key in rows]
        lethal = [stream for stream in streams if stream.lethal and (stream.tokens + 1) % stream.lethal == 0]
        if kill or lethal:
            for stream in lethal:
                stream.kills += not kill
                stream.tokens += 1  # it survives the retry: it crashes the process at the next multiple only
            self.die(rows, outside=kill)
            return
        for key in rows:
            stream = self.streams[key]
            stream.tokens += 1
            stream.tokens_left -= 1
            self.isolation.record_token(stream)
            if stream.tokens_left <= 0:
                self.isolation.discard(stream, well=True)
                self.finished.append(key)
                del self.streams[key]

    def die(self, rows: list[int], outside: bool = False) -> None:
        for name in self.isolation.record_death([b"%d" % key for key in rows], self.now, outside=outside):
            self.quarantined.append(int(name))
            self.isolation.discard(self.streams.pop(int(name)), well=False)
        for key in rows:
            if key in self.streams:
                self.isolation.admit(self.streams[key])

    def run(self, steps: int = 100_000) -> None:
        for _ in range(steps):
            if not self.streams:
                return
            self.step()
        raise AssertionError("not finished")


@pytest.mark.parametrize("lethal", [1, 2, 4, 7])
@pytest.mark.parametrize("innocent", [0, 1, 5, 8, 20, 150])
def test_a_lethal_request_is_quarantined_by_its_third_kill(innocent: int, lethal: int) -> None:
    machine = Machine(*[Stream(200) for _ in range(innocent)], Stream(1000, lethal))
    crashing = machine.streams[innocent]
    machine.run()
    assert machine.quarantined == [innocent]
    assert crashing.kills == QUARANTINE_STRIKES
    assert sorted(machine.finished) == list(range(innocent))


def test_every_stream_has_a_turn_within_a_few_steps() -> None:
    machine = Machine(*[Stream(100) for _ in range(20)], Stream(1000, 4))
    machine.run()
    assert machine.longest_silence <= 14 * 2 * TURN_STEPS


@pytest.mark.parametrize("seed", range(60))
def test_lethal_requests_among_random_ones_are_quarantined_and_no_other(seed: int) -> None:
    random_source = random.Random(seed)
    machine = Machine(*[Stream(random_source.randint(1, 300)) for _ in range(random_source.randint(0, 40))])
    lethal = set()
    for _ in range(random_source.randint(1, 3)):
        for _ in range(random_source.randint(0, 30)):
            if machine.streams:
                machine.step()
        lethal.add(machine.add(Stream(5000, random_source.choice([1, 2, 3, 4, 10, 40]))))
        machine.add(Stream(random_source.randint(1, 300)))
    for _ in range(2000):
        # Deaths from outside at any time, during trials too. They are rare enough for some progress in between.
        if machine.streams:
            machine.step(kill=random_source.random() < 0.01)
    machine.run()
    assert set(machine.quarantined) == lethal


@pytest.mark.parametrize("seed", range(20))
def test_deaths_from_outside_alone_quarantine_no_request(seed: int) -> None:
    """150 streams; between two deaths there is time for a few tokens."""
    random_source = random.Random(seed)
    machine = Machine(*[Stream(random_source.randint(50, 400)) for _ in range(150)])
    while machine.streams:
        machine.step(kill=random_source.random() < 0.05)
    assert not machine.quarantined


@pytest.mark.parametrize("lethal", [1, 4, 7])
@pytest.mark.parametrize(("innocent", "most"), [(0, 15), (1, 12), (5, 9), (20, 9), (150, 7)])
def test_deaths_from_outside_that_follow_a_request_quarantine_it(innocent: int, most: int, lethal: int) -> None:
    machine = Machine(*[Stream(10_000) for _ in range(innocent)], Stream(10_000))
    crashing = machine.streams[innocent]
    begun, deaths = 0, 0
    while not machine.quarantined:
        rows = machine.rows()
        if innocent in rows and crashing.tokens - begun == lethal - 1:
            machine.die(rows, outside=True)
            begun = crashing.tokens
            deaths += 1
            continue
        for key in rows:
            machine.streams[key].tokens += 1
            machine.isolation.record_token(machine.streams[key])
    assert machine.quarantined == [innocent]
    assert deaths <= most


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("steps", [1, 5, 15, 30])
def test_a_storm_of_deaths_from_outside_quarantines_no_request(seed: int, steps: int) -> None:
    """30 streams, 20 deaths with about as many steps in between."""
    random_source = random.Random(seed)
    machine = Machine(*[Stream(10_000) for _ in range(30)])
    for _ in range(20):
        for _ in range(random_source.randint(0, 2 * steps)):
            machine.step()
        machine.step(kill=True)
    assert not machine.quarantined


def test_the_death_of_another_process_begins_a_new_row() -> None:
    isolation = CrashIsolation()
    for _ in range(50):
        assert isolation.record_death([b"a"], 0.0, outside=True) == []
        isolation.record_other_death()
    assert isolation.suspects == {}


def test_survival_between_deaths_from_outside_begins_a_new_row() -> None:
    isolation = CrashIsolation()
    for _ in range(50):
        assert isolation.record_death([b"a"], 0.0, outside=True) == []
        for _ in range(TRIAL_TOKENS):
            isolation.record_token(A)
    assert isolation.suspects == {}


def test_a_strike_is_cleared_by_a_good_end_only() -> None:
    isolation = CrashIsolation()
    isolation.record_death([b"a"], 0.0)
    isolation.admit(A)
    isolation.discard(A, well=False)  # the client has left, and sends the same request again
    assert not isolation.on_trial
    assert isolation.find(A) is not None
    isolation.admit(A)
    assert isolation.is_on_trial(A)
    isolation.record_death([b"a"], 1.0)
    assert isolation.record_death([b"a"], 2.0) == [b"a"]
    assert isolation.quarantine_reason(A, 2.0)
    assert not isolation.quarantine_reason(A, 2.0 + MEMORY_SECONDS)

    isolation.record_death([b"b", b"c"], 3.0)
    isolation.discard(B, well=True)
    assert isolation.find(B) is None
    assert isolation.find(Named(b"c")) is not None


def test_equal_requests_share_their_strikes_and_their_turns() -> None:
    isolation = CrashIsolation()
    isolation.record_death([b"a", b"b"], 0.0)
    for request in (A, Named(b"a"), B):
        isolation.admit(request)
    isolation.discard(A, well=False)
    assert isolation.is_on_trial(A)
    isolation.discard(A, well=False)
    assert not isolation.is_on_trial(A)
    assert isolation.on_trial


def test_suspects_are_forgotten_after_an_hour() -> None:
    isolation = CrashIsolation()
    isolation.record_death([b"a"], 0.0)
    isolation.record_death([b"b"], MEMORY_SECONDS + 1)
    assert list(isolation.suspects) == [b"b"]


@pytest.mark.parametrize("now", [0.0, 1e6])
def test_a_first_death_from_outside_is_remembered_on_any_clock(now: float) -> None:
    isolation = CrashIsolation()
    isolation.record_death([b"a"], now, outside=True)
    isolation.record_death([b"a", b"b"], now + 1, outside=True)
    assert {key: suspect.outside_deaths for key, suspect in isolation.suspects.items()} == {b"a": 2, b"b": 1}


def test_a_group_that_is_cancelled_in_its_turn_is_awaited_before_others_are_worked_on() -> None:
    isolation = CrashIsolation()
    isolation.record_death([b"a", b"b"], 0.0)
    isolation.admit(A)
    isolation.admit(B)
    isolation.next_turn()
    isolation.record_step()
    assert isolation.may_run(A)
    assert not isolation.turn_over
    isolation.discard(A, well=False)
    assert isolation.turn_over
