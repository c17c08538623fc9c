"""Checks responses against the OpenAPI document."""

import json
import re
from functools import cache
from typing import Any

from jsonschema_rs import Draft202012Validator

from tgi.api import openapi


@cache
def document() -> dict[str, Any]:
    read: dict[str, Any] = json.loads(json.dumps(openapi.document(with_kserve=True)))
    return read


@cache
def operation(method: str, path: str) -> dict[str, Any] | None:
    """The operation of a method and path in the document, or None."""
    for template, methods in document()["paths"].items():
        if re.fullmatch(re.sub(r"\{\w+\}", "[^/?]+", template), path.partition("?")[0]):
            described: dict[str, Any] | None = methods.get(method.lower())
            return described
    return None


@cache
def validator(operation_id: str, status: str, media: str) -> Draft202012Validator:
    """The validator of the bodies of one operation, status and media type. Raises KeyError if none is documented."""
    described = next(
        op for methods in document()["paths"].values() for op in methods.values() if op["operationId"] == operation_id
    )
    schema = described["responses"][status]["content"][media]["schema"]
    return Draft202012Validator({**schema, "components": document()["components"]})


def conforms(request: bytes, reply: Any, with_kserve: bool) -> None:
    """Raises if the operation is documented and the response is not."""
    method, path, *_ = [*request.split(b"\r\n", 1)[0].decode("latin-1").split(" "), "", ""]
    described = operation(method, path)
    if described is None or (path.startswith("/v2") and not with_kserve):
        return
    status = str(reply.status)
    assert status in described["responses"], f"{method} {path}: {status} is not documented"
    if not reply.body:
        assert status == "200" or "content" not in described["responses"][status], f"{status} without a body"
        return
    media = reply.headers["content-type"].partition(";")[0]
    assert media in described["responses"][status].get("content", {}), f"{method} {path}: {status} with {media}"
    for body in bodies(reply, media):
        validator(described["operationId"], status, media).validate(body)


def bodies(reply: Any, media: str) -> list[Any]:
    """The body, or the data of each event of a stream."""
    if media == "application/json":
        return [json.loads(reply.body)]
    if media != "text/event-stream":
        return [reply.body.decode(errors="replace")]  # a file may have any bytes
    events = re.findall(r"^data: (.*)$", reply.body.decode(), re.MULTILINE)
    return [json.loads(event) for event in events if event != "[DONE]"]
