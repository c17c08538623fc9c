"""The requests that hold slots of the worker, sorted by what they need next."""

from collections.abc import Iterator

from tgi.scheduler.lane import Lane
from tgi.scheduler.request import NO_SLOT, Client, Request


class Batch:
    """A request holds a slot from admission until it ends or is sent back to the queue. In between it is prefilling,
    then decoding, and at last, when all its tokens are planned, it only waits for results."""

    def __init__(self, slots: int) -> None:
        self.left = 0  # how many have left before their last token, perhaps with rows under way
        self.prefilling: dict[Request, None] = {}  # in the order of admission
        self.lanes: dict[Client, Lane] = {}  # the decoding ones; none is empty
        self._slots: list[Request | None] = [None] * slots
        self.free = list(range(slots - 1, -1, -1))  # slots that nobody holds

    def __len__(self) -> int:
        return len(self._slots) - len(self.free)

    def __iter__(self) -> Iterator[Request]:
        return (request for request in self._slots if request is not None)

    @property
    def decoding(self) -> list[Request]:
        """In the order of a step's rows."""
        return [request for lane in self.lanes.values() for request in lane.requests]

    @property
    def busy(self) -> bool:
        """Whether anybody holds a slot."""
        return len(self.free) < len(self._slots)

    @property
    def full(self) -> bool:
        """Whether no slot is free."""
        return not self.free

    def enter(self, request: Request) -> None:
        """Gives a slot to a request that is to be prefilled."""
        request.slot = self.free.pop()
        self._slots[request.slot] = request
        self.prefilling[request] = None

    def decode(self, request: Request, start: int) -> None:
        """The whole of its prompt is planned, and it has more than one token to draw; its next row starts there."""
        lane = self.lanes.get(request.client)
        if lane is None:
            lane = self.lanes[request.client] = Lane()
        lane.enter(request, start)

    def due(self) -> list[Request]:
        """The decoding ones whose next row needs a page, or draws the last token."""
        return [request for lane in self.lanes.values() for request in lane.due()]

    def leave_lane(self, request: Request) -> None:
        """It decodes no more."""
        lane = self.lanes[request.client]
        lane.leave(request)
        if not lane.requests:
            del self.lanes[request.client]

    def leave(self, request: Request) -> None:
        """Takes the slot back."""
        if len(request.ids) < request.limit:
            self.left += 1
        self._slots[request.slot] = None
        self.free.append(request.slot)
        if request.lane is not None:
            self.leave_lane(request)
        else:
            self.prefilling.pop(request, None)
        request.slot = NO_SLOT

    def youngest(self, besides: Request) -> Request | None:
        """The last to arrive of all others that still need steps."""
        candidates = [request for request in (*self.prefilling, *self.decoding) if request is not besides]
        return max(candidates, key=lambda request: request.order) if candidates else None
