"""A running deployment while strangers and key holders attack its port: its streams stay exact, no process ends."""

import os
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgpack
import pytest
import zmq

from tests.live.server import Server
from tests.live.test_hosts import SCRIPTED, Hosts
from tgi.microkernel.links import curve
from tgi.microkernel.messages.codec import MAX_FRAME_BYTES
from tgi.microkernel.messages.protocol import MESSAGES, PROTOCOL, Add, Hello, SamplingParams, StepResult, encode

pytestmark = pytest.mark.live

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01"
PROMPTS = [(f"Prompt {n}", {"max_new_tokens": 40}) for n in range(4)]
MEMORY_GROWTH = 300 << 20  # bytes


@pytest.fixture(scope="module")
def attacked(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Hosts]]:
    """Serves on after each attack."""
    hosts = Hosts(tmp_path_factory.mktemp("hosts"), str(tiny_llama))
    with hosts.start_first() as first, hosts.other("second").start("worker", *SCRIPTED):
        first.wait_until_ready()
        yield first, hosts


def ids(streams: list[list[dict[str, object]]]) -> list[list[int]]:
    failed = [event for stream in streams for event in stream if "token" not in event]
    assert not failed, failed
    return [[event["token"]["id"] for event in stream] for stream in streams]  # type: ignore[index]


def unharmed(server: Server, attack: Callable[[threading.Event], None]) -> None:
    """Streams before and during the attack are the same, and the processes, too, with bounded memory."""
    expected = ids(server.stream_all(PROMPTS))
    processes = server.processes()
    before = processes["scheduler-0"].memory_info().rss
    over = threading.Event()
    attacker = threading.Thread(target=attack, args=(over,))
    attacker.start()
    try:
        for _ in range(2):
            assert ids(server.stream_all(PROMPTS)) == expected
    finally:
        over.set()
        attacker.join(60)
    assert ids(server.stream_all(PROMPTS)) == expected
    after = {name: process.pid for name, process in server.processes().items()}
    assert after == {name: process.pid for name, process in processes.items()}, server.output_text()
    grown = processes["scheduler-0"].memory_info().rss - before
    assert grown < MEMORY_GROWTH


def curve_greeting(mechanism: bytes = b"CURVE", version: bytes = b"\x03\x01") -> bytes:
    return b"\xff" + bytes(8) + b"\x7f" + version + mechanism.ljust(20, b"\0") + bytes(32)


def test_hostile_bytes_before_the_handshake(attacked: tuple[Server, Hosts]) -> None:
    server, hosts = attacked
    port = int(hosts.address.rpartition(":")[2])
    chance = random.Random(5)

    def command(name: bytes, body: bytes) -> bytes:
        payload = bytes([len(name)]) + name + body
        return b"\x06" + struct.pack(">Q", len(payload)) + payload

    def opening() -> bytes:
        return chance.choice(
            [
                chance.randbytes(chance.randint(1, 300)),
                b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
                curve_greeting(b"NULL") + command(b"READY", b""),
                curve_greeting(b"PLAIN") + command(b"HELLO", b"\x05admin\x05admin"),
                curve_greeting(b"GSSAPI"),
                curve_greeting(version=b"\xff\xff"),
                curve_greeting() + chance.randbytes(200),
                curve_greeting() + command(b"HELLO", chance.randbytes(194)),
                curve_greeting() + command(b"INITIATE", chance.randbytes(300)),
                curve_greeting() + command(b"ERROR", b"\xff"),
                curve_greeting() + b"\x06" + struct.pack(">Q", 2**63),  # a frame of any size
                curve_greeting() + b"\x06" + struct.pack(">Q", MAX_FRAME_BYTES) + bytes(1 << 16),
                curve_greeting() + b"\x02" + struct.pack(">Q", MAX_FRAME_BYTES - 1) + bytes(1 << 20),
                GREETING[: chance.randint(1, len(GREETING))],
            ]
        )

    def attack(over: threading.Event) -> None:
        open_ones: list[socket.socket] = []
        while not over.wait(0.005):
            one = socket.socket()
            one.settimeout(1)
            try:
                one.connect(("127.0.0.1", port))
                one.sendall(opening())
            except OSError:
                pass
            open_ones.append(one)
            if len(open_ones) > 200:
                open_ones.pop(chance.randrange(200)).close()
        for one in open_ones:
            one.close()

    unharmed(server, attack)


def hostile_frames(chance: random.Random) -> Iterator[list[bytes]]:
    """Multipart messages that a peer with keys may send after its Hello."""
    numbers = [-(2**63), -1, 0, 1, 2**31, 2**32, 2**64 - 1]
    valid = Add(1, b"\1\0\0\0" * 4, 3, encode(SamplingParams(1)))
    while True:
        kind = chance.randrange(8)
        if kind == 0:
            yield [chance.randbytes(chance.randint(1, 400)) for _ in range(chance.randint(1, 5))]
        elif kind == 1:  # any tag with fields of any type
            fields = [
                chance.choice([None, True, 1.5, "a", b"b", [], {}, *numbers]) for _ in range(chance.randint(0, 9))
            ]
            yield [msgpack.packb([chance.randrange(len(MESSAGES) + 1), *fields])]
        elif kind == 2:
            name = chance.choice(["rid", "max_new_tokens", "prompt_logprobs_from", "prompt_top_n", "context"])
            number: object = chance.choice(numbers)
            if name == "context":
                part = chance.choice(["request_key", "request_index", "weight", "deadline_ms", "waited_ms"])
                number = valid.context._replace(**{part: number})
            yield [encode(valid._replace(**{name: number}))]
        elif kind == 3:
            name = chance.choice(["prompt_ids", "stop_ids", "resume_ids", "sampling", "cache_salt"])
            yield [
                encode(valid._replace(**{"rid": chance.randrange(99), name: chance.randbytes(chance.randint(0, 99))}))
            ]
        elif kind == 4:  # other processes than it is, again and again
            role = chance.choice(["tokenizer", "worker", "scheduler", "api", "", "x" * 1000])
            yield [encode(Hello(PROTOCOL, role, chance.choice(numbers), chance.randbytes(8), site="z"))]
        elif kind == 5:
            yield [encode(StepResult(chance.choice(numbers), chance.choice(numbers), b"\1", bytes(4), bytes(4)))]
        elif kind == 6:
            yield [b""] * 50  # probes of new connections
        else:
            yield [encode(valid._replace(prompt_ids=bytes(1 << 20), sampling=b""))]


@pytest.mark.parametrize("role", ["tokenizer", "worker", "api"])
def test_hostile_messages_of_a_peer_with_keys(attacked: tuple[Server, Hosts], role: str) -> None:
    server, hosts = attacked
    keys = curve.load_host_keys(hosts.keys / "host.key")
    chance = random.Random(role)
    sent = 0

    def attack(over: threading.Event) -> None:
        nonlocal sent
        context = zmq.Context()
        peer = context.socket(zmq.DEALER)
        peer.linger = 0
        peer.sndtimeo = 1000
        curve.use_connecting_keys(peer, keys)
        peer.connect(hosts.address)
        peer.send(encode(Hello(PROTOCOL, role, 0, os.urandom(8), site="hostile")))
        for frames in hostile_frames(chance):
            if over.is_set():
                break
            try:
                peer.send_multipart(frames)
            except zmq.Again:
                continue
            sent += 1
            while peer.poll(0):
                peer.recv_multipart()
            if sent % 20 == 0:
                over.wait(0.005)
        peer.close()
        context.term()

    unharmed(server, attack)
    assert sent > 100
