"""How grammars of both APIs reach the tokenizer, and which are refused before it."""

import json
from typing import Any

import pytest

from tests.api.conftest import Front, openai_error
from tgi.kernel.messages import Generate

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {}}}
NAMED = {"name": "n", "schema": SCHEMA, "strict": True}
READ = [
    ({"type": "json", "value": SCHEMA}, {"schema": SCHEMA}),
    ({"type": "json_object", "value": SCHEMA}, {"schema": SCHEMA}),
    ({"type": "json", "value": "{not json"}, {"schema_text": "{not json"}),
    ({"type": "json_object"}, {"schema": {"type": "object"}}),
    ({"type": "json_schema", "value": NAMED}, {"schema": SCHEMA}),
    ({"type": "json_schema", "json_schema": NAMED}, {"schema": SCHEMA}),
    ({"type": "json_schema", "value": {"schema": "{}"}}, {"schema_text": "{}"}),
    ({"type": "regex", "value": "a+é"}, {"regex": "a+é"}),
    ({"type": "text"}, None),
]
NO_TYPE_FOR_IT = [
    {"type": "json", "value": 3},
    {"type": "json", "value": [1]},
    {"type": "json", "value": True},
    {"type": "json_schema", "value": {"schema": None}},
]


def routes(grammar: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    chat = {"messages": [{"role": "user", "content": "x"}]}
    return [
        ("/generate", {"inputs": "x", "parameters": {"grammar": grammar}}),
        ("/generate_stream", {"inputs": "x", "parameters": {"grammar": grammar}}),
        ("/", {"inputs": "x", "parameters": {"grammar": grammar}}),
        ("/v1/chat/completions", chat | {"response_format": grammar}),
        ("/v1/completions", {"prompt": "x", "response_format": grammar}),
    ]


@pytest.mark.parametrize(("grammar", "key"), READ)
def test_what_the_tokenizer_is_asked(front: Front, grammar: dict[str, Any], key: dict[str, Any] | None) -> None:
    for path, body in routes(grammar):
        assert front.post(path, json.dumps(body)).status == 200, path
        message = front.tokenizers[0].next(Generate)
        assert isinstance(message, Generate)
        assert (json.loads(message.grammar) if message.grammar else None) == key
        if key and "schema" in key and "properties" in key["schema"]:  # the text follows the order of properties
            assert list(json.loads(message.grammar)["schema"]["properties"]) == ["b", "a"]
        assert message.sampling.grammar == ""


def refusal(path: str) -> dict[str, Any]:
    text = "Input validation error: grammar is not supported"
    if path.startswith("/v1/"):
        return openai_error(422, "validation", text, "response_format")
    return {"error": text, "error_type": "validation"}


@pytest.mark.parametrize("grammar", NO_TYPE_FOR_IT)
def test_21_a_value_of_another_type(front: Front, grammar: dict[str, Any]) -> None:
    for path, body in routes(grammar):
        reply = front.post(path, json.dumps(body))
        assert (reply.status, json.loads(reply.body)) == (422, refusal(path))


def test_21_no_grammars_here(serve: Any) -> None:
    front = serve(disable_grammar_support=True)
    for path, body in routes({"type": "regex", "value": "a"}):
        reply = front.post(path, json.dumps(body))
        assert (reply.status, json.loads(reply.body)) == (422, refusal(path))
    for path, body in routes({"type": "text"}):
        assert front.post(path, json.dumps(body)).status == 200


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ({"type": "json"}, "parameters.grammar: missing field `value`"),
        ({"type": "regex"}, "parameters.grammar: missing field `value`"),
        ({"type": "json_schema"}, "parameters.grammar: missing field `value`"),
        ({"type": "regex", "value": {}}, "parameters.grammar.value: invalid type, expected a string"),
        ({"type": "json_schema", "value": []}, "parameters.grammar.value: invalid type, expected struct"),
        ({"type": "json_schema", "json_schema": {}}, "parameters.grammar.json_schema: missing field `schema`"),
        (
            {"type": "json_schema", "value": {"schema": {}, "name": 1}},
            "parameters.grammar.value: invalid type, expected a string",
        ),
    ],
)
def test_another_shape(front: Front, grammar: dict[str, Any], words: str) -> None:
    reply = front.post("/generate", json.dumps({"inputs": "x", "parameters": {"grammar": grammar}}))
    assert reply.status == 422
    assert words in reply.body.decode()


def test_a_grammar_is_encoded_once_for_all_choices(front: Front) -> None:
    body = {"prompt": ["x", "y"], "n": 2, "response_format": {"type": "json_object"}}
    assert front.post("/v1/completions", json.dumps(body)).status == 200
    asked = [front.tokenizers[0].next(Generate) for _ in range(4)]
    assert len({message.grammar for message in asked}) == 1
