"""Forms of requests that clients of other servers send, and what reaches the tokenizer."""

import gzip
import json
from typing import Any

import pytest

from tests.api.conftest import Front
from tgi.microkernel.messages.codec import pack_column
from tgi.microkernel.messages.protocol import Generate

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "Hi"}


def sent(front: Front, path: str, body: Any, **headers: str) -> Generate:
    """The message that the tokenizer gets for a body, which is a JSON value or bytes."""
    received = front.tokenizers[0].received
    while not received.empty():
        received.get()
    reply = front.post(path, body if isinstance(body, bytes) else json.dumps(body), **headers)
    assert reply.status == 200, reply.body
    message = front.tokenizers[0].next(Generate)
    assert isinstance(message, Generate)
    return message


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_minus_one_counts_as_absent(front: Front, path: str) -> None:
    prompt = {"messages": [USER]} if path == CHAT else {"prompt": "Hi"}
    for name in ("max_tokens", "max_completion_tokens"):
        assert sent(front, path, prompt | {name: -1}).max_new_tokens is None
        assert front.post(path, json.dumps(prompt | {name: -2})).status == 422
    seeds = {sent(front, path, prompt | {"seed": -1}).sampling.seed for _ in range(3)}
    assert len(seeds) == 3


def test_top_p_0_is_greedy(front: Front) -> None:
    sampling = sent(front, CHAT, {"messages": [USER], "top_p": 0, "temperature": 0.7, "top_k": 5}).sampling
    assert not sampling.samples
    reply = front.post("/generate", '{"inputs":"x","parameters":{"top_p":0}}')
    assert json.loads(reply.body)["error"] == "Input validation error: `top_p` must be > 0.0 and < 1.0"


def test_whole_numbers_with_a_point_are_integers(front: Front) -> None:
    body = (
        b'{"prompt":"4.0 \\" 5.0","max_tokens":4.0,"n":1.00,"top_k":-1.0,"temperature":1.0,"seed":7.0,"stop":["1.0"]}'
    )
    message = sent(front, COMPLETION, body)
    assert (message.inputs, message.max_new_tokens, message.sampling.seed) == ('4.0 " 5.0', 4, 7)
    assert message.stop_strings == ["1.0"]
    assert sent(front, "/generate", b'{"inputs":"x","parameters":{"max_new_tokens":20.0}}').max_new_tokens == 20
    assert sent(front, COMPLETION, b'{"prompt":[1.0,2]}').input_ids == pack_column("i", [1, 2])
    reply = front.post(COMPLETION, '{"prompt":"x","seed":7.0,"max_tokens":4.5}')
    text = "max_tokens: invalid type: floating point `4.5`, expected u32 at line 1 column 41"
    assert json.loads(reply.body)["error"]["message"].endswith(text)


def test_content_parts_of_other_routes_are_text(front: Front) -> None:
    parts = [
        {"type": "input_text", "text": "a"},
        {"type": "output_text", "text": "b", "annotations": []},
        {"type": "refusal", "refusal": "c"},
        {"type": "text", "text": "d"},
    ]
    chat = json.loads(sent(front, CHAT, {"messages": [{"role": "user", "content": parts}]}).chat)
    assert chat["messages"][0]["content"] == [{"type": "text", "text": text} for text in "abcd"]


def test_twenty_alternatives_are_listed(front: Front) -> None:
    assert sent(front, CHAT, {"messages": [USER], "logprobs": True, "top_logprobs": 20}).sampling.top_n == 20
    assert sent(front, COMPLETION, {"prompt": "x", "logprobs": 20}).sampling.top_n == 20
    assert front.post("/generate", '{"inputs":"x","parameters":{"top_n_tokens":6}}').status == 422


def test_a_byte_order_mark_is_ignored(front: Front) -> None:
    assert sent(front, COMPLETION, b'\xef\xbb\xbf{"prompt":"x"}').inputs == "x"


def test_compressed_bodies(front: Front) -> None:
    body = b'{"prompt":"x"}'
    for encoding in ("gzip", "x-gzip", "GZIP"):
        assert sent(front, COMPLETION, gzip.compress(body), content_encoding=encoding).inputs == "x"
    assert sent(front, COMPLETION, body, content_encoding="identity").inputs == "x"
    limit = front.settings.payload_limit
    long = [b'{"prompt":"' + b"x" * length + b'"}' for length in (limit - 13, limit, 50 * limit)]
    statuses = [front.post(COMPLETION, gzip.compress(one), content_encoding="gzip").status for one in long]
    assert statuses == [200, 413, 413]
    for damaged in (body, gzip.compress(body)[:-1], gzip.compress(body) + b"more", b""):
        assert front.post(COMPLETION, damaged, content_encoding="gzip").status == 400
    reply = front.post(COMPLETION, body, content_encoding="br")
    assert (reply.status, reply.headers["accept-encoding"]) == (415, "gzip")


def test_repeat_penalty_is_repetition_penalty(front: Front) -> None:
    for path, prompt in ((CHAT, {"messages": [USER]}), (COMPLETION, {"prompt": "x"})):
        assert sent(front, path, prompt | {"repeat_penalty": 1.5}).sampling.repetition_penalty == 1.5
        both = prompt | {"repeat_penalty": 1.5, "repetition_penalty": 1.25}
        assert sent(front, path, both).sampling.repetition_penalty == 1.25
        assert front.post(path, json.dumps(prompt | {"repeat_penalty": 0})).status == 422


OFF, ON = {"reasoning_effort": "none"}, {"thinking": True}


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        ({"enable_thinking": False}, OFF),
        ({"enable_thinking": True}, ON),
        ({"think": False}, OFF),
        ({"think": "low"}, {"reasoning_effort": "low"}),
        ({"thinking": {"type": "disabled"}}, OFF),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, ON),
        ({"thinking": {"type": "adaptive"}}, {}),
        ({"thinking": True}, ON),
        ({"reasoning": {"effort": "high", "summary": "auto"}}, {"reasoning_effort": "high"}),
        ({"reasoning": {"enabled": False}}, OFF),
        ({"reasoning": {}}, {}),
        (
            {"reasoning_effort": "low", "reasoning": {"effort": "high"}, "enable_thinking": False},
            {"reasoning_effort": "low"},
        ),
    ],
)
def test_other_names_for_reasoning(front: Front, fields: dict[str, Any], asked: dict[str, Any]) -> None:
    chat = json.loads(sent(front, CHAT, {"messages": [USER], **fields}).chat)
    assert {name: chat[name] for name in ("reasoning_effort", "thinking") if name in chat} == asked


# Ordinary chats and completions as some programs send them.
SDK = {
    "x_stainless_lang": "js",
    "x_stainless_os": "Linux",
    "x_stainless_retry_count": "0",
    "accept": "application/json",
}
TEXT = [{"type": "text", "text": "Hi"}]
USAGE = {"include_usage": True}
TOOLS = [
    {"type": "function", "function": {"name": "read", "description": "R", "strict": None, "parameters": {
        "$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "properties": {"p": {"type": "string"}},
        "required": ["p"], "additionalProperties": False}}},
]  # fmt: skip
CALL = {
    "role": "assistant",
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "read", "arguments": '{"p":"a"}'}}],
}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "b"}
STOPS = [
    "<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>", "<|endoftext|>", "</fim_middle>", "</code>", "/src/",
    "#- coding: utf-8", "```", "\nfunction", "\nclass", "\nmodule", "\nexport", "\nimport", "\ninterface", "\ntype",
]  # fmt: skip
FORMS: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "Open WebUI, chat": (
        CHAT,
        {"stream": True, "model": "m", "messages": [{"role": "system", "content": "S"}, USER], "stream_options": USAGE,
         "temperature": 0.8, "top_p": 0.9, "max_tokens": 128, "frequency_penalty": 0.0, "seed": 0, "stop": ["a"],
         "logit_bias": {"5": -100}, "user": {"name": "n", "id": "1", "email": "e", "role": "admin"}},
        {"http_referer": "a", "x_title": "Open WebUI"},
    ),
    "Open WebUI, title": (
        CHAT,
        {"model": "m", "messages": [USER], "stream": False, "max_completion_tokens": 1000,
         "metadata": {"task": "title_generation", "task_body": {"model": "m"}, "chat_id": None}},
        {},
    ),
    "LibreChat": (
        CHAT,
        {"model": "m", "temperature": 1, "top_p": 1, "presence_penalty": 0, "frequency_penalty": 0, "max_tokens": 512,
         "stop": ["a"], "verbosity": "low", "stream": True, "stream_options": USAGE,
         "messages": [{"role": "user", "content": TEXT}, {"role": "assistant", "content": TEXT}, USER]},
        SDK | {"user_agent": "LibreChat"},
    ),
    "LibreChat, agent": (
        CHAT,
        {"model": "m", "user": "68a", "reasoning": {"effort": "low", "summary": "auto"}, "stream": True,
         "stream_options": USAGE, "tools": TOOLS,
         "messages": [USER, CALL | {"content": ""}, RESULT | {"name": "read"}]},
        SDK,
    ),
    "LibreChat, title": (
        CHAT,
        {"model": "m", "n": 1, "stream": False, "tools": TOOLS, "messages": [USER],
         "tool_choice": {"type": "function", "function": {"name": "read"}}},
        SDK,
    ),
    "Continue, chat": (
        CHAT,
        {"messages": [USER, {"role": "assistant", "content": " "}, USER], "model": "m", "max_tokens": 2048,
         "stream": True, "temperature": 0.5},
        {"api_key": "k"},
    ),
    "Continue, completion": (
        COMPLETION,
        {"prompt": "<fim_prefix>a<fim_suffix>b<fim_middle>", "model": "m", "max_tokens": 256, "temperature": 0.01,
         "stream": True, "stop": STOPS},
        {"api_key": "k"},
    ),
    "Cline": (
        CHAT,
        {"model": "m", "messages": [{"role": "system", "content": "S"}, {"role": "user", "content": [*TEXT, *TEXT]},
                                    CALL | {"content": None}, RESULT],
         "temperature": 0, "stream": True, "stream_options": USAGE, "tools": TOOLS},
        SDK | {"http_referer": "a", "x_title": "Cline"},
    ),
    "Cline, newer": (
        CHAT,
        {"model": "m", "max_tokens": 8192, "reasoning_effort": "medium", "stream": True, "stream_options": USAGE,
         "messages": [{"role": "system", "content": "S"}, USER | {"cache_control": {"type": "ephemeral"}},
                      CALL | {"content": "", "reasoning_content": "R"}, RESULT],
         "tools": TOOLS, "tool_choice": "auto", "cache_control": {"type": "ephemeral"}},
        {"user_agent": "ai-sdk/openai-compatible"},
    ),
    "n8n": (
        CHAT,
        {"model": "m", "temperature": 0.7, "top_p": 1, "frequency_penalty": 0, "presence_penalty": 0, "max_tokens": -1,
         "n": 1, "stream": False, "response_format": {"type": "text"}, "messages": [USER]},
        SDK,
    ),
}  # fmt: skip


@pytest.mark.parametrize("program", FORMS)
def test_requests_of_programs(front: Front, program: str) -> None:
    path, body, headers = FORMS[program]
    message = sent(front, path, body, **headers)
    limit = body.get("max_tokens", body.get("max_completion_tokens"))
    assert message.max_new_tokens == (None if limit == -1 else limit)
    assert message.stop_strings == body.get("stop", [])
    assert message.sampling.samples == (body.get("temperature") != 0)
