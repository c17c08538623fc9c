"""The api process: one uvicorn server on the shared port, and the links to all tokenizers."""

import asyncio
import contextlib
import gc
import logging
import signal
import socket
from collections.abc import Iterator

import uvicorn
import uvloop

from tgi.api import app
from tgi.api.protocol import Protocol
from tgi.api.readiness import prove
from tgi.api.router import Router
from tgi.api.service import Service
from tgi.kernel import tracing
from tgi.kernel.link import Link
from tgi.kernel.permits import Permits
from tgi.kernel.process import Process

log = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
# How long a silent connection stays open: longer than the usual load balancer (60 s) keeps it for its next request.
KEEP_ALIVE_SECONDS = 75
# A front end that takes the place of another waits this long to hear from a tokenizer before it accepts connections.
INTRODUCTION_SECONDS = 1.0


def main(process: Process) -> None:
    """Serves until SIGTERM, then finishes what is in flight."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(process))


async def serve(process: Process) -> None:
    """The same on a running loop."""
    settings = process.settings
    loop = asyncio.get_running_loop()
    links = [
        Link.connect(process.address(f"tok-{place}.front"), process.hello())
        for place in range(settings.validation_workers)
    ]
    limit = settings.max_concurrent_requests
    permits = Permits(process.run_dir / "permits", limit, home=limit * process.place // settings.api_workers)
    router = Router(links, permits)
    assert settings.model_id is not None  # the command line has filled in the default
    assert process.listen_fd is not None  # and has taken the port
    tracer = tracing.tracer(settings, process.name)
    service = Service(settings, router, settings.model_id, settings.compute_type or "", tracer=tracer)
    config = configure(service)
    server = Server(config, process)
    loop.add_signal_handler(signal.SIGTERM, server.stop)
    for fd in process.fds:
        loop.add_reader(fd, process.woken)
    router.attach(loop)

    def report(stage: str) -> None:
        if not process.stopping:
            process.state("starting" if stage else "ready", stage)

    if process.stopping:  # the signal came before this loop listened to it
        server.stop()
    gc.collect()
    gc.freeze()
    proof = loop.create_task(prove(config.app, service, report))  # type: ignore[arg-type]  # made by configure
    try:
        await router.introduced(INTRODUCTION_SECONDS)
        # In a running deployment connections wait in the port's queue, or go to another front end, until this one has
        # tried itself. While the others start, it tells how far they are.
        while router.computes and not (proof.done() or router.first_failure or process.stopping):
            await asyncio.sleep(0.005)
        await server.serve(sockets=[socket.socket(fileno=process.listen_fd)])
    finally:
        proof.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await proof
        router.close()
        if tracer is not None:
            tracer.close()


class Server(uvicorn.Server):
    """uvicorn, driven by the kernel's process: its signals, its beat, and no wake-ups ten times a second."""

    def __init__(self, config: uvicorn.Config, process: Process) -> None:
        super().__init__(config)
        self._process = process
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """Stops accepting; requests in flight are finished."""
        self._process.stop()
        self._process.state("draining")
        self.should_exit = True
        self._stop.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The process handles them."""
        yield

    async def main_loop(self) -> None:
        """Once a second: the Date header, and the beat for the watchdog."""
        while not await self.on_tick(0):
            self._process.beat(BEAT_SECONDS)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), BEAT_SECONDS)
        self._process.promise(self._process.settings.graceful_termination_timeout + 10)


def configure(service: Service) -> uvicorn.Config:
    """uvicorn without its own logs, signals and headers; httptools parses."""
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    return uvicorn.Config(
        app.build(service),
        http=Protocol,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=int(service.settings.graceful_termination_timeout),
    )
