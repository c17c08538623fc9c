"""What each server's stream says, from bytes that it has sent: 12 tokens in, 6 out."""

import re
import socket
from pathlib import Path

import pytest

from scripts.beside.peers import PEERS, Counted, ours
from scripts.beside.streams import BadStream, Stream, burst

STREAMS = Path(__file__).parent / "streams"  # NAME.http: a whole answer with its head, as the server NAME sent it
READERS = {"ours": ours(), **PEERS}
RECORDED = sorted(path.stem for path in STREAMS.glob("*.http"))


def read_in(size: int, raw: bytes) -> Stream:
    """The stream of `raw`, come in reads of so many bytes; the time of each is the number of bytes before it."""
    return Stream(-1.0, [(float(at), raw[at : at + size]) for at in range(0, len(raw), size)])


def recorded(name: str) -> bytes:
    return (STREAMS / f"{name}.http").read_bytes()


def test_every_server_was_recorded() -> None:
    """By scripts/beside/record.py."""
    assert sorted(READERS) == RECORDED


@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize("size", [1, 7, 100, 1 << 20])
def test_tokens_and_times_however_the_bytes_come(name: str, size: int) -> None:
    raw = recorded(name)
    counted = READERS[name].read(read_in(size, raw))
    events = [match.start() for match in re.finditer(b"data: {", raw)][:6]
    assert counted == Counted(12, 6, [float(at // size * size) for at in events])


@pytest.mark.parametrize("name", RECORDED)
def test_a_stream_that_breaks_off_is_an_error(name: str) -> None:
    raw = recorded(name)
    fourth = [match.start() for match in re.finditer(b"data: {", raw)][3]
    with pytest.raises(BadStream, match="a stream without an end"):
        READERS[name].read(read_in(100, raw[: raw.rindex(b"}", 0, fourth) + 5]))


def test_errors_say_what_the_server_said() -> None:
    refusal = b'HTTP/1.1 422 Unprocessable Entity\r\ncontent-length: 4\r\n\r\n{"error":"too long"}'
    with pytest.raises(BadStream, match=r"422.*too long"):
        ours().read(read_in(100, refusal))
    head = b"HTTP/1.1 200 OK\r\n\r\n"
    with pytest.raises(BadStream, match=r"no token: .*out of memory"):
        ours().read(read_in(100, head + b'data: {"error":"out of memory"}\n\n'))
    with pytest.raises(BadStream, match=r"not JSON: .*half"):
        ours().read(read_in(100, head + b'data: {"half\n\n'))
    with pytest.raises(BadStream, match="without an end"):
        ours().read(read_in(100, head))
    with pytest.raises(BadStream, match="no answer"):
        ours().read(Stream(0.0, []))


def test_a_server_that_falls_silent_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(BadStream, match=r"no end after 0\.1 s"):
        burst(silent.getsockname()[1], "/", [{}, {}], 0.1)
