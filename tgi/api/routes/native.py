"""TGI's own generation routes: POST /generate, /generate_stream and /."""

from json.encoder import encode_basestring as quote

from falcon.asgi import Request, Response

from tgi.api import accounting, answering, render
from tgi.api.answering import Finished, Prompt
from tgi.api.calls import Generation
from tgi.api.columns import Columns
from tgi.api.errors import ApiError
from tgi.api.routes.info import Health
from tgi.api.serde import Body
from tgi.api.service import Service
from tgi.api.shapes.native import CompatGenerateRequest, GenerateParameters, GenerateRequest
from tgi.kernel.messages import End


class NativeEvents:
    """One event per token; the last one carries the whole text and, if asked for, the details."""

    def __init__(self, call: Generation, details: bool, prompt: str) -> None:
        self._call = call
        self._details = details
        self._prompt = prompt  # put before the generated text
        self._index = 0

    def tokens(self, place: int, columns: Columns, end: End | None) -> list[str]:
        first = self._index + 1
        self._index += len(columns.texts)
        rendered = render.tokens(columns)
        for at, tops in enumerate(columns.tops):
            if tops:
                rendered[at] += f',"top_tokens":{render.top_tokens(tops)}'
        events = [
            f'data: {{"index":{index},"token":{token},"generated_text":null,"details":null}}\n\n'
            for index, token in enumerate(rendered, first)
        ]
        if end is not None:
            text = quote(self._prompt + end.text)
            details = self._stream_details(end) if self._details else "null"
            open_end = '"generated_text":null,"details":null}\n\n'
            events[-1] = f'{events[-1].removesuffix(open_end)}"generated_text":{text},"details":{details}}}\n\n'
        return events

    def failure(self, error: ApiError) -> str:
        return f"data: {error.native().decode()}\n\n"

    def close(self) -> str:
        return ""

    def _stream_details(self, end: End) -> str:
        return (
            f'{{"finish_reason":"{end.reason}","generated_tokens":{self._call.generated},'
            f'"seed":{render.seed(self._call)},"input_length":{end.prompt_tokens}}}'
        )


async def render_response(finished: list[Finished], details: bool, prompt: str) -> str:
    """The JSON of a finished request: the best of its generations, and in its details the others."""
    (best, end), *others = finished
    text = f'{{"generated_text":{quote(prompt + end.text)}'
    if not details:
        return text + "}"
    columns = best.take()
    sequences = ",".join([await _sequence(other, prompt) for other in others])
    best_of = f',"best_of_sequences":[{sequences}]' if others else ""
    return f'{text},"details":{await _fields(best, end, columns)}{best_of}{_tops(columns)}}}}}'


async def _sequence(finished: Finished, prompt: str) -> str:
    call, end = finished
    columns = call.take()
    fields = (await _fields(call, end, columns)).removeprefix("{")
    return f'{{"generated_text":{quote(prompt + end.text)},{fields}{_tops(columns)}}}'


async def _fields(call: Generation, end: End, columns: Columns) -> str:
    """The beginning of an object that tells how a text was generated."""
    return (
        f'{{"finish_reason":"{end.reason}","generated_tokens":{call.generated},"seed":{render.seed(call)},'
        f'"prefill":{await render.prefill(call.prompt)},"tokens":[{",".join(render.tokens(columns))}]'
    )


def _tops(columns: Columns) -> str:
    return f',"top_tokens":[{",".join(map(render.top_tokens, columns.tops))}]' if columns.tops else ""


def score(finished: Finished) -> float:
    """Mean logprob of the generated tokens."""
    logprobs = finished.call.fresh.logprobs
    return sum(logprobs) / max(1, len(logprobs))


class _Native:
    """What the three routes have in common."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def _whole(self, req: Request, resp: Response, inputs: str, p: GenerateParameters, full_text: bool) -> str:
        """Answers when all is there: the JSON, with the headers set."""
        accounting.arrived()
        prompt_tops = 0 if p.decoder_input_details else None
        calls = answering.generations(self._service, [Prompt(inputs)], p, stream=False, prompt_tops=prompt_tops)
        finished = await answering.finish(self._service, req, calls)
        finished.sort(key=score, reverse=True)  # stable: the first among equals
        answering.set_headers(self._service, resp, finished[:1])
        details = bool(p.details or p.decoder_input_details)
        return await render_response(finished, details, inputs if full_text else "")

    async def _stream(self, req: Request, resp: Response, inputs: str, p: GenerateParameters, full_text: bool) -> None:
        """Answers token by token."""
        accounting.arrived()
        calls = answering.generations(self._service, [Prompt(inputs)], p, stream=True)
        events = NativeEvents(calls[0], bool(p.details), inputs if full_text else "")
        await answering.stream(self._service, req, resp, calls, events)


class GenerateResource(_Native):
    """POST /generate."""

    body = Body(GenerateRequest)

    async def on_post(self, req: Request, resp: Response) -> None:
        """One JSON object."""
        request = await self._service.read(req, self.body)
        p = request.effective
        resp.text = await self._whole(req, resp, request.inputs, p, bool(p.return_full_text))


class GenerateStreamResource(_Native):
    """POST /generate_stream."""

    body = Body(GenerateRequest)

    async def on_post(self, req: Request, resp: Response) -> None:
        """A stream of events."""
        request = await self._service.read(req, self.body)
        p = request.effective
        await self._stream(req, resp, request.inputs, p, bool(p.return_full_text))


class CompatResource(_Native):
    """POST /: an array of one, or a stream; the prompt comes back with the text, unless the request says no or the
    model is known to be for something else."""

    body = Body(CompatGenerateRequest)

    async def on_post(self, req: Request, resp: Response) -> None:
        """What the body's `stream` asks for."""
        await self.answer(await self._service.read(req, self.body), req, resp)

    async def answer(self, request: CompatGenerateRequest, req: Request, resp: Response) -> None:
        """The same for a body that has been read."""
        p = request.effective
        full_text = p.return_full_text
        if full_text is None:
            full_text = self._service.settings.model_pipeline_tag in (None, "text-generation")
        if request.stream:
            await self._stream(req, resp, request.inputs, p, full_text)
        else:
            resp.text = f"[{await self._whole(req, resp, request.inputs, p, full_text)}]"


class RootResource(CompatResource):
    """POST / as above. GET /: health."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._health = Health(service)

    async def on_get(self, req: Request, resp: Response) -> None:
        """As GET /health."""
        await self._health.on_get(req, resp)

    on_head = on_get  # falcon leaves the body out
