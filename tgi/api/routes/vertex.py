"""POST /vertex: prompts and chats together, one text for each."""

import msgspec
from falcon.asgi import Request, Response

from tgi.api import accounting, answering, errors
from tgi.api.answering import Prompt
from tgi.api.calls import Generation
from tgi.api.errors import ApiError
from tgi.api.routes import chat
from tgi.api.serde import Body, Untagged
from tgi.api.service import Service
from tgi.api.shapes.chat import ChatRequest
from tgi.api.shapes.cloud import GenerateVertexInstance, VertexRequest, VertexResponse
from tgi.api.shapes.native import GenerateParameters


class VertexResource:
    """POST /vertex, and the route that AIP_PREDICT_ROUTE names."""

    body = Body(VertexRequest)
    instance = Untagged("VertexInstance", Body(GenerateVertexInstance), chat.ChatResource.body)

    def __init__(self, service: Service) -> None:
        self._service = service

    async def on_post(self, req: Request, resp: Response) -> None:
        """The texts, in the order of the instances."""
        request = await self._service.read(req, self.body)
        instances = [
            self.instance.decode(bytes(raw), f"instances[{place}]") for place, raw in enumerate(request.instances)
        ]
        accounting.arrived()
        if not instances:
            raise errors.no_instances()
        answering.admit(self._service, len(instances))
        calls = [self._generation(instance) for instance in instances]
        for call in calls:
            call.bell = calls[0].bell  # one task waits for all
        try:
            finished = await answering.finish(self._service, req, calls)
        except ApiError as error:
            raise errors.collapsed(error) from error
        resp.content_type = "application/json"
        resp.data = msgspec.json.encode(VertexResponse([end.text for _, end in finished]))

    def _generation(self, instance: GenerateVertexInstance | ChatRequest) -> Generation:
        """The one generation of an instance. Raises ApiError if it may not be computed."""
        if isinstance(instance, ChatRequest):
            (call,) = chat.generations(self._service, msgspec.structs.replace(instance, stream=False, n=None))
            return call
        given = instance.parameters or GenerateParameters()
        p = GenerateParameters(
            do_sample=True, max_new_tokens=given.max_new_tokens, seed=given.seed, adapter_id=given.adapter_id
        )
        (call,) = answering.generations(self._service, [Prompt(instance.inputs)], p, stream=False)
        return call
