"""Chats are adapted to what each template expects, whatever form the client sent them in."""

import json
from typing import Any

import pytest

from tests.tokenizer.harness import API, PoolHarness, end_messages, ids_of
from tests.tokenizer.vocabularies import byte_level
from tgi.microkernel.messages.codec import INT32, pack_column, unpack_int32
from tgi.microkernel.messages.protocol import FinishReason, Generate, Prompted, Tokenize
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.tokenizer import chat_template as templates
from tgi.tokenizer.chat import TOOL_PROMPT, ChatRenderer, OfferedTool
from tgi.tokenizer.chat_template import ChatTemplates, TemplateError
from tgi.tokenizer.encoding_jobs import MAX_INLINE_SIZE, ExecutorName

PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>"
    "{% endif %}"
)
# How published templates iterate over content parts.
LOOPS = [
    "{% for m in messages %}{% for part in m['content'] %}{{ part['text'] }}|{% endfor %}{% endfor %}",
    "{% for m in messages %}{% for p in m.content | selectattr('type', 'equalto', 'text') %}{{ p.text }}|{% endfor %}"
    "{% endfor %}",
    "{% for m in messages %}{% set c = m.content %}{% for p in c %}{{ p.text }}|{% endfor %}{% endfor %}",
    "{% macro show(content) %}{% for p in content %}{{ p.text }}|{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
    "{% for m in messages %}{{ m['content'][0]['text'] }}|{{ m.content[1].text }}|{% endfor %}",
]
NATIVE = (
    "{% for t in tools or [] %}{{ t.function | tojson }}\n{% endfor %}"
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{{ m.tool_call_id }}{{ m.name }}\n{% endfor %}"
)
TOOL = {"type": "function", "function": {"name": "wéather", "parameters": {"type": "object"}}}
HI = {"role": "user", "content": "Hi", "name": None}


def text(template: str | dict[str, str], *messages: Any, **fields: Any) -> str:
    sources = {"default": template} if isinstance(template, str) else template
    chats = ChatRenderer(ChatTemplates(sources, {"bos_token": "<|bos|>"}))
    return chats.render_chat(json.dumps({"messages": messages, **fields}).encode()).text


def parts(*texts: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": text} for text in texts]}


def test_content_parts_are_joined_for_text_templates() -> None:
    assert text(PLAIN, parts("a ", "b"), HI) == "<user>a b\n<user>Hi\n<assistant>"
    lines = "{% for m in messages %}{% for l in m.content.split('\n') %}{{ l }}.{% endfor %}{% endfor %}"
    assert text(lines, parts("a\n", "b")) == "a.b."
    with pytest.raises(TemplateError, match="without `text`"):
        text(PLAIN, {"role": "user", "content": [{"type": "image_url", "image_url": {}}]})


@pytest.mark.parametrize("template", LOOPS)
def test_content_parts_are_kept_for_templates_that_iterate_over_them(template: str) -> None:
    assert text(template, parts("a ", "b")) == "a |b|"


def test_string_content_becomes_a_part_for_parts_only_templates() -> None:
    assert text(LOOPS[0], HI) == "Hi|"
    both = "{% for m in messages %}{% if m.content is string %}{{ m.content }}!{% else %}" + LOOPS[0] + "{% endif %}"
    assert text(both + "{% endfor %}", HI) == "Hi!"


def test_generation_prompt_and_continued_message() -> None:
    begun = {"role": "assistant", "content": "Well, "}
    calls = {"role": "assistant", "content": None, "tool_calls": []}
    assert text(PLAIN, HI, begun) == "<user>Hi\n<assistant>Well, "
    assert text(PLAIN, HI, begun, add_generation_prompt=True) == "<user>Hi\n<assistant>Well, \n<assistant>"
    assert text(PLAIN, HI, begun, continue_final_message=False) == "<user>Hi\n<assistant>Well, \n<assistant>"
    assert text(PLAIN, HI, begun, add_generation_prompt=False) == "<user>Hi\n<assistant>Well, \n"
    assert text(PLAIN, HI, continue_final_message=True) == "<user>Hi"
    assert text(PLAIN, HI, calls).endswith("<assistant>")
    with pytest.raises(TemplateError, match="exclude each other"):
        text(PLAIN, HI, begun, add_generation_prompt=True, continue_final_message=True)


@pytest.mark.parametrize("arguments", [{"b": "ö", "a": 1}, '{"b": "ö", "a": 1}'])
def test_call_arguments_become_objects(arguments: Any) -> None:
    call = {"id": "7", "type": "function", "function": {"name": "f", "arguments": arguments}}
    answer = {"role": "tool", "tool_call_id": "7", "name": "f", "content": "ok"}
    rendered = text(NATIVE, {"role": "assistant", "content": "", "tool_calls": [call]}, answer)
    assert rendered == 'f{"b": "ö", "a": 1}\nok7f\n'


def test_calls_become_text_for_templates_without_tool_calls() -> None:
    calls = [{"function": {"name": name, "arguments": '{"a": "é"}'}} for name in ("f", "g")]
    call_text = '{"name": "f", "parameters": {"a": "é"}}\n{"name": "g", "parameters": {"a": "é"}}'
    for content, before in ((None, ""), ("", ""), ("Well.", "Well.\n")):
        turn = {"role": "assistant", "content": content, "tool_calls": calls}
        assert text(PLAIN, turn, HI) == f"<assistant>{before}{call_text}\n<user>Hi\n<assistant>"
    assert text(LOOPS[0], {"role": "assistant", "tool_calls": calls}, HI) == f"{call_text}|Hi|"


@pytest.mark.parametrize(("arguments", "shown"), [("", "{}"), ("{", '"{"'), ("3", '"3"'), ("[" * 99999, "[[[")])
def test_arguments_that_are_not_objects_are_unchanged(arguments: str, shown: str) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    assert shown in text(NATIVE, {"role": "assistant", "content": "x", "tool_calls": [call]}, HI)


@pytest.mark.parametrize(
    ("loop", "listed"),
    [
        ("for k, v in c.function.arguments | items", True),
        ("set a = c.function['arguments'] %}{% for k, v in a.items()", True),
        ("for k, v in (c.function.arguments if c.function.arguments is mapping else {}).items()", False),
    ],
)
@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"b": 1}', "b=1;"),
        ('{"b": ', 'arguments={"b": ;'),
        ('["b"]', 'arguments=["b"];'),
        ("", ""),
        ("null", ""),
        (None, ""),
    ],
)
def test_malformed_arguments_are_an_object_for_templates_that_list_them(
    loop: str, listed: bool, arguments: Any, shown: str
) -> None:
    template = "{% for m in messages %}{% for c in m.tool_calls or [] %}{% " + loop
    template += " %}{{ k }}={{ v }};{% endfor %}{% endfor %}{% endfor %}"
    call = {"function": {"name": "f", "arguments": arguments}}
    shown = shown if listed or shown == "b=1;" else ""
    assert text(template, {"role": "assistant", "content": None, "tool_calls": [call]}, HI) == shown


def test_tools_with_native_call_format() -> None:
    old = {"type": "function", "function": {"name": "wéather", "arguments": {"type": "object"}}}
    shown = '{"name": "wéather", "parameters": {"type": "object"}}\n'
    template = NATIVE + "{# <tool_call> #}"
    assert text(template, HI, tools=[TOOL]) == text(template, HI, tools=[old], tool_prompt="") == shown + "Hi\n"
    assert text(template, HI, tools=[TOOL], tool_prompt="Use it.") == shown + "Hi\n---\nUse it.\n"
    assert text({"default": PLAIN, "tool_use": template}, HI, tools=[TOOL]) == shown + "Hi\n"
    assert text({"default": PLAIN, "tool_use": template}, HI, tools=[]) == text(PLAIN, HI)


def test_tools_that_a_message_shows_are_not_listed_again() -> None:
    other = TOOL | {"function": {"name": "other"}}
    shown = text(NATIVE, HI, tools=[TOOL, other | {"in_messages": True}])
    assert shown == text(NATIVE, HI, tools=[TOOL])
    assert text(NATIVE, HI, tools=[other | {"in_messages": True}]) == text(NATIVE, HI, tools=[other])


def test_tools_listed_by_template_without_known_call_format() -> None:
    shown = '{"name": "wéather", "parameters": {"type": "object"}}\nHi\n---\n'
    assert text(NATIVE, HI, tools=[TOOL]) == f"{shown}{TOOL_PROMPT}\n"
    assert text(NATIVE, HI, tools=[TOOL], tool_prompt="Use it.") == f"{shown}Use it.\n"


def test_tools_unknown_to_template() -> None:
    compact = '[{"type":"function","function":{"name":"wéather","parameters":{"type":"object"}}}]'
    assert text(PLAIN, HI, tools=[TOOL]) == f"<user>Hi\n---\n{compact}\n{TOOL_PROMPT}\n<assistant>"
    assert f"a b\n---\n{compact}\nUse it.\n" in text(PLAIN, parts("a ", "b"), tools=[TOOL], tool_prompt="Use it.")
    begun = {"role": "assistant", "content": "Well"}
    assert text(PLAIN, HI, begun, tools=[TOOL]) == f"<user>Hi\n---\n{compact}\n{TOOL_PROMPT}\n<assistant>Well"
    assert text(LOOPS[0], HI, tools=[TOOL], tool_prompt="U") == f"Hi|\n---\n{compact}\nU|"


def test_chat_template_kwargs() -> None:
    template = "{{ bos_token }}{{ deep }}{{ documents }}"
    assert text(template, HI, chat_template_kwargs={"deep": 1, "documents": ["d"]}) == "<|bos|>1['d']"


@pytest.mark.parametrize("chat", [b"", b"[]", b'{"messages":3}', b'{"messages":[1]}', b"[" * 99999, b"\xff"])
def test_invalid_chats_are_rejected(chat: bytes) -> None:
    with pytest.raises(TemplateError, match=r"chat is no JSON|not a list of objects"):
        ChatRenderer(ChatTemplates({"default": PLAIN}, {})).render_chat(chat)


def test_endless_template_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "MAX_OUTPUT_CHARACTERS", 1 << 16)
    loop = "{% for i in range(9999) %}" * 3 + "xy{{ i }}" + "{% endfor %}" * 3
    with pytest.raises(TemplateError, match="characters and goes on"):
        text(loop, HI)


def test_template_errors_are_truncated_and_encodable() -> None:
    with pytest.raises(TemplateError) as caught:
        text("{{ raise_exception(messages[0].content) }}", {"role": "user", "content": "\ud800" * 9999})
    assert len(str(caught.value).encode()) < 3000


# Through the pool

CHAT = json.dumps({"messages": [HI, parts("é", "!")]}).encode()
WRITTEN = "<|bos|><user>Hi\n<user>é!\n<assistant>"


@pytest.mark.parametrize("resume", [[], ids_of("ab")])
def test_prompted_is_sent_when_a_chat_is_admitted(resume: list[int]) -> None:
    harness = PoolHarness(template="{{ bos_token }}" + PLAIN)
    add = harness.submit(4, "", chat=CHAT, resume_ids=pack_column(INT32, resume))
    assert unpack_int32(add.prompt_ids) == ids_of(WRITTEN)
    assert unpack_int32(add.prompt_ids).count(ids_of("<|bos|>")[0]) == 1
    assert harness.received_by(API) == [Prompted(4, len(ids_of(WRITTEN)), len(WRITTEN))]


def test_too_long_chat_is_rejected_without_prompted() -> None:
    harness = PoolHarness(template=PLAIN)
    harness.pool.handle(API, Generate(4, "", SamplingParams(1), chat=json.dumps({"messages": [HI] * 999}).encode()))
    assert harness.run_jobs() == [ExecutorName.TEXTS]  # larger than MAX_INLINE_SIZE, so it is a job
    (end,) = harness.received_by(API)
    assert (end.reason, "must be <= 2048" in end.message) == (FinishReason.INVALID, True)
    assert len(json.dumps([HI] * 999)) > MAX_INLINE_SIZE


def test_template_error_ends_the_request() -> None:
    harness = PoolHarness()
    harness.pool.handle(API, Generate(4, "", SamplingParams(1), chat=CHAT))
    harness.pool.handle(API, Tokenize(5, "", chat=CHAT))
    end, tokenized = harness.received_by(API)
    assert end_messages([end])[0].reason == FinishReason.TEMPLATE
    assert end.message == tokenized.error == "template not found"
    assert (tokenized.reason, tokenized.text) == (FinishReason.TEMPLATE, "")
    assert harness.pool.idle


def test_tokenize_chat_returns_offsets_into_its_text() -> None:
    harness = PoolHarness(template="{{ bos_token }}" + PLAIN)
    harness.pool.handle(API, Tokenize(5, "", chat=CHAT))
    (tokenized,) = harness.received_by(API)
    assert (tokenized.text, tokenized.error) == (WRITTEN, "")
    assert unpack_int32(tokenized.token_ids) == ids_of(WRITTEN)
    assert unpack_int32(tokenized.byte_stops)[-1] == len(WRITTEN.encode())
    assert unpack_int32(tokenized.token_ids)[0] in byte_level().special_ids


def test_detokenize_keeps_special_tokens() -> None:
    harness = PoolHarness(template="{{ bos_token }}" + PLAIN)
    harness.pool.handle(API, Tokenize(5, "", ids=pack_column(INT32, ids_of(WRITTEN))))
    (tokenized,) = harness.received_by(API)
    assert (tokenized.text, tokenized.error) == (WRITTEN, "")
    harness.pool.handle(API, Tokenize(6, "", ids=pack_column(INT32, [1] * MAX_INLINE_SIZE)))
    assert harness.run_jobs() == [ExecutorName.TEXTS]


CALLING = {
    "role": "assistant",
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "w", "arguments": "{}"}}],
}
# How published templates tell a message with calls.
NONE_TESTS = [
    "m['content'] is none",
    "m.content == none",
    "c is none",
    "m['content'] is not defined or m.content is none",
]


@pytest.mark.parametrize("content", [{}, {"content": None}])
@pytest.mark.parametrize("test", NONE_TESTS)
@pytest.mark.parametrize("joined", ["m['role'] + m['content']", "m['role'] }}{{ m['content']"])
def test_absent_content_is_none_for_templates_that_test_it(content: dict[str, Any], test: str, joined: str) -> None:
    template = (
        "{% for m in messages %}{% set c = m.content %}{% if m.role == 'assistant' and (" + test + ") %}"
        "<call>{{ m['tool_calls'][0]['function']['name'] }}</call>{% else %}{{ " + joined + " }}{% endif %}{% endfor %}"
    )
    assert text(template, HI, CALLING | content) == "userHi<call>w</call>"


def test_absent_content_stays_absent_for_other_templates() -> None:
    template = "{% for m in messages %}{{ 'content' in m }} {{ m.x is none }}|{% endfor %}"
    assert text(template + "{{ messages[0].tool_calls }}", HI, CALLING | {"content": None}).startswith(
        "True False|False"
    )
    joined = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
    assert text(joined, HI, {"role": "assistant", "content": None, "tool_calls": []}) == "userHiassistant"


def test_only_a_test_of_the_content_tells_whether_it_may_be_a_string(caplog: pytest.LogCaptureFixture) -> None:
    calls = "{% for t in m.tool_calls or [] %}{% if t.function.arguments is string %}{{ t }}{% endif %}{% endfor %}"
    assert text(LOOPS[0].removesuffix("{% endfor %}") + calls + "{% endfor %}", HI) == "Hi|"
    assert not caplog.records


def test_a_template_that_leaves_a_text_out_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    chats = ChatRenderer(
        ChatTemplates({"default": "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"}, {})
    )
    for messages in ([HI], [{"role": "system", "content": "Be brief."}, HI], [{"role": "system", "content": "x"}]):
        chats.render_chat(json.dumps({"messages": messages}).encode())
    (record,) = caplog.records
    assert record.getMessage() == "the chat template leaves out the text of a message with the role 'system'"
    kept = {"role": "assistant", "content": "<think>Hm</think>\n Yes \n"}
    text(
        "<think>{% for m in messages %}{{ m.content.split('</think>')[-1] | trim }} {% endfor %}",
        kept,
        parts("a ", "b"),
    )
    text("{% for m in messages %}{{ m.content | tojson }}{% endfor %}", {"role": "tool", "content": 'a "b"\n'})
    assert len(caplog.records) == 1


ONE_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('at the beginning') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
NO_SYSTEM = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}{% endfor %}"
ALTERNATING = ONE_SYSTEM + (
    "{% for m in messages[1:] %}{% if loop.index0 % 2 and m.role == 'user' %}{{ raise_exception('alternate') }}"
    "{% endif %}{% endfor %}"
)


def test_later_system_messages_for_templates_that_refuse_them() -> None:
    system = [{"role": role, "content": content} for role, content in (("system", "A"), ("developer", "B"))]
    assert text(ONE_SYSTEM, *system, HI, system[1], HI) == "<system>A\n\nB<user>Hi<user>B<user>Hi"
    assert text(ONE_SYSTEM, HI, system[0]) == "<user>Hi<user>A"
    assert text(ONE_SYSTEM.replace("m.content", "m.content[0].text"), *system, HI) == "<system>A\n\nB<user>Hi"
    other = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    assert text(other, *system, HI, system[0]) == "<system>A<system>B<user>Hi<system>A"
    for template in (NO_SYSTEM, ALTERNATING):
        with pytest.raises(TemplateError, match=r"no|at the beginning"):
            text(template, *system, HI)


def test_developer_is_system_unless_the_template_names_it() -> None:
    message = {"role": "developer", "content": "Be brief."}
    assert text(PLAIN, message, HI).startswith("<system>Be brief.\n<user>")
    assert text(PLAIN + "{# developer #}", message, HI).startswith("<developer>Be brief.\n<user>")


def test_reasoning_is_another_name_of_reasoning_content() -> None:
    template = "{% for m in messages %}{{ m.reasoning_content }}{% endfor %}"
    answer = {"role": "assistant", "content": "Yes", "reasoning": "Hm"}
    assert text(template, answer, HI) == "Hm"
    assert text(template, answer | {"reasoning_content": "So"}, HI) == "So"


BODY = "{% for m in messages %}{{ m.content }}{% endfor %}"
SWITCH = BODY + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"


@pytest.mark.parametrize(
    ("template", "fields", "prompt"),
    [
        (BODY, {"reasoning_effort": "none", "verbosity": "low"}, "Hi"),
        (BODY, {"reasoning_effort": "high"}, "Hi"),
        (BODY + "{{ reasoning_effort }}{{ verbosity }}", {"reasoning_effort": "high", "verbosity": "low"}, "Hihighlow"),
        (BODY + "{{ reasoning_effort or 'medium' }}", {}, "Himedium"),
        (
            BODY + "{{ reasoning_effort }}",
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "x"}},
            "Hix",
        ),
        (SWITCH, {"reasoning_effort": "none"}, "Hi<think></think>"),
        (SWITCH, {"reasoning_effort": "high"}, "Hi"),
        (BODY + "{{ enable_thinking }}{{ thinking }}", {"thinking": True}, "HiTrueTrue"),
        (BODY, {"thinking": True}, "Hi"),
        (SWITCH, {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, "Hi"),
        (BODY + "{% if thinking %}<think>{% else %}</think>{% endif %}", {"reasoning_effort": "none"}, "Hi</think>"),
        (BODY + "<think>\n", {"reasoning_effort": "none"}, "Hi<think>\n\n</think>\n\n"),
        (BODY + "<think>\n", {"reasoning_effort": "low"}, "Hi<think>"),
        (BODY + "{# </think> #}", {"reasoning_effort": "none"}, "Hi<think>\n\n</think>\n\n"),
    ],
)
def test_reasoning_effort_and_verbosity(template: str, fields: dict[str, Any], prompt: str) -> None:
    assert text(template, HI, **fields) == prompt


def test_what_a_template_is_not_told_about_a_tool() -> None:
    shown, enforced = {"type": "object"}, {"type": "object", "maxProperties": 1}
    function = {"name": "f", "parameters": shown, "strict": True, "enforced_parameters": enforced}
    chat = {"messages": [HI], "tools": [{"type": "function", "function": function}]}
    templates = ChatTemplates({"default": "{{ tools | tojson }}<tool_call>"}, {})
    rendered = ChatRenderer(templates).render_chat(json.dumps(chat).encode())
    assert json.loads(rendered.text.partition("<tool_call>")[0])[0]["function"] == {"name": "f", "parameters": shown}
    assert rendered.tools == [OfferedTool("f", enforced, strict=True)]
