"""The OpenAPI 3.1 document: the table of operations, and schemas made from the types that read the requests."""

import inspect
import re
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import msgspec

import tgi
from tgi.api.errors import ErrorResponse
from tgi.api.operations import JSON, KSERVE, OPERATIONS, Operation, Reply
from tgi.api.shapes import adapters, chat, cloud, completions, info, kserve, native, native_answers, openai_answers
from tgi.api.shapes.refined import REFINED
from tgi.api.shapes.types import ref

SHAPES = (native, native_answers, chat, completions, openai_answers, info, adapters, cloud)
TAG = "Text Generation Inference"
KEY = "key"


def document(with_kserve: bool = False) -> dict[str, Any]:
    """The document, as an object that can be printed as JSON."""
    operations = OPERATIONS + (KSERVE if with_kserve else ())
    schemas = _Schemas(operations, SHAPES + ((kserve,) if with_kserve else ()))
    paths: dict[str, Any] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Text Generation Inference",
            "description": "Text Generation Webserver",
            "license": {"name": "Apache 2.0", "url": "https://www.apache.org/licenses/LICENSE-2.0"},
            "version": tgi.CONTRACT_VERSION,
        },
        "paths": paths,
        "components": {
            "schemas": schemas.components,
            "securitySchemes": {
                KEY: {"type": "http", "scheme": "bearer", "description": "One of the server's keys, if it has any."}
            },
        },
        "tags": [{"name": TAG, "description": "Hugging Face Text Generation Inference API"}],
    }


def _operation(operation: Operation, schemas: "_Schemas") -> dict[str, Any]:
    made: dict[str, Any] = {"tags": [TAG], "summary": operation.summary, "operationId": operation.id}
    if names := re.findall(r"\{(\w+)\}", operation.path):
        made["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if operation.request is not None:
        made["requestBody"] = {"content": {JSON: {"schema": schemas.of(operation.request)}}, "required": True}
    if operation.secured:
        made["security"] = [{}, {KEY: []}]
    made["responses"] = _responses(operation.all_replies, schemas)
    return made


def _responses(replies: Iterable[Reply], schemas: "_Schemas") -> dict[str, Any]:
    """By status; replies of one status are merged, and so are their bodies of one media type."""
    made: dict[str, Any] = {}
    forms: dict[tuple[int, str], list[Any]] = {}
    for reply in replies:
        before = made.setdefault(str(reply.status), {})
        told = before.get("description")
        before["description"] = f"{told}, or: {reply.description}" if told else reply.description
        for body in reply.bodies:
            choices = forms.setdefault((reply.status, body.media), [])
            choices += [schema for shape in body.shapes if (schema := schemas.of(shape)) not in choices]
            content: dict[str, Any] = {"schema": choices[0] if len(choices) == 1 else {"anyOf": choices}}
            if body.example is not None:
                content["example"] = body.example
            before.setdefault("content", {})[body.media] = content
    return made


class _Schemas:
    """The JSON schemas of all types of the operations, and of all Structs of the modules of shapes.

    Structs are components; so is every other type that has a title.
    """

    def __init__(self, operations: Iterable[Operation], modules: Iterable[ModuleType]) -> None:
        types = [ErrorResponse, *(struct for module in modules for struct in _structs(module))]
        for operation in operations:
            types += [operation.request] if operation.request is not None else []
            types += [shape for reply in operation.all_replies for body in reply.bodies for shape in body.shapes]
        made, components = msgspec.json.schema_components(types, ref_template=ref("{name}")["$ref"])
        found: dict[str, Any] = {}
        for name, schema in components.items():
            del schema["title"]
            schema["description"] = inspect.cleandoc(schema["description"])
            found[name] = _named(schema, found)
        self._of = {id(kind): _named(schema, found) for kind, schema in zip(types, made, strict=True)}
        for name, refined in REFINED.items():
            found[name] = found.get(name, {}) | refined
        self.components = dict(sorted(found.items()))

    def of(self, kind: Any) -> dict[str, Any]:
        """The schema of a type of the table."""
        schema: dict[str, Any] = self._of[id(kind)]
        return schema


def _structs(module: ModuleType) -> list[Any]:
    """The shapes that a module defines."""
    own = [value for value in vars(module).values() if getattr(value, "__module__", "") == module.__name__]
    return [value for value in own if isinstance(value, type) and issubclass(value, msgspec.Struct)]


def _named(schema: Any, components: dict[str, Any]) -> Any:
    """The schema with all that has a title moved to the components."""
    if isinstance(schema, list):
        return [_named(part, components) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: _named(part, components) for key, part in schema.items()}
    title = made.get("title")
    if not isinstance(title, str):
        return made
    del made["title"]
    components[title] = made
    return ref(title)
