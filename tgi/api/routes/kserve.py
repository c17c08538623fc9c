"""The routes of KServe's v2 protocol, served with --kserve."""

import msgspec
from falcon.asgi import Request, Response

import tgi
from tgi.api import errors, request_metrics
from tgi.api.errors import ApiError
from tgi.api.generation import create_generations, run_generations, text_prompt
from tgi.api.json_body import JsonBody
from tgi.api.routes.native import mean_logprob
from tgi.api.service import Resource, answer_json
from tgi.api.shapes.kserve import (
    InferenceInput,
    InferenceOutput,
    InferenceRequest,
    InferenceResponse,
    Live,
    ModelMetadata,
    ServerMetadata,
)
from tgi.api.shapes.native import GenerateParameters


class ServerResource(Resource):
    """GET /v2."""

    async def on_get(self, req: Request, resp: Response) -> None:
        metadata = ServerMetadata("text-generation-inference", tgi.CONTRACT_VERSION, ["health", "models", "metrics"])
        _set_json(resp, metadata)

    on_head = on_get  # falcon omits the body


class LiveResource(Resource):
    """GET /v2/health/live, /v2/health/ready and …/ready. As in TGI all three tell only that the process answers."""

    async def on_get(self, req: Request, resp: Response, model: str = "", version: str = "") -> None:
        _set_json(resp, Live(live=True))

    on_head = on_get  # falcon omits the body


class ModelVersionResource(Resource):
    """GET /v2/models/{model}/versions/{version}."""

    async def on_get(self, req: Request, resp: Response, model: str, version: str) -> None:
        """Answers with the name and version of the path, and the methods of a model."""
        _set_json(resp, ModelMetadata(model, version, ["infer", "ready"]))

    on_head = on_get  # falcon omits the body


class InferResource(Resource):
    """POST /v2/models/{model}/versions/{version}/infer."""

    body = JsonBody(InferenceRequest)

    async def on_post(self, req: Request, resp: Response, model: str, version: str) -> None:
        """Answers with the texts, in the order of the inputs."""
        request = await self._service.read_generation_body(req, self.body)
        request_metrics.count_request(req)
        if len(request.inputs) != len(request.outputs):
            raise errors.length_mismatch()
        parameters = GenerateParameters.with_sampling() if request.parameters is None else request.parameters
        texts = await self._generate(req, [_decode_input(given) for given in request.inputs], parameters)
        outputs = [
            InferenceOutput(output.name, [1, len(text)], "BYTES", list(text))
            for output, text in zip(request.outputs, texts, strict=True)
        ]
        _set_json(resp, InferenceResponse(request.id, outputs))

    async def _generate(self, req: Request, inputs: list[str], parameters: GenerateParameters) -> list[bytes]:
        """The text for each input: the best of its generations. Raises ApiError."""
        if not inputs:
            return []
        prompts = [text_prompt(self._service, text) for text in inputs]
        generations = create_generations(self._service, req, prompts, parameters, stream=False)
        try:
            finished = await run_generations(self._service, req, generations)
        except ApiError as error:
            raise errors.without_cause(error) from error
        best_of = len(finished) // len(inputs)
        best = [max(finished[begin : begin + best_of], key=mean_logprob) for begin in range(0, len(finished), best_of)]
        prefixes = inputs if parameters.return_full_text else [""] * len(inputs)
        return [(prefix + end.text).encode() for prefix, (_, end) in zip(prefixes, best, strict=True)]


def _decode_input(given: InferenceInput) -> str:
    """An input as text. Raises ApiError: 422 if it is not UTF-8."""
    try:
        return bytes(given.data).decode()
    except UnicodeDecodeError as error:
        reason = f"invalid utf-8 sequence of {error.end - error.start} bytes from index {error.start}"
        raise errors.invalid_utf8(reason) from None


def _set_json(resp: Response, shape: msgspec.Struct) -> None:
    answer_json(resp, shape)
