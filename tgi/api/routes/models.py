"""GET /v1/models and /v1/models/{model}: the served models and their adapters, as OpenAI lists models. With several
models also what loads and unloads them, and has them sleep."""

from falcon.asgi import Request, Response

from tgi.api import errors
from tgi.api.models import HostedModel, Models
from tgi.api.service import Resource, Service, answer_json
from tgi.api.shapes.info import ModelInfo, ModelList, ModelStatus, SleepState
from tgi.microkernel.processes.model_table import ModelState


class ModelsResource(Resource):
    """GET /v1/models."""

    async def on_get(self, req: Request, resp: Response) -> None:
        """Lists each model, then its adapters in the order of loading."""
        service = self._service
        answer_json(resp, ModelList("list", listed_models(service)))

    on_head = on_get  # falcon omits the body


class ModelResource(Resource):
    """GET /v1/models/{model}."""

    async def on_get(self, req: Request, resp: Response, model: str) -> None:
        """Answers with the model or adapter of this name, or 404. A name may contain slashes, encoded or not."""
        found = next((one for one in listed_models(self._service) if one.id == model), None)
        if found is None:
            raise errors.model_not_found("model")
        answer_json(resp, found)

    on_head = on_get  # falcon omits the body


class ManagedModelResource(ModelResource):
    """The same of one of several models, and POST /v1/models/{model}/load and /unload."""

    async def on_post(self, req: Request, resp: Response, model: str) -> None:
        """Answers with the model when it is loaded or unloaded: requests that use it end first."""
        name, _, action = model.rpartition("/")
        models, hosted = named_model(self._service, name)
        match action:
            case "load":
                await models.load(hosted)
            case "unload":
                await models.unload(hosted)
            case _:
                raise errors.no_such_route(req.method, req.path)
        answer_json(resp, hosted_info(hosted))


class SleepResource(Resource):
    """POST /sleep, as vLLM's."""

    async def on_post(self, req: Request, resp: Response) -> None:
        """Has the model that the query names give its memory back, or all models that are loaded. The next request
        wakes it. `level` is accepted: what a model needs to wake is read from its files."""
        models = self._service.models
        assert models is not None
        for hosted in chosen_models(self._service, req):
            await models.unload(hosted, ModelState.SLEEPING)


class WakeResource(Resource):
    """POST /wake_up, as vLLM's."""

    async def on_post(self, req: Request, resp: Response) -> None:
        """Wakes the model that the query names, or all that sleep. Answers when they are loaded."""
        models = self._service.models
        assert models is not None
        named = req.get_param("model") is not None
        for hosted in chosen_models(self._service, req):
            if named or hosted.view.state == ModelState.SLEEPING:
                await models.load(hosted)


class IsSleepingResource(Resource):
    """GET /is_sleeping, as vLLM's."""

    async def on_get(self, req: Request, resp: Response) -> None:
        """Whether the model that the query names sleeps, or all do."""
        states = [one.view.state for one in chosen_models(self._service, req)]
        answer_json(resp, SleepState(all(state == ModelState.SLEEPING for state in states)))

    on_head = on_get  # falcon omits the body


def named_model(service: Service, name: str) -> tuple[Models, HostedModel]:
    """One of several models by its own name. Raises ApiError: 404 if no model has it."""
    models = service.models
    assert models is not None
    if (hosted := models.all.get(name)) is None:
        raise errors.unknown_model(name, models.all)
    return models, hosted


def chosen_models(service: Service, req: Request) -> list[HostedModel]:
    """The model that the query names, or all. Raises ApiError: 404 if no model has that name."""
    assert service.models is not None
    if (name := req.get_param("model")) is not None:
        return [named_model(service, name)[1]]
    return [*service.models.all.values()]


def listed_models(service: Service) -> list[ModelInfo]:
    """All models, each with its adapters."""
    if service.models is None:
        return [model_info(service, name) for name in (service.model_id, *service.router.adapters)]
    found = []
    for hosted in service.models.all.values():
        found.append(hosted_info(hosted))
        found += [ModelInfo(name, "model", 0, hosted.name) for name in hosted.router.adapters]
    return found


def hosted_info(hosted: HostedModel) -> ModelInfo:
    """One of several models with its state."""
    view = hosted.view
    status = ModelStatus(view.state, view.stage or None, view.error or None)
    return ModelInfo(hosted.name, "model", 0, hosted.name, status)


def model_info(service: Service, name: str) -> ModelInfo:
    """The served model or one of its adapters; the served model owns both."""
    return ModelInfo(name, "model", 0, service.model_id)
