"""GET /v1/models and /v1/models/{model}: what is served, as OpenAI lists it."""

import msgspec
from falcon.asgi import Request, Response

from tgi.api.errors import ApiError
from tgi.api.service import Service
from tgi.api.shapes.info import ModelInfo, ModelList


class ModelsResource:
    """GET /v1/models."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def on_get(self, req: Request, resp: Response) -> None:
        """A list of one."""
        resp.content_type = "application/json"
        resp.data = msgspec.json.encode(ModelList("list", [_info(self._service)]))

    on_head = on_get  # falcon leaves the body out


class ModelResource:
    """GET /v1/models/{model}."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def on_get(self, req: Request, resp: Response, model: str) -> None:
        """The model of this name, or 404. Names hold slashes, encoded or not."""
        if model != self._service.model_id:
            raise ApiError(404, "not_found", "Model not found")
        resp.content_type = "application/json"
        resp.data = msgspec.json.encode(_info(self._service))

    on_head = on_get  # falcon leaves the body out


def _info(service: Service) -> ModelInfo:
    return ModelInfo(service.model_id, "model", 0, service.model_id)
