"""POST /tokenize and /chat_tokenize: the token ids of a text or a chat, with the position of each token. POST
/detokenize: the reverse. POST /v1/chat/completions/input_tokens: the number of a chat's tokens."""

from collections.abc import Iterator, Sequence
from json.encoder import encode_basestring as quote

from falcon.asgi import Request, Response

from tgi.api import errors, request_metrics
from tgi.api.asgi import is_probe
from tgi.api.chat_prompt import ToolSelection, chat_prompt_json
from tgi.api.clients import Client
from tgi.api.generation import text_prompt
from tgi.api.images import ImageSet, check_images
from tgi.api.json_body import JsonBody
from tgi.api.requests import TokenizationRequest, WakeEvent
from tgi.api.routes.chat import ChatResource
from tgi.api.service import Resource, Service, answer_json
from tgi.api.shapes.chat import ChatRequest, ImageSource
from tgi.api.shapes.native import DetokenizeRequest, TokenizeRequest
from tgi.api.shapes.native_responses import DetokenizeResponse
from tgi.api.shapes.openai_responses import InputTokens
from tgi.api.token_columns import join_in_turns
from tgi.api.validation import OPENAI_RULES, check_rules
from tgi.microkernel.messages.codec import INT32, ITEM_BYTES, pack_column, unpack_int32
from tgi.microkernel.messages.protocol import FinishReason, Tokenized


async def tokenize(
    service: Service,
    req: Request,
    inputs: str = "",
    add_special_tokens: bool = False,
    chat: bytes = b"",
    ids: bytes = b"",
    images: Sequence[ImageSource] | None = None,
) -> Tokenized:
    """Asks a tokenizer. Raises ApiError: 422 for an invalid text or chat, 503 before the readiness probe has passed,
    424 as Service.next_fingerprints."""
    if not (service.router.health.probe_passed or is_probe(req)):
        raise errors.unhealthy(service.router.health.stage)
    check_images(images or (), service.settings)
    client: Client = req.context.client
    context = client.context(service.next_fingerprints(req, 1)[0])
    image_set = ImageSet(images, context) if images else None
    request = TokenizationRequest(WakeEvent(), inputs, add_special_tokens, chat, context, ids, image_set)
    await service.run_requests([request], req)
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


async def input_tokens(service: Service, req: Request, request: ChatRequest) -> int:
    """The number of tokens of a chat's prompt, without generating. Raises ApiError as `tokenize`, and 422 for what
    the chat itself would be refused for: a parameter out of range, invalid tools."""
    check_rules(request, OPENAI_RULES)
    chat = chat_prompt_json(request, ToolSelection.from_request(request), images := service.new_images())
    count = len((await tokenize(service, req, chat=chat, images=images)).token_ids) // ITEM_BYTES
    kept = request.truncate_prompt_tokens
    return count if kept is None else min(count, kept)


class TokenizeResource(Resource):
    """POST /tokenize."""

    body = JsonBody(TokenizeRequest)

    async def on_post(self, req: Request, resp: Response) -> None:
        """Answers with an array of {id, text, start, stop, special}."""
        request = await self._service.read_body(req, self.body)
        prompt = text_prompt(self._service, request.inputs, request.add_special_tokens is not False)
        tokenized = await tokenize(self._service, req, prompt.inputs, prompt.add_special_tokens, images=prompt.images)
        resp.content_type = "application/json"
        resp.text = f"[{await join_in_turns(token_items(prompt.inputs, tokenized))}]"


class ChatTokenizeResource(Resource):
    """POST /chat_tokenize."""

    body = JsonBody(ChatRequest)

    async def on_post(self, req: Request, resp: Response) -> None:
        """Answers with the same array, and with the text that the template makes of the chat."""
        request = await self._service.read_body(req, self.body)
        request_metrics.count_request(req)
        images = self._service.new_images()
        chat = chat_prompt_json(request, ToolSelection.from_request(request), images)
        tokenized = await tokenize(self._service, req, chat=chat, images=images)
        items = await join_in_turns(token_items(tokenized.text, tokenized))
        resp.content_type = "application/json"
        resp.text = f'{{"tokenize_response":[{items}],"templated_text":{quote(tokenized.text)}}}'


class InputTokensResource(Resource):
    """POST /v1/chat/completions/input_tokens."""

    body = ChatResource.body

    async def on_post(self, req: Request, resp: Response) -> None:
        request = await self._service.read_body(req, self.body)
        request_metrics.count_request(req)
        count = await input_tokens(self._service, req, request)
        answer_json(resp, InputTokens(count))


class DetokenizeResource(Resource):
    """POST /detokenize."""

    body = JsonBody(DetokenizeRequest)

    async def on_post(self, req: Request, resp: Response) -> None:
        """Answers with the text of token ids, special tokens included."""
        request = await self._service.read_body(req, self.body)
        limits = self._service.router.limits
        if limits is not None and any(token >= limits.vocab_size for token in request.tokens):
            raise errors.validation_error(
                f"`tokens` must hold token ids >= 0 and < {limits.vocab_size}", param="tokens"
            )
        text = ""
        if request.tokens:
            text = (await tokenize(self._service, req, ids=pack_column(INT32, request.tokens))).text
        answer_json(resp, DetokenizeResponse(text))


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
