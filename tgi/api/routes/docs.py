"""GET /api-doc/openapi.json, and /docs, where Swagger UI shows it. Nothing is built or read before it is asked for."""

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import falcon
import msgspec
from falcon.asgi import Request, Response

from tgi.api.service import Service

# What the page loads, from the installed package.
ASSETS = {
    "swagger-ui.css": "text/css; charset=utf-8",
    "swagger-ui-bundle.js": "text/javascript; charset=utf-8",
    "favicon-32x32.png": "image/png",
}

# Addresses are relative, so that the page also works behind a proxy that puts a prefix before all paths. Without
# `validatorUrl` the browser would send the document's address to another host.
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>Text Generation Inference</title>
<link rel="stylesheet" href="{assets}swagger-ui.css">
<link rel="icon" type="image/png" href="{assets}favicon-32x32.png">
</head>
<body>
<div id="swagger-ui"></div>
<script src="{assets}swagger-ui-bundle.js"></script>
<script>
SwaggerUIBundle({{ url: "{document}", dom_id: "#swagger-ui", validatorUrl: null }});
</script>
</body>
</html>
"""


class OpenApiResource:
    """GET /api-doc/openapi.json."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def on_get(self, req: Request, resp: Response) -> None:
        """The document of what this server serves."""
        resp.content_type = "application/json"
        resp.data = _document(self._service.settings.kserve)

    on_head = on_get  # falcon leaves the body out


class DocsResource:
    """GET /docs and /docs/ (the page), and /docs/{asset}."""

    async def on_get(self, req: Request, resp: Response, asset: str = "") -> None:
        """One file, or 404."""
        if not asset:
            inside = req.path.endswith("/")
            resp.content_type = "text/html; charset=utf-8"
            resp.text = PAGE.format(
                assets="" if inside else "docs/", document=("../" if inside else "") + "api-doc/openapi.json"
            )
            return
        if asset not in ASSETS:
            raise falcon.HTTPNotFound
        resp.content_type = ASSETS[asset]
        resp.set_header("cache-control", "max-age=86400")
        resp.data = _asset(asset)

    on_head = on_get  # falcon leaves the body out


@cache
def _document(with_kserve: bool) -> bytes:
    from tgi.api import openapi

    return msgspec.json.encode(openapi.document(with_kserve))


@cache
def _asset(name: str) -> bytes:
    package = find_spec("swagger_ui")
    assert package is not None  # one of this program's dependencies
    assert package.origin is not None
    return (Path(package.origin).parent / "static" / name).read_bytes()
