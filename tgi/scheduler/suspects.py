"""Who may have brought a worker down: struck when it dies, tried alone when that happens again, cleared by tokens."""

from tgi.scheduler.flight import Flight
from tgi.scheduler.request import Request

# Tokens that clear a request of the last worker's death: one drawn by prefill and one by decode. Whatever in it kills
# a worker does so in a step of its own, so it would not have come so far.
CLEARING_TOKENS = 2


class Suspects:
    """Requests with strikes, and the one that is computed alone because of them."""

    def __init__(self) -> None:
        self.trial: Request | None = None
        self._struck: dict[Request, int] = {}  # and how many ids they had at the last strike

    def blame(self, flights: list[Flight], strikes: int) -> Request | None:
        """A worker died, or failed, in these steps. Returns the one on trial if it has a row in them; the trial is
        over."""
        guilty = None
        for request in {one: None for flight in flights for one in flight.requests if flight.step.number >= one.since}:
            request.strikes += strikes
            request.guesser = None  # what it is tried with from now on, it goes on with: no drafts
            self._struck[request] = len(request.ids)
            if request is self.trial:
                guilty = request
        self.trial = None
        return guilty

    def forget(self, request: Request) -> None:
        """It is nobody's concern any more."""
        self._struck.pop(request, None)
        if self.trial is request:
            self.trial = None

    def clear(self) -> None:
        """Tokens were drawn: whoever has got enough since its last strike is clear."""
        for request in [one for one, known in self._struck.items() if len(one.ids) - known >= CLEARING_TOKENS]:
            request.strikes = 0
            self.forget(request)
