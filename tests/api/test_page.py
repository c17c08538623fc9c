"""The page at / and /ui: its files, what browsers are told to allow, and who sees the state of the processes."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urljoin

import pytest

from tests.api.conftest import Front
from tgi.api import page
from tgi.microkernel.messages.protocol import RequestContext
from tgi.microkernel.observability.flight_recorder import Event, RingRecorder, ring_path

MAX_BYTES = 150_000
FILES = sorted(path for path in Path(page.__file__).parent.iterdir() if path.suffix in page.CONTENT_TYPES)
BROWSER = "text/html,application/xhtml+xml,*/*;q=0.8"


@pytest.mark.parametrize("path", ["/", "/ui", "/ui/"])
def test_the_page_loads_its_own_files_alone(front: Front, path: str) -> None:
    """By relative addresses: a proxy may add a prefix to all paths."""
    reply = front.get(path, accept=BROWSER)
    assert (reply.status, reply.headers["content-type"]) == (200, "text/html; charset=utf-8")
    text = reply.body.decode()
    assert "//" not in text.replace("<!DOCTYPE html>", "")
    here = f"http://server/prefix{path}"
    addresses = re.findall(r'<(?:link|script)[^>]* (?:href|src)="([^"]*)"', text)
    loaded = [urljoin(here, address).removeprefix("http://server/prefix") for address in addresses]
    assert loaded == ["/ui/style.css", "/ui/icon.svg", "/ui/main.js"]
    assert {front.get(file).status for file in loaded} == {200}
    (root,) = re.findall(r'data-root="([^"]*)"', text)
    assert urljoin(here, root) == "http://server/prefix/"


def test_browsers_may_load_nothing_else(front: Front) -> None:
    for path in ("/ui", "/ui/main.js"):
        policy = front.get(path).headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
    for file in FILES:
        text = file.read_text()
        assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            file
        )
        assert not re.findall(r"""(?:import|from|fetch\(|url\()\s*["']?https?:""", text), file


def test_the_files_are_small_and_no_others_are_served(front: Front) -> None:
    size = len(front.get("/ui").body)
    for file in FILES:
        reply = front.get(f"/ui/{file.name}")
        assert (reply.status, reply.body) == (200, file.read_bytes())
        assert reply.headers["content-type"] == page.CONTENT_TYPES[file.suffix]
        assert front.get(f"/ui/{file.name}", "HEAD").headers["content-length"] == str(len(reply.body))
        size += len(reply.body)
    assert size < MAX_BYTES
    for path in ("/ui/x.js", "/ui/__init__.py", "/ui/index.html", "/ui/..%2fapp.py", "/ui/../app.py", "/ui/a/b"):
        assert front.get(path).status == 404, path


def test_the_state_needs_a_key_where_there_are_keys(serve: Callable[..., Front]) -> None:
    front = serve(api_key=("secret",))
    assert front.get("/ui").status == 200
    for path in ("/ui/state", "/ui/requests", "/ui/requests/x"):
        assert front.get(path).status == 401, path
    state = json.loads(front.get("/ui/state", authorization="Bearer secret").body)
    assert sorted(state) == ["first_token", "inter_token", "load", "processes"]


def test_requests_in_flight_and_where_their_time_went(front: Front) -> None:
    recorder = RingRecorder(ring_path(front.service.run_dir, "api-0"))
    ended, waiting = RequestContext(request_key=77), RequestContext(request_key=78)
    for context in (ended, waiting):
        recorder.stamp(Event.RECEIVED, context, 0, 0)
        recorder.stamp(Event.SUBMITTED, context, 3, 0)
    recorder.stamp(Event.ANSWERED, ended, 5, 0)
    (one,) = json.loads(front.get("/ui/requests").body)["in_flight"]
    assert (one["id"].lstrip("0"), one["phase"]) == ("4e", "tokenizer")
    assert 0 <= one["seconds"] < time.monotonic()
    (told,) = json.loads(front.get(f"/ui/requests/{one['id']}").body)["generations"]
    assert any("sent to tokenizer-3" in line for line in told["lines"])
    assert front.get("/ui/requests/unknown").status == 404


def test_without_the_page(serve: Callable[..., Front]) -> None:
    front = serve(ui=False)
    assert (front.get("/", accept=BROWSER).status, front.get("/", accept=BROWSER).body) == (200, b"")
    assert {front.get(path).status for path in ("/ui", "/ui/main.js", "/ui/state")} == {404}
