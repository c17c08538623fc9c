"""POST /v1/chat/completions and /chat_tokenize: what they take."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct

from tgi.api.shapes.native import GrammarType
from tgi.api.shapes.types import Float32, Int32, ShapeError, UInt32, UInt64, check_seed, stop_strings

_BODY = Meta(extra={"untagged": "MessageBody", "owner": True})


class Url(Struct):
    """Where an image is."""

    url: str


class TextChunk(Struct, tag_field="type", tag="text"):
    """A part of a message's text."""

    text: str


class ImageChunk(Struct, tag_field="type", tag="image_url"):
    """An image in a message."""

    image_url: Url


class FunctionDefinition(Struct, omit_defaults=True):
    """A function that may be called (`parameters` is its JSON schema), or one that was (`arguments`). TGI takes both
    names for either."""

    name: str
    description: str | None = None
    arguments: Any = UNSET
    parameters: Any = UNSET


class Tool(Struct):
    """What the model may call."""

    type: str
    function: FunctionDefinition


class ToolCall(Struct):
    """What the model has called."""

    id: str
    type: str
    function: FunctionDefinition

    def __post_init__(self) -> None:
        """A call has arguments. Raises ShapeError."""
        if self.function.arguments is UNSET and self.function.parameters is UNSET:
            raise ShapeError("missing field `arguments`", "function")


class Message(Struct, omit_defaults=True):
    """One turn of a chat."""

    role: str
    content: Annotated[str | list[TextChunk | ImageChunk] | None, _BODY] = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall] | None, _BODY] = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    def __post_init__(self) -> None:
        """There is a text or a call. Raises ShapeError."""
        if self.content is None and self.tool_calls is None:
            raise ShapeError("data did not match any variant of untagged enum MessageBody")


class FunctionName(Struct):
    """Names a function."""

    name: str


class NamedTool(Struct):
    """The one function that must be called."""

    function: FunctionName
    type: Literal["function"] = "function"


class StreamOptions(Struct):
    """What a stream tells besides tokens."""

    include_usage: bool | None = None


class ChatRequest(Struct, kw_only=True):
    """Body of POST /v1/chat/completions and /chat_tokenize."""

    messages: list[Message]
    model: str | None = None
    max_tokens: UInt32 | None = None
    max_completion_tokens: UInt32 | None = None  # OpenAI's newer name
    temperature: Float32 | None = None
    top_p: Float32 | None = None
    seed: UInt64 | None = None
    stop: list[str] | str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: UInt32 | None = None
    frequency_penalty: Float32 | None = None
    presence_penalty: Float32 | None = None
    logit_bias: list[Float32] | dict[str, Float32] | None = None
    n: UInt32 | None = None
    tools: list[Tool] | None = None
    tool_choice: Annotated[str | NamedTool | None, Meta(extra={"untagged": "ToolTypeDeserializer"})] = None
    tool_prompt: str | None = None
    response_format: GrammarType | None = None
    # Not TGI's, but what clients of other servers send
    repetition_penalty: Float32 | None = None
    top_k: Int32 | None = None
    typical_p: Float32 | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        """Raises ShapeError."""
        check_seed(self.seed)
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ShapeError("duplicate field `max_tokens`")

    @property
    def max_new_tokens(self) -> int | None:
        """The limit, under either name."""
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    @property
    def stops(self) -> list[str]:
        """The stop strings as a list."""
        return stop_strings(self.stop)

    @property
    def usage_wanted(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def chat(self, tools: list[Tool] | None) -> bytes:
        """What the tokenizer makes the prompt of, as JSON (its keys: tokenizer/chat.py)."""
        names = ("tool_prompt", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return msgspec.json.encode({"messages": self.messages, **({"tools": tools} if tools else {}), **given})
