"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, with --allow-adapter-updates."""

from pathlib import PurePosixPath

from falcon.asgi import Request, Response

from tgi.api import errors
from tgi.api.json_body import JsonBody
from tgi.api.requests import AdapterUpdateRequest, WakeEvent
from tgi.api.routes.models import model_info
from tgi.api.service import Resource, answer_json
from tgi.api.shapes.adapters import LoadLoraAdapterRequest, ModelDeleted, UnloadLoraAdapterRequest

MAX_NAME_CHARACTERS = 256


class _AdapterResource(Resource):
    """What both routes share."""

    def _check_allowed(self) -> None:
        """Raises ApiError: 403 without --allow-adapter-updates, 503 before the readiness probe has passed."""
        if not self._service.settings.allow_adapter_updates:
            raise errors.forbidden("Adapters cannot be changed here: the server runs without --allow-adapter-updates")
        if not self._service.router.health.probe_passed:
            raise errors.unhealthy(self._service.router.health.stage)

    async def _update(self, req: Request, name: str, path: str) -> None:
        """Loads or unloads an adapter. Raises ApiError: 422 with the worker's reason."""
        request = AdapterUpdateRequest(WakeEvent(), name, path)
        await self._service.run_requests([request], req)
        assert request.result is not None
        if request.result.error:
            raise errors.adapter_error(request.result.error)


class LoadAdapterResource(_AdapterResource):
    """POST /v1/load_lora_adapter."""

    body = JsonBody(LoadLoraAdapterRequest)

    async def on_post(self, req: Request, resp: Response) -> None:
        """Answers with the adapter as /v1/models lists it. It replaces one of the same name."""
        self._check_allowed()
        request = await self._service.read_body(req, self.body)
        name, path = request.lora_name, request.lora_path
        if not (0 < len(name) <= MAX_NAME_CHARACTERS and name.isprintable()):
            text = f"`lora_name` must have 1 to {MAX_NAME_CHARACTERS} printable characters"
            raise errors.validation_error(text, param="lora_name", counted=False)
        if name in ("tgi", self._service.model_id):
            text = f"`lora_name` {name} is what the base model is called"
            raise errors.validation_error(text, param="lora_name", counted=False)
        if not (PurePosixPath(path).is_absolute() and path.isprintable()):
            raise errors.validation_error(
                "`lora_path` must be the absolute path of a directory on the server's host. Adapters of the Hub are "
                "loaded at start, with --lora-adapters",
                param="lora_path",
                counted=False,
            )
        await self._update(req, name, str(PurePosixPath(path)))  # in the form in which workers report it
        answer_json(resp, model_info(self._service, name))


class UnloadAdapterResource(_AdapterResource):
    """POST /v1/unload_lora_adapter."""

    body = JsonBody(UnloadLoraAdapterRequest)

    async def on_post(self, req: Request, resp: Response) -> None:
        """Answers as OpenAI does for a deleted model. Requests in flight keep the adapter."""
        self._check_allowed()
        name = (await self._service.read_body(req, self.body)).lora_name
        if name not in self._service.router.adapters:
            raise errors.model_not_found("lora_name")
        await self._update(req, name, "")
        answer_json(resp, ModelDeleted(name, "model", True))
