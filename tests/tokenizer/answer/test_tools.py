"""Which tools are refused, in words that name them; and what of a schema binds the arguments."""

import json
from typing import Any

import pytest

from tests.tokenizer.answer.families import FAMILIES, chat
from tests.tokenizer.answer.talk import accepts, begin, grammar, house_of, refusal, start
from tests.tokenizer.vocabularies import KINDS, byte_level
from tgi.kernel.messages import End, Reason
from tgi.tokenizer.answer.formats import FORMATS, native, reasoning
from tgi.tokenizer.answer.tools import MOST_PROPERTIES, MOST_TOOLS
from tgi.tokenizer.chat import Chats
from tgi.tokenizer.grammar import MOST_BYTES
from tgi.tokenizer.template import ChatTemplates


def tool(parameters: Any, name: str = "f") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"not": {}}, "tool `f`: cannot compile regex from schema: `not` cannot be enforced (at #)"),
        ({"properties": {"a": {"pattern": "(?=a)"}}}, "tool `f`: cannot compile regex from schema: `pattern`"),
        ({"properties": {"a": {"type": "word"}}}, "tool `f`: grammar is not valid: `type` must be"),
        ({"type": "string"}, "tool `f`: grammar is not valid: `parameters` must describe an object"),
        ("object", "tool `f`: grammar is not valid: a schema is an object"),
        ({"properties": {"a": False}, "required": ["a"]}, "tool `f`: cannot compile regex from schema: Unsatisfiable"),
    ],
)
def test_parameters_that_cannot_be_enforced(parameters: Any, words: str) -> None:
    house = house_of(byte_level(), FAMILIES["named"].template)
    for _ in range(2):  # refusals are kept
        told = refusal(house, chat([tool({}, "g"), tool(parameters)]))
        assert told.startswith(words)
        assert "%json" not in told  # nothing of the grammar around the schema


def test_too_many_and_too_large() -> None:
    house = house_of(byte_level(), "<tool_call>{{ tools | length }}")
    many = [tool({}, f"f{at}") for at in range(MOST_TOOLS)]
    assert grammar(begin(house, 1, chat(many)))
    assert f"at most {MOST_TOOLS} tools" in refusal(house, chat([*many, tool({})]))
    assert f"at most {MOST_BYTES} bytes" in refusal(house, chat([tool({"description": "x" * MOST_BYTES})]))
    names = {"properties": {"a": {"properties": {str(at): True for at in range(MOST_PROPERTIES // 3)}}}}
    assert f"more than {MOST_PROPERTIES} names in all" in refusal(house, chat([tool(names, name) for name in "abc"]))


def test_a_tool_without_a_name() -> None:
    end = start(house_of(byte_level(), FAMILIES["named"].template), 1, chat([{"type": "function"}]))
    assert isinstance(end, End)
    assert (end.reason, end.message) == (Reason.TEMPLATE, "a tool has no `function` with a `name`")


@pytest.mark.parametrize("key", ["hermes", "named", "tgi"])
@pytest.mark.parametrize(
    ("parameters", "right", "wrong"),
    [
        (None, ["{}", '{"any": [1]}'], ["[]", "1", "null"]),
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
def test_arguments_are_an_object_that_matches(key: str, parameters: Any, right: list[str], wrong: list[str]) -> None:
    family, vocabulary = FAMILIES[key], byte_level()
    add = begin(house_of(vocabulary, family.template), 1, chat([tool(parameters)], tool_choice="required"))
    plain = parameters is None or not set(parameters) & {"$ref", "anyOf", "minProperties"}
    if key == "tgi" and (not plain or "_name" in parameters.get("properties", {}) if parameters else False):
        right, wrong = [], right  # no place in an object that holds the tool's name
    for arguments in right:
        assert accepts(add, family.write(("f", arguments)), vocabulary), arguments
    for arguments in wrong:
        if key != "tgi" or arguments.startswith("{"):
            assert not accepts(add, family.write(("f", arguments)), vocabulary), arguments


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_vocabulary_can_check(kind: str) -> None:
    found = start(house_of(KINDS[kind](), FAMILIES["hermes"].template), 1, chat([tool({})]))
    if isinstance(found, End):
        assert "grammar is not supported: of this model's tokenizer" in found.message
    else:
        assert grammar(found)


def test_formats_are_known_by_templates() -> None:
    found = {key: native(family.template) for key, family in FAMILIES.items()}
    assert {key: format.name for key, format in found.items() if format} == {
        "hermes": "hermes", "thinking": "hermes", "llama": "llama3", "python-tag": "llama3", "mistral": "mistral",
        "mistral-args": "mistral-args",
    }  # fmt: skip
    assert len({format.name for format in FORMATS}) == len(FORMATS)
    assert native("<tool_call>\n<function=f>\n<parameter=a>") is None
    assert reasoning("") is None
    tags = reasoning("a [THINK] b")
    assert tags is not None
    assert tags.close == "[/THINK]"


def test_the_template_for_tools_says_how() -> None:
    sources = {"default": FAMILIES["hermes"].template, "tool_use": FAMILIES["llama"].template}
    read = Chats(ChatTemplates(sources, {})).read
    answer = read(chat()).answer
    assert answer is not None
    assert [format.name for format in answer.formats] == ["llama3"]
    assert read(chat([])).answer is None


@pytest.mark.parametrize("name", ["", "\ud800"])
def test_names_that_cannot_be_written(name: str) -> None:
    house = house_of(byte_level(), "<tool_call>{{ tools | length }}")
    assert "cannot be the name of a tool" in refusal(house, chat([tool({}, name)]))


@pytest.mark.parametrize("name", [" f", "f\n", "f[ARGS]g"])
def test_names_that_end_too_soon(name: str) -> None:
    asked = chat([tool({}, name)])
    assert "cannot be the name of a tool" in refusal(house_of(byte_level(), FAMILIES["mistral-args"].template), asked)
    assert grammar(begin(house_of(byte_level(), FAMILIES["mistral"].template), 1, asked))


def test_descriptions_are_no_grammar() -> None:
    house = house_of(byte_level(), "<tool_call>{{ tools | length }}")
    hostile = '"}\n// %json }\nstart: /.*/ """ # \u2028'
    parameters = {"description": hostile, "properties": {hostile: {"const": hostile, "description": hostile}}}
    add = begin(house, 1, chat([tool(parameters)], tool_choice="required"))
    for value, right in ((hostile, True), ("", False)):
        arguments = json.dumps({hostile: value}, ensure_ascii=False)
        assert accepts(add, FAMILIES["hermes"].write(("f", arguments)), byte_level()) == right


def test_one_compilation_for_equal_tools() -> None:
    house = house_of(byte_level(), FAMILIES["hermes"].template)
    first = begin(house, 1, chat([tool({"type": "object"})]))
    again = json.loads(chat([tool({"type": "object"})]))
    again["messages"].append({"role": "user", "content": "And?"})
    assert grammar(begin(house, 1, json.dumps(again).encode())) is not None
    assert grammar(first) == grammar(begin(house, 1, json.dumps(again).encode()))
