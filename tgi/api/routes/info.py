"""Routes about the server: GET /health, /ping, /info and /metrics. GET / is in native.py, with its POST."""

import msgspec
from falcon.asgi import Request, Response

import tgi
from tgi.api import errors
from tgi.api.models import MODEL_KEY
from tgi.api.service import Resource
from tgi.api.shapes.info import Info
from tgi.microkernel.observability import metrics


class HealthResource(Resource):
    """GET /health and /ping."""

    async def on_get(self, req: Request, resp: Response) -> None:
        """Answers with an empty 200 if a request sent now would be computed, else with 503."""
        router, models = self._service.router, self._service.models
        if models is not None and MODEL_KEY not in req.scope:
            models.require_healthy()
        elif not router.health.healthy:
            raise errors.unhealthy(router.health.stage)

    on_head = on_get  # falcon omits the body


class InfoResource(Resource):
    """GET /info: the model and its limits, as measured."""

    async def on_get(self, req: Request, resp: Response) -> None:
        """Answers with all keys, or 503 while the limits are unknown."""
        settings = self._service.settings
        limits = self._service.router.limits
        if limits is None:
            raise errors.unhealthy(self._service.router.health.stage)
        resp.content_type = "application/json"
        resp.data = msgspec.json.encode(
            Info(
                model_id=self._service.model_id,
                model_sha=self._service.model_sha,
                model_pipeline_tag=self._service.model_pipeline_tag,
                max_concurrent_requests=settings.max_concurrent_requests,
                max_best_of=settings.max_best_of,
                max_stop_sequences=settings.max_stop_sequences,
                max_input_tokens=limits.max_input_tokens,
                max_total_tokens=limits.max_total_tokens,
                validation_workers=settings.validation_workers,
                max_client_batch_size=settings.max_client_batch_size,
                router="text-generation-router",
                version=tgi.CONTRACT_VERSION,
                sha=settings.git_sha,
                docker_label=settings.docker_label,
                model_dtype=f"torch.{limits.dtype}",
                model_device_type=limits.device,
                max_input_length=limits.max_input_tokens,
                waiting_served_ratio=settings.waiting_served_ratio,
                max_batch_total_tokens=limits.max_batch_total_tokens,
                max_waiting_tokens=settings.max_waiting_tokens,
                max_batch_size=limits.max_batch_size,
                server_version=tgi.__version__,
                generation_config=self._service.router.defaults.given,
                eos_token_ids=self._service.router.source.eos_token_ids,
            )
        )

    on_head = on_get  # falcon omits the body


class MetricsResource(Resource):
    """GET /metrics: the metrics of all processes of this host."""

    async def on_get(self, req: Request, resp: Response) -> None:
        resp.content_type = "text/plain; charset=utf-8"
        resp.text = metrics.render()

    on_head = on_get  # falcon omits the body
