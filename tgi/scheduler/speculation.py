"""Which rows of a step carry drafts, and how many: as many as are expected to bring more than they cost.

A drafted position takes computing whether it is right or not, and a step with drafts costs all rows a wait: as their
lengths are unknown until it is answered, no step can be sent behind it meanwhile. Both are measured, and weighed in
tokens: what others would have got in that time. So a batch that computing limits drafts nothing, one that waits for
its weights to be read drafts much, and between the two those rows draft whose guesses have been right.
"""

from tgi.kernel.messages import Result
from tgi.scheduler.batch import Batch
from tgi.scheduler.flight import Flight
from tgi.scheduler.line import Line
from tgi.scheduler.lookup import Lookup
from tgi.scheduler.model import Model
from tgi.scheduler.request import NO_SLOT, Request

# A guess less likely than this is not drafted, even where it seems to cost nothing.
LEAST = 0.1
# Ids that are read between two steps, at some 0.2 µs each: longer prompts take several.
READ = 4096
# Weight of the newest wait in the average.
NEWEST = 0.1


class Speculation:
    """At most `most` drafts per row and step; by looking up what the request said before, or by a draft model."""

    def __init__(self, most: int, by_model: bool) -> None:
        self._most = most
        self.by_model = by_model
        self._unread: dict[Request, None] = {}  # with a slot, and more new ids than are read on the way
        self._times = Line()  # microseconds of a step by the positions that it computes
        self._wait = 0.0  # microseconds that the worker has nothing to do, between two steps that are not overlapped

    def begin(self, request: Request) -> None:
        """A request has arrived."""
        request.guesser = Model() if self.by_model else Lookup(request.ids, request.limit)

    def enter(self, request: Request) -> None:
        """A request has got a slot."""
        if isinstance(request.guesser, Lookup):
            self._unread[request] = None

    def read(self) -> None:
        """Reads on in the prompts of those that have a slot. To be called while the worker is busy."""
        budget = READ
        while budget > 0 and self._unread:
            request = next(iter(self._unread))
            if request.slot != NO_SLOT and isinstance(request.guesser, Lookup):
                budget -= request.guesser.read(budget)
                if request.guesser.unread:
                    return
            del self._unread[request]

    def learn(self, flight: Flight, result: Result, now: float) -> None:
        """A step was answered."""
        if result.forward_us > 0 and not flight.prefill_tokens:
            self._times.add(flight.decode_rows + sum(flight.drafts), result.forward_us)
        if flight.drafts:
            wait = (now - flight.sent) * 1e6 - result.forward_us
            self._wait += NEWEST * (max(wait, 0.0) - self._wait)

    def waits(self, latest: Flight, batch: Batch) -> bool:
        """Whether to plan no step before the latest is answered: it has drafts, or the next may then have some."""
        if latest.drafts:
            return True
        batch.settle()
        rows = batch.decoding
        price, wait = self._prices(len(rows))
        if price >= 1.0:
            return False
        gain = 0.0
        for request in rows:
            chance = self._chance(request)
            if chance > LEAST:
                # What is guessed next is drawn by the step under way; the drafts are the ids behind it.
                gain += chance * _worth(chance, price, self._room(request) - 1)[1]
        return gain > wait

    def share(self, rows: list[Request], most: int) -> list[int]:
        """How many ids to draft for each of these rows, `most` in all. Empty: none is worth it."""
        price, wait = self._prices(len(rows))
        if price >= 1.0:
            return []
        counts = []
        total = 0.0
        for request in rows:
            count, gain = _worth(self._chance(request), price, min(self._room(request), most))
            counts.append(count)
            total += gain
            most -= count
        if total > wait:
            return counts
        for request in rows:
            if isinstance(request.guesser, Model):
                request.guesser.rest()
        return []

    def _chance(self, request: Request) -> float:
        """How likely its next guess is right; 0 if there is none."""
        guesser = request.guesser
        if guesser is None:
            return 0.0
        if isinstance(guesser, Lookup):
            new = guesser.unread
            if new > self._most + 2:
                self._unread[request] = None  # a prompt, or what came while nothing was drafted
                return 0.0
            if new:
                guesser.catch_up()
        return guesser.chance

    def _room(self, request: Request) -> int:
        """Drafts that it may have: behind the last one another token is drawn."""
        return min(self._most, request.limit - len(request.ids) - 1)

    def _prices(self, rows: int) -> tuple[float, float]:
        """In tokens that so many rows get in the same time without drafts: a drafted position, and the wait."""
        step = self._times.at(rows)
        return (self._times.slope * rows / step, self._wait * rows / step) if step else (0.0, 0.0)


def _worth(chance: float, price: float, most: int) -> tuple[int, float]:
    """How many drafts, each right with this chance if those before it are, bring more than their price; and how much
    more they bring together."""
    count, gain, right = 0, 0.0, chance
    while count < most and right > price and right > LEAST:
        count += 1
        gain += right - price
        right *= chance
    return count, gain
