"""Requests and responses of POST /v1/responses, and of the routes for what it has stored: OpenAI's Responses."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from tgi.api.shapes.types import Float32, ResponseBody, ShapeError, UInt32, any_of, doc

MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512

Metadata = dict[str, str]


def check_metadata(metadata: Metadata | None) -> None:
    """Raises ShapeError for more metadata than OpenAI takes."""
    given = metadata or {}
    if len(given) > MAX_METADATA:
        raise ShapeError(f"invalid length {len(given)}, expected at most {MAX_METADATA} pairs", "metadata")
    if any(len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE for key, value in given.items()):
        limits = f"keys of at most {MAX_METADATA_KEY} characters and values of at most {MAX_METADATA_VALUE}"
        raise ShapeError(f"invalid length, expected {limits}", "metadata")


# --- requests ---------------------------------------------------------------------------------------------------------


class InputPart(Struct, omit_defaults=True):
    """A part of an item's content: a text, whatever its type, a `refusal`, or the image of an `input_image` (an https,
    http or data URL). Files are refused with 422, and so are images if the model does not see them."""

    type: Annotated[str, doc(example="input_text")]
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    detail: Annotated[str | None, doc("Of an image: `low` makes it small first")] = None


InputParts = Annotated[str | list[InputPart], Meta(title="InputParts", extra={"untagged": "InputParts"})]


class InputItem(Struct, omit_defaults=True):
    """A message (`role`, `content`), a call (`function_call` with `call_id`, `name`, `arguments`, `custom_tool_call`
    with `input`), its result (`function_call_output` or `custom_tool_call_output` with `call_id`, `output`), or earlier
    reasoning (`reasoning`)."""

    type: Annotated[str | None, doc(example="message")] = None
    id: str | None = None
    role: Annotated[str | None, doc(example="user")] = None
    content: InputParts | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: InputParts | None = None
    summary: list[InputPart] | None = None
    encrypted_content: str | None = None
    status: str | None = None


class ToolFormat(Struct, omit_defaults=True):
    """What the input of a custom tool must match."""

    type: Literal["text", "grammar"] = "text"
    syntax: Annotated[Literal["lark", "regex"] | None, doc("Of the grammar")] = None
    definition: Annotated[str | None, doc("The grammar")] = None

    def __post_init__(self) -> None:
        """Raises ShapeError for a grammar without its members."""
        for name in ("syntax", "definition"):
            if self.type == "grammar" and getattr(self, name) is None:
                raise ShapeError(f"missing field `{name}`")


class ToolOfNamespace(Struct):
    """A function that the model may call, or a custom tool, whose input is text."""

    type: Annotated[
        str,
        doc("`function`, `custom`, or `namespace`: a group of them. Others are refused by name", example="function"),
    ]
    name: str | None = None
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, doc("JSON schema of its arguments")] = None
    strict: Annotated[
        bool | None, doc("Whether a keyword of the schema that cannot be enforced is an error, not a hint")
    ] = None
    format: Annotated[ToolFormat | UnsetType | None, doc("Of the input of a custom tool")] = UNSET


class ResponsesTool(ToolOfNamespace):
    """A tool, or a group of tools."""

    tools: Annotated[list[ToolOfNamespace] | UnsetType | None, doc("The tools of a namespace")] = UNSET


class ToolOfResponses(Struct, omit_defaults=True):
    """Names a tool."""

    type: str
    name: str | None = None


class ResponsesToolChoice(Struct, omit_defaults=True):
    """The function that must be called, or those that may be."""

    type: Annotated[str, doc("`function`, `custom` or `allowed_tools`. Others are refused by name", example="function")]
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[ToolOfResponses] | None = None


class ReasoningConfig(Struct, omit_defaults=True):
    """How to reason."""

    effort: Annotated[str | None, doc("A variable for templates that read it; `none`: off", example="low")] = None
    summary: Annotated[str | None, doc("If given, the reasoning comes as its summary, in full", example="auto")] = None
    generate_summary: Annotated[str | None, doc("An older name of `summary`")] = None


class TextFormat(Struct, omit_defaults=True):
    """What the text must match."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None

    def __post_init__(self) -> None:
        """Raises ShapeError for `json_schema` without a schema."""
        if self.type == "json_schema" and self.schema is None:
            raise ShapeError("missing field `schema`")


class TextConfig(Struct, omit_defaults=True):
    """How to write the text."""

    format: TextFormat | None = None
    verbosity: Annotated[str | None, doc("A variable for templates that read it", example="medium")] = None


class ConversationReference(Struct):
    """Names a conversation."""

    id: str


class ResponsesRequest(Struct, kw_only=True):
    """Body of POST /v1/responses."""

    input: Annotated[
        str | list[InputItem] | None,
        Meta(extra={"untagged": "Input"}),
        doc("A text of the user, or the items of a conversation", example="What is Deep Learning?"),
    ] = None
    model: Annotated[str | None, doc("The served model answers whatever the name, unless it names a LoRA adapter")] = (
        None
    )
    instructions: Annotated[str | None, doc("Comes before all items, and is not kept for later responses")] = None
    tools: list[ResponsesTool] | None = None
    tool_choice: Annotated[str | ResponsesToolChoice | None, Meta(extra={"untagged": "ToolChoiceOfResponses"})] = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    max_output_tokens: Annotated[UInt32 | None, doc("The maximum number of tokens to generate", minimum=1)] = None
    truncation: Annotated[
        Literal["auto", "disabled"] | None,
        doc("`auto`: a prompt that is too long loses its first tokens, else it is refused"),
    ] = None
    temperature: Float32 | None = None
    top_p: Float32 | None = None
    top_logprobs: Annotated[UInt32 | None, doc("Alternatives of each token, with the logprobs", maximum=20)] = None
    include: Annotated[
        list[str] | None, doc("`message.output_text.logprobs`, `reasoning.encrypted_content`; others have no effect")
    ] = None
    metadata: Metadata | None = None
    store: Annotated[bool | None, doc("Whether to keep the response, by default for --response-ttl seconds")] = None
    previous_response_id: Annotated[str | None, doc("A kept response that this one goes on from")] = None
    conversation: Annotated[
        str | ConversationReference | None, Meta(extra={"untagged": "Conversation"}),
        doc("A conversation to go on with, which takes the items of this response"),
    ] = None  # fmt: skip
    background: Annotated[bool | None, doc("Whether to answer at once, and to generate without the client")] = None
    stream: Annotated[bool | None, doc("Whether to answer as a stream of events")] = None

    def __post_init__(self) -> None:
        """Raises ShapeError."""
        check_metadata(self.metadata)


MAX_ITEMS_AT_ONCE = 20


class ConversationUpdate(Struct):
    """Body of POST /v1/conversations/{conversation_id}."""

    metadata: Metadata

    def __post_init__(self) -> None:
        """Raises ShapeError."""
        check_metadata(self.metadata)


class ItemsRequest(Struct):
    """Body of POST /v1/conversations/{conversation_id}/items."""

    items: Annotated[list[InputItem], doc("At most 20, which are appended")]

    def __post_init__(self) -> None:
        """Raises ShapeError."""
        if len(self.items) > MAX_ITEMS_AT_ONCE:
            raise ShapeError(f"invalid length {len(self.items)}, expected at most {MAX_ITEMS_AT_ONCE}", "items")


class ConversationRequest(Struct):
    """Body of POST /v1/conversations."""

    items: Annotated[list[InputItem] | None, doc("Those that it begins with")] = None
    metadata: Metadata | None = None

    def __post_init__(self) -> None:
        """Raises ShapeError."""
        check_metadata(self.metadata)


# --- responses --------------------------------------------------------------------------------------------------------

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(ResponseBody, tag_field="type", tag="output_text"):
    """The text of a message. `logprobs` are empty unless `include` asks for them."""

    text: str
    annotations: list[Any] = []
    logprobs: list[Raw] = []


class OutputReasoningText(ResponseBody, tag_field="type", tag="reasoning_text"):
    """What the model has thought."""

    text: str


class OutputSummaryText(ResponseBody, tag_field="type", tag="summary_text"):
    """What the model has thought, where `reasoning.summary` asks for it."""

    text: str


OutputPart = OutputText | OutputReasoningText | OutputSummaryText


class MessageItem(ResponseBody, tag_field="type", tag="message"):
    """A message of the assistant."""

    id: str
    status: ItemStatus
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class ReasoningItem(ResponseBody, tag_field="type", tag="reasoning"):
    """What the model has thought before it answered."""

    id: str
    status: ItemStatus
    summary: list[OutputSummaryText]
    content: list[OutputReasoningText]
    encrypted_content: Annotated[str | None, doc("The reasoning in base64, if `include` asks for it")] = None


class CallItem(ResponseBody, tag_field="type", tag="function_call"):
    """A call. `arguments` are JSON text, which may be cut off where the status is `incomplete`."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str
    namespace: Annotated[str | UnsetType, doc("That of the function, if it has one")] = UNSET


class CustomCallItem(ResponseBody, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool. `input` may be cut off where the status is `incomplete`."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    input: str
    namespace: Annotated[str | UnsetType, doc("That of the tool, if it has one")] = UNSET


OutputItem = MessageItem | ReasoningItem | CallItem | CustomCallItem


class CachedInputTokens(ResponseBody):
    """Of the prompt."""

    cached_tokens: UInt32
    cache_write_tokens: UInt32 = 0


class ReasonedOutputTokens(ResponseBody):
    """Of the answer."""

    reasoning_tokens: UInt32


class ResponseUsage(ResponseBody):
    """What was counted."""

    input_tokens: UInt32
    input_tokens_details: CachedInputTokens
    output_tokens: UInt32
    output_tokens_details: ReasonedOutputTokens
    total_tokens: UInt32


class ResponseFailure(ResponseBody):
    """Why a response has failed."""

    code: str
    message: str


class IncompleteDetails(ResponseBody):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseObject(ResponseBody, tag_field="object", tag="response", kw_only=True):
    """A response. What the request has set is repeated."""

    id: str
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    completed_at: int | None = None
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    conversation: ConversationReference | None
    reasoning: ReasoningConfig
    store: bool
    temperature: float | None
    text: Any
    tool_choice: Any
    tools: list[Any]
    top_logprobs: int
    top_p: float | None
    truncation: str
    usage: ResponseUsage | None = None
    metadata: Metadata


class ResponseDeleted(ResponseBody):
    """A response or a conversation that is not kept any more."""

    id: str
    object: Literal["response.deleted", "conversation.deleted"]
    deleted: bool


class ConversationObject(ResponseBody, tag_field="object", tag="conversation"):
    """A conversation."""

    id: str
    created_at: int
    metadata: Metadata


# --- events -----------------------------------------------------------------------------------------------------------


class _Event(ResponseBody, kw_only=True):
    """What all events have."""

    sequence_number: UInt32


class ResponseCreated(_Event, tag_field="type", tag="response.created"):
    """The first event."""

    response: ResponseObject


class ResponseQueued(_Event, tag_field="type", tag="response.queued"):
    """A background response is not yet computed."""

    response: ResponseObject


class ResponseInProgress(_Event, tag_field="type", tag="response.in_progress"):
    """The response is computed."""

    response: ResponseObject


class ResponseCompleted(_Event, tag_field="type", tag="response.completed"):
    """The last event."""

    response: ResponseObject


class ResponseIncomplete(_Event, tag_field="type", tag="response.incomplete"):
    """The last event of a response that `max_output_tokens` or the context has ended."""

    response: ResponseObject


class ResponseFailed(_Event, tag_field="type", tag="response.failed"):
    """The last event of a response that has failed."""

    response: ResponseObject


class OutputItemAdded(_Event, tag_field="type", tag="response.output_item.added"):
    """An item begins."""

    output_index: UInt32
    item: OutputItem


class OutputItemDone(_Event, tag_field="type", tag="response.output_item.done"):
    """An item is complete."""

    output_index: UInt32
    item: OutputItem


class _PartEvent(_Event, kw_only=True):
    """What all events about a part of an item have."""

    item_id: str
    output_index: UInt32


class ContentPartAdded(_PartEvent, tag_field="type", tag="response.content_part.added"):
    """A part of an item begins."""

    content_index: UInt32
    part: OutputPart


class ContentPartDone(_PartEvent, tag_field="type", tag="response.content_part.done"):
    """A part of an item is complete."""

    content_index: UInt32
    part: OutputPart


class OutputTextDelta(_PartEvent, tag_field="type", tag="response.output_text.delta"):
    """More of a text."""

    content_index: UInt32
    delta: str
    logprobs: list[Raw]


class OutputTextDone(_PartEvent, tag_field="type", tag="response.output_text.done"):
    """A text is complete."""

    content_index: UInt32
    text: str
    logprobs: list[Raw]


class ReasoningTextDelta(_PartEvent, tag_field="type", tag="response.reasoning_text.delta"):
    """More of what the model thinks."""

    content_index: UInt32
    delta: str


class ReasoningTextDone(_PartEvent, tag_field="type", tag="response.reasoning_text.done"):
    """What the model has thought."""

    content_index: UInt32
    text: str


class SummaryPartAdded(_PartEvent, tag_field="type", tag="response.reasoning_summary_part.added"):
    """A summary begins."""

    summary_index: UInt32
    part: OutputSummaryText


class SummaryPartDone(_PartEvent, tag_field="type", tag="response.reasoning_summary_part.done"):
    """A summary is complete."""

    summary_index: UInt32
    part: OutputSummaryText


class SummaryTextDelta(_PartEvent, tag_field="type", tag="response.reasoning_summary_text.delta"):
    """More of a summary."""

    summary_index: UInt32
    delta: str


class SummaryTextDone(_PartEvent, tag_field="type", tag="response.reasoning_summary_text.done"):
    """A summary is complete."""

    summary_index: UInt32
    text: str


class CallArgumentsDelta(_PartEvent, tag_field="type", tag="response.function_call_arguments.delta"):
    """More of a call's arguments, as JSON text."""

    delta: str


class CallArgumentsDone(_PartEvent, tag_field="type", tag="response.function_call_arguments.done"):
    """The arguments of a call are complete."""

    name: str
    arguments: str


class CustomInputDelta(_PartEvent, tag_field="type", tag="response.custom_tool_call_input.delta"):
    """More of the input of a custom tool."""

    delta: str


class CustomInputDone(_PartEvent, tag_field="type", tag="response.custom_tool_call_input.done"):
    """The input of a custom tool is complete."""

    input: str


ResponseEvent = Annotated[
    Any,
    any_of(
        "ResponseEvent", ResponseCreated, ResponseQueued, ResponseInProgress, ResponseCompleted, ResponseIncomplete,
        ResponseFailed, OutputItemAdded, OutputItemDone, ContentPartAdded, ContentPartDone, OutputTextDelta,
        OutputTextDone, ReasoningTextDelta, ReasoningTextDone, SummaryPartAdded, SummaryPartDone, SummaryTextDelta,
        SummaryTextDone, CallArgumentsDelta, CallArgumentsDone, CustomInputDelta, CustomInputDone,
    ),
]  # fmt: skip
