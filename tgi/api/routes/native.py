"""TGI's own generation routes: POST /generate, /generate_stream and /."""

from json.encoder import encode_basestring as quote

from falcon.asgi import Request, Response

from tgi.api import page, request_metrics
from tgi.api.errors import ApiError
from tgi.api.generation import (
    FinishedGeneration,
    create_generations,
    run_generations,
    set_result_headers,
    stream_generations,
    text_prompt,
)
from tgi.api.json_body import JsonBody
from tgi.api.requests import Generation
from tgi.api.routes.info import HealthResource
from tgi.api.service import Resource, Service
from tgi.api.shapes.native import CompatGenerateRequest, GenerateParameters, GenerateRequest
from tgi.api.sse import EventFormatter
from tgi.api.token_columns import TokenColumns, prefill_json, tokens_json, top_tokens_json
from tgi.microkernel.messages.protocol import End, FinishReason


class NativeEvents(EventFormatter):
    """Formats a stream: one event per token. The last one has the whole text and, if requested, the details."""

    def __init__(self, generation: Generation, details: bool, text_prefix: str) -> None:
        self._generation = generation
        self._details = details
        self._text_prefix = text_prefix  # the prompt, if it is part of the text
        self._index = 0

    def token_events(self, index: int, columns: TokenColumns, end: End | None) -> list[str]:
        first = self._index + 1
        self._index += len(columns.texts)
        tokens = tokens_json(columns)
        for position, tops in enumerate(columns.tops):
            if tops:
                tokens[position] += f',"top_tokens":{top_tokens_json(tops)}'
        events = [
            f'data: {{"index":{number},"token":{token},"generated_text":null,"details":null}}\n\n'
            for number, token in enumerate(tokens, first)
        ]
        if end is not None:
            text = quote(self._text_prefix + end.text)
            details = self._details_json(end) if self._details else "null"
            open_end = '"generated_text":null,"details":null}\n\n'
            events[-1] = f'{events[-1].removesuffix(open_end)}"generated_text":{text},"details":{details}}}\n\n'
        return events

    def failure_events(self, error: ApiError) -> str:
        return f"data: {error.native_body().decode()}\n\n"

    def closing_events(self) -> str:
        return ""

    def _details_json(self, end: End) -> str:
        generation = self._generation
        return (
            f'{{"finish_reason":"{_reason(generation, end)}","generated_tokens":{generation.generated_count},'
            f'"seed":{_seed_json(generation)},"input_length":{end.prompt_tokens}}}'
        )


async def response_json(finished: list[FinishedGeneration], details: bool, text_prefix: str) -> str:
    """The response: the text of the first generation, and in its details the other ones of best_of."""
    (best, end), *others = finished
    text = f'{{"generated_text":{quote(text_prefix + end.text)}'
    if not details:
        return text + "}"
    columns = best.take_tokens()
    sequences = ",".join([await _sequence_json(other, text_prefix) for other in others])
    best_of = f',"best_of_sequences":[{sequences}]' if others else ""
    return f'{text},"details":{await _details_start(best, end, columns)}{best_of}{_top_tokens_member(columns)}}}}}'


async def _sequence_json(finished: FinishedGeneration, text_prefix: str) -> str:
    generation, end = finished
    columns = generation.take_tokens()
    fields = (await _details_start(generation, end, columns)).removeprefix("{")
    return f'{{"generated_text":{quote(text_prefix + end.text)},{fields}{_top_tokens_member(columns)}}}'


async def _details_start(generation: Generation, end: End, columns: TokenColumns) -> str:
    """The object of details up to its tokens, without the closing brace."""
    return (
        f'{{"finish_reason":"{_reason(generation, end)}","generated_tokens":{generation.generated_count},'
        f'"seed":{_seed_json(generation)},"prefill":{await prefill_json(generation.prompt_columns)},'
        f'"tokens":[{",".join(tokens_json(columns))}]'
    )


def _top_tokens_member(columns: TokenColumns) -> str:
    return f',"top_tokens":[{",".join(map(top_tokens_json, columns.tops))}]' if columns.tops else ""


def _reason(generation: Generation, end: End) -> str:
    """TGI's finish reason: `length` also if the last token that is allowed is an end token."""
    if end.reason == FinishReason.EOS and generation.generated_count == generation.message.max_new_tokens:
        return FinishReason.LENGTH
    return end.reason


def _seed_json(generation: Generation) -> str:
    """The seed of a generation that samples; null for a greedy one."""
    sampling = generation.message.sampling
    return str(sampling.seed) if sampling.samples else "null"


def mean_logprob(finished: FinishedGeneration) -> float:
    """Mean logprob of the generated tokens: best_of returns the generation with the highest."""
    logprobs = finished.generation.unread_tokens.logprobs
    return sum(logprobs) / max(1, len(logprobs))


class _NativeResource(Resource):
    """What the three routes share. `with_prompt` makes the prompt a part of the text."""

    async def _answer_whole(
        self, req: Request, resp: Response, inputs: str, parameters: GenerateParameters, with_prompt: bool
    ) -> str:
        """Generates and sets the headers. Returns the JSON of the response."""
        request_metrics.count_request(req)
        prompt_top_n = 0 if parameters.decoder_input_details else None
        generations = create_generations(
            self._service, req, [text_prompt(self._service, inputs)], parameters, stream=False,
            prompt_top_n=prompt_top_n,
        )  # fmt: skip
        finished = await run_generations(self._service, req, generations)
        finished.sort(key=mean_logprob, reverse=True)  # stable: the first among equals
        set_result_headers(self._service, resp, finished[:1])
        details = bool(parameters.details or parameters.decoder_input_details)
        return await response_json(finished, details, inputs if with_prompt else "")

    async def _answer_stream(
        self, req: Request, resp: Response, inputs: str, parameters: GenerateParameters, with_prompt: bool
    ) -> None:
        request_metrics.count_request(req)
        prompts = [text_prompt(self._service, inputs)]
        generations = create_generations(self._service, req, prompts, parameters, stream=True)
        formatter = NativeEvents(generations[0], bool(parameters.details), inputs if with_prompt else "")
        await stream_generations(self._service, req, resp, generations, formatter)


class GenerateResource(_NativeResource):
    """POST /generate."""

    body = JsonBody(GenerateRequest)

    async def on_post(self, req: Request, resp: Response) -> None:
        request = await self._service.read_generation_body(req, self.body)
        parameters = request.effective
        with_prompt = bool(parameters.return_full_text)
        resp.text = await self._answer_whole(req, resp, request.inputs, parameters, with_prompt)


class GenerateStreamResource(_NativeResource):
    """POST /generate_stream."""

    body = JsonBody(GenerateRequest)

    async def on_post(self, req: Request, resp: Response) -> None:
        request = await self._service.read_generation_body(req, self.body)
        parameters = request.effective
        await self._answer_stream(req, resp, request.inputs, parameters, bool(parameters.return_full_text))


class CompatResource(_NativeResource):
    """POST /: an array of one object, or a stream. Unless the request sets `return_full_text`, the prompt is part of
    the text if the model's pipeline tag is text-generation or unknown."""

    body = JsonBody(CompatGenerateRequest)

    async def on_post(self, req: Request, resp: Response) -> None:
        """Answers as the body's `stream` says."""
        await self.answer(await self._service.read_generation_body(req, self.body), req, resp)

    async def answer(self, request: CompatGenerateRequest, req: Request, resp: Response) -> None:
        parameters = request.effective
        with_prompt = parameters.return_full_text
        if with_prompt is None:
            with_prompt = self._service.model_pipeline_tag in (None, "text-generation")
        if request.stream:
            await self._answer_stream(req, resp, request.inputs, parameters, with_prompt)
        else:
            resp.text = f"[{await self._answer_whole(req, resp, request.inputs, parameters, with_prompt)}]"


class RootResource(CompatResource):
    """POST / as above, and GET /: a health check, and for browsers the page."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._health = HealthResource(service)

    async def on_get(self, req: Request, resp: Response) -> None:
        """As GET /health: an empty 200 or 503. A browser, which names text/html, gets the page, which tells whether the
        server is ready."""
        if self._service.settings.ui and "text/html" in (req.get_header("accept") or ""):
            page.send_page(resp, "ui/", "./")
        else:
            await self._health.on_get(req, resp)

    on_head = on_get  # falcon omits the body
