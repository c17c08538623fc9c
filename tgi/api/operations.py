"""Every operation of the server, as the OpenAPI document lists it: a table to be read."""

from typing import Any, NamedTuple

import msgspec

from tgi.api import errors
from tgi.api.errors import ApiError, ErrorResponse, OpenAiErrorResponse, OpenAiStreamErrorResponse, Rejection
from tgi.api.shapes import adapters, cloud, kserve
from tgi.api.shapes.chat import ChatRequest
from tgi.api.shapes.completions import CompletionRequest
from tgi.api.shapes.info import Info, ModelInfo, ModelList
from tgi.api.shapes.native import CompatGenerateRequest, GenerateRequest, TokenizeRequest
from tgi.api.shapes.native_answers import ChatTokenizeResponse, GenerateResponse, StreamResponse, TokenizeResponse
from tgi.api.shapes.openai_answers import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionFinal,
    StreamErrorResponse,
)

JSON = "application/json"
EVENTS = "text/event-stream"  # the schema is that of the data of one event
TEXT = "text/plain"


class Body(NamedTuple):
    """A body of one media type: any of several shapes."""

    media: str
    shapes: tuple[Any, ...]
    example: Any = None


class Reply(NamedTuple):
    """What a status comes with. The bodies of an error follow from an example of it."""

    status: int
    description: str
    bodies: tuple[Body, ...] = ()
    error: ApiError | None = None

    @property
    def native(self) -> tuple[Body, ...]:
        """The bodies on routes with TGI's errors."""
        if self.error is None:
            return self.bodies
        example = self.error.native()
        if isinstance(self.error, Rejection):
            return (Body(TEXT, (str,), example.decode()),) if example else ()
        return (Body(JSON, (ErrorResponse,), msgspec.json.decode(example)),)

    @property
    def openai(self) -> tuple[Body, ...]:
        """The bodies on routes with OpenAI's errors. TGI's form stands next to OpenAI's for clients that are made from
        TGI's document; it is not sent."""
        if self.error is None:
            return self.bodies
        shapes = (OpenAiErrorResponse,) if isinstance(self.error, Rejection) else (OpenAiErrorResponse, ErrorResponse)
        return (Body(JSON, shapes, msgspec.json.decode(self.error.openai())),)


class Operation(NamedTuple):
    """One method of one path. `request` is the shape of its JSON body."""

    method: str
    path: str
    id: str
    summary: str
    replies: tuple[Reply, ...]
    request: Any = None
    secured: bool = False  # wants a key, where the server has any

    @property
    def all_replies(self) -> tuple[Reply, ...]:
        """Those of the table, with INTERNAL, and with the bodies that errors have on this path."""
        told = any(reply.status == INTERNAL.status for reply in self.replies)
        replies = self.replies if told else (*self.replies, INTERNAL)
        openai = self.path.startswith("/v1/")
        return tuple(reply._replace(bodies=reply.openai if openai else reply.native) for reply in replies)


def ok(description: str, *bodies: Body) -> Reply:
    """The answer to a request that went well."""
    return Reply(200, description, bodies)


def json(*shapes: Any) -> Body:
    """A JSON body."""
    return Body(JSON, shapes)


def events(*shapes: Any) -> Body:
    """A stream of events."""
    return Body(EVENTS, shapes)


def error(status: int, description: str, kind: str, text: str = "") -> Reply:
    """An error of a request that was read."""
    return Reply(status, description, error=ApiError(status, kind, text or description))


def rejection(status: int, description: str, text: str) -> Reply:
    """A body that cannot be read."""
    return Reply(status, description, error=Rejection(status, text))


# Replies of one status are merged: on TGI's routes a 422 is JSON where a rule is broken and plain text where the shape
# is wrong.
UNREADABLE = (
    rejection(
        400, "Not JSON", "Failed to parse the request body as JSON: EOF while parsing a value at line 1 column 1"
    ),
    Reply(401, "No key, or a wrong one, where the server has keys", error=errors.unauthorized()),
    rejection(413, "The body is too long", "Failed to buffer the request body: length limit exceeded"),
    rejection(415, "The body is not declared as JSON", "Expected request with `Content-Type: application/json`"),
    rejection(
        422,
        "The body has another shape",
        "Failed to deserialize the JSON body into the target type: missing field `inputs` at line 1 column 2",
    ),
)
VALIDATION = error(422, "Input validation error", "validation")
FAILED = error(424, "Generation Error", "generation", "Request failed during generation")
OVERLOADED = error(429, "Model is overloaded", "overloaded")
INCOMPLETE = error(500, "Incomplete generation", "incomplete_generation")
STARTING = error(503, "The server is still starting", "healthcheck", "unhealthy")
UNHEALTHY = error(503, "Text generation inference is down", "healthcheck", "unhealthy")
INTERNAL = error(500, "A defect of the server", "internal", "Internal server error")
GENERATION = (*UNREADABLE, VALIDATION, FAILED, OVERLOADED, INCOMPLETE, STARTING)
# Vertex and KServe are not told what broke.
COLLAPSED = (
    *UNREADABLE,
    VALIDATION,
    OVERLOADED,
    error(500, "Incomplete generation", "Incomplete generation"),
    STARTING,
)
# TGI's document has the errors of /generate_stream as events; before the first token they are ordinary answers here.
AS_EVENTS = tuple(
    Reply(reply.status, reply.description, tuple(body._replace(media=EVENTS) for body in reply.native))
    for reply in (VALIDATION, FAILED, OVERLOADED, INCOMPLETE)
)
NO_TOKENIZER = error(404, "No tokenizer found (TGI's; never sent)", "", "No fast tokenizer available")
NO_CHAT = error(404, "Failed to tokenize ChatRequest (TGI's; never sent)", "template_error", "Template error")
NO_MODEL = error(404, "Model not found", "not_found")
NO_UPDATES = error(403, "The server runs without --allow-adapter-updates", "forbidden")
NO_ADAPTER = error(422, "The adapter cannot be loaded", "adapter_error", "Adapter error: the reason")
EMPTY = Reply(200, "Everything is working fine")

OPERATIONS = (
    Operation(
        "post", "/", "compat_generate",
        "Generate tokens if `stream == false` or a stream of token if `stream == true`",
        (ok("Generated Text", json(list[GenerateResponse]), events(StreamResponse, ErrorResponse)), *GENERATION),
        CompatGenerateRequest, secured=True,
    ),
    Operation(
        "post", "/generate", "generate", "Generate tokens",
        (ok("Generated Text", json(GenerateResponse)), *GENERATION),
        GenerateRequest, secured=True,
    ),
    Operation(
        "post", "/generate_stream", "generate_stream", "Generate a stream of token using Server-Sent Events",
        (ok("Generated Text", events(StreamResponse, ErrorResponse)), *GENERATION, *AS_EVENTS),
        GenerateRequest, secured=True,
    ),
    Operation(
        "post", "/v1/chat/completions", "chat_completions", "Generate tokens",
        (
            ok(
                "Generated Chat Completion",
                json(ChatCompletion),
                events(ChatCompletionChunk, OpenAiStreamErrorResponse),
            ),
            *GENERATION,
        ),
        ChatRequest, secured=True,
    ),
    Operation(
        "post", "/v1/completions", "completions", "Generate tokens",
        (
            ok("Generated Completion", json(CompletionFinal), events(Completion, OpenAiStreamErrorResponse)),
            *GENERATION,
        ),
        CompletionRequest, secured=True,
    ),
    Operation(
        "post", "/tokenize", "tokenize", "Tokenize inputs",
        (ok("Tokenized ids", json(TokenizeResponse)), NO_TOKENIZER, *UNREADABLE, VALIDATION, STARTING),
        TokenizeRequest, secured=True,
    ),
    Operation(
        "post", "/chat_tokenize", "get_chat_tokenize", "Template and tokenize ChatRequest",
        (
            ok("Templated and tokenized ChatRequest", json(ChatTokenizeResponse)),
            NO_CHAT, *UNREADABLE, VALIDATION, STARTING,
        ),
        ChatRequest, secured=True,
    ),
    Operation(
        "post", "/invocations", "sagemaker_compatibility", "Generate tokens from Sagemaker request",
        (
            ok(
                "Generated Chat Completion",
                json(cloud.SagemakerResponse),
                events(cloud.SagemakerStreamResponse, ErrorResponse, StreamErrorResponse),
            ),
            *GENERATION,
        ),
        cloud.SagemakerRequest, secured=True,
    ),
    Operation(
        "post", "/vertex", "vertex_compatibility", "Generate tokens from Vertex request",
        (ok("Generated Text", json(cloud.VertexResponse)), *COLLAPSED),
        cloud.VertexRequest, secured=True,
    ),
    Operation("get", "/", "root_health", "Health check method", (EMPTY, UNHEALTHY)),
    Operation("get", "/health", "health", "Health check method", (EMPTY, UNHEALTHY)),
    Operation("get", "/ping", "ping", "Health check method", (EMPTY, UNHEALTHY)),
    Operation(
        "get", "/info", "get_model_info", "Text Generation Inference endpoint info",
        (ok("Served model info", json(Info)), STARTING),
    ),
    Operation(
        "get", "/metrics", "metrics", "Prometheus metrics scrape endpoint",
        (ok("Prometheus Metrics", Body(TEXT, (str,))),),
    ),
    # TGI's document has one ModelInfo here, its server a list, as this one.
    Operation(
        "get", "/v1/models", "openai_get_model_info", "Get model info",
        (ok("Served model info", json(ModelList, ModelInfo)), NO_MODEL),
    ),
    Operation(
        "get", "/v1/models/{model}", "openai_get_one_model_info", "Get info of one model",
        (ok("Served model info", json(ModelInfo)), NO_MODEL),
    ),
    Operation(
        "post", "/v1/load_lora_adapter", "load_lora_adapter", "Load a LoRA adapter from a directory of the server",
        (
            ok("The adapter can be asked for", json(ModelInfo)),
            NO_UPDATES, *UNREADABLE, VALIDATION, NO_ADAPTER, STARTING,
        ),
        adapters.LoadLoraAdapterRequest, secured=True,
    ),
    Operation(
        "post", "/v1/unload_lora_adapter", "unload_lora_adapter", "Unload a LoRA adapter",
        (
            ok("The adapter can be asked for no more", json(adapters.ModelDeleted)),
            NO_UPDATES, NO_MODEL, *UNREADABLE, NO_ADAPTER, STARTING,
        ),
        adapters.UnloadLoraAdapterRequest, secured=True,
    ),
)  # fmt: skip

_VERSION = "/v2/models/{model}/versions/{version}"
KSERVE = (
    Operation("get", "/v2", "kserve_metadata", "Server metadata", (ok("Metadata", json(kserve.ServerMetadata)),)),
    Operation("get", "/v2/health/live", "kserve_live", "Liveness", (ok("The process answers", json(kserve.Live)),)),
    Operation("get", "/v2/health/ready", "kserve_ready", "Readiness", (ok("The process answers", json(kserve.Live)),)),
    Operation(
        "get", _VERSION, "kserve_model_metadata", "Model metadata", (ok("Metadata", json(kserve.ModelMetadata)),)
    ),
    Operation(
        "get", f"{_VERSION}/ready", "kserve_model_ready", "Readiness of a model",
        (ok("The process answers", json(kserve.Live)),),
    ),
    Operation(
        "post", f"{_VERSION}/infer", "kserve_infer", "Generate tokens from KServe request",
        (ok("Generated Text", json(kserve.InferenceResponse)), *COLLAPSED),
        kserve.InferenceRequest, secured=True,
    ),
)  # fmt: skip
