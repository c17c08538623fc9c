"""The readiness probe: a front end admits clients once it has answered requests of its own.

The status of the other processes does not show that a request would be answered: in any process, this one included, a
module may be missing or shadowed. So as soon as a request could be computed, one token is generated, or one vector
made, through the routes of this front end, a tokenizer, the scheduler and the worker. PROBE_KEY in the ASGI scope marks
such a request: it holds no permit, and is not counted, logged or traced. Of a model that sees images, the media
processes load a small one: their image processor takes seconds to import.
"""

import asyncio
import logging
from collections.abc import Callable

from tgi.api.asgi import PROBE_KEY, AsgiApp, send_request
from tgi.api.service import Service
from tgi.microkernel.messages.protocol import ModelTask

log = logging.getLogger(__name__)

# Valid for every model and limit: the prompt has characters of any vocabulary, and is truncated to one token. The limit
# of request bodies does not apply.
GENERATE_BODY = b'{"inputs":"Is 1 + 1 = 2?","parameters":{"max_new_tokens":1,"truncate":1,"details":true}}'
POOLING_BODY = b'{"inputs":"Is 1 + 1 = 2?","truncate":true}'
# By what the model does.
PROBES = {
    ModelTask.GENERATE: ("POST", "/generate", GENERATE_BODY),
    ModelTask.EMBED: ("POST", "/embed", POOLING_BODY),
    ModelTask.CLASSIFY: ("POST", "/predict", POOLING_BODY),
}
INFO_PROBE = ("GET", "/info", b"")
# Tokenized, which makes no step of thousands of tokens: a grey image of 32 by 32 pixels.
IMAGE_BODY = (
    b'{"inputs":"![](data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAACAAAAAgCAAAAABWESUoAAAAFklEQVR42mNoIAAYRhWMKhhVMFIV'
    b'AABCAAAfN5c2AAAAAABJRU5ErkJggg==)"}'
)
IMAGE_PROBE = ("POST", "/tokenize", IMAGE_BODY)
# Between two attempts: doubled after each failure.
FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.5, 30.0
MAX_REASON_CHARACTERS = 300


async def run_readiness_probe(app: AsgiApp, service: Service, report: Callable[[str], None]) -> None:
    """Sends the probes to `app` until all are answered with 200; then clients are admitted.

    Until then the health's `probe_failure` names the one that has failed, and the log the reason. `report` is called
    with the stage of the start, and with "" at its end.
    """
    health = service.router.health
    retry_seconds, logged = FIRST_RETRY_SECONDS, ("", "")
    while True:
        await health.wait_until_computing()
        report(health.stage)
        request = reason = ""
        source = service.router.source
        probes = PROBES[ModelTask(source.task)], INFO_PROBE, *((IMAGE_PROBE,) if source.image_token else ())
        for method, path, body in probes:
            request = f"{method} {path}"
            if reason := await _probe_failure(app, service, method, path, body):
                break
        if not reason:
            break
        if (request, reason) != logged:
            log.error("Not ready: the first request, which this server sends to itself, failed: %s %s", request, reason)
        logged = request, reason
        health.end_probe(f"the first request failed: {request}")
        report(health.probe_failure)
        await asyncio.sleep(retry_seconds)
        retry_seconds = min(2 * retry_seconds, MAX_RETRY_SECONDS)
    health.end_probe("")
    report("")


async def _probe_failure(app: AsgiApp, service: Service, method: str, path: str, body: bytes) -> str:
    """Sends one probe. Returns why it has failed, or "" for a 200."""
    settings = service.settings
    key = service.clients.first_key
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        async with asyncio.timeout(settings.stall_limit):
            response = await send_request(app, method, path, body, headers, {PROBE_KEY: True})
    except TimeoutError:
        return f"has had no answer for {settings.stall_limit:g} s"
    except Exception as error:
        return f"raised {type(error).__name__}: {error}"
    if response.status == 200:
        return ""
    return f"was answered with {response.status} {response.body.decode(errors='replace')[:MAX_REASON_CHARACTERS]}"
