"""Hands the tokens of a step to their requests, and measures the time between tokens."""

import time
from collections.abc import Mapping

from tgi.api.requests import Generation, LiveRequest
from tgi.api.token_columns import TextsColumns
from tgi.microkernel.messages.codec import unpack_uint32
from tgi.microkernel.messages.protocol import Texts
from tgi.microkernel.observability import metrics
from tgi.microkernel.observability.flight_recorder import NO_RECORDER, Event, FlightRecorder


class TokenDelivery:
    """Delivers what tokenizers send to the requests of a front end.

    Call `flush_metrics` when a request has ended, so that a client that has seen its last token finds it in /metrics.
    """

    def __init__(self, recorder: FlightRecorder = NO_RECORDER) -> None:
        self._recorder = recorder
        self._metrics = metrics.ObservationBuffer()
        self._inter_token_seconds = self._metrics.values("tgi_inter_token_duration")
        self._skipped_tokens = self._metrics.values("tgi_request_skipped_tokens")  # beyond the first, per step

    def deliver(self, requests: Mapping[int, LiveRequest], message: Texts) -> None:
        """Hands out the tokens of a message. `requests` are those of the tokenizer that sent it, by rid."""
        now = time.perf_counter()
        columns = TextsColumns.from_message(message)
        inter_token_seconds, skipped_tokens = self._inter_token_seconds, self._skipped_tokens
        stop = 0
        for rid, count in zip(unpack_uint32(message.rids), unpack_uint32(message.counts), strict=True):
            start, stop = stop, stop + count
            request = requests.get(rid)
            if not isinstance(request, Generation) or not request.active:
                continue
            if request.first_token_time is None:
                request.first_token_time = now
                if request.probe:  # its only token
                    request.add_tokens(columns, start, stop)
                    continue
                self._recorder.stamp(Event.FIRST_TOKEN, request.context)
                metrics.tgi_time_to_first_token_duration.observe(now - request.arrival_time)
            else:
                inter_token_seconds.append(now - request.latest_token_time)
            request.latest_token_time = now
            if count > 1:
                inter_token_seconds += [0.0] * (count - 1)  # draft tokens arrive with the one before
            skipped_tokens.append(count - 1)
            request.add_tokens(columns, start, stop)
        if now > self._metrics.due_at:
            self._metrics.flush(now)

    def flush_metrics(self) -> None:
        self._metrics.flush()
