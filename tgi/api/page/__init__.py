"""The page at / and /ui: a chat, a live view of the processes, and where the time of a request went.

Its files are this directory's. They need no build and load nothing from elsewhere; answers become text nodes only, and
the Content-Security-Policy allows no other scripts. /ui/state and /ui/requests are what `tgi top` and `tgi why` show,
for those who have a key, if there are keys.
"""

import asyncio
import time
from functools import cache
from math import inf, isinf
from pathlib import Path
from typing import Any

import falcon
import msgspec
from falcon.asgi import Request, Response

from tgi.api.errors import Rejection
from tgi.api.service import Resource, Service
from tgi.microkernel.observability import flight_recorder, request_timeline
from tgi.microkernel.observability.request_timeline import Timeline
from tgi.microkernel.processes.process_table import Deployment

CONTENT_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
# The state is looked at this rarely, however many pages show it.
STATE_SECONDS = 0.5
# Of requests in flight the oldest ones are listed.
MAX_REQUESTS = 100
# Histograms of the state, in seconds.
HISTOGRAMS = {"first_token": "tgi_time_to_first_token_duration", "inter_token": "tgi_inter_token_duration"}


def send_page(resp: Response, assets: str, root: str) -> None:
    """Answers with the page. Addresses are relative, so that it also works behind a proxy that adds a prefix: `assets`
    is that of its files, `root` that of the server."""
    resp.content_type = "text/html; charset=utf-8"
    resp.set_headers(HEADERS)
    resp.text = _file("index.html").decode().format(assets=assets, root=root)


class PageResource(Resource):
    """GET /ui and /ui/ (the page), and /ui/{asset}."""

    async def on_get(self, req: Request, resp: Response, asset: str = "") -> None:
        if not asset:
            in_directory = req.path.endswith("/")
            send_page(resp, "" if in_directory else "ui/", "../" if in_directory else "./")
            return
        content_type = CONTENT_TYPES.get(Path(asset).suffix)
        if content_type is None or asset not in _names():
            raise falcon.HTTPNotFound
        resp.content_type = content_type
        resp.set_headers(HEADERS)
        resp.data = _file(asset)

    on_head = on_get  # falcon omits the body


class StateResource(Resource):
    """GET /ui/state: the processes of this host, their load, and histograms."""

    private = True

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._deployment = Deployment(service.run_dir)
        self._state, self._until = b"", 0.0
        self._looking = asyncio.Lock()

    async def on_get(self, req: Request, resp: Response) -> None:
        """Answers with `processes`, `load` and the histograms: [[upper bound in seconds or null, count], ...]."""
        async with self._looking:
            if time.monotonic() >= self._until:
                self._state = await asyncio.to_thread(self._look)
                self._until = time.monotonic() + STATE_SECONDS
        resp.content_type = "application/json"
        resp.data = self._state

    def _look(self) -> bytes:
        deployment = self._deployment
        deployment.refresh()
        histograms: dict[str, Any] = {}
        for name, series in HISTOGRAMS.items():
            parts = dict(deployment.series.get(series, {}).get((), {}))
            parts.pop("sum", None)
            counts = sorted((inf if bound is None else float(bound), int(count)) for bound, count in parts.items())
            histograms[name] = [[None if isinf(bound) else bound, count] for bound, count in counts]
        rows = [{name: value for name, value in row.items() if name != "run"} for row in deployment.rows()]
        return msgspec.json.encode({"processes": rows, "load": deployment.load(), **histograms})


class RequestsResource(Resource):
    """GET /ui/requests (those in flight) and /ui/requests/{name} (where the time of one went)."""

    private = True

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._reading = asyncio.Lock()  # the rings of all processes are some MB

    async def on_get(self, req: Request, resp: Response, name: str = "") -> None:
        """Answers with `in_flight`, or with `generations`, each with `seconds` by phase and `lines` as `tgi why` prints
        them. 404 if no process remembers the request."""
        async with self._reading:
            told = await (asyncio.to_thread(self._explain, name) if name else asyncio.to_thread(self._list))
        if name and not told:
            raise Rejection(404, "No process remembers a request with this id: it is in the header x-request-id.")
        resp.content_type = "application/json"
        resp.data = msgspec.json.encode({"generations" if name else "in_flight": told})

    def _list(self) -> list[dict[str, Any]]:
        stamps = flight_recorder.read_stamps(self._service.run_dir)
        return [one._asdict() for one in request_timeline.in_flight(stamps, time.monotonic())[:MAX_REQUESTS]]

    def _explain(self, name: str) -> list[dict[str, Any]]:
        stamps = flight_recorder.read_stamps(self._service.run_dir)
        generations = [
            Timeline(stamps, key, index)
            for key in flight_recorder.find_requests(stamps, name)
            for index in request_timeline.generations(stamps, key)
        ]
        return [{"seconds": one.seconds, "lines": list(one.lines())} for one in generations]


ROUTES: dict[str, type[Resource]] = {
    "/ui": PageResource,
    "/ui/": PageResource,
    "/ui/{asset}": PageResource,
    "/ui/state": StateResource,
    "/ui/requests": RequestsResource,
    "/ui/requests/{name}": RequestsResource,
}


@cache
def _names() -> frozenset[str]:
    return frozenset(path.name for path in Path(__file__).parent.iterdir())


@cache
def _file(name: str) -> bytes:
    return (Path(__file__).parent / name).read_bytes()
