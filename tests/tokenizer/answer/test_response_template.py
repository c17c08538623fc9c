"""response_template of tokenizer_config.json: read as rows, and compared with transformers' own parser."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tokenizer.answer.dialogue import merge_parts
from tests.tokenizer.vocabularies import byte_level
from tgi.tokenizer.answers.formats import FormatDetector, FormatTokens
from tgi.tokenizer.answers.parser import AnswerParser
from tgi.tokenizer.answers.response_template import UnsupportedTemplate, described_formats, read_response_template

NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
THINK = {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text"}
CONTENT = {"close_pattern": r"<\|im_end\|>\s*", "content": "text"}


def spec(calls: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"start_anchor": "<|start|>", "fields": {"tool_calls": calls, "content": CONTENT, **fields}}


def xml(open_pattern: str, close: str, tag: str) -> dict[str, Any]:
    content = {"content": "xml-inline", "content_args": {"tag_pattern": tag, "value_parser": {"name": "text"}}}
    return {"open_pattern": open_pattern, "close": close, "repeats": True, "transform": NAMED, **content}


# In the style of published templates: the description, and answers.
TEMPLATES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "json": (
        spec(
            {"open": "<call>", "close_pattern": r"</call>\s*", "repeats": True, "content": "json",
             "transform": {"type": "function", "function": "{content}"}},
            reasoning_content=THINK,
        ),
        [
            '<think>So.</think>\nLet me see.<call>\n{"name": "f", "arguments": {"a": [1, {"b": "}"}]}}\n</call>\n'
            '<call>{"name": "g", "arguments": {}}</call>',
            "Hello.",
        ],
    ),
    "keys": (
        spec({"open": "<|call|>", "close": "<|end|>", "repeats": True, "content": "json",
              "transform": {"function": {"name": "{content.tool}", "arguments": "{content.args}"}}}),
        ['<|call|>{"tool": "f", "args": {"a": 1}}<|end|>'],
    ),
    "list": (
        spec({"open": "<|START|>", "close": "<|END|>", "content": "json", "transform_each": True,
              "transform": {"type": "function", "function": {"name": "{tool_name}", "arguments": "{parameters}"}}},
             thinking={"open": "<|T|>", "close": "<|/T|>"}),
        ['<|T|>So.<|/T|><|START|>[\n{"tool_name": "f", "parameters": {"a": "x"}}, '
         '{"tool_name": "g", "parameters": {}}\n]<|END|>'],
    ),
    "named": (
        spec({"open_pattern": r"<\|call\|>functions\.(?P<name>\w+)\s*<\|args\|>", "close": "<|end|>", "repeats": True,
              "content": "json", "transform": NAMED}),
        ['So: <|call|>functions.f <|args|>{"a": null}<|end|><|call|>functions.g<|args|>{}<|end|>'],
    ),
    "lines": (
        spec(xml(r"<tool_call>\s*<function=(?P<name>[^\n>]+)>", "</tool_call>",
                 r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"), reasoning_content=THINK),
        ["<tool_call>\n<function=f>\n<parameter=a>\nx\ny</z>\n</parameter>\n<parameter=b>\n[1]\n</parameter>\n"
         "</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>"],
    ),
    "keys and values": (
        spec(xml(r"<tool_call>(?P<name>\S+)\n?", "</tool_call>",
                 r"<arg_key>(?P<key>[^<]+)</arg_key>\s*\n<arg_value>(?P<value>.*?)</arg_value>")),
        ["<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>x y</arg_value>\n<arg_key>b</arg_key>\n"
         "<arg_value>[1]</arg_value>\n</tool_call>"],
    ),
}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {
        "a": {"type": "string"}, "b": {"type": "array"}}}}} for name in ("f", "g")
]  # fmt: skip


def parsed(description: dict[str, Any], answer: str) -> list[tuple[str, str]]:
    formats = read_response_template(description)._replace(tools={"f": {"a": ["string"], "b": ["array"]}, "g": {}})
    if description["fields"]["tool_calls"]["content"] == "json":
        formats = formats._replace(tools=None)
    parser = AnswerParser(formats, FormatTokens(byte_level(), formats))
    found: list[Any] = [part for character in answer for part in parser.parse_piece(character)]
    return merge_parts(found + parser.finish(True))


@pytest.mark.parametrize("key", TEMPLATES)
def test_same_as_transformers(key: str) -> None:
    chat_parsing = pytest.importorskip("transformers.utils.chat_parsing")
    description, answers = TEMPLATES[key]
    for answer in answers:
        message = chat_parsing.parse_response(answer, description, prefix="", tools=TOOLS)
        parts = parsed(description, answer)
        by_kind = {kind: "".join(text for one, text in parts if one == kind) for kind, _ in parts}
        assert by_kind.get("text", "") == message.get("content", "")
        assert by_kind.get("reasoning") == message.get("reasoning_content", message.get("thinking"))
        names = [text for kind, text in parts if kind == "call"]
        arguments = [json.loads(text) for kind, text in parts if kind == "arguments"]
        regions = [one if isinstance(one, list) else [one] for one in message.get("tool_calls", [])]
        calls = [call["function"] for region in regions for call in region]
        assert names == [call["name"] for call in calls]
        assert arguments == [call["arguments"] for call in calls]


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        ({"open_pattern": r"(?:a|b)", "close": "c", "content": "json"}, "regular expression"),
        ({"open": ["a", "b"], "close": "c", "content": "json"}, "not one text"),
        ({"open": "a", "close": "c", "content": "kv-lines", "transform": NAMED}, "kv-lines"),
        ({"open": "a", "close": "c", "content": "json", "content_args": {"unquoted_keys": True},
          "transform": {"function": "{content}"}}, "unquoted_keys"),
    ],
)  # fmt: skip
def test_what_no_row_can_say_is_refused_in_words(calls: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedTemplate, match=words):
        read_response_template(spec(calls))
    assert described_formats(tmp_path)[0] is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"response_template": spec(calls)}))
    formats, fault = described_formats(tmp_path)
    assert formats is None
    assert words in fault


def test_description_is_used_where_the_chat_template_shows_nothing(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"response_template": TEMPLATES["json"][0]}))
    described, fault = described_formats(tmp_path)
    assert not fault
    assert described is not None
    found = FormatDetector(described=described).call_format("{{ tools }}")
    assert found is described.call_formats[0]
    shown = FormatDetector(described=described).call_format("<tool_call>")
    assert shown is not None
    assert shown.name == "hermes"
    assert FormatDetector("hf", described=described).call_format("<tool_call>") is found
    assert FormatDetector(described=described).reasoning_tags("") == described.reasoning_tags
