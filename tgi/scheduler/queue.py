"""The waiting line: first come, first served; a request that comes back takes its old place."""

from bisect import bisect
from collections import deque

from tgi.kernel.states import QUEUED
from tgi.scheduler.request import SUSPECT, Request

SWEPT = 64  # ended requests that the line may hold beside as many as wait: sweeping it then costs each of them little


class Queue:
    """Suspects of a worker's death come first, one after the other, since everybody waits until they are cleared."""

    def __init__(self) -> None:
        self._line: deque[Request] = deque()
        self._ended = 0  # of those in the line

    def __len__(self) -> int:
        return len(self._line) - self._ended

    def join(self, request: Request) -> None:
        """Takes a new one, the last to arrive."""
        self._line.append(request)

    def come_back(self, request: Request) -> None:
        """Takes one that has been in the line before, at the place of its arrival."""
        self._line.insert(bisect(self._line, _turn(request), key=_turn), request)

    def head(self) -> Request | None:
        """The next one, left in the line."""
        line = self._line
        while line:
            head = line[0]
            if head.state is QUEUED:
                return head
            line.popleft()  # ended while it waited
            self._ended -= 1
        return None

    def pop(self) -> Request:
        """Takes out what `head` has just returned. Raises IndexError if nobody waits."""
        return self._line.popleft()

    def leave(self, count: int) -> None:
        """So many in the line have ended. They go when they come to the front, or when they are too many."""
        self._ended += count
        if 2 * self._ended > len(self._line) + SWEPT:
            self._line = deque(self.waiting())
            self._ended = 0

    def waiting(self) -> list[Request]:
        """Everybody in the line, in its order."""
        return [request for request in self._line if request.state is QUEUED]


def _turn(request: Request) -> tuple[bool, int]:
    return request.strikes < SUSPECT, request.order
