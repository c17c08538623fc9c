"""GET /v1/models and /v1/models/{model}: the served model and its adapters, as OpenAI lists models."""

import msgspec
from falcon.asgi import Request, Response

from tgi.api import errors
from tgi.api.service import Resource, Service
from tgi.api.shapes.info import ModelInfo, ModelList


class ModelsResource(Resource):
    """GET /v1/models."""

    async def on_get(self, req: Request, resp: Response) -> None:
        """Lists the model, then its adapters in the order of loading."""
        service = self._service
        resp.content_type = "application/json"
        names = (service.model_id, *service.router.adapters)
        resp.data = msgspec.json.encode(ModelList("list", [model_info(service, name) for name in names]))

    on_head = on_get  # falcon omits the body


class ModelResource(Resource):
    """GET /v1/models/{model}."""

    async def on_get(self, req: Request, resp: Response, model: str) -> None:
        """Answers with the model or adapter of this name, or 404. A name may contain slashes, encoded or not."""
        if model != self._service.model_id and model not in self._service.router.adapters:
            raise errors.model_not_found("model")
        resp.content_type = "application/json"
        resp.data = msgspec.json.encode(model_info(self._service, model))

    on_head = on_get  # falcon omits the body


def model_info(service: Service, name: str) -> ModelInfo:
    """The served model or one of its adapters; the served model owns both."""
    return ModelInfo(name, "model", 0, service.model_id)
