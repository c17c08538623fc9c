"""Assignments: which neighbour below has which request, and who gets it when that one is lost or hangs. Sans-IO.

The router of a front end (for tokenizers) and the pool of a tokenizer (for schedulers) keep their requests here:
upstream owns what is needed to submit a request again. They choose neighbours; this class knows which requests wait,
how fast they are sent again, and which of them may have ended a process.

What a process had in progress when it died is bound to its neighbour until a successor has told how it ended, or for
EXIT_REPORT_SECONDS: so a request that crashes processes does not end one after the other. A neighbour on another host
tells what it had in progress only then. Its requests go on at once, and those that lose a second process so are bound:
a request ends two processes at most before it is known.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from tgi.microkernel.admission.token_bucket import TokenBucket
from tgi.microkernel.links.link import PeerId, ReplicaId
from tgi.microkernel.messages.protocol import Beat, Hello, LastExit
from tgi.microkernel.recovery.work_register import Named, names_of, split_in_progress

# Requests that are submitted again: at once, and then per second. So those that take them can serve their own.
RESUBMISSION_BURST, RESUBMISSIONS_PER_SECOND = 100, 250.0
# How long suspects wait for a successor's report: longer than a process takes to start on a busy machine.
EXIT_REPORT_SECONDS = 30.0
# Suspects, and requests that have lost one process, that are remembered: the latest ones.
MAX_REMEMBERED = 4096


RequestT = TypeVar("RequestT", bound=Named)  # hashable by identity


class Neighbour(Generic[RequestT]):
    """A replica below, whose process may be replaced, and the requests that it has."""

    def __init__(self, replica_id: ReplicaId) -> None:
        self.replica_id = replica_id
        self.peer: PeerId | None = None  # None while no process is connected
        self.silent = False  # it is connected, and sends no beats any more
        self.beat = Beat(None)
        self.requests: dict[int, RequestT] = {}  # by rid, until its End has come
        self.lost_boot = b""  # of the process that died, until another connects

    @property
    def responds(self) -> bool:
        return self.peer is not None and not self.silent


NeighbourT = TypeVar("NeighbourT", bound=Neighbour)  # type: ignore[type-arg]


class Assignments(Generic[NeighbourT, RequestT]):
    """The requests of one process, each with one neighbour or waiting. Times are seconds on one clock.

    What a neighbour sends for a rid that is not among its `requests` concerns a request that was taken from it.
    """

    def __init__(
        self,
        choose: Callable[[RequestT, float], NeighbourT | None],
        work_in_progress: Callable[[PeerId], bytes | None],
    ) -> None:
        """`choose`: the connected neighbour for a request that is not bound to one; None: it has to wait.
        `work_in_progress`: what a process has, or had, in progress (`WorkRegister.in_progress`); None: not known."""
        self._choose = choose
        self.work_in_progress = work_in_progress
        self.waiting: dict[RequestT, None] = {}  # an ordered set
        self.due_at: float | None = None  # when more of them may be submitted; None: the rate limits nothing
        self._assigned: dict[RequestT, tuple[NeighbourT, int]] = {}  # with the rid
        self._bound: dict[bytes, tuple[NeighbourT, float]] = {}  # by fingerprint, and until when it waits there
        self._lost_once: dict[bytes, None] = {}  # whose process died, or hangs, with unknown work in progress
        self._bucket = TokenBucket(RESUBMISSIONS_PER_SECOND, RESUBMISSION_BURST)

    def __iter__(self) -> Iterator[RequestT]:
        return iter([*self._assigned, *self.waiting])

    def neighbour_of(self, request: RequestT) -> tuple[NeighbourT, int] | None:
        """The neighbour that has the request, and its rid there."""
        return self._assigned.get(request)

    # --- a request ----------------------------------------------------------------------------------------------------

    def choose(self, request: RequestT, now: float) -> NeighbourT | None:
        """The neighbour that gets the request; None: it has to wait."""
        if self._bound and (bound := self._bound.get(request.context.fingerprint)) is not None:
            neighbour, until = bound
            if neighbour.peer is not None:
                return neighbour
            if now < until:
                return None
            del self._bound[request.context.fingerprint]
        return self._choose(request, now)

    def assign(self, request: RequestT, neighbour: NeighbourT, rid: int) -> None:
        self.waiting.pop(request, None)
        self._assigned[request] = neighbour, rid
        neighbour.requests[rid] = request

    def wait(self, request: RequestT) -> None:
        """The request waits until `next_due` has a neighbour for it."""
        self.waiting[request] = None

    def remove(self, request: RequestT) -> tuple[NeighbourT, int] | None:
        """Forgets a request. Returns where it was, unless it waited: it has to be cancelled there."""
        self.waiting.pop(request, None)
        if (assigned := self._assigned.pop(request, None)) is not None:
            del assigned[0].requests[assigned[1]]
        return assigned

    def pop(self, neighbour: NeighbourT, rid: int) -> RequestT | None:
        """A neighbour has ended a request. None: it was taken from it before."""
        if (request := neighbour.requests.get(rid)) is not None:
            self.remove(request)
        return request

    def ended_well(self, request: RequestT) -> None:
        """Nothing is held against an equal request any more."""
        self._bound.pop(request.context.fingerprint, None)
        self._lost_once.pop(request.context.fingerprint, None)

    def next_due(self, now: float) -> Iterator[tuple[RequestT, NeighbourT]]:
        """The waiting requests that may be submitted now, at the limited rate, with their neighbours. To be called at
        `due_at`, and when a neighbour has become able; assign each before the next is taken."""
        self.due_at = None
        for request in list(self.waiting):
            if (neighbour := self.choose(request, now)) is None:
                continue
            if not self._bucket.take(now):
                self.due_at = now + self._bucket.seconds_until_next(now)
                return
            yield request, neighbour

    # --- a neighbour --------------------------------------------------------------------------------------------------

    def connected(self, neighbour: NeighbourT, peer: PeerId, hello: Hello, now: float) -> LastExit | None:
        """A process has connected. Returns how the one before it ended, if that is the one that died here; what it had
        in progress stays bound to this neighbour, and nothing else does."""
        report, neighbour.peer = hello.last_exit, peer
        lost, neighbour.lost_boot = neighbour.lost_boot, b""
        if report is None or not lost or report.boot != lost:
            return None
        self.release(neighbour)
        self._bind(neighbour, split_in_progress(report.in_progress), now)
        return report

    def lost(self, neighbour: NeighbourT, now: float, *, planned: bool) -> list[RequestT]:
        """The process of a neighbour has ended. Returns its requests, which are forgotten: those that are still wanted
        have to `wait`."""
        assert neighbour.peer is not None
        if not planned:
            neighbour.lost_boot = neighbour.peer.boot
            self._bind(neighbour, self.suspects(neighbour), now)
        neighbour.peer, neighbour.silent, neighbour.beat = None, False, Beat(None)
        requests, neighbour.requests = list(neighbour.requests.values()), {}
        for request in requests:
            del self._assigned[request]
        return requests

    def suspects(self, neighbour: NeighbourT) -> set[bytes]:
        """The fingerprints of what may have stopped or ended the process of a neighbour."""
        assert neighbour.peer is not None
        if (in_progress := self.work_in_progress(neighbour.peer)) is not None:
            return set(split_in_progress(in_progress))
        present = names_of(neighbour.requests.values())
        suspects = present.keys() & self._lost_once.keys()
        self._lost_once |= present
        _forget_oldest(self._lost_once)
        return suspects

    def release(self, neighbour: NeighbourT) -> None:
        """No request is bound to this neighbour any more."""
        self._bound = {name: bound for name, bound in self._bound.items() if bound[0] is not neighbour}

    def _bind(self, neighbour: NeighbourT, fingerprints: Iterable[bytes], now: float) -> None:
        for fingerprint in fingerprints:
            self._bound.pop(fingerprint, None)
            self._bound[fingerprint] = neighbour, now + EXIT_REPORT_SECONDS
        _forget_oldest(self._bound)


def _forget_oldest(remembered: dict[bytes, Any]) -> None:
    while len(remembered) > MAX_REMEMBERED:
        del remembered[next(iter(remembered))]
