"""Requests and responses of the routes of files and batches: OpenAI's Batch API."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Raw, Struct, field

from tgi.api.shapes.responses import Metadata, check_metadata
from tgi.api.shapes.types import ResponseBody, UInt32, UInt64, doc

MIN_EXPIRY, MAX_EXPIRY = 3600, 2_592_000  # seconds, as OpenAI's

_Time = Annotated[UInt64, doc("Seconds since the epoch")]


class ExpiresAfter(Struct):
    """How long a file is kept. --batch-ttl can make it shorter."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=MIN_EXPIRY, le=MAX_EXPIRY, extra={"expected": "u32"})]


class BatchRequest(Struct):
    """Body of POST /v1/batches."""

    input_file_id: Annotated[str, doc("A file of requests, one on each line", example="file-6b1e")]
    endpoint: Annotated[str, doc("The route that all requests are for", example="/v1/chat/completions")]
    completion_window: Annotated[
        str, doc("Hours, 1h to 720h, after which what is not answered ends as expired", example="24h")
    ]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None

    def __post_init__(self) -> None:
        """Raises ShapeError."""
        check_metadata(self.metadata)


class BatchLine(Struct):
    """A line of an input file."""

    custom_id: Annotated[
        str, Meta(min_length=1, max_length=512), doc("Names the request in the output, once in a file")
    ]
    method: Literal["POST"]
    url: Annotated[str, doc("The batch's `endpoint`", example="/v1/chat/completions")]
    body: Annotated[Raw, doc("The body of the request", type="object")]


class FileUpload(Struct):
    """Form of POST /v1/files (multipart/form-data)."""

    file: Annotated[str, doc("Requests, one JSON object on each line", format="binary")]
    purpose: Literal["batch"]


class FileObject(ResponseBody, tag_field="object", tag="file"):
    """A file."""

    id: Annotated[str, doc(example="file-6b1e")]
    bytes: UInt64
    created_at: _Time
    expires_at: _Time | None
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"] = "processed"
    status_details: None = None


class FileDeleted(ResponseBody, tag_field="object", tag="file"):
    """A file that is not kept any more."""

    id: str
    deleted: bool = True


BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]


class BatchError(ResponseBody):
    """Why a batch has failed."""

    code: str
    message: str
    param: str | None = None
    line: Annotated[UInt32 | None, doc("Of the input file, from 1 on")] = None


class BatchErrors(ResponseBody):
    """Why a batch has failed, or was ended."""

    data: list[BatchError]
    object: Literal["list"] = "list"


class RequestCounts(ResponseBody):
    """The requests of a batch: those that are answered, and those that have failed."""

    total: UInt32 = 0
    completed: UInt32 = 0
    failed: UInt32 = 0


class BatchInputDetails(ResponseBody):
    """Tokens of the prompts by kind."""

    cached_tokens: Annotated[UInt64, doc("Found in the prefix cache")] = 0


class BatchOutputDetails(ResponseBody):
    """Tokens of the answers by kind."""

    reasoning_tokens: UInt64 = 0


class BatchUsage(ResponseBody):
    """What the answers so far have counted, all together."""

    input_tokens: UInt64 = 0
    input_tokens_details: BatchInputDetails = field(default_factory=BatchInputDetails)
    output_tokens: UInt64 = 0
    output_tokens_details: BatchOutputDetails = field(default_factory=BatchOutputDetails)
    total_tokens: UInt64 = 0


class BatchObject(ResponseBody, tag_field="object", tag="batch", kw_only=True):
    """A batch."""

    id: Annotated[str, doc(example="batch_6b1e")]
    endpoint: str
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: BatchStatus = "validating"
    output_file_id: Annotated[str | None, doc("The answers, once the batch has ended")] = None
    error_file_id: Annotated[str | None, doc("The requests that have failed, once the batch has ended")] = None
    created_at: _Time
    in_progress_at: _Time | None = None
    expires_at: _Time
    finalizing_at: _Time | None = None
    completed_at: _Time | None = None
    failed_at: _Time | None = None
    expired_at: _Time | None = None
    cancelling_at: _Time | None = None
    cancelled_at: _Time | None = None
    request_counts: RequestCounts = field(default_factory=RequestCounts)
    model: Annotated[str | None, doc("That of the first answer")] = None
    usage: BatchUsage = field(default_factory=BatchUsage)
    metadata: Metadata | None = None


class BatchLineResponse(ResponseBody):
    """The response to a request of a batch."""

    status_code: UInt32
    request_id: str
    body: Annotated[Any, doc(type="object")]


class BatchLineError(ResponseBody):
    """Why a request of a batch has no response."""

    code: Annotated[str, doc(example="batch_expired")]
    message: str


class BatchResult(ResponseBody):
    """A line of an output file or of an error file."""

    id: Annotated[str, doc(example="batch_req_6b1e")]
    custom_id: str
    response: BatchLineResponse | None
    error: BatchLineError | None
