"""The certificate of the HTTP port: its files, and when they change."""

import errno
import os
import shutil
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.api.conftest import Reply
from tests.api.test_hostile_clients import GET, LARGE, read_all, until, with_window
from tests.certificates import make_certificate
from tgi.api.tls import ServerCertificate
from tgi.microkernel.errors import UserError

pytestmark = pytest.mark.slow


def test_one_file_may_hold_certificate_and_key(tmp_path: Path) -> None:
    made = make_certificate(tmp_path, "one")
    both = tmp_path / "both.pem"
    both.write_bytes(made.certfile.read_bytes() + made.keyfile.read_bytes())
    ServerCertificate(str(both), None)


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    one, two = make_certificate(tmp_path, "one"), make_certificate(tmp_path, "two")
    locked = make_certificate(tmp_path, "locked", "secret")
    absent, text = tmp_path / "absent.pem", tmp_path / "text.pem"
    text.write_text("hello")
    for certfile, keyfile, message in (
        (absent, one.keyfile, f"--ssl-certfile: {absent} cannot be read (No such file or directory). Name a PEM file."),
        (one.certfile, absent, f"--ssl-keyfile: {absent} cannot be read (No such file or directory). Name a PEM file."),
        (one.certfile, two.keyfile, f"The key {two.keyfile} does not belong to the certificate {one.certfile}."),
        (locked.certfile, locked.keyfile, f"The key {locked.keyfile} needs a passphrase. Give a key without one."),
        (text, one.keyfile, f"The certificate {text} with the key {one.keyfile} cannot be used"),
        (one.certfile, text, f"The certificate {one.certfile} with the key {text} cannot be used"),
        (one.certfile, None, f"{one.certfile} has no private key. Name the file of the key with --ssl-keyfile."),
    ):
        with pytest.raises(UserError) as raised:
            ServerCertificate(str(certfile), keyfile and str(keyfile))
        assert str(raised.value).startswith(message)


def test_changed_files_are_loaded_once_they_can_be_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    used, other = make_certificate(tmp_path, "used"), make_certificate(tmp_path, "other")
    certificate = ServerCertificate(str(used.certfile), str(used.keyfile))
    first = certificate.context
    certificate.reload_if_changed()
    assert certificate.context is first
    shutil.copy(other.certfile, used.certfile)  # the key follows later
    certificate.reload_if_changed()
    certificate.reload_if_changed()
    assert certificate.context is first
    assert caplog.text.count("The previous certificate stays in use") == 1
    os.replace(other.keyfile, used.keyfile)
    certificate.reload_if_changed()
    assert certificate.context is not first


def test_a_file_that_disappears_while_it_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_certificate(tmp_path, "one")
    certificate = ServerCertificate(str(made.certfile), str(made.keyfile))
    first = certificate.context

    def disappear(*arguments: Any, **options: Any) -> None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    with monkeypatch.context() as patch:
        patch.setattr(ssl.SSLContext, "load_cert_chain", disappear)
        os.utime(made.certfile)
        certificate.reload_if_changed()
    assert certificate.context is first
    os.utime(made.certfile)
    certificate.reload_if_changed()
    assert certificate.context is not first


def serve_tls(serve: Any, folder: Path, **settings: Any) -> tuple[Any, ssl.SSLContext]:
    """A front end, and how its clients connect."""
    made = make_certificate(folder, "server")
    front = serve(ssl_certfile=str(made.certfile), ssl_keyfile=str(made.keyfile), **settings)
    return front, ssl.create_default_context(cafile=str(made.certfile))


def test_the_last_response_of_a_connection_is_whole(serve: Any, tmp_path: Path) -> None:
    front, context = serve_tls(serve, tmp_path)
    with context.wrap_socket(with_window(front), server_hostname="127.0.0.1") as connection:
        connection.sendall(LARGE)
        received = connection.recv(1024)
        time.sleep(2.5)
        received += read_all(connection)
    reply = Reply(received)
    assert len(reply.body) == int(reply.headers["content-length"])


def test_a_response_that_is_not_read_is_ended(serve: Any, tmp_path: Path) -> None:
    front, context = serve_tls(serve, tmp_path, slow_reader_timeout=0.5)
    with context.wrap_socket(with_window(front), server_hostname="127.0.0.1") as connection:
        connection.sendall(LARGE)
        until(lambda: front.connections == 1)
        until(lambda: front.connections == 0)


def test_unfinished_handshakes_make_room(serve: Any, tmp_path: Path) -> None:
    front, context = serve_tls(serve, tmp_path, max_connections=10)
    silent = [front.connect() for _ in range(50)]
    for _ in range(5):
        with context.wrap_socket(front.connect(), server_hostname="127.0.0.1") as connection:
            connection.sendall(GET)
            assert b" 200 OK" in connection.recv(65536)
    for each in silent:
        each.close()


# A server with TLS in a process of its own, whose memory is measured. It prints its port.
SERVER = """
import asyncio, socket, sys
import uvloop
from tgi.api.http_server import HttpServer
from tgi.api.tls import ServerCertificate
from tgi.microkernel.settings.table import Settings

async def main():
    listening = socket.create_server(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    await HttpServer(None, Settings(), ServerCertificate(*sys.argv[1:])).serve([listening])

with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(main())
"""


def test_connections_that_come_and_go_leave_no_memory_behind(tmp_path: Path) -> None:
    made = make_certificate(tmp_path, "server")
    context = ssl.create_default_context(cafile=str(made.certfile))
    command = [sys.executable, "-c", SERVER, str(made.certfile), str(made.keyfile)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = "127.0.0.1", int(server.stdout.readline())
            process = psutil.Process(server.pid)

            def open_and_close(count: int) -> int:
                """Returns by how much `count` idle connections increase the memory of the server, in bytes."""
                before = process.memory_info().rss
                clients = [
                    context.wrap_socket(socket.create_connection(address), server_hostname=address[0])
                    for _ in range(count)
                ]
                taken = process.memory_info().rss - before
                for client in clients:
                    client.close()
                return taken

            open_and_close(100)
            until(lambda: not process.net_connections("tcp")[1:])
            before = process.memory_info().rss
            for _ in range(4):
                assert open_and_close(200) < 200 * (28 << 10)
                until(lambda: process.memory_info().rss < before + (2 << 20))
        finally:
            server.kill()


def test_plain_http_is_answered_in_words(serve: Any, tmp_path: Path) -> None:
    front, context = serve_tls(serve, tmp_path, read_timeout=1)
    with front.connect() as connection:
        connection.sendall(GET)
        reply = Reply(read_all(connection))
    assert reply.status == 400
    assert b"Begin the URL with https://" in reply.body
    with front.connect() as connection:  # silent: closed after the time for a handshake
        assert read_all(connection) == b""
    until(lambda: front.connections == 0)
    with context.wrap_socket(front.connect(), server_hostname="127.0.0.1") as connection:
        connection.sendall(GET)
        assert b" 200 OK" in connection.recv(65536)
