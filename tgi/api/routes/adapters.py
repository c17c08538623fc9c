"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: adapters come and go while the server runs, where allowed."""

from pathlib import PurePosixPath

import msgspec
from falcon.asgi import Request, Response

from tgi.api import errors
from tgi.api.calls import Adaptation, Bell
from tgi.api.routes.models import model_info
from tgi.api.serde import Body
from tgi.api.service import Service
from tgi.api.shapes.adapters import LoadLoraAdapterRequest, ModelDeleted, UnloadLoraAdapterRequest

LONGEST_NAME = 256  # characters


class _Updates:
    """What both routes have in common."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def _allowed(self) -> None:
        """Raises ApiError: 403 where adapters stay as they are, 503 before there is a model."""
        if not self._service.settings.allow_adapter_updates:
            raise errors.forbidden("Adapters cannot be changed here: the server runs without --allow-adapter-updates")
        if not self._service.router.was_ready:
            raise errors.unhealthy(self._service.router.stage)

    async def _adapt(self, req: Request, name: str, path: str) -> None:
        """Lets the worker do it. Raises ApiError: 422 with the reason if it will not, 500 if nobody answers."""
        call = Adaptation(Bell(), name, path)
        await self._service.finish([call], req)
        assert call.result is not None
        if call.result.error:
            raise errors.adapter(call.result.error, lost=call.lost)


class LoadResource(_Updates):
    """POST /v1/load_lora_adapter."""

    body = Body(LoadLoraAdapterRequest)

    async def on_post(self, req: Request, resp: Response) -> None:
        """The adapter as /v1/models lists it. One of the same name gives way to it."""
        self._allowed()
        request = await self._service.read(req, self.body)
        name, path = request.lora_name, request.lora_path
        if not (0 < len(name) <= LONGEST_NAME and name.isprintable()):
            text = f"`lora_name` must have 1 to {LONGEST_NAME} printable characters"
            raise errors.validation(text, param="lora_name", counted=False)
        if name in ("tgi", self._service.model_id):
            text = f"`lora_name` {name} is what the base model is called"
            raise errors.validation(text, param="lora_name", counted=False)
        if not (PurePosixPath(path).is_absolute() and path.isprintable()):
            raise errors.validation(
                "`lora_path` must be the absolute path of a directory on the server's host. Adapters of the Hub are "
                "loaded at start, with --lora-adapters",
                param="lora_path",
                counted=False,
            )
        await self._adapt(req, name, path)
        resp.content_type = "application/json"
        resp.data = msgspec.json.encode(model_info(self._service, name))


class UnloadResource(_Updates):
    """POST /v1/unload_lora_adapter."""

    body = Body(UnloadLoraAdapterRequest)

    async def on_post(self, req: Request, resp: Response) -> None:
        """What OpenAI answers for a model that is deleted. Requests that run keep the adapter."""
        self._allowed()
        name = (await self._service.read(req, self.body)).lora_name
        if name not in self._service.router.adapters:
            raise errors.no_model("lora_name")
        await self._adapt(req, name, "")
        resp.content_type = "application/json"
        resp.data = msgspec.json.encode(ModelDeleted(name, "model", True))
