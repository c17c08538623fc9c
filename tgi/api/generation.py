"""What the generation routes share: from a decoded request to its generations, and from those to the response."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from falcon.asgi import Request, Response

from tgi.api import errors, request_metrics
from tgi.api.asgi import HOLD_KEY, is_probe
from tgi.api.clients import Client
from tgi.api.errors import ApiError
from tgi.api.images import ImageSet, check_images, markdown_images
from tgi.api.request_metrics import RequestTimings
from tgi.api.request_parameters import RequestedSampling, encode_grammar
from tgi.api.requests import Generation, WakeEvent
from tgi.api.resumption import KEY_BYTES, event_numbering, response_key
from tgi.api.service import Service
from tgi.api.shapes.chat import ImageSource
from tgi.api.shapes.native import GenerateParameters
from tgi.api.sse import EventFormatter, EventStream
from tgi.api.validation import RULES_BEFORE_ADMISSION, RuleContext, check_rules, rules_after_admission
from tgi.microkernel.messages.codec import INT32, ITEM_BYTES, pack_column
from tgi.microkernel.messages.protocol import End, Generate, ModelTask, RequestContext
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.microkernel.observability.flight_recorder import Event, client_number, name_digest, request_key

# Of the messages to the tokenizer that one HTTP request makes, in bodies of the longest allowed: each choice has the
# prompt, the grammar and the stop strings in a message of its own.
MAX_BODIES = 16


class PromptInput(NamedTuple):
    """A prompt: a text, or a chat as JSON (tokenizer/chat.py), or token ids. The others are empty."""

    inputs: str
    chat: bytes = b""
    ids: Sequence[int] | None = None
    add_special_tokens: bool = True  # to a text
    images: Sequence[ImageSource] = ()  # in the order of their placeholders

    @property
    def size(self) -> int:
        """About the bytes that it takes in a message."""
        return len(self.inputs) + len(self.chat) + ITEM_BYTES * len(self.ids or ())


class FinishedGeneration(NamedTuple):
    """A generation that has ended successfully."""

    generation: Generation
    end: End


# Returns the error to answer with in place of a successful generation, or None.
ResultCheck = Callable[[Generation, End], ApiError | None]


def create_generations(
    service: Service,
    req: Request,
    prompts: Sequence[PromptInput],
    parameters: GenerateParameters,
    *,
    stream: bool,
    choices: int = 1,
    hide_stop: bool = False,
    sampling: RequestedSampling | None = None,
    prompt_top_n: int | None = None,
    names: Mapping[str, str] = MappingProxyType({}),
    echo: bool = False,
    tells_prompt: bool = False,
) -> list[Generation]:
    """Validates a request, acquires its permits and creates its generations: `choices` for each prompt, in order.

    `sampling` defaults to that of `parameters`. With `prompt_top_n` the prompt's tokens are returned too, each with
    this many top tokens at its position. With `echo` the prompt is part of the answer, and `max_new_tokens` may be 0.
    With `tells_prompt` the number of its tokens is known before the first token.
    `names` maps TGI's parameter names to those of the request, for error messages.

    Raises ApiError: 422 for a broken rule, too many or too long generations or an invalid X-Request-Timeout, 424 as
    Service.next_fingerprints, 429 and 503 as Admission.acquire_permits.
    """
    service.require_task(ModelTask.GENERATE)
    limits = service.router.limits
    sampling = RequestedSampling.from_native(parameters) if sampling is None else sampling
    contexts = [
        RuleContext(
            inputs=None if prompt.chat or prompt.ids else prompt.inputs,
            parameters=parameters,
            stream=stream,
            settings=service.settings,
            max_input_tokens=limits.max_input_tokens if limits else 0,
            vocab_size=limits.vocab_size if limits else 0,
            sampling=sampling,
            adapters=service.router.adapters,
            ids=prompt.ids or (),
            echo=echo,
        )
        for prompt in prompts
    ]
    check_rules(contexts[0], RULES_BEFORE_ADMISSION, names)
    for prompt in prompts:
        check_images(prompt.images, service.settings)
    best_of = max(1, parameters.best_of or 1)
    probe = is_probe(req)
    count = len(prompts) * best_of * choices
    check_count(service, count)
    fingerprints = iter(service.next_fingerprints(req, count))
    client: Client = req.context.client
    timeout = None if probe else service.request_timeout(req)
    if not probe:
        service.router.admission.acquire_permits(client, count)
    rules = rules_after_admission(sampling)
    for context in contexts:
        check_rules(context, rules, names)
    wake_event = WakeEvent()
    window_ms = int(1000 * service.settings.resume_window) if stream else 0
    permits = service.settings.max_concurrent_requests
    resume_limit = permits if client.requests is None else min(permits, client.requests)
    random_source = response_key(req, resumable=window_ms > 0)
    recorder = service.router.recorder
    key = 0 if probe else request_key(random_source.response_id)
    recorder.stamp(Event.NAMED, RequestContext(request_key=key), b=name_digest(req.context.request_id))
    grammar_json = encode_grammar(parameters.grammar)
    parameter_size = len(grammar_json) + sum(map(len, parameters.stops))
    size = best_of * choices * sum(prompt.size + parameter_size for prompt in prompts)
    if not probe and size > (limit := MAX_BODIES * service.settings.payload_limit):
        detail = f"the texts of all choices together must have <= {limit} bytes. Given: {size}. Ask for fewer at once"
        raise errors.validation_error(detail, param="n" if choices > 1 else None)
    adapter = None if parameters.adapter_id is None else service.router.adapters[parameters.adapter_id]
    generations: list[Generation] = []
    first = req.context.generations if "generations" in req.context else 0  # of the instances before this one
    req.context.generations = first + count
    for prompt in prompts:
        seed = random_source.draw_seed() if parameters.seed is None else parameters.seed
        images: ImageSet | None = None
        for index in range(best_of * choices):
            if index and best_of > 1:
                seed = random_source.draw_seed()  # the choices of one seed differ by `choice`, those of best_of not
            params = sampling.to_params(seed, index if choices > 1 else 0)
            if adapter is not None:
                params = params._replace(adapter=adapter.name, adapter_digest=adapter.digest)
            if not probe:
                request_metrics.count_generation()
            asked = client.context(next(fingerprints), key, first + len(generations))
            message = _generate_message(
                prompt, parameters, sampling, params, hide_stop, grammar_json, asked, tells_prompt
            )
            recorder.stamp(Event.RECEIVED, asked, *client_number(client.name))
            if window_ms:
                resume_key = random_source.digest(f"generation {len(generations)}", KEY_BYTES)
                message = message._replace(resume_key=resume_key, resume_window_ms=window_ms, resume_limit=resume_limit)
            if prompt_top_n is not None:
                message = message._replace(prompt_logprobs_from=0, prompt_top_n=prompt_top_n)
            if prompt.images and images is None:
                images = ImageSet(prompt.images, asked)
            generations.append(Generation(message, stream, wake_event, probe, client, timeout, images=images))
    return generations


def text_prompt(service: Service, inputs: str, add_special_tokens: bool = True) -> PromptInput:
    """A text as a prompt. As in TGI, `![](URL)` in it is an image if the model sees images."""
    if not (token := service.router.source.image_token) or "![](" not in inputs:
        return PromptInput(inputs, add_special_tokens=add_special_tokens)
    inputs, images = markdown_images(inputs, token)
    return PromptInput(inputs, add_special_tokens=add_special_tokens, images=images)


def check_count(service: Service, count: int) -> None:
    """Raises ApiError: 422 for more generations than the server has permits. To be called before anything is made for
    each of them: `count` may be any number of a client's."""
    limit = service.settings.max_concurrent_requests
    if count > limit:
        text = f"at most {limit} texts can be generated at once. Given: {count}"
        raise errors.validation_error(text, counted=False)


def _generate_message(
    prompt: PromptInput,
    parameters: GenerateParameters,
    sampling: RequestedSampling,
    params: SamplingParams,
    hide_stop: bool,
    grammar_json: bytes,
    context: RequestContext,
    tells_prompt: bool,
) -> Generate:
    """The message to the tokenizer; Generation.to_message completes it."""
    return Generate(
        rid=0,
        inputs=prompt.inputs,
        sampling=params,
        max_new_tokens=parameters.max_new_tokens,
        truncate=parameters.truncate,
        stop_strings=parameters.stops,
        add_special_tokens=prompt.add_special_tokens and not prompt.chat,
        ignore_eos=parameters.ignores_eos,
        chat=prompt.chat,
        hide_stop=hide_stop,
        grammar=grammar_json,
        stop_token_ids=pack_column(INT32, sampling.stop_token_ids),
        bad_words=list(sampling.bad_words),
        skip_special_tokens=sampling.skip_special_tokens,
        input_ids=pack_column(INT32, prompt.ids or ()),
        tells_prompt=tells_prompt,
        context=context,
    )


class AnswerFormatter(EventFormatter):
    """How a route writes its answer: as events, or as a whole."""

    async def response_json(self, finished: list[FinishedGeneration]) -> str:
        """The response that is sent as a whole."""
        raise NotImplementedError


async def answer_generations(
    service: Service,
    req: Request,
    resp: Response,
    generations: Sequence[Generation],
    formatter: AnswerFormatter,
    *,
    choices: int = 1,
    check_result: ResultCheck = lambda generation, end: None,
) -> None:
    """Submits generations and answers as the request wants it: with a stream of events, or as a whole. `choices` as in
    set_result_headers. Raises ApiError and ClientDisconnected as stream_generations and run_generations."""
    if generations[0].stream:
        await stream_generations(service, req, resp, generations, formatter, choices)
        return
    finished = await run_generations(service, req, generations, check_result)
    set_result_headers(service, resp, finished, choices)
    resp.text = await formatter.response_json(finished)


async def run_generations(
    service: Service,
    req: Request,
    generations: Sequence[Generation],
    check_result: ResultCheck = lambda generation, end: None,
) -> list[FinishedGeneration]:
    """Submits generations and waits for all of them.

    Raises ApiError if one fails or does not pass `check_result`, and ClientDisconnected.
    """
    await complete_generations(service, req, generations)
    for generation in generations:
        if generation.end is not None and (error := check_result(generation, generation.end)):
            raise error
    return record_finished(generations)


async def complete_generations(service: Service, req: Request, generations: Sequence[Generation]) -> None:
    """Submits generations of one create_generations and waits for all of them. Raises ApiError if one fails, and
    ClientDisconnected."""
    await service.run_requests(generations, req)
    for generation in generations:
        if generation.end is not None and (error := errors.from_end(generation.end, streaming=False)):
            raise error


def record_finished(generations: Sequence[Generation]) -> list[FinishedGeneration]:
    """Counts all generations of a request, which have ended successfully."""
    finished = []
    for generation in generations:
        assert generation.end is not None
        request_metrics.record_generation(generation)
        finished.append(FinishedGeneration(generation, generation.end))
    request_metrics.record_success(generations)
    return finished


def set_result_headers(
    service: Service, resp: Response, finished: Sequence[FinishedGeneration], choices: int = 1
) -> None:
    """Sets the headers of a response that is sent as a whole: durations and counts, summed over its generations. A
    prompt counts once for all of its `choices`."""
    timings = RequestTimings.of([generation for generation, _ in finished])
    prompt_characters = sum(generation.prompt_characters for generation, _ in finished[::choices])
    resp.content_type = "application/json"
    resp.set_headers(
        {
            "x-compute-type": service.compute_type,
            "x-compute-time": f"{timings.total:.6f}",
            "x-compute-characters": str(prompt_characters),
            "x-total-time": f"{timings.total * 1e3:.0f}",
            "x-validation-time": f"{timings.validation * 1e3:.0f}",
            "x-queue-time": f"{timings.queue * 1e3:.0f}",
            "x-inference-time": f"{timings.inference * 1e3:.0f}",
            "x-time-per-token": f"{timings.per_token * 1e3:.0f}",
            "x-prompt-tokens": str(sum(end.prompt_tokens for _, end in finished[::choices])),
            "x-generated-tokens": str(sum(generation.generated_count for generation, _ in finished)),
            **_not_enforced_header([generation for generation, _ in finished]),
        }
    )


def _not_enforced_header(generations: Sequence[Generation]) -> dict[str, str]:
    """The header that names the keywords of the request's schemas that are not enforced, if there are any. All
    generations of a request have the same schemas."""
    keywords = generations[0].not_enforced
    return {"x-tgi-not-enforced": ", ".join(keywords)} if keywords else {}


async def stream_generations(
    service: Service,
    req: Request,
    resp: Response,
    generations: Sequence[Generation],
    formatter: EventFormatter,
    choices: int = 1,
) -> None:
    """Submits generations and answers with a stream of events; `choices` as in set_result_headers. The length of a
    chat, or of a prompt of token ids, is part of x-compute-characters if it is known before the stream opens.

    Raises ApiError if one fails before its first token, and ClientDisconnected.
    """
    numbering = event_numbering(req, len(generations)) if service.settings.resume_window else None
    watcher = service.submit(generations, req)
    hold_next = req.scope.get(HOLD_KEY, lambda: None)
    event_stream = EventStream(generations, formatter, watcher, service.cancel, numbering, hold_next)
    try:
        await event_stream.wait_for_first_token()
    except BaseException:
        await event_stream.close()
        raise
    resp.content_type = "text/event-stream"
    resp.set_headers(
        {
            "x-compute-type": service.compute_type,
            "x-compute-characters": str(sum(generation.prompt_characters for generation in generations[::choices])),
            "x-accel-buffering": "no",
            "cache-control": "no-cache",
            **_not_enforced_header(generations),
        }
    )
    resp.stream = event_stream
