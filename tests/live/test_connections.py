"""Hostile and unlucky clients against real servers: floods of connections, half requests, TLS."""

import contextlib
import os
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.certificates import make_certificate
from tests.live.server import CLIENT_OPTIONS, TIMEOUT_SECONDS, Server

pytestmark = pytest.mark.live

SCRIPTED = ("--worker", "scripted", "--scripted-step-us", "20000", "--validation-workers", "1")
HEAD = b"POST /generate HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: 1900000\r\n\r\n"


@pytest.fixture
def server(tiny_llama: Path, tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path / "run", "--model-id", str(tiny_llama), *SCRIPTED) as server:
        yield server


def start_with_file_limit(server: Server, limit: str, *arguments: str) -> None:
    """Starts `tgi up` below a shell that has set a limit of open files: `ulimit LIMIT`."""
    command = [sys.executable, "-m", "tgi", "up", "--hostname", "127.0.0.1", "--port", str(server.port)]
    shell = ["sh", "-c", f'ulimit {limit}; exec "$@"', "sh"]
    server.launch("up", [*shell, *command, *server.arguments, *arguments], server.environment).wait_until_ready()


def connect(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT_SECONDS)


def is_served(server: Server) -> None:
    """Sends a request over a new connection."""
    body = {"inputs": "Hello", "parameters": {"max_new_tokens": 3}}
    answer = httpx.post(f"{server.url}/generate", json=body, **CLIENT_OPTIONS)
    assert answer.status_code == 200, answer.text


def test_the_soft_limit_of_open_files_is_raised(server: Server) -> None:
    start_with_file_limit(server, "-S -n 1024", "--api-workers", "2")
    for process in server.processes().values():
        soft, hard = process.rlimit(psutil.RLIMIT_NOFILE)
        assert soft == hard
    connections = [connect(server) for _ in range(1100)]
    is_served(server)
    assert "refused" not in server.output_text()
    for connection in connections:
        connection.close()


@pytest.mark.parametrize("front_ends", ["1", "2"])
def test_idle_connections_beyond_the_hard_limit_disturb_no_client(server: Server, front_ends: str) -> None:
    start_with_file_limit(server, "-n 600", "--api-workers", front_ends)
    stream = server.stream("Hello", max_new_tokens=100)
    next(stream)
    connections = []
    for _ in range(1100):
        connections.append(connect(server))
        if len(connections) % 100 == 0:
            is_served(server)
    server.wait_until(lambda: "connections of this front end are in use" in server.output_text(), "it is logged")
    assert "refused 0" in server.output_text()
    assert len(list(stream)) == 99
    for connection in connections:
        connection.close()


def test_unfinished_bodies_neither_fill_the_memory_nor_delay_others(server: Server) -> None:
    server.start("up", "--read-timeout", "3").wait_until_ready()
    is_served(server)
    front_end = server.processes()["api-0"]
    before = front_end.memory_info().rss
    connections = [connect(server) for _ in range(300)]
    for connection in connections:
        with contextlib.suppress(ConnectionError):  # some are ended while they are sent
            connection.sendall(HEAD + b"x" * 1_850_000)
    is_served(server)
    assert front_end.memory_info().rss - before < 200 << 20
    for connection in connections:
        with contextlib.suppress(ConnectionError):
            answer = connection.recv(65536)
            assert answer == b"" or answer.startswith(b"HTTP/1.1 408 ")
        connection.close()
    is_served(server)


# --- TLS ---


def peer_name(server: Server, certfile: Path) -> str:
    """The common name of the certificate that a new connection is shown. It must be the one in `certfile`."""
    context = ssl.create_default_context(cafile=str(certfile))
    with context.wrap_socket(connect(server), server_hostname="127.0.0.1") as connection:
        certificate = connection.getpeercert()
        assert certificate is not None
        return dict(item[0] for item in certificate["subject"])["commonName"]  # type: ignore[misc, index, no-any-return]


def test_https_and_a_changed_certificate(tiny_llama: Path, tmp_path: Path) -> None:
    used, other = make_certificate(tmp_path, "used"), make_certificate(tmp_path, "other")
    with Server(
        tmp_path / "run", "--model-id", str(tiny_llama), *SCRIPTED, "--api-workers", "2",
        "--ssl-certfile", str(used.certfile), "--ssl-keyfile", str(used.keyfile),
    ) as server:  # fmt: skip
        server.start().wait_until_ready()
        server.wait_until(lambda: f"on https://127.0.0.1:{server.port}" in server.output_text(), "the summary is shown")
        trusted = ssl.create_default_context(cafile=str(used.certfile))
        answer = httpx.get(f"{server.url}/info", verify=trusted, trust_env=False, timeout=TIMEOUT_SECONDS)
        assert answer.status_code == 200
        with connect(server) as plain:  # HTTP to the HTTPS port
            plain.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                assert b"200" not in plain.recv(65536)
        assert peer_name(server, used.certfile) == "used"
        stream = server.stream("Hello", max_new_tokens=200)
        next(stream)
        with httpx.Client(verify=trusted, trust_env=False, timeout=TIMEOUT_SECONDS) as kept:
            assert kept.get(f"{server.url}/info").status_code == 200
            kept_certificate = used.certfile.read_bytes()
            os.replace(other.keyfile, used.keyfile)
            os.replace(other.certfile, used.certfile)
            server.wait_until(lambda: server.output_text().count("Loaded the changed certificate") == 2, "it is loaded")
            assert kept.get(f"{server.url}/info").status_code == 200  # over the same connection
        assert {peer_name(server, used.certfile) for _ in range(10)} == {"other"}
        old = tmp_path / "old.pem"
        old.write_bytes(kept_certificate)
        with pytest.raises(ssl.SSLError):
            peer_name(server, old)
        assert len(list(stream)) == 199
        server.kill("api-0")
        is_served(server)


def test_idle_connections_over_tls_make_room(tiny_llama: Path, tmp_path: Path) -> None:
    used = make_certificate(tmp_path, "used")
    with Server(
        tmp_path / "run", "--model-id", str(tiny_llama), *SCRIPTED, "--max-connections", "20", "--read-timeout", "2",
        "--ssl-certfile", str(used.certfile), "--ssl-keyfile", str(used.keyfile),
    ) as server:  # fmt: skip
        server.start().wait_until_ready()
        context = ssl.create_default_context(cafile=str(used.certfile))
        connections = [context.wrap_socket(connect(server), server_hostname="127.0.0.1") for _ in range(40)]
        is_served(server)
        silent = [connect(server) for _ in range(40)]  # they begin no handshake, which is ended after the time limit
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while True:
            with contextlib.suppress(httpx.TransportError):
                is_served(server)
                break
            assert time.monotonic() < deadline
        for connection in [*connections, *silent]:
            connection.close()


def test_wrong_files_are_reported_before_anything_starts(tmp_path: Path) -> None:
    one, two = make_certificate(tmp_path, "one"), make_certificate(tmp_path, "two")
    for flags, message in (
        (("--ssl-certfile", one.certfile, "--ssl-keyfile", two.keyfile), "does not belong to the certificate"),
        (("--ssl-keyfile", one.keyfile), "`ssl_keyfile` is set, but no `ssl_certfile` is given"),
        (("--ssl-certfile", tmp_path / "none.pem"), "cannot be read (No such file or directory)"),
    ):
        command = [sys.executable, "-m", "tgi", "up", *map(str, flags)]
        ended = subprocess.run(
            command, capture_output=True, text=True, env=os.environ | {"TGI_RUN": str(tmp_path / "r")}
        )
        assert ended.returncode != 0
        assert message in ended.stderr
        assert "Traceback" not in ended.stderr
