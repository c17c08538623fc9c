"""`tgi chat` against servers whose answers are known, by lines and on a terminal."""

import io
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tgi.chat import Chat, Server
from tgi.microkernel.errors import UserError

pytestmark = pytest.mark.slow


class Handler(BaseHTTPRequestHandler):
    """Answers with the number of messages, by pieces; "slowly" until the client leaves; "fail" and "broken"."""

    asked: list[dict[str, Any]] = []
    left = threading.Event()

    def do_GET(self) -> None:
        self._send(200, b'{"data":[{"id":"some/model"}]}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        Handler.asked.append(body | {"key": self.headers["authorization"]})
        question = body["messages"][-1]["content"]
        if question == "fail":
            self._send(422, b'{"error":{"message":"too long","type":"x"}}')
            return
        self.send_response(200)
        self.end_headers()
        if question == "broken":
            self.wfile.write(b'data: {"choices": 7}\n\n')
            return
        pieces = [{"reasoning_content": "Hm."}, {"role": "assistant"}, {"content": f"{len(body['messages'])} "}]
        pieces += [{"content": "mess\x1b[31mages"}]
        try:
            for piece in [*pieces, *[{"content": "."}] * (10_000 if question == "slowly" else 1)]:
                self.wfile.write(f"data: {json.dumps({'choices': [{'delta': piece}]})}\n\n".encode())
                time.sleep(0.01 if question == "slowly" else 0)
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            Handler.left.set()

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    Handler.asked.clear()
    Handler.left.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


def test_a_conversation(url: str) -> None:
    out = io.StringIO()
    chat = Chat(Server(url, "secret", None, {"temperature": 0.5}), "Be kind.", out)
    for line in ("Hi", "", "And?", "/retry", "/clear", "Again", "/system", "Bare", "/help"):
        chat.handle(line)
    answers = [f"{count} mess[31mages." for count in (2, 4, 4, 2, 1)]  # neither reasoning nor escapes
    assert out.getvalue().startswith("\n".join(answers) + "\n/system TEXT")
    roles = [[one["role"][0] for one in body["messages"]] for body in Handler.asked]
    assert roles == [[*"su"], [*"suau"], [*"suau"], [*"su"], [*"u"]]
    first = Handler.asked[0]
    assert (first["model"], first["temperature"], first["key"]) == ("some/model", 0.5, "Bearer secret")
    assert Handler.asked[1]["messages"][2]["content"] == "2 mess\x1b[31mages."


def test_failures_are_sentences_and_not_part_of_the_conversation(url: str) -> None:
    chat = Chat(Server(url, None, "m", {}), "", io.StringIO())
    with pytest.raises(UserError, match="answers 422: too long"):
        chat.handle("fail")
    with pytest.raises(UserError, match="an event that a chat does not have"):
        chat.handle("broken")
    with pytest.raises(UserError, match="There is no command /unknown"):
        chat.handle("/unknown command")
    chat.handle("/tmp/file is a path")
    assert [one["role"] for one in Handler.asked[-1]["messages"]] == ["user"]
    with pytest.raises(UserError, match="No server answers"):
        Server("http://127.0.0.1:1", None, None, {})
    with pytest.raises(UserError, match="is not the URL of a server"):
        Server("ftp://host", None, None, {})


def test_lines_of_standard_input_are_questions(url: str) -> None:
    command = [sys.executable, "-m", "tgi", "chat", url, "--max-tokens", "5"]
    done = subprocess.run(command, input="Hi\nAnd?\n", capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "1 mess[31mages.\n3 mess[31mages.\n")
    assert Handler.asked[0]["max_tokens"] == 5
    refused = subprocess.run(command, input="fail\n", capture_output=True, text=True)
    assert (refused.returncode, "answers 422: too long" in refused.stderr) == (1, True)
    assert "Traceback" not in refused.stderr


def test_ctrl_c_on_a_terminal_ends_an_answer_and_leaves_the_server(url: str) -> None:
    main, terminal = pty.openpty()
    command = [sys.executable, "-m", "tgi", "chat", url]
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True) as chat:
        os.close(terminal)
        shown = b""

        def until(text: bytes) -> None:
            nonlocal shown
            while text not in shown:
                shown += os.read(main, 4096)
            shown = shown.partition(text)[2]

        until(b"some/model on")
        until(b"> ")
        os.write(main, b"slowly\n")
        until(b"\x1b[2mHm.\x1b[0m")  # reasoning is dim
        until(b"...")
        chat.send_signal(signal.SIGINT)
        until(b" (stopped)")
        assert Handler.left.wait(30)
        os.write(main, b"Hi\n")
        until(b"3 mess[31mages.")
        os.write(main, b"/quit\n")
        assert chat.wait(30) == 0
    os.close(main)
