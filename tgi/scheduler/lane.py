"""The requests of one tokenizer that decode, as columns: a step takes them, and a result brings them, all at once."""

from array import array
from collections.abc import Callable
from itertools import compress
from operator import eq
from typing import TYPE_CHECKING

from tgi.kernel.pack import INT32, UINT32, pack

if TYPE_CHECKING:
    from tgi.scheduler.request import Request

ONE = pack(INT32, [1])


class Lane:
    """Item k of each column is of request k. All have a row in nearly every step, and what that takes is done by
    column, in C; Python looks at a request only when its turn has come. That saves more than instructions: the requests
    of a large batch are spread over more memory than a processor's caches hold."""

    __slots__ = ("appends", "requests", "rids", "slots", "starts", "stops", "turns", "union")

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.appends: list[Callable[[int], None]] = []  # take the next id
        self.stops: list[frozenset[int]] = []  # the ids that end it
        self.union: set[int] = set()  # what is in none of the latter; it may hold more than those of now
        self.rids = array(UINT32)
        self.slots = array(INT32)
        self.starts = array(INT32)  # the position that the next row computes
        self.turns: list[int] = []  # the start of the row that needs a page, or draws the last token

    def enter(self, request: "Request") -> None:
        """Its next row starts where those planned so far end."""
        start = request.planned
        request.lane = self
        request.place = len(self.requests)
        self.requests.append(request)
        self.appends.append(request.ids.append)
        self.stops.append(request.stop_ids)
        self.union |= request.stop_ids
        self.rids.append(request.rid)
        self.slots.append(request.slot)
        self.starts.append(start)
        room, last = request.room, request.last_start
        self.turns.append(room if room < last else last)

    def leave(self, request: "Request") -> None:
        """The last one takes its place."""
        place = request.place
        request.planned = self.starts[place]
        request.lane = None
        last = self.requests.pop()
        append, stops = self.appends.pop(), self.stops.pop()
        rid, slot, start, turn = self.rids.pop(), self.slots.pop(), self.starts.pop(), self.turns.pop()
        if last is not request:
            last.place = place
            self.requests[place], self.appends[place], self.stops[place] = last, append, stops
            self.rids[place], self.slots[place], self.starts[place], self.turns[place] = rid, slot, start, turn

    def due(self) -> list["Request"]:
        """Those whose turn it is: the next row needs a page, or draws the last token. `planned` of these is true."""
        due = list(compress(self.requests, map(eq, self.starts, self.turns)))
        for request in due:
            request.planned = self.starts[request.place]
        return due

    def advance(self) -> None:
        """All have a row in the step that is planned. One is added to each start at once, with all of them taken as
        one long number: no position is so large that it carries into the next."""
        column = self.starts.tobytes()
        ones = ONE * (len(column) // len(ONE))
        added = int.from_bytes(column, "little") + int.from_bytes(ones, "little")
        self.starts = array(INT32, added.to_bytes(len(column), "little"))

    def move(self, request: "Request", start: int) -> None:
        """Its next row starts there after all."""
        request.planned = self.starts[request.place] = start

    def has_room(self, request: "Request") -> None:
        """It has got another page."""
        room, last = request.room, request.last_start
        self.turns[request.place] = room if room < last else last
