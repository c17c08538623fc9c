"""The requests of one tokenizer that decode, as columns: a step takes them, and a result brings them, all at once."""

from array import array
from itertools import compress
from operator import eq
from typing import TYPE_CHECKING

from tgi.kernel.pack import INT32, UINT32

if TYPE_CHECKING:
    from tgi.scheduler.request import Request


class Lane:
    """Item k of each column is of request k. What all of them need in every step is done by column, in C; Python looks
    at a request only when its turn has come."""

    __slots__ = ("ids", "requests", "rids", "slots", "starts", "stops", "turns")

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.ids: list[array[int]] = []  # the request's own, which grow as tokens are drawn
        self.stops: list[frozenset[int]] = []
        self.rids = array(UINT32)
        self.slots = array(INT32)
        self.starts: list[int] = []  # the position that the next row computes
        self.turns: list[int] = []  # the position that lies in no page yet, or whose row draws the last token

    def enter(self, request: "Request") -> None:
        """Its prompt is planned, and it has more to draw than the token behind that."""
        self.starts.append(request.planned)
        self.turns.append(min(request.room, request.last_start))
        request.lane, request.place = self, len(self.requests)
        self.requests.append(request)
        self.ids.append(request.ids)
        self.stops.append(request.stop_ids)
        self.rids.append(request.rid)
        self.slots.append(request.slot)

    def leave(self, request: "Request") -> None:
        """The last one takes its place."""
        place, planned = request.place, request.planned
        self.requests[-1].place = place
        for column in (self.requests, self.ids, self.stops, self.rids, self.slots, self.starts, self.turns):
            column[place] = column[-1]  # type: ignore[index]
            column.pop()  # type: ignore[attr-defined]
        request.lane = None
        request.planned = planned

    def due(self) -> list["Request"]:
        """Those whose next row needs a page, or draws the last token."""
        return list(compress(self.requests, map(eq, self.starts, self.turns)))

    def advance(self) -> None:
        """All have a row in the step that is planned."""
        self.starts = [start + 1 for start in self.starts]

    def has_room(self, request: "Request") -> None:
        """It has got another page."""
        self.turns[request.place] = min(request.room, request.last_start)
