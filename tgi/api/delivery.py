"""The tokens of a step on their way to those who asked for them, and what is measured of their pace."""

import time
from collections.abc import Mapping

from tgi.api.calls import Call, Generation
from tgi.api.columns import Arrivals
from tgi.kernel import metrics
from tgi.kernel.answer import Texts
from tgi.kernel.pack import uints

# Measurements are written with the first tokens after so long: one by one they would cost half as much as their tokens.
KEPT_SECONDS = 1.0


class Delivery:
    """Hands out tokens. `measured` writes down their pace: call it when a request has ended, so that whoever has seen
    the end of an answer finds it in the metrics."""

    def __init__(self) -> None:
        self._gaps: list[float] = []  # seconds between tokens of one request
        self._skipped: list[int] = []  # tokens of a step beyond the first
        self._due = 0.0  # when these are to be written, on the clock of time.perf_counter

    def texts(self, calls: Mapping[int, Call], message: Texts) -> None:
        """Gives each request what it got. `calls` are those of the tokenizer that the message is from, by rid."""
        now = time.perf_counter()
        came = Arrivals.of(message)
        gaps, skipped = self._gaps, self._skipped
        stop = 0
        for rid, count in zip(uints(message.rids), uints(message.counts), strict=True):
            start, stop = stop, stop + count
            call = calls.get(rid)
            if not isinstance(call, Generation) or not call.wanted:
                continue
            if call.first is None:
                call.first = now
                if call.probe:  # it has no other token
                    call.receive(came, start, stop)
                    continue
                metrics.tgi_time_to_first_token_duration.observe(now - call.arrival)
            else:
                gaps.append(now - call.latest)
            call.latest = now
            if count > 1:
                gaps += [0.0] * (count - 1)  # drafted tokens come with the one before
            skipped.append(count - 1)
            call.receive(came, start, stop)
        if now > self._due:
            self._due = now + KEPT_SECONDS
            self.measured()

    def measured(self) -> None:
        """Writes what has been measured since the last time."""
        gaps, self._gaps = self._gaps, []
        skipped, self._skipped = self._skipped, []
        metrics.tgi_inter_token_duration.observe_all(gaps)
        metrics.tgi_request_skipped_tokens.observe_all(skipped)
