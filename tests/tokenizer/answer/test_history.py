"""Conversations with calls and results, rendered with each family's template."""

import json
from contextlib import suppress
from typing import Any

import pytest

from tests.tokenizer.answer.model_families import FAMILIES, SUN, TOOLS
from tgi.tokenizer.chat import ChatRenderer
from tgi.tokenizer.chat_template import ChatTemplates, TemplateError

ID = "call_0123456789abcdef"
TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "How is Ulm?"},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "Ask.",
        "tool_calls": [{"id": ID, "type": "function", "function": {"name": SUN[0], "arguments": SUN[1]}}],
    },
    {"role": "tool", "tool_call_id": ID, "name": SUN[0], "content": '{"sky": "blue"}'},
]


def render(key: str, *turns: dict[str, Any]) -> str:
    chats = ChatRenderer(ChatTemplates({"default": FAMILIES[key].template}, {}))
    return chats.render_chat(json.dumps({"messages": turns, "tools": TOOLS}).encode()).text


@pytest.mark.parametrize("key", ["hermes", "thinking", "llama", "mistral-args"])
def test_calls_in_history_match_the_models_format(key: str) -> None:
    text = render(key, *TURNS)
    assert FAMILIES[key].write(SUN) in text
    assert '{"sky": "blue"}' in text.partition(SUN[1])[2]
    assert ("<think>\nAsk.\n</think>" in text) == (key == "thinking")


@pytest.mark.parametrize("content", [None, "", "Let me see."])
def test_message_with_calls_is_not_continued(content: str | None) -> None:
    """Continuing its text would drop its calls."""
    text = render("hermes", TURNS[0], {**TURNS[1], "content": content})
    assert text.endswith(FAMILIES["hermes"].write(SUN) + "<|assistant|>")


def rendered(template: str, *turns: dict[str, Any]) -> str:
    return (
        ChatRenderer(ChatTemplates({"default": template}, {}))
        .render_chat(json.dumps({"messages": turns}).encode())
        .text
    )


@pytest.mark.parametrize(
    "written", ["'' + c.function.arguments + ''", "c.function.arguments", "c.function.arguments | tojson"]
)
@pytest.mark.parametrize("arguments", [SUN[1], json.loads(SUN[1])], ids=["text", "object"])
def test_arguments_render_as_json(written: str, arguments: Any) -> None:
    template = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ " + written + " }}{% endfor %}{% endfor %}"
    call = {"id": ID, "type": "function", "function": {"name": SUN[0], "arguments": arguments}}
    assert rendered(template, TURNS[0], {**TURNS[1], "tool_calls": [call]}) == SUN[1]


def test_tool_results_get_the_name_of_the_tool() -> None:
    template = "{% for m in messages %}{{ m.role }}:{{ m.name if m.name is defined }};{% endfor %}"
    result = {"role": "tool", "tool_call_id": ID, "content": "blue"}
    assert rendered(template, *TURNS[:2], result) == "user:;assistant:;tool:weather;"
    assert rendered(template, *TURNS[:2], {**result, "name": "other"}) == "user:;assistant:;tool:other;"
    assert rendered(template, result, {**result, "tool_call_id": "unknown"}) == "tool:;tool:;"


def test_empty_tool_calls_are_removed() -> None:
    template = "{% for m in messages %}{{ 'calls' if 'tool_calls' in m else m.content }}{% endfor %}"
    assert rendered(template, {"role": "assistant", "content": "Hi", "tool_calls": []}, TURNS[0]) == "HiHow is Ulm?"


def test_call_ids_are_shortened_for_mistral() -> None:
    text = render("mistral", *TURNS)
    (call,) = json.loads(text.partition("[TOOL_CALLS] ")[2].partition("[TOOL_RESULTS]")[0])
    result = json.loads(text.partition("[TOOL_RESULTS] ")[2].partition("[/TOOL_RESULTS]")[0])
    assert call["arguments"] == json.loads(SUN[1])
    assert call["id"] == result["call_id"] != ID
    assert len(call["id"]) == 9
    short = json.loads(json.dumps(TURNS).replace(ID, "abcDEF123"))
    assert '"call_id": "abcDEF123"' in render("mistral", *short)


def test_template_may_reject_parallel_calls() -> None:
    twice = {**TURNS[1], "tool_calls": TURNS[1]["tool_calls"] * 2}
    with pytest.raises(TemplateError, match="one call at once"):
        render("llama", TURNS[0], twice)


@pytest.mark.parametrize("calls", ["none", 3, [None], [{"id": 5}]])
def test_malformed_tool_calls_in_history(calls: Any) -> None:
    odd = {"role": "assistant", "content": "Hm", "tool_calls": calls, "tool_call_id": 3}
    for key in FAMILIES:
        chats = ChatRenderer(
            ChatTemplates({"default": "length != 9{{ messages | length }}" + FAMILIES[key].template}, {})
        )
        with suppress(TemplateError):  # a template may reject them
            assert chats.render_chat(json.dumps({"messages": [TURNS[0], odd]}).encode()).text


@pytest.mark.parametrize("arguments", ['{"city": "U', "[1]", "", '{"city": "\\ud83d"}', "null"])
@pytest.mark.parametrize("written", [
    "{% if c.function.arguments is not mapping %}{{ raise_exception('no mapping') }}{% endif %}",
    "{% for k, v in c.function.arguments.items() %}{{ k }}{% endfor %}", "{{ c.function.arguments }}",
])  # fmt: skip
def test_arguments_that_are_no_json_are_served(written: str, arguments: str) -> None:
    """Agents keep calls that were cut in their history."""
    template = "{% for m in messages %}{% for c in m.tool_calls or [] %}" + written + "{% endfor %}{% endfor %}."
    call = {"id": ID, "type": "function", "function": {"name": SUN[0], "arguments": arguments}}
    assert rendered(template, TURNS[0], {**TURNS[1], "tool_calls": [call]}).encode()


def test_calls_are_numbered_for_kimi() -> None:
    template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}<|tool_call_begin|>{{ c.id }};{% endfor %}"
        "{{ m.tool_call_id }};{% endfor %}"
    )
    twice = {**TURNS[1], "tool_calls": [TURNS[1]["tool_calls"][0], {**TURNS[1]["tool_calls"][0], "id": "other"}]}
    results = [TURNS[2], {**TURNS[2], "tool_call_id": "other"}]
    assert rendered(template, TURNS[0], twice, *reversed(results)) == (
        ";<|tool_call_begin|>functions.weather:0;<|tool_call_begin|>functions.weather:1;;"
        "functions.weather:1;functions.weather:0;"
    )


def test_reasoning_has_the_key_that_the_template_reads() -> None:
    template = "{% for message in messages %}{{ message.thinking }};{{ message.content }}"
    template += "{% if message.tool_calls %}!{% endif %}{% endfor %}"
    assert rendered(template, TURNS[0], TURNS[1]) == ";How is Ulm?Ask.;!"
    assert rendered(template, TURNS[0], {**TURNS[1], "content": "Hm"}) == ";How is Ulm?;Hm!"
    assert rendered(template + "{# reasoning_content #}", TURNS[0], TURNS[1]) == ";How is Ulm?;!"
