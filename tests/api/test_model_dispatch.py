"""Several models in a front end: requests that wait for one, and what the supervisor is told of them."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tgi.api.app import build
from tgi.api.asgi import InnerResponse, send_request
from tgi.api.model_dispatch import ModelDispatcher
from tgi.api.models import HostedModel, Models
from tgi.api.router import Router
from tgi.api.service import Service
from tgi.microkernel.admission.permits import Permits
from tgi.microkernel.processes.model_table import SOCKET_NAME, ModelState, ModelView
from tgi.microkernel.recovery.quarantine import Quarantine
from tgi.microkernel.settings.table import Settings

LIMIT = 3


class Supervisor:
    """The other end of the socket: tells states when the test does, and keeps what it hears."""

    def __init__(self, models: Models, dispatcher: ModelDispatcher) -> None:
        self.models, self.dispatcher = models, dispatcher
        self.heard: list[list[Any]] = []
        self._epoch = 0
        self.writer: asyncio.StreamWriter | None = None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        while line := await reader.readline():
            self.heard.append(json.loads(line))

    async def tell(self, state: ModelState, error: str = "", retry_at: float = 0.0) -> None:
        self._epoch += 1
        views = [
            ModelView(name, state, "", error, retry_at, self._epoch, 0, [f"{name}-lora"]) for name in self.models.all
        ]
        await until(lambda: self.writer is not None)
        assert self.writer is not None
        self.writer.write(json.dumps(views).encode() + b"\n")
        await until(lambda: self.models.default.view.epoch == self._epoch)

    def ask(self, model: str, gone: asyncio.Event | None = None, wait: str = "60") -> "asyncio.Task[InnerResponse]":
        body = json.dumps({"model": model, "prompt": "a"}).encode()
        return asyncio.ensure_future(
            send_request(self.dispatcher, "POST", "/v1/completions", body, {"x-model-wait": wait}, {}, gone)
        )


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


@asynccontextmanager
async def supervised(directory: Path, *names: str) -> AsyncIterator[Supervisor]:
    settings = Settings(max_concurrent_requests=LIMIT, models=tuple(f"{name}=x" for name in names), run_dir=directory)
    permits, quarantine = Permits(directory / "permits", LIMIT), Quarantine(directory)
    services = {name: Service(settings, Router([], permits, quarantine), name, "", directory) for name in names}
    models = Models(directory / SOCKET_NAME, [HostedModel(name, one.router) for name, one in services.items()])
    for one in services.values():
        one.models = models
    dispatcher = ModelDispatcher(models, services, {name: build(one) for name, one in services.items()})
    supervisor = Supervisor(models, dispatcher)
    server = await asyncio.start_unix_server(supervisor.serve, directory / SOCKET_NAME)
    following = asyncio.ensure_future(models.follow())
    try:
        yield supervisor
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        if supervisor.writer is not None:
            supervisor.writer.close()
        server.close()
        for one in services.values():
            await one.close(0.0)


def run(test: Callable[[Supervisor], Awaitable[None]], directory: Path, *names: str) -> None:
    async def whole() -> None:
        async with supervised(directory, *names) as supervisor:
            await test(supervisor)

    asyncio.run(whole())


@pytest.mark.parametrize(
    ("names", "asked", "found"),
    [
        (("a", "b"), "b", "b"),
        (("a", "b"), "tgi", "a"),
        (("a", "b"), "", "a"),
        (("a", "b"), "b-lora", "b"),
        (("a", "b"), "gpt-4", None),
        (("a", "tgi"), "tgi", "tgi"),
        (("a",), "gpt-4", "a"),
    ],
)
def test_names(names: tuple[str, ...], asked: str, found: str | None, tmp_path: Path) -> None:
    async def test(supervisor: Supervisor) -> None:
        await supervisor.tell(ModelState.UNLOADED)
        model = supervisor.models.find(asked)
        assert (model and model.name) == found

    run(test, tmp_path, *names)


def test_requests_that_wait_are_told_and_bounded(tmp_path: Path) -> None:
    async def test(supervisor: Supervisor) -> None:
        await supervisor.tell(ModelState.UNLOADED)
        gone = asyncio.Event()
        waiting = [supervisor.ask("b", gone) for _ in range(LIMIT)]
        await until(lambda: supervisor.models.all["b"].waiting == LIMIT)
        await until(lambda: ["want", "b"] in supervisor.heard)
        assert (await supervisor.ask("b")).status == 429
        at_once = await supervisor.ask("a", wait="0")
        assert (at_once.status, at_once.headers["x-startup-stage"]) == (503, "unloaded")
        assert (await supervisor.ask("a", wait="-1")).status == 422
        gone.set()
        assert {one.status for one in await asyncio.gather(*waiting)} == {499}
        await until(lambda: ["give up", "b"] in supervisor.heard)
        assert supervisor.heard.count(["want", "b"]) == 1

    run(test, tmp_path, "a", "b")


def test_a_model_that_drains_gets_no_further_request(tmp_path: Path) -> None:
    async def test(supervisor: Supervisor) -> None:
        await supervisor.tell(ModelState.LOADED)
        model = supervisor.models.all["b"]
        model.router.health.end_probe("")
        assert model.is_usable
        await supervisor.tell(ModelState.DRAINING)
        await until(lambda: ["confirm", "b", model.view.epoch] in supervisor.heard)
        waiting = supervisor.ask("b")
        await until(lambda: ["want", "b"] in supervisor.heard)
        assert ["begin", "b"] not in supervisor.heard
        await supervisor.tell(ModelState.FAILED, "no memory", retry_at=1e12)
        answer = await waiting
        assert (answer.status, json.loads(answer.body)["error"]["message"]) == (
            503, "The model b could not be loaded. no memory"
        )  # fmt: skip

    run(test, tmp_path, "a", "b")


def test_requests_do_not_wait_for_a_supervisor_that_ends(tmp_path: Path) -> None:
    async def test(supervisor: Supervisor) -> None:
        await supervisor.tell(ModelState.LOADING)
        waiting = supervisor.ask("a")
        await until(lambda: ["want", "a"] in supervisor.heard)
        assert supervisor.writer is not None
        supervisor.writer.close()
        assert (await waiting).status == 503

    run(test, tmp_path, "a", "b")
