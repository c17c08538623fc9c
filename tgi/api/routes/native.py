"""TGI's own generation routes: POST /generate, /generate_stream and /."""

from json.encoder import encode_basestring as quote

from falcon.asgi import Request, Response

from tgi.api import accounting, errors
from tgi.api.calls import Columns, Generation
from tgi.api.errors import ApiError
from tgi.api.float32 import render
from tgi.api.routes.info import Health
from tgi.api.serde import Body
from tgi.api.service import Service
from tgi.api.shapes.native import CompatGenerateRequest, GenerateParameters, GenerateRequest
from tgi.api.sse import EventStream
from tgi.api.validation import EARLY, NOT_YET, RULES, Ask, check
from tgi.kernel.messages import End, Generate, Sampling

_BOOL = ("false", "true")


class NativeEvents:
    """One event per token; the last one carries the whole text and, if asked for, the details."""

    def __init__(self, call: Generation, details: bool, prompt: str) -> None:
        self._call = call
        self._details = details
        self._prompt = prompt  # put before the generated text
        self._index = 0

    def tokens(self, columns: Columns, end: End | None) -> bytes:
        first = self._index + 1
        self._index += len(columns.texts)
        events = [
            f'data: {{"index":{index},"token":{token},"generated_text":null,"details":null}}\n\n'
            for index, token in enumerate(render_tokens(columns), first)
        ]
        if end is not None:
            text = quote(self._prompt + end.text)
            details = self._stream_details(end) if self._details else "null"
            open_end = '"generated_text":null,"details":null}\n\n'
            events[-1] = f'{events[-1].removesuffix(open_end)}"generated_text":{text},"details":{details}}}\n\n'
        return "".join(events).encode()

    def failure(self, error: ApiError) -> bytes:
        return b"data: " + error.body + b"\n\n"

    def _stream_details(self, end: End) -> str:
        return (
            f'{{"finish_reason":"{end.reason}","generated_tokens":{self._call.generated},'
            f'"seed":{_seed(self._call)},"input_length":{end.prompt_tokens}}}'
        )


def render_tokens(columns: Columns) -> list[str]:
    """The JSON of each token."""
    return [
        f'{{"id":{token},"text":{quote(text)},"logprob":{render(logprob)},"special":{_BOOL[special]}}}'
        for token, text, logprob, special in zip(
            columns.ids, columns.texts, columns.logprobs, columns.special, strict=True
        )
    ]


def render_response(call: Generation, end: End, details: bool, prompt: str) -> str:
    """The JSON of a finished generation."""
    text = f'{{"generated_text":{quote(prompt + end.text)}'
    if not details:
        return text + "}"
    return (
        f'{text},"details":{{"finish_reason":"{end.reason}","generated_tokens":{call.generated},'
        f'"seed":{_seed(call)},"prefill":[],"tokens":[{",".join(render_tokens(call.take()))}]}}}}'
    )


def _seed(call: Generation) -> str:
    sampling = call.request.sampling
    return str(sampling.seed) if sampling.samples else "null"


def order(service: Service, inputs: str, p: GenerateParameters) -> Generate:
    """The message for a request that has passed the rules (its rid is the router's to give)."""
    sampling = Sampling(
        seed=service.seed(p.seed),
        do_sample=bool(p.do_sample),
        temperature=1.0 if p.temperature is None else p.temperature,
        top_k=p.top_k or 0,
        top_p=1.0 if p.top_p is None else p.top_p,
        repetition_penalty=1.0 if p.repetition_penalty is None else p.repetition_penalty,
    )
    return Generate(0, inputs, sampling, p.max_new_tokens, p.truncate, p.stops)


class _Native:
    """What the three routes have in common."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def _call(self, inputs: str, p: GenerateParameters, stream: bool) -> Generation:
        """The request as it goes down. Raises ApiError if it may not."""
        accounting.arrived()
        service = self._service
        limits = service.router.limits
        ask = Ask(inputs, p, stream, service.settings, limits.max_input_tokens if limits else 0)
        check(ask, EARLY)
        service.router.admit()
        check(ask, RULES)
        check(ask, NOT_YET)
        return Generation(order(service, inputs, p), stream)

    async def _whole(self, req: Request, resp: Response, inputs: str, p: GenerateParameters, full_text: bool) -> str:
        """Answers when all is there: the JSON, with the headers set."""
        call = self._call(inputs, p, stream=False)
        await self._service.finish(call, req)
        assert call.end is not None
        if error := errors.of_end(call.end, streaming=False):
            raise error
        times = accounting.succeeded(call, call.end)
        resp.content_type = "application/json"
        resp.set_headers(
            {
                "x-compute-type": self._service.compute_type,
                "x-compute-time": f"{times.total:.6f}",
                "x-compute-characters": str(len(inputs)),
                "x-total-time": f"{times.total * 1e3:.0f}",
                "x-validation-time": f"{times.validation * 1e3:.0f}",
                "x-queue-time": f"{times.queue * 1e3:.0f}",
                "x-inference-time": f"{times.inference * 1e3:.0f}",
                "x-time-per-token": f"{times.per_token * 1e3:.0f}",
                "x-prompt-tokens": str(call.end.prompt_tokens),
                "x-generated-tokens": str(call.generated),
            }
        )
        return render_response(call, call.end, bool(p.details), inputs if full_text else "")

    async def _stream(self, req: Request, resp: Response, inputs: str, p: GenerateParameters, full_text: bool) -> None:
        """Answers token by token."""
        call = self._call(inputs, p, stream=True)
        client = self._service.submit(call, req)
        events = NativeEvents(call, bool(p.details), inputs if full_text else "")
        stream = EventStream(call, events, client)
        try:
            await stream.open()
        except BaseException:
            await stream.close()
            raise
        resp.content_type = "text/event-stream"
        resp.set_headers(
            {
                "x-compute-type": self._service.compute_type,
                "x-compute-characters": str(len(inputs)),
                "x-accel-buffering": "no",
                "cache-control": "no-cache",
            }
        )
        resp.stream = stream


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


class RootResource(_Native):
    """POST /: an array of one, or a stream; the prompt comes back with the text unless told not to. GET /: health."""

    body = Body(CompatGenerateRequest)

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._health = Health(service)

    async def on_get(self, req: Request, resp: Response) -> None:
        """As GET /health."""
        await self._health.on_get(req, resp)

    async def on_head(self, req: Request, resp: Response) -> None:
        """As HEAD /health."""
        await self._health.on_head(req, resp)

    async def on_post(self, req: Request, resp: Response) -> None:
        """What the body's `stream` asks for."""
        request = await self._service.read(req, self.body)
        p = request.effective
        full_text = p.return_full_text is not False
        if request.stream:
            await self._stream(req, resp, request.inputs, p, full_text)
        else:
            resp.text = f"[{await self._whole(req, resp, request.inputs, p, full_text)}]"
