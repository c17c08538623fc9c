"""What a message costs on its way between two processes, counted in calls and instructions.

The budgets are what it costs today: see tests/api/test_cost.py. What a token costs the four processes on top of their
own work at one stream is mostly this.
"""

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.counting import cost, per_item
from tgi.kernel.answer import Texts
from tgi.kernel.link import Link, Peer
from tgi.kernel.messages import Tokens, decode, encode
from tgi.kernel.pack import FLOAT32, INT32, UINT32, pack
from tgi.kernel.presence import PROTOCOL, Hello


def tokens(count: int) -> Tokens:
    return Tokens(
        pack(UINT32, range(count)), pack(UINT32, [1] * count), pack(INT32, [5] * count), pack(FLOAT32, [-1.5] * count)
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

    def send(self, up: bool) -> Peer:
        """A message of one row leaves."""
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
def test_a_message_that_leaves(pair: Pair, up: bool, calls: int, instructions: int) -> None:
    found = cost(partial(pair.send, up))
    assert found.within(calls, instructions), found


@pytest.mark.parametrize(("up", "calls", "instructions"), [(True, 27, 362), (False, 23, 313)])
def test_a_message_that_comes(pair: Pair, up: bool, calls: int, instructions: int) -> None:
    link = pair.up if up else pair.down
    for _ in link.receive():
        pass
    pair.send(up)
    link.socket.poll(10_000)
    heard: list[tuple[Peer, object]] = []
    found = cost(lambda: heard.extend(link.receive()))
    assert [message for _, message in heard] == [ONE]
    assert found.within(calls, instructions), found


def there_and_back(message: tuple[object, ...]) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize("message", [tokens, texts])
def test_a_row_more_in_a_message(message: Callable[[int], tuple[object, ...]]) -> None:
    found = per_item(lambda count: partial(there_and_back, message(count)))
    assert found.within(calls=0, instructions=0), found


def test_a_link_that_is_silent(pair: Pair) -> None:
    found = cost(lambda: [*pair.down.receive()])
    assert found.within(calls=4, instructions=60), found
