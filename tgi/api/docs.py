"""GET /api-doc/openapi.json, and /docs, where Swagger UI shows it. Both are built and read at the first request."""

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import falcon
import msgspec
from falcon.asgi import Request, Response

from tgi.api.service import Resource

# The files that the page loads from the installed package swagger_ui, and their content types.
ASSETS = {
    "swagger-ui.css": "text/css; charset=utf-8",
    "swagger-ui-bundle.js": "text/javascript; charset=utf-8",
    "favicon-32x32.png": "image/png",
}

# Addresses are relative, so that the page also works behind a proxy that adds a prefix to all paths. With the default
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


class OpenApiResource(Resource):
    """GET /api-doc/openapi.json."""

    async def on_get(self, req: Request, resp: Response) -> None:
        resp.content_type = "application/json"
        resp.data = _document(self._service.settings.kserve, bool(self._service.settings.models))

    on_head = on_get  # falcon omits the body


class DocsResource(Resource):
    """GET /docs and /docs/ (the page), and /docs/{asset}."""

    async def on_get(self, req: Request, resp: Response, asset: str = "") -> None:
        if not asset:
            in_directory = req.path.endswith("/")
            resp.content_type = "text/html; charset=utf-8"
            resp.text = PAGE.format(
                assets="" if in_directory else "docs/",
                document=("../" if in_directory else "") + "api-doc/openapi.json",
            )
            return
        if asset not in ASSETS:
            raise falcon.HTTPNotFound
        resp.content_type = ASSETS[asset]
        resp.set_header("cache-control", "max-age=86400")
        resp.data = _asset(asset)

    on_head = on_get  # falcon omits the body


ROUTES: dict[str, type[Resource]] = {
    "/api-doc/openapi.json": OpenApiResource,
    "/docs": DocsResource,
    "/docs/": DocsResource,
    "/docs/{asset}": DocsResource,
}


@cache
def _document(with_kserve: bool, with_models: bool) -> bytes:
    from tgi.api import openapi

    return msgspec.json.encode(openapi.document(with_kserve, with_models))


@cache
def _asset(name: str) -> bytes:
    package = find_spec("swagger_ui")
    assert package is not None  # a dependency
    assert package.origin is not None
    return (Path(package.origin).parent / "static" / name).read_bytes()
