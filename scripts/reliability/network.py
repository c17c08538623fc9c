"""An emulated network: hosts with real TCP, joined by a router that delays, loses and drops their packets.

A host is a network namespace with a loopback and a TUN device. The router, a thread of this process, reads the packets
of each device and writes them to that of the receiver when they are due. Namespaces have no names: the kernel removes
them with their last process and file descriptor, also after a test run that was killed.
"""

import contextlib
import ctypes
import errno
import fcntl
import heapq
import os
import random
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

_TUN = Path("/dev/net/tun")
_CLONE_NEWNET = 0x40000000  # from <linux/sched.h>
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # from <linux/if_tun.h>
_SIOCSIFADDR, _SIOCSIFNETMASK, _SIOCSIFFLAGS = 0x8916, 0x891C, 0x8914  # from <linux/sockios.h>
_IFF_UP, _IFF_RUNNING = 0x1, 0x40
_NETWORK, _NETMASK = "10.77.0.{}", "255.255.255.0"
_MAX_PACKET = 65536
_PACKETS_PER_READ = 64  # of one host, before the others have their turn


def missing_here() -> str:
    """Why this machine cannot emulate a network, or "" if it can."""
    if sys.platform != "linux":
        return "network namespaces exist on Linux only"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    return "" if _TUN.exists() else f"there is no {_TUN}"


@dataclass(frozen=True)
class Conditions:
    """What happens to the packets of one direction. Times are seconds. Packets stay in order."""

    delay: float = 0.0
    jitter: float = 0.0  # added to the delay of each packet: up to this much, at random
    loss: float = 0.0  # share of the packets, at random
    cut: bool = False  # all are dropped, also those on their way


class Host:
    """A network namespace with the address `address`, and `lo`."""

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.address = _NETWORK.format(number)
        made: list[int] = []
        _in_thread(lambda: made.extend(self._create()))
        self._namespace, self.device = made

    def __str__(self) -> str:
        return self.name

    def run(self, function: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Calls the function in this namespace: its sockets, and the processes it starts, belong to this host."""

        def call() -> T:
            _check(_libc().setns(self._namespace, _CLONE_NEWNET))
            return function(*arguments, **options)

        return _in_thread(call)

    def close(self) -> None:
        """Gives up the namespace: it ends with its last process."""
        os.close(self.device)
        os.close(self._namespace)

    def _create(self) -> tuple[int, int]:
        """Makes the namespace of this thread. Returns file descriptors of the namespace and of its TUN device."""
        _check(_libc().unshare(_CLONE_NEWNET))
        namespace = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        device = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"net0", _IFF_TUN | _IFF_NO_PI))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            for request, address in ((_SIOCSIFADDR, self.address), (_SIOCSIFNETMASK, _NETMASK)):
                value = struct.pack("16sHH4s16x", b"net0", socket.AF_INET, 0, socket.inet_aton(address))
                fcntl.ioctl(control, request, value)
            for interface in (b"net0", b"lo"):
                fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH22x", interface, _IFF_UP | _IFF_RUNNING))
        return namespace, device


class Network:
    """Hosts and the router between them. Every direction has its Conditions, which may change at any time."""

    def __init__(self, *names: str, seed: int = 0) -> None:
        """Raises OSError where `missing_here` says why."""
        self.hosts = {name: Host(name, number) for number, name in enumerate(names, 1)}
        self.forwarded = self.dropped = 0  # packets
        self._conditions: dict[tuple[bytes, bytes], Conditions] = {}
        self._random = random.Random(seed)
        self._devices = {socket.inet_aton(host.address): host.device for host in self.hosts.values()}
        self._sources = {host.device: socket.inet_aton(host.address) for host in self.hosts.values()}
        # Time of delivery, number of the packet, direction, packet.
        self._on_the_way: list[tuple[float, int, tuple[bytes, bytes], bytes]] = []
        self._numbers = count()
        self._latest: dict[tuple[bytes, bytes], float] = {}  # time of delivery of each direction's latest packet
        self._end, self._end_write = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._route, name="router", daemon=True)
        self._thread.start()

    def __getitem__(self, name: str) -> Host:
        """The host of this name."""
        return self.hosts[name]

    def change(self, source: str, target: str, **conditions: Any) -> None:
        """Changes fields of the Conditions of the packets from one host to another."""
        direction = (socket.inet_aton(self[source].address), socket.inet_aton(self[target].address))
        self._conditions[direction] = replace(self._conditions.get(direction, Conditions()), **conditions)

    def change_between(self, one: str, other: str, **conditions: Any) -> None:
        """`change` in both directions."""
        self.change(one, other, **conditions)
        self.change(other, one, **conditions)

    def reset(self) -> None:
        """No delay, no loss, no cut."""
        self._conditions.clear()

    def __enter__(self) -> "Network":
        return self

    def __exit__(self, *error: object) -> None:
        """Ends the router and gives up the namespaces."""
        os.close(self._end_write)
        self._thread.join()
        os.close(self._end)
        for host in self.hosts.values():
            host.close()

    def _route(self) -> None:
        with select.epoll() as epoll:
            for descriptor in (self._end, *self._sources):
                epoll.register(descriptor, select.EPOLLIN)
            while True:
                due = self._on_the_way[0][0] - time.monotonic() if self._on_the_way else None
                for descriptor, _ in epoll.poll(None if due is None else max(0.0, due)):
                    if descriptor == self._end:
                        return
                    self._receive(descriptor)
                self._deliver()

    def _receive(self, device: int) -> None:
        source, now = self._sources[device], time.monotonic()
        with contextlib.suppress(BlockingIOError):
            for _ in range(_PACKETS_PER_READ):
                packet = os.read(device, _MAX_PACKET)
                if packet[0] >> 4 != 4:  # the neighbour discovery of IPv6
                    continue
                direction = (source, packet[16:20])
                conditions = self._conditions.get(direction, Conditions())
                if conditions.loss and self._random.random() < conditions.loss:
                    self.dropped += 1
                    continue
                due = now + conditions.delay + conditions.jitter * self._random.random()
                self._latest[direction] = due = max(due, self._latest.get(direction, 0.0))
                heapq.heappush(self._on_the_way, (due, next(self._numbers), direction, packet))

    def _deliver(self) -> None:
        while self._on_the_way and self._on_the_way[0][0] <= time.monotonic():
            _, _, direction, packet = heapq.heappop(self._on_the_way)
            device = self._devices.get(direction[1])
            if device is None or self._conditions.get(direction, Conditions()).cut:
                self.dropped += 1
                continue
            try:
                os.write(device, packet)
                self.forwarded += 1
            except OSError as error:
                if error.errno not in (errno.EIO, errno.EAGAIN, errno.ENOBUFS):  # as lost by a host that is busy
                    raise
                self.dropped += 1


def _in_thread(function: Callable[[], T]) -> T:
    """The function's result, from a thread of its own: the namespace of a thread ends with it."""
    result: list[T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            result.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return result[0]


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
