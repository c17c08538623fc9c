"""Readers of each server's streams, with recorded bytes: 12 prompt tokens, 6 generated."""

import re
import socket
from pathlib import Path

import pytest

from scripts.benchmarks.peers import PEERS, Counted, ours
from scripts.benchmarks.streams import BadStream, Stream, burst

pytestmark = pytest.mark.slow

STREAMS = Path(__file__).parent / "streams"  # NAME.http: a complete response of the server NAME, with its head
READERS = {"ours": ours(), **PEERS}
RECORDED = sorted(path.stem for path in STREAMS.glob("*.http"))


def read_in(size: int, raw: bytes) -> Stream:
    """`raw` as a stream of reads of `size` bytes; the time of each read is the number of bytes before it."""
    return Stream(-1.0, [(float(at), raw[at : at + size]) for at in range(0, len(raw), size)])


def recorded(name: str) -> bytes:
    return (STREAMS / f"{name}.http").read_bytes()


def test_every_server_has_a_recording() -> None:
    """scripts/benchmarks/record_streams.py creates them."""
    assert sorted(READERS) == RECORDED


@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize("size", [1, 7, 100, 1 << 20])
def test_tokens_and_times_do_not_depend_on_the_chunks(name: str, size: int) -> None:
    raw = recorded(name)
    counted = READERS[name].read(read_in(size, raw))
    events = [match.start() for match in re.finditer(b"data: {", raw)][:6]
    assert counted == Counted(12, 6, [float(at // size * size) for at in events])


@pytest.mark.parametrize("name", RECORDED)
def test_a_truncated_stream_is_an_error(name: str) -> None:
    raw = recorded(name)
    fourth = [match.start() for match in re.finditer(b"data: {", raw)][3]
    with pytest.raises(BadStream, match="a stream without an end"):
        READERS[name].read(read_in(100, raw[: raw.rindex(b"}", 0, fourth) + 5]))


def test_errors_contain_the_server_s_message() -> None:
    rejection = b'HTTP/1.1 422 Unprocessable Entity\r\ncontent-length: 4\r\n\r\n{"error":"too long"}'
    with pytest.raises(BadStream, match=r"422.*too long"):
        ours().read(read_in(100, rejection))
    head = b"HTTP/1.1 200 OK\r\n\r\n"
    with pytest.raises(BadStream, match=r"no token: .*out of memory"):
        ours().read(read_in(100, head + b'data: {"error":"out of memory"}\n\n'))
    with pytest.raises(BadStream, match=r"not JSON: .*half"):
        ours().read(read_in(100, head + b'data: {"half\n\n'))
    with pytest.raises(BadStream, match="without an end"):
        ours().read(read_in(100, head))
    with pytest.raises(BadStream, match="no answer"):
        ours().read(Stream(0.0, []))


def test_a_silent_server_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(BadStream, match=r"no end after 0\.1 s"):
        burst(silent.getsockname()[1], "/", [{}, {}], 0.1)
