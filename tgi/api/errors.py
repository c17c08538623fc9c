"""What a client is told when a request cannot be served: JSON errors, and plain-text rejections of bodies."""

import msgspec

from tgi.kernel.messages import End, Reason


class ErrorResponse(msgspec.Struct):
    """The body of every JSON error."""

    error: str
    error_type: str


class ApiError(Exception):
    """A request that is refused or has failed, with a JSON body. `counted` is its label in tgi_request_failure."""

    def __init__(
        self, status: int, error_type: str, error: str, *, counted: str = "", headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(error)
        self.status = status
        self.error_type = error_type
        self.message = error
        self.counted = counted
        self.headers = headers or {}
        self.body = msgspec.json.encode(ErrorResponse(error, error_type))


class Rejection(Exception):
    """A body that could not be read as what the route expects, with a plain-text answer."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


class ClientGone(Exception):
    """The client has left: nobody reads an answer."""


def validation(detail: str, *, counted: bool = True) -> ApiError:
    """422: a parameter or the prompt breaks a rule."""
    return ApiError(422, "validation", f"Input validation error: {detail}", counted="validation" if counted else "")


def overloaded(retry_after: int = 1) -> ApiError:
    """429: as many requests as are allowed are in flight. The client is asked to wait so many seconds."""
    headers = {"retry-after": str(retry_after)}
    return ApiError(429, "overloaded", "Model is overloaded", counted="overloaded", headers=headers)


def unhealthy(stage: str = "") -> ApiError:
    """503: nothing can be computed now. While starting, a header names the stage."""
    headers = {"x-startup-stage": stage} if stage else {}
    return ApiError(503, "healthcheck", "unhealthy", headers=headers)


def failed(cause: str) -> ApiError:
    """424: something broke while tokens were generated."""
    return ApiError(424, "generation", f"Request failed during generation: {cause}", counted="generation")


def incomplete(streaming: bool) -> ApiError:
    """The request ended without its last token."""
    if streaming:
        return ApiError(500, "incomplete_generation_stream", "Incomplete generation stream", counted="incomplete")
    return ApiError(500, "incomplete_generation", "Incomplete generation", counted="incomplete")


def template(message: str) -> ApiError:
    """422: the chat template cannot render these messages."""
    return ApiError(422, "template_error", f"Template error: {message}", counted="template")


def tool(message: str) -> ApiError:
    """422: the tools of a request do not fit together."""
    return ApiError(422, "tool_error", f"Tool error: {message}", counted="validation")


def adapter(reason: str, *, lost: bool) -> ApiError:
    """422: an adapter that cannot be loaded; 500 if the request was lost on the way."""
    return ApiError(500 if lost else 422, "adapter_error", f"Adapter error: {reason}")


def forbidden(text: str) -> ApiError:
    """403: the server was started without leave to do this."""
    return ApiError(403, "forbidden", text)


def no_model() -> ApiError:
    """404: neither the served model nor an adapter of it has this name."""
    return ApiError(404, "not_found", "Model not found")


def suffix() -> ApiError:
    """422: a completion with a suffix."""
    text = "Suffix is not supported and can be achieved by preprocessing the prompt."
    return ApiError(422, "suffix not supported", text, counted="validation")


def batch_size(limit: int) -> ApiError:
    """422: too many prompts in one call."""
    text = f"Number of prompts exceeds the maximum allowed batch size of {limit}"
    return ApiError(422, "batch size exceeded", text, counted="validation")


def no_instances() -> ApiError:
    """422: a Vertex request without instances."""
    return ApiError(422, "Input validation error", "Input validation error", counted="validation")


def utf8(reason: str) -> ApiError:
    """422: a KServe input that is no text."""
    return ApiError(422, "utf8", reason, counted="validation")


def lengths() -> ApiError:
    """422: a KServe request with more or fewer names for outputs than inputs."""
    return ApiError(422, "length mismatch", "Inputs and outputs length mismatch", counted="validation")


def collapsed(error: ApiError) -> ApiError:
    """What Vertex and KServe are told: of a failure while tokens were generated, no more than that."""
    if error.status not in (424, 500):
        return error
    return ApiError(500, "Incomplete generation", "Incomplete generation", counted=error.counted)


def of_end(end: End, streaming: bool) -> ApiError | None:
    """What an End means to the client: None for the three successes."""
    match end.reason:
        case Reason.LENGTH | Reason.EOS | Reason.STOP:
            return None
        case Reason.INVALID:
            return validation(end.message)
        case Reason.OVERLOADED:
            return overloaded()
        case Reason.FAILED:
            return failed(end.message)
        case Reason.TEMPLATE:
            return template(end.message)
        case _:
            return incomplete(streaming)
