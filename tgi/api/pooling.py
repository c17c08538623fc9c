"""What the routes of models that end in a vector share: from inputs to their vectors, embeddings and scores."""

import math
from array import array
from collections.abc import Sequence
from operator import mul
from typing import NamedTuple

from falcon.asgi import Request, Response

from tgi.api import errors, request_metrics
from tgi.api.asgi import is_probe
from tgi.api.clients import Client
from tgi.api.errors import ClientDisconnected
from tgi.api.generation import MAX_BODIES
from tgi.api.request_metrics import RequestTimings
from tgi.api.requests import Generation, WakeEvent
from tgi.api.resumption import response_key
from tgi.api.service import Service
from tgi.api.shapes.pooling import InputUsage
from tgi.microkernel.messages.codec import FLOAT32, INT32, ITEM_BYTES, pack_column
from tgi.microkernel.messages.protocol import Generate, ModelTask, PoolingInput, RequestContext
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.microkernel.observability import metrics
from tgi.microkernel.observability.flight_recorder import Event, client_number, name_digest, request_key

# Inputs of one HTTP request: as many as OpenAI allows.
MAX_INPUTS = 2048
# Of these, this number is in flight at once, which is enough to keep a worker busy. The others wait here.
WINDOW = 64


class TextInput(NamedTuple):
    """A text, or token ids, or a pair of texts."""

    text: str
    ids: Sequence[int] = ()
    pair: str | None = None

    @classmethod
    def of(cls, given: str | list[int]) -> "TextInput":
        """A text or token ids as the routes have them."""
        return cls(given) if isinstance(given, str) else cls("", given)


class InputOptions(NamedTuple):
    """How the inputs of a request are encoded."""

    truncate: int | None = None  # as in PoolingInput
    keep_end: bool = False
    prompt: str = ""
    add_special_tokens: bool = True


class PooledResults(NamedTuple):
    """The results of a request, one for each input, in order."""

    generations: list[Generation]

    @property
    def usage(self) -> InputUsage:
        tokens = sum(one.end.prompt_tokens for one in self.generations if one.end is not None)
        return InputUsage(tokens, tokens)

    def vector(self, index: int) -> "array[float]":
        """The numbers of an input's vector, as the model computed them. Raises ApiError if it has none."""
        end = self.generations[index].end
        assert end is not None
        if not end.vector or len(end.vector) % ITEM_BYTES:
            raise errors.incomplete_generation(streaming=False)
        return array(FLOAT32, end.vector)


def truncation(truncate: bool | None, tokens: int | None, direction: str | None) -> InputOptions:
    """The options that the fields of a request ask for. `tokens`: as `truncate_prompt_tokens`."""
    limit = 0 if truncate or tokens == -1 else tokens
    return InputOptions(limit, (direction or "right").lower() == "left")


async def run_inputs(
    service: Service, req: Request, inputs: Sequence[TextInput], options: InputOptions
) -> PooledResults:
    """Computes the vectors of a request's inputs, each a request of its own to the tokenizers. All of them share one of
    the server's permits.

    Raises ApiError: 422 for too many inputs or one that is invalid, 424 as Service.next_fingerprints, 429 and 503 as
    Admission.acquire_permits; and ClientDisconnected.
    """
    if len(inputs) > MAX_INPUTS:
        raise errors.validation_error(f"at most {MAX_INPUTS} inputs can be sent at once. Given: {len(inputs)}")
    size = sum(len(one.text) + len(one.pair or "") for one in inputs)
    if size > (limit := MAX_BODIES * service.settings.payload_limit):  # each pair has the query in a message of its own
        raise errors.validation_error(f"the texts of all pairs must have <= {limit} characters. Given: {size}")
    request_metrics.count_request(req)
    probe, admission = is_probe(req), service.router.admission
    fingerprints = service.next_fingerprints(req, len(inputs))
    client: Client = req.context.client
    timeout = None if probe else service.request_timeout(req)
    if not probe:
        admission.acquire_permits(client)
    wake_event = WakeEvent()
    recorder = service.router.recorder
    key = 0 if probe else request_key(response_key(req).response_id)
    recorder.stamp(Event.NAMED, RequestContext(request_key=key), b=name_digest(req.context.request_id))
    generations = []
    for index, (one, fingerprint) in enumerate(zip(inputs, fingerprints, strict=True)):
        asked = client.context(fingerprint, key, index)
        message = Generate(
            rid=0,
            inputs=one.text,
            sampling=SamplingParams(0),
            max_new_tokens=0,
            add_special_tokens=options.add_special_tokens,
            input_ids=pack_column(INT32, one.ids),
            context=asked,
            pooling=PoolingInput(one.pair, options.truncate, options.keep_end, options.prompt),
        )
        recorder.stamp(Event.RECEIVED, asked, *client_number(client.name))
        generations.append(Generation(message, False, wake_event, probe, client, timeout, holds_permit=False))
    if probe:
        await _run(service, req, generations, wake_event)
    else:
        admission.take_permit(client)
        try:
            await _run(service, req, generations, wake_event)
        finally:
            admission.release_permit(client)
    for generation in generations:
        if generation.end is not None and (error := errors.from_end(generation.end, streaming=False)):
            raise error
    for generation in generations:
        request_metrics.record_generation(generation)
    request_metrics.record_success(generations)
    if not probe:
        metrics.tgi_pooled_inputs.inc(len(generations))
    return PooledResults(generations)


async def _run(service: Service, req: Request, generations: list[Generation], wake_event: WakeEvent) -> None:
    """Submits the inputs in order, up to WINDOW at once, and waits until all have ended. One that fails cancels the
    others. Raises ClientDisconnected."""
    submitted = generations[:WINDOW]
    watcher = service.submit(submitted, req)
    record, running, waiting = submitted[0].record, list(submitted), generations[: WINDOW - 1 : -1]
    try:
        while running or waiting:
            while waiting and len(running) < WINDOW:
                following = waiting.pop()
                following.record = record
                service.router.submit(following)
                submitted.append(following)
                running.append(following)
            await wake_event.wait()
            if watcher.disconnected:
                raise ClientDisconnected
            if any(one.failed for one in running):
                service.cancel(submitted)
                return
            running = [one for one in running if not one.ended]
    finally:
        watcher.close()


def set_headers(service: Service, resp: Response, results: PooledResults) -> None:
    """Sets the headers of a response: durations and counts, summed over its inputs."""
    timings = RequestTimings.of(results.generations)
    resp.content_type = "application/json"
    resp.set_headers(
        {
            "x-compute-type": service.compute_type,
            "x-compute-time": f"{timings.total:.6f}",
            "x-compute-characters": str(sum(one.prompt_characters for one in results.generations)),
            "x-compute-tokens": str(results.usage.prompt_tokens),
            "x-total-time": f"{timings.total * 1e3:.0f}",
            "x-tokenization-time": f"{timings.validation * 1e3:.0f}",
            "x-queue-time": f"{timings.queue * 1e3:.0f}",
            "x-inference-time": f"{timings.inference * 1e3:.0f}",
        }
    )


# --- vectors and scores -----------------------------------------------------------------------------------------------


def embedding(vector: "array[float]", normalize: bool, dimensions: int | None) -> "array[float]":
    """The first `dimensions` numbers of a vector, scaled to the length 1 with `normalize`. Raises ApiError, a 422, for
    more dimensions than the vector has."""
    if dimensions is not None and not 0 < dimensions <= len(vector):
        raise errors.validation_error(
            f"`dimensions` must be > 0 and <= {len(vector)}. Given: {dimensions}", param="dimensions"
        )
    if dimensions is not None:
        vector = vector[:dimensions]
    if not normalize:
        return vector
    length = math.sqrt(sum(map(mul, vector, vector)))
    return array(FLOAT32, [number / length for number in vector]) if length else vector


def cosine(one: "array[float]", other: "array[float]") -> float:
    """The cosine of the angle between two vectors; 0 if one of them is zero."""
    lengths = math.sqrt(sum(map(mul, one, one)) * sum(map(mul, other, other)))
    return sum(map(mul, one, other)) / lengths if lengths else 0.0


def sigmoid(logit: float) -> float:
    """1 / (1 + exp(-logit)), without overflow."""
    return 1 / (1 + math.exp(-logit)) if logit >= 0 else (grown := math.exp(logit)) / (1 + grown)


def probabilities(logits: Sequence[float], independent: bool) -> list[float]:
    """The probability of each class; `independent`: of each alone. A single class is always independent."""
    if independent or len(logits) == 1:
        return [sigmoid(logit) for logit in logits]
    highest = max(logits)
    powers = [math.exp(logit - highest) for logit in logits]
    total = sum(powers)
    return [power / total for power in powers]


async def score_pairs(
    service: Service, req: Request, pairs: Sequence[tuple[str, str]], options: InputOptions, raw: bool = False
) -> tuple[list[float], PooledResults]:
    """The score of each pair: of a model that ranks the sigmoid of its logit, or the logit if `raw`; of a model that
    makes embeddings their cosine. Raises ApiError and ClientDisconnected as run_inputs."""
    service.require_task(ModelTask.EMBED, ModelTask.CLASSIFY)
    source = service.router.source
    if source.task == ModelTask.CLASSIFY:
        if len(source.labels) != 1:
            raise errors.other_task(
                f"The model {service.model_id} has {len(source.labels)} classes, so it ranks no pairs: "
                "use /classify or /predict."
            )
        inputs = [TextInput(first, pair=second) for first, second in pairs]
        results = await run_inputs(service, req, inputs, options)
        logits = [results.vector(index)[0] for index in range(len(pairs))]
        return (logits if raw else [sigmoid(logit) for logit in logits]), results
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))  # each is computed once
    results = await run_inputs(service, req, [TextInput(text) for text in texts], options)
    vectors = {text: results.vector(index) for index, text in enumerate(texts)}
    return [cosine(vectors[first], vectors[second]) for first, second in pairs], results
