"""What is counted, measured and logged: once per HTTP request, and once per generation of it. Nothing of the readiness
probe."""

import json
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tgi.api.calls import Generation, probing
from tgi.api.errors import ApiError
from tgi.api.float32 import render
from tgi.kernel import metrics
from tgi.kernel.messages import End, Generate, Reason
from tgi.kernel.pack import ints
from tgi.kernel.presence import Limits

if TYPE_CHECKING:
    from tgi.kernel.trace import Span

log = logging.getLogger(__name__)


class Times(NamedTuple):
    """Where the time of a finished request went, in seconds."""

    total: float  # arrival to the last token, seen from here
    validation: float
    queue: float
    inference: float
    per_token: float

    @classmethod
    def of(cls, calls: Sequence[Generation]) -> "Times":
        """Of generations that have ended, summed up except for the total: from this process's clock for the whole,
        and from the hops' own figures for the parts."""
        ends = [(call, call.end) for call in calls if call.end is not None]
        return cls(
            time.perf_counter() - min(call.arrival for call in calls),
            sum(end.validation_us for _, end in ends) / 1e6,
            sum(end.queue_us for _, end in ends) / 1e6,
            sum(end.inference_us for _, end in ends) / 1e6,
            sum(end.inference_us / max(1, call.generated) for call, end in ends) / 1e6,
        )


def arrived() -> None:
    """Counts a request to a generation route."""
    if probing.get():
        return
    metrics.tgi_request_count.inc()


def failed(error: ApiError, span: "Span | None") -> None:
    """Counts a request that was refused or broke, and marks its span."""
    if error.counted and not probing.get():
        metrics.tgi_request_failure.labels(err=error.counted).inc()
    if span is not None:
        span.fail(error.error_type, error.message)


def dropped(span: "Span | None") -> None:
    """Counts a request whose client left, and marks its span."""
    if probing.get():
        return
    metrics.tgi_request_failure.labels(err="dropped").inc()
    if span is not None:
        span.fail("dropped", "the client has left")


def submitted() -> None:
    """Counts one generation: a request has one for each prompt and choice."""
    if probing.get():
        return
    metrics.tgi_generation_count.inc()


def admitted(call: Generation, end: End, limits: Limits) -> None:
    """Measures what a generation asked for that had passed validation, however it has ended."""
    if call.probe or not end.prompt_tokens or end.reason == Reason.INVALID:
        return
    new = call.request.max_new_tokens
    metrics.tgi_request_input_length.observe(end.prompt_tokens)
    metrics.tgi_request_max_new_tokens.observe(limits.max_total_tokens - end.prompt_tokens if new is None else new)


def generated(call: Generation) -> None:
    """Counts and measures a finished generation."""
    if call.probe:
        return
    times = Times.of([call])
    metrics.tgi_generation_success.inc()
    metrics.tgi_request_validation_duration.observe(times.validation)
    metrics.tgi_request_queue_duration.observe(times.queue)
    metrics.tgi_request_inference_duration.observe(times.inference)
    metrics.tgi_request_mean_time_per_token_duration.observe(times.per_token)
    metrics.tgi_request_generated_tokens.observe(call.generated)


def succeeded(calls: Sequence[Generation]) -> None:
    """Counts, measures, logs and traces a request all of whose generations have finished."""
    if calls[0].probe:
        return
    times = Times.of(calls)
    metrics.tgi_request_success.inc()
    metrics.tgi_request_duration.observe(times.total)
    sampling = calls[0].request.sampling
    fields = {
        "parameters": _parameters(calls[0].request),
        "total_time": duration(times.total),
        "validation_time": duration(times.validation),
        "queue_time": duration(times.queue),
        "inference_time": duration(times.inference),
        "time_per_token": duration(times.per_token),
        "seed": sampling.seed if sampling.samples else None,
    }
    log.info("Success", extra=fields)
    if (span := calls[0].span) is not None:  # an OTLP attribute holds no object, and no uint64
        span.set({key: value if isinstance(value, str) else json.dumps(value) for key, value in fields.items()})


def _parameters(request: Generate) -> dict[str, Any]:
    """What was asked for, without the text and without columns; of biases, stop tokens and bad words their number."""
    asked = {name: getattr(request, name) for name in ("max_new_tokens", "truncate", "stop")}
    drawn = {name: value for name, value in request.sampling._asdict().items() if not isinstance(value, bytes)}
    # 0.2 as float32 would read 0.20000000298023224.
    drawn |= {name: float(render(value)) for name, value in drawn.items() if isinstance(value, float)}
    counts = {
        "logit_bias": len(ints(request.sampling.bias_ids)),
        "stop_token_ids": len(ints(request.stop_token_ids)),
        "bad_words": len(request.bad_words),
    }
    return asked | drawn | counts


def duration(seconds: float) -> str:
    """1.23s, 45.6ms, 789µs: three figures and a unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g}{unit}"
    return f"{seconds * 1e6:.3g}µs"
