"""The requests of one tokenizer that decode, as columns: a step takes them, and a result brings them, all at once."""

from array import array
from functools import lru_cache
from typing import TYPE_CHECKING

from tgi.kernel.pack import INT32, UINT32, pack

if TYPE_CHECKING:
    from tgi.scheduler.request import Request

ONE = pack(INT32, [1])


class Lane:
    """Item k of each column is of request k. All have a row in nearly every step, and what that takes is done by
    column, in C; Python looks at a request only when its turn has come: its next row needs a page, or draws the last
    token. As all go on by one position in each step, it is known ahead in which step that will be.

    That saves more than instructions: the requests of a large batch are spread over more memory than a processor's
    caches hold."""

    __slots__ = ("_steps", "_turns", "ids", "requests", "rids", "slots", "starts", "stops", "union")

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.ids: list[array[int]] = []
        self.stops: list[frozenset[int]] = []  # the ids that end it
        self.union: set[int] = set()  # what is in none of the latter; it may hold more than those of now
        self.rids = array(UINT32)
        self.slots = array(INT32)
        self.starts = array(INT32)  # the position that the next row computes
        self._steps = 0  # in which all had a row
        self._turns: dict[int, dict[Request, None]] = {}  # whose turn comes after so many

    def enter(self, request: "Request") -> None:
        """Its next row starts where those planned so far end."""
        start = request.planned
        request.lane = self
        request.place = len(self.requests)
        self.requests.append(request)
        self.ids.append(request.ids)
        self.stops.append(request.stop_ids)
        self.union |= request.stop_ids
        self.rids.append(request.rid)
        self.slots.append(request.slot)
        self.starts.append(start)
        self._await_turn(request, start)

    def leave(self, request: "Request") -> None:
        """The last one takes its place."""
        self._forget_turn(request)
        place = request.place
        request.planned = self.starts[place]
        request.lane = None
        last = self.requests.pop()
        ids, stops = self.ids.pop(), self.stops.pop()
        rid, slot, start = self.rids.pop(), self.slots.pop(), self.starts.pop()
        if last is not request:
            last.place = place
            self.requests[place], self.ids[place], self.stops[place] = last, ids, stops
            self.rids[place], self.slots[place], self.starts[place] = rid, slot, start

    def due(self, needy: list["Request"], last: list["Request"]) -> None:
        """Adds those whose turn it is: whose next row needs a page, and whose draws the last token. `planned` of these
        is true."""
        starts = self.starts
        for request in self._turns.get(self._steps, ()):
            request.planned = start = starts[request.place]
            if start == request.room:
                needy.append(request)
            if start == request.last_start:
                last.append(request)

    def advance(self) -> None:
        """All have a row in the step that is planned. One is added to each start at once, with all of them taken as
        one long number: no position is so large that it carries into the next."""
        column = self.starts.tobytes()
        added = int.from_bytes(column, "little") + _ones(len(self.starts))
        self.starts = array(INT32, added.to_bytes(len(column), "little"))
        self._turns.pop(self._steps, None)
        self._steps += 1

    def move(self, request: "Request", start: int) -> None:
        """Its next row starts there after all."""
        self._forget_turn(request)
        request.planned = self.starts[request.place] = start
        self._await_turn(request, start)

    def has_room(self, request: "Request") -> None:
        """It has got another page."""
        self._forget_turn(request)
        self._await_turn(request, self.starts[request.place])

    def _await_turn(self, request: "Request", start: int) -> None:
        room, last = request.room, request.last_start
        request.turn = turn = self._steps + (room if room < last else last) - start
        if (others := self._turns.get(turn)) is None:
            self._turns[turn] = {request: None}
        else:
            others[request] = None

    def _forget_turn(self, request: "Request") -> None:
        if (others := self._turns.get(request.turn)) is not None:
            others.pop(request, None)


@lru_cache(maxsize=8)
def _ones(count: int) -> int:
    """A column of so many ones as one long number."""
    return int.from_bytes(ONE * count, "little")
