"""POST /v1/responses: OpenAI's Responses. The items are read as a ChatRequest, and the answer is written as items,
whole or as events. stored_responses.py has the routes for what is kept."""

import base64
import binascii
import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from falcon.asgi import Request, Response
from msgspec import Raw

from tgi.api import errors, request_metrics
from tgi.api.answer import Answer, Outcome
from tgi.api.clients import Client
from tgi.api.custom_tools import CustomFormat, InputReader, custom_call, custom_tool
from tgi.api.errors import ApiError
from tgi.api.generation import FinishedGeneration, answer_generations
from tgi.api.json_body import JsonBody
from tgi.api.rejected_fields import RESPONSES_FIELDS, FieldChecker
from tgi.api.requests import Generation
from tgi.api.response_store import RUNNING, HistoryTooLong, Items, StoredResponse
from tgi.api.resumption import ResponseKey, response_key
from tgi.api.routes.chat import create_chat_generations, logprob_items
from tgi.api.routes.conversations import conversation_items
from tgi.api.routes.stored_responses import (
    StoredFormatter,
    StoredStream,
    background_response,
    stored_items,
)
from tgi.api.routes.tokenize import input_tokens
from tgi.api.service import Resource, Service, answer_json
from tgi.api.shapes import responses as shapes
from tgi.api.shapes.chat import (
    AllowedTools,
    ChatRequest,
    FunctionDefinition,
    FunctionName,
    ImagePart,
    ImageSource,
    Message,
    NamedTool,
    TextChunk,
    Tool,
    ToolCall,
    ToolChoiceObject,
)
from tgi.api.shapes.native import GrammarType
from tgi.api.shapes.openai_responses import InputTokens
from tgi.api.shapes.responses import InputItem, ResponsesRequest
from tgi.api.sqlite_store import StoreUnavailable
from tgi.api.sse import named_event
from tgi.api.token_columns import TokenColumns
from tgi.microkernel.messages.protocol import AnswerPart, DeploymentLimits, End, PartKind

log = logging.getLogger(__name__)

LOGPROBS, ENCRYPTED_REASONING = "message.output_text.logprobs", "reasoning.encrypted_content"
# The names of parameters in this protocol, for error messages.
NAMES = {"max_new_tokens": "max_output_tokens", "grammar": "text.format", "truncate": "truncation"}
# With `truncation: auto` and no limit of the answer, this much of the context is left for it, a quarter at most.
RESERVED_TOKENS = 1024


# --- the reader -------------------------------------------------------------------------------------------------------


def chat_request(
    request: ResponsesRequest, items: Sequence[InputItem], kept: int, limits: DeploymentLimits | None
) -> ChatRequest:
    """The request as a chat of these items, of which the first `kept` are those of earlier responses. Raises ApiError:
    422 for what is not supported."""
    text = request.text or shapes.TextConfig()
    reasoning = request.reasoning or shapes.ReasoningConfig()
    chat = ChatRequest(
        messages=chat_messages(request.instructions, items, kept),
        model=request.model,
        max_tokens=request.max_output_tokens,
        tools=list(_tools(request.tools or [])) or None,
        tool_choice=_tool_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=_grammar(text.format),
        reasoning_effort=reasoning.effort,
        verbosity=text.verbosity,
        stream=bool(request.stream or request.background),
        add_generation_prompt=True,  # a last message of the assistant is complete
        continue_final_message=False,
    )
    for name in ("temperature", "top_p"):
        setattr(chat, name, getattr(request, name))
    if request.top_logprobs is not None or LOGPROBS in (request.include or ()):
        chat.logprobs, chat.top_logprobs = True, request.top_logprobs
    if request.truncation == "auto" and limits is not None:
        reserved = request.max_output_tokens or min(RESERVED_TOKENS, limits.max_total_tokens // 4)
        chat.truncate_prompt_tokens = max(1, min(limits.max_input_tokens, limits.max_total_tokens - reserved))
    return chat


def chat_messages(instructions: str | None, items: Sequence[InputItem], kept: int = 0) -> list[Message]:
    """The messages of a chat. Adjacent reasoning, text and calls of the assistant are one message. Raises ApiError: 422
    for items that are not supported."""
    messages = [Message("system", instructions)] if instructions else []
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []

    def end_turn() -> None:
        if texts or thoughts or calls:
            content = "".join(texts) if texts or not calls else None
            messages.append(
                Message("assistant", content, tool_calls=[*calls] or None, reasoning_content="".join(thoughts) or None)
            )
        for column in (texts, thoughts, calls):
            column.clear()

    for index, item in enumerate(items, -kept):
        where = f"input[{index}]"
        match item.type or "message":
            case "message" if item.role == "assistant":
                texts.append(_text(item.content, where))
            case "message":
                end_turn()
                messages.append(Message(item.role or "user", _content(item.content, where)))
            case "reasoning":
                thoughts.append(_reasoning(item, where))
            case "function_call":
                call_id = item.call_id or item.id or ""
                if item.name is None:
                    raise errors.validation_error(f"`{where}` has no `name`", param=where)
                name = _full_name(item.namespace, item.name)
                function = FunctionDefinition(name, arguments=item.arguments or "{}")
                calls.append(ToolCall(call_id, "function", function))
            case "custom_tool_call":
                if item.name is None:
                    raise errors.validation_error(f"`{where}` has no `name`", param=where)
                name = _full_name(item.namespace, item.name)
                calls.append(custom_call(item.call_id or item.id or "", name, item.input or ""))
            case "function_call_output" | "custom_tool_call_output":
                end_turn()
                output = _content(item.output, where)
                if isinstance(output, list) and all(isinstance(part, TextChunk) for part in output):
                    output = "".join(part.text for part in output)
                messages.append(Message("tool", output, tool_call_id=item.call_id))
            case kind:
                text = f"items of type `{kind[:64]}` are not supported by this server"
                raise errors.validation_error(text, param=f"{where}.type")
    end_turn()
    return messages


def _text(content: str | list[shapes.InputPart] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(_part_text(part, where) for part in content)


def _content(content: str | list[shapes.InputPart] | None, where: str) -> Any:
    """Text, or parts of which some may be images."""
    if isinstance(content, str):
        return content
    parts: list[Any] = [
        TextChunk(_part_text(part, where))
        if part.type != "input_image" or part.image_url is None
        else ImagePart(ImageSource(part.image_url, part.detail or ""), "`input_image` parts", where)
        for part in content or []
    ]
    return parts[0].text if len(parts) == 1 and isinstance(parts[0], TextChunk) else parts


def _part_text(part: shapes.InputPart, where: str) -> str:
    text = part.refusal if part.text is None else part.text
    if text is None:
        detail = f"`{part.type[:64]}` parts are not supported: models read text and images here"
        raise errors.validation_error(detail, param=where)
    return text


def _reasoning(item: InputItem, where: str) -> str:
    """What the model has thought, in whichever form it was sent back."""
    if item.content:
        return _text(item.content, where)
    if item.encrypted_content:
        try:
            return base64.b64decode(item.encrypted_content, validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            return ""  # of another server, which cannot be read here
    return "".join(_part_text(part, where) for part in item.summary or [])


def _tools(given: Sequence[shapes.ToolOfNamespace], where: str = "tools", namespace: str = "") -> Iterator[Tool]:
    """The tools as functions, also those of namespaces, whose names the model knows with that of the namespace in
    front."""
    for index, tool in enumerate(given):
        place, name = f"{where}[{index}]", _full_name(namespace, tool.name)
        if isinstance(tool, shapes.ResponsesTool) and tool.type == "namespace" and tool.name:
            yield from _tools(tool.tools or (), f"{place}.tools", tool.name)
        elif tool.type == "custom":
            yield _custom_tool(tool, name, place)
        elif tool.type == "function":
            yield Tool("function", FunctionDefinition(
                name, tool.description, strict=tool.strict,
                parameters=msgspec.UNSET if tool.parameters is None else tool.parameters,
            ))  # fmt: skip
        else:
            text = f"the tool `{tool.type[:64]}` is not served here: only tools of type `function` and `custom` are"
            raise errors.tool_error(text, f"{place}.type")


def _custom_tool(tool: shapes.ToolOfNamespace, name: str, where: str) -> Tool:
    form = tool.format or shapes.ToolFormat()
    given = CustomFormat(form.syntax or "", form.definition or "") if form.type == "grammar" else None
    return custom_tool(name, tool.description, given, f"{where}.format")


def _grouped_tools(given: Sequence[shapes.ResponsesTool]) -> Iterator[tuple[str, shapes.ToolOfNamespace]]:
    """Each tool with the name of its namespace, or ""."""
    for one in given:
        if one.type == "namespace":
            yield from ((one.name or "", tool) for tool in one.tools or ())
        else:
            yield "", one


def _full_name(namespace: str | None, name: str | None) -> str:
    """By which the model knows a function. Names in OpenAI's protocol have no dot."""
    return f"{namespace}.{name}" if namespace and name else name or ""


def _tool_choice(choice: str | shapes.ResponsesToolChoice | None) -> Any:
    if not isinstance(choice, shapes.ResponsesToolChoice):
        if choice not in (None, "none", "auto", "required"):
            raise errors.tool_error("`tool_choice` is `none`, `auto`, `required` or an object", "tool_choice")
        return choice
    for kind in (choice.type, *(tool.type for tool in choice.tools or [])):
        if kind not in ("function", "custom", "allowed_tools"):
            raise errors.tool_error(f"the tool `{kind[:64]}` is not served here", "tool_choice.type")
    if choice.type != "allowed_tools":
        return [choice.name or ""]  # a list: a function may be called `auto`
    allowed = [NamedTool(FunctionName(tool.name or "")) for tool in choice.tools or []]
    return ToolChoiceObject("allowed_tools", allowed_tools=AllowedTools(choice.mode or "auto", allowed))


def _grammar(form: shapes.TextFormat | None) -> GrammarType | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return GrammarType("json_object")
    return GrammarType("json_schema", json_schema={"schema": form.schema, "name": form.name})


# --- the formatter ----------------------------------------------------------------------------------------------------


class ResponseFormatter(StoredFormatter):
    """Items in the order of the answer: reasoning, a message, calls. A whole response is what its events add up to."""

    def __init__(self, generation: Generation, key: ResponseKey, response: shapes.ResponseObject) -> None:
        self.response = response
        self.next_number = 0  # of the next event
        self._generation = generation
        self._key = key
        self._answer = Answer()
        self._item: shapes.OutputItem | None = None  # not yet complete
        self._pieces: list[str] = []  # of its text
        self._logprobs: list[Raw] = []  # of its text
        self._wants_logprobs = False
        self._as_summary = False
        self._encrypted = False
        self._namespaces: dict[str, tuple[str, str]] = {}  # and names of the tools in them, by their full names
        self._custom_tools: set[str] = set()  # full names
        self._input = InputReader()  # of the open call of a custom tool

    def configure(self, request: ResponsesRequest) -> "ResponseFormatter":
        """Applies what the request asks for besides the answer."""
        include, reasoning = request.include or (), request.reasoning or shapes.ReasoningConfig()
        self._wants_logprobs = request.top_logprobs is not None or LOGPROBS in include
        self._encrypted = ENCRYPTED_REASONING in include
        self._as_summary = bool(reasoning.summary or reasoning.generate_summary)
        for group, tool in _grouped_tools(request.tools or ()):
            full_name = _full_name(group, tool.name)
            if tool.type == "custom":
                self._custom_tools.add(full_name)
            if group and tool.name:
                self._namespaces[full_name] = group, tool.name
        return self

    def opening_events(self) -> list[str]:
        events = [self._event(shapes.ResponseCreated, response=self.response)]
        if self.response.background:
            events.append(self._event(shapes.ResponseQueued, response=self.response))
        self.response.status = "in_progress"
        return [*events, self._event(shapes.ResponseInProgress, response=self.response)]

    def token_events(self, index: int, columns: TokenColumns, end: End | None) -> list[str]:
        events = []
        logprobs = (
            logprob_items(self._generation, columns, self._generation.message.sampling.top_n)
            if self._wants_logprobs
            else ()
        )
        for position, parts in enumerate(self._answer.read(columns, end)):
            self._answer.add(parts)
            told = [Raw(logprobs[position].encode())] if logprobs else []
            for part in parts:
                if part.text:
                    events += self._part_events(part, told)
                    told = [] if part.kind == PartKind.TEXT else told
        if end is not None:
            length = self._answer.outcome(end) is Outcome.LENGTH
            events += self._close_item("incomplete" if length else "completed")
            self._complete(end, length)
        return events

    def failure_events(self, error: ApiError) -> str:
        self.response.status = "failed"
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        self.response.error = shapes.ResponseFailure("invalid_prompt" if error.status == 422 else code, error.message)
        return self._event(shapes.ResponseFailed, response=self.response)

    def closing_events(self) -> str:
        completed = self.response.status == "completed"
        kind = shapes.ResponseCompleted if completed else shapes.ResponseIncomplete
        return self._event(kind, response=self.response)

    async def response_json(self, finished: list[FinishedGeneration]) -> str:
        ((generation, end),) = finished
        self.token_events(0, generation.take_tokens(), end)
        return msgspec.json.encode(self.response).decode()

    def _event(self, kind: type[msgspec.Struct], **members: Any) -> str:
        event = named_event(kind(sequence_number=self.next_number, **members))
        self.next_number += 1
        return event

    def _complete(self, end: End, length: bool) -> None:
        response, generated = self.response, self._generation.generated_count
        response.status = "incomplete" if length else "completed"
        response.incomplete_details = shapes.IncompleteDetails("max_output_tokens") if length else None
        response.completed_at = None if length else int(time.time())
        response.usage = shapes.ResponseUsage(
            end.prompt_tokens,
            shapes.CachedInputTokens(end.cached_tokens),
            generated,
            shapes.ReasonedOutputTokens(self._answer.reasoning_tokens),
            end.prompt_tokens + generated,
        )

    def _part_events(self, part: AnswerPart, logprobs: list[Raw]) -> list[str]:
        """The events of the next part, which is not empty."""
        events = []
        match part.kind:
            case PartKind.TEXT:
                if not isinstance(self._item, shapes.MessageItem):
                    events = self._close_item("completed")
                    events += self._open_item(shapes.MessageItem(self._id("msg"), "in_progress", []))
                    added = shapes.OutputText("")
                    events.append(self._event(shapes.ContentPartAdded, **self._place, content_index=0, part=added))
                self._logprobs += logprobs
                delta = self._event(
                    shapes.OutputTextDelta, **self._place, content_index=0, delta=part.text, logprobs=logprobs
                )
            case PartKind.REASONING:
                if not isinstance(self._item, shapes.ReasoningItem):
                    events = self._close_item("completed")
                    events += self._open_item(shapes.ReasoningItem(self._id("rs"), "in_progress", [], []))
                    events.append(self._reasoning_event("part added", ""))
                delta = self._reasoning_event("delta", part.text)
            case PartKind.CALL:
                events = self._close_item("completed")
                call_id = f"call_{self._key.hex_id(f'call 0 {len(self.response.output)}')}"
                namespace, name = self._namespaces.get(part.text, (msgspec.UNSET, part.text))
                call: shapes.OutputItem = shapes.CallItem(self._id("fc"), "in_progress", call_id, name, "", namespace)
                if part.text in self._custom_tools:
                    call = shapes.CustomCallItem(self._id("ctc"), "in_progress", call_id, name, "", namespace)
                    self._input = InputReader()
                return [*events, *self._open_item(call)]
            case _ if isinstance(self._item, shapes.CustomCallItem):
                if not (text := self._input.read(part.text)):
                    return []
                self._pieces.append(text)
                return [self._event(shapes.CustomInputDelta, **self._place, delta=text)]
            case _:
                delta = self._event(shapes.CallArgumentsDelta, **self._place, delta=part.text)
        self._pieces.append(part.text)
        return [*events, delta]

    def _open_item(self, item: shapes.OutputItem) -> list[str]:
        self._item = item
        return [self._event(shapes.OutputItemAdded, output_index=len(self.response.output), item=item)]

    def _close_item(self, status: shapes.ItemStatus) -> list[str]:
        item, text = self._item, "".join(self._pieces)
        events = []
        match item:
            case None:
                return []
            case shapes.MessageItem():
                part = shapes.OutputText(text, [], self._logprobs)
                item.content = [part]
                events.append(self._event(
                    shapes.OutputTextDone, **self._place, content_index=0, text=text, logprobs=self._logprobs
                ))  # fmt: skip
                events.append(self._event(shapes.ContentPartDone, **self._place, content_index=0, part=part))
            case shapes.ReasoningItem():
                events += [self._reasoning_event("done", text), self._reasoning_event("part done", text)]
                if self._as_summary:
                    item.summary = [shapes.OutputSummaryText(text)]
                else:
                    item.content = [shapes.OutputReasoningText(text)]
                if self._encrypted:
                    item.encrypted_content = base64.b64encode(text.encode()).decode()
            case shapes.CallItem():
                item.arguments = text
                events.append(self._event(shapes.CallArgumentsDone, **self._place, name=item.name, arguments=text))
            case shapes.CustomCallItem():
                item.input = text
                events.append(self._event(shapes.CustomInputDone, **self._place, input=text))
        item.status = status
        events.append(self._event(shapes.OutputItemDone, output_index=len(self.response.output), item=item))
        self.response.output.append(item)
        self._item, self._pieces, self._logprobs = None, [], []
        return events

    def _reasoning_event(self, what: str, text: str) -> str:
        kind, part, member = REASONING_EVENTS[what, self._as_summary]
        index = {"summary_index" if self._as_summary else "content_index": 0}
        return self._event(kind, **self._place, **index, **{member: text if part is None else part(text)})

    @property
    def _place(self) -> dict[str, Any]:
        """Where the open item is."""
        assert self._item is not None
        return {"item_id": self._item.id, "output_index": len(self.response.output)}

    def _id(self, prefix: str) -> str:
        """The id of the next item."""
        return f"{prefix}_{self._key.hex_id(f'item {len(self.response.output)}')}"


# The events of reasoning, as it is or as its summary: the type, what wraps the text, and the member that has it.
REASONING_EVENTS: dict[tuple[str, bool], tuple[type[msgspec.Struct], type[msgspec.Struct] | None, str]] = {
    ("part added", False): (shapes.ContentPartAdded, shapes.OutputReasoningText, "part"),
    ("delta", False): (shapes.ReasoningTextDelta, None, "delta"),
    ("done", False): (shapes.ReasoningTextDone, None, "text"),
    ("part done", False): (shapes.ContentPartDone, shapes.OutputReasoningText, "part"),
    ("part added", True): (shapes.SummaryPartAdded, shapes.OutputSummaryText, "part"),
    ("delta", True): (shapes.SummaryTextDelta, None, "delta"),
    ("done", True): (shapes.SummaryTextDone, None, "text"),
    ("part done", True): (shapes.SummaryPartDone, shapes.OutputSummaryText, "part"),
}


# --- the route --------------------------------------------------------------------------------------------------------


class ResponsesResource(Resource):
    """POST /v1/responses."""

    body = JsonBody(ResponsesRequest, FieldChecker(ResponsesRequest, RESPONSES_FIELDS).check)

    async def on_post(self, req: Request, resp: Response) -> None:
        """Answers with one JSON object, or with a stream of events."""
        request = await self._service.read_generation_body(req, self.body)
        request_metrics.count_request(req)
        service, client = self._service, req.context.client
        stored = request.store is not False and service.responses.ttl > 0
        if request.background and not stored:
            text = "`background` needs `store`, and a server with --response-ttl above 0"
            raise errors.validation_error(text, param="background")
        conversation_id, history = await self._history(client, request)
        previous = request.previous_response_id
        key = response_key(req, resumable=bool(request.stream and service.settings.resume_window))
        given = stored_items(request.input, key)
        items = msgspec.convert([*history, *given], list[InputItem])
        chat = chat_request(request, items, len(history), service.router.limits)
        (generation,) = create_chat_generations(service, req, chat, NAMES)
        model = generation.message.sampling.adapter or service.model_id
        response = empty_response(request, key, model, stored, conversation_id)
        formatter = ResponseFormatter(generation, key, response).configure(request)
        record = StoredResponse(
            response.id, client.name, previous, response.status, "", msgspec.json.encode(given).decode(),
            streamed=bool(request.stream), background=bool(request.background), beat=time.time(),
        )  # fmt: skip

        async def keep() -> None:
            """Keeps the response once it is complete, before its client knows. It is answered in any case."""
            try:
                await service.responses.put(formatter.complete(record), conversation_id)
            except StoreUnavailable as error:
                log.error("The response %s is not kept: %s", response.id, error)
                response.store = False

        if request.background:
            await background_response(service, req, resp, generation, formatter, record, conversation_id)
            return
        await answer_generations(service, req, resp, [generation], formatter)
        if stored and request.stream:
            resp.stream = StoredStream(resp.stream, lambda: response.status not in RUNNING, keep)
        elif stored:
            await keep()
            resp.data, resp.text = msgspec.json.encode(response), None

    async def _history(self, client: Client, request: ResponsesRequest) -> tuple[str | None, Items]:
        """The conversation that a request names, and the items before its own. Raises ApiError."""
        conversation, previous = request.conversation, request.previous_response_id
        conversation_id = conversation if conversation is None or isinstance(conversation, str) else conversation.id
        if conversation_id is not None:
            if previous is not None:
                text = "`previous_response_id` and `conversation` exclude each other"
                raise errors.validation_error(text, param="previous_response_id")
            return conversation_id, await conversation_items(self._service, client.name, conversation_id)
        return None, [] if previous is None else await read_history(self._service, client, previous)


class ResponseInputTokensResource(ResponsesResource):
    """POST /v1/responses/input_tokens."""

    async def on_post(self, req: Request, resp: Response) -> None:
        """Answers with the number of tokens of the prompt, without generating."""
        request = await self._service.read_body(req, self.body)
        request_metrics.count_request(req)
        service = self._service
        _, history = await self._history(req.context.client, request)
        given = stored_items(request.input, response_key(req))
        items = msgspec.convert([*history, *given], list[InputItem])
        chat = chat_request(request, items, len(history), service.router.limits)
        count = await input_tokens(service, req, chat)
        answer_json(resp, InputTokens(count))


async def read_history(service: Service, client: Client, response_id: str) -> Items:
    """The items of a stored response and of those before it. Raises ApiError: 404 if one is not kept, 422 if it is not
    complete, or if they are longer than a body may be."""
    param = "previous_response_id"
    found = await service.responses.get(client.name, response_id)
    if found is not None and found.status in RUNNING:
        raise errors.validation_error(f"the response {response_id} is not complete", param=param)
    limit = service.settings.payload_limit
    try:
        history = None if found is None else await service.responses.history(client.name, response_id, limit)
    except HistoryTooLong:
        text = f"the conversation is longer than a request may be: {limit} bytes (--payload-limit)"
        raise errors.validation_error(text, param=param) from None
    if history is None:
        raise errors.not_kept("response", response_id, param)
    return history


def empty_response(
    request: ResponsesRequest, key: ResponseKey, model: str, stored: bool, conversation_id: str | None
) -> shapes.ResponseObject:
    """The response before its first token."""
    text = request.text or shapes.TextConfig()
    form = text.format or shapes.TextFormat()
    return shapes.ResponseObject(
        id=f"resp_{key.response_id}",
        created_at=key.created,
        status="queued" if request.background else "in_progress",
        background=bool(request.background),
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        model=model,
        output=[],
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        conversation=None if conversation_id is None else shapes.ConversationReference(conversation_id),
        reasoning=request.reasoning or shapes.ReasoningConfig(),
        store=stored,
        temperature=request.temperature,
        text=msgspec.to_builtins(text) | {"format": {"type": form.type} | msgspec.to_builtins(form)},
        tool_choice="auto" if request.tool_choice is None else request.tool_choice,
        tools=[*(request.tools or [])],
        top_logprobs=request.top_logprobs or 0,
        top_p=request.top_p,
        truncation=request.truncation or "disabled",
        metadata=request.metadata or {},
    )
