"""From a request that was read to its generations, and from those to an answer: what all generation routes share."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from falcon.asgi import Request, Response

from tgi.api import accounting, errors, grammar
from tgi.api.accounting import Times
from tgi.api.calls import Bell, Generation
from tgi.api.errors import ApiError
from tgi.api.service import Service
from tgi.api.shapes.native import GenerateParameters
from tgi.api.sse import Events, EventStream
from tgi.api.steering import NONE, Steering
from tgi.api.validation import EARLY, RULES, Ask, check
from tgi.kernel.messages import End, Generate, Sampling
from tgi.kernel.pack import FLOAT32, INT32, pack


class Prompt(NamedTuple):
    """What tokens are asked for behind: a text, or in its place a chat as JSON (tokenizer/chat.py) or token ids."""

    inputs: str
    chat: bytes = b""
    ids: Sequence[int] | None = None
    add_special_tokens: bool = True  # to a text


Refuse = Callable[[Generation, End], ApiError | None]


class Finished(NamedTuple):
    """A generation that has ended well."""

    call: Generation
    end: End


def generations(
    service: Service,
    prompts: Sequence[Prompt],
    p: GenerateParameters,
    *,
    stream: bool,
    choices: int = 1,
    hide_stop: bool = False,
    steering: Steering = NONE,
    prompt_tops: int | None = None,
    names: Mapping[str, str] = MappingProxyType({}),
    echo: bool = False,
) -> list[Generation]:
    """The generations of one request, `choices` for each prompt, next to each other. With `prompt_tops` the tokens of
    the prompts come too, with the likeliest alternatives at each position. `names` are the request's names of those
    parameters that it calls otherwise. With `echo` the prompts are part of the answer, and no token need be generated.
    Raises ApiError if they may not be computed, or not now."""
    limits = service.router.limits
    asks = [
        Ask(
            None if prompt.chat or prompt.ids else prompt.inputs,
            p,
            stream,
            service.settings,
            limits.max_input_tokens if limits else 0,
            limits.vocab_size if limits else 0,
            steering,
            service.router.adapters,
            prompt.ids or (),
            echo,
        )
        for prompt in prompts
    ]
    check(asks[0], EARLY, names)
    count = max(1, p.best_of or 1) * choices
    admit(service, len(prompts) * count)
    for ask in asks:
        check(ask, RULES, names)
    bell = Bell()
    form = grammar.encoded(p.grammar)
    adapter = None if p.adapter_id is None else service.router.adapters[p.adapter_id]
    made = []
    for prompt in prompts:
        seed = service.seed(p.seed)
        for place in range(count):
            if place and (p.best_of or 1) > 1:
                seed = service.seed(None)  # best_of: each has a seed of its own
            sampling = _sampling(p, steering, seed, place if choices > 1 else 0)
            if adapter is not None:
                sampling = sampling._replace(adapter=adapter.name, adapter_digest=adapter.digest)
            accounting.submitted()
            message = _message(prompt, p, sampling, hide_stop, form, steering)
            if prompt_tops is not None:
                message = message._replace(prompt_from=0, prompt_top_n=prompt_tops)
            made.append(Generation(message, stream, bell))
    return made


def admit(service: Service, count: int) -> None:
    """Takes a place for each of so many generations. Raises ApiError: 422 if there are never so many, 429, 503."""
    most = service.settings.max_concurrent_requests
    if count > most:
        raise errors.validation(f"at most {most} texts can be generated at once. Given: {count}")
    service.router.admit(count)


def _sampling(p: GenerateParameters, steering: Steering, seed: int, choice: int) -> Sampling:
    """How one generation draws."""
    sampling = Sampling(
        seed=seed,
        do_sample=bool(p.do_sample),
        temperature=1.0 if p.temperature is None else p.temperature,
        top_k=p.top_k or 0,
        top_p=1.0 if p.top_p is None else p.top_p,
        repetition_penalty=1.0 if p.repetition_penalty is None else p.repetition_penalty,
        top_n=p.top_n_tokens or 0,
        choice=choice,
        typical_p=1.0 if p.typical_p is None else p.typical_p,
        frequency_penalty=p.frequency_penalty or 0.0,
        count_penalty=steering.frequency_penalty,
        presence_penalty=steering.presence_penalty,
        bias_ids=pack(INT32, steering.logit_bias.keys()),
        biases=pack(FLOAT32, steering.logit_bias.values()),
        watermark=bool(p.watermark),
        min_new_tokens=p.min_new_tokens or 0,
        min_p=p.min_p or 0.0,
    )
    return sampling.unlimited() if steering.greedy else sampling


def _message(
    prompt: Prompt, p: GenerateParameters, sampling: Sampling, hide_stop: bool, form: bytes, steering: Steering
) -> Generate:
    """What goes down (its rid is the router's to give)."""
    return Generate(
        0,
        prompt.inputs,
        sampling,
        p.max_new_tokens,
        p.truncate,
        p.stops,
        add_special_tokens=prompt.add_special_tokens and not prompt.chat,
        ignore_eos=p.ignores_eos,
        chat=prompt.chat,
        hide_stop=hide_stop,
        grammar=form,
        stop_token_ids=pack(INT32, steering.stop_token_ids),
        bad_words=list(steering.bad_words),
        skip_special_tokens=steering.skip_special_tokens,
        input_ids=pack(INT32, prompt.ids or ()),
    )


async def finish(
    service: Service, req: Request, calls: Sequence[Generation], refuse: Refuse = lambda call, end: None
) -> list[Finished]:
    """Sends generations down and waits for all of them. Raises ApiError if one fails, or if its route must `refuse` to
    answer with it."""
    await service.finish(calls, req)
    for call in calls:
        if call.end is not None and (error := errors.of_end(call.end, streaming=False)):
            raise error
    for call in calls:
        if call.end is not None and (error := refuse(call, call.end)):
            raise error
    finished = []
    for call in calls:
        assert call.end is not None
        accounting.generated(call)
        finished.append(Finished(call, call.end))
    accounting.succeeded(calls)
    return finished


def set_headers(service: Service, resp: Response, finished: Sequence[Finished], choices: int = 1) -> None:
    """The headers of an answer that is sent as a whole: durations and counts, summed over its generations. A prompt
    counts once, however many `choices` it has."""
    times = Times.of([call for call, _ in finished])
    resp.content_type = "application/json"
    resp.set_headers(
        {
            "x-compute-type": service.compute_type,
            "x-compute-time": f"{times.total:.6f}",
            "x-compute-characters": str(sum(call.characters for call, _ in finished[::choices])),
            "x-total-time": f"{times.total * 1e3:.0f}",
            "x-validation-time": f"{times.validation * 1e3:.0f}",
            "x-queue-time": f"{times.queue * 1e3:.0f}",
            "x-inference-time": f"{times.inference * 1e3:.0f}",
            "x-time-per-token": f"{times.per_token * 1e3:.0f}",
            "x-prompt-tokens": str(sum(end.prompt_tokens for _, end in finished[::choices])),
            "x-generated-tokens": str(sum(call.generated for call, _ in finished)),
        }
    )


async def stream(
    service: Service, req: Request, resp: Response, calls: Sequence[Generation], events: Events, choices: int = 1
) -> None:
    """Answers with events; `choices` as in set_headers. The length of a chat, or of a prompt of ids, counts in the
    headers if the tokenizer has told it by then."""
    client = service.submit(calls, req)
    events_of = EventStream(calls, events, client, service.cancel)
    try:
        await events_of.open()
    except BaseException:
        await events_of.close()
        raise
    resp.content_type = "text/event-stream"
    resp.set_headers(
        {
            "x-compute-type": service.compute_type,
            "x-compute-characters": str(sum(call.characters for call in calls[::choices])),
            "x-accel-buffering": "no",
            "cache-control": "no-cache",
        }
    )
    resp.stream = events_of
