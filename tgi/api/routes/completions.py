"""POST /v1/completions: the texts that follow one or several prompts, whole or as a stream."""

import asyncio
from collections.abc import Iterator, Sequence
from itertools import accumulate
from json.encoder import encode_basestring as quote
from typing import NamedTuple

from falcon.asgi import Request, Response

from tgi.api import errors, request_metrics
from tgi.api.answer import VisibleText
from tgi.api.errors import ApiError
from tgi.api.float32 import float32_to_json
from tgi.api.generation import (
    AnswerFormatter,
    FinishedGeneration,
    PromptInput,
    answer_generations,
    create_generations,
    text_prompt,
)
from tgi.api.json_body import JsonBody
from tgi.api.openai_output import (
    DONE_EVENT,
    ResponseIdentity,
    TokenUsage,
    failure_events,
    finish_reason_json,
    top_n_tokens,
    usage_json,
    with_running_usage,
)
from tgi.api.rejected_fields import FieldChecker
from tgi.api.request_parameters import RequestedSampling, apply_model_defaults, openai_generate_parameters
from tgi.api.requests import Generation
from tgi.api.resumption import response_key
from tgi.api.service import Resource
from tgi.api.shapes.completions import CompletionRequest
from tgi.api.token_columns import MAX_ITEMS_PER_TURN, PromptColumns, TokenColumns, token_name
from tgi.api.validation import COMPLETION_RULES, OPENAI_RULES, check_rules
from tgi.microkernel.messages.protocol import End


class CompletionFormatter(AnswerFormatter):
    """A stream has one event per token. The last one of each choice has its finish reason and usage."""

    def __init__(
        self,
        generations: list[Generation],
        request: CompletionRequest,
        identity: ResponseIdentity,
        openai_errors: bool = True,
    ) -> None:
        self._generations = generations
        self._identity = identity
        self._openai_errors = openai_errors
        self._request = request
        self._choices = len(generations) // len(request.prompts)
        self._visible_texts = [VisibleText() for _ in generations]
        self._event_start = f'data: {{"object":"text_completion","id":{identity.id},"created":{identity.created},'
        self._model = f'"model":{identity.model},"system_fingerprint":{identity.fingerprint}'
        self._started = [False] * len(generations)
        self._offsets = [0] * len(generations)  # characters of text before each choice's next token
        self._prompts = [generation.prompt_columns for generation in generations]  # emptied once sent
        self._top_n = request.logprobs or 0
        self._running_usage = request.running_usage_wanted
        self._usage = TokenUsage(self._choices, details=openai_errors)

    def token_events(self, index: int, columns: TokenColumns, end: End | None) -> list[str]:
        pieces = self._visible_texts[index].pieces(columns, end) if columns.texts else [""]
        if not self._started[index]:
            self._started[index] = True
            if self._request.echo:
                echo = self._generations[index].prompt_text
                pieces[0] = echo + pieces[0]
                self._offsets[index] = len(echo)
        events = [
            f'{self._event_start}"choices":[{{"index":{index},"text":{quote(piece)},"logprobs":{logprobs},'
            f'"finish_reason":null}}],{self._model}}}\n\n'
            for piece, logprobs in zip(pieces, self._logprobs_json(index, columns), strict=True)
        ]
        if self._running_usage:
            last = events[-1]
            events = with_running_usage(events, self._generations[index], len(columns.texts))
            if end is not None:
                events[-1] = last  # gets its usage below
        if end is not None:
            generated_count = self._generations[index].generated_count
            self._usage.add_generation(index, end, generated_count)
            cached_tokens = end.cached_tokens if self._openai_errors else None
            usage = usage_json(end.prompt_tokens, generated_count, cached_tokens)
            open_end = f"null}}],{self._model}}}\n\n"
            # In TGI's last event the choices come after the model.
            choice = events[-1].removeprefix(self._event_start).removesuffix(open_end)
            reason = finish_reason_json(end)
            events[-1] = f'{self._event_start}{self._model},{choice}{reason}}}],"usage":{usage}}}\n\n'
        return events

    def failure_events(self, error: ApiError) -> str:
        return failure_events(error, self._openai_errors)

    def closing_events(self) -> str:
        if not self._request.usage_wanted:
            return DONE_EVENT
        return f'{self._event_start}{self._model},"choices":[],"usage":{self._usage.to_json()}}}\n\n{DONE_EVENT}'

    async def response_json(self, finished: list[FinishedGeneration]) -> str:
        """The response that is sent as a whole. Other tasks have turns while the logprobs of a prompt are written."""
        request, choices = self._request, []
        for index, (generation, end) in enumerate(finished):
            self._usage.add_generation(index, end, generation.generated_count)
            echo = generation.prompt_text if request.echo else ""
            logprobs = "null"
            if request.logprobs is not None:
                prompt_lists = []
                for lists in _prompt_logprob_lists(generation.prompt_columns):
                    prompt_lists.append(lists)
                    await asyncio.sleep(0)
                columns = generation.take_tokens()
                logprobs = _logprobs_json(generation, columns, slice(None), request.logprobs, len(echo), prompt_lists)
            choices.append(
                f'{{"index":{index},"text":{quote(echo + end.text)},"logprobs":{logprobs},'
                f'"finish_reason":{finish_reason_json(end)}}}'
            )
        return self._identity.response_json("text_completion", choices, self._usage)

    def _logprobs_json(self, index: int, columns: TokenColumns) -> list[str]:
        """The logprobs of each event. The tokens of the prompt are part of the first."""
        tokens = len(columns.texts)
        if self._request.logprobs is None:
            return ["null"] * (tokens or 1)
        logprobs = []
        for position in range(tokens or 1):
            one = slice(position, position + 1)
            prompt_lists = [*_prompt_logprob_lists(self._prompts[index])]
            logprobs.append(
                _logprobs_json(self._generations[index], columns, one, self._top_n, self._offsets[index], prompt_lists)
            )
            self._prompts[index] = PromptColumns.empty()
            if tokens:
                self._offsets[index] += _visible_characters(columns, position)
        return logprobs


class _LogprobLists(NamedTuple):
    """The lists of OpenAI's older logprobs format: JSON items with commas between them."""

    tokens: str
    token_logprobs: str
    top_logprobs: str
    text_offset: str


def _prompt_logprob_lists(prompt: PromptColumns) -> Iterator[_LogprobLists]:
    """The lists of a prompt, in chunks that take a few milliseconds each."""
    for begin in range(0, len(prompt.ids), MAX_ITEMS_PER_TURN):
        turn = slice(begin, begin + MAX_ITEMS_PER_TURN)
        yield _LogprobLists(
            tokens=",".join(
                quote(token_name(text, prompt.partial.get(token)))
                for token, text in zip(prompt.ids[turn], prompt.texts[turn], strict=True)
            ),
            token_logprobs=",".join(map(float32_to_json, prompt.logprobs[turn])),
            top_logprobs=",".join(_top_logprobs_json(tops) if tops else "null" for tops in prompt.tops[turn]),
            text_offset=",".join(map(str, prompt.starts[turn])),
        )


def _logprobs_json(
    generation: Generation,
    columns: TokenColumns,
    selection: slice,
    top_n: int,
    offset: int,
    prompt_lists: Sequence[_LogprobLists],
) -> str:
    """The logprobs of the prompt and of the selected tokens, with the top-n tokens at each position. The first
    selected token begins at character `offset` of the text."""
    partial = generation.partial_tokens
    positions = range(len(columns.texts))[selection]
    offsets = accumulate((_visible_characters(columns, position) for position in positions[:-1]), initial=offset)
    # Reversed, so that of several tokens with the same name the likeliest is kept.
    tops_by_position = [top_n_tokens(columns, position, top_n) for position in positions] if columns.tops else []
    named_tops = [
        {token_name(top.text, partial.get(top.id)): top.logprob for top in reversed(tops)} for tops in tops_by_position
    ]
    generated = _LogprobLists(
        tokens=",".join(
            quote(token_name(columns.texts[position], partial.get(columns.ids[position]))) for position in positions
        ),
        token_logprobs=",".join(float32_to_json(columns.logprobs[position]) for position in positions),
        top_logprobs=",".join(map(_top_logprobs_json, named_tops)),
        text_offset=",".join(map(str, offsets)),
    )
    chunks = [*prompt_lists, generated] if positions else prompt_lists
    tokens, token_logprobs, top_logprobs, text_offset = map(",".join, zip(*chunks, strict=True))
    tops = f"[{top_logprobs}]" if top_n else "null"
    return (
        f'{{"tokens":[{tokens}],"token_logprobs":[{token_logprobs}],"top_logprobs":{tops},'
        f'"text_offset":[{text_offset}]}}'
    )


def _top_logprobs_json(tops: dict[str, float]) -> str:
    """The top tokens at one position, given with the likeliest last."""
    return f"{{{','.join(f'{quote(text)}:{float32_to_json(value)}' for text, value in reversed(tops.items()))}}}"


def _visible_characters(columns: TokenColumns, position: int) -> int:
    """Characters of visible text in a token."""
    return 0 if columns.special[position] else len(columns.texts[position])


class CompletionsResource(Resource):
    """POST /v1/completions."""

    body = JsonBody(CompletionRequest, FieldChecker(CompletionRequest).check)

    async def on_post(self, req: Request, resp: Response) -> None:
        """Answers with one JSON object, or with a stream of events."""
        await self.answer(await self._service.read_generation_body(req, self.body), req, resp)

    async def answer(self, request: CompletionRequest, req: Request, resp: Response) -> None:
        request_metrics.count_request(req)
        service = self._service
        generations = self._create_generations(req, request)
        identity = ResponseIdentity.create(service, response_key(req), "cmpl", generations[0].message.sampling.adapter)
        formatter = CompletionFormatter(generations, request, identity, service.has_openai_errors(req))
        await answer_generations(service, req, resp, generations, formatter, choices=request.n or 1)
        resp.delete_header("x-compute-time")  # TGI has it on its other routes only

    def _create_generations(self, req: Request, request: CompletionRequest) -> list[Generation]:
        """`n` generations for each prompt, in order. Raises ApiError as create_generations."""
        service = self._service
        limit = service.settings.max_client_batch_size
        if request.suffix is not None:
            raise errors.suffix_not_supported()
        if len(request.prompts) > limit:
            raise errors.batch_size_exceeded(limit)
        apply_model_defaults(request, service.router.defaults)
        check_rules(request, OPENAI_RULES)
        check_rules(request, COMPLETION_RULES)
        parameters = openai_generate_parameters(request, service.router.adapters)
        prompts = [
            text_prompt(service, prompt, request.add_special_tokens is not False)
            if isinstance(prompt, str)
            else PromptInput("", ids=prompt)
            for prompt in request.prompts
        ]
        return create_generations(
            service,
            req,
            prompts,
            parameters,
            stream=bool(request.stream),
            choices=request.n or 1,
            hide_stop=not request.include_stop_str_in_output,
            sampling=RequestedSampling.from_openai(request, request.logprobs or 0),
            names=request.names,
            tells_prompt=request.running_usage_wanted,
            prompt_top_n=request.logprobs if request.echo else None,
            echo=bool(request.echo),
        )
