"""Links over real sockets: handshakes, disconnects and restarts in any order."""

import gc
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import zmq

from tgi.microkernel.errors import UserError
from tgi.microkernel.links.link import Link, PeerDisconnected, PeerId, end_sessions
from tgi.microkernel.messages.protocol import PROTOCOL, Cancel, Hello, LastExit


def hello(role: str, replica: int = 0, model: str = "", protocol: int = PROTOCOL) -> Hello:
    return Hello(protocol, role, replica, os.urandom(8), model)


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


def until(links: list[Link], done: Callable[[list[list[tuple[PeerId, Any]]]], bool]) -> list[list[tuple[PeerId, Any]]]:
    """Receives on all links until `done` holds for the events of each."""
    received: list[list[tuple[PeerId, Any]]] = [[] for _ in links]
    end = time.monotonic() + 30
    while not done(received):
        assert time.monotonic() < end, received
        for link, messages in zip(links, received, strict=True):
            messages.extend(link.receive())
        time.sleep(0.002)
    return received


@pytest.mark.parametrize("connect_first", [True, False])
def test_handshake_in_any_start_order(address: str, links: Any, connect_first: bool) -> None:
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
    at_low, at_up = until([low, up], lambda received: all(received))
    assert at_low[0][1] == up.own_hello
    assert at_up[0][1] == low.own_hello
    assert [peer.role for peer in low.peers] == ["tokenizer"]


def events_after_disconnect(watcher: Link) -> list[tuple[PeerId, Any]]:
    """The events of a link without traffic after its monitor has reported a broken connection."""
    assert watcher.monitor.poll(30_000)
    watcher.detect_disconnects()
    return list(watcher.receive())


def test_router_detects_which_peer_disconnected(address: str, links: Any) -> None:
    low = links(Link.bind(address, hello("scheduler")))
    first, second = (links(Link.connect(address, hello("tokenizer", replica))) for replica in (0, 1))
    until([low, first, second], lambda received: all(received) and len(received[0]) == 2)
    first.close()
    received = events_after_disconnect(low)
    assert [(peer.replica, event) for peer, event in received] == [(0, PeerDisconnected())]
    assert [peer.replica for peer in low.peers] == [1]
    assert list(second.receive()) == []  # the liveness probe is not delivered


def test_dealer_detects_disconnect_and_reconnect(address: str, links: Any) -> None:
    low = links(Link.bind(address, hello("scheduler")))
    up = links(Link.connect(address, hello("tokenizer")))
    until([low, up], lambda received: all(received))
    low.close()
    assert [event for _, event in events_after_disconnect(up)] == [PeerDisconnected()]
    again = links(Link.bind(address, hello("scheduler")))
    _, received = until([again, up], lambda received: all(received))
    assert [event for _, event in received] == [again.own_hello]
    up.detect_disconnects()
    assert list(up.receive()) == []  # the old disconnect is not reported again
    assert up.peers


def test_what_was_sent_before_a_goodbye_is_read_however_late(address: str, links: Any) -> None:
    """libzmq drops what a DEALER has not read when the connection ends."""
    low, up = links(Link.bind(address, hello("scheduler"))), links(Link.connect(address, hello("tokenizer")))
    until([low, up], lambda received: all(received))
    (peer,) = low.peers
    low.send(peer, Cancel(1))

    def end() -> None:
        end_sessions([low])
        low.close()

    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(end)
        assert up.socket.poll(30_000)
        time.sleep(0.2)  # it is busy
        assert not ended.done()
        received = until([up], lambda received: len(received[0]) == 2)[0]
        ended.result()
    assert [event for _, event in received] == [Cancel(1), PeerDisconnected(planned=True)]


def test_late_detection_does_not_disconnect_the_new_connection(address: str, links: Any) -> None:
    low = links(Link.bind(address, hello("scheduler")))
    up = links(Link.connect(address, hello("tokenizer")))
    until([low, up], lambda received: all(received))
    low.close()
    again = links(Link.bind(address, hello("scheduler")))
    _, received = until([again, up], lambda received: all(received))  # without detect_disconnects in between
    assert [event for _, event in received] == [PeerDisconnected(), again.own_hello]
    up.detect_disconnects()
    assert list(up.receive()) == []
    assert up.peers


def test_messages_of_one_flush_keep_their_order(address: str, links: Any) -> None:
    low = links(Link.bind(address, hello("scheduler")))
    up = links(Link.connect(address, hello("tokenizer")))
    until([low, up], lambda received: all(received))
    (peer,) = up.peers
    for rid in range(1000):
        up.send(peer, Cancel(rid))
    up.flush()
    received, _ = until([low, up], lambda received: len(received[0]) == 1000)
    assert [message.rid for _, message in received] == list(range(1000))


def test_a_message_that_cannot_be_encoded_is_not_queued(address: str, links: Any) -> None:
    router, dealer = links(Link.bind(address, hello("scheduler"))), links(Link.connect(address, hello("tokenizer")))
    until([router, dealer], lambda received: all(received))
    (peer,) = dealer.peers
    with pytest.raises(OverflowError):
        dealer.send(peer, Cancel(2**70))
    dealer.flush()
    dealer.send(peer, Cancel(1))
    dealer.flush()
    (received, _) = until([router, dealer], lambda received: bool(received[0]))
    assert [message for _, message in received] == [Cancel(1)]


def test_restarted_router_is_a_new_peer_without_old_messages(address: str, links: Any) -> None:
    low = links(Link.bind(address, hello("scheduler")))
    up = links(Link.connect(address, hello("tokenizer")))
    until([low, up], lambda received: all(received))
    (old,) = up.peers
    low.close()
    time.sleep(0.1)
    up.send(old, Cancel(7))
    up.flush()
    low = links(Link.bind(address, hello("scheduler")))
    at_low, at_up = until(
        [low, up], lambda received: bool(received[0]) and any(m == low.own_hello for _, m in received[1])
    )
    assert (old, PeerDisconnected()) in at_up
    assert not any(isinstance(message, Cancel) for _, message in at_low)


def test_restarted_dealer_replaces_its_predecessor(address: str, links: Any) -> None:
    low = links(Link.bind(address, hello("scheduler")))
    first = links(Link.connect(address, hello("worker")))
    until([low, first], lambda received: all(received))
    (old,) = low.peers
    first.close()
    second = links(Link.connect(address, hello("worker")))
    at_low, _ = until([low, second], lambda received: all(received))
    assert [message for _, message in at_low] == [PeerDisconnected(), second.own_hello]
    assert at_low[0][0] == old


def test_a_delayed_hello_does_not_replace_the_successor(address: str, links: Any) -> None:
    """What a process sent just before its end may arrive after the Hello of the one that has replaced it."""
    low = links(Link.bind(address, hello("scheduler")))
    dead = hello("worker")
    successor = links(Link.connect(address, hello("worker")._replace(last_exit=LastExit(dead.boot, "SIGKILL", True))))
    until([low, successor], lambda received: all(received))
    (peer,) = low.peers
    late = links(Link.connect(address, dead))
    until([low, late], lambda received: bool(received[1]))  # it has answered the scheduler's Hello
    successor.send(*successor.peers, Cancel(7))
    successor.flush()
    received, _ = until([low, late], lambda received: any(isinstance(message, Cancel) for _, message in received[0]))
    assert received == [(peer, Cancel(7))]
    assert [*low.peers] == [peer]


def test_failed_send_reports_a_disconnect(address: str, links: Any) -> None:
    low = links(Link.bind(address, hello("scheduler")))
    up = links(Link.connect(address, hello("tokenizer")))
    until([low, up], lambda received: all(received))
    (peer,) = low.peers
    up.close()

    def gone(received: list[list[tuple[PeerId, Any]]]) -> bool:
        low.send(peer, Cancel(1))
        low.flush()
        return bool(received[0])

    assert until([low], gone)[0] == [(peer, PeerDisconnected())]
    assert low.peers == {}


@pytest.mark.parametrize("stranger", [hello("worker", protocol=PROTOCOL + 1), hello("worker", model="b")])
def test_incompatible_peers_are_rejected(address: str, links: Any, stranger: Hello, caplog: Any) -> None:
    low = links(Link.bind(address, hello("scheduler", model="a")))
    up = links(Link.connect(address, stranger))
    end = time.monotonic() + 30
    while "rejected this process" not in caplog.text and time.monotonic() < end:
        for link in (low, up):
            list(link.receive())
        time.sleep(0.002)
    assert "rejected this process" in caplog.text or "rejected worker-0" in caplog.text
    assert low.peers == {}


def test_malformed_frames_are_dropped(address: str, links: Any) -> None:
    low = links(Link.bind(address, hello("scheduler")))
    raw = zmq.Context.instance().socket(zmq.DEALER)
    raw.connect(address)
    for junk in (b"\x00", b"\xc1", b"\x91\x7f", b"\x93\x00\x01", os.urandom(100), b"\x92\x08\xa1x"):
        raw.send(junk)
    up = links(Link.connect(address, hello("tokenizer")))
    at_low, _ = until([low, up], lambda received: all(received))
    assert [message for _, message in at_low] == [up.own_hello]
    raw.close(0)


def test_garbage_collected_link_does_not_block_others(address: str, links: Any, tmp_path: Path) -> None:
    """Even if its socket is still referenced and its monitor is not read."""
    low = Link.bind(f"ipc://{tmp_path}/forgotten", hello("scheduler"))
    up = links(Link.connect(f"ipc://{tmp_path}/forgotten", hello("worker")))
    until([low, up], all)
    socket = low.socket
    del low
    gc.collect()
    up.close()
    until([links(Link.bind(address, hello("scheduler"))), links(Link.connect(address, hello("worker")))], all)
    assert socket.closed


def test_unusable_addresses_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="100"):
        Link.bind(f"ipc://{tmp_path}/{'x' * 120}", hello("scheduler"))
    for address in ("tcp://0.0.0.0:7777", "tcp://127.0.0.1:7777"):
        with pytest.raises(UserError, match="--keys"):
            Link.bind(address, hello("scheduler"))
        with pytest.raises(UserError, match="--keys"):
            Link.connect(address, hello("worker"))


def test_link_that_sends_does_not_lose_the_signal_of_what_has_arrived(address: str, links: Any) -> None:
    """A loop waits for the descriptor, which libzmq resets when a send looks at the socket."""
    low, up = links(Link.bind(address, hello("scheduler"))), links(Link.connect(address, hello("tokenizer")))
    until([low, up], lambda received: all(received))
    (peer,) = low.peers
    assert not low.has_pending_work
    up.send(*up.peers, Cancel(7))
    up.flush()
    assert low.socket.poll(30_000)
    low.send(peer, Cancel(8))
    low.flush()
    assert low.has_pending_work
    assert [message for _, message in low.receive()] == [Cancel(7)]
    assert not low.has_pending_work


def test_a_link_found_quiet_is_asked_again_the_next_time(address: str, links: Any) -> None:
    low, up = links(Link.bind(address, hello("scheduler"))), links(Link.connect(address, hello("tokenizer", 1)))
    until([low, up], lambda received: all(received))
    up.send(next(iter(up.peers)), Cancel(1))
    up.flush()
    assert low.socket.poll(30_000)
    low.found_quiet = True  # as a loop says that had waited before the message came
    assert list(low.receive()) == []
    assert [message for _, message in low.receive()] == [Cancel(1)]
    low.found_quiet = True
    up.close()
    (lost,) = events_after_disconnect(low)
    assert isinstance(lost[1], PeerDisconnected)
