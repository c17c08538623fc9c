"""Links over real sockets: lives are noticed in any start order, and nothing crosses from one life to the next."""

import gc
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from tgi.kernel.errors import UserError
from tgi.kernel.link import Gone, Link, Peer
from tgi.kernel.messages import Cancel
from tgi.kernel.presence import PROTOCOL, Hello


def hello(role: str, place: int = 0, model: str = "", protocol: int = PROTOCOL) -> Hello:
    return Hello(protocol, role, place, os.urandom(8), model)


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/link"


@pytest.fixture
def links() -> Iterator[Callable[[Link], Link]]:
    made: list[Link] = []

    def keep(link: Link) -> Link:
        made.append(link)
        return link

    yield keep
    for link in made:
        if not link.socket.closed:
            link.close()


def until(links: list[Link], done: Callable[[list[list[tuple[Peer, Any]]]], bool]) -> list[list[tuple[Peer, Any]]]:
    """Receives on all links until `done` holds for what each has heard."""
    heard: list[list[tuple[Peer, Any]]] = [[] for _ in links]
    end = time.monotonic() + 30
    while not done(heard):
        assert time.monotonic() < end, heard
        for link, said in zip(links, heard, strict=True):
            said.extend(link.receive())
        time.sleep(0.002)
    return heard


@pytest.mark.parametrize("connect_first", [True, False])
def test_both_sides_greet_in_any_order(address: str, links: Any, connect_first: bool) -> None:
    def lower() -> Link:
        return links(Link.bind(address, hello("scheduler")))

    def upper() -> Link:
        return links(Link.connect(address, hello("tokenizer", 1)))

    if connect_first:
        up = upper()
        time.sleep(0.1)
        low = lower()
    else:
        low, up = lower(), upper()
    at_low, at_up = until([low, up], lambda heard: all(heard))
    assert at_low[0][1] == up.me
    assert at_up[0][1] == low.me
    assert [peer.role for peer in low.peers] == ["tokenizer"]


def looked(watcher: Link) -> list[tuple[Peer, Any]]:
    """What a link hears that sends nothing itself, once its monitor has told of a broken connection."""
    assert watcher.monitor.poll(30_000)
    watcher.look()
    return list(watcher.receive())


def test_the_binding_side_sees_who_of_several_has_left(address: str, links: Any) -> None:
    low = links(Link.bind(address, hello("scheduler")))
    first, second = (links(Link.connect(address, hello("tokenizer", place))) for place in (0, 1))
    until([low, first, second], lambda heard: all(heard) and len(heard[0]) == 2)
    first.close()
    heard = looked(low)
    assert [(peer.place, event) for peer, event in heard] == [(0, Gone())]
    assert [peer.place for peer in low.peers] == [1]
    assert list(second.receive()) == []  # it was asked whether it is there, and that is nobody's business


def test_the_connecting_side_sees_the_other_leave_and_come_back(address: str, links: Any) -> None:
    low = links(Link.bind(address, hello("scheduler")))
    up = links(Link.connect(address, hello("tokenizer")))
    until([low, up], lambda heard: all(heard))
    low.close()
    assert [event for _, event in looked(up)] == [Gone()]
    again = links(Link.bind(address, hello("scheduler")))
    _, heard = until([again, up], lambda heard: all(heard))
    assert [event for _, event in heard] == [again.me]
    up.look()
    assert list(up.receive()) == []  # the old break is not told again
    assert up.peers


def test_a_break_that_is_seen_late_is_not_taken_for_the_new_connection(address: str, links: Any) -> None:
    low = links(Link.bind(address, hello("scheduler")))
    up = links(Link.connect(address, hello("tokenizer")))
    until([low, up], lambda heard: all(heard))
    low.close()
    again = links(Link.bind(address, hello("scheduler")))
    _, heard = until([again, up], lambda heard: all(heard))  # without a look in between
    assert [event for _, event in heard] == [Gone(), again.me]
    up.look()
    assert list(up.receive()) == []
    assert up.peers


def test_messages_of_one_flush_keep_their_order(address: str, links: Any) -> None:
    low = links(Link.bind(address, hello("scheduler")))
    up = links(Link.connect(address, hello("tokenizer")))
    until([low, up], lambda heard: all(heard))
    (peer,) = up.peers
    for rid in range(1000):
        up.send(peer, Cancel(rid))
    up.flush()
    heard, _ = until([low, up], lambda heard: len(heard[0]) == 1000)
    assert [message.rid for _, message in heard] == list(range(1000))


def test_restarted_router_is_a_new_life_and_old_messages_are_lost(address: str, links: Any) -> None:
    low = links(Link.bind(address, hello("scheduler")))
    up = links(Link.connect(address, hello("tokenizer")))
    until([low, up], lambda heard: all(heard))
    (old,) = up.peers
    low.close()
    time.sleep(0.1)
    up.send(old, Cancel(7))
    up.flush()
    low = links(Link.bind(address, hello("scheduler")))
    at_low, at_up = until([low, up], lambda heard: bool(heard[0]) and any(m == low.me for _, m in heard[1]))
    assert (old, Gone()) in at_up
    assert not any(isinstance(message, Cancel) for _, message in at_low)


def test_restarted_dealer_replaces_its_old_life(address: str, links: Any) -> None:
    low = links(Link.bind(address, hello("scheduler")))
    first = links(Link.connect(address, hello("worker")))
    until([low, first], lambda heard: all(heard))
    (old,) = low.peers
    first.close()
    second = links(Link.connect(address, hello("worker")))
    at_low, _ = until([low, second], lambda heard: all(heard))
    assert [message for _, message in at_low] == [Gone(), second.me]
    assert at_low[0][0] == old


def test_sending_to_a_dead_dealer_says_gone(address: str, links: Any) -> None:
    low = links(Link.bind(address, hello("scheduler")))
    up = links(Link.connect(address, hello("tokenizer")))
    until([low, up], lambda heard: all(heard))
    (peer,) = low.peers
    up.close()

    def gone(heard: list[list[tuple[Peer, Any]]]) -> bool:
        low.send(peer, Cancel(1))
        low.flush()
        return bool(heard[0])

    assert until([low], gone)[0] == [(peer, Gone())]
    assert low.peers == {}


@pytest.mark.parametrize("stranger", [hello("worker", protocol=PROTOCOL + 1), hello("worker", model="b")])
def test_misfits_are_refused_in_words(address: str, links: Any, stranger: Hello, caplog: Any) -> None:
    low = links(Link.bind(address, hello("scheduler", model="a")))
    up = links(Link.connect(address, stranger))
    end = time.monotonic() + 30
    while "refused this process" not in caplog.text and time.monotonic() < end:
        for link in (low, up):
            list(link.receive())
        time.sleep(0.002)
    assert "refused this process" in caplog.text or "refused worker-0" in caplog.text
    assert low.peers == {}


def test_garbage_is_dropped_and_the_link_lives_on(address: str, links: Any) -> None:
    low = links(Link.bind(address, hello("scheduler")))
    raw = zmq.Context.instance().socket(zmq.DEALER)
    raw.connect(address)
    for junk in (b"\x00", b"\xc1", b"\x91\x7f", b"\x93\x00\x01", os.urandom(100), b"\x92\x08\xa1x"):
        raw.send(junk)
    up = links(Link.connect(address, hello("tokenizer")))
    at_low, _ = until([low, up], lambda heard: all(heard))
    assert [message for _, message in at_low] == [up.me]
    raw.close(0)


def test_a_forgotten_link_leaves_the_others_alone(address: str, links: Any, tmp_path: Path) -> None:
    """Not even one whose socket is still known to somebody, while nobody hears of its breaks any more."""
    low = Link.bind(f"ipc://{tmp_path}/forgotten", hello("scheduler"))
    up = links(Link.connect(f"ipc://{tmp_path}/forgotten", hello("worker")))
    until([low, up], all)
    socket = low.socket
    del low
    gc.collect()
    up.close()
    until([links(Link.bind(address, hello("scheduler"))), links(Link.connect(address, hello("worker")))], all)
    assert socket.closed


def test_bad_addresses_are_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="100"):
        Link.bind(f"ipc://{tmp_path}/{'x' * 120}", hello("scheduler"))
    with pytest.raises(UserError, match="CURVE"):
        Link.bind("tcp://0.0.0.0:7777", hello("scheduler"))
