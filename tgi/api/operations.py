"""The table of operations: method, path, falcon resource, request body and responses of each route. The application
(app.py), the OpenAPI document (openapi.py) and the names of spans derive from it. Not in it: the document itself and
its page (docs.py), and the paths that AIP_PREDICT_ROUTE and AIP_HEALTH_ROUTE name (app.py)."""

import re
from typing import Any, NamedTuple

import msgspec

from tgi.api import errors
from tgi.api.errors import ApiError, ErrorResponse, OpenAiErrorResponse, OpenAiStreamErrorResponse, Rejection
from tgi.api.routes.adapters import LoadAdapterResource, UnloadAdapterResource
from tgi.api.routes.batches import (
    BatchesResource,
    CancelBatchResource,
    FileContentResource,
    FileResource,
    FilesResource,
    OneBatchResource,
    not_kept,
)
from tgi.api.routes.chat import ChatResource
from tgi.api.routes.completions import CompletionsResource
from tgi.api.routes.conversations import (
    ConversationItemResource,
    ConversationItemsResource,
    ConversationResource,
    ConversationsResource,
)
from tgi.api.routes.decisions import DecisionsResource, SystemOneResource
from tgi.api.routes.info import HealthResource, InfoResource, MetricsResource
from tgi.api.routes.kserve import InferResource, LiveResource, ModelVersionResource, ServerResource
from tgi.api.routes.messages import CountTokensResource, MessagesResource
from tgi.api.routes.models import (
    IsSleepingResource,
    ManagedModelResource,
    ModelResource,
    ModelsResource,
    SleepResource,
    WakeResource,
)
from tgi.api.routes.native import GenerateResource, GenerateStreamResource, RootResource
from tgi.api.routes.pooling import (
    ClassifyResource,
    EmbeddingsResource,
    EmbedResource,
    PredictResource,
    RerankResource,
    ScoreResource,
    SimilarityResource,
)
from tgi.api.routes.responses import ResponseInputTokensResource, ResponsesResource
from tgi.api.routes.sagemaker import SagemakerResource
from tgi.api.routes.stored_responses import (
    CancelResponseResource,
    InputItemsResource,
    ResponseResource,
)
from tgi.api.routes.tokenize import ChatTokenizeResource, DetokenizeResource, InputTokensResource, TokenizeResource
from tgi.api.routes.vertex import VertexResource
from tgi.api.service import Resource, in_messages
from tgi.api.shapes import adapters, batches, cloud, decisions, kserve, pooling
from tgi.api.shapes.info import Info, ModelInfo, ModelList, SleepState
from tgi.api.shapes.messages import AnsweredMessage, MessageError, MessageEvent, MessageTokensCount
from tgi.api.shapes.native_responses import (
    ChatTokenizeResponse,
    DetokenizeResponse,
    GenerateResponse,
    StreamResponse,
    TokenizeResponse,
)
from tgi.api.shapes.openai_responses import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionFinal,
    InputTokens,
    StreamErrorResponse,
)
from tgi.api.shapes.responses import (
    ConversationObject,
    InputItem,
    ResponseDeleted,
    ResponseEvent,
    ResponseObject,
)
from tgi.api.shapes.types import Page

JSON = "application/json"
EVENTS = "text/event-stream"  # its schema is that of the data of one event
TEXT = "text/plain"


class MediaBody(NamedTuple):
    """A response body of one media type, which has any of several shapes."""

    media: str
    shapes: tuple[Any, ...]
    example: Any = None


class OperationResponse(NamedTuple):
    """A response by its status. The bodies of an error derive from an example of it."""

    status: int
    description: str
    bodies: tuple[MediaBody, ...] = ()
    error: ApiError | None = None

    @property
    def native_bodies(self) -> tuple[MediaBody, ...]:
        """The bodies on routes with TGI's error format."""
        if self.error is None:
            return self.bodies
        example = self.error.native_body()
        if isinstance(self.error, Rejection):
            return (MediaBody(TEXT, (str,), example.decode()),) if example else ()
        return (MediaBody(JSON, (ErrorResponse,), msgspec.json.decode(example)),)

    @property
    def anthropic(self) -> "OperationResponse":
        """The response on routes with Anthropic's error format."""
        if self.error is None:
            return self
        body = MediaBody(JSON, (MessageError,), msgspec.json.decode(self.error.anthropic_body("4bd3")))
        return self._replace(status=self.error.anthropic_status, bodies=(body,))

    @property
    def openai_bodies(self) -> tuple[MediaBody, ...]:
        """The bodies on routes with OpenAI's error format. TGI's format is documented too, for clients generated from
        TGI's document; it is never sent."""
        if self.error is None:
            return self.bodies
        shapes = (OpenAiErrorResponse,) if isinstance(self.error, Rejection) else (OpenAiErrorResponse, ErrorResponse)
        return (MediaBody(JSON, shapes, msgspec.json.decode(self.error.openai_body())),)


class Operation(NamedTuple):
    """One method of one path."""

    method: str
    route: str  # URI template in falcon's syntax
    id: str
    summary: str
    resource: type[Resource]
    responses: tuple[OperationResponse, ...]
    span: str = ""  # name of its spans, if it is not the id

    @property
    def path(self) -> str:
        """The URI template in OpenAPI's syntax, without falcon's converters."""
        return re.sub(r":\w+}", "}", self.route)

    @property
    def span_name(self) -> str:
        """The name of its spans, as in TGI."""
        return self.span or self.id

    @property
    def request(self) -> Any:
        return self.resource.body.shape if self.method == "post" and self.resource.body is not None else None

    @property
    def form(self) -> Any:
        """The shape of the form that is its body, or None."""
        return self.resource.form if self.method == "post" else None

    @property
    def requires_key(self) -> bool:
        """Whether it needs a key if the server has keys (ApiKeyMiddleware)."""
        return self.method == "post" or self.resource.private

    @property
    def documented_responses(self) -> tuple[OperationResponse, ...]:
        """`responses` and INTERNAL, with the error bodies of this path."""
        has_500 = any(response.status == INTERNAL.status for response in self.responses)
        responses = self.responses if has_500 else (*self.responses, INTERNAL)
        if in_messages(self.path):
            return tuple(response.anthropic for response in responses)
        openai = self.path.startswith("/v1/")
        return tuple(
            response._replace(bodies=response.openai_bodies if openai else response.native_bodies)
            for response in responses
        )


def ok(description: str, *bodies: MediaBody) -> OperationResponse:
    """Success."""
    return OperationResponse(200, description, bodies)


def json(*shapes: Any) -> MediaBody:
    """A JSON body."""
    return MediaBody(JSON, shapes)


def events(*shapes: Any) -> MediaBody:
    """A stream of events."""
    return MediaBody(EVENTS, shapes)


def error(status: int, description: str, kind: str, text: str = "") -> OperationResponse:
    """An error of a request whose body was decoded."""
    return OperationResponse(status, description, error=ApiError(status, kind, text or description))


def rejection(status: int, description: str, text: str) -> OperationResponse:
    """An error of a request whose body cannot be decoded."""
    return OperationResponse(status, description, error=Rejection(status, text))


# Responses of one status are merged: on TGI's routes a 422 is JSON for a broken rule and plain text for a wrong shape.
UNREADABLE = (
    rejection(
        400, "Not JSON", "Failed to parse the request body as JSON: EOF while parsing a value at line 1 column 1"
    ),
    OperationResponse(401, "No key, or a wrong one, where the server has keys", error=errors.unauthorized()),
    rejection(408, "The body has stopped", "The body of this request did not grow by 32 KiB within 30 s"),
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
TIMED_OUT = error(504, "The timeout of the request has passed", "timeout", "Request timed out: no end within 5 s")
STARTING = error(503, "The server is still starting", "healthcheck", "unhealthy")
UNHEALTHY = error(503, "Text generation inference is down", "healthcheck", "unhealthy")
INTERNAL = error(500, "A defect of the server", "internal", "Internal server error")
OTHER_TASK = error(404, "The model does not serve this route", "not_found")
GENERATION = (*UNREADABLE, OTHER_TASK, VALIDATION, FAILED, OVERLOADED, INCOMPLETE, STARTING, TIMED_OUT)
# Vertex and KServe routes do not tell what failed.
COLLAPSED = (
    *UNREADABLE,
    OTHER_TASK,
    VALIDATION,
    OVERLOADED,
    error(500, "Incomplete generation", "Incomplete generation"),
    STARTING,
    TIMED_OUT,
)
# TGI's document has the errors of /generate_stream as events; before the first token they are HTTP errors here.
AS_EVENTS = tuple(
    OperationResponse(
        response.status, response.description, tuple(body._replace(media=EVENTS) for body in response.native_bodies)
    )
    for response in (VALIDATION, FAILED, OVERLOADED, INCOMPLETE, TIMED_OUT)
)
NO_TOKENIZER = error(404, "No tokenizer found (TGI's; never sent)", "", "No fast tokenizer available")
NO_CHAT = error(404, "Failed to tokenize ChatRequest (TGI's; never sent)", "template_error", "Template error")
NO_MODEL = error(404, "Model not found", "not_found")
NOT_LOADED = error(503, "The model cannot be loaded", "model_not_loaded", "The model a could not be loaded. Why")
NOT_KEPT = OperationResponse(404, "Not kept, or not any more", error=errors.not_kept("response", "resp_1"))
UNAUTHORIZED = OperationResponse(401, "No key, or a wrong one, where the server has keys", error=errors.unauthorized())
UNAVAILABLE = error(503, "The kept responses cannot be read or written", "unavailable")
STORED = (NOT_KEPT, UNAUTHORIZED, UNAVAILABLE)
NO_BATCHES = OperationResponse(404, "Not kept, or not any more", error=not_kept("file", "file-1"))
KEPT = (NO_BATCHES, UNAUTHORIZED, UNAVAILABLE, STARTING)
NO_UPDATES = error(403, "The server runs without --allow-adapter-updates", "forbidden")
IN_USE = error(409, "The file is the input of a batch that has not ended", "conflict")
NO_ADAPTER = error(422, "The adapter cannot be loaded", "adapter_error", "Adapter error: the reason")
HEALTH = (OperationResponse(200, "Everything is working fine"), UNHEALTHY)

OPERATIONS = (
    Operation(
        "post", "/", "compat_generate",
        "Generate tokens if `stream == false` or a stream of token if `stream == true`",
        RootResource,
        (ok("Generated Text", json(list[GenerateResponse]), events(StreamResponse, ErrorResponse)), *GENERATION),
    ),
    Operation(
        "post", "/generate", "generate", "Generate tokens",
        GenerateResource,
        (ok("Generated Text", json(GenerateResponse)), *GENERATION),
    ),
    Operation(
        "post", "/generate_stream", "generate_stream", "Generate a stream of token using Server-Sent Events",
        GenerateStreamResource,
        (ok("Generated Text", events(StreamResponse, ErrorResponse)), *GENERATION, *AS_EVENTS),
    ),
    Operation(
        "post", "/v1/chat/completions", "chat_completions", "Generate tokens",
        ChatResource,
        (
            ok(
                "Generated Chat Completion",
                json(ChatCompletion),
                events(ChatCompletionChunk, OpenAiStreamErrorResponse),
            ),
            *GENERATION,
        ),
    ),
    Operation(
        "post", "/v1/completions", "completions", "Generate tokens",
        CompletionsResource,
        (
            ok("Generated Completion", json(CompletionFinal), events(Completion, OpenAiStreamErrorResponse)),
            *GENERATION,
        ),
    ),
    Operation(
        "post", "/v1/responses", "create_response", "Generate a response to items, which the server may keep",
        ResponsesResource,
        (ok("The response", json(ResponseObject), events(ResponseEvent)), NOT_KEPT, *GENERATION),
    ),
    Operation(
        "get", "/v1/responses/{response_id}", "get_response", "A kept response; with `stream=true` its events",
        ResponseResource,
        (ok("The response", json(ResponseObject), events(ResponseEvent)), *STORED, VALIDATION),
    ),
    Operation(
        "delete", "/v1/responses/{response_id}", "delete_response", "Forget a response",
        ResponseResource, (ok("It is not kept any more", json(ResponseDeleted)), *STORED),
    ),
    Operation(
        "post", "/v1/responses/{response_id}/cancel", "cancel_response", "End a background response",
        CancelResponseResource, (ok("The response", json(ResponseObject)), *STORED, VALIDATION),
    ),
    Operation(
        "get", "/v1/responses/{response_id}/input_items", "list_input_items", "The items of the request of a response",
        InputItemsResource, (ok("Some of the items", json(Page[InputItem])), *STORED, VALIDATION),
    ),
    Operation(
        "post", "/v1/conversations", "create_conversation", "Begin a conversation that responses go on with",
        ConversationsResource, (ok("The conversation", json(ConversationObject)), *UNREADABLE, UNAVAILABLE),
    ),
    Operation(
        "get", "/v1/conversations/{conversation_id}", "get_conversation", "A conversation",
        ConversationResource, (ok("The conversation", json(ConversationObject)), *STORED),
    ),
    Operation(
        "post", "/v1/conversations/{conversation_id}", "update_conversation", "Replace the metadata of a conversation",
        ConversationResource, (ok("The conversation", json(ConversationObject)), *UNREADABLE, *STORED),
    ),
    Operation(
        "delete", "/v1/conversations/{conversation_id}", "delete_conversation", "Forget a conversation",
        ConversationResource, (ok("It is not kept any more", json(ResponseDeleted)), *STORED),
    ),
    Operation(
        "get", "/v1/conversations/{conversation_id}/items", "list_conversation_items", "The items of a conversation",
        ConversationItemsResource, (ok("Some of the items", json(Page[InputItem])), *STORED, VALIDATION),
    ),
    Operation(
        "post", "/v1/conversations/{conversation_id}/items", "create_conversation_items", "Append items",
        ConversationItemsResource, (ok("The new items", json(Page[InputItem])), *UNREADABLE, *STORED),
    ),
    Operation(
        "get", "/v1/conversations/{conversation_id}/items/{item_id}", "get_conversation_item", "An item",
        ConversationItemResource, (ok("The item", json(InputItem)), *STORED),
    ),
    Operation(
        "delete", "/v1/conversations/{conversation_id}/items/{item_id}", "delete_conversation_item",
        "Take an item out of a conversation",
        ConversationItemResource, (ok("The conversation", json(ConversationObject)), *STORED),
    ),
    Operation(
        "post", "/v1/files", "create_file", "Keep a file of requests",
        FilesResource,
        (
            ok("The file", json(batches.FileObject)), *KEPT, *UNREADABLE, VALIDATION, OVERLOADED,
            rejection(408, "The body makes no progress", "The body of this request did not grow by 32 KiB within 30 s"),
        ),
    ),
    Operation(
        "get", "/v1/files", "list_files", "The files that are kept",
        FilesResource, (ok("Some of the files", json(Page[batches.FileObject])), *KEPT, VALIDATION),
    ),
    Operation(
        "get", "/v1/files/{file_id}", "get_file", "A file's description",
        FileResource, (ok("The file", json(batches.FileObject)), *KEPT),
    ),
    Operation(
        "delete", "/v1/files/{file_id}", "delete_file", "Forget a file",
        FileResource, (ok("It is not kept any more", json(batches.FileDeleted)), *KEPT, IN_USE),
    ),
    Operation(
        "get", "/v1/files/{file_id}/content", "get_file_content", "The bytes of a file",
        FileContentResource, (ok("The bytes", MediaBody("application/octet-stream", (str,))), *KEPT),
    ),
    Operation(
        "post", "/v1/batches", "create_batch", "Have the requests of a file answered",
        BatchesResource, (ok("The batch", json(batches.BatchObject)), *KEPT, *UNREADABLE, OTHER_TASK, VALIDATION),
    ),
    Operation(
        "get", "/v1/batches", "list_batches", "The batches that are kept",
        BatchesResource, (ok("Some of the batches", json(Page[batches.BatchObject])), *KEPT, VALIDATION),
    ),
    Operation(
        "get", "/v1/batches/{batch_id}", "get_batch", "A batch",
        OneBatchResource, (ok("The batch", json(batches.BatchObject)), *KEPT),
    ),
    Operation(
        "post", "/v1/batches/{batch_id}/cancel", "cancel_batch", "End a batch early",
        CancelBatchResource, (ok("The batch", json(batches.BatchObject)), *KEPT),
    ),
    Operation(
        "post", "/v1/messages", "messages", "Generate the next message, in Anthropic's protocol",
        MessagesResource,
        (ok("Generated message", json(AnsweredMessage), events(MessageEvent)), *GENERATION),
    ),
    Operation(
        "post", "/v1/messages/count_tokens", "count_message_tokens", "Count the tokens of a prompt",
        CountTokensResource,
        (ok("Number of tokens", json(MessageTokensCount)), *UNREADABLE, VALIDATION, FAILED, OVERLOADED, STARTING),
    ),
    *(
        Operation(
            "post", f"{route}/input_tokens", name, "Count the tokens of a prompt", resource,
            (
                ok("Number of tokens", json(InputTokens)),
                NOT_KEPT, *UNREADABLE, VALIDATION, FAILED, OVERLOADED, STARTING,
            ),
        )
        for route, name, resource in (
            ("/v1/chat/completions", "count_chat_tokens", InputTokensResource),
            ("/v1/responses", "count_response_tokens", ResponseInputTokensResource),
        )
    ),
    Operation(
        "post", "/detokenize", "detokenize", "The text of token ids",
        DetokenizeResource,
        (ok("The text", json(DetokenizeResponse)), *UNREADABLE, VALIDATION, FAILED, OVERLOADED, STARTING),
    ),
    Operation(
        "post", "/v1/decisions", "create_decision", "Answer typed questions with probabilities",
        DecisionsResource, (ok("The answers", json(decisions.DecisionResponse)), *GENERATION),
    ),
    Operation(
        "post", "/v1/systemone", "system_one", "Answer typed questions with probabilities, as System One",
        SystemOneResource, (ok("The answers", json(decisions.SystemOneResponse)), *GENERATION),
    ),
    Operation(
        "post", "/tokenize", "tokenize", "Tokenize inputs",
        TokenizeResource,
        (ok("Tokenized ids", json(TokenizeResponse)), NO_TOKENIZER, *UNREADABLE, VALIDATION, STARTING),
    ),
    Operation(
        "post", "/chat_tokenize", "get_chat_tokenize", "Template and tokenize ChatRequest",
        ChatTokenizeResource,
        (
            ok("Templated and tokenized ChatRequest", json(ChatTokenizeResponse)),
            NO_CHAT, *UNREADABLE, VALIDATION, STARTING,
        ),
    ),
    *(
        Operation("post", route, name, summary, resource, (ok("Result", *bodies), *GENERATION))
        for route, name, summary, resource, bodies in (
            ("/v1/embeddings", "embeddings", "Make embeddings of texts", EmbeddingsResource,
             (json(pooling.EmbeddingList),)),
            ("/embed", "embed", "Make embeddings of texts, as Text Embeddings Inference", EmbedResource,
             (json(list[list[float]]),)),
            ("/rerank", "rerank", "Rank documents by a query", RerankResource,
             (json(pooling.RerankResponse, list[pooling.Rank]),)),
            ("/v1/rerank", "v1_rerank", "Rank documents by a query", RerankResource,
             (json(pooling.RerankResponse, list[pooling.Rank]),)),
            ("/v2/rerank", "v2_rerank", "Rank documents by a query", RerankResource,
             (json(pooling.RerankResponse, list[pooling.Rank]),)),
            ("/score", "score", "Score pairs of texts", ScoreResource, (json(pooling.ScoreList),)),
            ("/v1/score", "v1_score", "Score pairs of texts", ScoreResource, (json(pooling.ScoreList),)),
            ("/similarity", "similarity", "Score a sentence against others, as Text Embeddings Inference",
             SimilarityResource, (json(list[float]),)),
            ("/classify", "classify", "Classify texts", ClassifyResource, (json(pooling.ClassificationList),)),
            ("/v1/classify", "v1_classify", "Classify texts", ClassifyResource,
             (json(pooling.ClassificationList),)),
            ("/predict", "predict", "Classify texts, as Text Embeddings Inference", PredictResource,
             (json(list[pooling.Prediction], list[list[pooling.Prediction]]),)),
        )
    ),
    Operation(
        "post", "/invocations", "sagemaker_compatibility", "Generate tokens from Sagemaker request",
        SagemakerResource,
        (
            ok(
                "Generated Chat Completion",
                json(cloud.SagemakerResponse),
                events(cloud.SagemakerStreamResponse, ErrorResponse, StreamErrorResponse),
            ),
            *GENERATION,
        ),
    ),
    Operation(
        "post", "/vertex", "vertex_compatibility", "Generate tokens from Vertex request",
        VertexResource,
        (ok("Generated Text", json(cloud.VertexResponse)), *COLLAPSED),
    ),
    Operation(
        "get", "/", "root_health", "Health check method; with a page for browsers, which accept text/html",
        RootResource,
        (ok("Everything is working fine", MediaBody("text/html", (str,))), UNHEALTHY),
        span="health",
    ),
    Operation("get", "/health", "health", "Health check method", HealthResource, HEALTH),
    Operation("get", "/ping", "ping", "Health check method", HealthResource, HEALTH, span="health"),
    Operation(
        "get", "/info", "get_model_info", "Text Generation Inference endpoint info",
        InfoResource,
        (ok("Served model info", json(Info)), STARTING),
    ),
    Operation(
        "get", "/metrics", "metrics", "Prometheus metrics scrape endpoint",
        MetricsResource,
        (ok("Prometheus Metrics", MediaBody(TEXT, (str,))),),
    ),
    # TGI's document has one ModelInfo here; its server sends a list, as this one does.
    Operation(
        "get", "/v1/models", "openai_get_model_info", "Get model info",
        ModelsResource,
        (ok("Served model info", json(ModelList, ModelInfo)), NO_MODEL),
    ),
    Operation(
        "get", "/v1/models/{model:path}", "openai_get_one_model_info", "Get info of one model",
        ModelResource,
        (ok("Served model info", json(ModelInfo)), NO_MODEL),
    ),
    Operation(
        "post", "/v1/load_lora_adapter", "load_lora_adapter", "Load a LoRA adapter from a directory of the server",
        LoadAdapterResource,
        (
            ok("The adapter can be asked for", json(ModelInfo)),
            NO_UPDATES, *UNREADABLE, VALIDATION, NO_ADAPTER, STARTING,
        ),
    ),
    Operation(
        "post", "/v1/unload_lora_adapter", "unload_lora_adapter", "Unload a LoRA adapter",
        UnloadAdapterResource,
        (
            ok("The adapter can be asked for no more", json(adapters.ModelDeleted)),
            NO_UPDATES, NO_MODEL, *UNREADABLE, NO_ADAPTER, STARTING,
        ),
    ),
)  # fmt: skip

# Served with several models.
SEVERAL_MODELS = (
    Operation(
        "post", "/v1/models/{model:path}", "load_or_unload_model",
        "Load or unload a model: /v1/models/NAME/load, /v1/models/NAME/unload",
        ManagedModelResource,
        (ok("The model, when it is loaded or unloaded", json(ModelInfo)), NO_MODEL, UNAUTHORIZED, NOT_LOADED),
    ),
    Operation(
        "post", "/sleep", "sleep", "Have the models give their memory back until the next request; `?model=` names one",
        SleepResource, (ok("They sleep"), NO_MODEL, UNAUTHORIZED),
    ),
    Operation(
        "post", "/wake_up", "wake_up", "Wake the models that sleep; `?model=` names one",
        WakeResource, (ok("They are loaded"), NO_MODEL, UNAUTHORIZED, NOT_LOADED),
    ),
    Operation(
        "get", "/is_sleeping", "is_sleeping", "Whether the models sleep; `?model=` names one",
        IsSleepingResource, (ok("Whether they do", json(SleepState)), NO_MODEL),
    ),
)  # fmt: skip

_VERSION = "/v2/models/{model}/versions/{version}"
# Served with --kserve.
KSERVE = (
    Operation(
        "get", "/v2", "kserve_metadata", "Server metadata",
        ServerResource, (ok("Metadata", json(kserve.ServerMetadata)),),
    ),
    Operation(
        "get", "/v2/health/live", "kserve_live", "Liveness",
        LiveResource, (ok("The process answers", json(kserve.Live)),),
    ),
    Operation(
        "get", "/v2/health/ready", "kserve_ready", "Readiness",
        LiveResource, (ok("The process answers", json(kserve.Live)),),
    ),
    Operation(
        "get", _VERSION, "kserve_model_metadata", "Model metadata",
        ModelVersionResource, (ok("Metadata", json(kserve.ModelMetadata)),),
    ),
    Operation(
        "get", f"{_VERSION}/ready", "kserve_model_ready", "Readiness of a model",
        LiveResource, (ok("The process answers", json(kserve.Live)),),
    ),
    Operation(
        "post", f"{_VERSION}/infer", "kserve_infer", "Generate tokens from KServe request",
        InferResource, (ok("Generated Text", json(kserve.InferenceResponse)), *COLLAPSED),
    ),
)  # fmt: skip
