"""POST /vertex: prompts and chats together, one text for each."""

import msgspec
from falcon.asgi import Request, Response

from tgi.api import errors, request_metrics
from tgi.api.errors import ApiError
from tgi.api.generation import check_count, create_generations, run_generations, text_prompt
from tgi.api.json_body import JsonBody, UntaggedJsonBody
from tgi.api.requests import Generation
from tgi.api.routes.chat import ChatResource, create_chat_generations
from tgi.api.service import Resource, answer_json
from tgi.api.shapes.chat import ChatRequest
from tgi.api.shapes.cloud import GenerateVertexInstance, VertexRequest, VertexResponse
from tgi.api.shapes.native import GenerateParameters


class VertexResource(Resource):
    """POST /vertex, and the path that AIP_PREDICT_ROUTE names."""

    body = JsonBody(VertexRequest)
    instance_body = UntaggedJsonBody("VertexInstance", JsonBody(GenerateVertexInstance), ChatResource.body)

    async def on_post(self, req: Request, resp: Response) -> None:
        """Answers with the texts, in the order of the instances."""
        request = await self._service.read_generation_body(req, self.body)
        check_count(self._service, len(request.instances))  # before they are decoded one by one
        instances = [
            self.instance_body.decode(bytes(raw), f"instances[{index}]") for index, raw in enumerate(request.instances)
        ]
        request_metrics.count_request(req)
        if not instances:
            raise errors.no_instances()
        self._service.router.admission.acquire_permits(req.context.client, len(instances))  # all or none
        generations = [self._create_generation(req, instance) for instance in instances]
        for generation in generations:
            generation.wake_event = generations[0].wake_event  # one task waits for all
        try:
            finished = await run_generations(self._service, req, generations)
        except ApiError as error:
            raise errors.without_cause(error) from error
        answer_json(resp, VertexResponse([end.text for _, end in finished]))

    def _create_generation(self, req: Request, instance: GenerateVertexInstance | ChatRequest) -> Generation:
        """The only generation of an instance. Raises ApiError as create_generations."""
        if isinstance(instance, ChatRequest):
            chat = msgspec.structs.replace(instance, stream=False, n=None)
            (generation,) = create_chat_generations(self._service, req, chat)
            return generation
        given = instance.parameters or GenerateParameters()
        parameters = GenerateParameters.with_sampling(
            max_new_tokens=given.max_new_tokens, seed=given.seed, adapter_id=given.adapter_id
        )
        prompts = [text_prompt(self._service, instance.inputs)]
        (generation,) = create_generations(self._service, req, prompts, parameters, stream=False)
        return generation
