"""What POST /v1/responses has stored: GET and DELETE /v1/responses/{id}, its input items, background responses (their
stream, cancel). All is the client's own."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from operator import itemgetter
from typing import Any

import msgspec
from falcon.asgi import Request, Response

from tgi.api import errors
from tgi.api.asgi import RECEIVE_KEY, DisconnectWatcher
from tgi.api.clients import Client
from tgi.api.generation import AnswerFormatter
from tgi.api.requests import Generation
from tgi.api.response_store import BEAT_SECONDS, RUNNING, Items, ResponseStore, StoredResponse
from tgi.api.resumption import ResponseKey
from tgi.api.service import Resource, Service, answer_json
from tgi.api.shapes import responses as shapes
from tgi.api.shapes.types import Page
from tgi.api.sse import KEEP_ALIVE_EVENT, KEEP_ALIVE_SECONDS, EventStream

# Between two looks for new events of a background response, which any front end may compute.
POLL_SECONDS = 0.05
# Of one answer to GET /v1/responses/{id}/input_items.
DEFAULT_ITEMS, MAX_ITEMS = 20, 100


class StoredFormatter(AnswerFormatter):
    """The formatter of a response that may be kept."""

    response: shapes.ResponseObject
    next_number: int  # of the next event

    def complete(self, record: StoredResponse) -> StoredResponse:
        """What is kept of the response as it is now."""
        body, output = (msgspec.json.encode(part).decode() for part in (self.response, self.response.output))
        return record._replace(status=self.response.status, body=body, output=output)


class StoredStream:
    """A stream of events whose response is kept before its last event is sent."""

    def __init__(self, stream: Any, ended: Callable[[], bool], keep: Callable[[], Awaitable[None]]) -> None:
        self._stream = stream
        self._ended = ended
        self._keep = keep
        self._kept = False

    def __aiter__(self) -> "StoredStream":
        return self

    async def __anext__(self) -> bytes:
        chunk: bytes = await anext(self._stream)
        if not self._kept and self._ended():
            self._kept = True
            await self._keep()
        return chunk

    async def close(self) -> None:
        """Called by falcon at the end of the iteration, also after an exception."""
        await self._stream.close()


class StoredEvents:
    """The events of a background response from one on, as they are stored, until it ends or its client has left."""

    def __init__(self, store: ResponseStore, stored: StoredResponse, first: int, watcher: DisconnectWatcher) -> None:
        self._store = store
        self._stored = stored
        self._next = first  # sequence number
        self._watcher = watcher

    def __aiter__(self) -> "StoredEvents":
        return self

    async def __anext__(self) -> bytes:
        loop = asyncio.get_running_loop()
        quiet_until = loop.time() + KEEP_ALIVE_SECONDS
        ended = False
        while not self._watcher.disconnected:
            if text := await self._read():
                return text.encode()
            if ended:
                break
            found = await self._store.get(self._stored.owner, self._stored.id)
            ended = found is None or found.lost or found.status not in RUNNING  # its last events are read once more
            if not ended:
                await asyncio.sleep(POLL_SECONDS)
                if loop.time() > quiet_until:
                    return KEEP_ALIVE_EVENT
        raise StopAsyncIteration

    async def _read(self) -> str:
        text = []
        for number, piece in await self._store.events(self._stored.id, self._next):
            events = [f"{event}\n\n" for event in piece.split("\n\n")[:-1]]
            text += events[max(0, self._next - number) :]
            self._next = max(self._next, number + len(events))
        return "".join(text)

    async def close(self) -> None:
        """Called by falcon at the end of the iteration, also after an exception."""
        self._watcher.close()


async def background_response(
    service: Service,
    req: Request,
    resp: Response,
    generation: Generation,
    formatter: StoredFormatter,
    record: StoredResponse,
    conversation_id: str | None,
) -> None:
    """Answers at once and computes the response without its client, to be read with GET. Its stream is what is stored.

    Raises ApiError as Router.submit.
    """
    watcher = service.submit([generation], req, detached=True)
    stream = EventStream([generation], formatter, watcher, service.cancel)
    body = msgspec.json.encode(formatter.response)
    try:
        await service.responses.put(record._replace(body=body.decode()))
    except BaseException:
        await stream.close()
        raise
    service.run_in_background(_compute(service, stream, watcher, generation, formatter, record, conversation_id))
    if record.streamed:
        watcher = DisconnectWatcher(req.scope[RECEIVE_KEY], lambda: None)
        _set_stream(resp, StoredEvents(service.responses, record, 0, watcher))
        return
    resp.content_type, resp.data = "application/json", body


def _set_stream(resp: Response, events: StoredEvents) -> None:
    resp.content_type = "text/event-stream"
    resp.set_headers({"x-accel-buffering": "no", "cache-control": "no-cache"})
    resp.stream = events  # as falcon takes it: with __anext__ and close


async def _compute(
    service: Service,
    stream: EventStream,
    watcher: DisconnectWatcher,
    generation: Generation,
    formatter: StoredFormatter,
    record: StoredResponse,
    conversation_id: str | None,
) -> None:
    """Computes a background response to its end, or until it is cancelled or deleted."""
    store = service.responses

    async def beat() -> None:
        while await store.beat(record.id):
            await asyncio.sleep(BEAT_SECONDS)
        watcher.disconnected = True
        service.cancel([generation])

    beats = asyncio.create_task(beat())
    first = 0
    try:
        async for chunk in stream:
            if record.streamed and formatter.next_number > first:
                await store.append_events(record.id, first, chunk.decode())
            first = formatter.next_number
    finally:
        beats.cancel()
        await stream.close()
    if formatter.response.status not in RUNNING:
        await store.finish(formatter.complete(record), conversation_id)


class PrivateResource(Resource):
    """What a client has stored: each of its methods needs the client's key, if the server has keys."""

    private = True

    async def _stored(self, req: Request, response_id: str) -> StoredResponse:
        """Raises ApiError: 404 for what this client has not stored."""
        client: Client = req.context.client
        found = await self._service.responses.get(client.name, response_id)
        if found is None:
            raise errors.not_kept("response", response_id)
        if found.lost:
            body = json.loads(found.body)
            message = "the process that computed this response has ended"
            body |= {"status": "failed", "error": {"code": "server_error", "message": message}}
            found = found._replace(status="failed", body=json.dumps(body))
            await self._service.responses.finish(found)
        return found


class ResponseResource(PrivateResource):
    """GET and DELETE /v1/responses/{response_id}."""

    async def on_get(self, req: Request, resp: Response, response_id: str) -> None:
        """Answers with the response. `?stream=true` replays and continues the events of a background response, from the
        one behind `starting_after` on."""
        stored = await self._stored(req, response_id)
        if req.get_param("stream") != "true" or req.method == "HEAD":
            resp.content_type, resp.text = "application/json", current_body(stored)
            return
        if not (stored.background and stored.streamed):
            text = "only a response that was created with `background` and `stream` can be streamed again"
            raise errors.validation_error(text, param="stream")
        after = query_number(req, "starting_after", -1, 1 << 31)
        watcher = DisconnectWatcher(req.scope[RECEIVE_KEY], lambda: None)
        _set_stream(resp, StoredEvents(self._service.responses, stored, after + 1, watcher))

    on_head = on_get  # falcon omits the body

    async def on_delete(self, req: Request, resp: Response, response_id: str) -> None:
        """Forgets the response. One that is computed in the background ends."""
        if not await self._service.responses.delete(req.context.client.name, response_id):
            raise errors.not_kept("response", response_id)
        answer_json(resp, shapes.ResponseDeleted(response_id, "response.deleted", True))


class CancelResponseResource(PrivateResource):
    """POST /v1/responses/{response_id}/cancel."""

    async def on_post(self, req: Request, resp: Response, response_id: str) -> None:
        """Ends a background response, and answers with it. One that has ended stays as it is."""
        stored = await self._stored(req, response_id)
        if not stored.background:
            raise errors.validation_error("only a response that was created with `background` can be cancelled")
        body = json.loads(stored.body) | {"status": "cancelled"}
        cancelled = stored._replace(status="cancelled", body=json.dumps(body, ensure_ascii=False))
        if stored.status not in RUNNING or not await self._service.responses.finish(cancelled):
            cancelled = await self._stored(req, response_id)
        resp.content_type, resp.text = "application/json", cancelled.body


class InputItemsResource(PrivateResource):
    """GET /v1/responses/{response_id}/input_items."""

    async def on_get(self, req: Request, resp: Response, response_id: str) -> None:
        """Lists the items of the request, the last ones first unless `order=asc`."""
        stored = await self._stored(req, response_id)
        answer_json(resp, item_list(req, json.loads(stored.input)))

    on_head = on_get  # falcon omits the body


def stored_items(given: str | Sequence[shapes.InputItem] | None, key: ResponseKey) -> Items:
    """The items of a request as they are kept and listed: each has a type and an id."""
    if isinstance(given, str):
        given = [shapes.InputItem(role="user", content=given)]
    prefixes = {
        "message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs",
        "custom_tool_call": "ctc", "custom_tool_call_output": "ctco",
    }  # fmt: skip
    items: list[dict[str, Any]] = []
    for index, item in enumerate(given or []):
        built = msgspec.to_builtins(item)
        built["type"] = item.type or "message"
        built.setdefault("id", f"{prefixes.get(built['type'], 'item')}_{key.hex_id(f'input {index}')}")
        built.setdefault("status", "completed")
        if built["type"] == "message" and isinstance(item.content, str):
            kind = "output_text" if item.role == "assistant" else "input_text"
            built["content"] = [{"type": kind, "text": item.content}]
        items.append(built)
    return items


def current_body(stored: StoredResponse) -> str:
    """The body of a response, whose status may have changed since it was written."""
    if stored.status != "in_progress":
        return stored.body
    return json.dumps(json.loads(stored.body) | {"status": stored.status}, ensure_ascii=False)


def item_list(req: Request, items: Items) -> Page[Any]:
    """Some of the items, as `limit`, `order` and `after` say. Raises ApiError: 422 for another value of these."""
    limit = query_number(req, "limit", DEFAULT_ITEMS, MAX_ITEMS, least=1)
    if newest_first(req):
        items = items[::-1]
    begin, after = 0, req.get_param("after")
    if after is not None:
        begin = next((at + 1 for at, item in enumerate(items) if item["id"] == after), 0)
        if not begin:
            raise errors.unknown_after(after)
    return Page[Any].first(items[begin:], limit, itemgetter("id"))


def newest_first(req: Request) -> bool:
    """Whether `order` of the query asks for the last one first, as it does by default. Raises ApiError: 422."""
    order = req.get_param("order") or "desc"
    if order not in ("asc", "desc"):
        raise errors.validation_error("`order` is `asc` or `desc`", param="order")
    return order == "desc"


def query_number(req: Request, name: str, default: int, most: int, least: int = 0) -> int:
    """An integer of the query within these bounds. Raises ApiError: 422."""
    given = req.get_param(name)
    if given is None:
        return default
    if not (given.isascii() and given.isdigit() and len(given) < 12 and least <= int(given) <= most):
        raise errors.validation_error(f"`{name}` must be an integer from {least} to {most}", param=name)
    return int(given)
