"""POST /v1/messages and /v1/messages/count_tokens: chats in Anthropic's protocol. The body is read as a ChatRequest,
and the answer is written as content blocks, whole or as events."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
from falcon.asgi import Request, Response

from tgi.api import errors, request_metrics
from tgi.api.answer import Answer, Outcome, StopStringMatch
from tgi.api.errors import ApiError
from tgi.api.generation import AnswerFormatter, FinishedGeneration, answer_generations
from tgi.api.json_body import JsonBody
from tgi.api.rejected_fields import MESSAGES_FIELDS, FieldChecker
from tgi.api.requests import Generation
from tgi.api.resumption import ResponseKey, response_key
from tgi.api.routes.chat import create_chat_generations
from tgi.api.routes.tokenize import input_tokens
from tgi.api.service import Resource, answer_json
from tgi.api.shapes import messages as shapes
from tgi.api.shapes.chat import (
    ChatRequest,
    FunctionDefinition,
    ImagePart,
    ImageSource,
    Message,
    TextChunk,
    Tool,
    ToolCall,
    ToolInMessages,
)
from tgi.api.shapes.messages import CountTokensRequest, MessagesRequest
from tgi.api.shapes.native import GrammarType
from tgi.api.sse import named_event
from tgi.api.token_columns import TokenColumns
from tgi.microkernel.messages.protocol import AnswerPart, End, PartKind

# Claude Code begins its system prompt with such a block, whose content differs in each request: the prefix cache would
# never find the prompt.
BILLING_BLOCK = "x-anthropic-billing-header:"
# The names of parameters in this protocol, for error messages.
NAMES = {"stop": "stop_sequences", "grammar": "output_config.format"}

_PING = named_event(shapes.PingEvent())


def chat_request(request: CountTokensRequest) -> ChatRequest:
    """The request as a chat. Raises ApiError: 422 for what is not supported."""
    choice = request.tool_choice or shapes.ToolUseChoice("auto")
    output = request.output_config or shapes.OutputConfig()
    form = output.format or request.output_format
    parallel = choice.disable_parallel_tool_use
    tools = OfferedTools(request.tools or [])
    messages = _merged(_chat_messages(message, tools) for message in request.messages)
    chat = ChatRequest(
        messages=[*_system(request.system), *messages],
        model=request.model,
        tools=tools.offered or None,
        tool_choice=_tool_choice(choice) if request.tool_choice is not None else None,
        parallel_tool_calls=None if parallel is None else not parallel,
        response_format=None if form is None else GrammarType("json_schema", json_schema={"schema": form.schema}),
        reasoning_effort=output.effort,
    )
    match None if request.thinking is None else request.thinking.type:
        case "enabled":
            chat.thinking = True
        case "disabled":
            chat.reasoning_effort = "none"
        case None:
            chat.reasoning_effort = output.effort or "none"
    chat.thinking_token_budget = budget = None if request.thinking is None else request.thinking.budget_tokens
    if isinstance(request, MessagesRequest):
        chat.max_tokens = request.max_tokens
        chat.stop = request.stop_sequences
        chat.stream = request.stream
        for name in ("temperature", "top_k", "top_p"):
            setattr(chat, name, getattr(request, name))
        if budget is not None and not 0 < budget < request.max_tokens:
            text = f"`thinking.budget_tokens` must be > 0 and < `max_tokens`. Given: {budget}"
            raise errors.validation_error(text, param="thinking.budget_tokens")
    return chat


def _system(system: str | list[shapes.TextBlock] | None) -> list[Message]:
    blocks = [shapes.TextBlock(system)] if isinstance(system, str) else system or []
    texts = [block.text for block in blocks if not block.text.startswith(BILLING_BLOCK)]
    return [Message("system", "\n".join(texts))] if texts else []


class OfferedTools:
    """The tools that the model may call, as the messages of a request leave them.

    A tool with `defer_loading` is shown to the model where a message loads it: the prompt before it stays as it was,
    and the prefix cache finds it.
    """

    def __init__(self, tools: Sequence[shapes.MessagesTool]) -> None:
        """Raises ApiError: 422 for a tool that is not served."""
        made = [(_tool(index, tool), tool) for index, tool in enumerate(tools)]
        self.offered = [one for one, tool in made if not tool.defer_loading]
        self._declared = {tool.name: tool for tool in tools}

    def load(self, tool: str | shapes.MessagesTool) -> str:
        """Offers a tool, or the one of this name. Returns the text that shows it. Raises ApiError: 422."""
        if isinstance(tool, str):
            if (found := self._declared.get(tool)) is None:
                raise errors.tool_error(
                    f"a message loads the tool `{tool[:64]}`, which `tools` does not list", "messages"
                )
            tool = found
        self._declared[tool.name] = tool
        loaded = _tool("messages", tool)
        if all(one.name != tool.name for one in self.offered):
            self.offered.append(ToolInMessages(loaded.type, loaded.function, in_messages=True))
        shown = {"description": tool.description or "", "name": tool.name, "parameters": tool.input_schema or {}}
        return f"<function>{msgspec.json.encode(shown).decode()}</function>"

    def remove(self, name: str) -> str:
        """Offers this tool no longer. Returns the text that says so."""
        self.offered = [one for one in self.offered if one.name != name]
        return f"The tool {name} is no longer available."


def _chat_messages(message: shapes.InputMessage, tools: OfferedTools) -> Iterator[Message]:
    """A turn as messages of a chat: each result of a call is one of its own, before the text that follows it."""
    said: list[TextChunk | ImagePart] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    blocks = [shapes.TextBlock(message.content)] if isinstance(message.content, str) else message.content
    for block in blocks:
        match block:
            case shapes.TextBlock(text):
                said.append(TextChunk(text))
            case shapes.ImageBlock(source):
                said.append(_image(source))
            case shapes.ThinkingBlock(thinking):
                thoughts.append(thinking)
            case shapes.RedactedThinkingBlock():
                pass
            case shapes.ToolUseBlock(id=call_id, name=name, input=given):
                calls.append(ToolCall(call_id, "function", FunctionDefinition(name, arguments=given)))
            case shapes.ToolResultBlock(tool_use_id=call_id, content=content):
                if said:
                    yield Message(message.role, _content(said))
                    said = []
                yield Message("tool", _result(content, tools), tool_call_id=call_id)
            case shapes.ToolAdditionBlock(tool=shapes.DefinedTool(tool) | shapes.ReferencedTool(tool)):
                said.append(TextChunk(tools.load(tool)))
            case shapes.ToolRemovalBlock(tool=shapes.ReferencedTool(name)):
                said.append(TextChunk(tools.remove(name)))
            case _:
                raise _unsupported(block)
    if said or calls or thoughts:
        content = _content(said) if said or not calls else None
        yield Message(
            message.role, content, tool_calls=calls or None, reasoning_content="\n".join(thoughts) if thoughts else None
        )


def _result(content: str | Sequence[shapes.ResultBlock] | None, tools: OfferedTools) -> Any:
    if content is None or isinstance(content, str):
        return content or ""
    said: list[TextChunk | ImagePart] = []
    for block in content:
        match block:
            case shapes.TextBlock(text):
                said.append(TextChunk(text))
            case shapes.ImageBlock(source):
                said.append(_image(source))
            case shapes.ToolReferenceBlock(name):
                said.append(TextChunk(tools.load(name)))
            case _:
                raise _unsupported(block)
    return _content(said)


def _content(said: Sequence[TextChunk | ImagePart]) -> Any:
    """One text, or parts if some are images. Adjacent texts are lines of one."""
    parts: list[TextChunk | ImagePart] = []
    for part in said:
        before = parts[-1] if parts else None
        if isinstance(part, TextChunk) and isinstance(before, TextChunk):
            parts[-1] = TextChunk(f"{before.text}\n{part.text}")
        else:
            parts.append(part)
    if not parts:
        return ""
    return parts[0].text if len(parts) == 1 and isinstance(parts[0], TextChunk) else parts


def _image(source: Any) -> ImagePart:
    """Raises ApiError: 422 for a source that is neither a URL nor base64."""
    match source:
        case {"type": "url", "url": str(url)}:
            return ImagePart(ImageSource(url), "`image` blocks")
        case {"type": "base64", "data": str(data)}:
            return ImagePart(ImageSource(f"data:{source.get('media_type')};base64,{data}"), "`image` blocks")
    raise errors.validation_error(
        "the `source` of an `image` block must have the type `base64` or `url`", param="messages"
    )


def _unsupported(block: msgspec.Struct) -> ApiError:
    kind = block.__struct_config__.tag
    return errors.validation_error(
        f"`{kind}` blocks are not supported: models read text and images here", param="messages"
    )


def _merged(turns: Iterable[Iterable[Message]]) -> list[Message]:
    """The messages of all turns. Adjacent ones of one role are one, as templates expect turns that alternate."""
    merged: list[Message] = []
    for message in (message for turn in turns for message in turn):
        before = merged[-1] if merged else None
        if (
            before is None
            or before.role != message.role
            or message.role == "tool"
            or before.tool_calls
            or message.reasoning_content
        ):
            merged.append(message)
            continue
        contents = [one.content for one in (before, message) if one.content is not None]
        said = [part for one in contents for part in ([TextChunk(one)] if isinstance(one, str) else one)]
        merged[-1] = Message(
            message.role,
            _content(said) if said else None,  # type: ignore[arg-type]
            tool_calls=message.tool_calls,
            reasoning_content=before.reasoning_content,
        )
    return merged


def _tool(where: int | str, tool: shapes.MessagesTool) -> Tool:
    if tool.type not in (None, "custom"):
        text = f"the tool `{tool.type}` is not served here: only tools with a name and an `input_schema` are"
        raise errors.tool_error(text, f"tools[{where}].type" if isinstance(where, int) else where)
    return Tool("function", FunctionDefinition(
        tool.name, tool.description, parameters=msgspec.UNSET if tool.input_schema is None else tool.input_schema,
        strict=tool.strict,
    ))  # fmt: skip


def _tool_choice(choice: shapes.ToolUseChoice) -> Any:
    match choice.type:
        case "any":
            return "required"
        case "tool":
            if choice.name is None:
                raise errors.tool_error("`tool_choice` of type `tool` needs the `name` of a tool", "tool_choice.name")
            return [choice.name]  # a list: a tool may be called `auto`
        case kind:
            return kind


class MessageFormatter(AnswerFormatter):
    """Content blocks in the order of the answer: thinking, text, calls. Each of its parts is a delta of a block."""

    keep_alive = _PING.encode()

    def __init__(self, generation: Generation, key: ResponseKey, model: str) -> None:
        self._generation = generation
        self._key = key
        self._model = model
        self._answer = Answer()
        self._stops = StopStringMatch(generation.message.stop_strings)
        self._open = ""  # the kind of the open block
        self._index = -1  # of the latest block
        self._calls = 0  # begun

    def opening_events(self) -> list[str]:
        """The message without content. How much of the prompt was cached is known at the end."""
        usage = shapes.MessageUsage(self._generation.prompt_tokens, 0, 0, 0)
        return [named_event(shapes.MessageStart(self._message([], None, None, usage)))]

    def token_events(self, index: int, columns: TokenColumns, end: End | None) -> list[str]:
        self._stops.add(columns)
        events = []
        for parts in self._answer.read(columns, end):
            self._answer.add(parts)
            for part in parts:
                events += self._part_events(part)
        if end is not None:
            events += self._close_block()
            reason, stop = self._stop_reason(end)
            usage = message_usage(end, self._generation.generated_count)
            events.append(named_event(shapes.MessageDelta(shapes.MessageEnding(reason, stop), usage)))
        return events

    def failure_events(self, error: ApiError) -> str:
        return f"event: error\ndata: {error.anthropic_body().decode()}\n\n"

    def closing_events(self) -> str:
        return named_event(shapes.MessageStop())

    async def response_json(self, finished: list[FinishedGeneration]) -> str:
        ((generation, end),) = finished
        answer = self._answer = Answer.whole(generation, end)
        self._stops.add(generation.take_tokens())
        content: list[shapes.AnswerBlock] = []
        if answer.reasoning:
            content.append(shapes.AnswerThinkingBlock(answer.reasoning, self._signature))
        if answer.text:
            content.append(shapes.AnswerTextBlock(answer.text))
        complete = answer.argument_error() is None
        for number, call in enumerate(answer.calls):
            whole = complete or number < len(answer.calls) - 1
            given = msgspec.json.decode(call.arguments) if whole else {}
            content.append(shapes.AnswerToolUseBlock(self._call_id(number), call.name, given))
        usage = message_usage(end, generation.generated_count)
        return msgspec.json.encode(self._message(content, *self._stop_reason(end), usage)).decode()

    def _message(
        self,
        content: list[shapes.AnswerBlock],
        reason: shapes.StopReason | None,
        stop: str | None,
        usage: shapes.MessageUsage,
    ) -> shapes.AnsweredMessage:
        return shapes.AnsweredMessage(
            id=f"msg_{self._key.response_id}", model=self._model, content=content, stop_reason=reason,
            stop_sequence=stop, usage=usage,
        )  # fmt: skip

    def _stop_reason(self, end: End) -> tuple[shapes.StopReason, str | None]:
        """Why the answer has ended, and the stop string that has ended it."""
        match self._answer.outcome(end):
            case Outcome.TOOL_CALLS:
                return "tool_use", None
            case Outcome.LENGTH:
                limit = self._generation.message.max_new_tokens
                full = limit is not None and self._generation.generated_count < limit
                return "model_context_window_exceeded" if full else "max_tokens", None
        stop = self._stops.find(end)
        return ("end_turn", None) if stop is None else ("stop_sequence", stop)

    @property
    def _signature(self) -> str:
        """Clients send blocks of thinking back only if they have one."""
        return self._key.hex_id("thinking")

    def _call_id(self, number: int) -> str:
        return f"toolu_{self._key.hex_id(f'call 0 {number}')}"

    def _part_events(self, part: AnswerPart) -> list[str]:
        delta: shapes.BlockDelta
        block: shapes.AnswerBlock
        match part.kind:
            case PartKind.TEXT:
                block, delta = shapes.AnswerTextBlock(""), shapes.BlockTextDelta(part.text)
            case PartKind.REASONING:
                block, delta = shapes.AnswerThinkingBlock("", ""), shapes.BlockThinkingDelta(part.text)
            case PartKind.CALL:
                call = shapes.AnswerToolUseBlock(self._call_id(self._calls), part.text, {})
                self._calls += 1
                return self._open_block(PartKind.CALL, call)
            case _:
                return [self._delta(shapes.BlockInputDelta(part.text))]
        if not part.text:
            return []
        opening = [] if self._open == part.kind else self._open_block(part.kind, block)
        return [*opening, self._delta(delta)]

    def _open_block(self, kind: str, block: shapes.AnswerBlock) -> list[str]:
        """Ends the open block and begins another. A ping follows the first one, as Anthropic's servers send it."""
        events = self._close_block()
        self._open = kind
        self._index += 1
        events.append(named_event(shapes.ContentBlockStart(self._index, block)))
        return events if self._index else [*events, _PING]

    def _close_block(self) -> list[str]:
        if not self._open:
            return []
        signed = self._open == PartKind.REASONING
        self._open = ""
        signature = [self._delta(shapes.BlockSignatureDelta(self._signature))] if signed else []
        return [*signature, named_event(shapes.ContentBlockStop(self._index))]

    def _delta(self, delta: shapes.BlockDelta) -> str:
        return named_event(shapes.ContentBlockDelta(self._index, delta))


def message_usage(end: End, generated_count: int) -> shapes.MessageUsage:
    """The counts of a whole answer. Nothing is written to the prefix cache at a client's wish."""
    return shapes.MessageUsage(end.prompt_tokens - end.cached_tokens, 0, end.cached_tokens, generated_count)


class MessagesResource(Resource):
    """POST /v1/messages."""

    body = JsonBody(MessagesRequest, FieldChecker(MessagesRequest, MESSAGES_FIELDS).check)

    async def on_post(self, req: Request, resp: Response) -> None:
        """Answers with one JSON object, or with a stream of events."""
        request = await self._service.read_generation_body(req, self.body)
        request_metrics.count_request(req)
        service = self._service
        (generation,) = create_chat_generations(service, req, chat_request(request), NAMES)
        model = generation.message.sampling.adapter or service.model_id
        formatter = MessageFormatter(generation, response_key(req), model)
        resp.set_header("request-id", req.context.request_id)
        await answer_generations(service, req, resp, [generation], formatter)


class CountTokensResource(Resource):
    """POST /v1/messages/count_tokens."""

    body = JsonBody(CountTokensRequest, FieldChecker(CountTokensRequest, MESSAGES_FIELDS).check)

    async def on_post(self, req: Request, resp: Response) -> None:
        """Answers with the number of tokens of the prompt, without generating."""
        request = chat_request(await self._service.read_body(req, self.body))
        count = await input_tokens(self._service, req, request)
        answer_json(resp, shapes.MessageTokensCount(count))
