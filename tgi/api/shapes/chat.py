"""The request of POST /v1/chat/completions and /chat_tokenize."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Meta, Struct

from tgi.api.shapes.openai import OpenAiRequest
from tgi.api.shapes.types import Int32, MissingField, ShapeError, UInt32, doc

_BODY = Meta(extra={"untagged": "MessageBody", "owner": True})


class Url(Struct):
    """Where an image is: an https, http or data URL."""

    url: str
    detail: Annotated[str | None, doc("`low` makes the image small first", example="auto")] = None


class TextChunk(Struct, tag_field="type", tag="text"):
    """A part of a message's text."""

    text: str


class ResponsesTextChunk(Struct, tag_field="type", tag="input_text"):
    """A part of a user's text, as the Responses protocol names it."""

    text: str


class AnswerTextChunk(Struct, tag_field="type", tag="output_text"):
    """A part of an answer's text, as the Responses protocol names it."""

    text: str


class RefusalChunk(Struct, tag_field="type", tag="refusal"):
    """What an assistant has answered in place of a text."""

    refusal: str


class ImageChunk(Struct, tag_field="type", tag="image_url"):
    """An image in a message."""

    image_url: Url | str


class ResponsesImageChunk(Struct, tag_field="type", tag="input_image"):
    """An image in a message, as the Responses protocol names it."""

    image_url: str
    detail: str | None = None


class ImageSource(NamedTuple):
    """Where an image of a prompt is: an https, http or data URL."""

    url: str
    detail: str = ""


class ImagePart(Struct, tag_field="type", tag="image", omit_defaults=True):
    """An image of any protocol, as readers make it. The source is taken out of it before it goes to the tokenizer."""

    source: ImageSource | None = None
    kind: str = "`image_url` parts"  # what the client calls it
    param: str = "messages"  # where it is


MessageChunk = Annotated[
    TextChunk | ImageChunk | ResponsesTextChunk | ResponsesImageChunk | AnswerTextChunk | RefusalChunk,
    Meta(title="MessageChunk"),
]
MessageContent = Annotated[str | list[MessageChunk], Meta(title="MessageContent")]


class FunctionDefinition(Struct, omit_defaults=True):
    """A function that may be called (`parameters` is its JSON schema), or one that was (`arguments`). TGI takes both
    names for either."""

    name: str
    description: str | None = None
    arguments: Any = UNSET
    parameters: Any = UNSET
    strict: Annotated[
        bool | None, doc("Whether a keyword of `parameters` that cannot be enforced is an error, not a hint")
    ] = None


class ToolGrammar(Struct):
    """The texts that a custom tool takes."""

    definition: str
    syntax: Literal["lark", "regex"]


class CustomToolFormat(Struct):
    """What the input of a custom tool must match."""

    type: Literal["text", "grammar"]
    grammar: ToolGrammar | None = None

    def __post_init__(self) -> None:
        """Raises ShapeError if the grammar is missing."""
        if self.type == "grammar" and self.grammar is None:
            raise ShapeError("missing field `grammar`")


class CustomTool(Struct):
    """A tool whose input is text."""

    name: str
    description: str | None = None
    format: CustomToolFormat | None = None


class CustomCall(Struct):
    """A call of a custom tool."""

    name: str
    input: str


class Tool(Struct, omit_defaults=True):
    """What the model may call. The tokenizer and its templates know functions alone: see chat_prompt."""

    type: Annotated[str, doc("`function` or `custom`", example="function")]
    function: FunctionDefinition | None = None
    custom: CustomTool | None = None

    def __post_init__(self) -> None:
        """Raises MissingField if the member that belongs to the type is missing."""
        _check_member(self)

    @property
    def name(self) -> str:
        """Of the function or the custom tool."""
        named = self.function or self.custom
        assert named is not None
        return named.name


class ToolInMessages(Tool):
    """One that a message shows to the model. No client sends it: routes make it for the tokenizer."""

    in_messages: bool = False  # True wherever there is one


class ToolCall(Struct, omit_defaults=True):
    """What the model has called."""

    id: str
    type: str
    function: FunctionDefinition | None = None
    custom: CustomCall | None = None

    def __post_init__(self) -> None:
        """Raises ShapeError for a call without arguments, and MissingField for one without a function."""
        _check_member(self)
        if self.function and self.function.arguments is UNSET and self.function.parameters is UNSET:
            raise ShapeError("missing field `arguments`", "function")


def _check_member(tool: Tool | ToolCall) -> None:
    """Raises MissingField for a custom tool without `custom`, and any other without `function`."""
    if tool.function is None and (tool.type != "custom" or tool.custom is None):
        raise MissingField("custom" if tool.type == "custom" else "function")


class Message(Struct, omit_defaults=True):
    """One turn of a chat."""

    role: Annotated[str, doc(example="user")]
    content: Annotated[MessageContent | None, _BODY] = None
    name: Annotated[str | None, doc(example="David")] = None
    tool_calls: Annotated[list[ToolCall] | None, _BODY] = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: Annotated[str | None, doc("Another name of `reasoning_content`")] = None

    def __post_init__(self) -> None:
        """Raises ShapeError for a message without text and calls. Templates know `text` and `image` parts alone."""
        if self.content is None and self.tool_calls is None:
            raise ShapeError("data did not match any variant of untagged enum MessageBody")
        if isinstance(self.content, list):
            self.content = [*map(_part_for_templates, self.content)]


def _part_for_templates(part: Any) -> Any:
    match part:
        case ImageChunk(image_url=str(url)):
            return ImagePart(ImageSource(url))
        case ImageChunk(image_url=Url(url, detail)):
            return ImagePart(ImageSource(url, detail or ""))
        case ResponsesImageChunk(url, detail):
            return ImagePart(ImageSource(url, detail or ""), "`input_image` parts")
        case RefusalChunk(text) | ResponsesTextChunk(text) | AnswerTextChunk(text):
            return TextChunk(text)
    return part


class FunctionName(Struct):
    """Names a function or a custom tool."""

    name: str


class NamedTool(Struct):
    """A function or a custom tool that is among those given."""

    function: FunctionName | None = None
    type: Literal["function", "custom"] = "function"
    custom: FunctionName | None = None

    def __post_init__(self) -> None:
        """Raises ShapeError if the member that belongs to the type is missing."""
        if getattr(self, self.type) is None:
            raise ShapeError(f"missing field `{self.type}`")

    @property
    def name(self) -> str:
        """Of the tool."""
        name: str = getattr(self, self.type).name
        return name


class AllowedTools(Struct):
    """Those of the given tools that may be called now."""

    mode: Annotated[Literal["auto", "required"], doc("Whether one of them must be called")]
    tools: list[NamedTool]


class ToolChoiceObject(Struct):
    """The tool that must be called, or those that may be."""

    type: Literal["function", "custom", "allowed_tools"] = "function"
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None
    custom: FunctionName | None = None

    def __post_init__(self) -> None:
        """Raises ShapeError if the member that belongs to the type is missing."""
        if getattr(self, self.type) is None:
            raise ShapeError(f"missing field `{self.type}`")


ToolChoice = Annotated[
    str | ToolChoiceObject | list[str | NamedTool],
    Meta(
        title="ToolChoice",
        description="`none`: no tool is called. `auto`: the model chooses between a message and one or more calls. "
        "`required`: it calls at least one. Any other string, or an object, names the function that it must call; a "
        "list, those of which it must call one. `allowed_tools` takes OpenAI's objects of that type.\n"
        "<https://platform.openai.com/docs/guides/function-calling/configuring-function-calling-behavior-using-the-"
        "tool_choice-parameter>",
        examples=["auto"],
        extra={"untagged": "ToolTypeDeserializer"},
    ),
]


class ReasoningOptions(Struct):
    """Reasoning as OpenRouter's clients and those of OpenAI's Responses ask for it."""

    effort: Annotated[str | None, doc("The same as `reasoning_effort`", example="none")] = None
    enabled: Annotated[bool | None, doc("Switches reasoning on or off", example=False)] = None
    max_tokens: Annotated[UInt32 | None, doc("The same as `thinking_token_budget`")] = None


class ThinkingOptions(Struct):
    """Reasoning as clients of DeepSeek, GLM, Kimi and Anthropic ask for it."""

    type: Annotated[str | None, doc("`enabled` or `disabled`; anything else leaves it to the model")] = None
    budget_tokens: Annotated[UInt32 | None, doc("The same as `thinking_token_budget`")] = None


class ChatRequest(OpenAiRequest):
    """Body of POST /v1/chat/completions and /chat_tokenize."""

    messages: Annotated[
        list[Message],
        doc(
            "A list of messages comprising the conversation so far.",
            example=[{"role": "user", "content": "What is Deep Learning?"}],
        ),
    ]
    logprobs: Annotated[
        bool | None,
        doc(
            "Whether to return log probabilities of the output tokens or not. If true, returns the log probabilities "
            "of each output token returned in the content of message.",
            example=False,
        ),
    ] = None
    top_logprobs: Annotated[
        UInt32 | None,
        doc(
            "An integer between 0 and 20 specifying the number of most likely tokens to return at each token position, "
            "each with an associated log probability. logprobs must be set to true if this parameter is used.",
            example=5,
        ),
    ] = None
    tools: Annotated[
        list[Tool] | None,
        doc(
            "A list of tools the model may call: functions, for which it generates JSON, and custom tools, for which "
            "it generates text."
        ),
    ] = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: Annotated[
        bool | None, doc("Whether one message may call several tools, or one several times", example=True)
    ] = None
    tool_prompt: Annotated[
        str | None,
        doc(
            "A prompt to be appended before the tools",
            example="Given the functions available, please respond with a JSON for a function call with its proper "
            "arguments that best answers the given prompt. Respond in the format {name: function name, parameters: "
            "dictionary of argument name and its value}.Do not use variables.",
        ),
    ] = None
    # Fields that TGI lacks, of other servers
    add_generation_prompt: Annotated[
        bool | None, doc("Whether the prompt ends with what begins the assistant's turn")
    ] = None
    continue_final_message: Annotated[
        bool | None, doc("Whether the answer goes on with the last message instead of beginning a new one")
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, doc("Variables for the model's chat template", example={"enable_thinking": False})
    ] = None
    reasoning_effort: Annotated[
        str | None, doc("A variable for templates that read it; `none` switches reasoning off", example="none")
    ] = None
    verbosity: Annotated[str | None, doc("A variable for templates that read it", example="medium")] = None
    reasoning: ReasoningOptions | None = None
    thinking: ThinkingOptions | bool | None = None
    think: Annotated[bool | str | None, doc("Switches reasoning on or off, or the same as `reasoning_effort`")] = None
    enable_thinking: Annotated[bool | None, doc("Switches reasoning on or off", example=False)] = None
    thinking_token_budget: Annotated[
        Int32 | None,
        doc(
            "After this many tokens of reasoning its end is forced, and the answer follows; negative: no limit",
            example=1024,
        ),
    ] = None
    thinking_budget: Annotated[Int32 | None, doc("Another name of `thinking_token_budget`")] = None

    def __post_init__(self) -> None:
        """Raises ShapeError."""
        super().__post_init__()
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ShapeError("duplicate field `max_tokens`")

    @property
    def names(self) -> dict[str, str]:
        return super().names | {"top_n_tokens": "top_logprobs"}

    @property
    def custom_tools(self) -> frozenset[str]:
        """The names of the tools whose input is text."""
        return frozenset(tool.name for tool in self.tools or () if tool.function is None)

    @property
    def _reasoning_fields(self) -> dict[str, Any]:
        """`reasoning_effort` and `thinking` for the tokenizer, from the first field that asks for one."""
        reasoning = self.reasoning or ReasoningOptions()
        thinking = self.thinking
        if isinstance(thinking, ThinkingOptions):
            thinking = {"enabled": True, "disabled": False}.get(thinking.type or "")
        efforts = (self.reasoning_effort, reasoning.effort, self.think if isinstance(self.think, str) else None)
        switches = (reasoning.enabled, thinking, self.think, self.enable_thinking)
        effort = next((one for one in efforts if one is not None), None)
        switch = next((one for one in switches if isinstance(one, bool)), None)
        fields: dict[str, Any] = {} if (budget := self._thinking_budget) is None else {"thinking_budget": budget}
        if effort is None and switch is not None:
            return fields | ({"thinking": True} if switch else {"reasoning_effort": "none"})
        return fields if effort is None else fields | {"reasoning_effort": effort}

    @property
    def _thinking_budget(self) -> int | None:
        """The tokens of reasoning, from the first field that says it; None: no limit."""
        given = (
            self.thinking_token_budget,
            self.thinking_budget,
            None if self.reasoning is None else self.reasoning.max_tokens,
            self.thinking.budget_tokens if isinstance(self.thinking, ThinkingOptions) else None,
            (self.chat_template_kwargs or {}).get("thinking_budget"),
        )
        budget = next((one for one in given if type(one) is int), -1)
        return budget if 0 <= budget < 1 << 31 else None

    def chat(self, tools: Sequence[Tool], must_call: bool) -> bytes:
        """The chat as JSON for the tokenizer (keys: tokenizer/chat.py). `tools` are those that may be called."""
        names = [
            "add_generation_prompt", "continue_final_message", "chat_template_kwargs", "verbosity",
        ]  # fmt: skip
        chat: dict[str, Any] = {"messages": self.messages} | self._reasoning_fields
        if tools:
            chat |= {"tools": tools, "tool_choice": "required" if must_call else "auto"}
            names += ["tool_prompt", "parallel_tool_calls"]
        return msgspec.json.encode(chat | {name: given for name in names if (given := getattr(self, name)) is not None})
