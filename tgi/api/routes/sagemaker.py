"""POST /invocations: a body of any of three generation routes, answered as that route does."""

from falcon.asgi import Request, Response

from tgi.api.json_body import UntaggedJsonBody
from tgi.api.routes.chat import ChatResource
from tgi.api.routes.completions import CompletionsResource
from tgi.api.routes.native import CompatResource
from tgi.api.service import Resource, Service
from tgi.api.shapes.chat import ChatRequest
from tgi.api.shapes.cloud import SagemakerRequest
from tgi.api.shapes.native import CompatGenerateRequest


class SagemakerResource(Resource):
    """POST /invocations."""

    body = UntaggedJsonBody(
        "SagemakerRequest", CompatResource.body, ChatResource.body, CompletionsResource.body, shape=SagemakerRequest
    )

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._native = CompatResource(service)
        self._chat = ChatResource(service)
        self._completions = CompletionsResource(service)

    async def on_post(self, req: Request, resp: Response) -> None:
        """Answers as POST /, /v1/chat/completions or /v1/completions."""
        request = await self._service.read_generation_body(req, self.body)
        if isinstance(request, CompatGenerateRequest):
            await self._native.answer(request, req, resp)
        elif isinstance(request, ChatRequest):
            await self._chat.answer(request, req, resp)
        else:
            await self._completions.answer(request, req, resp)
