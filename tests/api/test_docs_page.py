"""GET /api-doc/openapi.json and /docs: the document, the page, and that nothing else is served from disk."""

import json
import re
import subprocess
import sys

from tests.api.conftest import Front
from tgi.api import app, docs, openapi, page
from tgi.api.docs import ASSETS


def test_the_document(front: Front) -> None:
    reply = front.get("/api-doc/openapi.json")
    assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
    assert json.loads(reply.body) == openapi.document()
    assert front.get("/api-doc/openapi.json", "HEAD").body == b""


def test_the_page_loads_from_this_server_alone(front: Front) -> None:
    for path, document in (("/docs", "/api-doc/openapi.json"), ("/docs/", "/api-doc/openapi.json")):
        reply = front.get(path)
        assert (reply.status, reply.headers["content-type"]) == (200, "text/html; charset=utf-8")
        page = reply.body.decode()
        assert "//" not in page.replace("<!DOCTYPE html>", "")
        addresses = [f"{path.rpartition('/')[0]}/{found}" for found in re.findall(r'(?:href|src)="([^"]*)"', page)]
        assert addresses == [
            f"/docs/{name}" for name in ("swagger-ui.css", "favicon-32x32.png", "swagger-ui-bundle.js")
        ]
        (url,) = re.findall(r'url: "([^"]*)"', page)
        assert url == ("../api-doc/openapi.json" if path == "/docs/" else "api-doc/openapi.json")
        assert front.get(document).status == 200


def test_what_the_page_loads(front: Front) -> None:
    for name, kind in ASSETS.items():
        reply = front.get(f"/docs/{name}")
        assert (reply.status, reply.headers["content-type"]) == (200, kind)
        assert len(reply.body) > 500
        assert front.get(f"/docs/{name}", "HEAD").headers["content-length"] == str(len(reply.body))
    assert b"SwaggerUIBundle" in front.get("/docs/swagger-ui-bundle.js").body


def test_other_files_are_not_served(front: Front) -> None:
    for path in ("/docs/x", "/docs/../pyproject.toml", "/docs/..%2f__init__.py", "/docs/%2e%2e/core.py", "/docs/a/b"):
        reply = front.get(path)
        assert (reply.status, reply.body) == (404, b"")


def test_every_route_is_in_the_document(front: Front) -> None:
    own = {*docs.ROUTES, *page.ROUTES}
    classes = app.resource_classes(front.settings)
    served = {re.sub(r":\w+\}", "}", route): resource for route, resource in classes.items()}
    methods = {
        (path, method)
        for path, resource in served.items()
        for method in ("get", "post", "put", "patch", "delete")
        if path not in own and hasattr(resource, f"on_{method}")
    }
    paths = openapi.document()["paths"]
    assert methods == {(path, method) for path, described in paths.items() for method in described}


def test_importing_the_app_builds_no_document() -> None:
    code = "import sys, tgi.api.app; sys.exit('tgi.api.openapi' in sys.modules or 'swagger_ui' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
