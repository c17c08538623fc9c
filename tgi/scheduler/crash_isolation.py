"""Crash isolation: finds the request that crashes the worker.

Each request in a step during which the worker crashed gets a strike; each in a step that failed without a crash gets
SUSPECT_STRIKES at once, since one request of that step must be at fault. A request with SUSPECT_STRIKES is computed
alone; if the worker crashes then, that request has failed. Progress clears the strikes.
"""

from tgi.scheduler.in_flight import InFlightStep
from tgi.scheduler.request import Request

# Tokens that clear a request: one drawn by prefill and one by decode. A request that crashes the worker does so in a
# step of its own, before it gets this far.
CLEARING_TOKENS = 2


class CrashIsolation:
    """Requests with strikes, and the one that is computed alone because of them."""

    def __init__(self) -> None:
        self.alone: Request | None = None  # the suspect that is computed alone
        self._struck: dict[Request, int] = {}  # with the number of token ids that they had at their last strike

    def blame(self, steps: list[InFlightStep], strikes: int) -> Request | None:
        """The worker crashed, or a step failed, with these steps in flight. Ends the isolation of a suspect, and
        returns it if it had a row in them: then it is guilty."""
        guilty = None
        rows = ((step.message.number, request) for step in steps for request in step.requests)
        for request in dict.fromkeys(request for number, request in rows if number >= request.valid_from_step):
            request.strikes += strikes
            request.drafter = None  # a suspect is computed without drafts, and so when it is cleared
            self._struck[request] = len(request.token_ids)
            if request is self.alone:
                guilty = request
        self.alone = None
        return guilty

    def discard(self, request: Request) -> None:
        """Removes the request."""
        self._struck.pop(request, None)
        if self.alone is request:
            self.alone = None

    def clear_progressed(self) -> None:
        """Clears the requests that have got enough tokens since their last strike."""
        if not self._struck:
            return  # the usual case, in every step
        for request in [one for one, known in self._struck.items() if len(one.token_ids) - known >= CLEARING_TOKENS]:
            request.strikes = 0
            self.discard(request)
