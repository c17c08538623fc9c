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
        self._waiting = 0

    def __len__(self) -> int:
        return self._waiting

    def push(self, request: Request) -> None:
        """Joins the line at the place of its arrival."""
        line = self._line
        if request.strikes < SUSPECT and (not line or line[-1].order < request.order):
            line.append(request)
        else:
            line.insert(bisect(line, _turn(request), key=_turn), request)
        self._waiting += 1

    def head(self) -> Request | None:
        """The next one, left in the line."""
        line = self._line
        while line:
            head = line[0]
            if head.state is QUEUED:
                return head
            line.popleft()  # ended while it waited
        return None

    def pop(self) -> Request:
        """Takes out what `head` has just returned. Raises IndexError if nobody waits."""
        request = self._line.popleft()
        self._waiting -= 1
        return request

    def leave(self) -> None:
        """Somebody in the line ends. It goes when it comes to the front, or when too many have ended."""
        self._waiting -= 1
        if len(self._line) > 2 * self._waiting + SWEPT:
            self._line = deque(self.waiting())

    def waiting(self) -> list[Request]:
        """Everybody in the line, in its order."""
        return [request for request in self._line if request.state is QUEUED]


def _turn(request: Request) -> tuple[bool, int]:
    return request.strikes < SUSPECT, request.order
