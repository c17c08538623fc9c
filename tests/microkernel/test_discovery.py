"""The processes downstream: links to what is found, a process with two addresses, and names that are resolved."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live.server import free_port
from tests.microkernel.tcp import Deployment, LoopedLink, cable, hello, until
from tgi.microkernel.links import discovery
from tgi.microkernel.links.discovery import Discovery, DownstreamLinks, nth_address
from tgi.microkernel.links.link import Link, ReplicaId


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    made = Deployment(tmp_path / "keys", free_port())
    yield made
    made.close()


class Follower:
    """A tokenizer with the links to what is in `found`."""

    def __init__(self, deployment: Deployment, *found: str) -> None:
        self.found = set(found)
        own_hello = hello("tokenizer", site="there")
        self.links = DownstreamLinks(
            lambda: self.found, lambda address: Link.connect(address, own_hello, deployment.host_keys)
        )
        self.looped: dict[Link, LoopedLink] = {}
        self.follow()

    def follow(self) -> tuple[int, int]:
        added, removed = self.links.follow()
        self.looped |= {link: LoopedLink(link) for link in added}
        for link in removed:
            del self.looped[link]
            link.close()
        return len(added), len(removed)

    def connected(self) -> list[str]:
        return [address for address, link in self.links.links.items() if link.peers]


def test_a_process_with_two_addresses_is_connected_once(deployment: Deployment) -> None:
    addresses = [f"tcp://127.0.0.{host}:{deployment.port}" for host in (1, 2)]
    follower = Follower(deployment, *addresses)
    low = deployment.bind(f"tcp://0.0.0.0:{deployment.port}")
    links = list(follower.links.links.values())
    both = (low, *follower.looped.values())
    assert until(lambda: low.link.peers and any(link.redundant_peer for link in links), *both)
    assert len(follower.connected()) == 1
    assert (low.kinds(), len(low.link.peers)) == (["Hello"], 1)
    assert follower.follow() == (0, 1)
    assert follower.follow() == (0, 0)
    # When the connection is lost, the other address may be the better one.
    low.link.close()
    assert until(lambda: not follower.connected(), *follower.looped.values())
    assert follower.follow() == (1, 0)
    assert set(follower.links.links) == set(addresses)


def test_a_second_address_that_becomes_that_of_another_process_is_used(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "RETRY_SECONDS", 0.0)
    follower = Follower(deployment, deployment.address)
    low = deployment.bind()
    other = deployment.bind(f"tcp://127.0.0.1:{(other_port := free_port())}")
    assert until(follower.connected, low, *follower.looped.values())
    with cable(deployment.port) as line:
        second = f"tcp://127.0.0.1:{line.port}"
        follower.found.add(second)
        for _ in range(2):  # the second time it is tried again
            follower.follow()
            link = follower.links.links[second]
            assert until(lambda link=link: link.redundant_peer, low, *follower.looped.values())
        line.target = other_port
        follower.follow()
        assert until(lambda: len(follower.connected()) == 2, low, other, *follower.looped.values())
        assert follower.follow() == (0, 0)
    assert low.kinds() == ["Hello"]


def test_an_address_that_is_found_no_more_is_kept_while_its_process_is_connected(deployment: Deployment) -> None:
    follower = Follower(deployment, deployment.address, "tcp://127.0.0.3:1")
    low = deployment.bind()
    assert until(follower.connected, low, *follower.looped.values())
    follower.found = set()
    assert follower.follow() == (0, 1)
    assert follower.connected() == [deployment.address]
    low.link.close()
    assert until(lambda: not follower.connected(), *follower.looped.values())
    assert follower.follow() == (0, 1)


def test_a_removed_link_accepts_no_process_that_has_just_connected(deployment: Deployment) -> None:
    follower = Follower(deployment, deployment.address)
    low = deployment.bind()
    (link,) = follower.links.links.values()
    poll_until(link, low)
    follower.found = set()
    _, (removed,) = follower.links.follow()
    assert removed is link
    assert list(link.receive()) == []  # the Hello that has waited
    assert not link.peers
    link.close()


def test_a_process_found_redundant_ends_the_session_with_its_predecessor(deployment: Deployment) -> None:
    """The loss of the predecessor's connection is noticed only when the next Hello has been received."""
    addresses = [f"tcp://127.0.0.{host}:{deployment.port}" for host in (1, 2)]
    follower = Follower(deployment, addresses[0])
    low = deployment.bind(f"tcp://0.0.0.0:{deployment.port}")
    assert until(follower.connected, low, *follower.looped.values())
    (first,) = follower.links.links.values()
    low.link.close()
    low = deployment.bind(f"tcp://0.0.0.0:{deployment.port}")
    follower.found = set(addresses)
    follower.follow()
    second = follower.links.links[addresses[1]]
    assert until(lambda: second.peers, low, follower.looped[second])
    poll_until(first, low)
    assert [type(message).__name__ for _, message in first.receive()] == ["PeerDisconnected"]
    assert (first.redundant_peer, dict(first.peers)) == (*second.peers, {})


def poll_until(link: Link, *others: LoopedLink) -> None:
    """Runs the others until this link has a message, and leaves it there."""
    assert until(lambda: link.socket.poll(0), *others)


def test_expected_addresses_are_kept_until_they_have_been_found(tmp_path: Path) -> None:
    found: set[str] = set()
    expected = [f"ipc://{tmp_path / name}" for name in "ab"]
    links = DownstreamLinks(lambda: found, lambda address: Link.connect(address, hello("tokenizer")), expected)
    assert len(links.follow()[0]) == 2
    found.add(expected[0])
    assert links.follow() == ([], [])
    found.clear()
    _, removed = links.follow()
    assert [link.address for link in removed] == expected[:1]
    for link in (*removed, *links.links.values()):
        link.close()


def test_places_of_one_host_are_numbered_and_those_of_others_differ() -> None:
    assert [ReplicaId("", number).number for number in range(3)] == [0, 1, 2]
    assert len({ReplicaId(site, number).number for site in ("a", "b", "c") for number in range(20)}) == 60
    assert nth_address("tcp://[2001:db8::1]:3100", 2) == "tcp://[2001:db8::1]:3102"


class Resolver:
    """Stands for the resolver of the system: answers a name as the test says."""

    def __init__(self) -> None:
        self.answers: dict[str, list[str] | Exception] = {}
        self.asked = threading.Semaphore(0)

    def __call__(self, name: str, *_: object, **__: object) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        if name == "name":
            self.asked.release()
        answer = self.answers.get(name, socket.gaierror(socket.EAI_NONAME, "unknown"))
        if isinstance(answer, Exception):
            raise answer
        kinds = [(socket.AF_INET6 if ":" in host else socket.AF_INET, host) for host in answer]
        return [(kind, socket.SOCK_STREAM, 6, "", (host, 0)) for kind, host in kinds]


def test_names_are_resolved_again(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    resolver = Resolver()
    monkeypatch.setattr(socket, "getaddrinfo", resolver)
    resolver.answers["not..aname"] = UnicodeError("label empty or too long")  # as the system's
    discovery = Discovery(
        ["tcp://10.0.0.9:1", "tcp://not..aname:1", "tcp://name:3100", "tcp://name:3101"], seconds=0.001
    )

    def after(answer: list[str] | OSError) -> set[str]:
        resolver.answers["name"] = answer
        while resolver.asked.acquire(blocking=False):
            pass
        for _ in range(3):  # the answer of the second question from now on has been taken at the third
            assert resolver.asked.acquire(timeout=60)
        return set(discovery.addresses()) - {"tcp://10.0.0.9:1"}

    two = {f"tcp://10.0.0.{host}:{port}" for host in (1, 2) for port in (3100, 3101)}
    assert after(socket.gaierror(socket.EAI_NONAME, "unknown")) == set()
    assert after(["10.0.0.1", "10.0.0.2", "2001:db8::1", "10.0.0.1"]) == two
    assert after(socket.gaierror(socket.EAI_AGAIN, "try again")) == two  # this says nothing about the addresses
    assert after(["2001:db8::1"]) == {"tcp://[2001:db8::1]:3100", "tcp://[2001:db8::1]:3101"}
    assert after(socket.gaierror(socket.EAI_NONAME, "unknown")) == set()
    discovery.close()
    assert len([record for record in caplog.records if "cannot be resolved" in record.message]) == 4
