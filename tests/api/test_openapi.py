"""The OpenAPI document: it is valid, includes everything in TGI's, and agrees with the decoder."""

import contextlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from jsonschema import Draft202012Validator
from openapi_spec_validator import OpenAPIV31SpecValidator

from tgi.api import openapi
from tgi.api.shapes.chat import ToolChoiceObject
from tgi.cli import main

TGI = json.loads((Path(__file__).parent / "openapi-tgi.json").read_text())
OURS = json.loads(json.dumps(openapi.document()))
METHODS = [(path, method) for path, methods in TGI["paths"].items() for method in methods]
PLAIN_OBJECTS = [name for name, schema in TGI["components"]["schemas"].items() if "properties" in schema]
# TGI accepts `parameters` in place of `arguments`, which its document does not mention. Custom tools, which TGI lacks,
# have `custom` in place of `function`.
TWO_NAMES = {
    ("FunctionDefinition", "arguments"),
    ("Tool", "function"),
    ("ToolCall", "function"),
    ("DeltaToolCall", "function"),
}


def test_document_is_valid() -> None:
    document = json.loads(json.dumps(openapi.document(with_kserve=True)))
    assert document["openapi"].startswith("3.1.")
    OpenAPIV31SpecValidator(document).validate()


def test_print_schema_prints_the_document() -> None:
    for flags, with_kserve in ((), False), (("--kserve",), True):
        printed = CliRunner().invoke(main, ["print-schema", *flags])
        assert printed.exit_code == 0
        assert json.loads(printed.output) == openapi.document(with_kserve)


@pytest.mark.parametrize(
    ("choice", "right"),
    [
        ({"function": {"name": "a"}}, True),
        ({"type": "function", "function": {"name": "a"}, "allowed_tools": None}, True),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}, True),
        ({"type": "custom", "custom": {"name": "a"}}, True),
        ({"type": "custom", "function": {"name": "a"}}, False),
        ({"type": "function", "allowed_tools": None}, False),
        ({"type": "function", "function": None}, False),
        ({"type": "allowed_tools", "function": {"name": "a"}}, False),
    ],
    ids=str,
)
def test_tool_choice_schema_agrees_with_the_decoder(choice: dict[str, Any], right: bool) -> None:
    described = {"$ref": "#/components/schemas/ToolChoiceObject", "components": OURS["components"]}
    assert Draft202012Validator(described).is_valid(choice) == right
    with contextlib.nullcontext() if right else pytest.raises(msgspec.ValidationError):
        msgspec.convert(choice, ToolChoiceObject)


def test_operation_ids_are_unique() -> None:
    ids = [op["operationId"] for methods in openapi.document(True)["paths"].values() for op in methods.values()]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("path", [path for path in OURS["paths"] if path.startswith("/v1/messages")])
def test_errors_below_v1_messages_have_anthropics_form(path: str) -> None:
    responses = OURS["paths"][path]["post"]["responses"]
    assert {"400", "401", "429", "500", "503"} < {*responses}
    assert "422" not in responses
    for status in responses.keys() - {"200"}:
        content = responses[status]["content"]["application/json"]
        assert content["schema"] == {"$ref": "#/components/schemas/MessageError"}
        assert content["example"]["type"] == "error"


@pytest.mark.parametrize(
    "path", [path for path in OURS["paths"] if path.startswith("/v1/") and "/messages" not in path]
)
def test_errors_below_v1_have_openais_form(path: str) -> None:
    for described in OURS["paths"][path].values():
        for status, response in described["responses"].items():
            if status == "200":
                continue
            [(media, content)] = response["content"].items()
            assert media == "application/json"
            forms = content["schema"].get("anyOf", [content["schema"]])
            assert {"$ref": "#/components/schemas/OpenAiErrorResponse"} in forms
            example = content["example"]
            assert (str(example["error"]["code"]), example["error"]["type"]) == (status, example["error_type"])


# --- everything in TGI's document -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "method"), METHODS)
def test_tgi_operation_is_included(path: str, method: str) -> None:
    theirs, ours = TGI["paths"][path][method], OURS["paths"][path][method]
    for key in ("operationId", "tags", "summary"):
        assert ours[key] == theirs[key]
    if "requestBody" in theirs:
        assert ours["requestBody"]["required"]
        for media, content in theirs["requestBody"]["content"].items():
            fits(content["schema"], ours["requestBody"]["content"][media]["schema"], request=True)
    for status, response in theirs["responses"].items():
        for media, content in response.get("content", {}).items():
            fits(content["schema"], ours["responses"][status]["content"][media]["schema"], request=False)


@pytest.mark.parametrize("name", TGI["components"]["schemas"])
def test_tgi_schema_is_included(name: str) -> None:
    fits(TGI["components"]["schemas"][name], OURS["components"]["schemas"][name], request=False)


@pytest.mark.parametrize("name", PLAIN_OBJECTS)
def test_tgi_object_is_included(name: str) -> None:
    """It has the same required fields, and a description and a format wherever TGI's has one."""
    theirs, ours = TGI["components"]["schemas"][name], OURS["components"]["schemas"][name]
    assert set(theirs["properties"]) <= set(ours["properties"])
    required = {field for field in theirs.get("required", []) if (name, field) not in TWO_NAMES}
    assert required == set(ours["required"]) & set(theirs["properties"])
    for field, schema in theirs["properties"].items():
        assert "description" not in schema or list(values(ours["properties"][field], "description")), field
        assert "format" not in schema or schema["format"] in values(ours["properties"][field], "format"), field


def values(schema: Any, key: str) -> Iterator[Any]:
    """All values of a key anywhere in our schema and in the schemas that it refers to."""
    if isinstance(schema, list):
        for part in schema:
            yield from values(part, key)
    elif isinstance(schema, dict):
        if key in schema:
            yield schema[key]
        if "$ref" in schema:
            yield from values(target(OURS, schema), key)
        for part in schema.values():
            yield from values(part, key)


def target(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    name = schema["$ref"].removeprefix("#/components/schemas/")
    found: dict[str, Any] = document["components"]["schemas"][name]
    return found


def forms(document: dict[str, Any], schema: dict[str, Any]) -> list[dict[str, Any]]:
    """The alternatives of a schema with $ref, allOf, anyOf, oneOf and nullable resolved."""
    own = {key: value for key, value in schema.items() if key not in ("$ref", "allOf", "anyOf", "oneOf", "nullable")}
    parts = [[own]]
    if "$ref" in schema:
        parts.append(forms(document, target(document, schema)))
    parts += [forms(document, part) for part in schema.get("allOf", [])]
    for key in ("anyOf", "oneOf"):
        if key in schema:
            parts.append([form for part in schema[key] for form in forms(document, part)])
    made = [form for combination in itertools.product(*parts) if (form := merged(combination)) is not None]
    if schema.get("nullable"):
        made.append({"type": "null"})
    for form in made:
        if "enum" in form and "type" not in form:
            form["type"] = {str: "string", bool: "boolean", int: "integer"}[type(form["enum"][0])]
    return made


def merged(combination: tuple[dict[str, Any], ...]) -> dict[str, Any] | None:
    """The schemas merged into one; None if their types exclude each other."""
    made: dict[str, Any] = {}
    properties: dict[str, Any] = {}
    required: list[str] = []
    for part in combination:
        if made.get("type", part.get("type")) != part.get("type", made.get("type")):
            return None
        for name, schema in part.get("properties", {}).items():
            properties[name] = {"allOf": [properties[name], schema]} if name in properties else schema
        required += part.get("required", [])
        made |= part
    return made | ({"properties": properties, "required": required} if properties or required else {})


def fits(theirs: dict[str, Any], ours: dict[str, Any], request: bool) -> None:
    """Asserts that each form of TGI's schema is one of ours. In responses null is ignored: the field may be absent."""
    mine = forms(OURS, ours)
    for form in forms(TGI, theirs):
        if request or form.get("type") != "null":
            assert any(form_fits(form, other, request) for other in mine), f"{form}\nis none of\n{mine}"


def form_fits(theirs: dict[str, Any], ours: dict[str, Any], request: bool) -> bool:
    if ours.get("type") is None or theirs.get("type") is None:  # anything
        return theirs.get("type") is None or request
    if theirs["type"] != ours["type"]:
        return False
    if theirs["type"] == "string" and "enum" in theirs:
        return "enum" not in ours or set(theirs["enum"]) <= set(ours["enum"])
    if theirs["type"] == "string" and request and "enum" in ours:
        return False
    try:
        if theirs["type"] == "array":
            fits(theirs["items"], ours["items"], request)
        for name, schema in theirs.get("properties", {}).items():
            fits(schema, ours["properties"][name], request)
    except (AssertionError, KeyError):
        return False
    return not request or set(ours.get("required", [])) <= set(theirs.get("required", []))
