"""Strange chats through the real templates and tokenizer: an answer or a 422 that says what is wrong, and nobody else
notices."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from tests.api.bodies import WORDS, nearly, right
from tests.live.server import Server
from tgi.api.shapes.chat import ChatRequest

SHORT = ("--worker", "scripted", "--max-total-tokens", "256", "--validation-workers", "1")
KINDS = {"validation", "template_error", "tool_error"}
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
    with Server(tmp_path_factory.mktemp("chats") / "run", "--model-id", str(tiny_llama), *SHORT) as made:
        before = made.start().ready().processes()
        yield made
        assert made.processes() == before, "a process had to be replaced"
        assert made.generate("Hello", max_new_tokens=3)["details"]["generated_tokens"] == 3


def ask(server: Server, chat: dict[str, Any]) -> None:
    """Sends a chat to be tokenized, answered and streamed: 200, or 422 with a known kind of error and a reason."""
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
            assert error["error_type"] in KINDS
            text = error["error"]["message"] if path.startswith("/v1/") else error["error"]
            assert len(text) > len("Template error: ")
            assert "object at 0x" not in text


@pytest.mark.parametrize("place", range(len(MESSAGES)))
def test_messages(server: Server, place: int) -> None:
    ask(server, {"messages": MESSAGES[place]})
    ask(server, {"messages": MESSAGES[place], "continue_final_message": True})


@pytest.mark.parametrize("place", range(len(SCHEMAS)))
def test_schemas_of_tools(server: Server, place: int) -> None:
    names = [f"f{number}" for number in range(20)]
    tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMAS[place]}} for name in names]
    ask(server, {"messages": [HELLO], "tools": tools, "tool_prompt": "{{ tools }}"})


@pytest.mark.parametrize("place", range(len(VARIABLES)))
def test_variables_of_templates(server: Server, place: int) -> None:
    ask(server, {"messages": [HELLO], "chat_template_kwargs": VARIABLES[place]})


@pytest.mark.parametrize("make", [right, nearly])
def test_what_the_type_suggests(server: Server, make: Any) -> None:
    @settings(max_examples=60, suppress_health_check=[*HealthCheck])
    @given(make(ChatRequest))
    def asked(chat: dict[str, Any]) -> None:
        for path in ("/chat_tokenize", "/v1/chat/completions"):
            answer = server.client.post(path, content=json.dumps(chat), headers={"content-type": "application/json"})
            assert answer.status_code in (200, 400, 422, 429), answer.text
            if answer.headers["content-type"] == "application/json" and answer.status_code == 422:
                assert answer.json()["error_type"] in KINDS

    asked()
