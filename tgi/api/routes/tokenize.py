"""POST /tokenize: the ids of a text, with the place of each."""

from collections.abc import Iterator
from json.encoder import encode_basestring as quote

from falcon.asgi import Request, Response

from tgi.api import errors
from tgi.api.calls import Encoding
from tgi.api.serde import Body
from tgi.api.service import Service
from tgi.api.shapes.native import TokenizeRequest
from tgi.kernel.messages import Tokenized
from tgi.kernel.pack import ints


class TokenizeResource:
    """POST /tokenize."""

    body = Body(TokenizeRequest)

    def __init__(self, service: Service) -> None:
        self._service = service

    async def on_post(self, req: Request, resp: Response) -> None:
        """An array of {id, text, start, stop, special}."""
        request = await self._service.read(req, self.body)
        if not self._service.router.was_ready:
            raise errors.unhealthy(self._service.router.stage)
        call = Encoding(request.inputs, request.add_special_tokens is not False)
        await self._service.finish(call, req)
        assert call.result is not None
        if call.result.error:
            raise errors.validation(call.result.error)
        resp.content_type = "application/json"
        resp.text = f"[{','.join(render_items(request.inputs, call.result))}]"


def render_items(inputs: str, encoded: Tokenized) -> Iterator[str]:
    """The JSON of each token; its text is the slice of the UTF-8 bytes of `inputs`, U+FFFD for half characters."""
    source = inputs.encode()
    columns = zip(ints(encoded.ids), ints(encoded.starts), ints(encoded.stops), encoded.special, strict=True)
    for token, start, stop, special in columns:
        text = quote(source[start:stop].decode(errors="replace"))
        flag = "true" if special else "false"
        yield f'{{"id":{token},"text":{text},"start":{start},"stop":{stop},"special":{flag}}}'
