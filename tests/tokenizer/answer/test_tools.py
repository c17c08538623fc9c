"""Rejected tools, with errors that name them; enforcement of the schemas of arguments."""

import json
from typing import Any

import pytest

from tests.tokenizer.answer.dialogue import (
    accepts,
    grammar_of,
    harness_of,
    parsed_answer,
    play_answer,
    rejection,
    submit_chat,
    submit_valid_chat,
)
from tests.tokenizer.answer.model_families import FAMILIES, SUN, VOCABULARIES, chat
from tests.tokenizer.harness import API, ids_of
from tests.tokenizer.vocabularies import KINDS, byte_level
from tgi.microkernel.messages.protocol import Add, End, FinishReason, Prompted
from tgi.tokenizer.answers.formats import TOOL_CALL_FORMATS, detect_reasoning_tags, detect_tool_call_format
from tgi.tokenizer.chat import ChatRenderer
from tgi.tokenizer.chat_template import ChatTemplates
from tgi.tokenizer.structured_output.answer_grammar import MAX_TOOL_PROPERTIES, MAX_TOOLS
from tgi.tokenizer.structured_output.grammar import MAX_GRAMMAR_BYTES


def tool(parameters: Any, name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


def of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties]}


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"not": {}}, "tool `f`: cannot compile regex from schema: Unsatisfiable"),
        ({"properties": {"a": 1}}, "tool `f`: grammar is not valid: `properties` must be an object of schemas"),
        ({"type": "string"}, "tool `f`: grammar is not valid: `parameters` must describe an object"),
        ("object", "tool `f`: grammar is not valid: a schema is an object"),
    ],
)
def test_unenforceable_parameters(parameters: Any, words: str) -> None:
    harness = harness_of(byte_level(), FAMILIES["named"].template)
    for _ in range(2):  # errors are cached
        error = rejection(harness, chat([tool({}, "g"), tool(parameters)]))
        assert error.startswith(words)
        assert "%json" not in error  # the generated grammar is not shown


# (schema of the argument `a`, the keywords that are not enforced, valid values, values that remain invalid)
HINTS: list[tuple[Any, list[str], list[str], list[str]]] = [
    ({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}}, [], ['{"x": 1}'], ["1"]),
    ({"type": "object", "propertyNames": {"format": "uri"}}, ["propertyNames"], ['{"x": 1}'], ["1"]),
    ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, ["uniqueItems"], ['["b", "b"]'], ["[1]"]),
    ({"type": "string", "format": "path"}, ["format"], ['"/b"'], ["1"]),
    ({"type": "string", "pattern": r"^(?!\.)[a-z.]+@[a-z]+$"}, ["pattern"], ['"no"'], ["1"]),
    ({"type": "string", "pattern": "^a(b$"}, ["pattern"], ['"no"'], ["1"]),
    ({"not": {"type": "null"}, "type": ["string", "null"]}, ["not"], ['"b"'], ["1"]),
    ({"type": "word"}, ["type"], ["1", '"b"'], []),
    ({"type": "string", "required": True}, ["required"], ['"b"'], ["1"]),
    ({"type": "object", "properties": {}, "additionalProperties": 1}, ["additionalProperties"], ['{"x": 1}'], ["1"]),
    ({"oneOf": [{"minimum": 1}, {"maximum": 5}], "type": "number"}, ["oneOf"], ["3", "7"], ['"b"']),
    ({"type": "object", "patternProperties": {"(?=a)": {"type": "null"}, "^b": {"type": "null"}},
      "additionalProperties": False}, ["patternProperties/(?=a)"], ['{"a": 1}', '{"b": null}'], ['{"b": 1}']),
    ({"type": "object", "patternProperties": {"^a": {"type": "null"}, "^ab": {}}, "additionalProperties": False},
     ["patternProperties"], ['{"ab": 1}'], ["1"]),
    ({"$ref": "https://example.com/schema"}, ["$ref"], ["1"], []),
    ({"$ref": "#/nowhere", "description": "d"}, ["$ref"], ["1"], []),
    ({"type": "object", "minProperties": 5}, ["minProperties"], ["{}"], ["1"]),
    ({"if": {}, "then": {"type": "null"}, "contains": {}}, ["if", "contains"], ["1"], []),
    ({"const": 2**60}, ["const"], ["1"], []),
    ({"type": "string", "pattern": "(.{0,300}){0,300}"}, ["pattern"], ['"b"'], ["1"]),
    ({"$dynamicAnchor": "n", "type": "string"}, ["$dynamicAnchor"], ['"b"'], ["1"]),
    ({"properties": {"c": {"not": {}}}, "required": ["c"], "type": "object"}, ["required"], ["{}"], ['{"c": 1}']),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "keywords", "valid", "invalid"), HINTS)
def test_keywords_that_cannot_be_enforced_are_hints(
    schema: Any, keywords: list[str], valid: list[str], invalid: list[str]
) -> None:
    """Of tools alone, unless they are strict; all other keywords are enforced."""
    family, vocabulary = FAMILIES["hermes"], byte_level()
    harness = harness_of(vocabulary, family.template)
    tools = [tool(of(a=schema, b={"enum": [2]}))]
    add = submit_valid_chat(harness, 1, chat(tools, tool_choice="required"))
    (prompted,) = [message for message in harness.received_by(API) if isinstance(message, Prompted)]
    assert prompted.not_enforced == [f"f#/properties/a/{keyword}" for keyword in keywords]
    for value in valid:
        assert accepts(add, family.write(("f", f'{{"a": {value}, "b": 2}}')), vocabulary), value
        assert not accepts(add, family.write(("f", f'{{"a": {value}, "b": 3}}')), vocabulary), value
    for value in invalid:
        assert not accepts(add, family.write(("f", f'{{"a": {value}, "b": 2}}')), vocabulary), value
    if keywords not in ([], ["format"]):
        assert "tool `f`: " in rejection(harness, chat([tool(of(a=schema), strict=True)]))


def test_tool_without_parameters_takes_none() -> None:
    family, vocabulary = FAMILIES["hermes"], byte_level()
    add = submit_valid_chat(harness_of(vocabulary, family.template), 1, chat([{"function": {"name": "f"}}]))
    assert accepts(add, family.write(("f", "{}")), vocabulary)
    assert not accepts(add, family.write(("f", '{"a": 1}')), vocabulary)


PERSON = {"schema": of(age={"type": "integer"})}
NAMED = {"schema": of(name={"type": "string"})}
FUNCTION = {"schema": of(function={"type": "string"})}
OBJECT = {"schema": {"type": "object"}}
CALLED = [("call", SUN[0]), ("arguments", SUN[1])]


@pytest.mark.parametrize("kind", VOCABULARIES)
@pytest.mark.parametrize(
    ("key", "grammar", "answer", "calls"),
    [
        *((key, PERSON, '{"age": 3}', [key]) for key in FAMILIES),
        *((key, OBJECT, '{"age": {"name": "<tool_call>"}}', [key]) for key in FAMILIES),
        *((key, {"regex": "yes|no"}, "yes", [key]) for key in FAMILIES),
        ("hermes", NAMED, '{"name": "x<tool_call>"}', ["hermes"]),
        ("llama", NAMED, '{"name": "x"}', ["python-tag"]),
        ("named", NAMED, '{"name": "x"}', ["tgi"]),
        ("tgi", FUNCTION, '{"function": "x"}', ["named"]),
    ],
)
def test_tools_together_with_a_grammar(key: str, grammar: Any, answer: str, calls: list[str], kind: str) -> None:
    """The answer matches the grammar, or consists of calls."""
    vocabulary = VOCABULARIES[kind]()
    harness = harness_of(vocabulary, FAMILIES[key].template)
    if kind == "special":
        answer = answer.replace("<tool_call>", "<")  # it is no text there

    def submit(choice: str = "auto") -> Add:
        return submit_valid_chat(harness, 1, chat(tool_choice=choice), grammar=json.dumps(grammar).encode())

    def parts_of(text: str) -> Any:
        add = submit()
        assert accepts(add, text, vocabulary), text
        return parsed_answer(play_answer(harness, add, ids_of(text, vocabulary))).parts

    assert parts_of(answer) == [("text", answer)]
    for call in calls:
        assert parts_of(FAMILIES[call].write(SUN)) == CALLED
    assert not accepts(submit(), "So " + answer, vocabulary)
    assert accepts(submit(), "\n" + answer, vocabulary) == (key == "thinking")
    assert not accepts(submit(), answer + FAMILIES[key].write(SUN), vocabulary)
    assert not accepts(submit("required"), answer, vocabulary)
    wrong = FAMILIES[calls[0]].write(("weather", '{"city": 1}'))
    assert grammar is OBJECT or not accepts(submit(), wrong, vocabulary)


def test_grammar_whose_texts_begin_as_calls() -> None:
    grammar = json.dumps({"schema": {"anyOf": [NAMED["schema"], FUNCTION["schema"]]}}).encode()
    error = rejection(harness_of(byte_level(), FAMILIES["named"].template), chat(), grammar=grammar)
    assert "an answer must not begin as this model's calls do" in error


def test_limits_on_number_and_size_of_tools() -> None:
    harness = harness_of(byte_level(), "<tool_call>{{ tools | length }}")
    many = [tool({}, f"f{at}") for at in range(MAX_TOOLS)]
    assert grammar_of(submit_valid_chat(harness, 1, chat(many)))
    assert f"at most {MAX_TOOLS} tools" in rejection(harness, chat([*many, tool({})]))
    assert f"at most {MAX_GRAMMAR_BYTES} bytes" in rejection(
        harness, chat([tool({"description": "x" * MAX_GRAMMAR_BYTES})])
    )
    names = {"properties": {"a": {"properties": {str(at): True for at in range(MAX_TOOL_PROPERTIES // 3)}}}}
    assert f"more than {MAX_TOOL_PROPERTIES} names in all" in rejection(
        harness, chat([tool(names, name) for name in "abc"])
    )


def test_tool_without_name() -> None:
    end = submit_chat(harness_of(byte_level(), FAMILIES["named"].template), 1, chat([{"type": "function"}]))
    assert isinstance(end, End)
    assert (end.reason, end.message) == (FinishReason.TEMPLATE, "a tool has no `function` with a `name`")


@pytest.mark.parametrize("key", ["hermes", "named", "tgi"])
@pytest.mark.parametrize(
    ("parameters", "right", "wrong"),
    [
        (None, ["{}"], ["[]", "1", "null", '{"any": [1]}']),
        ({}, ["{}", '{"any": [1]}'], ["[]", "1", "null"]),
        ({"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"a": {"const": 1}}}}}, ['{"a": 1}'], ['{"a": 2}', "[]"]),
        ({"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, ['{"a": 1}', '{"b": 1}'], ["{}"]),
        ({"type": ["object", "null"]}, ["{}"], ["null"]),
        ({"properties": {"_name": {"const": 1}}, "required": ["_name"]}, ['{"_name": 1}'], ["{}"]),
        ({"properties": {"a": {}}, "additionalProperties": False}, ["{}", '{"a": "}"}'], ['{"b": 1}']),
        ({"properties": {"a": {}}}, ["{}", '{"a": 1}'], ['{"b": 1}']),
        ({"properties": {"a": {}}, "additionalProperties": True}, ['{"b": 1}'], []),
        ({"properties": {"a": {}}, "additionalProperties": "true"}, ['{"b": 1}'], []),
        ({"properties": {"a": {}}, "required": ["b"]}, ['{"b": 1}'], ["{}"]),
        ({"minProperties": 1}, ['{"a": 1}'], ["{}"]),
        (
            {"properties": {"o": {"properties": {"n": {"type": "number"}}}}},
            ['{"o": {"n": 1.5e3}}'],
            ['{"o": {"m": 1}}', '{"o": {"n": 0.' + "3" * 21 + "}}"],
        ),
    ],
)
def test_arguments_match_the_schema(key: str, parameters: Any, right: list[str], wrong: list[str]) -> None:
    family, vocabulary = FAMILIES[key], byte_level()
    add = submit_valid_chat(
        harness_of(vocabulary, family.template), 1, chat([tool(parameters)], tool_choice="required")
    )
    plain = parameters is None or not set(parameters) & {"$ref", "anyOf", "minProperties"}
    if key == "tgi" and (not plain or "_name" in parameters.get("properties", {}) if parameters else False):
        right, wrong = [], right  # the object with the tool's name cannot have these arguments
    for arguments in right:
        assert accepts(add, family.write(("f", arguments)), vocabulary), arguments
    for arguments in wrong:
        if key != "tgi" or arguments.startswith("{"):
            assert not accepts(add, family.write(("f", arguments)), vocabulary), arguments


@pytest.mark.parametrize("kind", KINDS)
def test_all_vocabulary_types_check_tools(kind: str) -> None:
    found = submit_chat(harness_of(KINDS[kind](), FAMILIES["hermes"].template), 1, chat([tool({})]))
    if isinstance(found, End):
        assert "grammar is not supported: of this model's tokenizer" in found.message
    else:
        assert grammar_of(found)


def test_formats_are_detected_from_templates() -> None:
    found = {key: detect_tool_call_format(family.template) for key, family in FAMILIES.items()}
    assert {key: format.name for key, format in found.items() if format} == {
        "hermes": "hermes", "thinking": "hermes", "llama": "llama3", "python-tag": "llama3", "mistral": "mistral",
        "mistral-args": "mistral-args",
    }  # fmt: skip
    assert len({format.name for format in TOOL_CALL_FORMATS}) == len(TOOL_CALL_FORMATS)
    assert detect_tool_call_format("<tool_call>\n<parameter=a>") is None
    assert detect_reasoning_tags("") is None
    tags = detect_reasoning_tags("a [THINK] b")
    assert tags is not None
    assert tags.close == "[/THINK]"


def test_tool_use_template_determines_the_format() -> None:
    sources = {"default": FAMILIES["hermes"].template, "tool_use": FAMILIES["llama"].template}
    read = ChatRenderer(ChatTemplates(sources, {})).render_chat
    answer = read(chat()).answer_format
    assert answer is not None
    assert [format.name for format in answer.call_formats] == ["llama3"]
    assert read(chat([])).answer_format is None


@pytest.mark.parametrize("name", ["", "\ud800"])
def test_unencodable_tool_names(name: str) -> None:
    harness = harness_of(byte_level(), "<tool_call>{{ tools | length }}")
    assert "cannot be the name of a tool" in rejection(harness, chat([tool({}, name)]))


@pytest.mark.parametrize("name", [" f", "f\n", "f[ARGS]g"])
def test_tool_names_that_the_parser_cannot_recover(name: str) -> None:
    asked = chat([tool({}, name)])
    assert "cannot be the name of a tool" in rejection(
        harness_of(byte_level(), FAMILIES["mistral-args"].template), asked
    )
    assert grammar_of(submit_valid_chat(harness_of(byte_level(), FAMILIES["mistral"].template), 1, asked))


def test_descriptions_are_not_part_of_the_grammar() -> None:
    harness = harness_of(byte_level(), "<tool_call>{{ tools | length }}")
    hostile = '"}\n// %json }\nstart: /.*/ """ # \u2028'
    parameters = {"description": hostile, "properties": {hostile: {"const": hostile, "description": hostile}}}
    add = submit_valid_chat(harness, 1, chat([tool(parameters)], tool_choice="required"))
    for value, right in ((hostile, True), ("", False)):
        arguments = json.dumps({hostile: value}, ensure_ascii=False)
        assert accepts(add, FAMILIES["hermes"].write(("f", arguments)), byte_level()) == right


def test_equal_tools_are_compiled_once() -> None:
    harness = harness_of(byte_level(), FAMILIES["hermes"].template)
    first = submit_valid_chat(harness, 1, chat([tool({"type": "object"})]))
    again = json.loads(chat([tool({"type": "object"})]))
    again["messages"].append({"role": "user", "content": "And?"})
    assert grammar_of(submit_valid_chat(harness, 1, json.dumps(again).encode())) is not None
    assert grammar_of(first) == grammar_of(submit_valid_chat(harness, 1, json.dumps(again).encode()))
