"""POST /tokenize and /chat_tokenize: the token ids of a text or a chat, with the position of each token."""

from collections.abc import Iterator
from json.encoder import encode_basestring as quote

from falcon.asgi import Request, Response

from tgi.api import errors, request_metrics
from tgi.api.chat_prompt import ToolSelection, chat_prompt_json
from tgi.api.json_body import JsonBody
from tgi.api.requests import TokenizationRequest, WakeEvent
from tgi.api.service import Resource
from tgi.api.shapes.chat import ChatRequest
from tgi.api.shapes.native import TokenizeRequest
from tgi.api.token_columns import join_in_turns
from tgi.microkernel.messages.codec import unpack_int32
from tgi.microkernel.messages.protocol import FinishReason, Tokenized


class TokenizationResource(Resource):
    """What all such routes share."""

    async def _tokenize(self, req: Request, inputs: str, add_special_tokens: bool, chat: bytes = b"") -> Tokenized:
        """Asks a tokenizer. Raises ApiError: 422 for an invalid text or chat, 503 before the readiness probe has
        passed, 424 as Service.next_contexts."""
        if not self._service.router.health.probe_passed:
            raise errors.unhealthy(self._service.router.health.stage)
        (context,) = self._service.next_contexts(req, 1)
        request = TokenizationRequest(WakeEvent(), inputs, add_special_tokens, chat, context)
        await self._service.run_requests([request], req)
        assert request.result is not None
        if request.quarantined:
            raise errors.generation_failed(request.result.error)
        if request.result.error:
            match request.result.reason:
                case FinishReason.TEMPLATE:
                    raise errors.template_error(request.result.error)
                case FinishReason.OVERLOADED:
                    raise errors.overloaded()
            raise errors.validation_error(request.result.error)
        return request.result


class TokenizeResource(TokenizationResource):
    """POST /tokenize."""

    body = JsonBody(TokenizeRequest)

    async def on_post(self, req: Request, resp: Response) -> None:
        """Answers with an array of {id, text, start, stop, special}."""
        request = await self._service.read_body(req, self.body)
        tokenized = await self._tokenize(req, request.inputs, request.add_special_tokens is not False)
        resp.content_type = "application/json"
        resp.text = f"[{await join_in_turns(token_items(request.inputs, tokenized))}]"


class ChatTokenizeResource(TokenizationResource):
    """POST /chat_tokenize."""

    body = JsonBody(ChatRequest)

    async def on_post(self, req: Request, resp: Response) -> None:
        """Answers with the same array, and with the text that the template makes of the chat."""
        request = await self._service.read_body(req, self.body)
        request_metrics.count_request(req)
        chat = chat_prompt_json(request, ToolSelection.from_request(request))
        tokenized = await self._tokenize(req, "", False, chat)
        items = await join_in_turns(token_items(tokenized.text, tokenized))
        resp.content_type = "application/json"
        resp.text = f'{{"tokenize_response":[{items}],"templated_text":{quote(tokenized.text)}}}'


def token_items(inputs: str, tokenized: Tokenized) -> Iterator[str]:
    """The JSON of each token. Its text is a slice of the UTF-8 bytes of `inputs`, with U+FFFD for partial
    characters."""
    source = inputs.encode()
    columns = zip(
        unpack_int32(tokenized.token_ids),
        unpack_int32(tokenized.byte_starts),
        unpack_int32(tokenized.byte_stops),
        tokenized.special,
        strict=True,
    )
    for token, start, stop, special in columns:
        text = quote(source[start:stop].decode(errors="replace"))
        flag = "true" if special else "false"
        yield f'{{"id":{token},"text":{text},"start":{start},"stop":{stop},"special":{flag}}}'
