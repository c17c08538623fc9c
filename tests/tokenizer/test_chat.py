"""Chats become the text that a template's author had in mind, whatever form the client sent them in."""

import json
from typing import Any

import pytest

from tests.tokenizer.house import API, House, ends, ids_of
from tests.tokenizer.vocabularies import byte_level
from tgi.kernel.answer import Prompted
from tgi.kernel.messages import Generate, Reason, Sampling, Tokenize
from tgi.kernel.pack import INT32, ints, pack
from tgi.tokenizer import template as templates
from tgi.tokenizer.chat import TOOL_PROMPT, Chats
from tgi.tokenizer.jobs import LONG_TEXT
from tgi.tokenizer.template import ChatTemplates, TemplateError

PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>"
    "{% endif %}"
)
# How published templates go through content parts.
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
    chats = Chats(ChatTemplates(sources, {"bos_token": "<|bos|>"}))
    return chats.text(json.dumps({"messages": messages, **fields}).encode())


def parts(*texts: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": text} for text in texts]}


def test_parts_are_joined_for_templates_of_text() -> None:
    assert text(PLAIN, parts("a ", "b"), HI) == "<user>a b\n<user>Hi\n<assistant>"
    lines = "{% for m in messages %}{% for l in m.content.split('\n') %}{{ l }}.{% endfor %}{% endfor %}"
    assert text(lines, parts("a\n", "b")) == "a.b."
    with pytest.raises(TemplateError, match="without `text`"):
        text(PLAIN, {"role": "user", "content": [{"type": "image_url", "image_url": {}}]})


@pytest.mark.parametrize("template", LOOPS)
def test_parts_are_kept_for_templates_that_go_through_them(template: str) -> None:
    assert text(template, parts("a ", "b")) == "a |b|"


def test_a_string_becomes_a_part_where_only_parts_are_understood() -> None:
    assert text(LOOPS[0], HI) == "Hi|"
    both = "{% for m in messages %}{% if m.content is string %}{{ m.content }}!{% else %}" + LOOPS[0] + "{% endif %}"
    assert text(both + "{% endfor %}", HI) == "Hi!"


def test_what_ends_the_prompt() -> None:
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
def test_calls_carry_objects_and_names_pass_through(arguments: Any) -> None:
    call = {"id": "7", "type": "function", "function": {"name": "f", "arguments": arguments}}
    answer = {"role": "tool", "tool_call_id": "7", "name": "f", "content": "ok"}
    rendered = text(NATIVE, {"role": "assistant", "content": "", "tool_calls": [call]}, answer)
    assert rendered == 'f{"b": "ö", "a": 1}\nok7f\n'


def test_calls_are_written_out_where_the_template_does_not_know_them() -> None:
    calls = [{"function": {"name": name, "arguments": '{"a": "é"}'}} for name in ("f", "g")]
    told = '{"name": "f", "parameters": {"a": "é"}}\n{"name": "g", "parameters": {"a": "é"}}'
    for content, before in ((None, ""), ("", ""), ("Well.", "Well.\n")):
        turn = {"role": "assistant", "content": content, "tool_calls": calls}
        assert text(PLAIN, turn, HI) == f"<assistant>{before}{told}\n<user>Hi\n<assistant>"
    assert text(LOOPS[0], {"role": "assistant", "tool_calls": calls}, HI) == f"{told}|Hi|"


@pytest.mark.parametrize(("arguments", "shown"), [("", "{}"), ("{", '"{"'), ("3", '"3"'), ("[" * 99999, "[[[")])
def test_arguments_that_are_no_object_stay_as_they_are(arguments: str, shown: str) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    assert shown in text(NATIVE, {"role": "assistant", "content": "x", "tool_calls": [call]}, HI)


def test_tools_that_the_template_knows() -> None:
    old = {"type": "function", "function": {"name": "wéather", "arguments": {"type": "object"}}}
    shown = '{"name": "wéather", "parameters": {"type": "object"}}\n'
    template = NATIVE + "{# <tool_call> #}"
    assert text(template, HI, tools=[TOOL]) == text(template, HI, tools=[old], tool_prompt="") == shown + "Hi\n"
    assert text(template, HI, tools=[TOOL], tool_prompt="Use it.") == shown + "Hi\n---\nUse it.\n"
    assert text({"default": PLAIN, "tool_use": template}, HI, tools=[TOOL]) == shown + "Hi\n"
    assert text({"default": PLAIN, "tool_use": template}, HI, tools=[]) == text(PLAIN, HI)


def test_tools_that_the_template_lists_without_a_known_form_of_calls() -> None:
    shown = '{"name": "wéather", "parameters": {"type": "object"}}\nHi\n---\n'
    assert text(NATIVE, HI, tools=[TOOL]) == f"{shown}{TOOL_PROMPT}\n"
    assert text(NATIVE, HI, tools=[TOOL], tool_prompt="Use it.") == f"{shown}Use it.\n"


def test_tools_that_the_template_does_not_know() -> None:
    compact = '[{"type":"function","function":{"name":"wéather","parameters":{"type":"object"}}}]'
    assert text(PLAIN, HI, tools=[TOOL]) == f"<user>Hi\n---\n{compact}\n{TOOL_PROMPT}\n<assistant>"
    assert f"a b\n---\n{compact}\nUse it.\n" in text(PLAIN, parts("a ", "b"), tools=[TOOL], tool_prompt="Use it.")
    begun = {"role": "assistant", "content": "Well"}
    assert text(PLAIN, HI, begun, tools=[TOOL]) == f"<user>Hi\n---\n{compact}\n{TOOL_PROMPT}\n<assistant>Well"
    assert text(LOOPS[0], HI, tools=[TOOL], tool_prompt="U") == f"Hi|\n---\n{compact}\nU|"


def test_further_variables() -> None:
    template = "{{ bos_token }}{{ deep }}{{ documents }}"
    assert text(template, HI, chat_template_kwargs={"deep": 1, "documents": ["d"]}) == "<|bos|>1['d']"


@pytest.mark.parametrize("chat", [b"", b"[]", b'{"messages":3}', b'{"messages":[1]}', b"[" * 99999, b"\xff"])
def test_what_is_no_chat(chat: bytes) -> None:
    with pytest.raises(TemplateError, match=r"chat is no JSON|not a list of objects"):
        Chats(ChatTemplates({"default": PLAIN}, {})).text(chat)


def test_a_template_that_never_ends_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "MAX_CHARACTERS", 1 << 16)
    loop = "{% for i in range(9999) %}" * 3 + "xy{{ i }}" + "{% endfor %}" * 3
    with pytest.raises(TemplateError, match="characters and goes on"):
        text(loop, HI)


def test_errors_are_short_and_can_be_sent() -> None:
    with pytest.raises(TemplateError) as caught:
        text("{{ raise_exception(messages[0].content) }}", {"role": "user", "content": "\ud800" * 9999})
    assert len(str(caught.value).encode()) < 3000


# Through the pool

CHAT = json.dumps({"messages": [HI, parts("é", "!")]}).encode()
WRITTEN = "<|bos|><user>Hi\n<user>é!\n<assistant>"


@pytest.mark.parametrize("resume", [[], ids_of("ab")])
def test_a_chat_is_announced_when_it_is_admitted(resume: list[int]) -> None:
    house = House(template="{{ bos_token }}" + PLAIN)
    add = house.ask(4, "", chat=CHAT, resume=pack(INT32, resume))
    assert ints(add.prompt) == ids_of(WRITTEN)
    assert ints(add.prompt).count(ids_of("<|bos|>")[0]) == 1
    assert house.said(API) == [Prompted(4, len(ids_of(WRITTEN)), len(WRITTEN))]


def test_a_chat_that_is_too_long_is_refused_and_not_announced() -> None:
    house = House(template=PLAIN)
    house.pool.handle(API, Generate(4, "", Sampling(1), chat=json.dumps({"messages": [HI] * 999}).encode()))
    assert [job.key.rid for job in house.pool.jobs] == [1]  # longer than LONG_TEXT, so it waits for a thread
    job = house.pool.jobs.popleft()
    house.pool.finished(job.key, job.result())
    (end,) = house.said(API)
    assert (end.reason, "must be <= 2048" in end.message) == (Reason.INVALID, True)
    assert len(json.dumps([HI] * 999)) > LONG_TEXT


def test_a_template_error_ends_the_request() -> None:
    house = House()
    house.pool.handle(API, Generate(4, "", Sampling(1), chat=CHAT))
    house.pool.handle(API, Tokenize(5, "", chat=CHAT))
    end, tokenized = house.said(API)
    assert ends([end])[0].reason == Reason.TEMPLATE
    assert end.message == tokenized.error == "template not found"
    assert (tokenized.reason, tokenized.text) == (Reason.TEMPLATE, "")
    assert house.pool.idle


def test_a_chat_is_tokenized_with_offsets_into_its_text() -> None:
    house = House(template="{{ bos_token }}" + PLAIN)
    house.pool.handle(API, Tokenize(5, "", chat=CHAT))
    (tokenized,) = house.said(API)
    assert (tokenized.text, tokenized.error) == (WRITTEN, "")
    assert ints(tokenized.ids) == ids_of(WRITTEN)
    assert ints(tokenized.stops)[-1] == len(WRITTEN.encode())
    assert ints(tokenized.ids)[0] in byte_level().special
