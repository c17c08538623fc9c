"""POST /v1/chat/completions: the next message of a chat, whole or as a stream of deltas."""

from collections.abc import Collection, Mapping
from functools import partial
from json.encoder import encode_basestring as quote
from types import MappingProxyType

from falcon.asgi import Request, Response

from tgi.api import errors, request_metrics
from tgi.api.answer import Answer, VisibleText, incomplete_tool_call
from tgi.api.chat_prompt import ToolSelection, chat_prompt_json
from tgi.api.errors import ApiError
from tgi.api.float32 import float32_to_json
from tgi.api.generation import (
    AnswerFormatter,
    FinishedGeneration,
    PromptInput,
    answer_generations,
    create_generations,
)
from tgi.api.json_body import JsonBody
from tgi.api.openai_output import (
    DONE_EVENT,
    AssistantMessage,
    ResponseIdentity,
    TokenUsage,
    failure_events,
    finish_reason_json,
    top_n_tokens,
    with_running_usage,
)
from tgi.api.rejected_fields import FieldChecker
from tgi.api.request_parameters import RequestedSampling, apply_model_defaults, openai_generate_parameters
from tgi.api.requests import Generation
from tgi.api.resumption import response_key
from tgi.api.service import Resource, Service
from tgi.api.shapes.chat import ChatRequest
from tgi.api.token_columns import TokenColumns
from tgi.api.validation import OPENAI_RULES, check_rules
from tgi.microkernel.messages.protocol import End


class ChatFormatter(AnswerFormatter):
    """A stream has one chunk per token, each with one choice, and a last chunk with the usage if requested. Of an
    answer that consists of parts, a token has a chunk for each part, or one if it has none."""

    def __init__(
        self,
        generations: list[Generation],
        identity: ResponseIdentity,
        logprobs: bool,
        usage: bool,
        openai_errors: bool = True,
        running_usage: bool = False,
        custom_tools: Collection[str] = (),
    ) -> None:
        """With `running_usage` each event has the usage so far. Without `openai_errors` the events are TGI's, which
        always have a usage, null before the last. Calls of `custom_tools` have a text as their input."""
        self._generations = generations
        self._identity = identity
        self._openai_errors = openai_errors
        self._visible_texts = [VisibleText() for _ in generations]
        self._custom_tools = custom_tools
        self._messages = [self._message(index, Answer()) for index in range(len(generations))]
        self._chunk_start = f'data: {{{identity.members_json("chat.completion.chunk")},"choices":['
        self._choice_starts = [f'{self._chunk_start}{{"index":{index},"delta":{{' for index in range(len(generations))]
        self._logprobs = logprobs
        self._top_n = generations[0].message.sampling.top_n
        self._usage = TokenUsage(len(generations), details=openai_errors, reasoning=True) if usage else None
        self._running_usage = running_usage
        self._no_usage = ',"usage":null' if usage or not openai_errors else ""
        self._unsent_roles = dict.fromkeys(range(len(generations)), '"role":"assistant"')  # by index of the choice

    def opening_events(self) -> list[str]:
        """Opens all choices before the first token if there are several: clients expect them in order."""
        delta = "" if any(generation.has_parts for generation in self._generations) else '"content":""'
        choices = range(len(self._generations))
        return [self._event(index, delta) for index in choices] if len(choices) > 1 else []

    def token_events(self, index: int, columns: TokenColumns, end: End | None) -> list[str]:
        logprobs = (
            [f'{{"content":[{item}]}}' for item in logprob_items(self._generations[index], columns, self._top_n)]
            if self._logprobs
            else ()
        )
        if columns.parts:
            deltas, logprobs = self._messages[index].deltas(columns, end, logprobs)
            reason = self._messages[index].finish_reason_json(end)
        else:
            deltas = [f'"content":{quote(piece)}' for piece in self._visible_texts[index].pieces(columns, end)]
            reason = finish_reason_json(end)
        events = []
        last = len(deltas) - 1
        for at, delta in enumerate(deltas):
            events.append(
                self._event(index, delta, logprobs[at] if logprobs else "null", reason if at == last else "null")
            )
        if self._running_usage:
            events = with_running_usage(events, self._generations[index], len(columns.texts), self._no_usage)
        if end is not None and self._usage is not None:
            count, reasoning = self._generations[index].generated_count, self._messages[index].reasoning_tokens
            self._usage.add_generation(index, end, count, reasoning)
        return events

    def failure_events(self, error: ApiError) -> str:
        return failure_events(error, self._openai_errors)

    def closing_events(self) -> str:
        usage = f'{self._chunk_start}],"usage":{self._usage.to_json()}}}\n\n' if self._usage else ""
        return usage + DONE_EVENT

    async def response_json(self, finished: list[FinishedGeneration]) -> str:
        usage = TokenUsage(len(finished), details=self._openai_errors, reasoning=True)
        choices = []
        for index, (generation, end) in enumerate(finished):
            content, reason, reasoning_tokens = f'"content":{quote(end.text)}', finish_reason_json(end), 0
            if generation.has_parts:
                message = self._message(index, Answer.whole(generation, end))
                content, reason = message.members_json(), message.finish_reason_json(end)
                reasoning_tokens = message.reasoning_tokens
            usage.add_generation(index, end, generation.generated_count, reasoning_tokens)
            items = "null"
            if self._logprobs:
                token_items = logprob_items(generation, generation.take_tokens(), self._top_n)
                items = f'{{"content":[{",".join(token_items)}]}}'
            choices.append(
                f'{{"index":{index},"message":{{"role":"assistant",{content}}},"logprobs":{items},'
                f'"finish_reason":{reason}}}'
            )
        return self._identity.response_json("chat.completion", choices, usage)

    def _message(self, index: int, answer: Answer) -> AssistantMessage:
        return AssistantMessage(partial(self._identity.call_id, index), answer, self._custom_tools)

    def _event(self, index: int, delta: str, logprobs: str = "null", reason: str = "null") -> str:
        if self._unsent_roles and (role := self._unsent_roles.pop(index, "")):
            delta = f"{role},{delta}" if delta else role
        return (
            f'{self._choice_starts[index]}{delta}}},"logprobs":{logprobs},'
            f'"finish_reason":{reason}}}]{self._no_usage}}}\n\n'
        )


def logprob_items(generation: Generation, columns: TokenColumns, top_n: int) -> list[str]:
    """Each token with its logprob and the top-n tokens at its position. The bytes of a part of a character are its own;
    its text is what the stream shows for it."""

    def members(token: int, text: str, logprob: float) -> str:
        data = ",".join(map(str, own.get(token) or text.encode()))
        return f'"token":{quote(text)},"logprob":{float32_to_json(logprob)},"bytes":[{data}]'

    own, items = generation.partial_tokens, []
    for position, token in enumerate(zip(columns.ids, columns.texts, columns.logprobs, strict=True)):
        tops = ",".join(
            f"{{{members(top.id, top.text, top.logprob)}}}" for top in top_n_tokens(columns, position, top_n)
        )
        items.append(f'{{{members(*token)},"top_logprobs":[{tops}]}}')
    return items


class ChatResource(Resource):
    """POST /v1/chat/completions."""

    body = JsonBody(ChatRequest, FieldChecker(ChatRequest).check)

    async def on_post(self, req: Request, resp: Response) -> None:
        """Answers with one JSON object, or with a stream of events."""
        await self.answer(await self._service.read_generation_body(req, self.body), req, resp)

    async def answer(self, request: ChatRequest, req: Request, resp: Response) -> None:
        request_metrics.count_request(req)
        service = self._service
        generations = create_chat_generations(service, req, request)
        adapter = generations[0].message.sampling.adapter
        formatter = ChatFormatter(
            generations,
            ResponseIdentity.create(service, response_key(req), "chatcmpl", adapter),
            bool(request.logprobs),
            request.usage_wanted,
            service.has_openai_errors(req),
            request.running_usage_wanted,
            request.custom_tools,
        )
        choices = len(generations)
        await answer_generations(
            service, req, resp, generations, formatter, choices=choices, check_result=incomplete_tool_call
        )


def create_chat_generations(
    service: Service, req: Request, request: ChatRequest, names: Mapping[str, str] = MappingProxyType({})
) -> list[Generation]:
    """The generations of a chat, one for each choice. `names` maps TGI's parameter names where those of the request are
    not those of a ChatRequest. Raises ApiError as create_generations, and 422 for its tools."""
    apply_model_defaults(request, service.router.defaults)
    selection = ToolSelection.from_request(request)
    chat = chat_prompt_json(request, selection, images := service.new_images())
    check_rules(request, OPENAI_RULES)
    if selection.tools and service.settings.disable_grammar_support:
        raise errors.validation_error("grammar is not supported", param="tools")
    return create_generations(
        service,
        req,
        [PromptInput("", chat, images=images or ())],
        openai_generate_parameters(request, service.router.adapters),
        stream=bool(request.stream),
        choices=request.n or 1,
        hide_stop=not request.include_stop_str_in_output,
        sampling=RequestedSampling.from_openai(request, request.top_logprobs or 0),
        names={**request.names, **names},
    )
