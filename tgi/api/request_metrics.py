"""Metrics, the log line and span attributes of requests: once per HTTP request, and once per generation.

Requests of the readiness probe have no RequestRecord, and are never counted, logged or traced.
"""

import json
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from falcon.asgi import Request

from tgi.api.asgi import is_probe
from tgi.api.errors import ApiError, Rejection
from tgi.api.float32 import float32_to_json
from tgi.api.requests import Generation, RequestRecord
from tgi.microkernel.messages.codec import unpack_int32
from tgi.microkernel.messages.protocol import DeploymentLimits, End, FinishReason, Generate
from tgi.microkernel.observability import metrics
from tgi.microkernel.observability.log import Brief

log = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499  # nginx's status of a request whose client has disconnected
GENERATION_FAILED = 424  # TGI's status of a generation that has failed
# In the short form of a log line.
MAX_SHOWN_CHARACTERS = 200


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


def record_failure(error: ApiError, record: RequestRecord | None) -> None:
    """Counts a request that was rejected or has failed, and marks its span."""
    if record is None:
        return
    record.error, record.status = error, error.status
    if error.counted:
        metrics.tgi_request_failure.labels(err=error.counted).inc()
    if record.span is not None:
        record.span.set_error(error.error_type, error.message)


def record_disconnect(record: RequestRecord | None) -> None:
    """Counts a request whose client has disconnected, and marks its span."""
    if record is None:
        return
    record.status = CLIENT_CLOSED_REQUEST
    metrics.tgi_request_failure.labels(err="dropped").inc()
    if record.span is not None:
        record.span.set_error("dropped", "the client has disconnected")


def record_cut(record: RequestRecord) -> None:
    """Marks a request whose response has begun and cannot be completed."""
    record.error, record.status = ApiError(500, "internal", "the response was cut off"), 500


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
    """Counts, measures and traces a request all of whose generations have ended successfully."""
    record = generations[0].record
    if record is None:
        return
    record.generations = [*generations]
    metrics.tgi_request_success.inc()
    metrics.tgi_request_duration.observe(RequestTimings.of(generations).total)
    if record.span is not None:  # an OTLP attribute is neither an object nor a uint64
        fields = {"request_id": record.request_id, **_success_fields(generations)}
        record.span.set_attributes(
            {key: value if isinstance(value, str) else json.dumps(value) for key, value in fields.items()}
        )


def log_request(record: RequestRecord, model_id: str) -> None:
    """Logs a POST request that has ended. TGI logs successful generations, as "Success" with the same fields."""
    if record.method != "POST":
        return
    seconds = time.perf_counter() - record.start_time
    adapter = record.generations[0].adapter if record.generations else ""
    fields: dict[str, Any] = {
        "request_id": record.request_id,
        "client": record.client,
        "model": adapter or model_id,
        "route": record.path,
        "status": record.status,
    }
    level, message, tokens = logging.INFO, "Success", ""
    details: Callable[[], dict[str, Any]] = dict
    if record.generations:
        prompt = sum(one.end.prompt_tokens for one in record.generations if one.end and not one.message.sampling.choice)
        generated = sum(one.generated_count for one in record.generations)
        fields |= {"prompt_tokens": prompt, "generated_tokens": generated}
        details = partial(_success_fields, record.generations)
        tokens = f"{prompt}+{generated} tokens "
    else:
        fields["total_time"] = format_duration(seconds)
    reason = ""
    if record.status == CLIENT_CLOSED_REQUEST:
        message = reason = "the client has disconnected"
    elif record.error is not None:
        # What rejects a request before its route handles it may quote the body.
        message = reason = record.error.error_type if isinstance(record.error, Rejection) else record.error.message
        fields["error_type"] = record.error.error_type
        level = logging.WARNING if record.status >= 500 or record.status == GENERATION_FAILED else level
    path, time_text = record.path[:MAX_SHOWN_CHARACTERS], _short_duration(seconds)
    line = f"POST {path} {record.status} {tokens}{time_text}" + (f": {reason[:MAX_SHOWN_CHARACTERS]}" if reason else "")
    brief = Brief(line, ("request_id", "client", "model"), details)
    log.log(level, "%s", message, extra={**fields, "brief": brief})


def _short_duration(seconds: float) -> str:
    """In ms, from 10 s on in s."""
    return f"{1e3 * seconds:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"


def _success_fields(generations: Sequence[Generation]) -> dict[str, Any]:
    """Parameters, times and seed of a request all of whose generations have ended successfully."""
    timings, message = RequestTimings.of(generations), generations[0].message
    return {
        "parameters": logged_parameters(message),
        "total_time": format_duration(timings.total),
        "validation_time": format_duration(timings.validation),
        "queue_time": format_duration(timings.queue),
        "inference_time": format_duration(timings.inference),
        "time_per_token": format_duration(timings.per_token),
        "seed": message.sampling.seed if message.sampling.samples else None,
    }


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
