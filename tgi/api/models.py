"""The models of a server with several, as a front end sees them.

The supervisor loads and unloads (microkernel/processes/model_manager.py). This front end tells it which models its
requests use or wait for, and hears which are loaded. A model that drains gets no further requests of this front end:
they wait until it is loaded again.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from tgi.api import errors
from tgi.api.router import Router
from tgi.microkernel.processes.model_table import FrontEndCommand, ModelState, ModelView

# In the scope of a request: the name of its model, if it names one.
MODEL_KEY = "tgi.model"
# Names that mean the first model: clients of TGI send "tgi".
DEFAULT_NAMES = ("", "tgi")
SUPERVISOR_IS_LOST = "waiting for the supervisor"
RECONNECT_SECONDS = 0.1
MAX_LINE_BYTES = 1 << 20


class HostedModel:
    """One of the models. Its router, links and readiness probe are its own; keys, permits and what is stored are those
    of the server."""

    def __init__(self, name: str, router: Router) -> None:
        self.name = name
        self.router = router
        self.view = ModelView(name, ModelState.UNLOADED, "", "", 0.0, -1, 0, [])
        self.using = 0  # requests
        self.waiting = 0  # requests
        self.wanted_epoch = -1  # at which the supervisor was told that requests wait

    @property
    def is_usable(self) -> bool:
        """Whether a request may be sent to it now."""
        return self.view.state == ModelState.LOADED and self.router.health.probe_passed

    @property
    def is_starting(self) -> bool:
        """Whether it is being loaded, or answers its first request."""
        is_probed = self.view.state == ModelState.LOADED and not self.router.health.probe_passed
        return is_probed or self.view.state == ModelState.LOADING

    @property
    def stage(self) -> str:
        """What a request for it waits for, in words."""
        if self.view.state == ModelState.LOADED:
            return self.router.health.stage
        return ": ".join(filter(None, (self.view.state, self.view.stage)))

    def has_adapter(self, name: str) -> bool:
        """Whether this is the name of one of its adapters."""
        return name in self.view.adapters or name in self.router.adapters


class Models:
    """All models of a server, the default one first."""

    def __init__(self, socket_path: Path, models: Iterable[HostedModel]) -> None:
        self._path = socket_path
        self.all = {model.name: model for model in models}
        self.default = next(iter(self.all.values()))
        self._changed: asyncio.Future[None] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self.has_started = False  # the models that are loaded at start have been, or cannot be

    def find(self, name: str) -> HostedModel | None:
        """The model that a request means by this name, of its own or of an adapter; None if no model has it. A server
        of one model takes every name for it, as TGI does."""
        if (model := self.all.get(name)) is not None:
            return model
        if name in DEFAULT_NAMES or len(self.all) == 1:
            return self.default
        return next((one for one in self.all.values() if one.has_adapter(name)), None)

    @property
    def stage(self) -> str:
        """What the start of the server waits for, in words; "" when it has started."""
        if self.has_started:
            return ""
        starting = next((one for one in self.all.values() if one.is_starting), None)
        return f"{starting.name}: {starting.stage}" if starting else SUPERVISOR_IS_LOST

    def require_healthy(self) -> None:
        """Raises ApiError: 503 until the models that are loaded at start have been, and while no model can be."""
        if not self.has_started:
            raise errors.unhealthy(self.stage)
        if all(one.view.state == ModelState.FAILED for one in self.all.values()):
            raise errors.unhealthy(f"{self.default.name}: {self.default.stage}")

    # --- use of a model ---

    def begin(self, model: HostedModel) -> None:
        """A request uses a model from now on, which `is_usable`."""
        model.using += 1
        if model.using == 1:
            self._send(FrontEndCommand.BEGIN, model.name)

    def end(self, model: HostedModel) -> None:
        """A request uses the model no more."""
        model.using -= 1
        if model.using == 0:
            self._send(FrontEndCommand.END, model.name)

    async def until_usable(self, model: HostedModel) -> None:
        """Has a model loaded, and waits for that. Raises ApiError: 503 with the reason if it cannot be."""
        with self._waiting(model):
            await self._until_usable(model)

    async def load(self, model: HostedModel) -> None:
        """As `until_usable`, but tries again at once if loading has just failed."""
        with self._waiting(model):
            self._send(FrontEndCommand.LOAD, model.name)
            failed = model.view.epoch if model.view.state == ModelState.FAILED else None
            while model.view.epoch == failed:
                await self._next_view()
            await self._until_usable(model)

    async def unload(self, model: HostedModel, target: ModelState = ModelState.UNLOADED) -> None:
        """Has a model finish its requests and be unloaded, or sleep. Returns when it is, or when a request has had it
        loaded again."""
        self._send(FrontEndCommand.SLEEP if target is ModelState.SLEEPING else FrontEndCommand.UNLOAD, model.name)
        first = model.view
        while model.view.state in (ModelState.LOADED, ModelState.LOADING, ModelState.DRAINING):
            has_drained = model.view.epoch > first.epoch + 1
            if has_drained and model.view.state != ModelState.DRAINING and first.state != ModelState.LOADING:
                return
            await self._next_view()

    @contextlib.contextmanager
    def _waiting(self, model: HostedModel) -> Iterator[None]:
        model.waiting += 1
        try:
            yield
        finally:
            model.waiting -= 1
            if model.waiting == 0:
                model.wanted_epoch = -1
                self._send(FrontEndCommand.GIVE_UP, model.name)

    async def _until_usable(self, model: HostedModel) -> None:
        while not model.is_usable:
            view = model.view
            if view.state == ModelState.FAILED and time.monotonic() < view.retry_at:
                raise errors.cannot_load(model.name, view.error)
            if view.state != ModelState.LOADED and model.wanted_epoch != view.epoch:
                model.wanted_epoch = view.epoch
                self._send(FrontEndCommand.WANT, model.name)
            await self._next_view()

    async def _next_view(self) -> None:
        """Waits for a change. Raises ApiError: 503 while the supervisor, which makes changes, is not connected."""
        if self._writer is None:
            raise errors.unhealthy(SUPERVISOR_IS_LOST)
        await self.change()

    # --- the supervisor ---

    async def follow(self) -> None:
        """Hears the supervisor until cancelled."""
        while True:
            with contextlib.suppress(OSError):
                reader, self._writer = await asyncio.open_unix_connection(str(self._path), limit=MAX_LINE_BYTES)
                for model in self.all.values():
                    model.wanted_epoch = -1
                    if model.using:
                        self._send(FrontEndCommand.BEGIN, model.name)
                while line := await reader.readline():
                    self._apply([ModelView(*fields) for fields in json.loads(line)])
                self._writer.close()
            self._writer = None
            self.wake()
            await asyncio.sleep(RECONNECT_SECONDS)

    def _apply(self, views: Iterable[ModelView]) -> None:
        for view in views:
            model = self.all[view.name]
            if view.state == ModelState.DRAINING and view.epoch != model.view.epoch:
                self._send(FrontEndCommand.CONFIRM, view.name, view.epoch)
            if view.life != model.view.life:
                model.router.forget_deployment()
            model.view = view
        self.wake()

    def _send(self, command: FrontEndCommand, name: str, *epoch: int) -> None:
        if self._writer is not None:
            self._writer.write(json.dumps([command, name, *epoch]).encode() + b"\n")

    def wake(self) -> None:
        """The state of a model, or of its readiness probe, has changed."""
        self.has_started = self.has_started or (
            self.default.view.epoch >= 0 and not any(one.is_starting for one in self.all.values())
        )
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)
        self._changed = None

    async def change(self) -> None:
        """Waits for `wake`."""
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._changed)
