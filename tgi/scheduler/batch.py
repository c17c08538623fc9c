"""The requests that hold slots of the worker, sorted by what they need next."""

from collections.abc import Iterator

from tgi.scheduler.lane import Lane
from tgi.scheduler.request import NEVER, NO_SLOT, Client, Request


class Batch:
    """A request holds a slot from admission until it ends or is sent back to the queue. In between it is prefilling,
    then decoding, and at last, when all its tokens are planned, it only waits for results.

    A plan says who is to decode from the next step on, and who is not any more; `settle` brings that about.
    """

    def __init__(self, slots: int) -> None:
        self.left = 0  # how many have left before their last token, perhaps with rows under way
        self.prefilling: dict[Request, None] = {}  # in the order of admission
        self.lanes: dict[Client, Lane] = {}  # the decoding ones; none is empty
        self.prompted: list[Request] = []  # whose prompts are planned to their end: they are to decode
        self.last: list[Request] = []  # whose last tokens are planned: they are to decode no more
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

    def enter(self, request: Request) -> int:
        """Gives a slot to a request that is to be prefilled."""
        request.slot = slot = self.free.pop()
        self._slots[slot] = request
        return slot

    def settle(self) -> None:
        """To be called before the next plan."""
        for request in self.last:
            if request.lane is not None:  # else it has ended
                self._leave_lane(request)
        for request in self.prompted:
            if request.slot != NO_SLOT:  # else it has ended
                lane = self.lanes.get(request.client)
                if lane is None:
                    lane = self.lanes[request.client] = Lane()
                lane.enter(request)
        self.last, self.prompted = [], []

    def due(self) -> tuple[list[Request], list[Request]]:
        """The decoding ones whose next row needs a page, and those whose next row draws the last token."""
        needy: list[Request] = []
        last: list[Request] = []
        for lane in self.lanes.values():
            lane.due(needy, last)
        return needy, last

    def _leave_lane(self, request: Request) -> None:
        lane = self.lanes[request.client]
        lane.leave(request)
        if not lane.requests:
            del self.lanes[request.client]

    def leave(self, requests: list[Request]) -> None:
        """Takes the slots back."""
        slots, free, prefilling = self._slots, self.free, self.prefilling
        for request in requests:
            if len(request.ids) < request.limit:
                self.left += 1
            slot = request.slot
            slots[slot] = None
            free.append(slot)
            if request.lane is not None:
                self._leave_lane(request)
            elif prefilling:
                prefilling.pop(request, None)
            request.slot = NO_SLOT
            request.since = NEVER

    def youngest(self, besides: Request) -> Request | None:
        """The last to arrive of all others that still need steps."""
        candidates = [request for request in (*self.prefilling, *self.decoding) if request is not besides]
        return max(candidates, key=lambda request: request.order) if candidates else None
