"""Responses of POST /v1/chat/completions and /v1/completions."""

from typing import Annotated, Any, Literal

from tgi.api.shapes.chat import ToolCall
from tgi.api.shapes.openai import Created, Id, Stamped
from tgi.api.shapes.types import Float32, ResponseBody, UInt32, any_of, doc

_Reasoning = Annotated[str, doc("What the model has thought before it answered")]
_ChatReason = Literal["stop", "length", "tool_calls"]
_CompletionReason = Literal["stop", "length"]


class PromptTokensDetails(ResponseBody):
    """Tokens of the prompt by kind."""

    cached_tokens: Annotated[UInt32, doc("Found in the prefix cache")]


class CompletionTokensDetails(ResponseBody):
    """Tokens of the answer by kind."""

    reasoning_tokens: Annotated[UInt32, doc("Of the text in reasoning_content")]


class Usage(ResponseBody):
    """What was counted. The details are of the routes below /v1, those of the answer of chats."""

    prompt_tokens: UInt32
    completion_tokens: UInt32
    total_tokens: UInt32
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


class StreamFailure(ResponseBody):
    """What went wrong in a stream that had begun."""

    message: str
    http_status_code: int


class StreamErrorResponse(ResponseBody):
    """The data of the event that ends a stream that cannot go on."""

    error: StreamFailure


# --- chat -------------------------------------------------------------------------------------------------------------


class ChatCompletionTopLogprob(ResponseBody):
    """One of the likeliest tokens at a place."""

    token: str
    logprob: Float32 | None
    bytes: Annotated[list[int] | None, doc("The UTF-8 bytes of the token, which may be half a character")] = None


class ChatCompletionLogprob(ResponseBody, kw_only=True):
    """A generated token."""

    token: str
    logprob: Float32 | None
    bytes: Annotated[list[int] | None, doc("The UTF-8 bytes of the token, which may be half a character")] = None
    top_logprobs: list[ChatCompletionTopLogprob]


class ChatCompletionLogprobs(ResponseBody):
    """One entry per generated token."""

    content: list[ChatCompletionLogprob]


class TextMessage(ResponseBody):
    """A turn of the assistant, or a piece of it."""

    role: Annotated[str, doc(example="assistant")]
    content: Annotated[str, doc(example="My name is David and I")]
    tool_call_id: str | None = None
    reasoning_content: _Reasoning | None = None


class ToolCallMessage(ResponseBody):
    """A turn of the assistant that calls tools."""

    role: Annotated[str, doc(example="assistant")]
    tool_calls: list[ToolCall]
    content: Annotated[str | None, doc("What it says besides")] = None
    reasoning_content: _Reasoning | None = None


class Function(ResponseBody, kw_only=True):
    """The name of what is called, and what there is of its arguments, as JSON text."""

    name: str | None = None
    arguments: str


class CustomInput(ResponseBody, kw_only=True):
    """The name of a custom tool that is called, and what there is of its input."""

    name: str | None = None
    input: str


class DeltaToolCall(ResponseBody):
    """The beginning of a call."""

    index: UInt32
    id: str
    type: Annotated[str, doc("`function` or `custom`")]
    function: Function | None = None
    custom: CustomInput | None = None


class ToolCallDelta(ResponseBody):
    """The first piece of a turn that begins with a call."""

    role: Annotated[str, doc(example="assistant")]
    tool_calls: list[DeltaToolCall]


class TextDelta(ResponseBody):
    """A further piece of a turn whose role is known."""

    content: Annotated[str, doc(example=" am")]


class ToolCallsDelta(ResponseBody):
    """A call begins in a turn whose role is known."""

    tool_calls: list[DeltaToolCall]


class FunctionArguments(ResponseBody):
    """What comes of the arguments, as JSON text."""

    arguments: str


class DeltaArguments(ResponseBody):
    """A further piece of a call; `index` says of which."""

    index: UInt32
    function: FunctionArguments | None = None
    custom: CustomInput | None = None


class ArgumentsDelta(ResponseBody):
    """A further piece of a turn that calls tools."""

    tool_calls: list[DeltaArguments]


class ReasoningDelta(ResponseBody, kw_only=True):
    """A piece of what the model thinks before it answers; the first piece of a turn has the role."""

    role: Annotated[str | None, doc(example="assistant")] = None
    reasoning_content: _Reasoning


class EmptyDelta(ResponseBody):
    """Nothing to show: a turn begins, a token brings nothing, or the chunk tells why the turn is over."""

    role: Annotated[str | None, doc(example="assistant")] = None


OutputMessage = Annotated[Any, any_of("OutputMessage", TextMessage, ToolCallMessage)]
ChatCompletionDelta = Annotated[
    Any,
    any_of(
        "ChatCompletionDelta",
        TextMessage,
        ToolCallDelta,
        TextDelta,
        ReasoningDelta,
        ToolCallsDelta,
        ArgumentsDelta,
        EmptyDelta,
    ),
]


class ChatCompletionComplete(ResponseBody, kw_only=True):
    """One answer to a chat."""

    index: UInt32
    message: OutputMessage
    logprobs: ChatCompletionLogprobs | None = None
    finish_reason: _ChatReason


class ChatCompletion(Stamped, tag_field="object", tag="chat.completion"):
    """The answer to a chat."""

    choices: list[ChatCompletionComplete]
    usage: Usage


class ChatCompletionChoice(ResponseBody):
    """A piece of one answer to a chat; the last one says why it is the last."""

    index: UInt32
    delta: ChatCompletionDelta
    logprobs: ChatCompletionLogprobs | None = None
    finish_reason: _ChatReason | None = None


class ChatCompletionChunk(Stamped, tag_field="object", tag="chat.completion.chunk"):
    """The data of one event."""

    choices: list[ChatCompletionChoice]
    usage: Usage | None = None


# --- completions ------------------------------------------------------------------------------------------------------


class CompletionLogprobs(ResponseBody):
    """OpenAI's columns, one entry per token in each."""

    tokens: list[str]
    token_logprobs: list[Float32 | None]
    top_logprobs: list[dict[str, Float32 | None] | None] | None
    text_offset: list[int]


class CompletionComplete(ResponseBody, kw_only=True):
    """One completion, or a piece of it; null before the last one says why it is the last."""

    index: UInt32
    text: str
    logprobs: CompletionLogprobs | list[Float32] | None = None
    finish_reason: _CompletionReason | None


class CompletionFinal(Stamped, tag_field="object", tag="text_completion"):
    """The answer to a completion request."""

    choices: list[CompletionComplete]
    usage: Usage


class Chunk(ResponseBody, tag_field="object", tag="text_completion"):
    """The data of one event; the last one of each choice is a CompletionFinal."""

    id: Id
    created: Created
    choices: list[CompletionComplete]
    model: str
    system_fingerprint: str
    usage: Usage | None = None


Completion = Annotated[Any, any_of("Completion", Chunk, CompletionFinal)]


class InputTokens(ResponseBody, tag_field="object", tag="response.input_tokens"):
    """The size of the prompt that a request makes."""

    input_tokens: Annotated[UInt32, doc(example=26)]
