"""Conversations, which POST /v1/responses goes on with, and their items. All is the client's own."""

import json
from operator import itemgetter
from typing import Any

import msgspec
from falcon.asgi import Request, Response

from tgi.api import errors
from tgi.api.json_body import JsonBody
from tgi.api.response_store import HistoryTooLong, Items
from tgi.api.resumption import ResponseKey
from tgi.api.routes.stored_responses import PrivateResource, item_list, stored_items
from tgi.api.service import Service, answer_json
from tgi.api.shapes import responses as shapes
from tgi.api.shapes.types import Page


class ConversationsResource(PrivateResource):
    """POST /v1/conversations."""

    body = JsonBody(shapes.ConversationRequest)

    async def on_post(self, req: Request, resp: Response) -> None:
        """Begins a conversation, with its first items if there are any."""
        request = await self._service.read_body(req, self.body)
        key = ResponseKey.new()
        conversation = shapes.ConversationObject(f"conv_{key.response_id}", key.created, request.metadata or {})
        body, items = msgspec.json.encode(conversation), stored_items(request.items, key)
        await self._service.responses.put_conversation(req.context.client.name, conversation.id, body.decode(), items)
        resp.content_type, resp.data = "application/json", body


class ConversationResource(PrivateResource):
    """GET, POST and DELETE /v1/conversations/{conversation_id}."""

    body = JsonBody(shapes.ConversationUpdate)

    async def on_get(self, req: Request, resp: Response, conversation_id: str) -> None:
        resp.content_type, resp.text = "application/json", await self._body(req, conversation_id)

    on_head = on_get  # falcon omits the body

    async def on_post(self, req: Request, resp: Response, conversation_id: str) -> None:
        request = await self._service.read_body(req, self.body)
        found = json.loads(await self._body(req, conversation_id)) | {"metadata": request.metadata}
        body = json.dumps(found, ensure_ascii=False)
        await self._service.responses.put_conversation(req.context.client.name, conversation_id, body)
        resp.content_type, resp.text = "application/json", body

    async def on_delete(self, req: Request, resp: Response, conversation_id: str) -> None:
        if not await self._service.responses.delete_conversation(req.context.client.name, conversation_id):
            raise errors.not_kept("conversation", conversation_id)
        answer_json(resp, shapes.ResponseDeleted(conversation_id, "conversation.deleted", True))

    async def _body(self, req: Request, conversation_id: str) -> str:
        found = await self._service.responses.conversation(req.context.client.name, conversation_id)
        if found is None:
            raise errors.not_kept("conversation", conversation_id)
        return found


class ConversationItemsResource(PrivateResource):
    """GET and POST /v1/conversations/{conversation_id}/items."""

    body = JsonBody(shapes.ItemsRequest)

    async def on_get(self, req: Request, resp: Response, conversation_id: str) -> None:
        """Lists the items, the last ones first unless `order=asc`."""
        items = await conversation_items(self._service, req.context.client.name, conversation_id)
        answer_json(resp, item_list(req, items))

    on_head = on_get  # falcon omits the body

    async def on_post(self, req: Request, resp: Response, conversation_id: str) -> None:
        request = await self._service.read_body(req, self.body)
        items = stored_items(request.items, ResponseKey.new())
        if not await self._service.responses.append_items(req.context.client.name, conversation_id, items):
            raise errors.not_kept("conversation", conversation_id)
        answer_json(resp, Page[Any].first(items, len(items), itemgetter("id")))


class ConversationItemResource(PrivateResource):
    """GET and DELETE /v1/conversations/{conversation_id}/items/{item_id}."""

    async def on_get(self, req: Request, resp: Response, conversation_id: str, item_id: str) -> None:
        found = await self._service.responses.item(req.context.client.name, conversation_id, item_id)
        if found is None:
            raise errors.not_kept("item", item_id)
        resp.content_type, resp.text = "application/json", found

    on_head = on_get  # falcon omits the body

    async def on_delete(self, req: Request, resp: Response, conversation_id: str, item_id: str) -> None:
        """Takes the item out of the conversation, and answers with the conversation."""
        store, owner = self._service.responses, req.context.client.name
        body = await store.conversation(owner, conversation_id)
        if body is None or not await store.delete_item(owner, conversation_id, item_id):
            raise errors.not_kept("item", item_id)
        resp.content_type, resp.text = "application/json", body


async def conversation_items(service: Service, owner: str, conversation_id: str) -> Items:
    """The items of a conversation. Raises ApiError: 404 if it is not kept, 422 if it is longer than a body may be."""
    limit = service.settings.payload_limit
    try:
        items = await service.responses.items(owner, conversation_id, limit)
    except HistoryTooLong:
        text = f"the conversation is longer than a request may be: {limit} bytes (--payload-limit)"
        raise errors.validation_error(text, param="conversation") from None
    if items is None:
        raise errors.not_kept("conversation", conversation_id, "conversation")
    return items
