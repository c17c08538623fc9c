"""Streams whose clients do not read: parked, continued without a lost token, ended after the limit."""

import json
import socket
import time
from pathlib import Path

import pytest

from tests.live.server import TIMEOUT_SECONDS, Server

pytestmark = pytest.mark.live

# Large events, so that socket buffers hold few of them.
PARAMETERS = {"max_new_tokens": 6000, "top_n_tokens": 5, "details": True}
FLAGS = ("--worker", "scripted", "--scripted-step-us", "200", "--max-total-tokens", "8192")


class SlowClient:
    """A stream over a socket with a small receive buffer, which is read only on request."""

    def __init__(self, server: Server, inputs: str) -> None:
        body = json.dumps({"inputs": inputs, "parameters": PARAMETERS}).encode()
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.settimeout(TIMEOUT_SECONDS)
        self.socket.connect(("127.0.0.1", server.port))
        head = "POST /generate_stream HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
        self.socket.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)

    def read_all(self) -> bytes:
        """What comes until the connection ends, without the headers of chunks. Raises ConnectionError at a reset."""
        parts = []
        while part := self.socket.recv(1 << 16):
            parts.append(part)
        raw = b"".join(parts).partition(b"\r\n\r\n")[2]
        chunks = []
        while raw:
            size, _, raw = raw.partition(b"\r\n")
            chunks.append(raw[: int(size, 16)])
            raw = raw[int(size, 16) + 2 :]
        return b"".join(chunks)

    def close(self) -> None:
        self.socket.close()


def tokens(stream: bytes) -> list[int]:
    return [json.loads(line[5:])["token"]["id"] for line in stream.split(b"\n") if line.startswith(b"data:")]


def test_a_stream_that_is_not_read_is_parked_and_continues(tiny_llama: Path, tmp_path: Path) -> None:
    with Server(tmp_path / "run", "--model-id", str(tiny_llama), *FLAGS) as server:
        server.start().wait_until_ready()
        expected = server.generate("slow", **PARAMETERS)
        client = SlowClient(server, "slow")
        server.wait_until(lambda: server.metric("tgi_parked_requests") >= 1, "the stream is parked")
        server.wait_until(lambda: server.metric("tgi_batch_current_size") == 0, "it takes no steps")
        got = tokens(client.read_all())
        client.close()
        assert got == [token["id"] for token in expected["details"]["tokens"]]
        assert len(got) == PARAMETERS["max_new_tokens"]


def test_a_client_that_never_reads_is_ended(tiny_llama: Path, tmp_path: Path) -> None:
    with Server(tmp_path / "run", "--model-id", str(tiny_llama), *FLAGS, "--slow-reader-timeout", "3") as server:
        server.start().wait_until_ready()
        client = SlowClient(server, "slow")
        server.wait_until(lambda: server.metric("tgi_parked_requests") >= 1, "the stream is parked")
        server.wait_until(lambda: server.metric("tgi_request_failure") >= 1, "it is ended")
        assert "read too little" in server.output_text()
        time.sleep(0.1)
        client.close()
        server.generate("next", max_new_tokens=3)
