"""Requests and responses of POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from tgi.api.shapes.types import Float32, ResponseBody, UInt32, any_of, doc

# --- requests ---------------------------------------------------------------------------------------------------------


class TextBlock(Struct, tag_field="type", tag="text"):
    """A text."""

    text: str


class ImageBlock(Struct, tag_field="type", tag="image"):
    """An image."""

    source: Any


class DocumentBlock(Struct, tag_field="type", tag="document"):
    """A document. It is not supported: refused with a 400."""

    source: Any


class ThinkingBlock(Struct, tag_field="type", tag="thinking"):
    """What the model has thought in an earlier turn."""

    thinking: str
    signature: Annotated[str | None, doc("Without effect")] = None


class RedactedThinkingBlock(Struct, tag_field="type", tag="redacted_thinking"):
    """What a model of another service has thought. Without effect: it cannot be read here."""

    data: Any = None


class ToolUseBlock(Struct, tag_field="type", tag="tool_use"):
    """What the model has called."""

    id: str
    name: str
    input: dict[str, Any]


class ToolReferenceBlock(Struct, tag_field="type", tag="tool_reference"):
    """A tool of the request that a search for tools has found: the model may call it from here on."""

    tool_name: str


ResultBlock = TextBlock | ImageBlock | DocumentBlock | ToolReferenceBlock


class ToolResultBlock(Struct, tag_field="type", tag="tool_result"):
    """The result of a call."""

    tool_use_id: str
    content: str | list[ResultBlock] | None = None
    is_error: Annotated[bool | None, doc("Without effect: the content tells it")] = None


class MessagesTool(Struct):
    """A tool that the model may call."""

    name: str
    description: str | None = None
    input_schema: Annotated[dict[str, Any] | None, doc("JSON schema of its input")] = None
    type: Annotated[str | None, doc("`custom`. Tools of Anthropic's own services are refused by name")] = None
    strict: Annotated[
        bool | None, doc("Whether a keyword of the schema that cannot be enforced is an error, not a hint")
    ] = None
    defer_loading: Annotated[
        bool | None, doc("Whether the model knows it only from the block of a message that loads it")
    ] = None


class ReferencedTool(Struct, tag_field="type", tag="tool_reference"):
    """Names a tool of the request."""

    name: str


class DefinedTool(Struct, tag_field="type", tag="tool_definition"):
    """A tool that the request does not list in `tools`."""

    definition: MessagesTool


class ToolAdditionBlock(Struct, tag_field="type", tag="tool_addition"):
    """The model may call this tool from here on."""

    tool: ReferencedTool | DefinedTool


class ToolRemovalBlock(Struct, tag_field="type", tag="tool_removal"):
    """The model may not call this tool any more."""

    tool: ReferencedTool


ContentBlock = (
    TextBlock
    | ImageBlock
    | DocumentBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | ToolAdditionBlock
    | ToolRemovalBlock
)  # fmt: skip


class InputMessage(Struct):
    """One turn of a chat. Turns of one role that follow each other are one turn."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[str | list[ContentBlock], Meta(title="InputContent")]


class ToolUseChoice(Struct):
    """Whether the model calls tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: Annotated[str | None, doc("Of the tool that must be called, with `tool`")] = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Struct):
    """Whether the model thinks before it answers."""

    type: Annotated[
        Literal["enabled", "disabled", "adaptive", "between_tools"],
        doc("`adaptive` and `between_tools` leave it to the model; without `thinking` it is off"),
    ]
    budget_tokens: Annotated[
        UInt32 | None, doc("After this many tokens of thinking its end is forced: below `max_tokens`", minimum=1)
    ] = None


class OutputFormat(Struct):
    """What the text must match."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct):
    """How to answer."""

    effort: Annotated[str | None, doc("A variable for templates that read it", example="low")] = None
    format: OutputFormat | None = None


class CountTokensRequest(Struct, kw_only=True):
    """Body of POST /v1/messages/count_tokens."""

    messages: Annotated[list[InputMessage], doc(example=[{"role": "user", "content": "What is Deep Learning?"}])]
    model: Annotated[
        str | None,
        doc("The served model answers whatever the name, unless it names a LoRA adapter", example="claude-opus"),
    ] = None
    system: Annotated[str | list[TextBlock] | None, doc("Instructions that come before the messages")] = None
    tools: list[MessagesTool] | None = None
    tool_choice: ToolUseChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: Annotated[OutputFormat | None, doc("An older name of `output_config.format`")] = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """Body of POST /v1/messages."""

    max_tokens: Annotated[UInt32, doc("The maximum number of tokens to generate", example=1024, minimum=1)]
    stop_sequences: Annotated[list[str] | None, doc("Up to 32 texts that end the answer", example=["\n\n"])] = None
    stream: Annotated[bool | None, doc("Whether to answer as a stream of events")] = None
    temperature: Float32 | None = None
    top_k: UInt32 | None = None
    top_p: Float32 | None = None


# --- responses --------------------------------------------------------------------------------------------------------

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class MessageUsage(ResponseBody):
    """What was counted. The prompt has `input_tokens`, and `cache_read_input_tokens` that were in the prefix cache."""

    input_tokens: UInt32
    cache_creation_input_tokens: UInt32
    cache_read_input_tokens: UInt32
    output_tokens: UInt32


class AnswerTextBlock(ResponseBody, tag_field="type", tag="text"):
    """A text."""

    text: str
    citations: None = None


class AnswerThinkingBlock(ResponseBody, tag_field="type", tag="thinking"):
    """What the model has thought before it answered."""

    thinking: str
    signature: str


class AnswerToolUseBlock(ResponseBody, tag_field="type", tag="tool_use"):
    """A call. The input of one that was cut off is empty."""

    id: str
    name: str
    input: dict[str, Any]


AnswerBlock = AnswerTextBlock | AnswerThinkingBlock | AnswerToolUseBlock


class AnsweredMessage(ResponseBody, tag_field="type", tag="message", kw_only=True):
    """The answer."""

    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageTokensCount(ResponseBody):
    """The length of a prompt."""

    input_tokens: UInt32


class MessageStart(ResponseBody, tag_field="type", tag="message_start"):
    """The first event: the message without content."""

    message: AnsweredMessage


class PingEvent(ResponseBody, tag_field="type", tag="ping"):
    """Keeps the connection open."""


class ContentBlockStart(ResponseBody, tag_field="type", tag="content_block_start"):
    """A block begins."""

    index: UInt32
    content_block: AnswerBlock


class BlockTextDelta(ResponseBody, tag_field="type", tag="text_delta"):
    """More of a text."""

    text: str


class BlockThinkingDelta(ResponseBody, tag_field="type", tag="thinking_delta"):
    """More of what the model thinks."""

    thinking: str


class BlockSignatureDelta(ResponseBody, tag_field="type", tag="signature_delta"):
    """The signature of the block."""

    signature: str


class BlockInputDelta(ResponseBody, tag_field="type", tag="input_json_delta"):
    """More of a call's input, as JSON text."""

    partial_json: str


BlockDelta = BlockTextDelta | BlockThinkingDelta | BlockSignatureDelta | BlockInputDelta


class ContentBlockDelta(ResponseBody, tag_field="type", tag="content_block_delta"):
    """More of a block."""

    index: UInt32
    delta: BlockDelta


class ContentBlockStop(ResponseBody, tag_field="type", tag="content_block_stop"):
    """A block is complete."""

    index: UInt32


class MessageEnding(ResponseBody):
    """Why the message has ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(ResponseBody, tag_field="type", tag="message_delta"):
    """The end of the message, with all that was counted."""

    delta: MessageEnding
    usage: MessageUsage


class MessageStop(ResponseBody, tag_field="type", tag="message_stop"):
    """The last event."""


class MessageFailure(ResponseBody):
    """What went wrong."""

    type: Annotated[str, doc(example="invalid_request_error")]
    message: str


class MessageError(ResponseBody, tag_field="type", tag="error"):
    """An error in Anthropic's form: the body of every error below /v1/messages, and the last event of a stream that
    cannot go on."""

    error: MessageFailure
    request_id: str | None = None


MessageEvent = Annotated[
    Any,
    any_of(
        "MessageEvent",
        MessageStart,
        PingEvent,
        ContentBlockStart,
        ContentBlockDelta,
        ContentBlockStop,
        MessageDelta,
        MessageStop,
        MessageError,
    ),
]
