"""POST /tokenize and /chat_tokenize: the ids of a text or a chat, with the place of each."""

import asyncio
from collections.abc import Iterator
from itertools import islice
from json.encoder import encode_basestring as quote

from falcon.asgi import Request, Response

from tgi.api import accounting, errors
from tgi.api.calls import Bell, Encoding
from tgi.api.openai import chat_prompt
from tgi.api.serde import Body
from tgi.api.service import Service
from tgi.api.shapes.chat import ChatRequest
from tgi.api.shapes.native import TokenizeRequest
from tgi.api.tools import Offer
from tgi.kernel.messages import Reason, Tokenized
from tgi.kernel.pack import ints

# So many items are written before other requests have their turn: a body may hold a million tokens.
TURN = 4096


class _Tokenize:
    """What both routes have in common."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def _encode(self, req: Request, inputs: str, add_special_tokens: bool, chat: bytes = b"") -> Tokenized:
        """What the tokenizer says. Raises ApiError if it cannot read the text, or the template not the chat."""
        if not self._service.router.was_ready:
            raise errors.unhealthy(self._service.router.stage)
        call = Encoding(Bell(), inputs, add_special_tokens, chat)
        await self._service.finish([call], req)
        assert call.result is not None
        if call.result.error:
            kind = errors.template if call.result.reason == Reason.TEMPLATE else errors.validation
            raise kind(call.result.error)
        return call.result


class TokenizeResource(_Tokenize):
    """POST /tokenize."""

    body = Body(TokenizeRequest)

    async def on_post(self, req: Request, resp: Response) -> None:
        """An array of {id, text, start, stop, special}."""
        request = await self._service.read(req, self.body)
        encoded = await self._encode(req, request.inputs, request.add_special_tokens is not False)
        resp.content_type = "application/json"
        resp.text = f"[{await _rendered(request.inputs, encoded)}]"


class ChatTokenizeResource(_Tokenize):
    """POST /chat_tokenize."""

    body = Body(ChatRequest)

    async def on_post(self, req: Request, resp: Response) -> None:
        """The same array, and the text that the template has made of the chat."""
        request = await self._service.read(req, self.body)
        accounting.arrived()
        encoded = await self._encode(req, "", False, chat_prompt(request, Offer.of(request)))
        items = await _rendered(encoded.text, encoded)
        resp.content_type = "application/json"
        resp.text = f'{{"tokenize_response":[{items}],"templated_text":{quote(encoded.text)}}}'


async def _rendered(inputs: str, encoded: Tokenized) -> str:
    """All items, with commas between them."""
    items = render_items(inputs, encoded)
    parts = []
    while part := ",".join(islice(items, TURN)):
        parts.append(part)
        await asyncio.sleep(0)
    return ",".join(parts)


def render_items(inputs: str, encoded: Tokenized) -> Iterator[str]:
    """The JSON of each token; its text is the slice of the UTF-8 bytes of `inputs`, U+FFFD for half characters."""
    source = inputs.encode()
    columns = zip(ints(encoded.ids), ints(encoded.starts), ints(encoded.stops), encoded.special, strict=True)
    for token, start, stop, special in columns:
        text = quote(source[start:stop].decode(errors="replace"))
        flag = "true" if special else "false"
        yield f'{{"id":{token},"text":{text},"start":{start},"stop":{stop},"special":{flag}}}'
