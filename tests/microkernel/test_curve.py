"""Links between hosts: the key files, who is admitted to a TCP listener, and what strangers on its port achieve."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from tests.live.server import free_port
from tests.microkernel.tcp import TIMEOUT_SECONDS, Deployment, LoopedLink, cable, hello, until
from tgi.microkernel.errors import UserError
from tgi.microkernel.links import curve
from tgi.microkernel.links.curve import MAX_STRANGERS
from tgi.microkernel.links.link import Link
from tgi.microkernel.messages.protocol import Cancel, encode
from tgi.microkernel.observability.log import ComplaintLimit

pytestmark = pytest.mark.slow

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01"


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    made = Deployment(tmp_path / "keys", free_port())
    yield made
    made.close()


# --- key files --------------------------------------------------------------------------------------------------------


def test_keys_are_written_for_their_owner_alone(tmp_path: Path) -> None:
    files = curve.create_keys(tmp_path / "new" / "keys")
    assert [file.name for file in files] == ["scheduler.key", "host.key", "tokenizer.key", "api.key"]
    assert [file.stat().st_mode & 0o777 for file in files] == [0o600] * 4
    assert files[0].parent.stat().st_mode & 0o777 == 0o700
    for file in files:
        secret = json.loads(file.read_text())["secret"]
        assert [secret in other.read_text() for other in files] == [file is other for other in files]
    before = [file.read_bytes() for file in files]
    files[0].unlink()
    with pytest.raises(UserError, match="never overwritten"):
        curve.create_keys(tmp_path / "new" / "keys")
    assert files[1].read_bytes() == before[1]
    assert not files[0].exists()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o610])
def test_key_file_that_others_can_access_is_refused(tmp_path: Path, mode: int) -> None:
    scheduler, host, *_ = curve.create_keys(tmp_path / "keys")
    scheduler.chmod(mode)
    host.chmod(mode)
    with pytest.raises(UserError, match="chmod 600"):
        curve.load_scheduler_keys(scheduler)
    with pytest.raises(UserError, match="chmod 600"):
        curve.load_host_keys(host)


def test_wrong_key_files_are_refused_with_advice(tmp_path: Path) -> None:
    scheduler, host, *_ = curve.create_keys(tmp_path / "keys")
    with pytest.raises(UserError, match=r"that of a host; --listen needs that of a scheduler.* scheduler\.key"):
        curve.load_scheduler_keys(host)
    with pytest.raises(UserError, match=r"that of a scheduler; --connect needs that of a host.* host\.key"):
        curve.load_host_keys(scheduler)
    with pytest.raises(UserError, match="tgi keys new"):
        curve.load_host_keys(tmp_path / "absent")
    for content in ("", "[]", "{}", '{"for": "host"}', '{"for": "host", "secret": "x", "scheduler": 7}', "\x00\xff"):
        host.write_text(content)
        with pytest.raises(UserError, match="not one that"):
            curve.load_host_keys(host)


def test_a_directory_stands_for_the_file_that_is_needed(tmp_path: Path) -> None:
    directory = tmp_path / "keys"
    scheduler, host, tokenizer, api = curve.create_keys(directory)
    assert curve.load_scheduler_keys(directory) == curve.load_scheduler_keys(scheduler)
    assert curve.load_tokenizer_keys(directory) == curve.load_tokenizer_keys(tokenizer)
    assert curve.load_api_keys(directory) == curve.load_api_keys(api)
    assert curve.load_host_keys(directory) == curve.load_host_keys(host)
    host.unlink()
    assert curve.load_host_keys(directory) == curve.load_host_keys(tokenizer)
    tokenizer.unlink()
    with pytest.raises(UserError, match=r"host\.key cannot be read"):
        curve.load_host_keys(directory)


def test_each_file_serves_its_purpose_only(tmp_path: Path) -> None:
    scheduler, host, tokenizer, api = curve.create_keys(tmp_path / "keys")
    for load, right in (
        (curve.load_scheduler_keys, (scheduler,)),
        (curve.load_tokenizer_keys, (tokenizer,)),
        (curve.load_host_keys, (host, tokenizer)),
        (curve.load_api_keys, (api,)),
    ):
        for file in (scheduler, host, tokenizer, api):
            if file in right:
                load(file)
            else:
                with pytest.raises(UserError, match=r"is that of a .* needs that of a"):
                    load(file)


def test_files_of_a_deployment_without_tokenizer_keys_serve_as_before(tmp_path: Path) -> None:
    scheduler, host, *_ = curve.create_keys(tmp_path / "keys")
    content = json.loads(scheduler.read_text())
    content["accepted"] = content["accepted"][:1]
    scheduler.write_text(json.dumps(content))
    assert len(curve.load_scheduler_keys(scheduler).accepted) == 1
    assert zmq.curve_public(curve.load_host_keys(host).secret) in curve.load_scheduler_keys(scheduler).accepted


# --- who is admitted --------------------------------------------------------------------------------------------------


def test_peers_with_keys_exchange_messages(deployment: Deployment) -> None:
    low, up = deployment.bind(), deployment.connect(hello("worker"))
    assert until(lambda: low.received and up.received, low, up)
    assert low.received[0][1] == up.link.own_hello
    assert up.received[0][1] == low.link.own_hello
    (peer,) = up.link.peers
    for rid in range(1000):
        up.link.send(peer, Cancel(rid))
    assert until(lambda: len(low.received) == 1001, low, up)
    assert [message.rid for _, message in low.received[1:]] == list(range(1000))


def test_listener_on_all_addresses_knows_to_which_one_peers_have_connected(deployment: Deployment) -> None:
    low = deployment.bind(f"tcp://0.0.0.0:{deployment.port}")
    deployment.address = f"tcp://127.0.0.2:{deployment.port}"
    up = deployment.connect(hello("worker"))
    assert until(lambda: low.link.peers and up.link.peers, low, up)
    assert low.link.local_address(low.link.peers) == "127.0.0.2"
    assert low.link.local_address([]) == ""


def test_ipv6(deployment: Deployment) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this host has no IPv6")
    deployment.address = f"tcp://[::1]:{deployment.port}"
    low, up = deployment.bind(), deployment.connect(hello("worker"))
    assert until(lambda: low.received and up.received, low, up)


def test_processes_of_one_role_on_several_hosts_are_different_peers(deployment: Deployment) -> None:
    low = deployment.bind()
    ups = [deployment.connect(hello("tokenizer", 0, site=site)) for site in ("a", "b")]
    assert until(lambda: len(low.link.peers) == 2 and all(up.link.peers for up in ups), low, *ups)
    successor = deployment.connect(hello("tokenizer", 0, site="a"))
    boots = [up.link.own_hello.boot for up in (ups[1], successor)]
    assert until(lambda: [peer.boot for peer in low.link.peers] == boots, low, successor)


def strangers(deployment: Deployment, tmp_path: Path) -> dict[str, "zmq.Socket[bytes]"]:
    """Sockets that have no keys of this deployment, or not all."""
    foreign = curve.load_host_keys(curve.create_keys(tmp_path / "foreign")[1])
    context = zmq.Context.instance()
    made = {name: context.socket(zmq.DEALER) for name in ("null", "plain", "foreign", "unknown key", "wrong server")}
    made["plain"].plain_username, made["plain"].plain_password = b"admin", b"admin"
    curve.use_connecting_keys(made["foreign"], foreign)
    curve.use_connecting_keys(made["unknown key"], deployment.host_keys._replace(secret=foreign.secret))
    curve.use_connecting_keys(made["wrong server"], deployment.host_keys._replace(server=foreign.server))
    for one in made.values():
        one.probe_router = 1
        one.linger = 0
        one.connect(deployment.address)
        one.send(b"\x91\x00")
    return made


def test_strangers_receive_nothing(deployment: Deployment, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    low = deployment.bind()
    others = strangers(deployment, tmp_path)
    up = deployment.connect(hello("worker"))
    assert until(lambda: up.link.peers, low, up)
    until(lambda: False, low, up, seconds=1.5)
    for name, one in others.items():
        assert not one.poll(0), name
        one.close()
    assert low.kinds() == ["Hello"]
    assert low.link.peers
    assert "its key is unknown" in caplog.text


def test_connecting_side_reports_wrong_keys(
    deployment: Deployment, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    foreign = curve.load_host_keys(curve.create_keys(tmp_path / "foreign")[1])
    low = deployment.bind()
    up = deployment.connect(hello("worker"), keys=foreign)
    assert until(lambda: "keys are those of another deployment" in caplog.text, low, up)
    assert not up.received


@contextlib.contextmanager
def service(port: int, answer: bytes) -> Iterator[list[float]]:
    """Another service at this port: it answers each connection at once, and closes it. Yields the times of these."""
    times: list[float] = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                accepted, _ = listener.accept()
                times.append(time.monotonic())
                accepted.sendall(answer)
                accepted.close()

    listener = socket.create_server(("127.0.0.1", port))
    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield times
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def test_connecting_side_connects_after_another_service_at_that_port_has_ended(
    deployment: Deployment, caplog: pytest.LogCaptureFixture
) -> None:
    with service(deployment.port, b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(200)) as times:
        up = deployment.connect(hello("worker"))
        assert until(lambda: len(times) > 1, up)
    assert "another service listens there" in caplog.text
    low = deployment.bind()
    assert until(lambda: low.link.peers and up.link.peers, low, up)


def test_failed_attempts_to_connect_become_rare(deployment: Deployment) -> None:
    with service(deployment.port, b"") as times:
        up = deployment.connect(hello("worker"))
        assert until(lambda: len(times) > 1 and times[-1] - times[-2] > 2, up)


def test_connecting_side_connects_again_after_damaged_data(
    deployment: Deployment, caplog: pytest.LogCaptureFixture
) -> None:
    low = deployment.bind()
    with cable(deployment.port) as line:
        up = deployment.connect(hello("worker"), port=line.port)
        assert until(lambda: low.link.peers and up.link.peers, low, up)
        line.damages_next = True
        (peer,) = low.link.peers
        low.link.send(peer, Cancel(7))
        assert until(lambda: up.kinds().count("Hello") == 2, low, up)
    assert "has sent damaged data" in caplog.text
    assert up.kinds() == ["Hello", "PeerDisconnected", "Hello"]


def test_an_impostor_of_the_scheduler_gets_nothing(deployment: Deployment, tmp_path: Path) -> None:
    """The holder of a host's file cannot pretend to be the scheduler: it does not contain the scheduler's secret."""
    impostor = deployment.scheduler_keys._replace(secret=deployment.host_keys.secret)
    deployment.scheduler_keys = impostor
    low, up = deployment.bind(), deployment.connect(hello("worker"))
    assert not until(lambda: low.received or up.received, low, up, seconds=1.5)


@pytest.fixture
def tokenizer_keys(deployment: Deployment, tmp_path: Path) -> tuple[curve.ListeningKeys, curve.ConnectingKeys]:
    """Of its tokenizers and front ends."""
    return curve.load_tokenizer_keys(tmp_path / "keys"), curve.load_api_keys(tmp_path / "keys")


Keys = tuple[curve.ListeningKeys, curve.ConnectingKeys]


def test_keys_of_front_ends_open_tokenizers_only(deployment: Deployment, tokenizer_keys: Keys) -> None:
    listening, connecting = tokenizer_keys
    low = LoopedLink(Link.bind(deployment.address, hello("tokenizer"), listening))
    deployment.made.append(low.link)
    front = deployment.connect(hello("api"), keys=connecting)
    assert until(lambda: low.link.peers and front.link.peers, low, front)
    for keys in (deployment.host_keys, deployment.host_keys._replace(server=connecting.server)):
        up = deployment.connect(hello("api"), keys=keys)
        assert not until(lambda up=up: up.link.peers, low, front, up, seconds=1.0)
    low.link.close()
    low, server = deployment.bind(), connecting._replace(server=deployment.host_keys.server)
    up = deployment.connect(hello("tokenizer"), keys=server)
    assert not until(lambda: low.received or up.received, low, up, seconds=1.5)


def test_an_impostor_of_the_tokenizer_gets_nothing(deployment: Deployment, tokenizer_keys: Keys) -> None:
    """Neither a front end's file nor that of a host with a worker contains the tokenizers' secret."""
    listening, connecting = tokenizer_keys
    for secret in (connecting.secret, deployment.host_keys.secret):
        low = LoopedLink(Link.bind(deployment.address, hello("tokenizer"), listening._replace(secret=secret)))
        up = deployment.connect(hello("api"), keys=connecting)
        assert not until(lambda low=low, up=up: low.received or up.received, low, up, seconds=1.0)
        low.link.close()
        up.link.close()


def test_a_front_end_cannot_claim_to_be_a_scheduler(
    deployment: Deployment, tokenizer_keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    listening, connecting = tokenizer_keys
    low = LoopedLink(Link.bind(deployment.address, hello("tokenizer"), listening))
    deployment.made.append(low.link)
    for role in ("scheduler", "tokenizer", "worker", "stream"):
        up = deployment.connect(hello("api"), keys=connecting)
        up.link.own_hello, up.link._incompatibility = hello(role), lambda hello: ""  # type: ignore[method-assign]
        caplog.clear()
        assert until(lambda up=up, role=role: f"{role}-0" in caplog.text, low, up)
        low.link._rejected = ComplaintLimit(0)
    assert not low.received


def test_replayed_connection_is_rejected(deployment: Deployment) -> None:
    """The bytes of a former connection open no new one, since both sides make new keys for each."""
    low = deployment.bind()
    with cable(deployment.port) as tapped:
        up = deployment.connect(hello("worker"), port=tapped.port)
        assert until(lambda: low.received, low, up)
        (peer,) = up.link.peers
        up.link.send(peer, Cancel(7))
        assert until(lambda: len(low.received) == 2, low, up)
        up.link.close()
        until(lambda: not low.link.peers, low)
    low.received.clear()
    with socket.create_connection(("127.0.0.1", deployment.port)) as replay:
        replay.sendall(tapped.sent)
        until(lambda: False, low, seconds=1.0)
    assert not low.received


def test_connection_is_encrypted(deployment: Deployment) -> None:
    low = deployment.bind()
    with cable(deployment.port) as tapped:
        up = deployment.connect(hello("worker", model="a secret model"), port=tapped.port)
        assert until(lambda: low.received, low, up)
        assert low.received[0][1].model == "a secret model"
        assert b"secret" not in tapped.sent
        assert b"worker" not in tapped.sent


# --- lost connections -------------------------------------------------------------------------------------------------


def test_disconnect_names_the_peer(deployment: Deployment) -> None:
    low = deployment.bind()
    ups = [deployment.connect(hello("tokenizer", replica)) for replica in range(3)]
    assert until(lambda: len(low.received) == 3, low, *ups)
    low.received.clear()
    ups[1].link.close()
    assert until(lambda: low.received, low)
    assert [(peer.replica, type(event).__name__) for peer, event in low.received] == [(1, "PeerDisconnected")]
    assert len(low.link.peers) == 2


def test_cut_cable_is_noticed_by_both_sides_and_replaced(deployment: Deployment) -> None:
    """Half-open connections: no end of the connection is closed when the cable is pulled."""
    low = deployment.bind()
    with cable(deployment.port) as line:
        up = deployment.connect(hello("worker"), port=line.port)
        assert until(lambda: low.link.peers and up.link.peers, low, up)
        began = time.monotonic()
        line.is_cut = True
        assert until(lambda: not low.link.peers and not up.link.peers, low, up)
        print(f"noticed after {time.monotonic() - began:.1f} s")
        line.is_cut = False
        assert until(lambda: low.link.peers and up.link.peers, low, up)
    assert low.kinds()[:3] == up.kinds()[:3] == ["Hello", "PeerDisconnected", "Hello"]


# --- hostile bytes ----------------------------------------------------------------------------------------------------


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def exchanges(low: LoopedLink, up: LoopedLink) -> None:
    """A message of a peer still arrives."""
    (peer,) = up.link.peers
    before = [message for _, message in low.received].count(Cancel(7))
    up.link.send(peer, Cancel(7))
    assert until(lambda: [message for _, message in low.received].count(Cancel(7)) == before + 1, low, up)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts descriptors in /proc")
def test_a_peer_that_leaves_with_a_full_queue_ends_no_listener(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.microkernel.full_queue", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    assert ended.returncode == 0, ended.stderr


def test_flood_of_connections_is_bounded_and_disturbs_no_peer(deployment: Deployment) -> None:
    low, up = deployment.bind(), deployment.connect(hello("worker"))
    assert until(lambda: low.link.peers and up.link.peers, low, up)
    before = descriptors()
    attackers: list[socket.socket] = []
    most = 0
    for _ in range(600):
        one = socket.socket()
        one.setblocking(False)
        one.connect_ex(("127.0.0.1", deployment.port))
        attackers.append(one)
        low.turn()
        up.turn()
        most = max(most, descriptors() - before - len(attackers))
    assert most <= 2 * MAX_STRANGERS
    exchanges(low, up)
    for one in attackers:
        one.close()
    assert up.kinds() == ["Hello"]
    late = deployment.connect(hello("tokenizer"))
    assert until(lambda: late.link.peers, low, up, late)
    exchanges(low, up)


def test_silent_strangers_are_disconnected(deployment: Deployment) -> None:
    low, up = deployment.bind(), deployment.connect(hello("worker"))
    assert until(lambda: low.link.peers and up.link.peers, low, up)
    silent = [socket.create_connection(("127.0.0.1", deployment.port)) for _ in range(5)]
    silent[1].send(GREETING[:5])
    silent[2].send(GREETING)
    guard = low.link._guard
    assert guard is not None
    assert until(lambda: len(guard.connections) == 6, low, up)
    assert until(lambda: len(guard.connections) == 1, low, up)
    for one in silent:
        one.close()
    exchanges(low, up)


@pytest.mark.parametrize("over", ["ipc", "tcp"])
def test_identity_cannot_be_taken_over(deployment: Deployment, tmp_path: Path, over: str) -> None:
    """The routing id that a peer states, its own or that of a connection of another, gets it nothing."""
    if over == "ipc":
        address = f"ipc://{tmp_path}/link"
        low, up = LoopedLink(Link.bind(address, hello("scheduler"))), LoopedLink(Link.connect(address, hello("worker")))
        deployment.made += [low.link, up.link]
    else:
        address, low, up = deployment.address, deployment.bind(), deployment.connect(hello("worker"))
    assert until(lambda: low.link.peers and up.link.peers, low, up)
    (target,) = low.link.peers
    thieves = []
    for identity in (low.link._routes[target], f"worker-0-{target.boot.hex()}".encode()):
        thief = zmq.Context.instance().socket(zmq.DEALER)
        if over == "tcp":
            curve.use_connecting_keys(thief, deployment.host_keys)
        thief.linger = 0
        with contextlib.suppress(zmq.ZMQError):  # libzmq refuses ids that begin with a zero byte
            thief.routing_id = identity
        thief.connect(address)
        thief.send(encode(Cancel(666)))
        thieves.append(thief)
    until(lambda: False, low, up, seconds=0.5)
    for rid in range(10):
        low.link.send(target, Cancel(rid))
    assert until(lambda: len(up.received) == 11, low, up)
    assert low.kinds() == ["Hello"]
    for thief in thieves:
        assert not thief.poll(0)
        thief.close()
