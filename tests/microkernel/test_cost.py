"""The cost of a message between two processes, in calls and instructions.

The ceilings are the current costs, see tests/api/test_cost.py. With one stream they are most of the overhead per token.
"""

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.counting import cost, per_item
from tgi.microkernel.codec import FLOAT32, INT32, UINT32, pack_column
from tgi.microkernel.link import Link, PeerId
from tgi.microkernel.protocol import PROTOCOL, Hello, Texts, Tokens, decode, encode


def tokens(count: int) -> Tokens:
    return Tokens(
        pack_column(UINT32, range(count)),
        pack_column(UINT32, [1] * count),
        pack_column(INT32, [5] * count),
        pack_column(FLOAT32, [-1.5] * count),
    )


def texts(count: int) -> Texts:
    return Texts(*tokens(count)[:4], bytes(count), ["word"] * count)


ONE = tokens(1)


class Pair:
    """A tokenizer's link to a scheduler, both in this thread."""

    def __init__(self, folder: Path) -> None:
        self.down = Link.connect(f"ipc://{folder}/link", Hello(PROTOCOL, "tokenizer", 0, os.urandom(8)))
        self.up = Link.bind(f"ipc://{folder}/link", Hello(PROTOCOL, "scheduler", 0, os.urandom(8)))
        while not (self.down.peers and self.up.peers):
            for link in (self.down, self.up):
                link.socket.poll(10)
                for _ in link.receive():
                    pass

    def send(self, up: bool) -> PeerId:
        """Sends a message of one row."""
        link = self.down if up else self.up
        (peer,) = link.peers
        link.send(peer, ONE)
        link.flush()
        return peer

    def close(self) -> None:
        self.down.close()
        self.up.close()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = Pair(tmp_path_factory.mktemp("links"))
    yield made
    made.close()


@pytest.mark.parametrize(("up", "calls", "instructions"), [(True, 9, 143), (False, 10, 173)])
def test_cost_of_sending_a_message(pair: Pair, up: bool, calls: int, instructions: int) -> None:
    found = cost(partial(pair.send, up))
    assert found.within(calls, instructions), found


@pytest.mark.parametrize(("up", "calls", "instructions"), [(True, 26, 382), (False, 22, 330)])
def test_cost_of_receiving_a_message(pair: Pair, up: bool, calls: int, instructions: int) -> None:
    link = pair.up if up else pair.down
    for _ in link.receive():
        pass
    pair.send(up)
    link.socket.poll(10_000)
    received: list[tuple[PeerId, object]] = []
    found = cost(lambda: received.extend(link.receive()))
    assert [message for _, message in received] == [ONE]
    assert found.within(calls, instructions), found


def round_trip(message: tuple[object, ...]) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize("message", [tokens, texts])
def test_cost_of_one_more_row_in_a_message(message: Callable[[int], tuple[object, ...]]) -> None:
    found = per_item(lambda count: partial(round_trip, message(count)))
    assert found.within(calls=0, instructions=0), found


def test_cost_of_an_idle_link(pair: Pair) -> None:
    found = cost(lambda: [*pair.down.receive()])
    assert found.within(calls=4, instructions=56), found
