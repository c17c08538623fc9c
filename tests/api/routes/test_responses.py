"""POST /v1/responses: what reaches the model, and what is kept, by whom, for how long."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.conftest import Front, Reply, Stream, openai_error, request, texts
from tests.golden.scripts import SCRIPTS
from tgi.api import response_store, sqlite_store
from tgi.api.response_store import HistoryTooLong, ResponseStore, StoredResponse
from tgi.microkernel.messages.protocol import Cancel, End, FinishReason, Generate, Prompted
from tgi.microkernel.settings.table import Settings

PATH = "/v1/responses"
MINE = {"authorization": "Bearer mine"}


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """A front end with two keys."""
    settings = Settings(validation_workers=1, hostname="127.0.0.1", api_key=("mine", "other"), payload_limit=4000)
    front = Front(settings, tmp_path_factory.mktemp("responses"), SCRIPTS["nothing"]())
    front.start()
    front.tokenizers[0].start()
    front.until_ready()
    yield front
    front.stop()


@pytest.fixture(autouse=True)
def _answers(front: Front) -> None:
    answer_with(front, '" a", end of sequence')


def answer_with(front: Front, script: str) -> None:
    tokenizer = front.tokenizers[0]
    tokenizer.answer = SCRIPTS[script]()
    while not tokenizer.received.empty():
        tokenizer.received.get()


def post(front: Front, path: str = PATH, key: str = "mine", **body: Any) -> dict[str, Any]:
    reply = front.post(path, json.dumps(body), authorization=f"Bearer {key}")
    assert reply.status == 200, reply.body
    found: dict[str, Any] = json.loads(reply.body)
    return found


def get(front: Front, path: str, method: str = "GET", key: str = "mine") -> Reply:
    return front.get(path, method, authorization=f"Bearer {key}")


def sent_chat(front: Front) -> dict[str, Any]:
    """The chat that the tokenizer got last."""
    chat: dict[str, Any] = json.loads(front.tokenizers[0].next(Generate).chat)
    return chat


MESSAGES = {"model": "m", "max_tokens": 5}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
READERS = [
    (PATH, {"input": "x", "instructions": "y"}, [{"role": "system", "content": "y"}, {"role": "user", "content": "x"}]),
    (
        PATH,
        {
            "input": [
                {"role": "developer", "content": [{"type": "input_text", "text": "d"}]},
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm"}]},
                {
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "I"}, {"type": "refusal", "refusal": "!"}],
                },
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'},
                {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "1"}]},
            ]
        },
        [
            {"role": "developer", "content": "d"},
            {"role": "assistant", "content": "I!", "tool_calls": [CALL], "reasoning_content": "Hm"},
            {"role": "tool", "content": "1", "tool_call_id": "c"},
        ],
    ),
    (
        PATH,
        {"input": [{"type": "reasoning", "encrypted_content": "SG0="}, {"role": "assistant", "content": "a"}]},
        [{"role": "assistant", "content": "a", "reasoning_content": "Hm"}],
    ),
    (
        "/v1/messages",
        MESSAGES
        | {
            "system": [{"type": "text", "text": "x-anthropic-billing-header: 1"}, {"type": "text", "text": "s"}],
            "messages": [
                {"role": "user", "content": "x"},
                {"role": "user", "content": [{"type": "text", "text": "y"}]},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "Hm", "signature": "0"},
                    {"type": "redacted_thinking", "data": "0"},
                    {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}},
                ]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "1"}]},
                    {"type": "text", "text": "z"},
                ]},
            ],
        },
        [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "x\ny"},
            {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": {"a": 1}}}],
             "reasoning_content": "Hm"},
            {"role": "tool", "content": "1", "tool_call_id": "c"},
            {"role": "user", "content": "z"},
        ],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "messages"), READERS)
def test_what_reaches_the_chat_template(front: Front, path: str, body: Any, messages: list[Any]) -> None:
    post(front, path, **body)
    assert sent_chat(front)["messages"] == messages


LATER = {"name": "later", "description": "d", "input_schema": {"type": "object"}, "defer_loading": True}
NOW = {"name": "now"}


def loading(tool: Any, kind: str = "tool_addition") -> Any:
    return {"role": "system", "content": [{"type": kind, "tool": tool}]}


def found(*names: str) -> Any:
    """The result of a search for tools."""
    references = [{"type": "tool_reference", "tool_name": name} for name in names]
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": references}]}


SHOWN = '<function>{"description":"d","name":"later","parameters":{"type":"object"}}</function>'
LOADED = [{"name": "now"}, {"name": "later", "in_messages": True}]
OTHER = {"type": "tool_definition", "definition": {"name": "other"}}
HELLO = {"role": "user", "content": "x"}
CHANGES = [
    ([HELLO], [NOW], None),
    ([found("later")], LOADED, SHOWN),
    ([found("later"), loading({"type": "tool_reference", "name": "later"})], LOADED, SHOWN),
    ([HELLO, loading(OTHER)], [NOW, {"name": "other", "in_messages": True}],
     '<function>{"description":"","name":"other","parameters":{}}</function>'),
    ([HELLO, loading({"type": "tool_reference", "name": "now"}, "tool_removal")], [],
     "The tool now is no longer available."),
]  # fmt: skip


@pytest.mark.parametrize(("messages", "offered", "shown"), CHANGES)
def test_messages_load_tools_and_withdraw_them(
    front: Front, messages: list[Any], offered: list[Any], shown: str | None
) -> None:
    """A tool with `defer_loading` is offered once a message has loaded it, and is shown there."""
    post(front, "/v1/messages", **MESSAGES, messages=messages, tools=[NOW, LATER])
    chat = sent_chat(front)
    tools = [
        {"name": tool["function"]["name"]} | {key: tool[key] for key in tool if key == "in_messages"}
        for tool in chat.get("tools", [])
    ]
    assert tools == offered
    assert chat["messages"][-1]["content"] == (shown or "x")


def test_a_message_cannot_load_an_unknown_tool(front: Front) -> None:
    body = MESSAGES | {"messages": [found("none")], "tools": [LATER]}
    reply = front.post("/v1/messages", json.dumps(body), authorization="Bearer mine")
    assert reply.status == 400
    assert "a message loads the tool `none`, which `tools` does not list" in reply.body.decode()


def test_functions_of_a_namespace(front: Front) -> None:
    """The model knows them as `namespace.name`; the protocol has both apart."""
    answer_with(front, "a call of n.f")
    group = {"type": "namespace", "name": "n", "description": "d", "tools": [{"type": "function", "name": "f"}]}
    history = {"type": "function_call", "call_id": "c", "namespace": "n", "name": "f", "arguments": "{}"}
    response = post(front, input=[history], tools=[{"type": "function", "name": "f"}, group])
    chat = sent_chat(front)
    assert [tool["function"]["name"] for tool in chat["tools"]] == ["f", "n.f"]
    assert chat["messages"][0]["tool_calls"][0]["function"]["name"] == "n.f"
    call = response["output"][0]
    assert (call["namespace"], call["name"], call["arguments"]) == ("n", "f", '{"a": "é"}')
    assert response["tools"][1]["tools"][0]["name"] == "f"


REASONING = [
    (PATH, {"input": "x"}, {}),
    (PATH, {"input": "x", "reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
    ("/v1/messages", {}, {"reasoning_effort": "none"}),
    ("/v1/messages", {"thinking": {"type": "disabled"}, "output_config": {"effort": ""}}, {"reasoning_effort": "none"}),
    ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 4}}, {"thinking": True}),
    ("/v1/messages", {"thinking": {"type": "adaptive"}}, {}),
    ("/v1/messages", {"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "told"), REASONING)
def test_reasoning_that_is_asked_for(front: Front, path: str, body: Any, told: dict[str, Any]) -> None:
    given = {} if path == PATH else MESSAGES | {"messages": [{"role": "user", "content": "x"}]}
    post(front, path, **given | body)
    chat = sent_chat(front)
    assert {name: chat[name] for name in ("reasoning_effort", "thinking") if name in chat} == told


def test_truncation(front: Front) -> None:
    for body, truncate in (
        ({}, None),
        ({"truncation": "auto"}, 1536),
        ({"truncation": "auto", "max_output_tokens": 48}, 2000),
    ):
        post(front, input="x", **body)
        assert front.tokenizers[0].next(Generate).truncate == truncate


def test_a_response_is_its_clients_own(front: Front) -> None:
    response = post(front, input="x")
    path = f"{PATH}/{response['id']}"
    assert json.loads(get(front, path).body) == response
    [item] = json.loads(get(front, f"{path}/input_items").body)["data"]
    assert (item["role"], item["content"]) == ("user", [{"type": "input_text", "text": "x"}])
    for reply in (
        get(front, path, key="other"),
        get(front, path, "DELETE", "other"),
        get(front, f"{path}/input_items", key="other"),
    ):
        assert reply.status == 404
    assert front.get(path).status == 401
    body = json.dumps({"input": "y", "previous_response_id": response["id"]})
    assert front.post(PATH, body, authorization="Bearer other").status == 404
    assert json.loads(get(front, path, "DELETE").body) == {
        "id": response["id"],
        "object": "response.deleted",
        "deleted": True,
    }
    assert get(front, path).status == get(front, path, "DELETE").status == 404
    unkept = post(front, input="x", store=False)
    assert get(front, f"{PATH}/{unkept['id']}").status == 404


def test_responses_go_on_from_others(front: Front) -> None:
    first = post(front, input="one", instructions="not kept")
    stream = Stream(
        front,
        PATH,
        json.dumps({"input": "two", "previous_response_id": first["id"], "stream": True}),
        **MINE,
    )
    events = stream.read_rest().body.decode()
    second = json.loads(events.rpartition("data: ")[2])["response"]
    front.tokenizers[0].next(Generate)
    front.tokenizers[0].next(Generate)
    post(front, input="three", previous_response_id=second["id"])
    said = [(message["role"], message["content"]) for message in sent_chat(front)["messages"]]
    assert said == [
        ("user", "one"), ("assistant", " a"),
        ("user", "two"), ("assistant", " a"),
        ("user", "three"),
    ]  # fmt: skip
    long = post(front, input="x" * 3000)
    longer = post(front, input="y" * 3000, previous_response_id=long["id"])
    reply = front.post(PATH, json.dumps({"input": "z", "previous_response_id": longer["id"]}), **MINE)
    assert reply.status == 422
    assert b"longer than a request may be: 4000 bytes" in reply.body


def test_conversations(front: Front) -> None:
    made = post(front, "/v1/conversations", items=[{"role": "user", "content": "one"}], metadata={"a": "b"})
    path = f"/v1/conversations/{made['id']}"
    for text in ("two", "three"):
        assert post(front, input=text, conversation=made["id"])["conversation"] == {"id": made["id"]}
    front.tokenizers[0].next(Generate)
    roles = [message["role"] for message in sent_chat(front)["messages"]]
    assert roles == ["user", "user", "assistant", "user"]
    assert json.loads(get(front, path).body) == made
    assert get(front, path, key="other").status == 404
    assert post(front, path, metadata={"c": "d"}) == made | {"metadata": {"c": "d"}}
    assert json.loads(get(front, path).body)["metadata"] == {"c": "d"}


def test_the_items_of_a_conversation(front: Front) -> None:
    path = f"/v1/conversations/{post(front, '/v1/conversations')['id']}"

    def listed(query: str = "") -> list[str]:
        page = json.loads(get(front, f"{path}/items?order=asc{query}").body)
        return [part["text"] for item in page["data"] for part in item["content"]]

    added = post(front, f"{path}/items", items=[{"role": "user", "content": text} for text in ("one", "two")])
    first, second = added["data"]
    assert (added["first_id"], added["last_id"], added["has_more"]) == (first["id"], second["id"], False)
    response = post(front, input="three", conversation=path.rpartition("/")[2])
    assert listed() == ["one", "two", "three", " a"]
    assert listed(f"&limit=1&after={first['id']}") == ["two"]
    assert get(front, f"{path}/items?after=msg_x").status == 422
    item = f"{path}/items/{second['id']}"
    assert json.loads(get(front, item).body) == second
    for method in ("GET", "DELETE"):
        assert get(front, item, method, key="other").status == 404
    assert json.loads(get(front, item, "DELETE").body)["object"] == "conversation"
    assert get(front, item).status == 404
    assert get(front, f"{PATH}/{response['id']}", "DELETE").status == 200  # its items stay
    assert listed() == ["one", "three", " a"]
    assert front.post(f"{path}/items", json.dumps({"items": [{"content": "x"}] * 21}), **MINE).status == 422
    post(front, f"{path}/items", items=[{"role": "user", "content": "x" * 3000}])
    post(front, f"{path}/items", items=[{"role": "user", "content": "x" * 1000}])
    reply = get(front, f"{path}/items")
    assert reply.status == 422
    assert b"longer than a request may be: 4000 bytes" in reply.body


def test_a_conversation_that_is_forgotten(front: Front) -> None:
    made = post(front, "/v1/conversations", items=[{"role": "user", "content": "one"}])
    path = f"/v1/conversations/{made['id']}"
    assert get(front, path, "DELETE").status == 200
    for gone in (path, f"{path}/items"):
        assert get(front, gone).status == 404
    assert front.post(f"{path}/items", json.dumps({"items": []}), **MINE).status == 404
    body = json.dumps({"input": "x", "conversation": {"id": made["id"]}})
    assert front.post(PATH, body, **MINE).status == 404


def numbers(reply: Reply) -> list[int]:
    return [
        json.loads(line[6:])["sequence_number"]
        for line in reply.body.decode().splitlines()
        if line.startswith("data: ")
    ]


def test_background(front: Front) -> None:
    answer_with(front, "silence")
    response = post(front, input="x", background=True)
    assert response["status"] == "queued"
    path, message = f"{PATH}/{response['id']}", front.tokenizers[0].next(Generate)
    body = json.dumps({"input": "y", "previous_response_id": response["id"]})
    assert front.post(PATH, body, **MINE).status == 422  # not complete
    assert get(front, f"{path}?stream=true").status == 422  # made without a stream
    front.tokenizers[0].send(*(SCRIPTS['" a", end of sequence']()(message) or ()))
    while (found := json.loads(get(front, path).body))["status"] != "completed":
        assert found["status"] in ("queued", "in_progress")
    assert found["output"][0]["content"][0]["text"] == " a"


def test_the_stream_of_a_background_response_can_be_read_again(front: Front) -> None:
    answer_with(front, "silence")
    body = json.dumps({"input": "x", "background": True, "stream": True})
    stream = Stream(front, PATH, body, **MINE)
    message = front.tokenizers[0].next(Generate)
    front.tokenizers[0].send(Prompted(message.rid, 3, 12), texts(message.rid, (5, " a", -0.5, False)))
    stream.read_until(b'"delta":" a"')
    response_id = json.loads(stream.raw.split(b"data: ")[1].split(b"\n")[0])["response"]["id"]
    stream.disconnect()
    path = f"{PATH}/{response_id}"
    again = Stream.__new__(Stream)
    again.connection, again.raw = front.connect(), b""
    again.connection.sendall(request("GET", f"{path}?stream=true&starting_after=2", b"", MINE))
    again.read_until(b'"delta":" a"')
    front.tokenizers[0].send(
        texts(message.rid, (2, "</s>", -0.5, True)), End(message.rid, FinishReason.EOS, "", " a", 3, 2)
    )
    rest = again.read_rest()
    assert b"event: response.completed" in rest.body
    whole = get(front, f"{path}?stream=true")
    assert numbers(whole) == list(range(len(numbers(whole))))
    assert numbers(rest) == numbers(whole)[3:]
    assert whole.body.endswith(rest.body)
    assert get(front, f"{path}?stream=true&starting_after=x").status == 422


@pytest.mark.parametrize("method", ["cancel", "delete"])
def test_a_background_response_ends_at_its_clients_wish(front: Front, method: str) -> None:
    answer_with(front, "silence")
    response = post(front, input="x", background=True)
    path = f"{PATH}/{response['id']}"
    front.tokenizers[0].next(Generate)
    if method == "cancel":
        assert post(front, f"{path}/cancel")["status"] == "cancelled"
        assert json.loads(get(front, path).body)["status"] == "cancelled"
    else:
        assert get(front, path, "DELETE").status == 200
    front.tokenizers[0].next(Cancel)
    answer_with(front, '" a", end of sequence')
    done = post(front, input="x")
    reply = front.post(f"{PATH}/{done['id']}/cancel", "", **MINE)
    assert json.loads(reply.body) == openai_error(
        422, "validation", "Input validation error: only a response that was created with `background` can be cancelled"
    )


def test_a_background_response_that_fails(front: Front) -> None:
    answer_with(front, "failure before the first token")
    path = f"{PATH}/{post(front, input='x', background=True)['id']}"
    while (found := json.loads(get(front, path).body))["status"] != "failed":
        assert found["status"] in ("queued", "in_progress")
    assert found["error"]["message"] == "Request failed during generation: Server error: out of memory"


# --- the store --------------------------------------------------------------------------------------------------------

RECORD = StoredResponse("resp_1", "me", None, "queued", "{}", '[{"a":1}]', "[]", True, True, time.time())


def run(work: Callable[[ResponseStore, ResponseStore], Any], path: Path, ttl: float = 60) -> None:
    """Runs it with the stores of two front ends of one host."""

    async def inside() -> None:
        stores = ResponseStore(path, ttl), ResponseStore(path, ttl)
        try:
            await work(*stores)
        finally:
            for store in stores:
                store.close()

    asyncio.run(inside())


def test_front_ends_share_a_file(tmp_path: Path) -> None:
    async def work(one: ResponseStore, two: ResponseStore) -> None:
        await one.put(RECORD)
        assert (tmp_path / "s").stat().st_mode & 0o077 == 0
        assert await two.get("other", "resp_1") is None
        assert await one.beat("resp_1")
        found = await two.get("me", "resp_1")
        assert found is not None
        assert found.status == "in_progress"
        await one.append_events("resp_1", 0, "a\n\nb\n\n")
        await one.append_events("resp_1", 2, "c\n\n")
        assert await two.events("resp_1", 1) == [(0, "a\n\nb\n\n"), (2, "c\n\n")]
        assert await two.events("resp_1", 2) == [(2, "c\n\n")]
        assert await two.finish(RECORD._replace(status="cancelled"))
        assert not await one.beat("resp_1")
        assert not await one.finish(RECORD._replace(status="completed"))
        assert await two.delete("me", "resp_1")
        await one.append_events("resp_1", 3, "d\n\n")
        assert await one.events("resp_1", 0) == []

    run(work, tmp_path / "s")


def test_a_response_whose_front_end_has_ended_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not RECORD._replace(beat=time.time()).lost
    assert RECORD._replace(beat=time.time() - 60).lost
    assert not RECORD._replace(beat=0, status="completed").lost


def test_the_history_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_store, "MAX_TURNS", 3)

    async def work(store: ResponseStore, _: ResponseStore) -> None:
        for number in range(4):
            previous = f"resp_{number - 1}" if number else None
            await store.put(RECORD._replace(id=f"resp_{number}", previous=previous, input=f"[{number}]"))
        assert await store.history("me", "resp_2", 1000) == [0, 1, 2]
        for name, limit in (("resp_3", 1000), ("resp_2", 8)):
            with pytest.raises(HistoryTooLong):
                await store.history("me", name, limit)
        await store.delete("me", "resp_0")
        assert await store.history("me", "resp_2", 1000) is None

    run(work, tmp_path / "s")


def test_what_is_kept_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_store, "MAX_STORED_BYTES", 10_000)
    monkeypatch.setattr(response_store, "MAX_CONVERSATIONS", 4)
    monkeypatch.setattr(sqlite_store, "PURGE_SECONDS", 0)

    async def work(store: ResponseStore, _: ResponseStore) -> None:
        await store.put(RECORD._replace(id="small", owner="other"))
        for number in range(40):
            await store.put(RECORD._replace(id=f"resp_{number}", body="x" * 100))
        assert await store.get("me", "resp_39") is not None
        assert await store.get("me", "resp_0") is None
        assert await store.get("other", "small") is not None  # the client that keeps most loses its oldest
        for owner, name in (("other", "theirs"), *(("me", f"conv_{number}") for number in range(9))):
            await store.put_conversation(owner, name, "{}")
        kept = [await store.conversation("me", f"conv_{number}") is not None for number in range(9)]
        assert kept == [False] * 6 + [True] * 3
        assert await store.conversation("other", "theirs") is not None

    run(work, tmp_path / "s")

    async def expire(store: ResponseStore, _: ResponseStore) -> None:
        assert await store.get("me", "resp_39") is None

    run(expire, tmp_path / "s", ttl=0)


def test_a_damaged_file_begins_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "s").write_bytes(b"no database" * 1000)

    async def work(store: ResponseStore, _: ResponseStore) -> None:
        await store.put(RECORD)
        assert await store.get("me", "resp_1") is not None

    run(work, tmp_path / "s")
    assert "are damaged and begin anew" in caplog.text


def test_a_store_that_cannot_be_written(front: Front, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store = ResponseStore(tmp_path / "none" / "s", 60)
    monkeypatch.setattr(front.service, "responses", store)
    assert post(front, input="x")["store"] is False
    for body in ({"background": True}, {"previous_response_id": "resp_1"}):
        reply = front.post(PATH, json.dumps({"input": "x"} | body), **MINE)
        error = json.loads(reply.body)["error"]
        assert (reply.status, error["type"]) == (503, "unavailable")
        assert error["message"].startswith("The kept responses cannot be read or written: ")
    assert get(front, f"{PATH}/resp_1").status == 503
    store.close()
