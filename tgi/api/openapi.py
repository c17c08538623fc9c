"""The OpenAPI 3.1 document, made from the table of operations and from the types of requests and responses."""

import inspect
import re
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import msgspec

import tgi
from tgi.api.errors import ErrorResponse
from tgi.api.operations import JSON, KSERVE, OPERATIONS, SEVERAL_MODELS, Operation, OperationResponse
from tgi.api.shapes import (
    adapters,
    batches,
    chat,
    cloud,
    completions,
    decisions,
    info,
    kserve,
    messages,
    native,
    native_responses,
    openai_responses,
    pooling,
    responses,
)
from tgi.api.shapes.types import ref

SHAPES = (
    native,
    native_responses,
    chat,
    completions,
    openai_responses,
    messages,
    responses,
    info,
    adapters,
    batches,
    cloud,
    pooling,
    decisions,
)
TAG = "Text Generation Inference"
KEY = "key"


def document(with_kserve: bool = False, with_models: bool = False) -> dict[str, Any]:
    """The document as an object that `json` can encode. `with_kserve` adds the routes of --kserve, `with_models` those
    of a server of several models."""
    operations = OPERATIONS + (KSERVE if with_kserve else ()) + (SEVERAL_MODELS if with_models else ())
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
    """The operation object."""
    described: dict[str, Any] = {"tags": [TAG], "summary": operation.summary, "operationId": operation.id}
    if names := re.findall(r"\{(\w+)\}", operation.path):
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if operation.request is not None:
        described["requestBody"] = {"content": {JSON: {"schema": schemas.of(operation.request)}}, "required": True}
    if operation.form is not None:
        form = {"multipart/form-data": {"schema": schemas.of(operation.form)}}
        described["requestBody"] = {"content": form, "required": True}
    if operation.requires_key:
        described["security"] = [{}, {KEY: []}]
    described["responses"] = _responses(operation.documented_responses, schemas)
    return described


def _responses(responses: Iterable[OperationResponse], schemas: "_Schemas") -> dict[str, Any]:
    """The responses object. Responses of one status are merged, and so are their bodies of one media type."""
    by_status: dict[str, Any] = {}
    alternatives: dict[tuple[int, str], list[Any]] = {}  # (status, media type) -> schemas
    for response in responses:
        merged = by_status.setdefault(str(response.status), {})
        earlier = merged.get("description")
        merged["description"] = f"{earlier}, or: {response.description}" if earlier else response.description
        for body in response.bodies:
            choices = alternatives.setdefault((response.status, body.media), [])
            choices += [schema for shape in body.shapes if (schema := schemas.of(shape)) not in choices]
            content: dict[str, Any] = {"schema": choices[0] if len(choices) == 1 else {"anyOf": choices}}
            if body.example is not None:
                content["example"] = body.example
            merged.setdefault("content", {})[body.media] = content
    return by_status


class _Schemas:
    """The JSON schemas of the types of all operations, and of all Structs of the modules of api/shapes.

    `components` has a schema for each Struct and for each other type with a title.
    """

    def __init__(self, operations: Iterable[Operation], modules: Iterable[ModuleType]) -> None:
        types = [ErrorResponse, *(struct for module in modules for struct in _structs(module))]
        for operation in operations:
            types += [operation.request] if operation.request is not None else []
            for response in operation.documented_responses:
                types += [shape for body in response.bodies for shape in body.shapes]
        schemas, components = msgspec.json.schema_components(types, ref_template=ref("{name}")["$ref"])
        named: dict[str, Any] = {}
        for name, schema in components.items():
            del schema["title"]
            schema["description"] = inspect.cleandoc(schema["description"])
            named[name] = _extract_titled(schema, named)
        self._by_type_id = {
            id(kind): _extract_titled(schema, named) for kind, schema in zip(types, schemas, strict=True)
        }
        for name, refinement in SCHEMA_REFINEMENTS.items():
            named[name] = named.get(name, {}) | refinement
        self.components = dict(sorted(named.items()))

    def of(self, kind: Any) -> dict[str, Any]:
        """The schema of a type that an operation has."""
        schema: dict[str, Any] = self._by_type_id[id(kind)]
        return schema


def _structs(module: ModuleType) -> list[Any]:
    """The Struct classes that a module defines."""
    own = [value for value in vars(module).values() if getattr(value, "__module__", "") == module.__name__]
    return [
        value
        for value in own
        if isinstance(value, type) and issubclass(value, msgspec.Struct) and not value.__name__.startswith("_")
    ]


def _extract_titled(schema: Any, components: dict[str, Any]) -> Any:
    """The schema with references in place of the parts that have a title, which are moved to the components."""
    if isinstance(schema, list):
        return [_extract_titled(part, components) for part in schema]
    if not isinstance(schema, dict):
        return schema
    extracted = {key: _extract_titled(part, components) for key, part in schema.items()}
    title = extracted.get("title")
    if not isinstance(title, str):
        return extracted
    del extracted["title"]
    components[title] = extracted
    return ref(title)


# --- what the types do not express ------------------------------------------------------------------------------------


def _object_schema(required: list[str], **properties: dict[str, Any]) -> dict[str, Any]:
    """The schema of an object with these properties."""
    return {"type": "object", "required": required, "properties": properties}


def _type_tag(name: str) -> dict[str, Any]:
    """The schema of a member `type` with this value."""
    return {"type": "string", "enum": [name]}


def _nonempty_list(items: dict[str, Any]) -> dict[str, Any]:
    """The schema of an array with at least one item."""
    return {"type": "array", "items": items, "minItems": 1}


def _function_or_custom(function: str, custom: str) -> dict[str, Any]:
    """The keywords of an object that has one of two members, the second one only with the type that says so."""
    return {
        "anyOf": [
            _object_schema(["function"], function=ref(function)),
            _object_schema(["type", "custom"], type=_type_tag("custom"), custom=ref(custom)),
        ]
    }


_TOKEN_ID = {"type": "integer", "format": "int32", "minimum": 0}
_JSON_SCHEMA = {
    "description": "A string that represents a [JSON Schema](https://json-schema.org/), or the schema itself.\n\n"
    "JSON Schema is a declarative language that allows to annotate JSON documents\nwith types and descriptions."
}

_CHOICE = {"type": "array", "items": {"type": "string"}, "minItems": 1}

# Keywords that replace those of the schemas of types, and components that TGI's document has and that are not a type
# here, by the name of the component.
SCHEMA_REFINEMENTS: dict[str, dict[str, Any]] = {
    "Message": {"allOf": [ref("MessageBody")]},
    "MessageBody": {
        "description": "There is a text or a call.",
        "anyOf": [
            _object_schema(["content"], content=ref("MessageContent")),
            _object_schema(["tool_calls"], tool_calls={"type": "array", "items": ref("ToolCall")}),
        ],
    },
    "Tool": _function_or_custom("FunctionDefinition", "CustomTool"),
    "ToolCall": {
        **_function_or_custom("FunctionDefinition", "CustomCall"),
        "allOf": [{"properties": {"function": {"anyOf": [{"required": ["arguments"]}, {"required": ["parameters"]}]}}}],
    },
    "NamedTool": _function_or_custom("FunctionName", "FunctionName"),
    "DeltaToolCall": _function_or_custom("Function", "CustomInput"),
    "DeltaArguments": {
        "anyOf": [
            _object_schema(["function"], function=ref("FunctionArguments")),
            _object_schema(["custom"], custom=ref("CustomInput")),
        ]
    },
    "ToolChoiceObject": {
        "anyOf": [
            _object_schema(["function"], type=_type_tag("function"), function=ref("FunctionName")),
            _object_schema(["type", "custom"], type=_type_tag("custom"), custom=ref("FunctionName")),
            _object_schema(
                ["type", "allowed_tools"], type=_type_tag("allowed_tools"), allowed_tools=ref("AllowedTools")
            ),
        ],
    },
    "Prompt": {
        "description": "A text or a list of texts, or the token ids of one prompt or of several. To token ids no "
        "special tokens are added.",
        "anyOf": [
            {"type": "string"},
            _nonempty_list({"type": "string"}),
            _nonempty_list(_TOKEN_ID),
            _nonempty_list(_nonempty_list(_TOKEN_ID)),
        ],
    },
    "TextsOrIds": {
        "anyOf": [
            {"type": "string"},
            _nonempty_list({"type": "string"}),
            _nonempty_list(_TOKEN_ID),
            _nonempty_list(_nonempty_list(_TOKEN_ID)),
        ],
    },
    "Texts": {"anyOf": [{"type": "string"}, _nonempty_list({"type": "string"})]},
    "PredictInput": {
        "anyOf": [
            {"type": "string"},
            _nonempty_list({"type": "string"}) | {"maxItems": 2},
            _nonempty_list(_nonempty_list({"type": "string"}) | {"maxItems": 2}),
        ],
    },
    "RerankRequest": {
        "oneOf": [
            {
                "required": [given],
                "properties": {given: {"type": "array", "minItems": 1}, left_out: {"type": "null"}},
            }
            for given, left_out in (("documents", "texts"), ("texts", "documents"))
        ],
    },
    "GrammarType": {
        "anyOf": [
            _object_schema(["type", "value"], type=_type_tag("json"), value=_JSON_SCHEMA),
            _object_schema(["type"], type=_type_tag("json_object"), value=_JSON_SCHEMA, schema=_JSON_SCHEMA),
            _object_schema(["type", "value"], type=_type_tag("regex"), value={"type": "string"}),
            _object_schema(["type", "value"], type=_type_tag("json_schema"), value=ref("JsonSchemaConfig")),
            _object_schema(["type", "json_schema"], type=_type_tag("json_schema"), json_schema=ref("JsonSchemaConfig")),
            _object_schema(["type"], type=_type_tag("text")),
            _object_schema(["type", "value"], type=_type_tag("choice"), value=_CHOICE),
            _object_schema(["type", "value"], type=_type_tag("grammar"), value={"type": "string"}),
        ],
    },
}
