"""/v1/files and /v1/batches: what is kept, by whom, for how long, and which requests a batch makes."""

import asyncio
import json
import queue
import time
from collections.abc import Callable, Iterator
from copy import copy
from pathlib import Path
from typing import Any

import pytest

from tests.api.conftest import Front, Reply, request, silent, standard, texts
from tgi.api import batch_store, batches, sqlite_store
from tgi.api.batch_store import ERROR, OUTPUT, BatchStore, Result, StoredFile, StoreFull
from tgi.api.routes import batches as routes
from tgi.api.shapes.batches import BatchObject
from tgi.microkernel.admission.api_keys import MAX_PRIORITY
from tgi.microkernel.messages.protocol import Cancel, End, FinishReason, Generate
from tgi.microkernel.settings.table import Settings

CHAT = "/v1/chat/completions"
LIVE = ("validating", "in_progress", "finalizing", "cancelling")


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """A front end with two keys, whose batches are answered."""
    keys = ("mine priority=3 weight=2 requests=2", "other")
    settings = Settings(
        validation_workers=1, hostname="127.0.0.1", api_key=keys, max_concurrent_requests=1, payload_limit=4000
    )
    front = Front(settings, tmp_path_factory.mktemp("batches"), standard)
    front.start()
    front.tokenizers[0].start()
    front.until_ready()
    yield front
    front.stop()


@pytest.fixture(autouse=True)
def _answers(front: Front) -> None:
    front.tokenizers[0].answer = standard
    while not front.tokenizers[0].received.empty():
        front.tokenizers[0].received.get()


def form(*parts: tuple[str, bytes], end: bytes = b"--B--\r\n") -> bytes:
    texts = []
    for name, value in parts:
        file = '; filename="in.jsonl"' if name == "file" else ""
        texts.append(
            b'--B\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n' % (name.encode(), file.encode()) + value
        )
    return b"\r\n".join(texts) + b"\r\n" + end


def upload(front: Front, content: bytes, key: str = "mine", **fields: str) -> Reply:
    body = form(("file", content), ("purpose", b"batch"), *((name, text.encode()) for name, text in fields.items()))
    return front.post("/v1/files", body, "multipart/form-data; boundary=B", authorization=f"Bearer {key}")


def line(number: int, **changes: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": f"Hello {number}"}]} | changes.pop("body", {})
    return {"custom_id": f"r{number}", "method": "POST", "url": CHAT, "body": body} | changes


def lines(*given: dict[str, Any]) -> bytes:
    return b"\n".join(json.dumps(one).encode() for one in given)


def post(front: Front, path: str, key: str = "mine", **body: Any) -> Reply:
    return front.post(path, json.dumps(body), authorization=f"Bearer {key}")


def get(front: Front, path: str, method: str = "GET", key: str = "mine") -> Reply:
    return front.get(path, method, authorization=f"Bearer {key}")


def create(front: Front, content: bytes, **body: Any) -> dict[str, Any]:
    file = json.loads(upload(front, content).body)["id"]
    asked = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"} | body
    reply = post(front, "/v1/batches", **asked)
    assert reply.status == 200, reply.body
    found: dict[str, Any] = json.loads(reply.body)
    return found


def shown(front: Front, batch: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(get(front, f"/v1/batches/{batch['id']}").body)
    return found


def ended(front: Front, batch: dict[str, Any]) -> dict[str, Any]:
    while (found := shown(front, batch))["status"] in LIVE:
        time.sleep(0.01)
    return found


def content(front: Front, file_id: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in get(front, f"/v1/files/{file_id}/content").body.splitlines()]


# --- files ---


def test_a_file_is_kept_as_it_is(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "PIECE_BYTES", 1000)
    given = b"\n\xff\x00" + b'{"a": 1}\r\n\n' * 5000 + b"no end"
    file = json.loads(upload(front, given).body)
    assert (file["bytes"], file["filename"], file["purpose"]) == (len(given), "in.jsonl", "batch")
    path = f"/v1/files/{file['id']}"
    reply = get(front, f"{path}/content")
    assert (reply.body, reply.headers["content-length"]) == (given, str(len(given)))
    assert json.loads(get(front, path).body) == file
    later = json.loads(
        upload(front, b"", **{"expires_after[seconds]": "3600", "expires_after[anchor]": "created_at"}).body
    )
    assert later["expires_at"] - later["created_at"] == 3600
    listed = json.loads(get(front, "/v1/files?limit=1").body)
    assert (listed["data"], listed["has_more"]) == ([later], True)
    listed = json.loads(get(front, f"/v1/files?limit=1&purpose=batch&after={later['id']}").body)
    assert listed["data"] == [file]
    assert json.loads(get(front, "/v1/files?order=asc").body)["data"][0] == file
    for unknown in (f"/v1/files?after={file['id']}x", "/v1/batches?after=batch_x"):
        refused = get(front, unknown)
        assert (refused.status, json.loads(refused.body)["error"]["param"]) == (422, "after")
    for one in (path, f"{path}/content"):
        assert get(front, one, key="other").status == 404
    assert get(front, path, "DELETE", key="other").status == 404
    assert json.loads(get(front, path, "DELETE").body) == {"object": "file", "id": file["id"], "deleted": True}
    assert get(front, f"{path}/content").status == 404
    assert get(front, f"/v1/files/{later['id']}", "DELETE").status == 200


FILE, PURPOSE = ("file", b"{}\n"), ("purpose", b"batch")
FORM = "multipart/form-data; boundary=B"


@pytest.mark.parametrize(
    ("body", "kind", "status", "text"),
    [
        (b"{}", "application/json", 415, "multipart/form-data"),
        (form(FILE, PURPOSE), "multipart/form-data", 400, "boundary"),
        (form(FILE), FORM, 422, "`purpose` must be `batch`"),
        (form(FILE, ("purpose", b"fine-tune")), FORM, 422, "`purpose` must be `batch`"),
        (form(PURPOSE), FORM, 422, "no `file`"),
        (form(FILE, FILE, PURPOSE), FORM, 422, "one `file`"),
        (form(FILE, ("purpose", b"x" * 5000)), FORM, 400, "too large"),
        (form(FILE, *(("a", b"") for _ in range(30)), PURPOSE), FORM, 400, "maximum number"),
        (form(FILE, PURPOSE, ("expires_after[seconds]", b"9")), FORM, 422, "expires_after"),
        (form(FILE, PURPOSE, end=b""), FORM, 400, "unexpected form"),
        (form(("file", b"{}\n" * 50), PURPOSE), FORM, 413, "at most 40 lines"),
        (form(("file", b"x\n" * 4100), PURPOSE), FORM, 413, "at most 8000 bytes"),
        (form(("file", b"{}\n" + b"x" * 6000), PURPOSE), FORM, 413, "Line 2 is longer"),
    ],
)
def test_an_upload_that_is_refused_is_dropped(
    front: Front, body: bytes, kind: str, status: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "MAX_LINES", 40)
    monkeypatch.setattr(routes, "MAX_FILE_BYTES", 8000)
    monkeypatch.setattr(routes, "LINE_OVERHEAD", 1000)
    reply = front.post("/v1/files", body, kind, authorization="Bearer mine")
    assert (reply.status, text in reply.body.decode()) == (status, True), reply.body
    assert json.loads(reply.body)["error"]["code"] == status
    assert json.loads(get(front, "/v1/files").body)["data"] == []


def test_an_upload_whose_client_disconnects_is_dropped(front: Front) -> None:
    body = form(("file", b"{}\n" * 1000), PURPOSE)
    head = {"authorization": "Bearer mine", "content-type": FORM, "content-length": str(len(body))}
    with front.connect() as connection:
        connection.sendall(request("POST", "/v1/files", body[:-900], head))
        while not front.service.uploads:
            time.sleep(0.005)
    while front.service.uploads:
        time.sleep(0.005)
    assert json.loads(get(front, "/v1/files").body)["data"] == []
    assert store_rows(front) == 0


def store_rows(front: Front) -> int:
    """Lines and files that are kept, of uploads that are not complete."""
    store = front.service.batches
    count = "SELECT COUNT(*) FROM files LEFT JOIN lines ON lines.source = id WHERE NOT complete"
    return store._thread.submit(store._transaction, lambda db: db.execute(count).fetchone()[0]).result()


# --- batches ---


def assert_usage_is_the_sum(done: dict[str, Any], results: list[dict[str, Any]]) -> None:
    """A batch has the model and the tokens of its answers."""
    bodies = [result["response"]["body"] for result in results]
    assert {done["model"]} == {body["model"] for body in bodies}
    counted = [body["usage"] for body in bodies]
    usage = done["usage"]
    for name, other in (("input_tokens", "prompt_tokens"), ("output_tokens", "completion_tokens")):
        assert usage[name] == sum(one.get(other) or one[name] for one in counted) > 0
    assert usage["total_tokens"] == sum(one["total_tokens"] for one in counted)


@pytest.mark.parametrize("path", ["files", "batches"])
@pytest.mark.parametrize("limit", ["0", "10001", "-1", "x"])
def test_a_limit_is_within_its_bounds(front: Front, path: str, limit: str) -> None:
    reply = get(front, f"/v1/{path}?limit={limit}")
    assert (reply.status, json.loads(reply.body)["error"]["param"]) == (422, "limit")
    assert f"must be an integer from 1 to {10_000 if path == 'files' else 100}" in reply.body.decode()


def test_a_batch(front: Front) -> None:
    given = [line(0), line(1, body={"max_tokens": 0}), line(2, body={"temperature": 1.0})]
    asked = {"metadata": {"a": "b"}, "completion_window": "2h"}
    batch = create(front, lines(*given).replace(b"\n", b"\n\n  \r\n"), **asked)
    assert (batch["status"], batch["metadata"]) == ("validating", {"a": "b"})
    assert batch["expires_at"] - batch["created_at"] == 7200
    done = ended(front, batch)
    assert done["status"] == "completed"
    assert done["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    assert None not in (done["in_progress_at"], done["finalizing_at"], done["completed_at"])
    first, third = content(front, done["output_file_id"])
    assert_usage_is_the_sum(done, [first, third])
    assert (first["custom_id"], third["custom_id"], first["error"]) == ("r0", "r2", None)
    assert first["response"]["status_code"] == 200
    assert first["response"]["body"]["choices"][0]["message"]["content"] == " a"
    assert third["response"]["body"]["id"] != first["response"]["body"]["id"]
    [failed] = content(front, done["error_file_id"])
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("r1", 422)
    assert "must be strictly positive" in failed["response"]["body"]["error"]["message"]
    file = json.loads(get(front, f"/v1/files/{done['output_file_id']}").body)
    assert (file["purpose"], file["filename"]) == ("batch_output", f"{batch['id']}_output.jsonl")
    listed = json.loads(get(front, "/v1/batches?limit=1").body)
    assert (listed["data"], listed["last_id"]) == ([done], batch["id"])
    assert get(front, f"/v1/batches/{batch['id']}", key="other").status == 404
    assert json.loads(get(front, "/v1/batches", key="other").body)["data"] == []
    assert post(front, f"/v1/batches/{batch['id']}/cancel", key="other").status == 404
    assert json.loads(post(front, f"/v1/batches/{batch['id']}/cancel").body) == done


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/responses"])
def test_other_endpoints(front: Front, endpoint: str) -> None:
    body = {"prompt": "x"} if endpoint == "/v1/completions" else {"input": "x"}
    done = ended(front, create(front, lines(line(0, url=endpoint) | {"body": body}), endpoint=endpoint))
    [result] = content(front, done["output_file_id"])
    assert result["response"]["body"]["object"] in ("text_completion", "response")
    assert_usage_is_the_sum(done, [result])
    if endpoint == "/v1/responses":  # kept as the client's own
        assert get(front, f"{endpoint}/{result['response']['body']['id']}").status == 200


PROBLEMS = [
    (b"", "empty_file", None),
    (b"\n \n", "empty_file", None),
    (lines(line(0)) + b"\n{", "invalid_json_line", 2),
    (b'{"a":' * 5000, "invalid_json_line", 1),
    (b"\xff", "invalid_json_line", 1),
    (b"[]", "invalid_request", 1),
    (lines(line(0), line(1), line(0)), "duplicate_custom_id", 3),
    (lines(line(0, custom_id=7)), "invalid_request", 1),
    (lines(line(0, custom_id="x" * 513)), "invalid_request", 1),
    (lines(line(0, method="GET")), "invalid_request", 1),
    (lines(line(0), line(1, url="/metrics")), "invalid_url", 2),
    (lines(line(0) | {"body": []}), "invalid_request", 1),
    (lines({"custom_id": "a"}), "invalid_request", 1),
    (lines(line(0, body={"stream": True})), "invalid_request", 1),
]


@pytest.mark.parametrize(("content", "code", "number"), PROBLEMS)
def test_a_file_that_is_not_valid(front: Front, content: bytes, code: str, number: int | None) -> None:
    batch = create(front, content)
    ended(front, batch)
    front.service.batches._next_purge = 0
    done = shown(front, batch)  # which is kept
    assert (done["status"], done["output_file_id"]) == ("failed", None)
    [problem] = done["errors"]["data"]
    assert (problem["code"], problem["line"]) == (code, number)
    assert front.tokenizers[0].received.empty()


@pytest.mark.parametrize(
    ("changes", "status", "param"),
    [
        ({"endpoint": "/generate"}, 422, "endpoint"),
        ({"endpoint": "/v1/embeddings"}, 404, None),
        ({"completion_window": "1d"}, 422, "completion_window"),
        ({"completion_window": "999h"}, 422, "completion_window"),
        ({"input_file_id": "file-x"}, 404, "input_file_id"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, 422, "output_expires_after.seconds"),
    ],
)
def test_a_batch_that_is_refused(front: Front, changes: dict[str, Any], status: int, param: str | None) -> None:
    asked = {"input_file_id": "file-x", "endpoint": CHAT, "completion_window": "24h"} | changes
    reply = post(front, "/v1/batches", **asked)
    assert (reply.status, json.loads(reply.body)["error"]["param"]) == (status, param)


def test_interactive_requests_come_first_and_cancel_ends_what_runs(front: Front) -> None:
    tokenizer = front.tokenizers[0]
    tokenizer.answer = lambda message: standard(message) if message.context.priority > 0 else None
    batch = create(front, lines(*(line(number) for number in range(4))))
    running = [tokenizer.next(Generate) for _ in range(2)]  # as many as the key may have at once
    assert {one.context.priority for one in running} == {3 - 2 * MAX_PRIORITY - 1}
    assert {one.context.weight for one in running} == {2}
    # The only permit of the server is free, and the share is another one.
    body = json.dumps({"messages": [{"role": "user", "content": "now"}]})
    assert front.post(CHAT, body, authorization="Bearer mine").status == 200
    assert tokenizer.next(Generate).context.client not in {one.context.client for one in running}
    assert get(front, f"/v1/files/{batch['input_file_id']}", "DELETE").status == 409
    assert json.loads(post(front, f"/v1/batches/{batch['id']}/cancel").body)["status"] == "cancelling"
    assert {tokenizer.next(Cancel).rid for _ in running} == {one.rid for one in running}
    done = ended(front, batch)
    assert (done["status"], done["request_counts"]["failed"]) == ("cancelled", 4)
    errors = content(front, done["error_file_id"])
    assert [one["custom_id"] for one in errors] == ["r0", "r1", "r2", "r3"]
    assert {one["error"]["code"] for one in errors} == {"batch_cancelled"}
    assert get(front, f"/v1/files/{batch['input_file_id']}", "DELETE").status == 200


def test_a_request_that_finds_the_server_overloaded_is_sent_again(front: Front) -> None:
    refused: list[int] = []

    def answer(message: Any) -> Any:
        refused.append(message.rid)
        if len(refused) == 1:
            return [End(message.rid, FinishReason.OVERLOADED, "full", retry_after_ms=1)]
        return standard(message)

    front.tokenizers[0].answer = answer
    done = ended(front, create(front, lines(line(0))))
    assert (done["status"], done["request_counts"]["completed"], len(refused)) == ("completed", 1, 2)


def test_a_batch_waits_while_the_disk_is_full(front: Front) -> None:
    store, tokenizer = front.service.batches, front.tokenizers[0]

    def limit_pages(pages: int) -> None:
        limit = f"PRAGMA max_page_count={pages}"
        store._thread.submit(lambda: store._connection.execute(limit)).result()  # type: ignore[union-attr]

    tokenizer.answer = silent
    wide = "x" * 3000
    batch = create(front, lines(*(line(number, custom_id=f"{number} {wide[:500]}") for number in range(40))))
    held = [tokenizer.next(Generate) for _ in range(2)]  # as many as the key may have at once
    limit_pages(1)  # the present size
    tokenizer.answer = lambda message: answer_wide(message, wide)
    tokenizer.send(*(one for message in held for one in answer_wide(message, wide)))
    while upload(front, wide.encode()).status != 503:
        time.sleep(0.01)
    assert shown(front, batch)["request_counts"]["completed"] < 40
    limit_pages(1 << 30)
    done = ended(front, batch)
    assert done["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
    names = [one["custom_id"].split()[0] for one in content(front, done["output_file_id"])]
    assert names == [str(number) for number in range(40)]


def test_a_batch_that_another_front_end_has_checked_meanwhile(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    store = front.service.batches
    set_total = store.set_total

    async def be_late(batch_id: str, total: int) -> None:
        await set_total(batch_id, total)
        await store.move(batch_id, ("validating",), "in_progress")  # the other front end's

    monkeypatch.setattr(store, "set_total", be_late)
    done = ended(front, create(front, lines(line(0), line(1))))
    assert (done["status"], done["request_counts"]["completed"]) == ("completed", 2)


def test_a_batch_ends_with_the_key_of_its_client(front: Front) -> None:
    front.tokenizers[0].answer = silent
    batch = create(front, lines(*(line(number) for number in range(4))))
    held = [front.tokenizers[0].next(Generate) for _ in range(2)]
    front.service.clients._set_keys(("other",))
    front.tokenizers[0].send(*(one for message in held for one in standard(message)))
    assert get(front, f"/v1/batches/{batch['id']}").status == 401
    assert [front.tokenizers[0].received.empty() for _ in range(3)] == [True] * 3
    while asyncio.run(as_kept(front, batch)).status in LIVE:
        time.sleep(0.02)
    front.service.clients._set_keys(front.settings.api_key)
    done = shown(front, batch)
    assert (done["status"], sum(done["request_counts"].values())) == ("cancelled", 8)


async def as_kept(front: Front, batch: dict[str, Any]) -> BatchObject:
    owner = front.service.batches._thread.submit(
        lambda: front.service.batches._connection.execute("SELECT owner FROM batches").fetchone()[0]  # type: ignore[union-attr]
    ).result()
    found = await front.service.batches.batch(owner, batch["id"])
    assert found is not None
    return found


def answer_wide(message: Generate, text: str) -> list[Any]:
    return [texts(message.rid, (5, text, -0.3, False)), End(message.rid, FinishReason.LENGTH, "", text, 3, 1)]


def lose(front: Front, number: int, unanswered: int) -> None:
    """As if this many front ends had ended with the only batch that has not ended."""
    query = "UPDATE batches SET status='in_progress', body=json_set(body, '$.status', 'in_progress'), runner='lost', "
    query += "losses=?, unanswered=? WHERE status='validating'"
    work = front.service.batches._run(lambda db: db.execute(query, (number, unanswered)).rowcount)
    assert asyncio.run_coroutine_threadsafe(work, front._loop).result(10) == 1


@pytest.mark.parametrize("losses", [1, 3])
def test_a_request_that_ends_front_ends_is_found_and_blamed(
    front: Front, losses: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counting this one, two losses: requests are sent one at a time. Four: the first one is blamed."""
    tokenizer = front.tokenizers[0]
    monkeypatch.setattr(batches, "MAX_RUNNING", 0)
    made = create(front, lines(*map(line, range(4))))
    lose(front, losses, 0)
    tokenizer.answer = silent
    monkeypatch.undo()
    sent = [tokenizer.next(Generate) for _ in range(2 if losses == 3 else 1)]
    with pytest.raises(queue.Empty):
        tokenizer.next(Generate, 0.3)
    tokenizer.answer = standard
    for message in sent:
        for answer in standard(message) or ():
            tokenizer.send(answer)
    done = ended(front, made)
    assert (done["status"], done["request_counts"]) == (
        "completed", {"total": 0, "completed": 4 - (losses == 3), "failed": losses == 3},
    )  # fmt: skip
    if losses == 3:
        (blamed,) = content(front, done["error_file_id"])
        assert (blamed["custom_id"], blamed["error"]["code"]) == ("r0", "server_error")
        assert blamed["error"]["message"].startswith("4 processes of the server have ended")


# --- the store ---

NOW = int(time.time())
BATCH = BatchObject(
    id="batch_1", endpoint=CHAT, input_file_id="file-1", completion_window="1h", created_at=NOW, expires_at=NOW + 3600
)
FILE_1 = StoredFile("file-1", "me", "batch", "", "file-1", 0, 0, 0, NOW, NOW + 1000)


def run(work: Callable[[BatchStore, BatchStore], Any], path: Path, ttl: float = 1000, max_bytes: int = 1 << 20) -> None:
    """Runs work with the stores of two front ends."""

    async def main() -> None:
        stores = [BatchStore(path, ttl, max_bytes) for _ in range(2)]
        await work(*stores)
        for store in stores:
            store.close()

    asyncio.run(main())


async def keep(store: BatchStore, file: StoredFile = FILE_1, count: int = 3) -> None:
    await store.begin_upload(file)
    await store.append_lines(file, 0, [b"line %d\n" % number for number in range(count)])
    await store.finish_upload(file)


def test_a_request_counts_once_and_one_front_end_has_the_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(one: BatchStore, other: BatchStore) -> None:
        await keep(one)
        for name in ("batch_1", "batch_2"):
            assert await one.create_batch("me", batch(name), 1000)
        assert not await one.create_batch("you", batch("batch_3"), 1000)
        claimed = await one.claim("one", True)
        assert claimed is not None
        assert (claimed[0], claimed[1].id) == ("me", "batch_1")
        assert await other.claim("other", True) is None  # a client has one at a time
        await one.move("batch_2", ("validating",), "cancelling")
        cancelled = await other.claim("other", True)  # which needs no turn
        assert cancelled is not None
        assert cancelled[1].id == "batch_2"
        assert await one.move("batch_1", ("validating",), "in_progress")
        monkeypatch.setattr(batch_store, "LOST_SECONDS", -1)
        taken = await other.claim("other", True)
        assert taken is not None
        assert await one.beat("batch_1", "one") is None
        assert await other.beat("batch_1", "other") is not None
        await other.record("batch_1", [Result(0, OUTPUT, b"a\n", "m", 5, 4, 3, 2), Result(2, ERROR, b"c\n")])
        await one.record("batch_1", [Result(number, OUTPUT, b"b\n", "other", 1, 1, 1, 1) for number in (0, 2, 1)])
        assert await one.requests(BATCH, -1, 100) == []
        await other.end("batch_1", "in_progress", "completed")
        await one.end("batch_1", "in_progress", "expired")
        await one.record("batch_1", [Result(9, OUTPUT, b"late\n")])
        found = await one.batch("me", "batch_1")
        assert found is not None
        assert (found.status, found.request_counts.completed, found.request_counts.failed) == ("completed", 2, 1)
        usage = found.usage
        assert (found.model, usage.input_tokens, usage.output_tokens, usage.total_tokens) == ("m", 6, 4, 10)
        assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (5, 3)
        for file_id, expected in ((found.output_file_id, b"a\nb\n"), (found.error_file_id, b"c\n")):
            file = await one.file("me", str(file_id))
            assert file is not None
            assert b"".join(line for _, line in await one.content(file, -1, 100)) == expected

    run(work, tmp_path / "s")


def test_front_ends_lost_before_one_result_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_store, "LOST_SECONDS", -1)

    async def work(one: BatchStore, other: BatchStore) -> None:
        await one.begin_upload(FILE_1)
        await one.append_lines(FILE_1, 0, [b"\n", b"a\n", b"b\n", b"c\n"])
        await one.finish_upload(FILE_1)
        assert await one.create_batch("me", batch("batch_1"), 1000)
        losses = []
        for name, answered in zip("abcdefg", (None, None, 2, None, 1, None, None), strict=True):
            claimed = await one.claim(name, losses[-1:] != [1])  # a batch on trial is for a front end without others
            if claimed is None:
                claimed = await one.claim(name, True)
            assert claimed is not None
            losses.append(claimed.losses)
            await one.move("batch_1", ("validating",), "in_progress")
            if answered is not None:
                await one.record("batch_1", [Result(answered, OUTPUT, b"x\n")])
        assert losses == [0, 1, 2, 3, 4, 1, 2]
        await one.release("batch_1", "g")
        assert (await other.claim("h", False), (await other.claim("h", True)).losses) == (None, 2)  # type: ignore[union-attr]

    run(work, tmp_path / "s")


def batch(batch_id: str) -> BatchObject:
    made = copy(BATCH)
    made.id = batch_id
    return made


def test_what_is_kept_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_store, "PURGE_SECONDS", 0)
    limit = 100_000

    async def work(store: BatchStore, other: BatchStore) -> None:
        await keep(store)
        file = FILE_1._replace(id="file-2", source="file-2")
        await store.begin_upload(file)
        await store.append_lines(file, 0, [b"x" * 40_000])
        with pytest.raises(StoreFull):  # half of all
            await store.append_lines(file, 1, [b"x" * 10_000])
        theirs = FILE_1._replace(id="file-3", source="file-3", owner="you")
        await store.begin_upload(theirs)
        await store.append_lines(theirs, 0, [b"x" * 20_000])
        with pytest.raises(StoreFull):
            await store.append_lines(theirs, 1, [b"x" * 20_000])
        await store.drop_upload(file)
        assert await store.create_batch("me", batch("batch_1"), 1000)
        assert await store.move("batch_1", ("validating",), "in_progress")
        with pytest.raises(StoreFull):
            await asyncio.gather(*(store.create_batch("me", batch(f"batch_{number}"), 1000) for number in range(2, 9)))
        claimed = await store.claim("one", True)
        assert claimed is not None
        assert (lease := await store.beat("batch_1", "one")) is not None
        assert not lease.full
        await store.record("batch_1", [Result(0, OUTPUT, b"x" * 40_000)])
        assert (lease := await store.beat("batch_1", "one")) is not None
        assert lease.full

    run(work, tmp_path / "s", max_bytes=limit)


def test_what_has_expired_is_dropped_with_its_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_store, "PURGE_SECONDS", 1000)
    monkeypatch.setattr(batch_store, "LOST_UPLOAD_SECONDS", -1)

    async def work(store: BatchStore, other: BatchStore) -> None:
        await keep(store, FILE_1._replace(expires=NOW - 1))
        assert await store.create_batch("me", batch("batch_1"), -1)
        await store.record("batch_1", [Result(0, OUTPUT, b"a\n")])
        await keep(store, FILE_1._replace(id="file-2", source="file-2"))
        await store.begin_upload(FILE_1._replace(id="file-3", source="file-3"))  # its front end has ended
        store._next_purge = 0
        assert [file.id for file in await store.files("me", None, None, 9, False)] == ["file-1", "file-2"]
        await store.end("batch_1", "validating", "completed")
        store._next_purge = 0
        assert [file.id for file in await store.files("me", None, None, 9, False)] == ["file-2"]
        assert await store.batch("me", "batch_1") is None
        assert await rows(store) == 1 + 3

    run(work, tmp_path / "s", ttl=-1)


async def rows(store: BatchStore) -> int:
    count = "SELECT (SELECT COUNT(*) FROM files) + (SELECT COUNT(*) FROM lines) + (SELECT COUNT(*) FROM batches)"
    return int(await store._run(lambda db: db.execute(count).fetchone()[0]))
