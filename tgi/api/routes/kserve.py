"""The routes of KServe's v2 protocol, served with --kserve."""

import msgspec
from falcon.asgi import Request, Response

import tgi
from tgi.api import accounting, answering, errors
from tgi.api.answering import Prompt
from tgi.api.errors import ApiError
from tgi.api.routes.native import score
from tgi.api.serde import Body
from tgi.api.service import Service
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


def routes(service: Service) -> dict[str, object]:
    """The resource of each path."""
    version = "/v2/models/{model}/versions/{version}"
    return {
        "/v2": ServerResource(),
        "/v2/health/live": LiveResource(),
        "/v2/health/ready": LiveResource(),
        version: ModelVersionResource(),
        f"{version}/ready": LiveResource(),
        f"{version}/infer": InferResource(service),
    }


class ServerResource:
    """GET /v2."""

    async def on_get(self, req: Request, resp: Response) -> None:
        """Name, version and extensions."""
        metadata = ServerMetadata("text-generation-inference", tgi.CONTRACT_VERSION, ["health", "models", "metrics"])
        _answer(resp, metadata)

    on_head = on_get  # falcon leaves the body out


class LiveResource:
    """GET /v2/health/live, /v2/health/ready and …/ready: as in TGI, whether the process answers, and no more."""

    async def on_get(self, req: Request, resp: Response, model: str = "", version: str = "") -> None:
        """Always the same."""
        _answer(resp, Live(live=True))

    on_head = on_get  # falcon leaves the body out


class ModelVersionResource:
    """GET /v2/models/{model}/versions/{version}."""

    async def on_get(self, req: Request, resp: Response, model: str, version: str) -> None:
        """What was asked for, with what it can do."""
        _answer(resp, ModelMetadata(model, version, ["infer", "ready"]))

    on_head = on_get  # falcon leaves the body out


class InferResource:
    """POST /v2/models/{model}/versions/{version}/infer."""

    body = Body(InferenceRequest)

    def __init__(self, service: Service) -> None:
        self._service = service

    async def on_post(self, req: Request, resp: Response, model: str, version: str) -> None:
        """The texts, in the order of the inputs."""
        request = await self._service.read(req, self.body)
        accounting.arrived()
        if len(request.inputs) != len(request.outputs):
            raise errors.lengths()
        p = GenerateParameters(do_sample=True) if request.parameters is None else request.parameters
        texts = await self._generate(req, [_text(given) for given in request.inputs], p)
        outputs = [
            InferenceOutput(wanted.name, [1, len(text)], "BYTES", list(text))
            for wanted, text in zip(request.outputs, texts, strict=True)
        ]
        _answer(resp, InferenceResponse(request.id, outputs))

    async def _generate(self, req: Request, inputs: list[str], p: GenerateParameters) -> list[bytes]:
        """What follows each of the inputs. Raises ApiError."""
        if not inputs:
            return []
        calls = answering.generations(self._service, [Prompt(text) for text in inputs], p, stream=False)
        try:
            finished = await answering.finish(self._service, req, calls)
        except ApiError as error:
            raise errors.collapsed(error) from error
        each = len(finished) // len(inputs)
        best = [max(finished[place : place + each], key=score) for place in range(0, len(finished), each)]
        before = inputs if p.return_full_text else [""] * len(inputs)
        return [(text + end.text).encode() for text, (_, end) in zip(before, best, strict=True)]


def _text(given: InferenceInput) -> str:
    """An input as text. Raises ApiError if it is none."""
    try:
        return bytes(given.data).decode()
    except UnicodeDecodeError as error:
        wrong = f"invalid utf-8 sequence of {error.end - error.start} bytes from index {error.start}"
        raise errors.utf8(wrong) from None


def _answer(resp: Response, shape: msgspec.Struct) -> None:
    resp.content_type = "application/json"
    resp.data = msgspec.json.encode(shape)
