"""POST /v1/completions: prompts go in, the texts that follow them come out, whole or in pieces."""

import asyncio
from collections.abc import Iterator, Sequence
from itertools import accumulate
from json.encoder import encode_basestring as quote
from typing import NamedTuple

from falcon.asgi import Request, Response

from tgi.api import accounting, answering, errors, openai
from tgi.api.answering import Finished, Prompt
from tgi.api.calls import Generation
from tgi.api.columns import Columns, PromptColumns
from tgi.api.errors import ApiError
from tgi.api.fields import Fields
from tgi.api.float32 import render
from tgi.api.openai import Stamp, Usage, Visible, finish_reason, likeliest, usage
from tgi.api.render import TURN
from tgi.api.serde import Body
from tgi.api.service import Service
from tgi.api.shapes.completions import CompletionRequest
from tgi.api.steering import Steering
from tgi.api.validation import COMPLETIONS, OPENAI, check
from tgi.kernel.messages import End


class CompletionEvents:
    """One event per token; the last one of each choice has its finish reason and usage."""

    def __init__(
        self, calls: list[Generation], request: CompletionRequest, stamp: Stamp, openai_errors: bool = True
    ) -> None:
        self._calls = calls
        self._openai_errors = openai_errors
        self._request = request
        self._choices = len(calls) // len(request.prompts)
        self._visible = [Visible() for _ in calls]
        self._head = f'data: {{"object":"text_completion","id":{stamp.id},"created":{stamp.created},'
        self._model = f'"model":{stamp.model},"system_fingerprint":{stamp.fingerprint}'
        self._begun = [False] * len(calls)
        self._offsets = [0] * len(calls)  # how much text there is before each choice's next token
        self._prompts = [call.prompt for call in calls]
        self._top_n = request.logprobs or 0
        self._usage = Usage(self._choices)

    def tokens(self, place: int, columns: Columns, end: End | None) -> list[str]:
        pieces = self._visible[place].pieces(columns, end) if columns.texts else [""]
        if not self._begun[place]:
            self._begun[place] = True
            if self._request.echo:
                echo = self._calls[place].text
                pieces[0] = echo + pieces[0]
                self._offsets[place] = len(echo)
        events = [
            f'{self._head}"choices":[{{"index":{place},"text":{quote(piece)},"logprobs":{logprobs},'
            f'"finish_reason":null}}],{self._model}}}\n\n'
            for piece, logprobs in zip(pieces, self._logprobs(place, columns), strict=True)
        ]
        if end is not None:
            self._usage.add(place, end, self._calls[place].generated)
            own = usage(end.prompt_tokens, self._calls[place].generated)
            open_end = f"null}}],{self._model}}}\n\n"
            # TGI puts the choices of the last event behind the model.
            choice = events[-1].removeprefix(self._head).removesuffix(open_end)
            events[-1] = f'{self._head}{self._model},{choice}{finish_reason(end)}}}],"usage":{own}}}\n\n'
        return events

    def failure(self, error: ApiError) -> str:
        return openai.failure(error, self._openai_errors)

    def close(self) -> str:
        if not self._request.usage_wanted:
            return openai.DONE
        return f'{self._head}{self._model},"choices":[],"usage":{self._usage.render()}}}\n\n{openai.DONE}'

    def _logprobs(self, place: int, columns: Columns) -> list[str]:
        tokens = len(columns.texts)
        if self._request.logprobs is None:
            return ["null"] * (tokens or 1)
        rendered = []
        for at in range(tokens or 1):
            one = slice(at, at + 1)
            # The prompt's tokens come with the first one.
            echoed = [*_echoed(self._prompts[place])]
            rendered.append(_logprobs(columns, one, self._top_n, self._offsets[place], echoed))
            self._prompts[place] = PromptColumns.empty()
            if tokens:
                self._offsets[place] += _width(columns, at)
        return rendered


async def render_response(finished: list[Finished], request: CompletionRequest, stamp: Stamp) -> str:
    """The JSON of a finished request."""
    choices = len(finished) // len(request.prompts)
    counted = Usage(choices)
    rendered = []
    for place, (call, end) in enumerate(finished):
        counted.add(place, end, call.generated)
        echo = call.text if request.echo else ""
        logprobs = "null"
        if request.logprobs is not None:
            echoed = []
            for part in _echoed(call.prompt):
                echoed.append(part)
                await asyncio.sleep(0)
            logprobs = _logprobs(call.take(), slice(None), request.logprobs, len(echo), echoed)
        rendered.append(
            f'{{"index":{place},"text":{quote(echo + end.text)},"logprobs":{logprobs},'
            f'"finish_reason":{finish_reason(end)}}}'
        )
    return (
        f'{{"object":"text_completion","id":{stamp.id},"created":{stamp.created},"model":{stamp.model},'
        f'"system_fingerprint":{stamp.fingerprint},"choices":[{",".join(rendered)}],"usage":{counted.render()}}}'
    )


class _Lists(NamedTuple):
    """OpenAI's older form, in columns: items as JSON, with commas between them."""

    tokens: str
    logprobs: str
    tops: str
    offsets: str


def _echoed(prompt: PromptColumns) -> Iterator[_Lists]:
    """The columns of a prompt, in parts that take some milliseconds each."""
    for begin in range(0, len(prompt.ids), TURN):
        turn = slice(begin, begin + TURN)
        yield _Lists(
            ",".join(map(quote, prompt.texts[turn])),
            ",".join(map(render, prompt.logprobs[turn])),
            ",".join(_pairs(tops) if tops else "null" for tops in prompt.tops[turn]),
            ",".join(map(str, prompt.starts[turn])),
        )


def _logprobs(columns: Columns, part: slice, top_n: int, offset: int, echoed: Sequence[_Lists]) -> str:
    """A part of the tokens with the `top_n` likeliest at each place, behind what is echoed; the text before it has
    `offset` characters."""
    places = range(len(columns.texts))[part]
    widths = accumulate((_width(columns, at) for at in places[:-1]), initial=offset)
    # Tokens are told apart by their text here: the first of several that share one is the likeliest.
    found = [likeliest(columns, at, top_n) for at in places] if columns.tops else []
    named = [{top.text: top.logprob for top in reversed(tops)} for tops in found]
    own = _Lists(
        ",".join(quote(columns.texts[at]) for at in places),
        ",".join(render(columns.logprobs[at]) for at in places),
        ",".join(map(_pairs, named)),
        ",".join(map(str, widths)),
    )
    parts = [*echoed, own] if places else echoed
    tokens, logprobs, tops, offsets = map(",".join, zip(*parts, strict=True))
    listed = f"[{tops}]" if top_n else "null"
    return f'{{"tokens":[{tokens}],"token_logprobs":[{logprobs}],"top_logprobs":{listed},"text_offset":[{offsets}]}}'


def _pairs(tops: dict[str, float]) -> str:
    """The likeliest tokens of one place, which come in reverse order."""
    return f"{{{','.join(f'{quote(text)}:{render(value)}' for text, value in reversed(tops.items()))}}}"


def _width(columns: Columns, at: int) -> int:
    """Characters of visible text in a token."""
    return 0 if columns.special[at] else len(columns.texts[at])


class CompletionsResource:
    """POST /v1/completions."""

    body = Body(CompletionRequest, Fields(CompletionRequest).check)

    def __init__(self, service: Service) -> None:
        self._service = service

    async def on_post(self, req: Request, resp: Response) -> None:
        """One JSON object, or a stream of events."""
        await self.answer(await self._service.read(req, self.body), req, resp)

    async def answer(self, request: CompletionRequest, req: Request, resp: Response) -> None:
        """The same for a body that has been read."""
        accounting.arrived()
        calls = self._generations(request)
        stamp = Stamp.new(self._service, "cmpl", calls[0].request.sampling.adapter)
        if request.stream:
            events = CompletionEvents(calls, request, stamp, self._service.has_openai_errors(req))
            await answering.stream(self._service, req, resp, calls, events, request.n or 1)
            return
        finished = await answering.finish(self._service, req, calls)
        answering.set_headers(self._service, resp, finished, request.n or 1)
        resp.delete_header("x-compute-time")  # TGI has it on its other routes alone
        resp.text = await render_response(finished, request, stamp)

    def _generations(self, request: CompletionRequest) -> list[Generation]:
        limit = self._service.settings.max_client_batch_size
        if request.suffix is not None:
            raise errors.suffix()
        if len(request.prompts) > limit:
            raise errors.batch_size(limit)
        openai.fill_in(request, self._service.router.defaults)
        check(request, OPENAI)
        check(request, COMPLETIONS)
        p = openai.parameters(request, self._service.router.adapters, request.max_new_tokens, request.logprobs or 0)
        prompts = [
            Prompt(one, add_special_tokens=request.add_special_tokens is not False)
            if isinstance(one, str)
            else Prompt("", ids=one)
            for one in request.prompts
        ]
        return answering.generations(
            self._service,
            prompts,
            p,
            stream=bool(request.stream),
            choices=request.n or 1,
            hide_stop=not request.include_stop_str_in_output,
            steering=Steering.of(request),
            names=request.names,
            prompt_tops=request.logprobs if request.echo else None,
            echo=bool(request.echo),
        )
