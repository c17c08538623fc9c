"""Chat templates, compared with the rendering of `transformers`."""

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tgi.hub.model_config import read_model_config
from tgi.hub.tokenizer_files import special_tokens
from tgi.tokenizer.chat_template import ChatTemplates, TemplateError

CHATML = """{% for message in messages %}
    {%- if loop.first and message.role != 'system' %}
{{ '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}
    {%- endif %}
{{- '<|im_start|>' + message.role + '\\n' }}
    {% generation %}
{{ message.content }}
    {% endgeneration %}
<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""

TOOLS = """{{ bos_token }}{% if tools %}
{%- for tool in tools %}{% if loop.index > 2 %}{% break %}{% endif %}{{ tool | tojson }}
{{ tool | tojson(indent=2) }}{% endfor %}{% endif %}
{%- set ns = namespace(last=none) %}
{%- for message in messages %}
{%- if message.tool_calls is defined %}
{%- for call in message.tool_calls %}[{{ call.function.name }}({{ call.function.arguments | tojson }})]{% endfor %}
{%- elif message.role == 'tool' %}({{ message.tool_call_id }}: {{ message.content }})
{%- elif message.content is string %}{{ message.content.strip().title() }}
{%- else %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}
{%- set ns.last = message.role %}{{ eos_token }}
{%- endfor %}{{ ns.last }}{{ documents }}{{ flavour }}{{ undefined_thing }}{{ messages[::-1][0].role }}
{%- if add_generation_prompt %}assistant:{% endif %}"""

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Sprich <deutsch> & höflich 👍"},
    {"role": "user", "content": [{"type": "text", "text": "weather "}, {"type": "text", "text": "in Paris?"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"z": "Köln", "a": 1}}}
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    {"role": "assistant", "content": "It is sunny "},
]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "required": ["z", "a"]}}}
TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "  Hello, I "}]


def ours(template: str, directory: Path) -> ChatTemplates:
    return ChatTemplates({"default": template}, special_tokens(directory))


@pytest.fixture(scope="module")
def reference(tiny_llama: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_llama)


@pytest.mark.parametrize("template", [CHATML, TOOLS], ids=["chatml", "tools"])
@pytest.mark.parametrize("chat", [CHAT, TALK, CHAT[:2]], ids=["tools", "talk", "parts"])
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("tools", [None, [TOOL, TOOL, TOOL]], ids=["plain", "with"])
def test_renders_as_transformers_does(
    template: str, chat: Any, prompt: bool, tools: Any, reference: Any, tiny_llama: Path
) -> None:
    expected = reference.apply_chat_template(
        chat, tools=tools, chat_template=template, add_generation_prompt=prompt, tokenize=False, flavour="sweet"
    )
    kwargs = {"flavour": "sweet"}
    rendered = ours(template, tiny_llama).render(chat, tools, add_generation_prompt=prompt, kwargs=kwargs)
    assert rendered == expected


@pytest.mark.parametrize(
    "template",
    [
        CHATML,
        "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>\n{% endfor %}",
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}!{% endif %}",
    ],
)
@pytest.mark.parametrize("last", ["  Hello, I ", "word", "a\n"])
def test_continues_the_last_message_as_transformers_does(
    template: str, last: str, reference: Any, tiny_llama: Path
) -> None:
    chat = [TALK[0], {"role": "assistant", "content": last}]
    expected = reference.apply_chat_template(chat, chat_template=template, continue_final_message=True, tokenize=False)
    rendered = ours(template, tiny_llama).render(chat, add_generation_prompt=False, continue_final_message=True)
    assert rendered == expected
    assert rendered.endswith(last.strip()) or rendered.endswith(last)
    assert chat[-1]["content"] == last


def test_kwargs_override_special_tokens_in_the_models_template(reference: Any, tiny_llama: Path) -> None:
    config = read_model_config(tiny_llama)
    templates = ChatTemplates(config.chat_templates, special_tokens(tiny_llama))
    expected = reference.apply_chat_template(TALK, add_generation_prompt=True, tokenize=False)
    assert templates.render(TALK) == expected
    assert expected.startswith("<|bos|>")
    assert templates.render(TALK, kwargs={"bos_token": "B", "messages": []}).startswith("B<|user|>")


def test_named_templates() -> None:
    templates = ChatTemplates({"default": "plain", "tool_use": "tools"}, {})
    assert templates.render(TALK) == "plain"
    assert templates.render(TALK, [TOOL]) == "tools"
    assert ChatTemplates({"default": "plain"}, {}).render(TALK, [TOOL]) == "plain"


def test_the_date_of_today() -> None:
    assert ChatTemplates({"default": "{{ strftime_now('%Y') }}"}, {}).render(TALK) == str(datetime.now().year)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("\n{{ raise_exception('roles must alternate') }}", r"^syntax error: roles must alternate \(in <string>:2\)$"),
        ("{% if %}", r"^syntax error: .*\(in <string>:1\)$"),
        ("{% generation %}", r"^syntax error: .*\(in <string>:1\)$"),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
        ("\n\n{{ 1 // 0 }}", r"ZeroDivisionError.*<string>:3"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__base__.__subclasses__() }}", "unsafe"),
        ("{% set ns = namespace(__class__=1) %}", "underscore"),
        ("{% set ns = namespace() %}{% set ns.__init__ = 1 %}", "underscore"),
        ("{{ namespace.__init__.__globals__ }}", "unsafe"),
        ("{{ raise_exception.__globals__.items() }}", "unsafe"),
        ("{% for i in range(99999999) %}{% endfor %}", "Range too big"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    ],
)
def test_failing_and_unsafe_templates(template: str, says: str) -> None:
    with pytest.raises(TemplateError, match=says):
        ChatTemplates({"default": template}, {}).render(TALK)


def test_no_template() -> None:
    with pytest.raises(TemplateError, match=r"^template not found$"):
        ChatTemplates({}, {}).render(TALK)


@pytest.mark.parametrize("chat", [[], [{"role": "assistant"}], [{"role": "assistant", "content": [{"type": "image"}]}]])
def test_continue_without_text_is_rejected(chat: Any) -> None:
    with pytest.raises(TemplateError, match="no text"):
        ChatTemplates({"default": "x"}, {}).render(chat, add_generation_prompt=False, continue_final_message=True)


def test_a_template_that_drops_the_message_to_continue() -> None:
    with pytest.raises(TemplateError, match="changes or drops"):
        ChatTemplates({"default": "x"}, {}).render(TALK, add_generation_prompt=False, continue_final_message=True)
