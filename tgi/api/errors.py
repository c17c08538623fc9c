"""Errors of requests: status, type and message of each, and their bodies. Below /v1/messages a body has Anthropic's
format, below /v1 OpenAI's, on all other routes TGI's (Service.error_form)."""

import math
from collections.abc import Iterable
from typing import Annotated

import msgspec

from tgi.api.shapes.messages import MessageError, MessageFailure
from tgi.api.shapes.types import doc
from tgi.microkernel.messages.protocol import SUCCESSES, End, FinishReason

# Upper bound of the Retry-After header.
MAX_RETRY_AFTER_SECONDS = 60


class ErrorResponse(msgspec.Struct):
    """An error in TGI's form: the JSON body of its own routes. Routes below /v1 answer with OpenAiErrorResponse."""

    error: str
    error_type: str


class OpenAiError(msgspec.Struct):
    """What went wrong, as OpenAI's clients read it."""

    message: Annotated[str, doc(example="Input validation error: `temperature` must be strictly positive")]
    type: Annotated[str, doc("The same as `error_type`", example="validation")]
    param: Annotated[
        str | None, doc("Path of the field of the request that the error is about, if it is one", example="temperature")
    ]
    code: Annotated[int, doc("The HTTP status", example=422)]


class OpenAiErrorResponse(msgspec.Struct):
    """An error in OpenAI's form: the body of every error below /v1."""

    error: OpenAiError
    error_type: str


class OpenAiStreamError(OpenAiError):
    """What went wrong in a stream that had begun."""

    http_status_code: Annotated[int, doc("The same as `code`, under TGI's name")]


class OpenAiStreamErrorResponse(msgspec.Struct):
    """The data of the event that ends a stream below /v1 that cannot go on."""

    error: OpenAiStreamError
    error_type: str


# Anthropic's error types by status; else that of its class. Its clients know 400 where others know 422.
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    424: "api_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


# By the field that an error is about. Anthropic's SDKs go on without a thread when they read this one.
ANTHROPIC_DETAILS = {"thread": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}}


class ApiError(Exception):
    """A request that is rejected or has failed. `param` is the path of the field that the error is about, in the
    request's own names. `counted` is its label in tgi_request_failure, or "" if it is not counted."""

    native_type = "application/json"  # content type of `native_body`

    def __init__(
        self,
        status: int,
        error_type: str,
        error: str,
        *,
        param: str | None = None,
        counted: str = "",
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(error)
        self.status = status
        self.error_type = error_type
        self.message = error
        self.param = param
        self.counted = counted
        self.headers = headers or {}

    def native_body(self) -> bytes:
        return msgspec.json.encode(ErrorResponse(self.message, self.error_type))

    def openai_body(self) -> bytes:
        error = OpenAiError(self.message, self.error_type, self.param, self.status)
        return msgspec.json.encode(OpenAiErrorResponse(error, self.error_type))

    @property
    def anthropic_status(self) -> int:
        return 400 if self.status == 422 else self.status

    def anthropic_body(self, request_id: str | None = None) -> bytes:
        """The body in Anthropic's format, which is the data of an event, too."""
        kind = ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        details = ANTHROPIC_DETAILS.get(self.param or "", msgspec.UNSET)
        text = self.message
        if self.param is not None and self.param not in text:  # a rule calls the parameter by TGI's name
            text = f"{self.param}: {text}"
        return msgspec.json.encode(MessageError(MessageFailure(kind, text, details), request_id))

    def openai_event_data(self) -> bytes:
        error = OpenAiStreamError(self.message, self.error_type, self.param, self.status, self.status)
        return msgspec.json.encode(OpenAiStreamErrorResponse(error, self.error_type))


# The `error_type` of a Rejection by its status. TGI sends these errors without one.
REJECTION_TYPES = {
    400: "bad_request",
    401: "unauthorized",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "payload_too_large",
    415: "unsupported_media_type",
    422: "validation",
}


class Rejection(ApiError):
    """A request that is rejected before its route handles it: no key, no such route, a body that cannot be decoded. In
    TGI's format the body is plain text: the message, or `plain` where TGI sends another text or none."""

    native_type = "text/plain; charset=utf-8"

    def __init__(
        self,
        status: int,
        text: str,
        *,
        param: str | None = None,
        plain: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(status, REJECTION_TYPES[status], text, param=param, headers=headers)
        self._plain = text if plain is None else plain

    def native_body(self) -> bytes:
        return self._plain.encode()


class PathOfOthers(Rejection):
    """A path of another server. Its body has OpenAI's format on all routes: newer clients show no other."""

    native_type = "application/json"

    def native_body(self) -> bytes:
        return self.openai_body()


# The ends of paths that clients of other servers send, or OpenAI's with a base URL without /v1 -> the path here.
PATHS_OF_OTHERS = {
    "/chat/completions": "/v1/chat/completions",
    "/completions": "/v1/completions",
    "/models": "/v1/models",
    "/responses": "/v1/responses",
    "/embeddings": "/v1/embeddings",
    "/messages": "/v1/messages",  # Anthropic's
    "/api/chat": "/v1/chat/completions",  # Ollama's, up to /api/embed
    "/api/generate": "/v1/completions",
    "/api/tags": "/v1/models",
    "/api/ps": "/v1/models",
    "/api/show": "/info",
    "/api/version": "/info",
    "/api/embed": "/v1/embeddings",
    "/api/embeddings": "/v1/embeddings",
    "/completion": "/v1/completions",  # llama.cpp's, up to /props
    "/embedding": "/v1/embeddings",
    "/props": "/info",
}


class ClientDisconnected(Exception):
    """The client has disconnected, so there is no response."""


def validation_error(detail: str, *, param: str | None = None, counted: bool = True) -> ApiError:
    """422: a parameter or the prompt breaks a rule."""
    text, label = f"Input validation error: {detail}", "validation" if counted else ""
    return ApiError(422, "validation", text, param=param, counted=label)


def unknown_after(given: str) -> ApiError:
    """422: a list is to go on behind what it does not have."""
    return validation_error(f"`after` is the id of something in the list. Given: {given[:64]}", param="after")


def no_such_route(method: str, path: str) -> Rejection:
    """404. Where the path is known from other servers, the error names the path to use instead. In TGI's format others
    have no body."""
    text = f"There is no route {method} {path}. "
    lists = "/docs lists the routes of this server"
    end = max((end for end in PATHS_OF_OTHERS if path.rstrip("/").endswith(end)), key=len, default=None)
    if end is None:
        return Rejection(404, text + lists, plain="")
    here = PATHS_OF_OTHERS[end]
    base = "; the base URL of OpenAI's clients ends in /v1" if here.startswith("/v1/") else ""
    if here == "/v1/messages":
        base = "; the base URL of Anthropic's clients does not end in /v1"
    return PathOfOthers(404, f"{text}Use {here}{base}. {lists}")


def unauthorized() -> Rejection:
    """401: the server has keys, and the request has no valid one."""
    text = "The API key is missing or wrong. Send the header `Authorization: Bearer KEY`"
    return Rejection(401, text, plain="")


def overloaded(retry_after: int = 1, text: str = "Model is overloaded") -> ApiError:
    """429: too few permits are free, or a limit of the client is reached. `retry_after` is in seconds."""
    return ApiError(429, "overloaded", text, counted="overloaded", headers={"retry-after": str(retry_after)})


def timed_out(cause: str) -> ApiError:
    """504: the deadline of the request has passed."""
    return ApiError(504, "timeout", f"Request timed out: {cause}", counted="timeout")


def unhealthy(stage: str) -> ApiError:
    """503: no request can be computed now. The header tells what the server waits for, at start and after a loss."""
    return ApiError(503, "healthcheck", "unhealthy", headers={"x-startup-stage": stage})


def too_many_connections() -> ApiError:
    """503: the connection is one more than the server may have open."""
    return ApiError(503, "too_many_connections", "All connections of this server are in use. Retry in a moment")


def invalid_event_id() -> Rejection:
    """400: no stream of this server has such an event."""
    return Rejection(400, "`Last-Event-ID` is not the id of an event of this server. To begin anew, leave it out")


def cannot_resume() -> ApiError:
    """410: the events that the client has cannot be repeated, so the stream cannot continue after them."""
    text = (
        "The stream cannot be resumed: this request does not repeat the events that were received. Send the same "
        "request to the same route within --resume-window, or begin anew without `Last-Event-ID`"
    )
    return ApiError(410, "cannot_resume", text)


def taken_over() -> ApiError:
    """410: a later request has resumed the stream. Not 409 or 500: client libraries send a request again after these,
    which would take the stream back from its new reader."""
    text = "Another request has resumed this stream, which continues there"
    return ApiError(410, "taken_over", text, counted="dropped")


def generation_failed(cause: str) -> ApiError:
    """424: the generation has failed."""
    return ApiError(424, "generation", f"Request failed during generation: {cause}", counted="generation")


def quarantined(reason: str, minutes: int) -> ApiError:
    """424: the same request has crashed a process, and is refused for a while."""
    return generation_failed(f"this request is in quarantine for {minutes} more minutes: {reason}")


def incomplete_generation(streaming: bool) -> ApiError:
    """500: the request has ended without its last token."""
    if streaming:
        return ApiError(500, "incomplete_generation_stream", "Incomplete generation stream", counted="incomplete")
    return ApiError(500, "incomplete_generation", "Incomplete generation", counted="incomplete")


def template_error(message: str) -> ApiError:
    """422: the chat template cannot render these messages."""
    return ApiError(422, "template_error", f"Template error: {message}", counted="template")


def tool_error(message: str, param: str | None = None) -> ApiError:
    """422: invalid tools, or a tool call that was cut off."""
    return ApiError(422, "tool_error", f"Tool error: {message}", param=param, counted="validation")


def adapter_error(reason: str) -> ApiError:
    """422: the adapter cannot be loaded."""
    return ApiError(422, "adapter_error", f"Adapter error: {reason}")


def forbidden(text: str) -> ApiError:
    """403: a flag of the server does not allow this."""
    return ApiError(403, "forbidden", text)


def model_not_found(param: str) -> ApiError:
    """404: neither the served model nor an adapter has the name in the field `param`."""
    return ApiError(404, "not_found", "Model not found", param=param)


def unknown_model(name: str, served: Iterable[str]) -> ApiError:
    """404: a server of several models has none of this name."""
    text = f"The model `{name[:128]}` does not exist. Served here: {', '.join(served)}"
    return ApiError(404, "not_found", text, param="model")


def cannot_load(name: str, reason: str) -> ApiError:
    """503: one of several models cannot be loaded."""
    text = f"The model {name} could not be loaded. {reason}"
    return ApiError(503, "model_not_loaded", text, headers={"x-startup-stage": f"{name} failed"})


def not_kept(kind: str, name: str, param: str | None = None) -> ApiError:
    """404: this client has not stored such a response or conversation, or not any more."""
    text = f"The {kind} {name[:128]} is not kept by this server, or not any more (--response-ttl)"
    return ApiError(404, "not_found", text, param=param)


def other_task(text: str) -> ApiError:
    """404: the served model does something else than what the route asks for."""
    return ApiError(404, "not_found", text)


def suffix_not_supported() -> ApiError:
    """422: a completion with a suffix."""
    text = "Suffix is not supported and can be achieved by preprocessing the prompt."
    return ApiError(422, "suffix not supported", text, param="suffix", counted="validation")


def batch_size_exceeded(limit: int) -> ApiError:
    """422: too many prompts in one call."""
    text = f"Number of prompts exceeds the maximum allowed batch size of {limit}"
    return ApiError(422, "batch size exceeded", text, param="prompt", counted="validation")


def no_instances() -> ApiError:
    """422: a Vertex request without instances."""
    return ApiError(422, "Input validation error", "Input validation error", counted="validation")


def invalid_utf8(reason: str) -> ApiError:
    """422: a KServe input that is not UTF-8."""
    return ApiError(422, "utf8", reason, counted="validation")


def length_mismatch() -> ApiError:
    """422: a KServe request with different numbers of inputs and outputs."""
    return ApiError(422, "length mismatch", "Inputs and outputs length mismatch", counted="validation")


def without_cause(error: ApiError) -> ApiError:
    """The error as Vertex and KServe routes send it: without the cause of a failed generation."""
    if error.status not in (424, 500):
        return error
    return ApiError(500, "Incomplete generation", "Incomplete generation", counted=error.counted)


def from_end(end: End, streaming: bool) -> ApiError | None:
    """The error that an End means to the client; None for the three successes."""
    if end.reason in SUCCESSES:
        return None
    match end.reason:
        case FinishReason.INVALID:
            return validation_error(end.message)
        case FinishReason.OVERLOADED:
            return overloaded(min(max(1, math.ceil(end.retry_after_ms / 1000)), MAX_RETRY_AFTER_SECONDS))
        case FinishReason.TIMEOUT:
            return timed_out(end.message)
        case FinishReason.FAILED | FinishReason.QUARANTINED:
            return generation_failed(end.message)
        case FinishReason.TEMPLATE:
            return template_error(end.message)
        case _:
            return incomplete_generation(streaming)
