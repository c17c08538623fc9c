"""GET /v1/models and /v1/models/{model}: what is served, the model and its adapters, as OpenAI lists it."""

import msgspec
from falcon.asgi import Request, Response

from tgi.api import errors
from tgi.api.service import Service
from tgi.api.shapes.info import ModelInfo, ModelList


class ModelsResource:
    """GET /v1/models."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def on_get(self, req: Request, resp: Response) -> None:
        """The model, then its adapters in the order of their loading."""
        service = self._service
        resp.content_type = "application/json"
        names = (service.model_id, *service.router.adapters)
        resp.data = msgspec.json.encode(ModelList("list", [model_info(service, name) for name in names]))

    on_head = on_get  # falcon leaves the body out


class ModelResource:
    """GET /v1/models/{model}."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def on_get(self, req: Request, resp: Response, model: str) -> None:
        """The model of this name, or 404. Names hold slashes, encoded or not."""
        if model != self._service.model_id and model not in self._service.router.adapters:
            raise errors.no_model("model")
        resp.content_type = "application/json"
        resp.data = msgspec.json.encode(model_info(self._service, model))

    on_head = on_get  # falcon leaves the body out


def model_info(service: Service, name: str) -> ModelInfo:
    """The served model or an adapter of it: both belong to the former."""
    return ModelInfo(name, "model", 0, service.model_id)
