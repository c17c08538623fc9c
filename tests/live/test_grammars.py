"""Grammars through a whole process tree: complete answers are valid, and other requests are not affected."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.live.server import Server, SharedServers, event_lines
from tests.models import model
from tests.schemas import SUITE, validate

pytestmark = pytest.mark.live

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
CONCURRENCY = 8
END = "<|eos|>"


@pytest.fixture
def server(shared_server: SharedServers) -> Server:
    return shared_server("--model-id", str(model("llama")), "--dtype", "float32", "--validation-workers", "1")


def grammar(schema: Any) -> dict[str, Any]:
    return {"grammar": {"type": "json", "value": schema}}


def chat(server: Server, response_format: dict[str, Any], **fields: Any) -> dict[str, Any]:
    body = {
        "messages": [{"role": "user", "content": "A person."}],
        "response_format": response_format,
        "max_tokens": 200,
    } | fields
    answer = server.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


def test_logprobs_have_the_bytes_of_parts_of_characters(server: Server) -> None:
    form = {"type": "regex", "value": "a\N{GRINNING FACE}b"}
    whole = chat(server, form, logprobs=True, top_logprobs=4, temperature=0)
    tokens = whole["choices"][0]["logprobs"]["content"]
    text = b"".join(bytes(token["bytes"]) for token in tokens if token["token"] != END)
    assert text.decode() == whole["choices"][0]["message"]["content"] == form["value"]
    for token in tokens:
        assert token["bytes"] in [top["bytes"] for top in token["top_logprobs"]]
        assert len({(top["token"], *top["bytes"]) for top in token["top_logprobs"]}) == len(token["top_logprobs"])
    prompt = "Emoji: \N{GRINNING FACE}\N{SMILING FACE WITH OPEN MOUTH} \N{GRINNING FACE}"
    body = {"prompt": prompt, "response_format": form, "logprobs": 4, "echo": True, "temperature": 0}
    (choice,) = server.client.post("/v1/completions", json=body).json()["choices"]
    columns = choice["logprobs"]
    assert choice["text"] == prompt + form["value"]
    echoed = len(columns["tokens"]) - len(tokens)
    assert any(name.startswith("bytes:\\xf0") for name in columns["tokens"][:echoed])
    assert any(name.startswith("bytes:\\xf0") for name in columns["tokens"][echoed:])
    assert {len(tops) for tops in columns["top_logprobs"][1:echoed]} == {4}
    assert [*map(len, columns["top_logprobs"][echoed:])] == [len(token["top_logprobs"]) for token in tokens]
    generated = zip(columns["tokens"][echoed:], columns["top_logprobs"][echoed:], strict=True)
    assert all(name in tops for name, tops in generated)


@pytest.mark.parametrize("part", range(4))
def test_schemas_of_the_json_schema_suite(server: Server, part: int) -> None:
    def outcome(case: list[Any]) -> str:
        body = {
            "inputs": case[1],
            "parameters": {"max_new_tokens": 60, "do_sample": True, "seed": part, "details": True},
        }
        body["parameters"] |= grammar(case[2])
        answer = server.client.post("/generate", json=body)
        if answer.status_code == 422:
            assert re.match("Input validation error: (cannot compile|grammar is not)", answer.json()["error"])
            return "rejected"
        assert answer.status_code == 200, (case, answer.text)
        if answer.json()["details"]["finish_reason"] == "eos_token":
            validate(answer.json()["generated_text"], case[2])
            return "valid"
        return "truncated"

    with ThreadPoolExecutor(CONCURRENCY) as pool:
        outcomes = list(pool.map(outcome, [case for case in SUITE if isinstance(case[2], dict)][part::8]))
    assert outcomes.count("valid") > 10
    assert outcomes.count("rejected") > 10


@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}},
        {"type": "json_schema", "value": {"name": "person", "schema": PERSON}},
        {"type": "json_object", "value": json.dumps(PERSON)},
    ],
)
def test_response_format_whole_and_streamed(server: Server, response_format: dict[str, Any]) -> None:
    (choice,) = chat(server, response_format, seed=5)["choices"]
    assert choice["finish_reason"] == "stop"
    validate(choice["message"]["content"], PERSON)
    body = {
        "messages": [{"role": "user", "content": "A person."}],
        "response_format": response_format,
        "max_tokens": 200,
    }
    with server.client.stream("POST", "/v1/chat/completions", json=body | {"stream": True, "seed": 5}) as answer:
        events = [json.loads(line[6:]) for line in event_lines(answer) if line.startswith("data: {")]
    assert (
        "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == choice["message"]["content"]
    )


def test_json_object_regex_and_text_formats(server: Server) -> None:
    for choice in chat(server, {"type": "json_object"}, n=4, seed=1, max_tokens=300)["choices"]:
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["message"]["content"]), dict)
    for choice in chat(server, {"type": "regex", "value": r"[0-9]{4}-[0-9]{2}(, [a-z]{1,5})?"}, n=4)["choices"]:
        assert re.fullmatch(r"[0-9]{4}-[0-9]{2}(, [a-z]{1,5})?", choice["message"]["content"])
    answer = server.generate("x", grammar={"type": "text"}, max_new_tokens=5, ignore_eos=True)
    assert answer["details"]["generated_tokens"] == 5


CHOICES = ["yes", "yes, but", "n(o|t)?", 'a\n"b"/\\', "é 🙂"]


@pytest.mark.parametrize("constraint", [{"guided_choice": CHOICES}, {"structured_outputs": {"choice": CHOICES}}])
def test_guided_choice_whole_and_streamed(server: Server, constraint: dict[str, Any]) -> None:
    """The text is one of the choices, on both routes."""
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/completions", {"prompt": "x"}),
    ):
        body |= constraint | {"max_tokens": 60, "seed": 7}
        texts = set()
        for choice in server.client.post(path, json=body | {"n": 8}).json()["choices"]:
            assert choice["finish_reason"] == "stop"
            texts.add(choice["text"] if "text" in choice else choice["message"]["content"])
        with server.client.stream("POST", path, json=body | {"stream": True}) as answer:
            events = [json.loads(line[6:]) for line in event_lines(answer) if line.startswith("data: {")]
        parts = [event["choices"][0] for event in events]
        texts.add("".join(part["text"] if "text" in part else part["delta"].get("content") or "" for part in parts))
        assert len(texts) > 1
        assert texts <= set(CHOICES)


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"guided_json": {"properties": {"a": {"type": "boolean"}}, "required": ["a"], "type": "object"}}, r"\{.*"),
        ({"guided_regex": "[0-9]{3}"}, "[0-9]{3}"),
        ({"regex": "[0-9]{3}"}, "[0-9]{3}"),
        ({"guided_grammar": 'root ::= item ("," item)? "."\nitem ::= "one" | "two"'}, r"(one|two)(,(one|two))?\."),
        ({"ebnf": 'start: ITEM ("," ITEM)? "."\nITEM: "one" | /tw[o]/'}, r"(one|two)(,(one|two))?\."),
    ],
)
def test_constraint_fields_of_other_servers(server: Server, constraint: dict[str, Any], pattern: str) -> None:
    for choice in chat(server, {"type": "text"}, n=4, seed=2, **constraint)["choices"]:
        assert choice["finish_reason"] == "stop"
        assert re.fullmatch(pattern, choice["message"]["content"])


def test_rejected_grammars_give_422_with_the_reason(server: Server) -> None:
    for schema, message in (
        ({"not": {"type": "null"}}, "cannot compile regex from schema: `not` cannot be enforced (at #)"),
        ({"minLength": "3"}, "grammar is not valid: `minLength` must be a whole number >= 0 (at #)"),
    ):
        answer = server.client.post("/generate", json={"inputs": "x", "parameters": grammar(schema)})
        assert answer.status_code == 422
        assert answer.json() == {"error": f"Input validation error: {message}", "error_type": "validation"}
    # Token counts are validated before the grammar.
    long = {"max_new_tokens": 1} | grammar({"not": {}})
    answer = server.client.post("/generate", json={"inputs": "x" * 30000, "parameters": long})
    assert "tokens" in answer.json()["error"]


def test_concurrent_hostile_grammars_do_not_change_seeded_answers(server: Server) -> None:
    """A plain and a constrained request draw the same tokens alone and next to grammars that are costly to compile."""

    def plain() -> list[int]:
        return [event["token"]["id"] for event in server.stream("A river", max_new_tokens=80, do_sample=True, seed=3)]

    def person() -> str:
        return str(server.generate("A person", max_new_tokens=200, do_sample=True, seed=4, **grammar(PERSON)))

    hostile: list[Any] = [
        {"enum": [f"value {n}" for n in range(10000)]},
        {"properties": {f"p{n}": {"type": "string"} for n in range(1000)}},
        {"allOf": [{"type": "string", "pattern": f".*{c}.*"} for c in "abcdefghijklmn"]},
        {"type": "string", "pattern": "^((a{1,100}){1,100}){1,100}$"},
    ]
    alone = plain(), person()
    with ThreadPoolExecutor(8) as pool:
        body = {"max_new_tokens": 20, "do_sample": True}
        others = [
            pool.submit(server.client.post, "/generate", json={"inputs": "x", "parameters": body | grammar(schema)})
            for schema in hostile
        ]
        together = pool.submit(plain), pool.submit(person)
        assert (together[0].result(), together[1].result()) == alone
        assert {other.result().status_code for other in others} <= {200, 422}


def test_constrained_stream_continues_after_worker_kill(server: Server) -> None:
    def token_ids(kill: bool) -> list[int]:
        events = server.stream(
            "Digits: ", max_new_tokens=70, do_sample=True, seed=9, grammar={"type": "regex", "value": r"(\d{3}-){20}"}
        )
        ids = []
        for event in events:
            ids.append(event["token"]["id"])
            if kill and len(ids) == 30:
                server.kill("worker-0")
        return ids

    undisturbed = token_ids(False)
    assert len(undisturbed) > 40
    assert token_ids(True) == undisturbed


def test_disabled_grammar_support_rejects_grammars(tmp_path: Path) -> None:
    with Server(tmp_path / "run", "--model-id", str(model("llama")), "--validation-workers", "1") as off:
        off.start("up", "--disable-grammar-support", "--worker", "scripted").wait_until_ready()
        answer = off.client.post("/generate", json={"inputs": "x", "parameters": grammar({})})
        assert (answer.status_code, answer.json()["error"]) == (422, "Input validation error: grammar is not supported")
