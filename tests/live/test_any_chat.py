"""Unusual chats through the real templates and tokenizer: an answer, or a 422 with the reason, and no process ends."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from tests.api.bodies import WORDS, nearly, right
from tests.live.server import Server
from tgi.api.shapes.chat import ChatRequest

pytestmark = pytest.mark.live

SHORT = ("--worker", "scripted", "--max-total-tokens", "256", "--validation-workers", "1")
ERROR_TYPES = {"validation", "template_error", "tool_error"}
HELLO = {"role": "user", "content": "Hello"}
DEEP: Any = json.loads("[" * 500 + "]" * 500)
SCHEMAS: list[Any] = [
    None, True, 0, "", [], {}, DEEP, {"$ref": "#"}, {"type": "object", "properties": {"": {"$ref": "#"}}},
    {"enum": ["x" * 10_000]}, {word.encode(errors="replace").decode(): {} for word in WORDS}, {"pattern": "(a+)+$" * 9},
]  # fmt: skip
MESSAGES: list[list[Any]] = [
    [], [HELLO] * 1000, [{"role": "", "content": ""}], [{"role": "\x00", "content": "\x1b[0m\u202e"}],
    [{"role": "user", "content": []}], [{"role": "system", "content": "a"}] * 3,
    [{"role": "assistant", "content": "a"}], [{"role": "assistant", "tool_calls": []}],
    [{"role": "user", "content": "{{ 7 * 7 }}{% raise %}<|im_start|></s>"}],
    [{"role": "user", "content": [{"type": "text", "text": ""}] * 500}],
    [{"role": "user", "content": None, "tool_calls": [
        {"id": "", "type": "", "function": {"name": "", "arguments": '{"a":' * 500}}]}],
    [{"role": "tool", "tool_call_id": "x" * 10_000, "content": "😀" * 10_000}],
    [{"role": "user", "content": "a", "__class__": {}, "items": 1, "name": "{{ self }}"}],
]  # fmt: skip
VARIABLES: list[dict[str, Any]] = [
    {"messages": 1}, {"tools": 1}, {"documents": 1}, {"bos_token": []}, {"raise_exception": 1, "range": 2},
    {"add_generation_prompt": {}, "template": "{{ 1 }}", "self": 1, "": 2, "a b": 3, "__class__": 4}, {"loop": DEEP},
]  # fmt: skip


@pytest.fixture(scope="module")
def server(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("chats") / "run", "--model-id", str(tiny_llama), *SHORT) as server:
        before = server.start().wait_until_ready().processes()
        yield server
        assert server.processes() == before, "a process was replaced"
        assert server.generate("Hello", max_new_tokens=3)["details"]["generated_tokens"] == 3


def ask(server: Server, chat: dict[str, Any]) -> None:
    """Tokenizes, answers and streams a chat: 200, or 422 with a known error type and a reason."""
    body = json.dumps(chat | {"max_tokens": 2})
    for path, more in (
        ("/chat_tokenize", ""),
        ("/v1/chat/completions", ""),
        ("/v1/chat/completions", ',"stream":true'),
    ):
        answer = server.client.post(path, content=body[:-1] + more + "}", headers={"content-type": "application/json"})
        assert answer.status_code in (200, 422), answer.text
        if answer.status_code == 422 and answer.headers["content-type"] == "application/json":
            error = answer.json()
            assert error["error_type"] in ERROR_TYPES
            text = error["error"]["message"] if path.startswith("/v1/") else error["error"]
            assert len(text) > len("Template error: ")
            assert "object at 0x" not in text


@pytest.mark.parametrize("index", range(len(MESSAGES)))
def test_unusual_messages(server: Server, index: int) -> None:
    ask(server, {"messages": MESSAGES[index]})
    ask(server, {"messages": MESSAGES[index], "continue_final_message": True})


@pytest.mark.parametrize("index", range(len(SCHEMAS)))
def test_unusual_tool_schemas(server: Server, index: int) -> None:
    names = [f"f{number}" for number in range(20)]
    tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMAS[index]}} for name in names]
    ask(server, {"messages": [HELLO], "tools": tools, "tool_prompt": "{{ tools }}"})


@pytest.mark.parametrize("index", range(len(VARIABLES)))
def test_unusual_template_variables(server: Server, index: int) -> None:
    ask(server, {"messages": [HELLO], "chat_template_kwargs": VARIABLES[index]})


@pytest.mark.parametrize("make", [right, nearly])
def test_generated_chat_requests(server: Server, make: Any) -> None:
    @settings(max_examples=30, suppress_health_check=[*HealthCheck])
    @given(make(ChatRequest))
    def asked(chat: dict[str, Any]) -> None:
        for path in ("/chat_tokenize", "/v1/chat/completions"):
            answer = server.client.post(path, content=json.dumps(chat), headers={"content-type": "application/json"})
            assert answer.status_code in (200, 400, 422, 429), answer.text
            if answer.headers["content-type"] == "application/json" and answer.status_code == 422:
                assert answer.json()["error_type"] in ERROR_TYPES

    asked()
