"""`tgi bench` against servers whose behaviour is known: what it counts, times, and says of failures."""

import asyncio
import json
import re
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from click.testing import CliRunner

from tests.scripts.test_streams import read_in, recorded
from tgi.bench import html, report
from tgi.bench.apis import APIS, Answer
from tgi.bench.figures import Objectives, Request, level_figures, quantile
from tgi.bench.workload import SHAPES, Conversation, Shape, Turn, conversations, read_file
from tgi.cli import main
from tgi.microkernel.errors import UserError

pytestmark = pytest.mark.slow

Reply = Callable[[str, dict[str, Any], asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"


class Peer:
    """A server in a thread. `reply` writes the answer to a POST; the tokens of a prompt are its words and 3 more."""

    def __init__(self, reply: Reply, models: bool = True) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.active = self.most = 0
        self._reply, self._models = reply, models
        self._loop = asyncio.new_event_loop()
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        self._up.set()
        self._loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, path, _ = head.split(" ", 2)
        if method == "GET":
            body = b'{"data":[{"id":"some/model"},{"id":"other"}]}' if self._models else b"{}"
            status = b"200 OK" if self._models else b"404 Not Found"
            writer.write(b"HTTP/1.1 " + status + b"\r\n\r\n" + body)
        else:
            found = re.search(r"content-length: (\d+)", head)
            assert found is not None
            body = json.loads(await reader.readexactly(int(found[1])))
            self.bodies.append(body)
            self.paths.append(path)
            self.active += 1
            self.most = max(self.most, self.active)
            await self._reply(path, body, writer)
            self.active -= 1
        writer.close()

    def __enter__(self) -> "Peer":
        self._thread.start()
        assert self._up.wait(10)
        return self

    def __exit__(self, *exception: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


def words(body: dict[str, Any]) -> int:
    texts = [one["content"] for one in body["messages"]] if "messages" in body else [body.get("prompt", "")]
    return sum(len(text.split()) for text in texts)


def event(data: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()


async def well(path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    """The first token after 30 ms, another each 10 ms."""
    writer.write(OK)
    for number in range(body["max_tokens"]):
        await asyncio.sleep(0.01 if number else 0.03)
        writer.write(event({"choices": [{"index": 0, "delta": {"content": f" {number}"}}]}))
    usage = {"prompt_tokens": words(body) + 3, "completion_tokens": body["max_tokens"]}
    writer.write(event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n")


def bench(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(main, ["bench", *arguments])
    assert done.exit_code == code, (done.output, done.exception)
    return done.output


@pytest.fixture
def result(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def run(*arguments: str, code: int = 0) -> dict[str, Any]:
        file = tmp_path / "result.json"
        bench(*arguments, "--json", str(file), code=code)
        found: dict[str, Any] = json.loads(file.read_text())
        return found

    return run


def test_a_closed_loop_counts_tokens_and_times(result: Any) -> None:
    with Peer(well) as peer:
        lengths = ("--input-tokens", "40", "--output-tokens", "5", "--warm-up", "0")
        found = result(peer.url, "--concurrency", "1,4", "--requests", "12", *lengths, "--slo", "ttft=10s,itl=1ms")
        assert peer.most == 4
        measured = peer.bodies[2:]  # after those that calibrate
    assert len(measured) == 24
    assert {(body["model"], body["max_tokens"], body["stream"]) for body in measured} == {("some/model", 5, True)}
    assert all(body["ignore_eos"] for body in measured)
    assert {words(body) for body in measured} == {41}  # a word is a token of this server; the first one makes it unique
    assert len({body["messages"][0]["content"] for body in measured}) == 24
    for level, concurrency in zip(found["levels"], (1, 4), strict=True):
        assert (level["concurrency"], level["requests"], level["failed"]) == (concurrency, 12, {})
        assert (level["output_tokens"], level["input_tokens"]) == (60, 12 * 44)
        assert level["ttft_ms"]["min"] >= 29
        assert level["itl_ms"]["mean"] >= 9
        assert level["tpot_ms"]["p50"] >= 9
        assert level["total_ms"]["min"] >= 69
        assert level["tokens_per_s"] == pytest.approx(60 / level["seconds"])
        assert level["goodput_share"] == 0
    assert found["api"] == "/v1/chat/completions"


def test_arrivals_at_a_rate_do_not_wait_for_answers(result: Any) -> None:
    async def slow(path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.3 if body["max_tokens"] == 7 else 0)
        await well(path, body, writer)

    with Peer(slow) as peer:
        arguments = ("--rate", "200", "--requests", "40", "--output-tokens", "7", "--seed", "1")
        (level,) = result(peer.url, *arguments)["levels"]
        assert peer.most > 30
    assert (level["rate"], level["requests"], level["concurrency"]) == (200, 40, 0)


def test_turns_of_a_conversation_have_the_answers_before(result: Any) -> None:
    with Peer(well) as peer:
        shape = ("--turns", "3", "--shared-tokens", "20", "--input-tokens", "8", "--output-tokens", "2")
        result(peer.url, "--concurrency", "2", "--requests", "6", *shape, "--warm-up", "0")
        roles = [[one["role"] for one in body["messages"]] for body in peer.bodies[2:]]
        third = next(body for body in peer.bodies if len(body["messages"]) == 6)
    assert sorted(map(len, roles)) == [2, 2, 4, 4, 6, 6]
    assert [one["role"] for one in third["messages"]] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert third["messages"][2]["content"] == " 0 1"


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        ("status 429", b"HTTP/1.1 429 Too Many Requests\r\n\r\n{}"),
        ("no answer", b""),
        ("no token", OK + b"data: [DONE]\n\n"),
        ("error event", OK + event({"error": "overloaded"})),
        ("bad event", OK + b"data: {half\n\n"),
        ("cut off", b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n40\r\ndata: {}\n\n"),
        ("bad event", b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxx\r\n"),
        ("bad event", OK + event({"choices": [{"delta": 7}]})),
        ("timeout", None),
    ],
)
def test_failures_are_counted_by_kind(result: Any, kind: str, answer: bytes | None) -> None:
    async def reply(path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if body["max_tokens"] != 9 or len(peer.bodies) % 2:
            await well(path, body, writer)
        elif answer is None:
            await asyncio.sleep(1.5)
        else:
            writer.write(answer)

    with Peer(reply) as peer:
        arguments = ("--concurrency", "1", "--requests", "8", "--output-tokens", "9", "--warm-up", "0")
        found = result(peer.url, *arguments, "--timeout", "1")
    (level,) = found["levels"]
    assert level["requests"] == 8
    assert level["failed"] == {kind: 4}
    assert level["output_tokens"] == 36
    assert kind in found["notes"][-1]
    assert any(f"4 of 8 requests failed: {kind}" in line for line in report.remarks(found))


def test_a_server_that_does_not_know_ignore_eos_is_asked_without_it(result: Any) -> None:
    async def strict(path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if "ignore_eos" in body:
            writer.write(b'HTTP/1.1 400 Bad Request\r\n\r\n{"error":{"message":"unknown parameter ignore_eos"}}')
        else:
            await well(path, body, writer)

    with Peer(strict) as peer:
        found = result(peer.url + "/v1/", "--concurrency", "1", "--requests", "2", "--output-tokens", "2")
        assert not any("ignore_eos" in body for body in peer.bodies[1:])
    assert found["levels"][0]["failed"] == {}
    assert "does not know ignore_eos" in found["notes"][0]


def test_models_are_asked_in_turn(result: Any) -> None:
    with Peer(well) as peer:
        named = ("--model", "a", "--model", "b", "--api", "chat")
        result(peer.url, *named, "--concurrency", "1", "--requests", "4", "--output-tokens", "1", "--warm-up", "0")
        assert [body["model"] for body in peer.bodies[2:]] == ["a", "b", "a", "b"]


def test_a_server_that_cannot_be_asked_is_named_in_a_sentence() -> None:
    async def refuse(path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 401 Unauthorized\r\n\r\nno key")

    async def short(path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if words(body) > 100:
            writer.write(b"HTTP/1.1 422 Unprocessable Entity\r\n\r\nat most 100 tokens")
        else:
            await well(path, body, writer)

    with Peer(short) as peer:
        assert re.search(r"was answered with .*422.* at most 100 tokens", bench(peer.url, code=1))
    with Peer(refuse) as peer:
        assert re.search(r"/v1/chat/completions was answered with .*401.* no key", bench(peer.url, code=1))
        gone = peer.url
    assert f"No server answers at {gone}" in bench(gone, code=1)
    assert f"No server answers at {gone.removeprefix('http://')}" in bench(gone.removeprefix("http://"), code=1)
    for url in ("http://a:port", "ftp://a", "http://", "[::1"):
        assert "is not the URL of a server" in bench(url, code=1)
    assert "Give the URL of a server" in bench(code=2)


@pytest.mark.parametrize(("name", "api"), [("vllm", "completions"), ("ours", "tgi"), ("transformers", "completions")])
def test_recorded_streams_of_servers_are_read(name: str, api: str) -> None:
    answer = APIS[api].read(read_in(100, recorded(name)).events())
    assert (len(answer.times), answer.output_tokens, answer.input_tokens) == (6, 6, 12)


def test_figures_against_numpy_and_by_hand() -> None:
    values = sorted(np.random.default_rng(1).exponential(size=37))
    for share in (0, 0.01, 0.5, 0.9, 0.99, 1):
        assert quantile(values, share) == pytest.approx(np.quantile(values, share))
    requests = [
        Request(10.0, 12.0, Answer("", [10.5, 11.0, 11.5, 12.0], 4, 7, 3)),
        Request(11.0, 14.0, Answer("", [13.0, 14.0], 3, 9, None)),
        Request(11.5, 12.5, None, "status 500"),
    ]
    found = level_figures(requests, 0.007, Objectives.parse("ttft=1s, itl=500ms,total=2.5s"))
    assert (found["requests"], found["failed"], found["seconds"]) == (3, {"status 500": 1}, 4.0)
    assert (found["output_tokens"], found["input_tokens"], found["cached_tokens"]) == (7, 16, 3)
    assert (found["tokens_per_s"], found["requests_per_s"]) == (7 / 4, 2 / 4)
    assert (found["ttft_ms"]["p50"], found["ttft_ms"]["max"]) == (1250, 2000)
    assert found["itl_ms"]["mean"] == pytest.approx(1000 * (0.5 * 3 + 1) / 4)
    assert found["tpot_ms"]["mean"] == pytest.approx(500)  # 1.5 s for 3 further tokens, 1 s for 2
    assert (found["goodput_per_s"], found["goodput_share"]) == (1 / 4, 1 / 3)
    assert found["client_us_per_token"] == pytest.approx(1000)
    assert level_figures([], 0.0)["ttft_ms"] is None
    with pytest.raises(UserError, match="--slo has"):
        Objectives.parse("ttft=5")


def test_workloads_have_their_lengths_and_repeat_by_seed() -> None:
    def first(shape: Shape, seed: int, count: int = 200) -> list[Conversation]:
        source: Iterator[Conversation] = conversations(shape, 1.0, seed)
        return [next(source) for _ in range(count)]

    for shape in SHAPES.values():
        assert first(shape, 1) == first(shape, 1) != first(shape, 2)
        assert {len(one.turns) for one in first(shape, 1)} == {shape.turns}
        lengths = [turn.output_tokens for one in first(shape, 1) for turn in one.turns]
        assert np.mean(lengths) == pytest.approx(shape.output_tokens, rel=0.15)
        assert (len(set(lengths)) > 1) == bool(shape.spread or shape.exponential)
        assert len({one.system for one in first(shape, 1)}) == 1
        assert len({turn.text for one in first(shape, 1) for turn in one.turns}) == 200 * shape.turns
    assert len(first(Shape(shared_tokens=50), 1)[0].system.split()) == 51


def test_the_page_describes_the_workloads() -> None:
    page = (Path(__file__).parents[2] / "docs" / "bench.md").read_text()
    texts = {
        "random": "{0.input_tokens} tokens in, {0.output_tokens} out",
        "sharegpt": "{0.input_tokens} in and {0.output_tokens} out in the mean, exponentially distributed",
        "shared-prefix": "{0.shared_tokens:,} tokens that all prompts begin with, then {0.input_tokens} of their own",
        "multi-turn": "conversations of",
        "agent": "a long system prompt",
    }
    assert texts.keys() == SHAPES.keys()
    rows = {line.split("|")[1].strip(" `"): line for line in page.splitlines() if line.startswith("| `")}
    for name, text in texts.items():
        assert text.format(SHAPES[name]) in rows[name]


def test_files_are_read(tmp_path: Path) -> None:
    file = tmp_path / "file"
    said = [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "x" * 40}]
    file.write_text(json.dumps([{"conversations": said}, {"conversations": said[:1]}, {"other": 1}]))
    assert read_file(file, 5, 0.25) == [Conversation("", (Turn("Why?", 10),))]
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    lines = [{"messages": messages, "max_tokens": 9}, {"prompt": "Once"}, {"prompt": "x", "max_tokens": 1 << 40}]
    file.write_text("\n".join(map(json.dumps, lines)))
    assert read_file(file, 5, 0.25) == [
        Conversation("Be kind.", (Turn("Hi", 9),)),
        Conversation("", (Turn("Once", 5),)),
    ]
    for text in ("{half", "[1]", "", '{"a": 1}'):
        file.write_text(text)
        with pytest.raises(UserError):
            read_file(file, 5, 0.25)
    assert "which is no file" in bench("http://x", "--workload", "nothing", code=1)


def test_the_page_needs_no_network_and_the_comparison_names_what_is_better(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.json", "b.json", "page.html")]

    async def slower(path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.1)
        await well(path, body, writer)

    for reply, path in zip((well, slower), paths, strict=False):
        with Peer(reply) as peer:
            arguments = ("--concurrency", "1,2", "--requests", "6", "--output-tokens", "3", "--html", str(paths[2]))
            table = bench(peer.url, *arguments, "--json", str(path))
    assert [line.split()[:4] for line in table.splitlines()[1:3]] == [
        ["1", "at", "once", "6"],
        ["2", "at", "once", "6"],
    ]
    shown = bench("--compare", str(paths[0]), str(paths[1]))
    assert re.search(r"1 at once +TTFT p50 .* [2-9]\.\d\dx -", shown)
    assert re.search(r"2 at once +tokens/s .* 0\.\d\dx -", shown)
    page = paths[2].read_text()
    assert not re.search(r"(src|href|url\()", page)
    plots = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(plots) == 6
    for plot in plots:
        root = ElementTree.fromstring(plot)
        numbers = [float(n) for line in root.iter("polyline") for n in re.split("[ ,]", line.get("points") or "")]
        assert numbers
        assert all(0 <= number <= html.WIDTH for number in numbers)
    paths[0].write_text("{}")
    with pytest.raises(UserError, match="is no result"):
        report.load(paths[0])


def test_ctrl_c_keeps_the_levels_that_ended(tmp_path: Path) -> None:
    """The program in a process of its own, which gets SIGINT in its second level."""
    import signal
    import subprocess
    import sys

    with Peer(well) as peer:
        file = tmp_path / "result.json"
        arguments = ("--concurrency", "1,2", "--requests", "30", "--output-tokens", "3", "--json", str(file))
        command = [sys.executable, "-m", "tgi", "bench", peer.url, *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            while peer.most < 2:
                assert process.poll() is None
                time.sleep(0.005)
            process.send_signal(signal.SIGINT)
            assert process.stdout is not None
            shown = process.stdout.read()
        assert process.returncode == 130
    assert "interrupted" in shown
    assert [level["concurrency"] for level in json.loads(file.read_text())["levels"]] == [1]
