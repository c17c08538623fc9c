"""What the OpenAPI document says about shapes beyond their Python types: JSON schemas that are merged into theirs, and
parts of TGI's document that have a name there and no type of their own here."""

from typing import Any

from tgi.api.shapes.types import ref


def _object(required: list[str], **properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "required": required, "properties": properties}


def _type(name: str) -> dict[str, Any]:
    return {"type": "string", "enum": [name]}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


_TOKEN_ID = {"type": "integer", "format": "int32", "minimum": 0}
_JSON_SCHEMA = {
    "description": "A string that represents a [JSON Schema](https://json-schema.org/), or the schema itself.\n\n"
    "JSON Schema is a declarative language that allows to annotate JSON documents\nwith types and descriptions."
}

_CHOICE = {"type": "array", "items": {"type": "string"}, "minItems": 1}

REFINED: dict[str, dict[str, Any]] = {
    "Message": {"allOf": [ref("MessageBody")]},
    "MessageBody": {
        "description": "There is a text or a call.",
        "anyOf": [
            _object(["content"], content=ref("MessageContent")),
            _object(["tool_calls"], tool_calls={"type": "array", "items": ref("ToolCall")}),
        ],
    },
    "ToolCall": {
        "allOf": [{"properties": {"function": {"anyOf": [{"required": ["arguments"]}, {"required": ["parameters"]}]}}}],
    },
    "ToolChoiceObject": {
        "anyOf": [
            _object(["function"], type=_type("function"), function=ref("FunctionName")),
            _object(["type", "allowed_tools"], type=_type("allowed_tools"), allowed_tools=ref("AllowedTools")),
        ],
    },
    "Prompt": {
        "description": "A text or a list of texts, or the token ids of one prompt or of several. To token ids no "
        "special tokens are added.",
        "anyOf": [{"type": "string"}, _list({"type": "string"}), _list(_TOKEN_ID), _list(_list(_TOKEN_ID))],
    },
    "GrammarType": {
        "anyOf": [
            _object(["type", "value"], type=_type("json"), value=_JSON_SCHEMA),
            _object(["type"], type=_type("json_object"), value=_JSON_SCHEMA),
            _object(["type", "value"], type=_type("regex"), value={"type": "string"}),
            _object(["type", "value"], type=_type("json_schema"), value=ref("JsonSchemaConfig")),
            _object(["type", "json_schema"], type=_type("json_schema"), json_schema=ref("JsonSchemaConfig")),
            _object(["type"], type=_type("text")),
            _object(["type", "value"], type=_type("choice"), value=_CHOICE),
            _object(["type", "value"], type=_type("grammar"), value={"type": "string"}),
        ],
    },
}
