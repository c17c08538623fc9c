"""Every metric series of this server, in two tables: TGI's, and what is new. docs/metrics.md is made from them."""

from typing import NamedTuple

DURATION = tuple(0.00015 * 1.5**k for k in range(35))  # seconds
BATCH = tuple(float(n) for n in range(1, 1025))
QUANTILES = (0.0, 0.5, 0.9, 0.95, 0.99, 0.999, 1.0)  # of every summary


class Series(NamedTuple):
    """One row. `buckets` is a tuple of upper bounds, or "input" / "total": a hundredth of the longest prompt / request
    times 1 to 100, known once the worker has measured."""

    kind: str  # counter, gauge, histogram, summary
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] | str = ()


TGI: dict[str, Series] = {
    "tgi_request_count": Series("counter", "Total number of requests"),
    "tgi_request_success": Series("counter", "Number of successful requests"),
    "tgi_request_failure": Series("counter", "Number of failed requests", ("err",)),
    "tgi_request_duration": Series("histogram", "Whole request, in seconds", (), DURATION),
    "tgi_request_validation_duration": Series("histogram", "Arrival to queued, in seconds", (), DURATION),
    "tgi_request_queue_duration": Series("histogram", "Queued to batched, in seconds", (), DURATION),
    "tgi_request_inference_duration": Series("histogram", "Batched to done, in seconds", (), DURATION),
    "tgi_request_mean_time_per_token_duration": Series("histogram", "Inference per token, in seconds", (), DURATION),
    "tgi_request_generated_tokens": Series("histogram", "Tokens generated per request", (), "total"),
    "tgi_request_input_length": Series("histogram", "Prompt tokens per request", (), "input"),
    "tgi_request_max_new_tokens": Series("histogram", "Tokens asked for per request", (), "total"),
    "tgi_request_skipped_tokens": Series("summary", "Tokens beyond the first that one step gave to one request"),
    "tgi_queue_size": Series("gauge", "Current queue size"),
    "tgi_batch_current_size": Series("gauge", "Current batch size"),
    "tgi_batch_current_max_tokens": Series("gauge", "Tokens of KV cache held by the running batch"),
    "tgi_batch_next_size": Series("histogram", "Requests taken from the queue at once", (), BATCH),
    "tgi_batch_concat": Series("counter", "Steps in which new requests joined running ones", ("reason",)),
    "tgi_batch_inference_count": Series("counter", "Steps started", ("method",)),
    "tgi_batch_inference_success": Series("counter", "Steps finished", ("method",)),
    "tgi_batch_inference_failure": Series("counter", "Steps failed", ("method",)),
    "tgi_batch_inference_duration": Series("histogram", "Whole step, in seconds", ("method",), DURATION),
    "tgi_batch_forward_duration": Series("histogram", "Forward and sampling, in seconds", ("method",), DURATION),
    "tgi_batch_decode_duration": Series("histogram", "Ids to text, in seconds", ("method",), DURATION),
    "tgi_batch_filter_duration": Series("histogram", "Handling a step's result, in seconds", ("method",), DURATION),
    "tgi_batch_concat_duration": Series(
        "histogram", "Planning a step in which new requests join running ones, in seconds", ("method",), DURATION
    ),
    "tgi_batch_max_total_tokens": Series("gauge", "Size of the KV cache in tokens"),
}

OURS: dict[str, Series] = {
    "tgi_generation_count": Series("counter", "Generations begun: one for each prompt and choice of a request"),
    "tgi_generation_success": Series("counter", "Generations that delivered all their tokens"),
    "tgi_time_to_first_token_duration": Series("histogram", "Arrival to first token, in seconds", (), DURATION),
    "tgi_inter_token_duration": Series("histogram", "Between two tokens of a generation, in seconds", (), DURATION),
    "tgi_resumed_tokens": Series("counter", "Generated ids that came back as prefill after a loss or a preemption"),
    "tgi_preemptions": Series("counter", "Requests that gave up their pages to others"),
    "tgi_drafted_tokens": Series("counter", "Positions computed for tokens that were only thought to be drawn"),
    "tgi_accepted_tokens": Series("counter", "Drafted tokens that were drawn; over the drafted ones: the acceptance"),
    "tgi_prefix_cache_hit_tokens": Series("counter", "Prompt tokens found in the prefix cache"),
    "tgi_pages_used": Series("gauge", "KV pages held by running requests"),
    "tgi_pages_free": Series("gauge", "KV pages free or holding reusable prefixes"),
    "tgi_adapters_loaded": Series("gauge", "LoRA adapters that requests may choose among"),
    "tgi_worker_losses": Series("counter", "Times that the worker was lost"),
    "tgi_process_restarts": Series("counter", "Processes replaced by the supervisor", ("role",)),
}

SERIES = TGI | OURS
