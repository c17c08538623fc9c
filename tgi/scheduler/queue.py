"""The waiting line: first come, first served; a request that comes back takes its old place."""

from heapq import heappop, heappush

from tgi.kernel.states import State
from tgi.scheduler.request import SUSPECT, Request


class Queue:
    """Suspects of a worker's death come first, one after the other, since everybody waits until they are cleared."""

    def __init__(self) -> None:
        self._heap: list[tuple[bool, int, Request]] = []
        self._waiting = 0

    def __len__(self) -> int:
        return self._waiting

    def push(self, request: Request) -> None:
        """Joins the line at the place of its arrival."""
        heappush(self._heap, (request.strikes < SUSPECT, request.order, request))
        self._waiting += 1

    def head(self) -> Request | None:
        """The next one, left in the line."""
        while self._heap and self._heap[0][2].state is not State.QUEUED:
            heappop(self._heap)  # ended while it waited
        return self._heap[0][2] if self._heap else None

    def pop(self) -> Request:
        """Takes out what `head` has just returned. Raises IndexError if nobody waits."""
        request = heappop(self._heap)[2]
        self._waiting -= 1
        return request

    def leave(self) -> None:
        """Somebody in the line has ended. Its entry is dropped when it comes to the front."""
        self._waiting -= 1

    def waiting(self) -> list[Request]:
        """Everybody in the line, in no particular order."""
        return [entry[2] for entry in self._heap if entry[2].state is State.QUEUED]
