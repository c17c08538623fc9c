"""The api process: one HTTP server on the shared port, and the links to all tokenizers, which it finds in the run
directory or on other hosts."""

import asyncio
import contextlib
import gc
import logging
import signal
import socket
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import uvloop

from tgi.api import app
from tgi.api.asgi import AsgiApp
from tgi.api.batches import BatchRunner
from tgi.api.http_server import TICK_SECONDS, HttpServer
from tgi.api.model_dispatch import ModelDispatcher
from tgi.api.models import HostedModel, Models
from tgi.api.readiness import run_readiness_probe
from tgi.api.requests import AdapterUpdateRequest, WakeEvent
from tgi.api.router import Router
from tgi.api.service import Service
from tgi.api.tls import ServerCertificate
from tgi.api.tokenizers import TokenizerConnection
from tgi.microkernel.admission.permits import Permits
from tgi.microkernel.admission.token_rates import TokenRates
from tgi.microkernel.errors import UserError
from tgi.microkernel.host.rundir import media_directory, media_sockets, pipeline_directory, tokenizer_sockets
from tgi.microkernel.links.discovery import Discovery, DownstreamLinks
from tgi.microkernel.links.link import Link
from tgi.microkernel.observability import tracing
from tgi.microkernel.observability.flight_recorder import RingRecorder, ring_path
from tgi.microkernel.processes.model_table import SOCKET_NAME
from tgi.microkernel.processes.process import HAND_OVER, Process, work_in_progress
from tgi.microkernel.recovery.quarantine import Quarantine
from tgi.microkernel.settings.table import Settings

log = logging.getLogger(__name__)

# New objects per collection of the youngest ones. A request allocates some hundreds that live until its end, so that
# Python's 700 would have most of a burst of requests collected in vain.
GC_THRESHOLD = 10_000
# A front end that replaces another waits this long for the first status of a tokenizer before it accepts connections.
FIRST_STATUS_SECONDS = 1.0
# Between two looks for tokenizers that have started or ended: until one says that requests are computed, and later.
FIRST_SEARCH_SECONDS, SEARCH_SECONDS = 0.02, 1.0


def main(process: Process) -> None:
    """Serves until SIGTERM, then finishes the requests in flight."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(process))


async def serve(process: Process) -> None:
    """The same on a running loop."""
    settings = process.settings
    loop = asyncio.get_running_loop()
    limit = settings.max_concurrent_requests
    new_router = partial(
        Router,
        [],
        Permits(process.run_dir / "permits", limit, home=limit * process.replica // settings.api_workers),
        Quarantine(process.run_dir),
        RingRecorder(ring_path(process.run_dir, process.name)),
        partial(work_in_progress, process.run_dir),
        settings.stall_limit,
        TokenRates(process.run_dir / "token-rates"),
        media_directory(process.run_dir),
        f"{process.name}-{process.boot.hex()[:8]}",
    )
    router = new_router()
    assert settings.model_id is not None  # the command line has set the default
    assert process.listen_fd is not None  # and opened the port
    tracer = tracing.create_tracer(settings, process.name)
    in_memory = settings.response_store == "memory"
    service = Service(
        settings,
        router,
        settings.model_id,
        settings.compute_type or "",
        process.run_dir,
        tracer=tracer,
        store_dir=None if in_memory else process.run_dir,
    )
    service.clients.reload_if_readable()  # another front end may have reloaded since the settings were read
    application = app.build(service)
    dispatcher = build_dispatcher(service, application, new_router) if settings.models else None
    if dispatcher is not None:
        application = dispatcher
    models = service.models
    routers = [router] if models is None else [model.router for model in models.all.values()]
    batches = BatchRunner(application, service, f"{process.name} {process.boot.hex()}")
    certificate = await load_certificate(settings, process)

    def tick() -> None:
        process.heartbeat(TICK_SECONDS)
        if process.beat_due:
            beats = [one.health.beat for one in routers]
            process.exchange_beats(max(beats, key=lambda beat: beat.progress_age_ms or 0))

    server = HttpServer(application, settings, certificate, tick)

    stopped_at = 0.0

    def stop() -> None:
        nonlocal stopped_at
        stopped_at = stopped_at or loop.time()
        process.stop()
        batches.stop()
        process.publish_state("draining")
        process.extend_deadline(settings.graceful_termination_timeout + 10)
        server.stop(process.handing_over)

    def hand_over() -> None:
        process.hand_over()
        stop()

    loop.add_signal_handler(signal.SIGTERM, stop)
    loop.add_signal_handler(HAND_OVER, hand_over)
    loop.add_signal_handler(signal.SIGHUP, lambda: start_task(reload_files(service)))
    for fd in process.wakeup_fds:
        loop.add_reader(fd, process.handle_wakeup)
    for one in routers:
        one.attach(loop)

    tasks: set[asyncio.Task[None]] = set()

    def start_task(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = loop.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    def report(stage: str) -> None:
        if not process.stopping:
            process.publish_state("starting" if stage else "ready", stage)

    if process.stopping:  # a signal arrived before add_signal_handler
        stop()
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    start_task(batches.run())
    if models is None or dispatcher is None:
        start_task(follow_tokenizers(router, process, settings.pipeline))
        probe_task = start_task(run_readiness_probe(application, service, report))
    else:
        for pipeline, model in enumerate(models.all.values(), 1):
            start_task(follow_tokenizers(model.router, process, pipeline))
            start_task(dispatcher.probe(model))
        probe_task = start_task(models.follow())
        start_task(report_start(models, report))
    try:
        await router.health.wait_for_status(FIRST_STATUS_SECONDS if models is None else 0.0)
        # In a running deployment, connections wait in the port's queue or go to another front end until the probe has
        # passed. While the other processes start, this one answers 503 with their stage.
        while router.health.can_compute and not (probe_task.done() or router.health.probe_failure or process.stopping):
            await asyncio.sleep(0.005)
        await server.serve(sockets=[socket.socket(fileno=process.listen_fd)])
        await service.close(max(0.0, stopped_at + settings.graceful_termination_timeout - loop.time()))
    finally:
        for task in list(tasks):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        for one in routers:
            one.close()
        if tracer is not None:
            tracer.close()


async def reload_files(service: Service) -> None:
    """Reads the key file again, and has the worker read the loaded adapters again, of which those with other content
    replace what was loaded. What cannot be read stays as it is."""
    if service.clients.reload_if_readable():
        log.info("reloaded the keys")
    for adapter in list(service.router.adapters.values()):
        request = AdapterUpdateRequest(WakeEvent(), adapter.name, adapter.path)
        service.router.submit(request)
        while not request.ended:
            await request.wake_event.wait()
        if request.result is not None and request.result.error:
            log.error("The adapter %s is not reloaded: %s", adapter.name, request.result.error)
        else:
            log.info("reloaded the adapter %s", adapter.name)


def build_dispatcher(service: Service, application: AsgiApp, new_router: Callable[[], Router]) -> ModelDispatcher:
    """The application in front of several models. The first one has this service and application."""
    names = [entry.partition("=")[0] for entry in service.settings.models]
    service.model_id = names[0]
    services = {name: service.for_model(name, new_router()) if number else service for number, name in enumerate(names)}
    hosted = [HostedModel(name, one.router) for name, one in services.items()]
    models = Models(service.run_dir / SOCKET_NAME, hosted)
    for one in services.values():
        one.models = models
    applications = {name: application if one is service else app.build(one) for name, one in services.items()}
    return ModelDispatcher(models, services, applications)


async def report_start(models: Models, report: Callable[[str], None]) -> None:
    """Reports the stage of several models until those that are loaded at start have been."""
    while stage := models.stage:
        report(stage)
        await models.change()
    report("")


async def follow_tokenizers(router: Router, process: Process, pipeline: int) -> None:
    """Keeps the router's links equal to the sockets of tokenizers of a pipeline in the run directory, or to what
    --connect names, and to those of media processes here.

    A tokenizer that ends leaves its socket, which the process that replaces it binds again; the supervisor removes that
    of one that is not replaced.
    """
    directory = pipeline_directory(process.run_dir, pipeline)

    def find() -> list[str]:
        return [f"ipc://{directory / name}" for name in tokenizer_sockets(directory)]

    elsewhere = process.settings.connect
    links = DownstreamLinks(
        Discovery(elsewhere).addresses if elsewhere else find, partial(process.connect_link, hello=process.hello())
    )
    tokenizers: dict[Link, TokenizerConnection] = {}

    def find_media() -> list[str]:
        return [f"ipc://{directory / name}" for name in media_sockets(directory)]

    media = DownstreamLinks(find_media, partial(process.connect_link, hello=process.hello()))
    while True:
        router.images.follow(media)
        added, removed = links.follow()
        tokenizers |= {link: router.add_tokenizer(link) for link in added}
        for link in removed:
            router.remove_tokenizer(tokenizers.pop(link))
        await asyncio.sleep(SEARCH_SECONDS if router.health.can_compute else FIRST_SEARCH_SECONDS)


async def load_certificate(settings: Settings, process: Process) -> ServerCertificate | None:
    """The certificate, if there is one. Waits for usable files: `tgi up` has checked them, so they are being replaced
    while this front end restarts."""
    if settings.ssl_certfile is None:
        return None
    while True:
        try:
            return ServerCertificate(settings.ssl_certfile, settings.ssl_keyfile)
        except UserError as error:
            log.error("%s Trying again.", error)
        process.heartbeat(TICK_SECONDS)
        await asyncio.sleep(TICK_SECONDS)
