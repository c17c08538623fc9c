"""Grammars of both APIs: what reaches the tokenizer, and what is rejected before."""

import json
from typing import Any

import pytest

from tests.api.conftest import Front, openai_error, two_tokens
from tgi.microkernel.messages.protocol import Generate, Prompted

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {}}}
NAMED = {"name": "n", "schema": SCHEMA, "strict": True}
READ = [
    ({"type": "json", "value": SCHEMA}, {"schema": SCHEMA}),
    ({"type": "json_object", "value": SCHEMA}, {"schema": SCHEMA}),
    ({"type": "json", "value": "{not json"}, {"schema_text": "{not json"}),
    ({"type": "json_object"}, {"schema": {"type": "object"}}),
    ({"type": "json_object", "schema": SCHEMA}, {"schema": SCHEMA}),
    ({"type": "json_schema", "value": NAMED}, {"schema": SCHEMA}),
    ({"type": "json_schema", "json_schema": NAMED}, {"schema": SCHEMA}),
    ({"type": "json_schema", "value": {"schema": "{}"}}, {"schema_text": "{}"}),
    ({"type": "regex", "value": "a+é"}, {"regex": "a+é"}),
    ({"type": "choice", "value": ["yes", "n(o)", ""]}, {"regex": r"yes|n\(o\)|"}),
    ({"type": "grammar", "value": 'start: "a"'}, {"grammar": 'start: "a"'}),
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
def test_grammars_reach_the_tokenizer(front: Front, grammar: dict[str, Any], key: dict[str, Any] | None) -> None:
    for path, body in routes(grammar):
        assert front.post(path, json.dumps(body)).status == 200, path
        message = front.tokenizers[0].next(Generate)
        assert isinstance(message, Generate)
        assert (json.loads(message.grammar) if message.grammar else None) == key
        if key and "schema" in key and "properties" in key["schema"]:  # the text follows the order of properties
            assert list(json.loads(message.grammar)["schema"]["properties"]) == ["b", "a"]
        assert message.sampling.grammar == ""


def rejection(path: str) -> dict[str, Any]:
    text = "Input validation error: grammar is not supported"
    if path.startswith("/v1/"):
        return openai_error(422, "validation", text, "response_format")
    return {"error": text, "error_type": "validation"}


@pytest.mark.parametrize("grammar", NO_TYPE_FOR_IT)
def test_a_grammar_value_of_another_type_is_not_supported(front: Front, grammar: dict[str, Any]) -> None:
    for path, body in routes(grammar):
        reply = front.post(path, json.dumps(body))
        assert (reply.status, json.loads(reply.body)) == (422, rejection(path))


def test_grammars_are_rejected_if_disabled(serve: Any) -> None:
    front = serve(disable_grammar_support=True)
    for path, body in routes({"type": "regex", "value": "a"}):
        reply = front.post(path, json.dumps(body))
        assert (reply.status, json.loads(reply.body)) == (422, rejection(path))
    for path, body in routes({"type": "text"}):
        assert front.post(path, json.dumps(body)).status == 200


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ({"type": "json"}, "parameters.grammar: missing field `value`"),
        ({"type": "regex"}, "parameters.grammar: missing field `value`"),
        ({"type": "json_schema"}, "parameters.grammar: missing field `value`"),
        ({"type": "regex", "value": {}}, "parameters.grammar.value: invalid type, expected a string"),
        ({"type": "choice", "value": []}, "parameters.grammar.value: invalid type, expected a sequence of strings"),
        (
            {"type": "choice", "value": ["a", 1]},
            "parameters.grammar.value: invalid type, expected a sequence of strings",
        ),
        ({"type": "grammar", "value": 1}, "parameters.grammar.value: invalid type, expected a string"),
        ({"type": "json_schema", "value": []}, "parameters.grammar.value: invalid type, expected struct"),
        ({"type": "json_schema", "json_schema": {}}, "parameters.grammar.json_schema: missing field `schema`"),
        (
            {"type": "json_schema", "value": {"schema": {}, "name": 1}},
            "parameters.grammar.value: invalid type, expected a string",
        ),
    ],
)
def test_a_grammar_of_another_shape_is_rejected(front: Front, grammar: dict[str, Any], words: str) -> None:
    reply = front.post("/generate", json.dumps({"inputs": "x", "parameters": {"grammar": grammar}}))
    assert reply.status == 422
    assert words in reply.body.decode()


def test_a_grammar_is_encoded_once_for_all_choices(front: Front) -> None:
    body = {"prompt": ["x", "y"], "n": 2, "response_format": {"type": "json_object"}}
    assert front.post("/v1/completions", json.dumps(body)).status == 200
    asked = [front.tokenizers[0].next(Generate) for _ in range(4)]
    assert len({message.grammar for message in asked}) == 1


# The names that clients of vLLM and SGLang use, on OpenAI's routes.

BNF = 'root ::= "a"'
GUIDED = [
    ({"guided_json": SCHEMA}, {"schema": SCHEMA}),
    ({"guided_json": json.dumps(SCHEMA)}, {"schema_text": json.dumps(SCHEMA)}),
    ({"guided_regex": "a+"}, {"regex": "a+"}),
    ({"guided_choice": ["a.b", "c"]}, {"regex": r"a\.b|c"}),
    ({"guided_grammar": BNF}, {"grammar": BNF}),
    ({"guided_json_object": True}, {"schema": {"type": "object"}}),
    ({"structured_outputs": {"json": SCHEMA}}, {"schema": SCHEMA}),
    ({"structured_outputs": {"regex": "a+", "disable_fallback": True}}, {"regex": "a+"}),
    ({"structured_outputs": {"choice": ["a", "b"]}}, {"regex": "a|b"}),
    ({"structured_outputs": {"grammar": BNF}}, {"grammar": BNF}),
    ({"structured_outputs": {"json_object": True}}, {"schema": {"type": "object"}}),
    ({"json_schema": json.dumps(SCHEMA)}, {"schema_text": json.dumps(SCHEMA)}),
    ({"regex": "a+"}, {"regex": "a+"}),
    ({"ebnf": BNF}, {"grammar": BNF}),
    (
        {"guided_regex": "a+", "guided_decoding_backend": "outlines", "response_format": {"type": "text"}},
        {"regex": "a+"},
    ),
    ({"guided_json": None, "guided_json_object": False, "structured_outputs": {}, "structural_tag": None}, None),
]
NOT_SUPPORTED = [
    ({"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"}, "`guided_whitespace_pattern` is not supported"),
    *(
        ({"structured_outputs": {"json": {}, name: value}}, f"`structured_outputs.{name}` is not supported")
        for name, value in (("whitespace_pattern", ""), ("disable_any_whitespace", True), ("structural_tag", "{}"))
    ),
    ({"structural_tag": {}}, "`structural_tag` is not supported"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "only one of `guided_regex`, `guided_choice` can be used"),
    (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a", "json": {}}},
        "only one of `response_format`, `structured_outputs.json`, `structured_outputs.regex` can be used",
    ),
]
ANOTHER_SHAPE = [
    ({"guided_choice": []}, "guided_choice: invalid length 0, expected one choice or more"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice: invalid length 0"),
    ({"guided_choice": "a"}, 'guided_choice: invalid type: string "a", expected a sequence'),
    ({"guided_regex": ["a"]}, "guided_regex: invalid type: sequence, expected a string"),
    ({"structured_outputs": {"regexp": "a"}}, "structured_outputs: unknown field `regexp`"),
]


def openai_routes(fields: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    chat = {"messages": [{"role": "user", "content": "x"}]}
    return [("/v1/chat/completions", chat | fields), ("/v1/completions", {"prompt": "x"} | fields)]


@pytest.mark.parametrize(("fields", "key"), GUIDED)
def test_grammar_fields_of_other_servers(front: Front, fields: dict[str, Any], key: dict[str, Any] | None) -> None:
    for path, body in openai_routes(fields):
        assert front.post(path, json.dumps(body)).status == 200, path
        message = front.tokenizers[0].next(Generate)
        assert isinstance(message, Generate)
        assert (json.loads(message.grammar) if message.grammar else None) == key


@pytest.mark.parametrize(("fields", "words"), NOT_SUPPORTED)
def test_unsupported_grammar_fields_are_named(front: Front, fields: dict[str, Any], words: str) -> None:
    for path, body in openai_routes(fields):
        reply = front.post(path, json.dumps(body))
        assert reply.status == 422
        assert f"Input validation error: {words}" in reply.body.decode()


@pytest.mark.parametrize(("fields", "words"), ANOTHER_SHAPE)
def test_grammar_fields_of_another_shape_are_rejected(front: Front, fields: dict[str, Any], words: str) -> None:
    for path, body in openai_routes(fields):
        reply = front.post(path, json.dumps(body))
        assert reply.status == 422
        assert words in json.loads(reply.body)["error"]["message"]


def test_a_grammar_reaches_the_tokenizer_together_with_tools(front: Front) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    (path, body), _ = openai_routes({"guided_choice": ["a"], "tools": [tool]})
    assert front.post(path, json.dumps(body)).status == 200
    message = front.tokenizers[0].next(Generate)
    assert json.loads(message.grammar) == {"regex": "a"}
    assert json.loads(message.chat)["tools"] == [tool]


@pytest.mark.parametrize("form", [{"type": "json", "value": SCHEMA}, {"type": "json_object", "value": SCHEMA}])
def test_schema_next_to_another_value_is_rejected(front: Front, form: dict[str, Any]) -> None:
    for path, body in routes({**form, "schema": SCHEMA}):
        reply = front.post(path, json.dumps(body))
        assert reply.status == 422
        assert b"only `json_object` without `value` takes `schema`" in reply.body


def test_keywords_that_are_not_enforced_are_named_in_a_header(serve: Any) -> None:
    keywords = ["f#/properties/a/format", "#/format"]

    def answer(message: Generate) -> list[Any]:
        told = Prompted(message.rid, 3, 1, not_enforced=keywords if message.grammar else [])
        return [*([told] if message.chat or message.grammar else []), *two_tokens(message)]

    front = serve(answer)
    for path, body in routes({"type": "json", "value": SCHEMA}):
        for stream in (False, True):
            reply = front.post(path, json.dumps(body | ({"stream": stream} if path.startswith("/v1") else {})))
            assert reply.headers["x-tgi-not-enforced"] == "f#/properties/a/format, #/format"
            assert int(reply.headers["x-compute-characters"]) == 1
    for path, body in routes({"type": "text"}):
        assert "x-tgi-not-enforced" not in front.post(path, json.dumps(body)).headers
