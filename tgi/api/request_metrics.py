"""Metrics, the "Success" log line and span attributes of requests: once per HTTP request, and once per generation.

Requests of the readiness probe are never recorded. Where a function cannot tell them apart, its caller does.
"""

import json
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from falcon.asgi import Request

from tgi.api.asgi import is_probe
from tgi.api.errors import ApiError
from tgi.api.float32 import float32_to_json
from tgi.api.requests import Generation
from tgi.microkernel import metrics
from tgi.microkernel.codec import unpack_int32
from tgi.microkernel.protocol import DeploymentLimits, End, FinishReason, Generate

if TYPE_CHECKING:
    from tgi.microkernel.otlp import Span

log = logging.getLogger(__name__)


class RequestTimings(NamedTuple):
    """Where the time of a finished request went, in seconds."""

    total: float  # from its arrival in this process to its last token here
    validation: float
    queue: float
    inference: float
    per_token: float

    @classmethod
    def of(cls, generations: Sequence[Generation]) -> "RequestTimings":
        """Of generations that have ended. `total` is measured by this process's clock; the others are reported by the
        tokenizer and the scheduler in End, and summed over the generations."""
        ends = [(generation, generation.end) for generation in generations if generation.end is not None]
        return cls(
            total=time.perf_counter() - min(generation.arrival_time for generation in generations),
            validation=sum(end.validation_us for _, end in ends) / 1e6,
            queue=sum(end.queue_us for _, end in ends) / 1e6,
            inference=sum(end.inference_us for _, end in ends) / 1e6,
            per_token=sum(end.inference_us / max(1, generation.generated_count) for generation, end in ends) / 1e6,
        )


def count_request(req: Request) -> None:
    """Counts a request to a generation route."""
    if not is_probe(req):
        metrics.tgi_request_count.inc()


def count_generation() -> None:
    """Counts one generation of a request."""
    metrics.tgi_generation_count.inc()


def record_failure(error: ApiError, span: "Span | None", probe: bool = False) -> None:
    """Counts a request that was rejected or has failed, and marks its span."""
    if error.counted and not probe:
        metrics.tgi_request_failure.labels(err=error.counted).inc()
    if span is not None:
        span.set_error(error.error_type, error.message)


def record_disconnect(span: "Span | None") -> None:
    """Counts a request whose client has disconnected, and marks its span."""
    metrics.tgi_request_failure.labels(err="dropped").inc()
    if span is not None:
        span.set_error("dropped", "the client has disconnected")


def observe_requested_lengths(generation: Generation, end: End, limits: DeploymentLimits) -> None:
    """Observes the prompt length and token limit of a generation that has passed validation, however it has ended."""
    if generation.probe or not end.prompt_tokens or end.reason == FinishReason.INVALID:
        return
    new = generation.message.max_new_tokens
    metrics.tgi_request_input_length.observe(end.prompt_tokens)
    metrics.tgi_request_max_new_tokens.observe(limits.max_total_tokens - end.prompt_tokens if new is None else new)


def record_generation(generation: Generation) -> None:
    """Counts and measures a generation that has ended successfully."""
    if generation.probe:
        return
    timings = RequestTimings.of([generation])
    metrics.tgi_generation_success.inc()
    metrics.tgi_request_validation_duration.observe(timings.validation)
    metrics.tgi_request_queue_duration.observe(timings.queue)
    metrics.tgi_request_inference_duration.observe(timings.inference)
    metrics.tgi_request_mean_time_per_token_duration.observe(timings.per_token)
    metrics.tgi_request_generated_tokens.observe(generation.generated_count)


def record_success(generations: Sequence[Generation]) -> None:
    """Counts, measures, logs and traces a request all of whose generations have ended successfully."""
    if generations[0].probe:
        return
    timings = RequestTimings.of(generations)
    metrics.tgi_request_success.inc()
    metrics.tgi_request_duration.observe(timings.total)
    message = generations[0].message
    fields = {
        "parameters": logged_parameters(message),
        "total_time": format_duration(timings.total),
        "validation_time": format_duration(timings.validation),
        "queue_time": format_duration(timings.queue),
        "inference_time": format_duration(timings.inference),
        "time_per_token": format_duration(timings.per_token),
        "seed": message.sampling.seed if message.sampling.samples else None,
    }
    log.info("Success", extra=fields)
    if (span := generations[0].span) is not None:  # an OTLP attribute is neither an object nor a uint64
        span.set_attributes(
            {key: value if isinstance(value, str) else json.dumps(value) for key, value in fields.items()}
        )


def logged_parameters(message: Generate) -> dict[str, Any]:
    """The parameters of a request without its text. Of biases, stop token ids and bad words only the count."""
    parameters = {
        "max_new_tokens": message.max_new_tokens,
        "truncate": message.truncate,
        "stop": message.stop_strings,
    }
    sampling = {name: value for name, value in message.sampling._asdict().items() if not isinstance(value, bytes)}
    # The float32 of 0.2 would be logged as 0.20000000298023224.
    sampling |= {name: float(float32_to_json(value)) for name, value in sampling.items() if isinstance(value, float)}
    counts = {
        "logit_bias": len(unpack_int32(message.sampling.bias_ids)),
        "stop_token_ids": len(unpack_int32(message.stop_token_ids)),
        "bad_words": len(message.bad_words),
    }
    return parameters | sampling | counts


def format_duration(seconds: float) -> str:
    """Three significant digits and a unit: 1.23s, 45.6ms, 789µs."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g}{unit}"
    return f"{seconds * 1e6:.3g}µs"
