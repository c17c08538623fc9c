"""Readiness: a front end admits clients once it has answered requests of its own.

What the other processes say of themselves does not show that a request is answered: a module may be missing or shadowed
in any role, this one included. So as soon as a request could be computed, one token is generated through this front
end's own routes, a tokenizer, the scheduler and the worker. Such a request holds no permit and is not counted, logged
as a success or traced (`calls.probing`).
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from tgi.api.asgi import Asgi
from tgi.api.calls import probing
from tgi.api.service import Service

log = logging.getLogger(__name__)

# Valid with every model and under all limits: the prompt has characters that any vocabulary covers, and one token of it
# stays; the limit of request bodies does not apply.
GENERATE = b'{"inputs":"Is 1 + 1 = 2?","parameters":{"max_new_tokens":1,"truncate":1,"details":true}}'
PROBES = (("POST", "/generate", GENERATE), ("GET", "/info", b""))
# Seconds between two attempts: doubled after each that fails.
FIRST_WAIT_SECONDS, MAX_WAIT_SECONDS = 0.5, 30.0
MAX_REASON_CHARACTERS = 300


async def prove(app: Asgi, service: Service, report: Callable[[str], None]) -> None:
    """Returns when `app` has answered the probes, and the router may admit clients. Until then the router's
    `first_failure` says which one has failed, and the log why. `report` gets the stage of start-up, and "" at its end.
    """
    router = service.router
    probing.set(True)  # in the context of this task
    wait, told = FIRST_WAIT_SECONDS, ("", "")
    while True:
        await router.computable()
        report(router.stage)
        request = reason = ""
        for method, path, body in PROBES:
            request = f"{method} {path}"
            if reason := await _failure(app, service, method, path, body):
                break
        if not reason:
            break
        if (request, reason) != told:
            log.error("Not ready: the first request, which this server sends to itself, failed: %s %s", request, reason)
        told = request, reason
        router.first_failure = f"the first request failed: {request}"
        report(router.first_failure)
        await asyncio.sleep(wait)
        wait = min(2 * wait, MAX_WAIT_SECONDS)
    router.proven = True
    report("")


async def _failure(app: Asgi, service: Service, method: str, path: str, body: bytes) -> str:
    """What went wrong with a request, or "" if its answer is a 200."""
    settings = service.settings
    headers = {"content-type": "application/json", "content-length": str(len(body))}
    if settings.api_key:
        headers["authorization"] = f"Bearer {settings.api_key[0]}"
    try:
        async with asyncio.timeout(settings.stall_limit):
            status, answer = await _ask(app, method, path, body, headers)
    except TimeoutError:
        return f"has had no answer for {settings.stall_limit:g} s"
    except Exception as error:
        return f"raised {type(error).__name__}: {error}"
    if status == 200:
        return ""
    return f"was answered with {status} {answer.decode(errors='replace')[:MAX_REASON_CHARACTERS]}"


async def _ask(app: Asgi, method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
    """Sends one request to an ASGI application. Returns status and body of the answer."""
    scope: dict[str, Any] = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": None, "server": None,
    }  # fmt: skip
    incoming = [{"type": "http.request", "body": body, "more_body": False}]
    outgoing: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if not incoming:
            await asyncio.Event().wait()  # this client does not leave
        return incoming.pop()

    async def send(event: dict[str, Any]) -> None:
        outgoing.append(event)

    await app(scope, receive, send)
    return outgoing[0]["status"], b"".join(event.get("body", b"") for event in outgoing)
