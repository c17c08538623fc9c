"""Assignments: no request is lost or with two neighbours, and suspects stay where they were, whatever happens."""

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tgi.microkernel.links.link import PeerId, ReplicaId
from tgi.microkernel.messages.protocol import PROTOCOL, Hello, LastExit, RequestContext
from tgi.microkernel.recovery.assignments import (
    EXIT_REPORT_SECONDS,
    RESUBMISSION_BURST,
    RESUBMISSIONS_PER_SECOND,
    Assignments,
    Neighbour,
)

NEIGHBOURS = 4


@dataclass(eq=False)
class Request:
    context: RequestContext


class Upstream(RuleBasedStateMachine):
    """A process with neighbours below, of which some are on other hosts: what these have in progress is not known."""

    @initialize(remote=st.lists(st.booleans(), min_size=NEIGHBOURS, max_size=NEIGHBOURS))
    def start(self, remote: list[bool]) -> None:
        self.now, self.rids = 0.0, 0
        self.remote = remote
        self.neighbours = [Neighbour[Request](ReplicaId("", number)) for number in range(NEIGHBOURS)]
        self.assignments: Assignments[Neighbour[Request], Request] = Assignments(self.choose, self.work_in_progress)
        self.live: set[Request] = set()
        self.in_progress: dict[int, bytes] = {}  # what the latest process of each neighbour works on
        # By what a process died with: the neighbours that may try it, and until when no other may.
        self.bound: dict[bytes, tuple[set[int], float]] = {}
        for number in range(NEIGHBOURS):
            self.connect(number, told=False)

    def choose(self, request: Request, now: float) -> Neighbour[Request] | None:
        able = [one for one in self.neighbours if one.responds]
        return min(able, key=lambda one: len(one.requests), default=None)

    def work_in_progress(self, peer: PeerId) -> bytes | None:
        return None if self.remote[peer.replica] else self.in_progress.get(peer.replica, b"")

    def assign(self, request: Request, neighbour: Neighbour[Request]) -> None:
        assert neighbour.peer is not None
        if (bound := self.bound.get(request.context.fingerprint)) is not None and self.now < bound[1]:
            assert neighbour.replica_id.replica in bound[0], (
                "a suspect was sent elsewhere before a successor had told how it ended"
            )
        self.rids += 1
        self.assignments.assign(request, neighbour, self.rids)

    def submit_waiting(self) -> None:
        for request, neighbour in self.assignments.next_due(self.now):
            self.assign(request, neighbour)

    @rule(name=st.sampled_from([b"", b"innocent", b"poison-1", b"poison-2"]))
    def submit(self, name: bytes) -> None:
        request = Request(RequestContext(name))
        self.live.add(request)
        if (neighbour := self.assignments.choose(request, self.now)) is None:
            self.assignments.wait(request)
        else:
            self.assign(request, neighbour)

    @rule(number=st.integers(0, NEIGHBOURS - 1), planned=st.booleans(), hand=st.integers(0, 5))
    def die(self, number: int, planned: bool, hand: int) -> None:
        neighbour = self.neighbours[number]
        if neighbour.peer is None:
            return
        names = [one.context.fingerprint for one in neighbour.requests.values() if one.context.fingerprint]
        name = names[hand % len(names)] if names and not planned else b""
        self.in_progress[number] = name
        if name and not self.remote[number]:
            self.bound[name] = {number}, self.now + EXIT_REPORT_SECONDS
        if self.remote[number]:  # what has lost a process before is bound here now
            for one in names:
                self.bound.get(one, (set(), 0.0))[0].add(number)
        for request in self.assignments.lost(neighbour, self.now, planned=planned):
            self.assignments.wait(request)
        self.submit_waiting()

    @rule(number=st.integers(0, NEIGHBOURS - 1), told=st.booleans())
    def connect(self, number: int, told: bool) -> None:
        neighbour = self.neighbours[number]
        if neighbour.peer is not None:
            return
        self.rids += 1
        peer = PeerId("below", number, b"%08d" % self.rids)
        name = self.in_progress.pop(number, b"")
        last = LastExit(neighbour.lost_boot, "was killed", False, name) if told and neighbour.lost_boot else None
        assert (self.assignments.connected(neighbour, peer, Hello(PROTOCOL, *peer, last_exit=last), self.now)) == last
        if last is not None:
            self.bound = {key: one for key, one in self.bound.items() if number not in one[0]}
            if name:
                self.bound[name] = {number}, self.now + EXIT_REPORT_SECONDS
        self.submit_waiting()

    @rule(number=st.integers(0, NEIGHBOURS - 1))
    def hang(self, number: int) -> None:
        neighbour = self.neighbours[number]
        if neighbour.peer is None or neighbour.silent:
            return
        neighbour.silent = True
        suspects = self.assignments.suspects(neighbour)
        for request in [one for one in neighbour.requests.values() if one.context.fingerprint not in suspects]:
            assert self.assignments.remove(request) is not None
            self.assignments.wait(request)
        self.submit_waiting()

    @rule(number=st.integers(0, NEIGHBOURS - 1))
    def respond(self, number: int) -> None:
        self.neighbours[number].silent = False
        self.submit_waiting()

    @rule(number=st.integers(0, NEIGHBOURS - 1), well=st.booleans())
    def end(self, number: int, well: bool) -> None:
        neighbour = self.neighbours[number]
        rid = next(iter(neighbour.requests), None)
        if rid is None:
            assert self.assignments.pop(neighbour, self.rids + 1) is None
            return
        request = self.assignments.pop(neighbour, rid)
        assert request is not None
        self.live.remove(request)
        assert self.assignments.pop(neighbour, rid) is None
        if well:
            self.assignments.ended_well(request)
            self.bound.pop(request.context.fingerprint, None)

    @rule(seconds=st.sampled_from([0.001, 0.1, 5.0, EXIT_REPORT_SECONDS]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.submit_waiting()

    @invariant()
    def each_is_in_one_place(self) -> None:
        if not hasattr(self, "live"):
            return
        placed = [one for neighbour in self.neighbours for one in neighbour.requests.values()]
        assert len(placed) + len(self.assignments.waiting) == len(self.live)
        assert {*placed, *self.assignments.waiting} == self.live == set(self.assignments)
        assert all(neighbour.peer is not None for neighbour in self.neighbours if neighbour.requests)
        for neighbour in self.neighbours:
            for rid, request in neighbour.requests.items():
                assert self.assignments.neighbour_of(request) == (neighbour, rid)

    def teardown(self) -> None:
        """Once all respond and the time for reports is over, every request has a neighbour."""
        if not hasattr(self, "live"):
            return
        for neighbour in self.neighbours:
            neighbour.silent = False
            self.connect(neighbour.replica_id.replica, told=False)
        self.wait(EXIT_REPORT_SECONDS)
        assert not self.assignments.waiting


Upstream.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestUpstream = Upstream.TestCase


def test_a_mass_of_requests_is_submitted_again_at_the_limited_rate() -> None:
    neighbour = Neighbour[Request](ReplicaId("", 0))
    assignments: Assignments[Neighbour[Request], Request]
    assignments = Assignments(lambda request, now: neighbour, lambda peer: b"")
    requests = [Request(RequestContext()) for _ in range(RESUBMISSION_BURST + 500)]
    for request in requests:
        assignments.wait(request)
    now, sent = 0.0, []
    while assignments.waiting:
        for request, receiver in assignments.next_due(now):
            assignments.assign(request, receiver, len(sent))
            sent.append((request, now))
        if (due_at := assignments.due_at) is not None:
            assert due_at > now
            now = due_at
    assert [request for request, _ in sent] == requests
    assert sum(at == 0 for _, at in sent) == RESUBMISSION_BURST
    assert now >= 0.99 * 500 / RESUBMISSIONS_PER_SECOND
