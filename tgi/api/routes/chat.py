"""POST /v1/chat/completions: a chat goes in, the next message comes out, whole or in pieces."""

from collections import defaultdict
from json.encoder import encode_basestring as quote

from falcon.asgi import Request, Response

from tgi.api import accounting, answering, errors, openai
from tgi.api.answering import Finished, Prompt
from tgi.api.calls import Generation
from tgi.api.columns import Columns
from tgi.api.errors import ApiError
from tgi.api.fields import Fields
from tgi.api.float32 import render
from tgi.api.openai import Stamp, Usage, Visible, finish_reason, likeliest
from tgi.api.parts import Reply, unreadable
from tgi.api.serde import Body
from tgi.api.service import Service
from tgi.api.shapes.chat import ChatRequest
from tgi.api.steering import Steering
from tgi.api.tools import Offer
from tgi.api.validation import OPENAI, check
from tgi.kernel.messages import End


class ChatEvents:
    """One chunk per token, each with one choice; a last one with the usage if it is asked for. Of a divided answer a
    token has a chunk for each of its parts, or one if it has none."""

    def __init__(
        self, calls: list[Generation], stamp: Stamp, logprobs: bool, usage: bool, openai_errors: bool = True
    ) -> None:
        self._calls = calls
        self._openai_errors = openai_errors
        self._visible = [Visible() for _ in calls]
        self._replies: defaultdict[int, Reply] = defaultdict(Reply)  # of divided answers
        self._head = (
            f'data: {{"object":"chat.completion.chunk","id":{stamp.id},"created":{stamp.created},'
            f'"model":{stamp.model},"system_fingerprint":{stamp.fingerprint},"choices":['
        )
        self._heads = [f'{self._head}{{"index":{place},"delta":{{' for place in range(len(calls))]
        self._logprobs = logprobs
        self._top_n = calls[0].request.sampling.top_n
        self._usage = Usage(len(calls)) if usage else None
        self._roles = dict.fromkeys(range(len(calls)), '"role":"assistant"')  # of choices that have not begun

    def tokens(self, place: int, columns: Columns, end: End | None) -> list[str]:
        logprobs = [f'{{"content":[{item}]}}' for item in _logprobs(columns, self._top_n)] if self._logprobs else ()
        if columns.parts:
            deltas, logprobs = self._replies[place].deltas(columns, end, logprobs)
            reason = self._replies[place].finish_reason(end)
        else:
            deltas = [f'"content":{quote(piece)}' for piece in self._visible[place].pieces(columns, end)]
            reason = finish_reason(end)
        openings = self._openings("" if columns.parts else '"content":""') if self._roles else ""
        events = []
        last = len(deltas) - 1
        for at, delta in enumerate(deltas):
            events.append(
                self._event(place, delta, logprobs[at] if logprobs else "null", reason if at == last else "null")
            )
        if openings:
            events[0] = openings + events[0]
        if end is not None and self._usage is not None:
            self._usage.add(place, end, self._calls[place].generated)
        return events

    def failure(self, error: ApiError) -> str:
        return openai.failure(error, self._openai_errors)

    def close(self) -> str:
        usage = f'{self._head}],"usage":{self._usage.render()}}}\n\n' if self._usage else ""
        return usage + openai.DONE

    def _openings(self, delta: str) -> str:
        """Several choices are opened before the first token: clients expect them to appear in their order."""
        return "".join(self._event(place, delta) for place in [*self._roles]) if len(self._roles) > 1 else ""

    def _event(self, place: int, delta: str, logprobs: str = "null", reason: str = "null") -> str:
        if self._roles and (role := self._roles.pop(place, "")):
            delta = f"{role},{delta}" if delta else role
        return f'{self._heads[place]}{delta}}},"logprobs":{logprobs},"finish_reason":{reason}}}],"usage":null}}\n\n'


def render_response(finished: list[Finished], stamp: Stamp, logprobs: bool) -> str:
    """The JSON of a finished request."""
    usage = Usage(len(finished))
    choices = []
    for place, (call, end) in enumerate(finished):
        usage.add(place, end, call.generated)
        message, reason = f'"content":{quote(end.text)}', finish_reason(end)
        if call.divided:
            reply = Reply.of(call, end)
            message, reason = reply.message(), reply.finish_reason(end)
        items = (
            f'{{"content":[{",".join(_logprobs(call.take(), call.request.sampling.top_n))}]}}' if logprobs else "null"
        )
        choices.append(
            f'{{"index":{place},"message":{{"role":"assistant",{message}}},"logprobs":{items},'
            f'"finish_reason":{reason}}}'
        )
    return (
        f'{{"object":"chat.completion","id":{stamp.id},"created":{stamp.created},"model":{stamp.model},'
        f'"system_fingerprint":{stamp.fingerprint},"choices":[{",".join(choices)}],"usage":{usage.render()}}}'
    )


def _logprobs(columns: Columns, top_n: int) -> list[str]:
    """Each token with its logprob and the `top_n` likeliest at its place."""
    items = []
    for at, (text, logprob) in enumerate(zip(columns.texts, columns.logprobs, strict=True)):
        tops = ",".join(f"{{{_token(top.text, top.logprob)}}}" for top in likeliest(columns, at, top_n))
        items.append(f'{{{_token(text, logprob)},"top_logprobs":[{tops}]}}')
    return items


def _token(text: str, logprob: float) -> str:
    return f'"token":{quote(text)},"logprob":{render(logprob)},"bytes":[{",".join(map(str, text.encode()))}]'


class ChatResource:
    """POST /v1/chat/completions."""

    body = Body(ChatRequest, Fields(ChatRequest).check)

    def __init__(self, service: Service) -> None:
        self._service = service

    async def on_post(self, req: Request, resp: Response) -> None:
        """One JSON object, or a stream of events."""
        await self.answer(await self._service.read(req, self.body), req, resp)

    async def answer(self, request: ChatRequest, req: Request, resp: Response) -> None:
        """The same for a body that has been read."""
        accounting.arrived()
        calls = generations(self._service, request)
        stamp = Stamp.new(self._service, "chatcmpl", calls[0].request.sampling.adapter)
        if request.stream:
            openai_errors = self._service.has_openai_errors(req)
            events = ChatEvents(calls, stamp, bool(request.logprobs), request.usage_wanted, openai_errors)
            await answering.stream(self._service, req, resp, calls, events, len(calls))
            return
        finished = await answering.finish(self._service, req, calls, unreadable)
        answering.set_headers(self._service, resp, finished, len(finished))
        resp.text = render_response(finished, stamp, bool(request.logprobs))


def generations(service: Service, request: ChatRequest) -> list[Generation]:
    """The generations of a chat, one for each choice. Raises ApiError if they may not be computed."""
    openai.fill_in(request, service.router.defaults)
    offer = Offer.of(request)
    chat = openai.chat_prompt(request, offer)
    check(request, OPENAI)
    if offer.tools and service.settings.disable_grammar_support:
        raise errors.validation("grammar is not supported", param="tools")
    top_n = request.top_logprobs or 0
    p = openai.parameters(request, service.router.adapters, request.max_new_tokens, top_n)
    choices = request.n or 1
    return answering.generations(
        service,
        [Prompt("", chat)],
        p,
        stream=bool(request.stream),
        choices=choices,
        hide_stop=not request.include_stop_str_in_output,
        steering=Steering.of(request),
        names=request.names,
    )
